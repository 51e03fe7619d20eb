"""Small problems under the limits of large ones, against golden files, and what is proven against the truth.

Beyond so many devices, cuts or plans a search looks at a part of what there is. Here every such limit of the
planner is low at once, so that small problems meet all of them; no bound may then be above the best plan that
there is. `make golden` rewrites the files: read the diff.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

import pplan.planner
from pplan.planner.candidate import ScoredPlan
from pplan.planner.explanation.explanation import explain_plan
from pplan.planner.joint_search import find_best_plan
from pplan.planner.objectives.objective import Objective
from pplan.planner.objectives.solve_objective import optimize
from pplan.planner.plan_document import plan_without_comparison
from pplan.planner.plan_records import TIE, ProfileReference
from pplan.planner.planners import ALWAYS, PLANNERS
from pplan.planner.problem import Problem
from pplan.planner.search.budget import WORK_A_SECOND, SearchBudget

Cases = Mapping[str, Any]
Golden = Callable[[str, str], None]
AsText = Callable[[object], str]
LIMIT = re.compile(
    r"(MOST_(?!MICRO_BATCHES|SECONDS|TOTAL_BYTES|MINI_BATCH)|EVERY|FEW|MANY|SMALL|LEADING|SHAPES|COARSE|RUNS)[A-Z_]*"
)
NO_LIMITS = {
    "pipeline_config",
    "plan_options",
    "problem_grid",
    "deepspeed_partition",
    "plan_file",
    "layout",
} | {
    "asynchronous",
    "relaxed_stages",
}
"""Modules whose limits are of what may be asked, of a formula, or large against each other."""
NAMES = (
    *("two nodes", "two kinds", "few cuts", "little memory", "a pinned layer", "weight of both ends"),
    *("zb-h1", "interleaved", "any schedule"),
)


def limits() -> Iterator[tuple[ModuleType, str, float]]:
    for own in pkgutil.walk_packages(pplan.planner.__path__, "pplan.planner."):
        module = importlib.import_module(own.name)
        for name, value in vars(module).items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if LIMIT.fullmatch(name) and is_number and own.name.rpartition(".")[2] not in NO_LIMITS:
                yield module, name, value


@pytest.fixture
def low_limits(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes each at most so large."""

    def lower(most: int) -> None:
        for module, name, value in list(limits()):
            if value > most:
                monkeypatch.setattr(module, name, type(value)(most))

    return lower


def line(plan: ScoredPlan | str | None) -> str:
    if plan is None or isinstance(plan, str):
        return str(plan)
    own = plan.proposal
    return f"{plan.step_seconds:.7g} s, {own.config}, {own.ends}, {own.devices}, {' '.join(plan.recompute)}"


@pytest.mark.parametrize(
    ("name", "most"), [*((name, 2) for name in NAMES), ("two nodes", 1), ("few cuts", 4), ("two kinds", 4)]
)
def test_answers(
    name: str, most: int, cases: Cases, golden: Golden, as_text: AsText, low_limits: Callable[[int], None]
) -> None:
    problem: Problem = cases[name].problem(time_limit=0.05)
    truth = find_best_plan(cases[name].problem())
    assert truth.best is not None
    low_limits(most)
    planners = PLANNERS if name == "two nodes" else ALWAYS
    answer = find_best_plan(problem, planners)
    assert answer.best is not None
    assert answer.best.step_seconds >= truth.result.bound_seconds * (1 - TIE)
    if set(problem.allowed_schedules) <= {"1f1b", "gpipe"}:
        assert answer.result.bound_seconds <= truth.best.step_seconds * (1 + TIE)
    result = answer.result
    rows = {
        "best": line(answer.best),
        "bounds": [result.bound_seconds, result.root_bound_seconds, result.other_bound, result.universal],
        "by planner": {planner: line(own) for planner, own in answer.by_planner.items()},
        "others": [line(own) for own in result.other_plans],
    }
    golden(f"planner/limits/{name.replace(' ', '_')}_{most}.txt", as_text(rows))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["small nodes", "small kinds", "small memory"])
def test_what_follows_from_answers(
    name: str,
    cases: Cases,
    golden: Golden,
    as_text: AsText,
    low_limits: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Explanations, objectives and robust plans."""
    monkeypatch.setattr(SearchBudget, "of_seconds", lambda seconds: SearchBudget(seconds * WORK_A_SECOND))
    problem: Problem = replace(cases[name], spread=0.3).problem()
    answer = find_best_plan(problem)
    assert answer.best is not None
    reference = ProfileReference(file="toy.profile.json", sha256="0" * 64)
    plan = plan_without_comparison(problem, answer.best, answer.result, model="toy", profile=reference)
    low_limits(2)
    rows: dict[str, object] = {}
    explanation = explain_plan(plan, problem.chain, problem.topology)
    rows["explanation"] = explanation.model_dump(exclude={"made_by", "model"})
    prices = {kind.name: 2.0 - 0.5 * number for number, kind in enumerate(problem.topology.kinds)}
    for aim in (Objective("throughput"), Objective("cost", prices=prices)):
        outcome = optimize(aim, problem)
        rows[aim.name] = [line(outcome.best), outcome.aim, outcome.result.bound_seconds]
    robust = replace(problem, options=replace(problem.options, robust=True))
    rows["robust"] = [line(optimize(Objective("step-time"), robust).best)]
    golden(f"planner/limits/after_{name.replace(' ', '_')}.txt", as_text(rows))
