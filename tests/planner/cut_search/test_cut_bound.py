"""Paths through the actions of a schedule against the steps of all cuts, on tables of random seconds."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest

from pplan.cost_models.schedules import find_schedule
from pplan.cost_models.step_costs import Hosts
from pplan.cost_models.timeline import simulate
from pplan.planner.cut_search.cut_bound import (
    count_critical_path,
    device_paths,
    launch_paths,
    path_table,
    remaining_seconds,
)
from pplan.planner.cut_search.part_tables import SECONDS, PartTables

PLACES = 6
RUNS = [
    ("1f1b", 3, 1),
    ("gpipe", 2, 1),
    ("zb-h1", 3, 1),
    ("interleaved", 2, 2),
    ("zb-v", 2, 2),
    ("autopipe", 3, 1),
    ("chimera", 2, 1),
    ("naive", 3, 1),
]


def make_tables(
    name: str, devices: int, chunks: int, seed: int, late: float = 0.0, hosts: Hosts = "each"
) -> PartTables:
    """Seconds in eighths, so that every sum is exact; some parts cannot be. No action is shorter than a
    transfer, so that none waits for another one."""
    random = np.random.default_rng(seed)
    program = find_schedule(name).program(devices, 4, chunks)
    square = (PLACES, PLACES)
    ranges = {"forward": (8, 20), "backward": (8, 30), "weight": (8, 20), "exposed": (0, 90)}
    seconds: dict[str, Any] = {}
    for figure in SECONDS:
        low, high = ranges.get(figure, (1, 9))
        scale = late if "launch" in figure else float(figure != "weight" or program.splits_backward)
        seconds[figure] = {
            slot: scale * random.integers(low, high, square) / 8 for slot in program.parts_by_slot
        }
    for pipe in program.pipes[1:]:  # of one part, on other devices
        for figure in SECONDS:
            for slot, first in zip(pipe, program.pipes[0], strict=True):
                seconds[figure][slot] = seconds[figure][first]
    return PartTables(
        program,
        seconds,
        hosts=hosts,
        occupancy=random.integers(0, 9, (program.slots - 1, PLACES)) / 8,
        latency=random.integers(0, 9, program.slots - 1) / 8,
        usable=np.triu(np.ones(square, dtype=bool), 1) & (random.random((program.slots, *square)) < 0.95),
    )


def every(tables: PartTables) -> list[list[int]]:
    """All cuts that may be."""
    inner = combinations(range(1, PLACES - 1), tables.parts - 1)
    rows = [[0, *own, PLACES - 1] for own in inner]
    return [row for row in rows if all(tables.usable[i, row[i], row[i + 1]] for i in range(tables.parts))]


def exposed(tables: PartTables, cuts: list[int]) -> Any:
    """(slots,): what follows the last backward of each."""
    seconds = np.zeros(tables.program.devices * tables.program.chunks)
    for slot, table in tables.seconds["exposed"].items():
        part = tables.program.parts_by_slot[slot]
        seconds[slot.device * tables.program.chunks + slot.chunk] = table[cuts[part], cuts[part + 1]]
    return seconds


def length(tables: PartTables, cuts: list[int]) -> float:
    """Seconds of the step, with what follows the last backward of each slot."""
    timeline = simulate(tables.program, tables.costs(np.array([cuts])).candidate(0))
    order, ends = timeline.order, [timeline.step_seconds]
    for slot, after in enumerate(exposed(tables, cuts).tolist()):
        own = (order.device * tables.program.chunks + order.chunk == slot) & (order.kind > 0)
        ends.append(float(timeline.run.end[own].max()) + after)
    return float(max(ends))


def seconds_of(table: Any, cuts: list[int]) -> float:
    """Seconds of a path with these cuts."""
    return float(sum(table[part, cuts[part], cuts[part + 1]] for part in range(len(table))))


@pytest.mark.parametrize("run", [run for run in RUNS if run[0] != "chimera"])
def test_a_critical_path_is_as_long_as_its_step(run: tuple[str, int, int]) -> None:
    """And no longer than the step of any other cuts."""
    ends_exposed = 0
    for seed in range(4):
        tables = make_tables(*run, seed)
        rows = every(tables)
        lengths = [length(tables, row) for row in rows]
        for row, own in zip(rows, lengths, strict=True):
            costs = tables.costs(np.array([row])).candidate(0)
            path = count_critical_path(
                tables.program, simulate(tables.program, costs).run, exposed(tables, row)
            )
            table = path_table(tables, path)
            assert seconds_of(table, row) == own
            assert all(seconds_of(table, cuts) <= step for cuts, step in zip(rows, lengths, strict=True))
            ends_exposed += bool(path.actions[:, 6].any())
    assert ends_exposed > 0


@pytest.mark.parametrize("hosts", ["each", "one"])
@pytest.mark.parametrize("late", [0.0, 40.0])
@pytest.mark.parametrize("run", RUNS)
def test_no_step_is_shorter_than_a_path(run: tuple[str, int, int], late: float, hosts: Hosts) -> None:
    """Paths of devices are close to the step if hosts are early, and launches if they are late. Not those of
    `naive`, whose devices wait for each micro-batch."""
    nearest = [0.0, 0.0]
    for seed in range(3):
        tables = make_tables(*run, seed, late, hosts)
        paths = device_paths(tables.program), launch_paths(tables.program, hosts)
        for row in every(tables):
            step = length(tables, row)
            for index, each in enumerate(paths):
                most = max(seconds_of(path_table(tables, own), row) for own in each)
                assert most <= step + 1e-9
                nearest[index] = max(nearest[index], most / step)
    assert nearest[late > 0] > (0.5 if run[0] == "naive" else 0.85)


@pytest.mark.parametrize("seed", range(6))
def test_the_least_that_follows(seed: int) -> None:
    """The shortest way from each place on, of all cuts behind it."""
    tables = make_tables("zb-h1", 3, 1, seed)
    table = path_table(tables, device_paths(tables.program)[2])
    remaining = remaining_seconds(table)
    assert remaining[3].tolist() == [np.inf] * (PLACES - 1) + [0.0]
    for part in range(3):
        for start in range(PLACES):
            ways = combinations(range(start + 1, PLACES - 1), 2 - part)
            sums = [
                sum(
                    table[part + index, a, b]
                    for index, (a, b) in enumerate(zip((start, *way), (*way, PLACES - 1), strict=True))
                )
                for way in ways
                if start < PLACES - 1
            ]
            assert remaining[part, start] == pytest.approx(min(sums, default=np.inf))
