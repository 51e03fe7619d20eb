"""PipeDream's programme run as often as it takes: how much of memory and of the cuts it has to look at.

And the levels of bandwidth that it plans on, and the devices of the stages that it makes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import gcd, prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...cost_models.topology import Topology
from .pipedream_instance import Bottleneck, Instance, NestedStage, Tier
from .pipedream_programme import Programme


def list_tiers(topology: Topology) -> tuple[tuple[Tier, ...], str]:
    """The levels from the innermost, and in words what they leave out (nothing: an empty string).

    A level whose last group has fewer members is planned in the largest groups that all are made of: 12
    devices in nodes of 8 as three groups of 4, joined as nodes are; 9 as single devices. The links are then
    as slow as between nodes, or slower than they are.
    """
    tiers, inner, whole = list[Tier](), 1, 1
    uneven = False
    for level in topology.levels:
        whole = topology.gpus if level.size is None else min(whole * level.size, topology.gpus)
        group = gcd(whole, topology.gpus)
        uneven = uneven or group < whole
        if group > inner:
            tiers.append(Tier(group // inner, level.link.bandwidth_bytes_per_second))
            inner = group
        if whole == topology.gpus:
            break
    if not tiers:
        tiers = [Tier(1, topology.levels[0].link.bandwidth_bytes_per_second)]
    note = f"the groups of a level are uneven: planned as {_shape(tiers)} devices" if uneven else ""
    return tuple(tiers), note


def _shape(tiers: Sequence[Tier]) -> str:
    return " x ".join(str(tier.machines) for tier in reversed(tiers))


def place_parts(parts: Sequence[NestedStage], tiers: Sequence[Tier]) -> list[tuple[int, ...]]:
    """The ranks of every stage of devices, in order: components are taken in turn.

    A stage of an outer level on several components has its inner stages on each of them: their replicas are
    those of all copies.
    """
    return list(_devices(parts, [tier.machines for tier in tiers], [0]))


def _devices(
    parts: Sequence[NestedStage], machines: Sequence[int], bases: Sequence[int]
) -> Iterator[tuple[int, ...]]:
    size, first = prod(machines[:-1]), 0
    for part in parts:
        copies = [base + size * (first + own) for base in bases for own in range(part.replicas)]
        first += part.replicas
        if part.inner:
            yield from _devices(part.inner, machines[:-1], copies)
        else:
            yield tuple(copies)


WORK = 4e9
"""What the programmes of one plan may compare, a nanosecond or two each."""
COARSE = 24
"""Places, or up to twice as many, that a long chain is planned over first."""
QUICK = 1e9
"""Comparisons up to which a chain is planned over all cut points at once, where memory is no matter."""

GUESSES = (1.2, 2.0, 4.0, np.inf)
"""Limits of the bottleneck under which a plan that fits is looked for, in what it were without memory."""


class Solution(NamedTuple):
    """The shortest bottleneck, the stages of the outermost level, and how many cut points were looked at."""

    seconds: float
    parts: tuple[NestedStage, ...]
    places: int

    def flat(self) -> list[tuple[int, int, int]]:
        """(start, end, devices) of the stages of devices, in order."""
        return [stage for part in self.parts for stage in part.flat()]


def fastest(instance: Instance, work: float = WORK) -> Solution | None:
    """The plan with the shortest bottleneck; None where none fits.

    Exact, unless the cut points are too many for `work`: then over as many of them as it allows (`cut
    points`). Of equal plans one with the fewest components of the outermost level; then with no further cut,
    or with the most components on the first stage, and its earliest end.

    Long chains are planned over few cut points first: the plan is a limit for the next one, over more.
    """
    best: Solution | None = None
    depth, before, total = -1, 0.0, 0.0
    for count in _counts(instance):
        points = _select_points(instance, count)
        bottleneck, depth, spent = _deep_enough(
            instance.thinned(points), depth, best.seconds if best else np.inf
        )
        if bottleneck is not None:
            best = Solution(
                bottleneck.seconds, tuple(_renumber(part, points) for part in bottleneck.parts), len(points)
            )
        total += spent
        if total + spent * max(spent / before if before else 1.0, 1.0) > work:
            break
        before = spent
    return best


def _deep_enough(instance: Instance, depth: int, limit: float) -> tuple[Bottleneck | None, int, float]:
    """The plan, with the depth that it took and what was compared.

    Memory is looked at only as deep as it bites: with the stages behind counted up to a depth (-1: memory is
    not looked at), and none being less than there are, every plan that fits stays in. If the best of them
    fits, it is the best. Without a limit, one is guessed by what memory would allow at best, as tables are
    short under it, and raised until there is a plan.
    """
    spent, limits = 0.0, [limit]
    while True:
        programme = Programme(
            instance if depth >= 0 else replace(instance, fits=None), max(depth, 0), limits[0]
        )
        bottleneck = programme.solution()
        spent += programme.work
        large = [] if bottleneck is None else _too_large(bottleneck.parts, instance)
        if bottleneck is not None and depth < 0 and large and np.isinf(limit):
            limits = [bottleneck.seconds * share for share in GUESSES]
        if bottleneck is None and len(limits) > 1:
            limits.pop(0)
        elif large:
            depth = 0 if depth < 0 else min(large)
        else:
            return bottleneck, depth, spent


def _too_large(parts: tuple[NestedStage, ...], instance: Instance) -> list[int]:
    """The numbers of stages behind those that do not fit."""
    fits, flat = instance.fits, [stage for part in parts for stage in part.flat()]
    if fits is None:
        return []
    behind = range(len(flat) - 1, -1, -1)
    return [b for b, (i, j, devices) in zip(behind, flat, strict=True) if not fits(devices, b)[i, j]]


def _counts(instance: Instance) -> list[int]:
    """All cut points, and before them halves of halves, where the programme is not quick at once."""
    *inside, outer = [tier.machines**2 / 2 for tier in instance.tiers]
    comparisons = outer * instance.last**2 + sum(inside) * instance.last**3 / 3
    counts = [instance.last]
    if instance.fits is not None or comparisons > QUICK:
        while counts[0] >= 2 * COARSE:
            counts.insert(0, counts[0] // 2)
    return counts


def _renumber(part: NestedStage, points: npt.NDArray[np.int64]) -> NestedStage:
    inner = tuple(_renumber(own, points) for own in part.inner)
    return NestedStage(int(points[part.start]), int(points[part.end]), part.replicas, inner)


def _select_points(instance: Instance, count: int) -> npt.NDArray[np.int64]:
    """About so many cut points, or all: of equal shares of the seconds the cut of each that least crosses."""
    if count >= instance.last:
        return np.arange(instance.last + 1)
    done = instance.running[1:]
    share = np.floor(done[:-1] / max(float(done[-1]), 1e-300) * (count - 1))
    starts = np.flatnonzero(np.diff(share, prepend=-1.0)) + 1
    inner = [a + int(instance.crossing[a:b].argmin()) for a, b in pairwise([*starts, instance.last])]
    return np.array([0, *inner, instance.last])
