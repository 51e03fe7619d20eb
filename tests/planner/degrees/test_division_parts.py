"""Parts of the searches of degrees against all that there is: boxes of divisions, runs of blocks, cuts, and
what rules of thumb choose."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pplan.cost_models.topology import Device, Link, two_level_topology
from pplan.cost_models.transformer.layer_work import Tokens
from pplan.cost_models.transformer.parallel_degrees import ParallelDegrees
from pplan.cost_models.transformer.training_setting import TrainingSetting
from pplan.planner.degrees import degree_baselines
from pplan.planner.degrees.degree_baselines import _by_rule, _fastest, _first_that_fits, _megatron
from pplan.planner.degrees.degree_combinations import Combination
from pplan.planner.degrees.division_box import DivisionBox
from pplan.planner.degrees.stage_degree_bound import DegreeTables, DeviceSlot
from pplan.planner.degrees.stage_degree_table import FIRST, LAST, MIDDLE, BlockRuns

Patch = pytest.MonkeyPatch


def divisions(box: DivisionBox) -> set[tuple[int, ...]]:
    """All of a box, one by one."""
    devices = len(box.device_low)
    found = set()
    for own in product(*(range(low, high + 1) for low, high in zip(box.low, box.high, strict=True))):
        sums = [sum(own[device::devices]) for device in range(devices)]
        inside = all(a <= n <= b for a, n, b in zip(box.device_low, sums, box.device_high, strict=True))
        if sum(own) == box.blocks and inside:
            found.add(own)
    return found


def boxes(seeds: int) -> Iterator[DivisionBox]:
    """Of two devices with two virtual stages each, or three with one or two."""
    for seed in range(seeds):
        random = np.random.default_rng(seed)
        devices, virtual = ((2, 2), (3, 1), (3, 2))[seed % 3]
        low = random.integers(0, 2, devices * virtual)
        high = low + random.integers(0, 4, len(low))
        least = random.integers(0, 4, devices)
        most = least + random.integers(0, 5, devices)
        yield DivisionBox(6, low, high, least, most)


def test_boxes_are_as_tight_as_their_divisions() -> None:
    """Of each stage and each device the fewest and the most blocks that some division has."""
    empty = 0
    for box in boxes(120):
        every, own = divisions(box), box.tightened()
        assert own.is_empty == (not every)
        empty += not every
        if every:
            rows, devices = np.array(sorted(every)), len(box.device_low)
            sums = rows.reshape(len(rows), -1, devices).sum(axis=1)
            assert divisions(own) == every
            assert (own.low.tolist(), own.high.tolist()) == (
                rows.min(axis=0).tolist(),
                rows.max(axis=0).tolist(),
            )
            assert own.device_low.tolist() == sums.min(axis=0).tolist()
            assert own.device_high.tolist() == sums.max(axis=0).tolist()
            assert own.counts == (next(iter(every)) if len(every) == 1 else None)
    assert 10 < empty < 110


def test_parts_of_a_box() -> None:
    """Those with at most so many blocks, and the others: each division in one of them."""
    both = 0
    for box in boxes(45):
        every, devices = divisions(box), len(box.device_low)
        for device, (low, high) in enumerate(zip(box.device_low, box.device_high, strict=True)):
            for most in range(low, high):
                few, many = map(divisions, box.split_device(device, most))
                assert few == {own for own in every if sum(own[device::devices]) <= most}
                assert many == every - few
                both += bool(few and many)
        for slot, (low, high) in enumerate(zip(box.low, box.high, strict=True)):
            for most in range(low, high):
                few, many = map(divisions, box.split_slot(slot, most))
                assert few == {own for own in every if own[slot] <= most}
                assert many == every - few
                both += bool(few and many)
    assert both > 50


def test_where_stages_of_a_box_may_begin() -> None:
    """By the blocks of the stages alone, devices left out."""
    for box in boxes(45):
        free = replace(box, device_low=box.device_low * 0, device_high=box.device_high * 0 + 6)
        starts = [np.append(0, np.cumsum(own)) for own in divisions(free)]
        if starts:
            first, last = box.places()
            assert first.tolist() == np.min(starts, axis=0).tolist()
            assert last.tolist() == np.max(starts, axis=0).tolist()


def test_a_box_of_all_divisions() -> None:
    own = DivisionBox.of_fewest(6, [1, 0, 2, 0], [9, 9, 0, 3], 2)
    assert own.is_empty  # the third has none
    own = DivisionBox.of_fewest(6, [1, 0, 1, 0], [9, 9, 9, 3], 2)
    assert (own.low.tolist(), own.high.tolist()) == ([1, 0, 1, 0], [5, 4, 5, 3])
    assert (own.device_low.tolist(), own.device_high.tolist()) == ([2, 0], [6, 4])


@pytest.mark.parametrize(
    "routed", [(False,) * 3, (True, False, True, False), (False, True, True, False, True)]
)
def test_runs_of_blocks(routed: tuple[bool, ...]) -> None:
    """Those of the same kinds are one; a stage between first and last has a block at least."""
    runs, blocks = BlockRuns(routed), len(routed)
    ranges = [(a, b) for a in range(blocks + 1) for b in range(a, blocks + 1)]
    for (a, b), (c, d) in product(ranges, repeat=2):
        assert (runs.number[a, b] == runs.number[c, d]) == (routed[a:b] == routed[c:d])
    assert len(runs.runs) == len({routed[a:b] for a, b in ranges})
    for a, b in product(range(blocks + 1), repeat=2):
        if a <= b:
            own = runs.runs[runs.number[a, b]]
            assert routed[own.start : own.stop] == routed[a:b]
        else:
            assert runs.number[a, b] == -1
    kinds = {
        FIRST: {routed[:b] for b in range(blocks + 1)},
        MIDDLE: {routed[a:b] for a, b in ranges if b > a},
        LAST: {routed[a:] for a in range(blocks + 1)},
    }
    for role, expected in kinds.items():
        found = [runs.runs[place] for place in runs.places(role)]
        assert sorted(routed[own.start : own.stop] for own in found) == sorted(expected)


@pytest.mark.parametrize("between_is_faster", [False, True])
def test_cuts_take_at_least(between_is_faster: bool) -> None:
    """80 bytes, of which each device of the smaller stage has its share, over the fastest of the links that a
    message may take: 10 bytes a second and 1 s, and 2 and 3 s, inside or between nodes of four."""
    fast, slow = Link(10.0, 1.0), Link(2.0, 3.0)
    inside, between = (slow, fast) if between_is_faster else (fast, slow)
    topology = two_level_topology(Device("GPU", None), 8, 4, inside, between)
    tables = DegreeTables(topology, BlockRuns((False,)), {}, 4, 2, 80.0)

    def seconds(link: Link, devices: int) -> float:
        return link.latency_seconds + 80 / devices / link.bandwidth_bytes_per_second

    for before, after in (((0, 2), (2, 2)), ((0, 1), (1, 2)), ((0, 3), (3, 1)), ((1, 2), (3, 1))):
        expected = seconds(fast, min(before[1], after[1]))  # inside a node also the links between
        assert tables.cut_seconds(DeviceSlot(*before), DeviceSlot(*after)) == pytest.approx(expected)
    for before, after in (((0, 4), (4, 4)), ((2, 2), (4, 4)), ((0, 4), (4, 1)), ((3, 1), (4, 1))):
        expected = seconds(between, min(before[1], after[1]))
        assert tables.cut_seconds(DeviceSlot(*before), DeviceSlot(*after)) == pytest.approx(expected)
    assert tables.enter_seconds(DeviceSlot(0, 4)) == 0.0
    assert tables.enter_seconds(DeviceSlot(4, 2)) == pytest.approx(seconds(between, 2))
    assert tables.enter_seconds(DeviceSlot(6, 2)) == pytest.approx(seconds(fast, 2))
    assert tables.leave_seconds(DeviceSlot(4, 4)) == tables.leave_seconds(DeviceSlot(7, 1)) == 0.0
    assert tables.leave_seconds(DeviceSlot(2, 2)) == pytest.approx(seconds(between, 2))
    assert tables.leave_seconds(DeviceSlot(0, 1)) == pytest.approx(seconds(fast, 1))


def one(
    tensor: int = 1, stages: int = 1, expert: int = 1, zero: int = 1, size: int = 1, again: Any = "none"
) -> Combination:
    degrees = ParallelDegrees(tensor, 1, expert, stages, 8 // (tensor * stages), zero)
    return Combination(degrees, TrainingSetting(4, Tokens(64, size), again))


def test_what_megatrons_rule_allows() -> None:
    """Stages only with the widest tensors, the most experts for these, ZeRO 1, and one sequence."""
    right = [one(4), one(1), one(4, 2), one(2, expert=4), one(4, 2, again="full")]
    wrong = [
        one(2, 2),
        one(1, 2),
        one(2, expert=2),
        one(2),
        one(4, zero=3),
        one(4, size=2),
        one(4, 2, size=2),
    ]
    for every in ([*right, *wrong], [*wrong, *right]):
        assert {own for own in every if own in set(_megatron(every))} == set(right)
    assert list(_megatron([])) == []
    # Without recomputation first, on the fewest devices, then of the fewest stages.
    ordered = [one(2), one(4), one(2, 2), one(4, 2), one(1, 8), one(1, again="full"), one(2, again="full")]
    assert sorted([ordered[n] for n in (6, 3, 1, 5, 0, 4, 2)], key=_by_rule) == ordered


class Trials:
    """Combinations with bytes, seconds and bounds that stand here, by tensor degree."""

    def __init__(
        self, monkeypatch: Patch, bytes: list[float], steps: list[float], bounds: list[float]
    ) -> None:
        self.asked = list[int]()
        names = {2**n: n for n in range(len(bytes))}

        def estimate(layers: Any, counts: tuple[int, ...]) -> Any:
            number = names[layers.tensor]
            self.asked.append(number)
            assert counts == (3, 3)
            return SimpleNamespace(peak_bytes=bytes[number], step_seconds=steps[number])

        def make(shape: Any, degrees: ParallelDegrees, *_: Any) -> Any:
            tensor = degrees.tensor
            return SimpleNamespace(
                tensor=tensor, shape=shape, peak_bytes=lambda counts: bytes[names[tensor]] + 0 * len(counts)
            )

        monkeypatch.setattr(degree_baselines, "LayerTable", make)
        monkeypatch.setattr(degree_baselines, "lower_bound", lambda layers: bounds[names[layers.tensor]])
        monkeypatch.setattr(degree_baselines, "estimate_stages", estimate)
        self.every = [Combination(ParallelDegrees(own, pipeline=2), one().setting) for own in names]


def test_the_fastest_of_trials(monkeypatch: Patch) -> None:
    """Of those that fit, by their bounds, until none can be faster."""
    shape: Any = SimpleNamespace(blocks=6)
    trials = Trials(monkeypatch, [5, 10, 11, 5, 5], [9.0, 4.0, 1.0, 4.0, 5.0], [3.0, 2.0, 1.0, 3.5, 4.0])
    found = _fastest(trials.every, shape, None, 10)  # type: ignore[arg-type]
    assert found is not None
    assert found.degrees.tensor == 2
    assert found.blocks == (3, 3)
    assert trials.asked == [1, 0, 3]
    assert _fastest(trials.every, shape, None, 4) is None  # type: ignore[arg-type]
    assert _fastest([], shape, None, 10) is None  # type: ignore[arg-type]
    trials.asked.clear()
    found = _first_that_fits(trials.every, shape, None, 10)  # type: ignore[arg-type]
    assert found is not None
    assert (found.degrees.tensor, trials.asked) == (1, [0])
    found = _first_that_fits(trials.every[1:], shape, None, 5)  # type: ignore[arg-type]
    assert found is not None
    assert found.degrees.tensor == 8
    assert _first_that_fits(trials.every, shape, None, 4) is None  # type: ignore[arg-type]
