"""From a problem and an objective to a plan, with answers that are written down here: who is asked, with what
global batch, and what is said."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pplan.cost_models.errors import UsageError
from pplan.cost_models.layer import Chain
from pplan.cost_models.topology import Topology
from pplan.planner.candidate import PipelineConfig, Proposal, ScoredPlan
from pplan.planner.objectives import solve_objective as solving
from pplan.planner.objectives.solve_objective import (
    _note,
    _robust_aim,
    optimize,
    step_time,
)
from pplan.planner.plan_options import PlanOptions
from pplan.planner.problem import Problem

MakeChain = Callable[..., Chain]
MakeTopology = Callable[..., Topology]
MakeProblem = Callable[..., Problem]
Patch = pytest.MonkeyPatch


@pytest.fixture
def small_problem(make_chain: MakeChain, make_topology: MakeTopology) -> MakeProblem:
    """A function of **options: six layers, two devices."""

    def make(gpus: int = 2, **options: Any) -> Problem:
        return Problem(make_chain(1, 6), make_topology(gpus), PlanOptions(**{"mini_batch": 8, **options}))

    return make


def plan(seconds: float = 2.0) -> ScoredPlan:
    return ScoredPlan(Proposal(PipelineConfig("1f1b", "never", 4, 2), (6,), ((0,),)), ("never",), seconds)


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("step-time", ("step_time",)),
        ("throughput", ("throughput",)),
        ("memory", ("least_memory", 0.25)),
        ("cost", ("least_cost", {"toy": 1.0})),
    ],
)
def test_who_is_asked(
    name: str, asked: tuple[Any, ...], small_problem: MakeProblem, monkeypatch: Patch
) -> None:
    for function in ("step_time", "throughput", "least_memory", "least_cost"):
        module = "solve_objective" if function == "step_time" else function
        monkeypatch.setattr(
            f"pplan.planner.objectives.{module}.{function}",
            lambda _, *more, function=function: (function, *more),
        )
    own: Any = SimpleNamespace(name=name, slack=0.25, prices={"toy": 1.0})

    def answer(**options: Any) -> Any:
        return optimize(own, small_problem(**options))

    assert answer() == asked
    if name != "step-time":
        with pytest.raises(UsageError, match=f"`robust` with objective='{name}'"):
            answer(robust=True)
    else:
        assert answer(robust=True) == asked
    if name == "throughput":
        with pytest.raises(UsageError, match="recompute='first_layers' with objective='throughput'"):
            answer(recompute="first_layers")
    else:
        assert answer(recompute="first_layers") == asked


def test_plans_that_suit_draws_of_the_seconds(small_problem: MakeProblem, monkeypatch: Patch) -> None:
    """The fastest, without asking for another; else what was chosen, with what holds for it."""
    checked, answer = list[bool](), SimpleNamespace(best=plan(), result="result")
    robust = SimpleNamespace(plan=plan(3.0))
    monkeypatch.setattr("pplan.planner.robust.check_known", lambda _: checked.append(True))
    monkeypatch.setattr(solving, "find_best_plan", lambda _: answer)
    monkeypatch.setattr("pplan.planner.robust.most_robust", lambda *_: robust)
    monkeypatch.setattr(solving, "with_bound", lambda _, best, result: (best, result))
    monkeypatch.setattr(solving, "_note", lambda _, own, fastest: f"{own.plan.step_seconds} {fastest}")
    monkeypatch.setattr(solving, "_robust_aim", lambda *_: "aim")
    own: Any = step_time(small_problem())
    assert (own.result, own.answer, own.aim, own.notes) == ("result", answer, None, ())
    assert checked == []
    own = step_time(small_problem(robust=True))
    assert (own.result, own.answer, own.aim, own.notes) == (
        (plan(3.0), "result"),
        answer,
        "aim",
        ("3.0 2.0",),
    )
    assert checked == [True]
    answer.best = None
    own = step_time(small_problem(robust=True))
    assert (own.result, own.aim, own.notes) == ("result", None, ())


def test_what_is_said_of_a_robust_plan(small_problem: MakeProblem) -> None:
    """Its 90th percentile, or over slow devices its mean; and the same of the fastest plan."""
    steps = SimpleNamespace(high_seconds=3.0, mean_seconds=2.5)
    others = SimpleNamespace(high_seconds=4.0, mean_seconds=3.5)
    robust: Any = SimpleNamespace(compared=7, steps=steps, fastest_steps=others, is_fastest=False)
    varied, slow = small_problem(robust=True), small_problem(slow_devices=(0.05, 1.5))
    aim = _robust_aim(varied, robust)
    assert (aim.name, aim.value, aim.unit, aim.lower_bound, aim.exact) == (
        "robust",
        3.0,
        "seconds",
        0.0,
        False,
    )
    aim = _robust_aim(slow, robust)
    assert (aim.name, aim.value, aim.exact) == ("slow-devices", 2.5, False)
    assert "each device, with a probability of 5 %, takes 1.5 times as long" in (aim.detail or "")
    compared = "compared at the 90th percentile of their step: 7 plans"
    found = "the one that the search for the fastest found (2.00 s)"
    assert _note(varied, robust, 2.0) == f"{compared}; this one has 3.00 s, {found} 4.00 s"
    means = "2.50 s (90th percentile 3.00 s)", "3.50 s (90th percentile 4.00 s)"
    assert _note(slow, robust, 2.0) == (
        f"compared by the mean of their step: 7 plans; this one has {means[0]}, {found} {means[1]}"
    )
    robust.is_fastest, robust.compared = True, 1
    assert _note(varied, robust, 2.0) == (
        "compared at the 90th percentile of their step: 1 plan; "
        "the fastest plan is also the best of these, with 4.00 s"
    )
