"""A bound on all pipelines of a configuration of which stages may be any part of a layer: for chains so long
that what cutting between layers costs is little, and pipelines so deep that filling them counts.

M micro-batches. Of a stage s with r devices, x seconds of a micro-batch forward and backward (w on average,
as its first backward takes less) and A the sum of x of the stages before it, a step T is no less than

    A + M w     its first forward came through the stages before it, its last backward goes back through them

so that it needs r devices for which r >= M (r w) / (T - A). Summed over the layers l of all stages, with the
replicas that each has,

    devices >= sum of M (r w_l) / (T - A)

and A is no less than a, the sum of x of all layers before, without those of the same stage: they take
T / (M - 1) at the most, as M w >= (M - 1) x. For every T a dynamic programme finds the least of the right
side: over runs of layers, and a rounded down to one of `CELLS`. What a run takes of devices for its seconds
is bounded by lines, the least sums of r w + slope x of its layers. Where that is more than there are, no plan
is below T. Kinds of devices have prices, none below a slower kind's: a stage on several kinds takes the
seconds of its slowest, and costs no less than as many devices of that (as in `relaxed_problem`).

Memory, transfers and all-reduces are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import inf

import numpy as np

from ...cost_models.hardware import Device
from ..stage_table import Floats
from .relaxed_stages import replica_counts
from .space import Space
from .subproblem import Family, quick_bound

RUNS = 32
"""Of layers, of about equal seconds."""
CELLS = 4_096
"""Of the seconds of the layers before."""
MOST_FILL = 32.0
"""Up to so many times the least seconds of all layers the layers before are told apart."""
WIDTH = 1.08
"""Of the ranges of seconds of a run, the larger end by the smaller."""
HALVINGS = 8
DISCOUNTS = (0.0, 0.02, 0.1)
"""By which a kind of half the speed is cheaper than by its speed."""


def fluid_bound(space: Space, family: Family, step: float) -> float:
    """Seconds that no plan of the family on any of its devices is below; `step` where none is below that."""
    low = quick_bound(space, family)
    kinds = space.topology.count_kinds(family.placement.ranks)
    few = family.config.micro_batches < 2 or not np.isfinite(step)
    if few or low >= step or any(kind.profile is not None for kind in kinds):
        return min(low, step)
    fastest = max(kind.speed for kind in kinds)
    for discount in DISCOUNTS if len({kind.speed for kind in kinds}) > 1 else DISCOUNTS[:1]:
        prices = [(own.speed / fastest) * (own.speed / fastest) ** discount for own in kinds]
        programme = _FluidProgramme(space, family, tuple(prices))
        space.budget.spend(2e8)
        space.budget.check()
        low = _largest(programme, low, step)
        if low >= step:
            break
    return low


def _largest(programme: _FluidProgramme, low: float, step: float) -> float:
    """The largest step, from `low` to `step`, that was shown to be too short."""
    if programme.needs_more(step):
        return step
    high = step
    for _ in range(HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if programme.needs_more(middle) else (low, middle)
    return low


@dataclass(frozen=True, eq=False)
class _FluidProgramme:
    """The dynamic programme of a family; `prices` of its kinds."""

    space: Space
    family: Family
    prices: tuple[float, ...]

    @property
    def _micro_batches(self) -> int:
        return self.family.config.micro_batches

    @cached_property
    def _paid(self) -> float:
        """What all devices cost."""
        counts = self.space.topology.count_kinds(self.family.placement.ranks)
        return sum(price * count for price, count in zip(self.prices, counts.values(), strict=True))

    @cached_property
    def _layers(self) -> tuple[Floats, Floats]:
        """(choices, layers) each: priced devices times mean seconds of a micro-batch, and its seconds."""
        kinds = self.space.topology.count_kinds(self.family.placement.ranks)
        recompute = int(self.family.config.recompute == "always")
        devices, seconds = [], []
        size = self.family.config.micro_batch_size
        for counts in replica_counts(self.space, self.family):
            for kind, price in zip(kinds, self.prices, strict=True):
                own = [
                    self._of_share(kind, -(-size // batch), batch, recompute)
                    for batch in counts.per_replica_batches
                ]
                devices.append(price * np.minimum.reduce([each for each, _ in own]))
                seconds.append(np.minimum.reduce([each for _, each in own]))
        return np.array(devices), np.array(seconds)

    def _of_share(self, kind: Device, fewest: int, batch: int, recompute: int) -> tuple[Floats, Floats]:
        """`_layers` of `fewest` devices of a kind, the fewest with such a share of a micro-batch."""
        costs = self.space.kind_table(kind, batch).costs
        forward = (1 + recompute) * costs.forward_seconds
        mean, whole = (
            (forward + costs.mean_backward(share)) * kind.seconds_scale
            for share in (1 / self._micro_batches, 0.0)
        )
        return fewest * mean, whole

    @cached_property
    def _runs(self) -> list[slice]:
        """Of layers."""
        before = np.cumsum(self._layers[1].min(axis=0))
        ends = np.searchsorted(before, np.linspace(0, before[-1], RUNS + 1)[1:-1]) + 1
        points = np.unique([0, *ends.tolist(), len(before)])
        return [slice(a, b) for a, b in pairwise(points.tolist())]

    @cached_property
    def _least_seconds(self) -> float:
        """Of a micro-batch in all layers."""
        return float(self._layers[1].min(axis=0).sum())

    @cached_property
    def _choices(self) -> list[tuple[Floats, Floats]]:
        """By run, the least of ranges of its seconds, and the devices times seconds that it needs in each."""
        return list(self._make_choices())

    def _make_choices(self) -> Iterator[tuple[Floats, Floats]]:
        for run in self._runs:
            devices, seconds = (own[:, run] for own in self._layers)
            least, most = float(seconds.min(axis=0).sum()), float(seconds.max(axis=0).sum())
            if not least > 0:
                yield np.zeros(1), np.zeros(1)
                continue
            count = int(np.ceil(np.log(most / least) / np.log(WIDTH))) + 1
            ranges = least * WIDTH ** np.arange(count + 1)
            steepest = float(devices.sum(axis=1).max()) / least
            slopes = np.append(0.0, steepest * np.geomspace(1e-5, 10.0, 60))
            needs = np.zeros(count)
            for slope in slopes:
                line = float((devices + slope * seconds).min(axis=0).sum())
                needs = np.maximum(needs, line - slope * ranges[1:])
            useful = np.append(True, needs[1:] < needs[:-1])  # longer, and no cheaper
            yield ranges[:-1][useful], needs[useful]

    def needs_more(self, step: float) -> bool:
        """Whether plans below so many seconds need more devices than there are."""
        own = self._micro_batches
        fill = min(MOST_FILL * self._least_seconds, step)
        if not fill > 0:
            return False
        cell = fill / CELLS
        before = cell * np.arange(CELLS)
        left = np.minimum(step, step + step / (own - 1) - before)
        cost = np.full(CELLS, inf)
        cost[0] = 0.0
        for seconds, needs in self._choices:
            shifts, later = np.minimum((seconds / cell).astype(np.int64), CELLS - 1), np.full(CELLS, inf)
            rate = own / left
            for shift, need in zip(shifts.tolist(), needs.tolist(), strict=True):
                now = cost + need * rate
                np.minimum(later[shift:], now[: CELLS - shift], out=later[shift:])
                if shift:
                    later[-1] = min(later[-1], float(now[CELLS - shift :].min()))
            cost = later
        return bool(cost.min() > self._paid * (1 + 1e-9))
