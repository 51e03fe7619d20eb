"""A bound on all pipelines of a configuration that sees all of the fill and drain, with stages of any parts
of layers: for chains so long that what cutting between layers costs is little.

M micro-batches. Of a stage: x seconds of a micro-batch forward and backward, a what its first backward does
not take; t the longest x of all stages. `bounds_1f1b` (X + Y, the round trip on both sides) says of a stage
with n < M - 1 stages after it

    T >= sum of x of the stages before + (M - n) x - a + sum of (2 x - a) of the stages after

Of the longest stage, and, where M - 1 stages or more follow that, of the one with n = M - 2, this is no less
than the first of

    1F1B     (M - 1) t + sum of (2 x - a - t) over all stages
    GPipe    (M - 1) t + sum of (x - a) over all stages                        (`bounds_gpipe`)

as x >= 2 x - a - t. Any stages may be, as long as all have no more devices than there are, which is priced as
in `relaxed_problem`: kinds have prices, none below a slower kind's. For t from `low` to `high`, r devices of
a stage that cost p together count in 1F1B with

    p - high + 2 x - a    no less than the sum over its layers of    (p - high) x / high + 2 x - a

where p >= high, as x <= high; where p < high, as it has a layer at least, than that of p - high + 2 x - a. So
every layer has the replicas that suit it best, and the bound is the least over ranges of t, the weakest of
which are halved again and again.

Memory, transfers and all-reduces are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from math import inf, sqrt

import numpy as np

from ...cost_models.topology import Device
from ..stage_table import Floats
from .family import SAFE, Family, bounded_counts, quick_bound, shared_work
from .space import Space, divide_batch

NARROW = 1.0005
"""Ranges that end so near their beginning are not halved."""
DISCOUNTS = (0.0, 0.1)
"""By which a kind of half the speed is cheaper than by its speed."""
MOST_RANGES = 100
"""That are halved."""
MOST_MOVES = 6
"""Steps to a better price, each way."""
WORK = 2.5
"""Counted work of a layer with a number of replicas."""


def fill_bound(space: Space, family: Family, step: float) -> float:
    """Seconds that no plan of the family on any of its devices is below; `step` where none is below that."""
    quick = quick_bound(space, family)
    kinds = space.topology.count_kinds(family.placement.ranks)
    few = family.config.micro_batches < 2 or not np.isfinite(step)
    if few or not 0 < quick < step or any(kind.profile is not None for kind in kinds):
        return min(quick, step)
    discounts = DISCOUNTS if len({kind.speed for kind in kinds}) > 1 else DISCOUNTS[:1]
    work = shared_work(space, family)
    return max(_least(_FillProgramme(space, family, own), quick, work, step) for own in discounts)


def _least(programme: _FillProgramme, quick: float, work: float, step: float) -> float:
    """The least over the ranges of the longest stage: it takes no less than its part of all work, and M - 1
    times as long is no more than a step."""
    count = programme.family.config.micro_batches
    low, high = work / count, step / (count - 1)
    heap = [(quick, low, high, quick / programme.paid_devices)]
    for _ in range(MOST_RANGES):
        bound, low, high, price = heappop(heap)
        if bound >= step or high <= low * NARROW:
            break
        middle = sqrt(low * high)
        for own in ((low, middle), (middle, high)):
            least, better = programme.improve_price(*own, price)
            heappush(heap, (max(bound, least), *own, better))
    else:
        bound = heap[0][0]
    return min(bound, step)


@dataclass(frozen=True, eq=False)
class _Replicas:
    """Of every layer on a number of devices of a kind: `seconds` x, and `after` x - a, shape (layers,);
    `price` of the devices, where one of the fastest costs 1."""

    price: float
    seconds: Floats
    after: Floats

    @cached_property
    def shortest(self) -> float:
        """Seconds."""
        return float(self.seconds.min())

    @cached_property
    def longest(self) -> float:
        """Seconds."""
        return float(self.seconds.max())


@dataclass(frozen=True, eq=False)
class _FillProgramme:
    """The sums of a family."""

    space: Space
    family: Family
    discount: float

    @cached_property
    def _kinds(self) -> dict[Device, int]:
        """With how many devices each has."""
        return self.space.topology.count_kinds(self.family.placement.ranks)

    @cached_property
    def _prices(self) -> Floats:
        """By kind, of a device."""
        speeds = np.array([kind.speed for kind in self._kinds])
        relative: Floats = (speeds / speeds.max()) ** (1 + self.discount)
        return relative

    @cached_property
    def paid_devices(self) -> float:
        """What all devices cost, in the fastest."""
        return float(self._prices @ np.array(list(self._kinds.values()), dtype=np.float64))

    @cached_property
    def _choices(self) -> Sequence[_Replicas]:
        """The numbers of replicas on each kind, those with the same share of a micro-batch once."""
        config, size = self.family.config, self.family.config.micro_batch_size
        recompute = int(config.recompute == "always")
        choices = []
        for count in bounded_counts(self.family):
            if count > size or not self.space.fits_someone(size, count):
                continue
            self.space.budget.check()
            for kind, price in zip(self._kinds, self._prices.tolist(), strict=True):
                costs = self.space.kind_table(kind, divide_batch(size, count)).costs
                forward = (1 + recompute) * costs.forward_seconds
                x = (forward + costs.backward_seconds) * kind.seconds_scale
                first = (forward + costs.mean_backward(1.0)) * kind.seconds_scale
                choices.append(_Replicas(price * count, x, first))
        return choices

    def improve_price(self, low: float, high: float, price: float) -> tuple[float, float]:
        """A bound on steps whose longest stage takes from `low` to `high`, and the price of a device it is
        of; from `price` on."""
        best, spread = self.bound(low, high, price), 1.2
        for factor in (spread, 1 / spread):
            for _ in range(MOST_MOVES):
                moved = self.bound(low, high, price * factor)
                if moved <= best:
                    break
                best, price = moved, price * factor
        return best, price

    def bound(self, low: float, high: float, price: float) -> float:
        """The same at a price of the fastest device."""
        self.space.budget.check()
        count, gpipe = self.family.config.micro_batches, self.family.config.schedule == "gpipe"
        sums = np.full(len(self.space.chain), inf)
        own = [choice for choice in self._choices if choice.shortest <= high]
        for choice in own:
            paid = price * choice.price
            if gpipe or paid >= high:
                values = choice.seconds * (paid / high) + choice.after
            else:
                values = choice.seconds + choice.after + (paid - high)
            if choice.longest > high:
                values[choice.seconds > high] = inf
            np.minimum(sums, values, out=sums)
        self.space.budget.spend(WORK * len(sums) * len(own))
        return ((count - 1) * low + float(sums.sum()) - price * self.paid_devices) * SAFE
