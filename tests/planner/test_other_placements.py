"""Other devices for a plan's stages, against every assignment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import permutations

import pytest

from pplan.cost_models.layer import Chain
from pplan.cost_models.topology import Device, Group, Level, Link, Topology
from pplan.planner.candidate import Proposal, ScoredPlan
from pplan.planner.joint_search import find_best_plan, run_search
from pplan.planner.other_placements import reassign, search_other_orders
from pplan.planner.plan_options import PlanOptions
from pplan.planner.problem import Problem
from pplan.planner.scoring import fastest

MakeChain = Callable[..., Chain]


@pytest.fixture(autouse=True)
def orders_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of more devices, of which not any are searched for each stage."""
    monkeypatch.setattr("pplan.planner.problem.may_search_any", lambda *_: False)


def machine(slow: float = 0.4, memory: int | None = None) -> Topology:
    """A fast device and four slow ones, in nodes of three and two."""
    groups = (Group(Device("fast", memory), 1), Group(Device("slow", memory, slow), 4))
    levels = (Level("node", 3, Link(40.0, 0.0)), Level("network", None, Link(4.0, 0.1)))
    return Topology(groups, levels)


def problem(seed: int, make_chain: MakeChain, memory: int | None = None, **options: object) -> Problem:
    own = PlanOptions(**{"mini_batch": 8, "micro_batches": 4, "schedule": "1f1b", **options})  # type: ignore[arg-type]
    return Problem(make_chain(seed, 6, cuts=1.1, traffic=0.5), machine(memory=memory), own)


def scored(own: Problem, ends: tuple[int, ...], devices: tuple[tuple[int, ...], ...]) -> ScoredPlan:
    plan = fastest(own.space, [Proposal(own.configs[0], ends, devices)])
    assert plan is not None
    return plan


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("memory", [None, 1500])
def test_the_fastest_assignment_is_among_them(seed: int, memory: int | None, make_chain: MakeChain) -> None:
    """Straight pipelines of three stages, and one with replicas: all on devices in any order."""
    own = problem(seed, make_chain, memory)
    for ends, devices in (((2, 4, 6), ((1,), (2,), (3,))), ((3, 6), ((1, 2), (3,)))):
        plan = scored(own, ends, devices)
        every = []
        for order in permutations(range(5), sum(map(len, devices))):
            left = iter(order)
            shape = tuple(tuple(sorted(next(left) for _ in stage)) for stage in devices)
            every.append(replace(plan.proposal, devices=shape))
        best = fastest(own.space, every)
        assert best is not None
        for limit in (float("inf"), best.step_seconds * 1.001):
            found = fastest(own.space, reassign(own, [plan], limit))
            assert found is not None
            assert found.step_seconds == pytest.approx(best.step_seconds)
        assert len(set(reassign(own, [plan]))) < len(set(every))  # alike ones once
        few = list(reassign(own, [plan], best.step_seconds * 0.2))
        assert len(few) < len(list(reassign(own, [plan])))


def test_of_two_shapes_the_fastest(make_chain: MakeChain) -> None:
    own = problem(1, make_chain)
    plans = [scored(own, ends, ((1,), (2,))) for ends in ((1, 6), (3, 6), (4, 6))]
    moved = {proposal.ends for proposal in reassign(own, plans)}
    fast = sorted(plans, key=lambda plan: plan.step_seconds)[:2]
    assert moved == {plan.proposal.ends for plan in fast}


def test_none_where_a_runtime_numbers_the_devices_or_all_are_alike(make_chain: MakeChain) -> None:
    own = problem(1, make_chain)
    plan = scored(own, (3, 6), ((1,), (2,)))
    runtime = problem(1, make_chain, runtime="deepspeed")
    assert list(reassign(runtime, [plan])) == []
    assert search_other_orders(runtime, plan) is None
    alike = Topology((Group(Device("toy", None), 3),), (Level("node", None, Link(40.0, 0.0)),))
    same = Problem(own.chain, alike, own.options)
    assert list(reassign(same, [plan])) == []
    assert search_other_orders(same, plan) is None


@pytest.mark.parametrize("seed", [1, 2])
def test_further_orders_never_make_it_slower(seed: int, make_chain: MakeChain) -> None:
    own = problem(seed, make_chain)
    first = run_search(own).best
    assert first is not None
    other = search_other_orders(own, first)
    assert other is None or other.step_seconds < first.step_seconds
    answer = find_best_plan(own, []).best
    assert answer is not None
    assert answer.step_seconds <= min(plan.step_seconds for plan in (first, other) if plan is not None)
