"""The bounds of degrees as the papers and the docstrings have them, once more with loops: what they are,
not only that no step is shorter."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise, product
from random import Random
from typing import Any

import numpy as np
import pytest

from pplan.cost_models.topology import Device, Link, two_level_topology
from pplan.cost_models.transformer.layer_table import LayerTable
from pplan.cost_models.transformer.layer_work import Tokens
from pplan.cost_models.transformer.parallel_degrees import ParallelDegrees
from pplan.cost_models.transformer.rank_costs import DeviceLimits, Overheads, RankCosts, TopologyLinks
from pplan.cost_models.transformer.training_setting import TrainingSetting, block_ranges
from pplan.cost_models.transformer.transformer_shape import AttentionShape, ExpertShape, TransformerShape
from pplan.cost_models.transformer.weight_update import ParameterCounts, update_seconds
from pplan.planner.degrees.degree_options import DegreeOptions
from pplan.planner.degrees.interleaved_bound import (
    _first_blocks,
    interleaved_bound,
    least_interleaved,
    mean_interleaved,
)
from pplan.planner.degrees.stage_degree_bound import DeviceSlot, stage_bound, stage_slots
from pplan.planner.degrees.stage_degree_search import _sample_counts, _stage_counts
from pplan.planner.degrees.stage_divisions import lower_bound

NO_LIMIT = float("inf")


def table(seed: int, stages: int, virtual: int = 1, blocks: int = 7, **more: Any) -> LayerTable:
    """Two kinds of blocks of different lengths, links that matter."""
    random = Random(seed)
    routed = tuple(random.random() < 0.4 for _ in range(blocks - 2))
    shape = TransformerShape(
        *("two kinds", 256, random.choice((256, 32000)), 1024, AttentionShape(8, 8, 32, 32)),
        (False, True, *routed),
        ExpertShape(8, 2, 512, 0),
    )
    link = Link(10 ** random.uniform(8, 10), 1e-5)
    topology = two_level_topology(Device("GPU", None), 8, 4, link, link)
    limits = DeviceLimits(10 ** random.uniform(11, 14), 10 ** random.uniform(10, 12))
    setting = TrainingSetting(stages * random.randint(1, 4), Tokens(64), virtual_stages=virtual, **more)
    costs = RankCosts(limits, TopologyLinks(topology), overheads=Overheads(6e-5))
    return LayerTable(shape, ParallelDegrees(pipeline=stages, data=2), setting, costs)


@pytest.mark.parametrize("seed", range(40))
def test_what_one_stage_tells_of(seed: int) -> None:
    """Before the first backward of a stage it idles from the end of its k + 1 forwards until the gradient is
    back, and after its last forward until that one's is, in which it runs k backwards; k + 1 are at most the
    micro-batches, and where there are no two more than k the longer idling alone counts."""
    random = Random(seed)
    forward, backward, enter, leave, behind = (random.choice((0.0, 1.0, 2.0, 3.5, 40.0)) for _ in range(5))
    after, many = random.randint(0, 5), random.randint(1, 9)
    first, last = behind + forward, behind - leave
    for _ in range(min(after + 1, many)):
        first -= forward + leave
    for _ in range(min(after, many - 1)):
        last -= backward + enter
    idle = [max(0.0, first), max(0.0, last)]
    busy = sum(forward + leave + backward + enter for _ in range(many)) - enter
    expected = busy + (sum(idle) if many >= after + 2 else max(idle))
    assert stage_bound(forward, backward, enter, leave, behind, after, many) == pytest.approx(expected)


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 4), (2, 2), (2, 4), (3, 2), (4, 1), (1, 6)])
def test_devices_that_a_stage_may_have(nodes: int, per_node: int) -> None:
    """Runs of fewer than all within one node, or of whole nodes."""
    link = Link(1e9, 0.0)
    topology = two_level_topology(Device("GPU", None), nodes * per_node, per_node, link, link)
    node_of = [rank // per_node for rank in range(nodes * per_node)]
    every = set()
    for first, end in combinations(range(nodes * per_node + 1), 2):
        owned = node_of[first:end]
        whole = all(owned.count(node) == per_node for node in owned)
        if end - first < nodes * per_node and (len(set(owned)) == 1 or whole):
            every.add(DeviceSlot(first, end - first))
    slots = stage_slots(topology)
    assert set(slots) == every
    assert len(slots) == len(every)


def test_devices_of_many_are_taken_in_equal_parts() -> None:
    """Of 192 the parts are of 3, so that there are 64; of a prime number there are none."""
    link = Link(1e9, 0.0)
    slots = stage_slots(two_level_topology(Device("GPU", None), 192, 192, link, link))
    assert {slot.first % 3 for slot in slots} == {slot.size % 3 for slot in slots} == {0}
    assert len(slots) == 64 * 65 // 2 - 1
    assert stage_slots(two_level_topology(Device("GPU", None), 67, 67, link, link)) == []


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_the_quick_bound_of_all_divisions(recompute: Any, stages: int) -> None:
    """max(m T, total + (m - 1) b T + max(m - p, 0) (1 - b) T) and the mean stage's update; T is the mean of
    the stages, or the longest layer."""
    for seed in range(4):
        layers = table(seed, stages, recompute=recompute)
        setting, again = layers.setting, recompute == "full"
        parts = [layers.block_seconds(kind, again=again) for kind in layers.shape.routed]
        ends = [[part for n, part in layers.fixed_parts(slot) for _ in range(n)] for slot in range(stages)]
        every = [*parts, *(part for own in ends for part in own)]
        total = sum(part.forward + part.backward for part in every)
        layer = max([sum(part.both for part in own) for own in ends] + [part.both for part in parts])
        slowest, share = max(total / stages, layer), min(part.backward / part.both for part in every)
        many = setting.micro_batches
        ordered = total + (many - 1) * share * slowest + max(many - stages, 0) * (1 - share) * slowest
        counts = [layers.parameters(range(7 * (slot == 0)), slot) for slot in range(stages)]
        dense, experts = (sum(own) / stages for own in zip(*map(both_kinds, counts), strict=True))
        update, whole = (
            update_seconds(ParameterCounts(*own), layers.degrees, layers.costs)
            for own in ((dense, 0.0), (0.0, stages * experts))
        )
        # One stage may have all experts; the others then start no transfers of theirs.
        update += whole / stages
        assert layers.least_update_seconds == pytest.approx(update)
        assert lower_bound(layers) == pytest.approx(max(many * slowest, ordered) + update)


def both_kinds(counts: ParameterCounts) -> tuple[float, float]:
    return counts.dense, counts.routed


def divisions(blocks: int, slots: int) -> Iterator[list[int]]:
    for ends in combinations(range(1, blocks), slots - 1):
        yield [b - a for a, b in pairwise((0, *ends, blocks))]


@pytest.mark.parametrize(("stages", "virtual"), [(2, 2), (3, 2), (2, 3)])
@pytest.mark.parametrize("seed", range(3))
def test_the_bound_of_a_division_of_virtual_stages(seed: int, stages: int, virtual: int) -> None:
    """m T_d + (sum of s_k + 2 x_k, k < j p + d) - p (sum of s_(i p + d), i < j), and the longest update."""
    layers = table(seed, stages, virtual)
    own_blocks = [layers.block_seconds(kind, again=False).both for kind in layers.shape.routed]
    fixed = [sum(n * part.both for n, part in layers.fixed_parts(slot)) for slot in range(layers.slots)]
    for counts in divisions(layers.shape.blocks, layers.slots):
        ranges = block_ranges(counts)
        seconds = [sum(own_blocks[block] for block in own) + fixed[slot] for slot, own in enumerate(ranges)]
        bounds, updates = [], []
        for d, j in product(range(stages), range(virtual)):
            own = sum(seconds[i * stages + d] for i in range(virtual))
            before = sum(seconds[k] + 2 * layers.transfer_seconds(k) for k in range(j * stages + d))
            earlier = sum(seconds[i * stages + d] for i in range(j))
            bounds.append(layers.setting.micro_batches * own + before - stages * earlier)
            parts = [layers.parameters(ranges[i * stages + d], i * stages + d) for i in range(virtual)]
            total = ParameterCounts(sum(own.dense for own in parts), sum(own.routed for own in parts))
            updates.append(update_seconds(total, layers.degrees, layers.costs))
        assert interleaved_bound(layers, counts) == pytest.approx(max(bounds) + max(updates))


@pytest.mark.parametrize(("stages", "virtual"), [(2, 2), (3, 2), (2, 3)])
@pytest.mark.parametrize("seed", range(4))
def test_the_least_room_for_whole_blocks(seed: int, stages: int, virtual: int) -> None:
    """Of every way to hand the blocks of both kinds to the devices, each with one in every virtual stage but
    the first: the slowest device's micro-batches, its wait for the lookup, a block of each device between and
    the transfers there and back, and its own update or the mean one."""
    layers = table(seed, stages, virtual)
    kinds = sorted(layers.blocks)
    numbers = [layers.shape.routed.count(kind) for kind in kinds]
    each = [layers.block_seconds(kind, again=False).both for kind in kinds]
    fixed = [sum(n * part.both for n, part in layers.fixed_parts(slot)) for slot in range(layers.slots)]

    def seconds(device: int, counts: tuple[int, ...]) -> float:
        slots = range(device, layers.slots, stages)
        if sum(counts) < sum(slot not in (0, layers.slots - 1) for slot in slots):
            return NO_LIMIT
        parts = [layers.parameters(range(0), slot) for slot in slots]
        dense = sum(own.dense for own in parts)
        dense += sum(n * layers.block_parameters[kind].dense for kind, n in zip(kinds, counts, strict=True))
        experts = sum(n * layers.block_parameters[kind].routed for kind, n in zip(kinds, counts, strict=True))
        update = update_seconds(ParameterCounts(dense, experts), layers.degrees, layers.costs)
        own = sum(fixed[slot] for slot in slots) + sum(n * s for n, s in zip(counts, each, strict=True))
        wait = fixed[0] + (device - 1) * min(each) + 2 * device * layers.transfer_seconds(0)
        own = layers.setting.micro_batches * own + max(update, layers.least_update_seconds)
        return own + (wait if device else 0.0)

    shares = [[own for own in product(range(n + 1), repeat=stages) if sum(own) == n] for n in numbers]
    ways = ([*zip(*way, strict=True)] for way in product(*shares))
    least = min(max(seconds(d, counts) for d, counts in enumerate(way)) for way in ways)
    expected = max(least, mean_interleaved(layers) + layers.least_update_seconds)
    assert least_interleaved(layers, NO_LIMIT) == pytest.approx(expected)


def test_numbers_of_stages_that_are_searched() -> None:
    """From two on, as many as there are devices and layers, and, unless more are asked for, sixteen."""
    shape = table(1, 1).shape
    assert _stage_counts(shape.with_blocks(40), 40, DegreeOptions()) == list(range(2, 17))
    assert _stage_counts(shape.with_blocks(5), 40, DegreeOptions()) == [2, 3, 4, 5, 6, 7]
    assert _stage_counts(shape.with_blocks(40), 3, DegreeOptions()) == [2, 3]
    assert _stage_counts(shape.with_blocks(40), 40, DegreeOptions(pp=(1, 2, 20, 40, 41))) == [2, 20, 40]
    sizes = _sample_counts(3, DegreeOptions(mini_batch=12))
    assert sizes == [
        own
        for own in (1, 2, 3, 4, 6, 12)
        if any(own % n == 0 and own // n in (1, 2, 4, 8) for n in (1, 2, 3))
    ]
    assert _sample_counts(4, DegreeOptions(mini_batch=8, micro_batch_size=(2,))) == [2, 4, 8]


@pytest.mark.parametrize("again", [1, 2, 3, None])
@pytest.mark.parametrize("stages", [0, 1, 2, 3])
def test_how_many_blocks_run_again_at_least(stages: int, again: int | None) -> None:
    """Of every way to share blocks over virtual stages, each of which has one; the first ones run again."""
    layers = table(1, 2, 2, recompute="full", recompute_blocks=again)
    for number in range(max(stages, 1), 8):
        first = number if again is None else again
        ways = product(range(1, number + 1), repeat=max(stages, 1))
        expected = min(sum(min(own, first) for own in way) for way in ways if sum(way) == number)
        assert _first_blocks(layers, np.array(float(number)), stages) == expected


@pytest.mark.parametrize("seed", range(30))
def test_no_update_is_below_its_lines(seed: int) -> None:
    """At 200 sizes from the least that a device may have to the whole model: the fastest algorithm may change
    between any two."""
    random = Random(seed)
    links = [Link(10 ** random.uniform(8, 11), 10 ** random.uniform(-6, -3)) for _ in range(2)]
    inside, between = sorted(links, key=lambda link: -link.bandwidth_bytes_per_second)
    topology = two_level_topology(Device("GPU", None), 24, random.choice((2, 4, 8)), inside, between)
    base = table(seed, stages=2)
    degrees = ParallelDegrees(
        expert=random.choice((1, 2)), pipeline=2, data=random.choice((4, 8, 12)), zero=seed % 2
    )
    costs = RankCosts(base.costs.limits, TopologyLinks(topology))
    layers = LayerTable(base.shape, degrees, base.setting, costs)
    stages = [layers.parameters(range(7), 0), layers.parameters(range(7, 7), 1)]
    for kind, line in enumerate(layers.update_lines):
        most = sum(own[kind] for own in stages)
        least = min(own[kind] for own in layers.block_parameters.values() if own[kind])
        least = min([least, *(own[kind] for own in stages if own[kind])])
        for count in np.geomspace(least, most, 200):
            own = ParameterCounts(0.0, count) if kind else ParameterCounts(count, 0.0)
            assert line.start + line.slope * count <= update_seconds(own, degrees, costs) * (1 + 1e-9)
        own = ParameterCounts(0.0, most) if kind else ParameterCounts(most, 0.0)
        assert line.start + line.slope * most == pytest.approx(update_seconds(own, degrees, costs))
