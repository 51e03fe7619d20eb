"""What weights move from device to device, against every way to give the stages out, and by hand."""

from __future__ import annotations

from itertools import pairwise, permutations
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pplan.cost_models.topology import Device, Group, Level, Link, Topology
from pplan.planner import device_loss
from pplan.planner.candidate import PipelineConfig, Proposal, ScoredPlan
from pplan.planner.device_loss import Replan, _Shapes
from pplan.planner.weight_moves import (
    WeightMove,
    assign_devices,
    count_moved_bytes,
    layers_by_device,
    list_moves,
)

CONFIG = PipelineConfig("1f1b", "never", 4, 2)


def nodes(gpus: int, per_node: int) -> Topology:
    levels = (Level("node", per_node, Link(20.0, 0.1)), Level("network", None, Link(5.0, 0.5)))
    return Topology((Group(Device("toy", None), gpus),), levels)


def noted(log: list[Any], entry: Any, answer: Any) -> Any:
    """The answer of a function that notes what it was asked."""
    log.append(entry)
    return answer


def moved(before: dict[int, tuple[int, int]], proposal: Proposal, weights: list[float]) -> float:
    """Layer by layer."""
    total = 0.0
    for (first, end), ranks in zip(proposal.bounds, proposal.devices, strict=True):
        for rank in ranks:
            had = range(*before[rank]) if rank in before else range(0)
            total += sum(weights[layer] for layer in range(first, end) if layer not in had)
    return total


@pytest.mark.parametrize("seed", range(40))
def test_no_other_devices_get_fewer_bytes(seed: int) -> None:
    """Of devices that had the stages of another plan, some of them none."""
    random = Random(seed)
    layers, devices = random.randint(2, 7), random.randint(1, 5)
    weights = [float(random.randint(0, 9)) for _ in range(layers)]
    edges = [0, *sorted(random.sample(range(1, layers), random.randint(0, layers - 1))), layers]
    stages_before = list(pairwise(edges))
    before = {rank: random.choice(stages_before) for rank in range(devices) if random.random() < 0.8}
    stages = random.randint(1, min(layers, devices))
    ends = (*sorted(random.sample(range(1, layers), stages - 1)), layers)
    replicas = [1] * stages
    for _ in range(random.randint(0, devices - stages)):
        replicas[random.randrange(stages)] += 1
    bounds = list(zip((0, *ends), ends, strict=False))
    own = assign_devices(before, range(devices), bounds, replicas, np.array(weights))
    assert tuple(map(len, own)) == tuple(replicas)
    assert all(list(ranks) == sorted(ranks) for ranks in own)
    assert len({rank for ranks in own for rank in ranks}) == sum(replicas)
    proposal = Proposal(CONFIG, ends, own)
    assert count_moved_bytes(before, proposal, np.array(weights)) == pytest.approx(
        moved(before, proposal, weights)
    )
    least = np.inf
    for order in permutations(range(devices), sum(replicas)):
        ranks = iter(order)
        other = Proposal(CONFIG, ends, tuple(tuple(next(ranks) for _ in range(count)) for count in replicas))
        least = min(least, moved(before, other, weights))
    assert moved(before, proposal, weights) == pytest.approx(least)


def test_where_every_run_of_layers_comes_from() -> None:
    """Four devices in nodes of two; layers of 10, 20, 0 and 40 bytes. Device 1 had the first two, 2 the first
    one and 3 the last three; device 0 is gone. Now 1 and 2 have all."""
    weights = np.array([10.0, 20.0, 0.0, 40.0])
    before = {1: (0, 2), 2: (0, 1), 3: (1, 4)}
    proposal = Proposal(CONFIG, (4,), ((1, 2),))
    assert layers_by_device(proposal) == {1: (0, 4), 2: (0, 4)}
    moves, seconds = list_moves(nodes(4, 2), before, [1, 2, 3], proposal, weights)
    assert moves == (
        WeightMove(3, 1, 2, 3, 40),  # from the other node, 8 s
        WeightMove(3, 2, 1, 1, 20),  # from its own node, 1 s
        WeightMove(3, 2, 2, 3, 40),  # and 2 s more
    )
    assert seconds == pytest.approx(8.0 + 0.5)
    stages = Proposal(CONFIG, (1, 4), ((3,), (1,)))
    moves, seconds = list_moves(nodes(4, 2), {1: (1, 2)}, [1, 3], stages, weights)
    assert moves == (WeightMove(None, 1, 2, 3, 40), WeightMove(None, 3, 0, 0, 10))
    assert seconds == 0.0


def test_the_sender_whose_port_is_free_first() -> None:
    """Two devices have the layers that two others get: each sends once; over the slow link between the nodes
    only where that is sooner."""
    weights = np.array([100.0])
    before = {0: (0, 1), 1: (0, 1)}
    moves, seconds = list_moves(nodes(4, 4), before, [0, 1, 2, 3], Proposal(CONFIG, (1,), ((2, 3),)), weights)
    assert [(own.sender, own.receiver) for own in moves] == [(0, 2), (1, 3)]
    assert seconds == pytest.approx(5.0 + 0.1)
    # 20 s over the network, or after the first one's 5 s another 5 s within the node.
    before = {0: (0, 1), 2: (0, 1)}
    topology = nodes(8, 4)
    moves, seconds = list_moves(
        topology, {0: (0, 1), 4: (0, 1)}, range(8), Proposal(CONFIG, (1,), ((1, 2),)), weights
    )
    assert [(own.sender, own.receiver) for own in moves] == [(0, 1), (0, 2)]
    assert seconds == pytest.approx(10.0 + 0.1)


def test_bytes_that_moves_add_up_to() -> None:
    moves = (WeightMove(1, 0, 0, 1, 5), WeightMove(None, 2, 1, 1, 7), WeightMove(None, 0, 2, 2, 4))
    own: Replan[Any] = Replan(SimpleNamespace(), moves, 1.0, 1.0, complete=True, any_devices=True)
    assert (own.moved_bytes, own.checkpoint_bytes) == (16, 11)


class TestMoveLeast:
    """Of plans that are near the fastest the one that moves least, on its own devices or on those that have
    its layers: three layers of 8, 4 and 1 bytes."""

    def plan(self, seconds: float, ends: tuple[int, ...], *devices: tuple[int, ...]) -> ScoredPlan:
        return ScoredPlan(Proposal(CONFIG, ends, devices), ("never",) * len(ends), seconds)

    def least(
        self,
        near: list[ScoredPlan],
        *,
        runtime: Any = None,
        kinds: bool = False,
        longest: float = 2.0,
        **more: Any,
    ) -> ScoredPlan:
        topology = nodes(3, 4)
        if kinds:
            groups = (Group(Device("a", None), 2), Group(Device("b", None, 0.5), 1))
            topology = Topology(groups, topology.levels)
        problem: Any = SimpleNamespace(runtime=runtime, topology=topology, space=None, options=None)
        shapes = _Shapes(problem, near[0], (0, 1, 2), longest / near[0].step_seconds - 1)
        shapes.steps = {((3,), (1,)): near[0]}
        before = more.get("before", {0: (1, 3), 1: (0, 1)})
        own, least = shapes.move_least(near, before, np.array([8.0, 4.0, 1.0]))
        assert least <= min(plan.step_seconds for plan in near)
        return own

    def test_on_devices_that_have_its_layers(self) -> None:
        near = [self.plan(1.0, (1, 3), (0,), (1,)), self.plan(1.5, (2, 3), (0,), (1,))]
        # As they stand they move 8 + 5 and 8 + 1 bytes; changed about nothing, or 4.
        own = self.least(near)
        assert own.proposal.devices == ((1,), (0,))
        assert own.proposal.ends == (1, 3)
        assert own.step_seconds == 1.0
        assert self.least(near, runtime="any").proposal == near[1].proposal

    def test_of_equal_ones_the_fastest(self) -> None:
        near = [self.plan(1.0, (3,), (2,)), self.plan(1.2, (3,), (2,))]
        assert self.least(near, runtime="any") is near[0]
        assert self.least(list(reversed(near)), runtime="any") is near[0]

    @pytest.mark.parametrize(("seconds", "changes"), [(1.9, True), (2.0, True), (2.1, False), (None, False)])
    def test_of_several_kinds_it_is_simulated_again(
        self, seconds: float | None, changes: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        near = [self.plan(1.0, (1, 3), (0,), (1,))]
        scored = None if seconds is None else self.plan(seconds, (1, 3), (1,), (0,))
        asked = list[Any]()
        monkeypatch.setattr(device_loss, "fastest", lambda _, own: noted(asked, own[0].devices, scored))
        own = self.least(near, kinds=True)
        assert asked == [((1,), (0,))]
        assert own is (scored if changes else near[0])

    def test_only_the_first_are_changed_about(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(device_loss, "MOST_NEAR", 1)
        near = [self.plan(1.0, (2, 3), (0,), (1,)), self.plan(1.5, (1, 3), (0,), (1,))]
        own = self.least(near)
        assert (own.proposal.ends, own.proposal.devices) == ((2, 3), ((1,), (0,)))
