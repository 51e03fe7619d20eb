"""Dynamic programme of stages on consecutive devices, from the last stage back, for any cost rule.

A state is the number of devices that the stages from a cut point on use, and the number of the first of these
stages. For each state and cut point, the programme keeps the least value to which a stage in front can be
added. Values are sums of terms. Each planner's rule combines the terms by maximum, sum, or both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import numpy as np

from ..stage_table import Floats, Indices

Values = Floats
"""(terms, numbers of devices, cut points) values of the stages from a cut point on, by devices used."""


@dataclass(frozen=True)
class StageRule:
    """Cost rule of a planner.

    Attributes:
        stage: Function of (size, stages to the last, rests, values) that returns the (terms, rests, cut
            points, cut points) values with a stage of `size` devices in front. The later stages use each of
            the numbers of devices `rests`.
        cut: Function of (size, size of the following stage, rests, values) that returns the values with the
            transfer before them. None if transfers belong to stages or do not count.
        terms: Number of terms.
    """

    stage: Callable[[int, int, Indices, Values], Floats]
    cut: Callable[[int, int, Indices, Values], Values] | None = None
    terms: int = 1


class StagePlan(NamedTuple):
    """Value of a plan, with the ends (cut points) and devices of its stages."""

    value: float
    ends: tuple[int, ...]
    sizes: tuple[int, ...]


class _States(NamedTuple):
    """Best plans whose first stage has one size.

    Attributes:
        values: Their values.
        end: Where the first stage ends, by devices of the later stages and the cut point where it starts.
        following: Size of the next stage, by these devices and the cut point between.
    """

    values: Values
    end: Indices
    following: Indices


def least_plans(
    rule: StageRule,
    sizes: Sequence[int],
    devices: int,
    cut_points: int,
    most_stages: int,
    *,
    use_all: bool = True,
) -> Iterator[StagePlan]:
    """Yield the plan of the least value for each number of stages, if there is one.

    Args:
        rule: Costs of stages and transfers.
        sizes: Devices that a stage may have.
        devices: Number of devices.
        cut_points: Number of cut points, both ends included.
        most_stages: Most stages of a plan.
        use_all: Whether every device must be used.
    """
    nothing = np.full((rule.terms, devices + 1, cut_points), inf)
    nothing[:, 0, -1] = 0.0
    no_stage = np.zeros((devices + 1, cut_points), dtype=np.int64)
    levels = [{0: _States(nothing, no_stage, no_stage)}]
    for to_last in range(1, most_stages + 1):
        level = {
            size: states
            for size in sizes
            if size <= devices and (states := _in_front(rule, size, to_last, levels[-1])) is not None
        }
        if not level:
            return
        levels.append(level)
        value, used, size = min(
            (float(states.values[:, used, 0].sum()), used, size)
            for size, states in level.items()
            for used in range(devices if use_all else 1, devices + 1)
        )
        if value < inf:
            yield _trace(levels, value, used, size)


def _in_front(rule: StageRule, size: int, to_last: int, later: dict[int, _States]) -> _States | None:
    """Return the best plans with a stage of `size` devices in front; None if nothing can follow it."""
    ways = []
    for following, states in later.items():
        values = states.values[:, : states.values.shape[1] - size]
        if rule.cut is not None and following and len(rests := _reachable(values)):
            values = values.copy()
            values[:, rests] = rule.cut(size, following, rests, values[:, rests])
        ways.append(values)
    rest, which = _least(np.stack(ways, axis=-1))
    rests = _reachable(rest)
    if not len(rests):
        return None
    values, end = np.full_like(later[next(iter(later))].values, inf), np.zeros_like(which)
    values[:, rests + size], end[rests] = _least(rule.stage(size, to_last, rests, rest[:, rests]))
    return _States(values, end, np.array(list(later))[which])


def _reachable(values: Values) -> Indices:
    """Return the numbers of devices for which there is a plan."""
    return np.flatnonzero(np.isfinite(values[0]).any(axis=-1))


def _least(values: Floats) -> tuple[Floats, Indices]:
    """Return the values with the least sum of terms along the last axis, and their indices."""
    if len(values) == 1:
        return values.min(axis=-1), values[0].argmin(axis=-1)
    best = values.sum(axis=0).argmin(axis=-1)
    return np.take_along_axis(values, best[None, ..., None], axis=-1)[..., 0], best


def _trace(levels: Sequence[dict[int, _States]], value: float, used: int, size: int) -> StagePlan:
    place, ends, sizes = 0, list[int](), list[int]()
    for level in reversed(levels[1:]):
        used -= size
        place = int(level[size].end[used, place])
        ends.append(place)
        sizes.append(size)
        size = int(level[size].following[used, place])
    return StagePlan(value, tuple(ends), tuple(sizes))
