"""Two tables of PipeDream's programme joined, one entry after another."""

from __future__ import annotations

from contextlib import nullcontext
from math import inf
from typing import Any

import numpy as np
import pytest

from pplan.planner.planners.pipedream_planner import Instance, Programme, Tables, TooMuchWork
from pplan.planner.planners.replica_groups import Tier


def instance(blocks: int, **more: Any) -> Instance:
    """Of layers of a second each; no stage ends before it begins."""
    places = np.arange(blocks + 1)
    seconds = np.where(places[None] > places[:, None], 1.0 * (places[None] - places[:, None]), inf)
    return Instance(
        seconds, np.zeros(seconds.shape), np.zeros(blocks + 1), (Tier(3, 1.0), Tier(2, 1.0)), **more
    )


@pytest.mark.parametrize("places", [5, 16, 35])
def test_a_stage_and_what_stands_behind_it(places: int) -> None:
    """By the best place between, of stages that end behind their beginning."""
    for seed in range(6):
        random = np.random.default_rng(seed)
        programme = Programme(instance(places - 1), 1)
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
        assert tables._join(first, rest[:, -1]).tolist() == [row[-1] for row in expected]


def test_more_than_it_may_compare() -> None:
    """A sixth of the cube of the cut points for each pair of tables."""
    first = np.triu(np.ones((12, 12)), 1)
    for work, is_enough in ((12**3 / 6, True), (12**3 / 6 - 1, False)):
        tables = Tables(Programme(instance(11), 1, work), 0, 1, 0)
        with nullcontext() if is_enough else pytest.raises(TooMuchWork):
            tables._join(first, first)


def test_states_that_are_never_better_are_left_out() -> None:
    """Of more stages behind, but no faster anywhere; and of no stage that fits."""
    tables, rows = Tables(Programme(instance(3), 3), 0, 1, 0, 3), {2: 2.0, 0: 3.0, 1: 3.0, 3: inf}
    stages = {then: np.full((4, 4), own) for then, own in rows.items()}
    best = tables.best(lambda *_: stages, 1)
    assert {then: row.tolist() for then, row in best.items()} == {0: [3.0] * 4, 2: [2.0] * 4}
