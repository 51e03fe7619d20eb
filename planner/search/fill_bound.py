"""Bound on all pipelines of a configuration that counts fill and drain, with stages of fractional layers.

It serves chains so long that cutting only between layers costs little. M micro-batches. For each stage, x is
the seconds of a micro-batch forward and backward, and a the seconds that its first backward saves; t is the
longest x of all stages. By `bounds_1f1b` (X + Y, the round trip on both sides), for a stage with n < M - 1
stages after it

    T >= sum of x of the stages before + (M - n) x - a + sum of (2 x - a) of the stages after

For the longest stage (or the one with n = M - 2, if M - 1 or more stages follow the longest), this is no less
than the first of

    1F1B     (M - 1) t + sum of (2 x - a - t) over all stages
    GPipe    (M - 1) t + sum of (x - a) over all stages                        (`bounds_gpipe`)

as x >= 2 x - a - t. All stages together have at most all devices. This constraint is priced as in `bound`:
kinds have prices, none below that of a slower kind. For low <= t <= high, a stage whose devices cost p
together counts in 1F1B with

    p - high + 2 x - a    no less than the sum over its layers of    (p - high) x / high + 2 x - a

if p >= high, because x <= high. If p < high, it counts no less than the sum over its layers of
p - high + 2 x - a, because it has at least one layer. So every layer takes the replicas that suit it best,
and the bound is the least over ranges of t. The weakest ranges are halved repeatedly.

Memory, transfers and all-reduces are left out, which only lowers the bound.
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
"""Ranges with high <= NARROW * low are not halved."""
DISCOUNTS = (0.0, 0.1)
"""Exponents by which slower kinds are cheaper than in proportion to their speed."""
MOST_RANGES = 100
"""Most ranges that are halved."""
MOST_MOVES = 6
"""Most steps to a better price, in each direction."""
WORK = 2.5
"""Counted work of a layer with one number of replicas."""


def fill_bound(space: Space, family: Family, step: float) -> float:
    """Return a lower bound in seconds on every plan of the family on any of its devices; at most `step`."""
    quick = quick_bound(space, family)
    kinds = space.topology.count_kinds(family.placement.ranks)
    trivial = family.config.micro_batches < 2 or not np.isfinite(step)
    if trivial or not 0 < quick < step or any(kind.profile is not None for kind in kinds):
        return min(quick, step)
    discounts = DISCOUNTS if len({kind.speed for kind in kinds}) > 1 else DISCOUNTS[:1]
    work = shared_work(space, family)
    return max(_least(_FillProgramme(space, family, discount), quick, work, step) for discount in discounts)


def _least(programme: _FillProgramme, quick: float, work: float, step: float) -> float:
    """Return the least bound over ranges of the longest stage's seconds t.

    All work W gives t >= W / M, and a step T gives t <= T / (M - 1).
    """
    count = programme.family.config.micro_batches
    low, high = work / count, step / (count - 1)
    heap = [(quick, low, high, quick / programme.paid_devices)]
    for _ in range(MOST_RANGES):
        bound, low, high, price = heappop(heap)
        if bound >= step or high <= low * NARROW:
            break
        middle = sqrt(low * high)
        for half in ((low, middle), (middle, high)):
            least, better = programme.improve_price(*half, price)
            heappush(heap, (max(bound, least), *half, better))
    else:
        bound = heap[0][0]
    return min(bound, step)


@dataclass(frozen=True, eq=False)
class _Replicas:
    """Every layer on a number of devices of one kind.

    Attributes:
        price: Price of the devices, where one of the fastest kind costs 1.
        seconds: (layers,) x.
        after: (layers,) x - a.
    """

    price: float
    seconds: Floats
    after: Floats

    @cached_property
    def shortest(self) -> float:
        """Least seconds of a layer."""
        return float(self.seconds.min())

    @cached_property
    def longest(self) -> float:
        """Most seconds of a layer."""
        return float(self.seconds.max())


@dataclass(frozen=True, eq=False)
class _FillProgramme:
    """The sums of a family at given prices."""

    space: Space
    family: Family
    discount: float

    @cached_property
    def _kinds(self) -> dict[Device, int]:
        """Number of devices by kind."""
        return self.space.topology.count_kinds(self.family.placement.ranks)

    @cached_property
    def _prices(self) -> Floats:
        """(kinds,) price of a device."""
        speeds = np.array([kind.speed for kind in self._kinds])
        relative: Floats = (speeds / speeds.max()) ** (1 + self.discount)
        return relative

    @cached_property
    def paid_devices(self) -> float:
        """Price of all devices, in devices of the fastest kind."""
        return float(self._prices @ np.array(list(self._kinds.values()), dtype=np.float64))

    @cached_property
    def _choices(self) -> Sequence[_Replicas]:
        """Numbers of replicas on each kind, each share of a micro-batch once."""
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
        """Return the best bound found by changing the price of a device, and that price.

        Args:
            low: Least seconds of the longest stage.
            high: Most seconds of the longest stage.
            price: Price to begin with, in seconds per device of the fastest kind.
        """
        best, spread = self.bound(low, high, price), 1.2
        for factor in (spread, 1 / spread):
            for _ in range(MOST_MOVES):
                moved = self.bound(low, high, price * factor)
                if moved <= best:
                    break
                best, price = moved, price * factor
        return best, price

    def bound(self, low: float, high: float, price: float) -> float:
        """Return a bound on steps whose longest stage takes `low` to `high` seconds, at given prices."""
        self.space.budget.check()
        count, gpipe = self.family.config.micro_batches, self.family.config.schedule == "gpipe"
        sums = np.full(len(self.space.chain), inf)
        usable = [choice for choice in self._choices if choice.shortest <= high]
        for choice in usable:
            paid = price * choice.price
            if gpipe or paid >= high:
                values = choice.seconds * (paid / high) + choice.after
            else:
                values = choice.seconds + choice.after + (paid - high)
            if choice.longest > high:
                values[choice.seconds > high] = inf
            np.minimum(sums, values, out=sums)
        self.space.budget.spend(WORK * len(sums) * len(usable))
        return ((count - 1) * low + float(sums.sum()) - price * self.paid_devices) * SAFE
