"""Seconds of parts on a path, and the least of what follows, part by part with loops."""

from __future__ import annotations

from itertools import combinations
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pplan.cost_models.hardware import Device
from pplan.cost_models.schedules import find_schedule
from pplan.planner.cut_search.cut_bound import (
    PathCounts,
    least_cuts,
    mixture_tables,
    path_seconds,
    remaining_seconds,
    work_paths,
)
from pplan.planner.search.subproblem import _fast_devices

NAMES = ("forward", "backward", "weight", "credit", "forward_launch", "backward_launch", "after")
"""In the order of the counts; credits are taken off."""


def random_tables(seed: int) -> tuple[Any, PathCounts]:
    """Two devices of two parts each of five places, with some of which no path meets everything."""
    rng = np.random.default_rng(seed)
    parts, places = 4, 6
    slots = [SimpleNamespace(device=device, chunk=chunk) for device in (0, 1) for chunk in (0, 1)]
    by_slot = {Slot(own.device, own.chunk): own.chunk * 2 + own.device for own in slots}
    tables = {name: {slot: rng.random((places, places)) for slot in by_slot} for name in NAMES}
    usable = np.triu(np.ones((parts, places, places), dtype=bool), 1) & (
        rng.random((parts, places, places)) < 0.9
    )
    counts = rng.integers(0, 4, (4, 7)) * (rng.random((4, 7)) < 0.6)
    own = SimpleNamespace(
        **tables,
        parts=parts,
        usable=usable,
        program=SimpleNamespace(chunks=2, parts_by_slot=by_slot),
        occupancy=rng.random((parts - 1, places)),
        latency=rng.random(parts - 1),
    )
    return own, PathCounts(counts.astype(float), rng.integers(0, 3, (2, parts - 1)).astype(float))


class Slot(tuple[int, int]):
    """A device and a chunk, by which tables are found."""

    def __new__(cls, device: int, chunk: int) -> Slot:
        return super().__new__(cls, (device, chunk))

    @property
    def device(self) -> int:
        return self[0]

    @property
    def chunk(self) -> int:
        return self[1]


def expected(tables: Any, counts: PathCounts, part: int, start: int, end: int) -> float:
    if not tables.usable[part, start, end]:
        return float("inf")
    (slot,) = [slot for slot, own in tables.program.parts_by_slot.items() if own == part]
    total = 0.0
    for name, count in zip(NAMES, counts.actions[2 * slot.device + slot.chunk], strict=True):
        sign = -1 if name == "credit" else 1
        total += sign * count * getattr(tables, name)[slot][start, end]
    if part < tables.parts - 1:
        total += counts.transfers[0, part] * tables.occupancy[part, end]
        total += counts.transfers[1, part] * tables.latency[part]
    return float(total)


@pytest.mark.parametrize("seed", range(6))
def test_seconds_of_parts_on_a_path(seed: int) -> None:
    tables, counts = random_tables(seed)
    seconds = mixture_tables(tables, counts)
    for part in range(4):
        for start in range(6):
            for end in range(6):
                assert seconds[part, start, end] == pytest.approx(expected(tables, counts, part, start, end))
    rows = np.array([(0, *own, 5) for own in combinations(range(1, 5), 3)])
    sums = [sum(seconds[part, row[part], row[part + 1]] for part in range(4)) for row in rows]
    assert path_seconds(tables, counts, rows).tolist() == pytest.approx(sums)


@pytest.mark.parametrize("seed", range(6))
def test_the_least_that_follows(seed: int) -> None:
    """Of all cuts behind a place, and those of the least of all."""
    tables, counts = random_tables(seed)
    seconds = mixture_tables(tables, counts)
    remaining = remaining_seconds(seconds)
    assert remaining[4].tolist() == [np.inf] * 5 + [0.0]
    for part in range(4):
        for start in range(6):
            ways = combinations(range(start + 1, 5), 3 - part)
            sums = [
                sum(
                    seconds[part + n, a, b]
                    for n, (a, b) in enumerate(zip((start, *way), (*way, 5), strict=True))
                )
                for way in ways
            ]
            assert remaining[part, start] == pytest.approx(min(sums, default=np.inf))
    cuts = least_cuts(seconds, remaining)
    if cuts is None:
        assert remaining[0, 0] == np.inf
        return
    assert sum(seconds[part, cuts[part], cuts[part + 1]] for part in range(4)) == pytest.approx(
        remaining[0, 0]
    )


@pytest.mark.parametrize(
    ("ranks", "profile", "expected"),
    [((0, 1, 2), None, 1.0 + 2 * 0.5), ((1, 2), None, 1.0), ((0, 1), None, 1.5), ((0, 1, 2), "own", 3.0)],
)
def test_devices_that_all_are_worth(ranks: tuple[int, ...], profile: str | None, expected: float) -> None:
    """One of half the speed half of one of the fastest; with costs of its own each counts whole."""
    fast, slow = Device("fast", None, 2.0), Device("slow", None, 1.0, profile=profile)
    groups = ((fast, 1), (slow, 2))
    topology = SimpleNamespace(
        kinds=(fast, slow),
        gpus=3,
        groups=groups,
        count_kinds=lambda own: {fast: sum(r == 0 for r in own), slow: sum(r > 0 for r in own)},
    )
    family: Any = SimpleNamespace(placement=SimpleNamespace(ranks=ranks))
    space: Any = SimpleNamespace(topology=topology)
    assert _fast_devices(space, family) == expected
    alone: Any = SimpleNamespace(topology=SimpleNamespace(kinds=(slow,)))
    assert _fast_devices(alone, family) == len(ranks)


@pytest.mark.parametrize("name", ["zb-h1", "1f1b", "interleaved"])
def test_the_path_through_all_actions_of_a_device(name: str) -> None:
    """Every micro-batch forward and backward once in each of its parts, and what follows the last of them."""
    virtual = 2 if name == "interleaved" else 1
    program = find_schedule(name).program(2, 4, virtual)
    paths = work_paths(program)
    assert len(paths) == 2
    for device, path in enumerate(paths):
        for other in range(2):
            for chunk in range(virtual):
                row = path.actions[other * virtual + chunk]
                assert row[:2].tolist() == ([4.0, 4.0] if other == device else [0.0, 0.0])
        assert path.actions[:, 6].sum() == 1.0
        assert path.actions[device * virtual : (device + 1) * virtual, 6].sum() == 1.0
        assert not path.transfers.any()
