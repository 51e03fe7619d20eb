"""Each question about partitions against all partitions that there are, of tables of random numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, product
from math import inf
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pplan.planner.partition_bound import SHARES, Partitions, _least_sum, _Parts

LAST = 4
"""Of the cut points."""


def partitions_of() -> Iterator[tuple[tuple[int, int], ...]]:
    """Of the layers, into any number of parts."""
    for count in range(LAST):
        for inner in combinations(range(1, LAST), count):
            yield tuple(pairwise((0, *inner, LAST)))


def make(seed: int, **more: Any) -> Any:
    """Tables of quarters for one to three numbers of replicas; some parts may not be."""
    random = np.random.default_rng(seed)
    counts = sorted(random.choice([1, 2, 3], int(random.integers(1, 4)), replace=False).tolist())
    known = {
        "gpus": int(random.integers(2, 6)),
        "counts": tuple(counts),
        "micro_batches": 4,
        "copies": int(random.choice([1, 1, 2])),
        "first": float(random.choice([1.0, 0.5])),
        "straight": bool(random.integers(2)),
        "splits": bool(random.integers(2)),
        "together": bool(random.integers(2)),
        "turns": [None, 1, 2][random.integers(3)],
        "slowest": 0.5,
        "size": 6,
    }
    settings: Any = SimpleNamespace(**(known | more))
    settings.capacity = settings.gpus * 0.75
    own: Any = Partitions(settings, None)  # type: ignore[arg-type]

    def table(high: int) -> Any:
        return random.integers(0, high, (LAST + 1, LAST + 1)) / 4

    parts = []
    for count in counts:
        forward, work = table(6), table(8)
        work[random.random(work.shape) < 0.15] = inf
        work[np.tril_indices(LAST + 1)] = inf
        crossing = random.integers(0, 9, LAST + 1).astype(np.float64)
        memory = random.random(work.shape)
        parts.append(
            _Parts(
                count, forward, forward + table(6), work, table(5), table(3), memory, crossing, 3.0 + count
            )
        )
    lead, trail = (np.append(0.0, np.cumsum(random.integers(0, 3, LAST) / 4)) for _ in "lt")
    shape = SimpleNamespace(cut_points=range(LAST + 1), valid=np.zeros((LAST + 1, LAST + 1)))
    cuts = random.integers(0, 4, LAST + 1) / 4
    cuts[-1] = 0.0
    known = {"_parts": parts, "_lead": lead, "_trail": trail, "_fastest": (8.0, 0.25), "_table": shape}
    vars(own).update(known | {"_over_cuts": random.integers(0, 40, LAST + 1) / 4, "_cuts": cuts})
    return own


@pytest.mark.parametrize("turns", [None, 0, 1, 2, 5])
def test_the_least_sum_of_all_partitions(turns: int | None) -> None:
    for seed in range(12):
        random = np.random.default_rng(seed)
        costs = [random.integers(1, 30, (LAST + 1, LAST + 1)) / 4 for _ in range(1 + seed % 3)]
        costs[0][random.random(costs[0].shape) < 0.4] = inf
        sent = random.random(LAST + 1) < 0.5
        sums = [inf]
        for own in partitions_of():
            free = [end for _, end in own[:-1] if not sent[end]]
            if turns is None or len(free) <= turns:
                sums.append(sum(float(min(cost[part] for cost in costs)) for part in own))
        assert _least_sum(costs, sent, turns) == min(sums)
    assert _least_sum([], np.ones(LAST + 1, dtype=bool), turns) == inf


def ends_by(parts: _Parts, at: tuple[int, int], seconds: float, lead: float, count: float) -> bool:
    launched = count * parts.launches[at] + parts.after[at]
    return bool(lead + count * parts.work[at] + parts.after[at] <= seconds and launched <= seconds)


@pytest.mark.parametrize("seed", range(8))
def test_parts_with_these_replicas_in_their_order(seed: int) -> None:
    """Of all cuts, each part after those before it and what is sent to other devices."""
    own, answers = make(seed), set[bool]()
    by_count = {parts.replicas: parts for parts in own._parts}
    count = own.settings.micro_batches // own.settings.copies
    for length in (1, 2, 3):
        for replicas in product(by_count, repeat=length):
            for is_sent in product((False, True), repeat=length - 1):
                for seconds in (4.0, 7.0, 12.0):
                    ways = (
                        _is_taken(own, by_count, chosen, replicas, is_sent, seconds, count)
                        for chosen in partitions_of()
                        if len(chosen) == length
                    )
                    expected = any(ways)
                    assert own.may_take(replicas, is_sent, seconds) == expected
                    answers.add(expected)
    assert answers == {True, False}
    assert not own.may_take((7,), (), inf)
    assert own.may_take((own._parts[0].replicas,), (), 1e9) == np.isfinite(own._parts[0].work[0, LAST])


def _is_taken(
    own: Any,
    by_count: dict[int, _Parts],
    chosen: Sequence[tuple[int, int]],
    replicas: Sequence[int],
    is_sent: Sequence[bool],
    seconds: float,
    count: int,
) -> bool:
    lead = 0.0
    for index, (at, each) in enumerate(zip(chosen, replicas, strict=True)):
        parts = by_count[each]
        if not ends_by(parts, at, seconds, lead, count):
            return False
        lead += own.settings.first * parts.forward[at]
        if index < len(is_sent) and is_sent[index]:
            sent = min(parts.crossing[at[1]], by_count[replicas[index + 1]].crossing[at[1]]) / 8.0
            if lead + count * sent > seconds:
                return False
            lead += own.settings.first * sent
    return True


@pytest.mark.parametrize("seed", range(40))
def test_parts_that_share_the_devices(seed: int) -> None:
    """Where on the same devices they are quick enough, or of every mixture of two sums some partition has
    room; the first sum of the devices' time, the others of all-reduces and memory."""
    own = make(seed)
    settings, together = own.settings, inf
    for parts in own._parts if settings.together else ():
        for chosen in partitions_of():
            if all(np.isfinite(parts.work[at]) for at in chosen):
                reduced = sum(float(parts.after[at]) for at in chosen)
                together = min(together, max(4 * parts.whole, reduced))
    for seconds in (2.0, 3.0, 4.5, 6.0, 9.0, 14.0, 30.0):
        assert own.may_share(seconds) == (together <= seconds or _has_room(own, seconds))
    assert own._least_together == together
    assert own.may_share(1e6) or not _has_room(own, 1e6)


def _has_room(own: Any, seconds: float) -> bool:
    settings = own.settings
    each = settings.micro_batches / settings.copies

    def costs(at: tuple[int, int]) -> list[tuple[float, float, float]]:
        """Of every number of replicas with which the part ends in time."""
        found, (start, _) = [], at
        cheapest = 4 * min(float(parts.replicas * parts.work[at]) for parts in own._parts)
        for parts in own._parts:
            lead, trail, work = own._lead[start], own._trail[start], float(parts.work[at])
            passes = each * min(work, float(parts.around[at]))
            if not ends_by(parts, at, seconds, lead, each) or lead + passes + trail > seconds:
                continue
            needs = 4 * work
            if settings.straight:
                after = float(parts.after[at])
                needs += 0.5 * (lead + (after if settings.splits else max(after, trail)))
            busy = parts.replicas * needs
            if settings.copies > 1:
                busy = max(busy / settings.copies, cheapest)
            sent = (parts.replicas + settings.copies - 1) * float(parts.after[at])
            found.append((busy, sent, parts.replicas * seconds * float(parts.memory[at])))
        return found

    every = {at: costs(at) for at in combinations(range(LAST + 1), 2)}
    mixtures = [(0, 1.0), *product((0, 1), SHARES)]
    for which, share in mixtures:
        limit = (share * settings.capacity + (1 - share) * settings.gpus) * seconds * (1 + 1e-9)
        sums = []
        for chosen in partitions_of():
            same = [end for _, end in chosen[:-1] if own._lead[end] + own._over_cuts[end] > seconds]
            if settings.turns is None or len(same) <= settings.turns:
                parts = [
                    min((share * own[0] + (1 - share) * own[1 + which] for own in every[at]), default=inf)
                    for at in chosen
                ]
                sums.append(sum(parts))
        if min(sums, default=inf) > limit:
            return False
    return True


@pytest.mark.parametrize("seed", range(40))
def test_parts_on_devices_of_their_own(seed: int) -> None:
    """By devices used and layers done the least lead, and lead and trail, each of any parts before."""
    own = make(seed, copies=1, first=1.0)
    for seconds in (3.0, 5.0, 8.0, 13.0, 40.0):
        lead, both = {(0, 0): 0.0}, {(0, 0): 0.0}
        for used in range(1, own.settings.gpus + 1):
            for parts, (start, end) in product(own._parts, combinations(range(LAST + 1), 2)):
                before = used - parts.replicas, start
                if before not in lead:
                    continue
                passes = 4 * min(float(parts.work[start, end]), float(parts.around[start, end]))
                in_time = ends_by(parts, (start, end), seconds, lead[before], 4)
                if in_time and both[before] + passes <= seconds:
                    cut, at = own._cuts[end], (used, end)
                    ahead = lead[before] + parts.forward[start, end] + cut
                    back = both[before] + parts.around[start, end] + 2 * cut
                    lead[at], both[at] = min(lead.get(at, inf), ahead), min(both.get(at, inf), back)
        assert own.may_follow(seconds) == any(end == LAST for _, end in lead)
