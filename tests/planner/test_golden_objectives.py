"""Explanations, objectives, robust plans, replans and comparisons of small problems against golden files.

As `test_golden_plans.py` has the answers themselves. `make golden` rewrites the files: read the diff.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from pplan.planner.device_loss import replan_problem
from pplan.planner.explanation.compare import compare_plans
from pplan.planner.explanation.explain_context import make_context
from pplan.planner.explanation.explain_options import ExplainOptions
from pplan.planner.explanation.explanation import explain_plan
from pplan.planner.joint_search import find_best_plan
from pplan.planner.objectives.frontier import build_frontier
from pplan.planner.objectives.objective import Objective
from pplan.planner.objectives.solve_objective import optimize, solve_objective
from pplan.planner.plan_document import plan_without_comparison
from pplan.planner.plan_file import Plan
from pplan.planner.plan_records import ProfileReference
from pplan.planner.problem import Problem
from pplan.planner.search.budget import WORK_A_SECOND, SearchBudget

Cases = Mapping[str, Any]
Golden = Callable[[str, str], None]
AsText = Callable[[object], str]
REFERENCE = ProfileReference(file="toy.profile.json", sha256="0" * 64)
SHOWN = (
    *("balance", "schedule", "micro_batches", "micro_batch_size", "recompute", "stages", "prediction"),
    *("objective", "baselines", "alternatives", "searched", "warnings", "notes", "default_mini_batch"),
)
"""Of a plan."""


@pytest.fixture(autouse=True)
def counted_work_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine's seconds would end a search otherwise."""
    monkeypatch.setattr(SearchBudget, "of_seconds", lambda seconds: SearchBudget(seconds * WORK_A_SECOND))


def file_name(*words: str) -> str:
    return "_".join(words).replace(" ", "_").replace("'", "")


def solved(problem: Problem) -> Plan:
    answer = find_best_plan(problem)
    assert answer.best is not None
    return plan_without_comparison(problem, answer.best, answer.result, model="toy", profile=REFERENCE)


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("small nodes", ExplainOptions()),
        pytest.param("small memory", ExplainOptions(current=(3, 2)), marks=pytest.mark.slow),
        ("small and launched", ExplainOptions(current=(2, 2), micro_batches=4, schedule="gpipe")),
        ("small and tied", ExplainOptions(current=(4,), replicas=2)),
    ],
)
def test_explanations(
    name: str, split: ExplainOptions, cases: Cases, golden: Golden, as_text: AsText
) -> None:
    problem = cases[name].problem()
    plan = solved(problem)
    shares: list[float] = []
    explanation = explain_plan(plan, problem.chain, problem.topology, options=split, progress=shares.append)
    shown = explanation.model_dump(exclude={"made_by"})
    golden(f"planner/explain/{file_name(name)}.txt", as_text({**shown, "progress": shares}))


@pytest.mark.parametrize("name", ["small nodes", "small kinds", "one device"])
def test_comparisons(name: str, cases: Cases, golden: Golden, as_text: AsText) -> None:
    """With every planner, what is no plan of pplan, and energy."""
    problem = cases[name].problem()
    plan = solved(problem)
    watts = {kind.name: (300.0, 50.0) for kind in problem.topology.kinds}
    context = make_context(plan, problem.chain, problem.topology)
    other = replace(problem, options=replace(problem.options, recompute="always", schedule="gpipe"))
    compared = compare_plans([("own", plan), ("other", solved(other))], context, watts)
    golden(f"planner/compare/{file_name(name)}.txt", as_text(compared.model_dump(exclude={"made_by"})))


OBJECTIVES = {
    "memory": Objective("memory", slack=0.3),
    "throughput": Objective("throughput"),
    "cost": Objective("cost", prices={"toy": 2.0, "slow": 0.7}),
}


@pytest.mark.parametrize(
    ("name", "objective"),
    [
        *(("small nodes", own) for own in OBJECTIVES),
        *(("small memory", own) for own in OBJECTIVES),
        *(("small kinds", own) for own in ("throughput", "cost")),
        *(("fast links", own) for own in ("throughput", "cost")),
        ("all devices", "throughput"),
    ],
)
def test_objectives(name: str, objective: str, cases: Cases, golden: Golden, as_text: AsText) -> None:
    problem = cases[name].problem()
    aim = OBJECTIVES[objective]
    if objective == "cost" and problem.topology.kinds[-1].name == "toy":
        aim = Objective("cost", prices={"toy": 2.0})
    plan = solve_objective(aim, problem, model="toy", profile=REFERENCE, compared=name == "small nodes")
    outcome = optimize(aim, problem)
    content = {**plan.model_dump(include=set(SHOWN)), "outcome": [outcome.aim, *outcome.notes]}
    golden(f"planner/objectives/{file_name(name, objective)}.txt", as_text(content))


@pytest.mark.parametrize("name", ["small memory", "small nodes"])
def test_frontiers(name: str, cases: Cases, golden: Golden, as_text: AsText) -> None:
    frontier = build_frontier(cases[name].problem(), model="toy", profile=REFERENCE, points=6)
    rows = [
        [point.plan.prediction.step_seconds, point.plan.balance, point.plan.schedule, point.plan.recompute]
        for point in frontier.points
    ]
    content = {"points": rows, "complete": frontier.complete, "warnings": frontier.warnings}
    golden(f"planner/objectives/{file_name(name, 'frontier')}.txt", as_text(content))


@pytest.mark.parametrize("slow", [None, (0.1, 1.7)])
@pytest.mark.parametrize("name", ["small nodes", "two devices"])
def test_robust_plans(
    name: str, slow: tuple[float, float] | None, cases: Cases, golden: Golden, as_text: AsText
) -> None:
    problem = replace(cases[name], spread=0.4).problem(robust=True, slow_devices=slow)
    plan = solve_objective(Objective("step-time"), problem, model="toy", profile=REFERENCE, compared=False)
    content = plan.model_dump(include={*SHOWN} - {"stages"})
    golden(
        f"planner/objectives/{file_name(name, 'robust' if slow is None else 'slow')}.txt", as_text(content)
    )


@pytest.mark.parametrize("batch", [None, 6])
def test_the_global_batch(batch: int | None, cases: Cases, golden: Golden, as_text: AsText) -> None:
    """What half and twice of the default one would give."""
    problem = replace(cases["two devices"].problem(), samples_per_device=4)
    problem = replace(problem, options=replace(problem.options, mini_batch=batch))
    plan = solve_objective(Objective("step-time"), problem, model="toy", profile=REFERENCE)
    golden(f"planner/objectives/batch_{batch}.txt", as_text(plan.model_dump(include=set(SHOWN))))


@pytest.mark.parametrize(
    ("name", "lost", "within"),
    [
        ("two nodes", [1], 0.05),
        ("two nodes", [0, 3], 0.5),
        ("small kinds", [2], 0.2),
        ("all devices", [0], 0.3),
        ("gradients add up", [1], 0.3),
    ],
)
def test_replans(
    name: str,
    lost: list[int],
    within: float,
    cases: Cases,
    golden: Golden,
    as_text: AsText,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where all are looked at, and where only those near the plan are."""
    problem = cases[name].problem()
    present = find_best_plan(problem).best
    assert present is not None
    answers = [replan_problem(problem, present, lost, within)]
    monkeypatch.setattr("pplan.planner.device_loss.MOST_SHAPES", 30)
    answers.append(replan_problem(problem, present, lost, within))
    content = {
        "before": present,
        "answers": answers,
        "bytes": [[own.moved_bytes, own.checkpoint_bytes] for own in answers],
    }
    golden(f"planner/replan/{file_name(name, *map(str, lost))}.txt", as_text(content))
