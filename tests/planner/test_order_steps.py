"""Other devices for the stages of plans, step by step: every assignment once, which of them may be, and which
search along other orders is run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations, permutations
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest

from pplan.cost_models.topology import Device, Group, Level, Link, Topology
from pplan.planner import other_placements as module
from pplan.planner.candidate import Proposal, ScoredPlan
from pplan.planner.other_placements import (
    MOST_ENTRIES,
    MOST_ORDERS,
    SHAPES,
    WORK,
    _all_assignments,
    _Feasibility,
    _orders,
    reassign,
    search_other_orders,
)
from pplan.planner.pipeline_config import PipelineConfig
from pplan.planner.search.device_classes import Symmetry
from pplan.planner.search.placements import REORDERED

Patch = pytest.MonkeyPatch
CONFIG = PipelineConfig("1f1b", "never", 4, 2)


def machine(*counts: int, per_node: int | None = 2) -> Topology:
    """Groups of so many devices, each slower than the one before."""
    groups = tuple(Group(Device(f"d{n}", None, 1 / (1 + n)), count) for n, count in enumerate(counts))
    levels = [Level("node", per_node, Link(40.0, 0.0))]
    if per_node:
        levels.append(Level("network", None, Link(4.0, 0.1)))
    return Topology(groups, tuple(levels))


def plan(seconds: float, *ends: int, config: PipelineConfig = CONFIG) -> ScoredPlan:
    devices = tuple((number,) for number in range(len(ends)))
    return ScoredPlan(Proposal(config, ends, devices), ("never",) * len(ends), seconds)


def every(gpus: int, replicas: tuple[int, ...]) -> list[Any]:
    """All assignments, replicas in rank order."""
    if not replicas:
        return [()]
    return [
        (own, *rest)
        for own in combinations(range(gpus), replicas[0])
        for rest in every(gpus, replicas[1:])
        if not set(own) & {rank for other in rest for rank in other}
    ]


@pytest.mark.parametrize(
    "topology", [machine(1, 3), machine(2, 3, per_node=None), machine(2, 2, 1, per_node=3)]
)
@pytest.mark.parametrize("replicas", [(1,), (2, 1), (1, 1, 1), (1, 2)])
def test_every_assignment_up_to_symmetry(topology: Topology, replicas: tuple[int, ...]) -> None:
    """The first of those that are alike; of what is possible, if the first stages of it are."""
    symmetry = Symmetry(topology)
    shapes = every(topology.gpus, replicas)
    first = dict[object, Any]()
    for shape in shapes:
        first.setdefault(symmetry.key(shape), shape)
    own = _all_assignments(topology, replicas)
    assert len(own) == len(first)
    assert {symmetry.key(shape) for shape in own} == set(first)
    assert set(own) <= set(shapes)
    without = _all_assignments(topology, replicas, lambda shape: 0 not in shape[-1])
    left = {symmetry.key(shape) for shape in shapes if all(0 not in ranks for ranks in shape)}
    assert {symmetry.key(shape) for shape in without} == left
    for most in (1, 2, 3):
        assert len(_all_assignments(topology, replicas, most=most)) == min(most, len(own))


def test_orders_of_few_devices() -> None:
    """All that differ, so many at the most."""
    topology = machine(1, 2, per_node=None)
    assert _orders(topology) == [(0, 1, 2), (1, 0, 2), (1, 2, 0)]
    unlike = machine(1, 1, 1, 1, 1, per_node=None)
    orders = _orders(unlike)
    assert len(orders) == MOST_ORDERS
    assert set(orders) < set(permutations(range(5)))


def test_orders_of_many_devices(monkeypatch: Patch) -> None:
    """Runs of equal neighbours: backwards, the faster and the slower first, and every order of them."""
    monkeypatch.setattr(module, "FEW", 3)
    topology = machine(2, 4, 2, per_node=2)
    orders = _orders(topology)
    assert orders[0] == (6, 7, 4, 5, 2, 3, 0, 1)
    assert orders[1] == tuple(range(8))
    runs = [(0, 1), (2, 3), (4, 5), (6, 7)]
    others = [tuple(rank for run in order for rank in run) for order in permutations(runs)]
    assert orders[2:] == [order for order in others if order not in orders[:2]]
    unsorted = Topology(tuple(machine(2, 4, 2).groups[n] for n in (1, 0, 2)), machine(2).levels)
    assert _orders(unsorted)[:3] == [
        (6, 7, 4, 5, 2, 3, 0, 1),
        (4, 5, 0, 1, 2, 3, 6, 7),
        (6, 7, 2, 3, 0, 1, 4, 5),
    ]
    flat = machine(2, 3, per_node=None)
    assert set(_orders(flat)) == {(0, 1, 2, 3, 4), (2, 3, 4, 0, 1)}


class Group3:
    """Seconds of stages on devices by their ranks."""

    def __init__(self, ranks: Any) -> None:
        own = sum(ranks) + 1.0
        self.forward = {(stage, stage + 1): own for stage in range(3)}
        self.backward = {(stage, stage + 1): 2 * own for stage in range(3)}
        self.ranks = ranks


@pytest.mark.parametrize(
    ("shape", "seconds"), [(((0,),), 12.0), (((2,), (0,)), 21.0), (((1,), (2,), (0, 1)), 39.0)]
)
def test_stages_that_leave_a_step_possible(shape: Any, seconds: float, monkeypatch: Patch) -> None:
    """One micro-batch through those before, and all on the last, in less than the limit; where it fits."""
    asked = list[Any]()

    def cheapest(group: Any, config: Any, start: int, end: int, in_flight: float) -> Any:
        asked.append((group.ranks, config, start, end, in_flight))
        return answer

    space: Any = SimpleNamespace(replica_group=lambda size, ranks: Group3(ranks) if size == 2 else None)
    monkeypatch.setattr(module, "cheapest_mode", cheapest)
    own = plan(1.0, 2, 4, 6).proposal
    answer: Any = "never"
    assert _Feasibility(space, own, seconds + 0.001)(shape)
    assert not _Feasibility(space, own, seconds)(shape)
    stage = len(shape) - 1
    # 1F1B of three stages and four micro-batches holds 3, 2 and 1
    assert asked[0] == (shape[-1], CONFIG, stage, stage + 1, 3 - stage)
    answer = None
    assert not _Feasibility(space, own, inf)(shape)
    assert _Feasibility(space, own, inf).knows_memory
    assert not _Feasibility(space, replace(own, config=replace(CONFIG, schedule="zb-h1")), inf).knows_memory


def make_problem(topology: Topology, **more: Any) -> Any:
    placements = [SimpleNamespace(ranks=tuple(range(topology.gpus))), SimpleNamespace(ranks=(1, 0, 2))]
    families = [
        Family(placement, replace(CONFIG, schedule=schedule))
        for placement in placements
        for schedule in ("1f1b", "gpipe")
    ]
    known = {
        "topology": topology,
        "runtime": None,
        "any_devices": False,
        "gpus": topology.gpus,
        "placements": placements,
        "families": families,
        "stage_counts": (1, 2),
        "space": SimpleNamespace(chain=SimpleNamespace(max_stages=6), topology=topology),
        "options": SimpleNamespace(time_limit=30.0),
        "allows": lambda own: own.devices != ((2,), (0,)),
    }
    return SimpleNamespace(**(known | more))


@dataclass(frozen=True)
class Family:
    placement: Any
    config: PipelineConfig


def test_the_search_along_other_orders(monkeypatch: Patch) -> None:
    """Of few devices that differ, which no runtime numbers: with the families of the best plan's schedule on
    the first order, those orders that the problem has not; for half a second, or less of a short limit."""
    asked = list[Any]()

    def search(space: Any, families: Any, counts: Any, *, work: float, limit: float) -> Any:
        asked.append((space, [(own.config.schedule, own.placement) for own in families], counts, work, limit))
        return SimpleNamespace(best="better")

    monkeypatch.setattr(module, "search", search)
    monkeypatch.setattr(module, "make_placement", lambda name, _, order: (name, order))
    topology = machine(1, 1, 1, per_node=None)
    problem = make_problem(topology)
    best = plan(5.0, 3, 6)
    assert search_other_orders(problem, best) == "better"  # type: ignore[comparison-overlap]
    orders = [order for order in permutations(range(3)) if order not in {(0, 1, 2), (1, 0, 2)}]
    ((space, families, counts, work, limit),) = asked
    assert families == [("1f1b", (REORDERED, order)) for order in orders]
    assert (space, counts, work, limit) == (problem.space, (1, 2), WORK, 5.0)
    search_other_orders(make_problem(topology, options=SimpleNamespace(time_limit=0.5)), best)
    assert asked.pop()[3] == WORK / 2
    gpipe = plan(5.0, 3, 6, config=replace(CONFIG, schedule="gpipe"))
    search_other_orders(problem, gpipe)
    assert [name for name, _ in asked.pop()[1]] == ["gpipe"] * 4
    monkeypatch.setattr(module, "MOST_ENTRIES", 2 * 3 * 6)
    search_other_orders(problem, best)
    assert asked.pop()[1] == families[:2]
    monkeypatch.setattr(module, "MOST_ENTRIES", MOST_ENTRIES)
    monkeypatch.setattr(module, "MOST_ORDERS", 1)
    assert search_other_orders(problem, best) is None  # the first is the problem's own
    monkeypatch.setattr(module, "MOST_ORDERS", MOST_ORDERS)
    asked.clear()
    assert search_other_orders(problem, plan(5.0, 3, 6, config=replace(CONFIG, schedule="zb-h1"))) is None
    assert search_other_orders(make_problem(topology, runtime="deepspeed"), best) is None
    assert search_other_orders(make_problem(topology, any_devices=True), best) is None
    assert search_other_orders(make_problem(machine(3, per_node=None)), best) is None
    monkeypatch.setattr(module, "FEW", 2)
    assert search_other_orders(problem, best) is None
    assert asked == []
    monkeypatch.setattr(module, "FEW", 3)
    assert search_other_orders(problem, best) == "better"  # type: ignore[comparison-overlap]


def test_plans_on_other_devices(monkeypatch: Patch) -> None:
    """Of the fastest two shapes, each once and as its fastest plan; that the options allow."""
    asked = list[Any]()

    def assign(_: Any, proposal: Proposal, limit: float) -> Any:
        asked.append((proposal, limit))
        return [((0,), (1,)), ((2,), (0,)), ((2,), (1,))]

    monkeypatch.setattr(module, "_assignments", assign)
    problem = make_problem(machine(1, 2))
    several = replace(CONFIG, schedule="interleaved", virtual_stages=2)
    slow, fast = plan(9.0, 3, 6), plan(4.0, 3, 6)
    fast = replace(fast, proposal=replace(fast.proposal, devices=((1,), (2,))))
    plans = [plan(7.0, 1, 6), slow, plan(8.0, 5, 6), fast, plan(1.0, 2, 6, config=several)]
    proposals = list(reassign(problem, plans, 12.0))
    assert asked == [(fast.proposal, 12.0), (plans[0].proposal, 12.0)]
    assert len(asked) == SHAPES
    assert proposals == [
        replace(own, devices=devices) for own, _ in asked for devices in (((0,), (1,)), ((2,), (1,)))
    ]
    for other in (
        make_problem(machine(1, 2), runtime="deepspeed"),
        make_problem(machine(3, per_node=None)),
        make_problem(machine(1, 2), any_devices=True),
    ):
        assert list(reassign(other, plans)) == []


def test_of_many_devices_stages_take_them_in_order(monkeypatch: Patch) -> None:
    topology = machine(1, 2, 2, per_node=None)
    space: Any = SimpleNamespace(topology=topology)
    own = Proposal(CONFIG, (3, 6), ((0, 1), (2,)))
    monkeypatch.setattr(module, "FEW", 4)
    monkeypatch.setattr(module, "_orders", lambda _: [(4, 3, 2, 1, 0), (0, 2, 4, 1, 3)])
    assert list(module._assignments(space, own, inf)) == [((4, 3), (2,)), ((0, 2), (4,))]
    monkeypatch.setattr(module, "FEW", 5)
    monkeypatch.setattr(module, "narrow_space", lambda space, _: space)
    monkeypatch.setattr(module, "_all_assignments", lambda *own: [own])
    asked: Any = list(module._assignments(space, own, 7.0))
    ((seen, replicas, possible),) = asked
    assert (seen, replicas) == (topology, (2, 1))
    assert possible == _Feasibility(space, own, 7.0)
    other = replace(own, config=replace(CONFIG, schedule="zb-h1"))
    ((_, _, possible),) = module._assignments(space, other, 7.0)
    assert possible is None
