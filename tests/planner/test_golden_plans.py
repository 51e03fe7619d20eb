"""What the planner answers of small problems, and at what expense, against golden files.

A search that finds a slower plan, proves less, asks planners for other plans, takes more work or says it in
other words breaks no rule that other tests know: here it is seen. `make golden` rewrites the files: read the
diff.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any

import pytest

from pplan.cost_models.errors import FileError, InfeasibleError
from pplan.planner.build_plan import build_plan
from pplan.planner.candidate import Proposal, ScoredPlan
from pplan.planner.infeasible import no_plan_fits
from pplan.planner.joint_search import find_best_plan
from pplan.planner.plan_file import Plan
from pplan.planner.plan_records import ProfileReference
from pplan.planner.planners import PLANNERS
from pplan.planner.planners.base import refusal_reason
from pplan.planner.problem import Problem
from pplan.planner.universal_bound import universal_bound, work_bound

Cases = Mapping[str, Any]
Golden = Callable[[str, str], None]
AsText = Callable[[object], str]
REFERENCE = ProfileReference(file="toy.profile.json", sha256="0" * 64)
LEFT_OUT = {"options", "made_by", "profile", "layer_names", "machine", "order", "model"}
"""Of a plan: what was asked for, and what is told elsewhere."""
WORK = 1e15
"""That a case may spend."""


def plan_line(plan: ScoredPlan | str) -> str:
    if isinstance(plan, str):
        return plan
    own = plan.proposal
    modes = "" if set(plan.recompute) == {"never"} else f", {' '.join(plan.recompute)}"
    return f"{plan.step_seconds:.7g} s, {proposal_line(own)}{modes}"


def proposal_line(own: Proposal) -> str:
    devices = " ".join(",".join(map(str, ranks)) for ranks in own.devices)
    estimate = "" if own.estimate_seconds is None else f", estimated {own.estimate_seconds:.7g} s"
    return f"{own.config}, ends {' '.join(map(str, own.ends))}, devices {devices}{estimate}"


def test_answers(case_name: str, cases: Cases, golden: Golden, as_text: AsText) -> None:
    problem: Problem = cases[case_name].problem()
    answer = find_best_plan(problem)
    result = answer.result
    reference = REFERENCE.model_copy(update={"dtype": problem.dtype})
    plan = build_plan(problem, answer, model="toy", profile=reference)
    content = {
        "plan": plan.model_dump(exclude=LEFT_OUT),
        "by planner": {name: plan_line(own) for name, own in answer.by_planner.items()},
        "bounds": [result.bound_seconds, result.root_bound_seconds, result.other_bound, result.universal],
        "others": [plan_line(own) for own in result.other_plans],
        "universal bounds": universal_bounds(problem, result.bound_seconds),
    }
    golden(f"planner/{file_name(case_name)}.txt", as_text(content))


def universal_bounds(problem: Problem, step: float) -> list[float]:
    """Of all schedules, without a step that is known and below a longer one, and on the work alone."""
    names = problem.allowed_schedules
    return [universal_bound(problem, names), universal_bound(problem, names, 2 * step), work_bound(problem)]


def file_name(case_name: str) -> str:
    return case_name.replace(" ", "_").replace("'", "")


def test_proposals(case_name: str, cases: Cases, golden: Golden) -> None:
    """Of every planner: how many, the first and the last, and all of them as a hash."""
    problem: Problem = cases[case_name].problem()
    lines = []
    for name, planner in PLANNERS.items():
        own = [proposal_line(proposal) for proposal in planner.propose(problem)]
        if not own:
            lines.append(f"{name}: {refusal_reason(planner, problem)}")
            continue
        digest = sha256("\n".join(own).encode()).hexdigest()[:12]
        lines += [f"{name}: {len(own)}, {digest}", f"  {own[0]}", f"  {own[-1]}"]
    golden(f"planner/proposals/{file_name(case_name)}.txt", "\n".join(lines))


NOTHING_FITS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "no recomputing": {"recompute": "never"},
    "adam in few micro-batches": {"micro_batches": 2, "optimizer": "adam"},
    "gpipe": {"schedule": "gpipe"},
    "one stage": {"max_stages": 1},
    "pins": {"pins": (("layer5", 0),), "use_all": True},
    "torchgpipe": {"runtime": "torchgpipe"},
    "dapple": {"planner": "dapple"},
    "interleaved": {"schedule": "interleaved"},
    "any": {"schedule": "any", "micro_batches": 4},
    "a limit": {"memory_limit": 250.0, "optimizer": "adam"},
}


@pytest.mark.parametrize("name", NOTHING_FITS)
def test_words_where_nothing_fits(name: str, cases: Cases, golden: Golden, as_text: AsText) -> None:
    """What is missing of which stage, and what would make it fit."""
    memory = 10**6 if "memory_limit" in NOTHING_FITS[name] else 330
    case = cases["little memory"]
    problem = type(case)(11, 6, 2, {"mini_batch": 8}, {"memory": memory}).problem(**NOTHING_FITS[name])
    error = no_plan_fits(problem)
    assert isinstance(error, InfeasibleError)
    content = {"what": error.what, "hint": error.hint, "details": error.details}
    golden(f"planner/infeasible/{file_name(name)}.txt", as_text(content))


FILES = (
    *(
        "",
        "[]",
        "{}",
        "1",
        "null",
        "{",
        '{"schema": 1}',
        '{"schema": 99}',
        '{"schema": "1"}',
        '{"schema": 0}',
    ),
    *(
        '{"schema": 1, "layers": []}',
        '{"schema": 1, "rows": []}',
        "[" * 200_000,
        '{"schema": 1' + "0" * 5000 + "}",
    ),
    *(
        '{"schema": 1, "model": "x", "balance": []}',
        '{"schema": 1, "model": 5, "balance": ["x"], "stages": 1}',
    ),
)


def test_words_of_files_that_are_no_plans(golden: Golden, as_text: AsText) -> None:
    rows = {}
    for number, text in enumerate(FILES):
        with pytest.raises(FileError) as caught:
            Plan.parse(text, "a.plan.json")
        rows[f"{number} {text[:30]}"] = str(caught.value).replace("\n", " | ")
    golden("planner/files.txt", as_text(rows))
