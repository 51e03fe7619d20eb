"""The steps to the cheapest training, by hand: which numbers of devices are looked at, what their plans cost,
and what is proven."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pplan.cost_models.errors import DefectError
from pplan.cost_models.schedules import MOST_COPIES
from pplan.cost_models.topology import Device, Group, Topology
from pplan.planner.candidate import PipelineConfig, Proposal, ScoredPlan
from pplan.planner.objectives import least_cost as module
from pplan.planner.objectives.least_cost import HOUR, _CostSearch
from pplan.planner.plan_file import TIE
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


def test_dollars_a_sample(make_problem: MakeProblem) -> None:
    """Of a step of four samples on devices that cost so much an hour."""
    own = search(make_problem(1, 4, 3), [2.0, 3.0, 7.0])
    assert own.dollars(plan(1.0, 0, 2)) == 9.0
    assert own._cost(9.0, 1800.0) == pytest.approx(9.0 / 2 / 4)
    own._take(plan(1800.0, 0, 2))
    assert (own.cost, own.best) == (pytest.approx(1.125), plan(1800.0, 0, 2))
    own._take(plan(1800.0 * (1 - TIE / 2), 0, 2))
    assert own.best == plan(1800.0, 0, 2)
    own._take(plan(3000.0, 0))
    assert own.cost == pytest.approx(2.0 * 3000 / 3600 / 4)
    own._bound(2, 1800.0)
    assert own.bound == pytest.approx(5.0 / 2 / 4)
    own._bound(3, 1800.0)
    assert own.bound == pytest.approx(5.0 / 2 / 4)


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


def test_devices_of_one_kind(make_problem: MakeProblem) -> None:
    """The named planners' plans, and every number of each; and a bound on plans on any."""
    asked = list[Any]()
    own = search(kinds(make_problem(1, 4, 3)), [2.0, 1.0, 1.0])
    own._look_at_group = lambda group, start: asked.append((group.device.name, group.number, start))
    own._work_cost = lambda: 0.25
    own.bound = 0.5
    own.answer.by_planner = {"even": plan(7200.0, 0), "megatron": "no blocks", "dapple": plan(3600.0, 1)}
    own._look_at_kinds()
    assert own.best == plan(3600.0, 1)
    assert asked == [("fast", 1, 0), ("slow", 1, 1), ("slow", 2, 1)]
    assert own.bound == 0.25


def test_a_group_is_scored_on_its_own_devices(make_problem: MakeProblem, monkeypatch: Patch) -> None:
    problem = kinds(make_problem(1, 4, 3))
    own, asked = search(problem, [2.0, 1.0, 1.0]), list[Any]()

    def score(_: Any, proposals: Any) -> Any:
        asked.append([each.devices for each in proposals])
        return plan(1900.0, 1, 2)

    monkeypatch.setattr(module, "universal_bound", lambda *_: 1800.0)
    monkeypatch.setattr(module, "fastest", score)
    found = SimpleNamespace(best=plan(1850.0, 0, 1))

    def again(alone: Problem, seeds: Any) -> Any:
        asked.append((alone.gpus, seeds))
        return found

    monkeypatch.setattr(module, "search_again", again)
    group = problem.topology.groups[1]
    own._look_at_group(group, 1)
    assert asked == [(2, []), [((1, 2),)]]
    assert own.cost == pytest.approx(2.0 * 1900 / 3600 / 4)
    own.cost, own.best = 2.0 * 1800 / 3600 / 4, None
    own._look_at_group(group, 1)  # no cheaper
    assert len(asked) == 2
    own.cost = inf
    found.best = None
    own._look_at_group(group, 1)
    assert own.best is None


@pytest.mark.parametrize("optimum", ["fast", "slow"])
def test_work_where_it_is_the_cheapest(optimum: str, make_problem: MakeProblem) -> None:
    """Of each layer on either kind, at its price; of several micro-batches only the first of each copy of the
    weights adds to no gradients. Twice the speed for three times the price, or for half as much more."""
    small = kinds(make_problem(1, 4, 3, mini_batch=8, micro_batches=8, recompute="never"))
    chain = replace(small.chain, accumulation_seconds=0.4 * small.chain.backward_seconds.min(axis=1))
    problem = replace(small, chain=chain)
    fast = {"fast": 1.5, "slow": 3.0}[optimum]
    own = search(problem, [fast, 1.0, 1.0])
    costs = chain.at(1)
    work = costs.forward_seconds + costs.mean_backward(min(1.0, MOST_COPIES / 8))
    cheapest = min(fast * 1.0, 1.0 * 2.0)
    assert own._work_cost() == pytest.approx(8 * cheapest * float(work.sum()) / HOUR / 8)
    assert float(np.abs(costs.backward_seconds - costs.mean_backward(MOST_COPIES / 8)).sum()) > 0


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


@pytest.mark.parametrize(
    ("use_all", "several", "asked"), [(False, True, 1), (True, True, 0), (False, False, 0)]
)
def test_where_kinds_are_looked_at(
    use_all: bool, several: bool, asked: int, make_problem: MakeProblem
) -> None:
    problem = make_problem(1, 4, 3, use_all=use_all)
    own, looked = search(kinds(problem) if several else problem, [1.0] * 3), list[int]()
    own._counts = list
    own._look_at_kinds = lambda: looked.append(1)
    own.cost = inf
    own.run()
    assert len(looked) == asked
