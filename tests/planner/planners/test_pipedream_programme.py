"""The programme against every plan there is, both recurrences written down again, and by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf
from typing import Any

import numpy as np
import pytest

from pplan.planner.planners.pipedream_planner import (
    PAPER,
    PUBLISHED,
    Bools,
    Instance,
    NestedStage,
    Recurrence,
    Solution,
    shortest_bottleneck,
)
from pplan.planner.planners.replica_groups import Tier
from pplan.planner.stage_table import Floats

Parts = tuple[NestedStage, ...]


def between(values: Floats) -> Floats:
    running = np.concatenate([[0.0], np.cumsum(values)])
    made: Floats = running[None, :] - running[:, None]
    return made


def instance(
    seconds: list[float] | Floats,
    weights: list[float] | Floats,
    crossing: list[float] | Floats,
    tiers: tuple[Tier, ...],
    **options: Any,
) -> Instance:
    """Of layers; `crossing`: at the cuts between them."""
    valid = np.triu(np.ones((len(seconds) + 1,) * 2, dtype=bool), 1)
    own = np.where(valid, between(np.array(seconds)), inf)
    at_places = np.concatenate([[0.0], np.array(crossing, dtype=float), [0.0]])
    return Instance(own, between(np.array(weights)), at_places, tiers, **options)


def every_plan(tiers: tuple[Tier, ...], start: int, end: int, machines: int) -> Iterator[Parts]:
    """All plans of the places on at most so many components of the outermost of these levels."""
    *inside, _ = tiers
    for cut in range(start + 1, end + 1):
        for replicas in range(1, machines + 1):
            inner: list[Parts] = [()]
            if inside:
                inner = list(every_plan(tuple(inside), start, cut, inside[-1].machines))
            rest: list[Parts] = [()]
            if cut < end:
                rest = list(every_plan(tiers, cut, end, machines - replicas))
            for own in inner:
                for more in rest:
                    yield (NestedStage(start, cut, replicas, own), *more)


def bottleneck(at: Instance, parts: Parts, level: int, published: bool) -> float:
    """As the recurrences' authors write them."""
    bandwidth, slowest = at.tiers[level].bandwidth, 0.0
    for index, part in enumerate(parts):
        m, bytes = part.replicas, float(at.weights[part.start, part.end])
        if part.inner:
            compute = bottleneck(at, part.inner, level - 1, published)
        else:
            compute = float(at.seconds[part.start, part.end])
        if published:
            stage = (compute + 4 * (m - 1) * bytes / (bandwidth * m)) / m
        else:
            stage = max(compute, 2 * (m - 1) * bytes / bandwidth) / m
        cut = 2 * float(at.crossing[part.start]) / bandwidth if index else 0.0
        slowest = max(slowest, stage, cut / m if published else cut)
    return slowest


def flat(parts: Parts) -> list[tuple[int, int, int]]:
    return [stage for part in parts for stage in part.flat()]


def all_fit(at: Instance, parts: Parts) -> bool:
    stages = flat(parts)
    most = at.most_replicas or inf
    return all(
        devices <= most and (at.fits is None or bool(at.fits(devices, len(stages) - 1 - index)[i, j]))
        for index, (i, j, devices) in enumerate(stages)
    )


def uses_all(parts: Parts, tiers: tuple[Tier, ...]) -> bool:
    *inside, outer = tiers
    return sum(part.replicas for part in parts) == outer.machines and all(
        not inside or uses_all(part.inner, tuple(inside)) for part in parts
    )


def best_of_all(at: Instance, published: bool) -> float:
    return min(
        (
            bottleneck(at, parts, len(at.tiers) - 1, published)
            for parts in every_plan(at.tiers, 0, at.last, at.tiers[-1].machines)
            if all_fit(at, parts) and (not at.use_all or uses_all(parts, at.tiers))
        ),
        default=inf,
    )


def random_limits(rng: np.random.Generator, blocks: int, tightness: float) -> Callable[[int, int], Bools]:
    """A stage needs a part that replicas share, and something for each stage behind it."""
    need, each = between(rng.random(blocks)), between(rng.random(blocks)) * rng.random() * 2
    limit = tightness * (need[0, -1] + each[0, -1])
    return lambda replicas, behind: need * (0.3 + 0.7 / replicas) + each * behind <= limit


FEW = range(8)
LEVELS = {
    "one": (6, (5,)),
    "two": (4, (3, 2)),
    "two, outer wider": (4, (2, 3)),
    "three": (3, (2, 2, 2)),
}


def random_instance(seed: int, levels: str, published: bool) -> Instance:
    blocks, machines = LEVELS[levels]
    rng = np.random.default_rng([seed, blocks, *machines])
    tiers = tuple(Tier(count, float(10 ** rng.uniform(-0.5, 1.5))) for count in machines)
    return instance(
        rng.random(blocks),
        rng.random(blocks) * (rng.random(blocks) < 0.7),
        rng.random(blocks - 1),
        tiers,
        recurrence=PUBLISHED if published else PAPER,
        fits=random_limits(rng, blocks, rng.uniform(0.05, 0.6)) if seed % 3 else None,
        most_replicas=int(rng.integers(1, 6)) if seed % 4 == 0 else None,
        use_all=seed % 5 == 0,
    )


@pytest.mark.slow
@pytest.mark.parametrize("published", [False, True], ids=["paper", "published"])
@pytest.mark.parametrize("levels", LEVELS)
def test_no_plan_is_faster(levels: str, published: bool) -> None:
    feasible = bitten = 0
    for seed in range(80):
        at = random_instance(seed, levels, published)
        expected, found = best_of_all(at, published), shortest_bottleneck(at)
        if found is None:
            assert expected == inf
            continue
        check(at, found, expected, published)
        feasible += 1
        free = shortest_bottleneck(Instance(**{**vars(at), "fits": None}))
        bitten += free is not None and free.seconds < found.seconds
    assert feasible >= 15
    assert bitten >= 3


@pytest.mark.parametrize("published", [False, True], ids=["paper", "published"])
@pytest.mark.parametrize("levels", ["one", "two", "two, outer wider"])
def test_no_plan_is_faster_of_a_few(levels: str, published: bool) -> None:
    for seed in FEW:
        at = random_instance(seed, levels, published)
        expected, found = best_of_all(at, published), shortest_bottleneck(at)
        if found is None:
            assert expected == inf
        else:
            check(at, found, expected, published)


def check(at: Instance, found: Solution, expected: float, published: bool) -> None:
    """The value is the best, and the plan has it."""
    assert found.seconds == pytest.approx(expected, rel=1e-12)
    assert bottleneck(at, found.parts, len(at.tiers) - 1, published) == pytest.approx(expected, rel=1e-12)
    assert all_fit(at, found.parts)
    starts, ends, _ = zip(*flat(found.parts), strict=True)
    assert starts == (0, *ends[:-1])
    assert ends[-1] == at.last
    if at.use_all:
        assert uses_all(found.parts, at.tiers)


def counts(found: Solution | None) -> list[tuple[int, int]]:
    """(end, devices) by stage."""
    assert found is not None
    return [(end, devices) for _, end, devices in found.flat()]


class TestByHand:
    """Three layers that compute 6, 3 and 1 s; all weights are in the last, and little crosses before it."""

    def at(self, machines: int, recurrence: Recurrence = PAPER, **options: Any) -> Instance:
        tiers = (Tier(machines, 10.0),)
        return instance([6, 3, 1], [0, 0, 100], [50, 5], tiers, recurrence=recurrence, **options)

    def test_published_adds_up_and_divides_cuts(self) -> None:
        # Two on everything: (10 + 4 * 100 / (10 * 2)) / 2 = 15 s, where the paper takes 10 s.
        alone: dict[str, Any] = {
            "fits": lambda *_: np.array([[i == 0 and j == 3 for j in range(4)] for i in range(4)])
        }
        paper, published = (
            shortest_bottleneck(self.at(2, use_all=True, **alone)),
            shortest_bottleneck(self.at(2, PUBLISHED, use_all=True, **alone)),
        )
        assert paper is not None
        assert published is not None
        assert (paper.seconds, published.seconds) == (10.0, 15.0)
        # With the last two layers on two devices and no weights, what they receive comes in half the time.
        light = instance([1, 1], [0, 0], [30], (Tier(3, 10.0),), use_all=True, most_replicas=2)
        published = shortest_bottleneck(Instance(**{**vars(light), "recurrence": PUBLISHED}))
        assert published is not None
        assert (published.seconds, counts(published)) == (3.0, [(1, 1), (2, 2)])
