"""The game of paths against cuts: its weights worked out once more, its table entry by entry, critical paths
that take as long as the step that they are of, and the bound against all cuts."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest

from pplan.cost_models.schedules import StageSlot, find_schedule
from pplan.cost_models.timeline import simulate
from pplan.planner.cut_search import cut_bound
from pplan.planner.cut_search.cut_bound import (
    ROUNDS,
    CutBound,
    count_critical_path,
    launch_paths,
    mixture_tables,
    path_seconds,
    solve_game,
)
from pplan.planner.cut_search.part_tables import PartTables

PLACES = 6
RUNS = [
    ("1f1b", 3, 1),
    ("gpipe", 2, 1),
    ("zb-h1", 3, 1),
    ("interleaved", 2, 2),
    ("zb-v", 2, 2),
    ("autopipe", 3, 1),
]


def make_tables(name: str, devices: int, chunks: int, seed: int, *, late: float = 0.0) -> PartTables:
    """Seconds in eighths, so that every sum is exact; some parts may not be. No action is shorter than a
    transfer, so that none waits for another one."""
    random = np.random.default_rng(seed)
    program = find_schedule(name).program(devices, 4, chunks)
    square = (PLACES, PLACES)

    def tables(low: int, high: int) -> Any:
        return {slot: random.integers(low, high, square) / 8 for slot in program.parts_by_slot}

    zeros = {slot: np.zeros(square) for slot in program.parts_by_slot}
    launches = [{slot: late * own for slot, own in tables(1, 9).items()} for _ in range(2)]
    usable = np.triu(np.ones(square, dtype=bool), 1) & (random.random((program.slots, *square)) < 0.95)
    return PartTables(
        program,
        forward=tables(8, 20),
        backward=tables(8, 30),
        weight=tables(8, 20) if program.splits_backward else zeros,
        credit=tables(0, 8),
        forward_launch=launches[0],
        backward_launch=launches[1],
        after=tables(0, 90),
        hosts="each",
        occupancy=random.integers(0, 9, (program.slots - 1, PLACES)) / 8,
        latency=random.integers(0, 9, program.slots - 1) / 8,
        usable=usable,
    )


def every(tables: PartTables) -> list[list[int]]:
    """All cuts that may be."""
    inner = combinations(range(1, PLACES - 1), tables.parts - 1)
    rows = [[0, *own, PLACES - 1] for own in inner]
    return [row for row in rows if all(tables.usable[i, row[i], row[i + 1]] for i in range(tables.parts))]


def last_ends(tables: PartTables, cuts: list[int]) -> float:
    """Of the step, and of what follows the last backward of each slot."""
    row = np.array([cuts])
    timeline = simulate(tables.program, tables.costs(row).candidate(0))
    order, ends = timeline.order, [timeline.step_seconds]
    for (device, chunk), after in tables.after.items():
        own = (order.device == device) & (order.chunk == chunk) & (order.kind > 0)
        part = tables.program.parts_by_slot[StageSlot(device, chunk)]
        ends.append(float(timeline.run.end[own].max()) + after[cuts[part], cuts[part + 1]])
    return float(max(ends))


@pytest.mark.parametrize("run", RUNS)
def test_a_critical_path_is_as_long_as_its_step(run: tuple[str, int, int]) -> None:
    """Its counts times the seconds of what it meets: of no path of other cuts is that more than theirs."""
    seen = 0
    for seed in range(4):
        tables = make_tables(*run, seed)
        rows = every(tables)
        lengths = {tuple(row): last_ends(tables, row) for row in rows}
        for row in rows:
            costs = tables.costs(np.array([row])).candidate(0)
            after = tables.seconds_after(np.array([row]))[:, 0]
            path = count_critical_path(tables.program, simulate(tables.program, costs).run, after)
            assert path_seconds(tables, path, np.array([row])).tolist() == [lengths[tuple(row)]]
            seconds = path_seconds(tables, path, np.array(rows)).tolist()
            assert all(own <= lengths[tuple(other)] for own, other in zip(seconds, rows, strict=True))
            seen += bool(path.actions[:, 6].any())
    assert seen > 0  # what follows the last backward decides, now and then


@pytest.mark.parametrize("shape", [(1, 1), (2, 2), (3, 5), (6, 4)])
def test_the_weights_of_a_game(shape: tuple[int, int]) -> None:
    """Regret matching plus, the paths first in each turn, with averages by turn: once more, in Python's
    numbers."""
    for seed in range(5):
        values = np.random.default_rng(seed).integers(1, 40, shape).astype(np.float64)
        paths, cuts = solve_game(values)
        expected = again(values.tolist())
        assert paths.tolist() == pytest.approx(expected[0], abs=1e-9)
        assert cuts.tolist() == pytest.approx(expected[1], abs=1e-9)
    assert solve_game(np.zeros((4, 0)))[0].tolist() == [0.25] * 4
    assert solve_game(np.zeros((4, 0)))[1].tolist() == []


def again(values: list[list[float]]) -> tuple[list[float], list[float]]:
    rows, columns = len(values), len(values[0])
    mean = sum(map(sum, values)) / (rows * columns)
    table = [[own / mean for own in row] for row in values]
    row_regrets, column_regrets = [0.0] * rows, [0.0] * columns
    row_sums, column_sums = [0.0] * rows, [0.0] * columns

    def shares(regrets: list[float]) -> list[float]:
        return [own / sum(regrets) if sum(regrets) else 1 / len(regrets) for own in regrets]

    for turn in range(1, ROUNDS + 1):
        mine, theirs = shares(row_regrets), shares(column_regrets)
        gains = [sum(table[i][j] * theirs[j] for j in range(columns)) for i in range(rows)]
        mean_gain = sum(mine[i] * gains[i] for i in range(rows))
        row_regrets = [max(0.0, row_regrets[i] + gains[i] - mean_gain) for i in range(rows)]
        mine = shares(row_regrets)
        losses = [sum(table[i][j] * mine[i] for i in range(rows)) for j in range(columns)]
        mean_loss = sum(theirs[j] * losses[j] for j in range(columns))
        column_regrets = [max(0.0, column_regrets[j] + mean_loss - losses[j]) for j in range(columns)]
        theirs = shares(column_regrets)
        row_sums = [own + turn * mine[i] for i, own in enumerate(row_sums)]
        column_sums = [own + turn * theirs[j] for j, own in enumerate(column_sums)]
    weights = ROUNDS * (ROUNDS + 1) / 2
    return [own / weights for own in row_sums], [own / weights for own in column_sums]


@pytest.mark.parametrize("run", RUNS)
def test_a_turn_adds_the_least_cuts_and_a_path(run: tuple[str, int, int]) -> None:
    """The table of paths and cuts has every entry, and nothing twice; the bound is the largest of a turn, and
    no cuts take less; a turn that adds nothing is the last."""
    tables = make_tables(*run, 5, late=1.0)
    rows = every(tables)
    least = min(last_ends(tables, row) for row in rows)
    game, bounds = CutBound(tables), [0.0]
    start = len(game.paths)
    assert start == 2 * tables.program.devices  # all that a device does, and all that its host launches
    assert len(CutBound(make_tables(*run, 5)).paths) == tables.program.devices
    assert (game.bound, game.best_mixture) == (0.0, None)
    for turn in range(40):
        before = len(game.paths), len(game.cuts)
        goes_on = game.improve()
        assert goes_on == ((len(game.paths), len(game.cuts)) != before)
        assert game.best_mixture is not None
        seconds = mixture_tables(tables, game.best_mixture)
        shortest = min(sum(seconds[i, row[i], row[i + 1]] for i in range(tables.parts)) for row in rows)
        assert game.bound == pytest.approx(shortest)
        assert bounds[-1] <= game.bound <= least + 1e-9
        bounds.append(game.bound)
        if not goes_on:
            break
        if not turn:  # paths alone so far, each as likely
            assert len(game.cuts) == 1
            assert len(game.paths) <= start + 1
    assert len(game.paths) > start
    assert len({path.key for path in game.paths}) == len(game.paths)
    assert len(set(map(tuple, game.cuts))) == len(game.cuts)
    table = [
        [float(path_seconds(tables, path, np.array([row]))[0]) for row in game.cuts] for path in game.paths
    ]
    assert game._values.tolist() == table
    assert not game.add(game.cuts[0])
    new = next(row for row in rows if row not in game.cuts)
    assert game.add(new)
    assert game.cuts[-1] == new
    assert not game.add(new)
    weights = np.arange(1.0, len(game.cuts) + 1)
    costs, after = game._average(weights / weights.sum())
    each = [tables.costs(np.array([row])).candidate(0) for row in game.cuts]
    for name, values in costs.arrays().items():
        mixed = sum(w * own.arrays()[name] for w, own in zip(weights, each, strict=True)) / weights.sum()
        assert values == pytest.approx(mixed)
    ends = [tables.seconds_after(np.array([row]))[:, 0] for row in game.cuts]
    assert after == pytest.approx(sum(w * own for w, own in zip(weights, ends, strict=True)) / weights.sum())


def test_where_no_cuts_may_be() -> None:
    """The bound is infinite, and no turn gains."""
    tables = make_tables("1f1b", 3, 1, 0)
    tables.usable[1] = False
    game = CutBound(tables)
    assert not game.improve()
    assert (game.bound, game.cuts) == (np.inf, [])


@pytest.mark.parametrize("hosts", ["one", "each"])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_what_hosts_launch(name: str, hosts: Any) -> None:
    """Of each device all that it runs; of one process the forwards of all devices, and its own backwards."""
    tables = make_tables(name, 3, 1, 2, late=1.0)
    paths = launch_paths(tables.program, hosts)
    (row, *_) = every(tables)
    for device, path in zip(range(3), paths, strict=True):
        expected = np.zeros((3, cut_bound.FIGURES))
        expected[:, 4] = [4.0 * (hosts == "one" or other == device) for other in range(3)]
        expected[device, 5] = 4.0
        assert path.actions.tolist() == expected.tolist()
        assert path.transfers.shape == (2, 2)
        assert not path.transfers.any()
        seconds = [4 * tables.backward_launch[StageSlot(device, 0)][row[device], row[device + 1]]]
        seconds += [
            4 * tables.forward_launch[StageSlot(other, 0)][row[other], row[other + 1]]
            for other in (range(3) if hosts == "one" else [device])
        ]
        assert path_seconds(tables, path, np.array([row])).tolist() == [sum(seconds)]


def test_when_a_device_may_wait_for_its_host() -> None:
    """Where a launch takes longer than what it launches; where the backward is in two parts, or the host is
    one for all, wherever there is a launch."""
    tables = make_tables("1f1b", 2, 1, 1)
    slot = StageSlot(1, 0)
    assert not tables.is_late
    tables.forward_launch[slot][2, 3] = tables.forward[slot][2, 3]
    tables.backward_launch[slot][1, 4] = tables.backward[slot][1, 4] - tables.credit[slot][1, 4]
    assert not tables.is_late
    tables.forward_launch[slot][2, 3] += 0.125
    assert tables.is_late
    tables.forward_launch[slot][2, 3] = 0.0
    tables.backward_launch[slot][1, 4] += 0.125
    assert tables.is_late
    split = make_tables("zb-h1", 2, 1, 1)
    assert not split.is_late
    split.backward_launch[slot][0, 1] = 0.125
    assert split.is_late
