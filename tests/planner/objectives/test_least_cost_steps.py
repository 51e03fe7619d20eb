"""The steps to the cheapest training, by hand: which numbers of devices are looked at, what their plans cost,
and what is proven."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from pplan.cost_models.errors import DefectError
from pplan.cost_models.topology import Device, Group, Topology
from pplan.planner.candidate import PipelineConfig, Proposal, ScoredPlan
from pplan.planner.objectives import least_cost as module
from pplan.planner.objectives.least_cost import HOUR, _CostSearch
from pplan.planner.problem import Problem
from pplan.planner.search.budget import SearchBudget
from pplan.planner.search.placements import EVERY_COUNT

MakeProblem = Callable[..., Problem]
Patch = pytest.MonkeyPatch


def plan(seconds: float, *ranks: int) -> ScoredPlan:
    proposal = Proposal(PipelineConfig("1f1b", "by_stage", 4, 1), (4,), (ranks,))
    return ScoredPlan(proposal, ("never",), seconds)


def search(problem: Any, hourly: list[float], result: Any = None) -> Any:
    return _CostSearch(problem, hourly, SimpleNamespace(result=result))  # type: ignore[arg-type]


def test_numbers_of_devices(make_problem: MakeProblem) -> None:
    """All of them first; every number where there are few; of many powers of two and whole nodes, and a bound
    on the others."""
    assert list(search(make_problem(1, 4, 3), [1.0] * 3)._counts()) == [3, 1, 2]
    assert list(search(make_problem(1, 4, 3, use_all=True), [1.0] * 3)._counts()) == [3]
    gpus = EVERY_COUNT + 12
    topology = SimpleNamespace(gpus_per_node=5)
    options, budget = SimpleNamespace(use_all=False), SearchBudget()
    many: Any = SimpleNamespace(gpus=gpus, topology=topology, options=options, budget=budget)
    own = search(many, [1.0] * gpus)
    bounded = list[int]()
    own._bound = lambda count, step: bounded.append(count) if step == -count else None
    own._with, own._least_step = lambda count: count, lambda count: -count
    counts = list(own._counts())
    kept = [n for n in range(1, gpus) if n <= EVERY_COUNT or n & (n - 1) == 0 or n % 5 == 0]
    assert counts == [gpus, *kept]
    assert bounded == [n for n in range(1, gpus) if n not in kept]
    assert bounded
    many.budget = SearchBudget(seconds=0.0)
    assert list(own._counts()) == [gpus, *range(1, gpus)]
    own.best = own.cost = 0.0  # whatever it is: after the time one bound is for all
    own._work_cost = lambda: -1.0
    own.problem.topology.kinds = (None,)
    own.run()
    assert own.bound == -1.0


def test_a_number_of_devices_is_searched_where_it_may_be_cheaper(
    make_problem: MakeProblem, monkeypatch: Patch
) -> None:
    problem = make_problem(1, 4, 3)
    asked = list[Any]()

    def again(own: Problem, seeds: Any) -> Any:
        asked.append((own.gpus, own.options.mini_batch, seeds))
        return SimpleNamespace(best=plan(1000.0, 0), bound_seconds=900.0)

    monkeypatch.setattr(module, "search_again", again)
    monkeypatch.setattr(module, "universal_bound", lambda own, _: 3600.0 / own.gpus)
    monkeypatch.setattr(module, "_inside", lambda seeds, count: (seeds, count))
    whole = SimpleNamespace(best=plan(1800.0, 0, 1, 2), bound_seconds=1700.0)
    own = search(problem, [1.0] * 3, whole)
    own._look(3)
    assert (own.best, asked) == (whole.best, [])
    assert own.cost == pytest.approx(1.5 / 4)
    assert own.bound == pytest.approx(3 * 1700.0 / HOUR / 4)
    # On one or two devices no plan is known to cost less than a dollar.
    own._look(2)
    assert asked.pop() == (2, problem.mini_batch, ([whole.best], 2))
    assert own.best == plan(1000.0, 0)
    assert own.bound == pytest.approx(2 * 900.0 / HOUR / 4)
    own._look(1)  # costs a dollar at the least, which is more
    assert asked == []
    assert own.bound == pytest.approx(2 * 900.0 / HOUR / 4)
    own._with = lambda _: None
    own._look(1)
    assert asked == []


def kinds(problem: Problem) -> Problem:
    """One fast device of two dollars, and two of half the speed."""
    groups = (Group(Device("fast", None), 1), Group(Device("slow", None, 0.5), 2))
    return replace(problem, topology=Topology(groups, problem.topology.levels))


@pytest.mark.parametrize(
    ("bound", "work", "expected"), [(0.5, 0.25, 0.5), (1.0, 0.25, 1.0), (1.5, 0.25, 0.25), (1.5, 1.0, 1.0)]
)
def test_what_is_proven(bound: float, work: float, expected: float, make_problem: MakeProblem) -> None:
    """A plan on devices that are not the first may cost less than the bound on those that are."""
    own = search(make_problem(1, 4, 3), [1.0] * 3)
    own._counts = lambda: [3]
    own._work_cost = lambda: work

    def look(_: int) -> None:
        own.cost, own.bound = 1.0, bound

    own._look = look
    own.run()
    assert own.bound == expected
    if bound > 1.0:
        own._work_cost = lambda: 1.5
        with pytest.raises(DefectError, match=r"a plan of 1.0 dollars a sample is below its bound of 1.5"):
            own.run()
