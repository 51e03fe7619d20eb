"""What PipeDream's programme leaves out, and what it adds up, one entry after another."""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np
import pytest

from pplan.planner.planners.pipedream_planner import CALL, ROWS, Instance, Programme, Tables
from pplan.planner.planners.replica_groups import Tier


def instance(blocks: int, **more: Any) -> Instance:
    """Of layers of a second each; no stage ends before it begins."""
    places = np.arange(blocks + 1)
    seconds = np.where(places[None] > places[:, None], 1.0 * (places[None] - places[:, None]), inf)
    return Instance(
        seconds, np.zeros(seconds.shape), np.zeros(blocks + 1), (Tier(3, 1.0), Tier(2, 1.0)), **more
    )


def test_what_is_of_use() -> None:
    """No slower than the limit, by so many copies, and faster than with fewer stages behind."""
    programme = Programme(instance(3), 3, 2.0)
    rows = {
        2: [1.0, 9.0, 1.0, 5.0],
        0: [6.0, 6.0 + 1e-6, 1.0, inf],
        1: [5.0, 7.0, 1.0, 6.0],
        3: [4.0, 8.0, 2.0, 5.0],
    }
    own = programme.of_use({then: np.array(row) for then, row in rows.items()}, 3)
    assert {then: row.tolist() for then, row in own.items()} == {
        0: [6.0, inf, 1.0, inf],
        1: [5.0, inf, inf, 6.0],
        2: [1.0, inf, inf, 5.0],
    }
    assert list(own) == [0, 1, 2]
    assert programme.work == 4 * 4 * 4
    free, row = Programme(instance(3), 3, inf), np.array([1.0, inf])
    assert free.of_use({1: row}, 1)[1] is row
    assert free.work == 0
    assert list(free.of_use({1: row, 0: row}, 1)) == [0]
    limited = Programme(instance(3), 3, 2.0)
    assert limited.of_use({1: np.array([2.0, 2.1])}, 1)[1].tolist() == [2.0, inf]
    assert limited.of_use({1: np.array([2.1, inf])}, 1) == {}


@pytest.mark.parametrize("places", [5, ROWS, 2 * ROWS + 3])
def test_a_stage_and_what_stands_behind_it(places: int) -> None:
    """By the best place between, of stages that end behind their beginning; what is compared is counted."""
    for seed in range(6):
        random = np.random.default_rng(seed)
        programme = Programme(instance(places - 1), 1, inf)
        tables = Tables(programme, 0, 1, 0, None)
        first, rest = (np.triu(random.integers(1, 9, (places, places)) * 1.0, 1) for _ in range(2))
        first[first == 0], rest[rest == 0] = inf, inf
        for table, share in ((first, 0.5), (rest, 0.3)):
            table[random.random(table.shape) < share] = inf
        first[: places // 2, : seed % 3 + 1] = inf
        expected = [
            [min(max(first[i, s], rest[s, j]) for s in range(places)) for j in range(places)]
            for i in range(places)
        ]
        assert tables._join(first, rest).tolist() == expected
        assert programme.work >= CALL + 6 * first.size
        before, column = programme.work, rest[:, -1]
        assert tables._join(first, column).tolist() == [row[-1] for row in expected]
        assert programme.work == before + CALL + 6 * first.size


def test_work_of_one_join() -> None:
    """Two blocks of rows, in each the columns and ends that some stage has."""
    places = ROWS + 2
    programme = Programme(instance(places - 1), 1, inf)
    tables = Tables(programme, 0, 1, 0, None)
    first, rest = (np.full((places, places), inf) for _ in range(2))
    first[0, 3:6], rest[4, 7], rest[5, 9] = 1.0, 2.0, 3.0
    joined = tables._join(first, rest)
    assert (joined[0, 7], joined[0, 9], np.isfinite(joined).sum()) == (2.0, 3.0, 2)
    # Sixteen rows, ends at 3, 4 and 5, and places behind 3 up to the last that is reached, 9.
    assert programme.work == CALL + 6 * first.size + CALL + ROWS * 3 * 6


def test_memory_limits_that_are_the_same() -> None:
    """Numbers of stages that fit: none, all, or others; the same for the same."""
    answers = {1: [1, 1, 1], 2: [0, 0, 0], 3: [1, 0, 1], 4: [0, 0, 1], 5: [1, 0, 1]}

    def fits(replicas: int, behind: int) -> Any:
        table = np.zeros((3, 3), dtype=bool)
        table[0, 1], table[0, 2], table[1, 2] = (bool(own) for own in answers[replicas])
        return table if behind < 2 else np.zeros((3, 3), dtype=bool)

    programme = Programme(instance(2, fits=fits, most_replicas=5), 2, inf)
    assert [programme._mask(replicas, 0) for replicas in (1, 2, 3, 4, 5, 6)] == [0, -1, 1, 2, 1, -1]
    assert [programme._mask(replicas, 2) for replicas in (1, 3)] == [-1, -1]
    assert programme._device(2, 0) == {}
    assert {b: list(programme._device(1, b)) for b in (0, 1)} == {0: [1], 1: [2]}
    assert np.isfinite(programme._device(3, 0)[1]).tolist() == fits(3, 0).tolist()
    assert programme._device(1, 0)[1].tolist() == programme.at.seconds.tolist()
    free = Programme(instance(2), 2, inf)
    assert [free._mask(own, 0) for own in (1, 99)] == [0, 0]
    # Of components of one to three devices beside a copy, with so many stages behind and up to the depth.
    assert programme._signature(0, 1, 1) == tuple(programme._mask(n, b) for n in (1, 2, 3) for b in (1, 2))
    small = Programme(instance(2, fits=lambda n, _: fits(min(n, 5), 0)), 1, inf)
    assert small._signature(1, 1, 1) == tuple(small._mask(n, 1) for n in (1, 2, 3, 4, 6))
