"""What is asked of single stages on any devices, place by place with loops, of tables of random numbers."""

from __future__ import annotations

from itertools import combinations, pairwise, product
from math import inf
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pplan.planner.pipeline_config import PipelineConfig
from pplan.planner.search import relaxed_problem as module
from pplan.planner.search.relaxed_problem import (
    DOUBLE,
    REDUCED,
    SAFE,
    SINGLE,
    RelaxedProblem,
    StageEntries,
)

LAST, CHOICES = 4, 3
"""Of the cut points; ways to have replicas."""
MODES = ("never", "always", "except_last")


def make(
    seed: int,
    schedule: str = "1f1b",
    recompute: str = "never",
    micro_batches: int = 5,
    limit: float = inf,
    **more: Any,
) -> Any:
    random = np.random.default_rng(seed)
    shape = (CHOICES, LAST + 1, LAST + 1)

    def table(low: int, high: int) -> Any:
        return random.integers(low, high, shape) / 8

    forward, backward = table(1, 20), table(8, 40)
    missing = (random.random(shape) < 0.1) | ~np.triu(np.ones(shape[1:], dtype=bool), 1)
    forward[missing] = backward[missing] = inf
    known = {
        "forward": forward,
        "backward": backward,
        "accumulation": table(0, 8),
        "exposed_allreduce": table(0, 40),
        "launches": table(0, 30),
        "cut": random.integers(0, 9, (CHOICES, LAST + 1)) / 8,
        "room": {mode: random.integers(1, 7, shape) for mode in ("never", "always")},
        "kind": np.zeros(CHOICES, dtype=int),
        "cut_points": range(LAST + 1),
        "exact": bool(seed % 2),
    }
    known["room"]["except_last"] = known["room"]["always"]
    config = PipelineConfig(schedule, recompute, micro_batches, 1)  # type: ignore[arg-type]
    return RelaxedProblem(config, SimpleNamespace(**(known | more)), 3, limit)  # type: ignore[arg-type]


PLACES = [(c, a, b) for c in range(CHOICES) for a, b in product(range(LAST + 1), repeat=2)]


@pytest.mark.parametrize(
    ("count", "remaining", "double", "single"),
    [
        (8, 1, 8.0, 8.0),
        (8, 2, 7.0, 7.5),
        (8, 3, 6.0, 7.0),
        (8, 7, 2.0, 5.0),
        (8, 8, inf, 4.5),
        (8, 20, inf, 4.5),
        (1, 1, inf, 1.0),
        (2, 1, 2.0, 2.0),
    ],
)
def test_how_often_a_stage_counts(count: int, remaining: int, double: float, single: float) -> None:
    """n micro-batches in flight: M - n + 1 times, as long as some come behind; else half of n - 1 again."""
    own = make(0, micro_batches=count)
    assert own.coefficient(DOUBLE, remaining) == double
    assert own.coefficient(SINGLE, remaining) == own.coefficient(REDUCED, remaining) == single
    assert own.weights == (DOUBLE, SINGLE, REDUCED)
    for recompute, expected in (("never", float(count)), ("except_last", count - 0.5)):
        gpipe = make(0, "gpipe", recompute, count)
        assert gpipe.coefficient(SINGLE, remaining) == expected
        assert gpipe.weights == (SINGLE, REDUCED)


def test_numbers_in_flight() -> None:
    """Each up to some; above, fewer numbers that are not larger, and not less than four fifths or so."""
    own = make(0, micro_batches=2_000)
    numbers = [own.in_flight(remaining) for remaining in range(1, 2_001)]
    assert numbers[: module.EVERY_IN_FLIGHT] == list(range(1, module.EVERY_IN_FLIGHT + 1))
    for remaining, number in enumerate(numbers, start=1):
        assert 0.8 * remaining <= number <= remaining
    # In steps of 2 from 8 on, of 3 from 16 on, 4, ... 8, and then by a quarter more.
    by_hand = {9: 8, 10: 10, 16: 16, 17: 15, 18: 18, 24: 24, 25: 24, 27: 24, 28: 28, 33: 30, 41: 36, 49: 49}
    by_hand |= {57: 56, 64: 64, 65: 60, 70: 70, 80: 80, 81: 72, 96: 96, 97: 90}
    assert {number: numbers[number - 1] for number in by_hand} == by_hand
    assert make(0, micro_batches=6).in_flight(9) == 6
    assert make(0, "gpipe", micro_batches=999).in_flight(1) == 999


@pytest.mark.parametrize("recompute", ["never", "always", "by_stage"])
@pytest.mark.parametrize("seed", range(3))
def test_seconds_where_so_many_fit(seed: int, recompute: str) -> None:
    own = make(seed, recompute=recompute)
    s = own.stages
    modes = {"never": ("never",), "always": ("always",), "by_stage": ("never", "always")}[recompute]
    for in_flight in range(1, 7):
        seconds = own.seconds(in_flight)
        for at in PLACES:
            ways = [
                float((1 + (mode == "always")) * s.forward[at] + s.backward[at])
                for mode in modes
                if in_flight <= s.room[mode][at]
            ]
            assert seconds[at] == min(ways, default=inf)


def least_ways(own: Any, each: Any) -> list[float]:
    """By cut point, over all partitions of what is before it."""
    ways = []
    for end in range(LAST + 1):
        sums = []
        for count in range(end):
            for inner in combinations(range(1, end), count):
                points = (0, *inner, end)
                sums.append(sum(min(each(c, a, b) for c in range(CHOICES)) for a, b in pairwise(points)))
        ways.append(min(sums, default=0.0))
    del own
    return ways


def rest(at: tuple[int, int, int], own: Any, x: float) -> tuple[float, float]:
    """Seconds of a stage itself, and of its host, until its gradients are summed."""
    s, count = own.stages, own.config.micro_batches
    once = s.accumulation[at] + (s.forward[at] if own.config.recompute == "except_last" else 0.0)
    mine = count * x - once + s.exposed_allreduce[at] if x < inf else inf
    return float(mine), float(count * s.launches[at])


@pytest.mark.parametrize(("recompute", "micro_batches"), [("never", 5), ("except_last", 5), ("always", 1)])
@pytest.mark.parametrize("seed", range(4))
def test_stages_of_plans_below_a_limit(seed: int, recompute: str, micro_batches: int) -> None:
    """Behind the first micro-batch of the layers before; its host before the gradients of those."""
    free = make(seed, recompute=recompute, micro_batches=micro_batches)
    s = free.stages
    lead = least_ways(free, lambda c, a, b: float(s.forward[c, a, b] + s.cut[c, b]))
    once = 1.0 if micro_batches == 1 else 0.0

    def back(c: int, a: int, b: int) -> float:
        own = s.backward[c, a, b]
        return float(own - once * s.accumulation[c, a, b] + s.cut[c, b]) if own < inf else inf

    trail = least_ways(free, back)
    assert free._lead.tolist() == lead
    assert free._trail.tolist() == trail
    x = free.seconds(1)
    assert free.in_time(x) is x
    kept = 0
    for limit in (20.0, 60.0, 120.0, 300.0):
        own = make(seed, recompute=recompute, micro_batches=micro_batches, limit=limit)
        in_time = own.in_time(x)
        for at in PLACES:
            mine, launched = rest(at, own, float(x[at]))
            reduced = float(s.exposed_allreduce[at]) if s.exact else 0.0
            later = max(mine + lead[at[1]], launched + max(reduced, trail[at[1]]))
            assert in_time[at] == (x[at] if later * SAFE < limit else inf)
            kept += bool(np.isfinite(in_time[at]))
    assert kept > 0
    whole = [
        max(mine, launched + (float(s.exposed_allreduce[c, 0, LAST]) if s.exact else 0.0))
        for c in range(CHOICES)
        for mine, launched in [rest((c, 0, LAST), free, float(x[c, 0, LAST]))]
    ]
    assert free.single_stage_step == min(whole) * SAFE


@pytest.mark.parametrize("high", [2.0, 6.0, 1e3])
@pytest.mark.parametrize("seed", range(3))
def test_entries_are_the_stages_that_are_short_enough(seed: int, high: float) -> None:
    """By pair of cut points; of each all that a bound asks."""
    own = make(seed)
    s, x = own.stages, own.seconds(2)
    entries = StageEntries.of(own, 2, high)
    expected = [
        (a * (LAST + 1) + b, c)
        for a, b, c in product(range(LAST + 1), range(LAST + 1), range(CHOICES))
        if x[c, a, b] <= high
    ]
    assert list(zip(entries.pair.tolist(), entries.choice.tolist(), strict=True)) == expected
    starts = [i for i, (pair, _) in enumerate(expected) if i == 0 or expected[i - 1][0] != pair]
    assert entries.first.tolist() == starts
    for i, (pair, c) in enumerate(expected):
        at = (c, *divmod(pair, LAST + 1))
        assert entries.x[i] == x[at]
        assert entries.accumulation[i] == s.accumulation[at]
        assert entries.forward[i] == s.forward[at]
        assert entries.exposed_allreduce[i] == s.exposed_allreduce[at]
        assert entries.cut[i] == s.cut[c, at[2]]


def test_entries_are_kept_for_one_range() -> None:
    own = make(0)
    first, other = own.entries(1, 5.0), own.entries(2, 5.0)
    assert own.entries(1, 5.0) is first
    assert own.entries(2, 5.0) is other
    assert set(own._entries) == {(1, 5.0), (2, 5.0)}
    narrow = own.entries(1, 4.0)
    assert set(own._entries) == {(1, 4.0)}
    assert narrow.x.max() <= 4.0
    assert make(0).depth == 3
    deep = make(0)
    object.__setattr__(deep, "most_stages", 99)
    assert deep.depth == LAST + 1
