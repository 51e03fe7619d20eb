"""Lower bound on 1F1B and GPipe pipelines that respects memory and needs no positions of devices.

Symbols of a stage: x seconds of a micro-batch (forward, backward and recomputation), f its forward, a the
seconds that its first backward saves, e its exposed all-reduce, c the transfer after it, r its devices. M
micro-batches, N devices, p stages. For any stage s of a pipeline with n stages after it (`bounds_1f1b`,
`bounds_gpipe`)

    1F1B    T >= sum of (x + 2 c) before s + (M - n) x_s + sum of 2 (x + 2 c) after s      n < M - 1
    GPipe   T >= sum of (x + 2 c) before s +       M x_s + sum of   (x + 2 c) after s
    any     T >= sum of (x + 2 c) before s +       M x_s                             one stage a device
    split   T >= sum of   (f + c) before s +       M x_s + e_s                       one stage a device

minus a of every stage once, plus e of the first stage if the last backward returns to it. `any` and `split`
are schedules with one stage a device. `split`: weight gradients are separate actions, and x is the smaller of
a whole backward and one in two parts; in any order s takes M x_s from its first action to its last.

Let s, the *pivot*, be a longest stage. If M - 1 stages or more follow it under 1F1B, the stage with n = M - 2
is the pivot instead, which counts 2 x as the stages after it do.

Under 1F1B a stage with n stages after it holds min(M, n + 1) micro-batches, so its layers, its replicas and n
decide whether it fits and whether it must recompute. Other schedules hold at least as many. With a price per
device, a dynamic programme from the last stage back finds the least priced sums of the stages from cut point
i on, over the stage's end j and its replicas, for pipelines whose longest stage takes from `low` to `high`
seconds:

    after[n + 1, i] = min of 2 (x + 2 c) - a + price r + after[n, j]
    whole[n + 1, i] = min of   x + 2 c   - a + price r + whole[n, j]                  a stage before s
                       and (M - n) x + 4 c - a + price r + after[n, j], x >= low      s

    T >= whole[p, 0] - price N        for every p and price (Everett, Operations Research 11(3), 1963)

Each kind of device has a price. None is below that of a slower kind, so a stage on several kinds costs no
less than one on as many devices of its slowest kind. Cutting planes find the best prices: the devices of the
pipeline that attains the least sum give the slope. Ranges of the longest stage's seconds are halved, weakest
first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heappop, heappush
from itertools import pairwise
from math import inf, sqrt
from typing import NamedTuple

import numpy as np

from ...cost_models.memory import Recompute
from ...cost_models.schedules import find_schedule
from ..candidate import SEARCHED
from ..linear_programme import new_solver
from ..stage_table import Floats, Indices
from .budget import OutOfTime, SearchBudget
from .family import (
    SAFE,
    Family,
    RoughStage,
    distinct_families,
    may_have,
    quick_bound,
    shared_work,
    splits_backward,
)
from .fill_bound import fill_bound
from .first_link import FirstLink
from .partial import BoundState, Expansion
from .reach_bound import NARROW as NARROW_STEP
from .reach_bound import ReachBound
from .space import Space
from .stage_figures import StageFigures, make_stage_figures
from .stage_recompute import stage_modes

NARROW = 1.003
"""Ranges with high <= NARROW * low are not halved."""
LITTLE = 0.2
"""Ranges whose bound rises by less than this share of the gap to the limit are not halved.

This holds if a search follows and all devices are of one kind. With two kinds, good plans come from narrow
ranges alone.
"""
LOOKS = 5
"""Number of prices to try for a range."""
HALVINGS = 5
"""Bisection steps to the shortest possible longest stage."""
MOST_MOVE = 2.0
"""Largest factor by which one step changes a price."""
NO_PIVOT = -1e300
"""Seconds of a sum with the pivot among the chosen stages if it is none of them."""
EVERY_IN_FLIGHT = 8
"""Up to this many micro-batches in flight, memory is checked for each number; beyond, for every eighth."""


class PricedStage(NamedTuple):
    """A stage of the pipeline that attains a least sum.

    Attributes:
        start: Place (index of a cut point) where it begins.
        end: Place where it ends.
        row: Row of the columns of `FamilyBound`.
    """

    start: int
    end: int
    row: int


class _Fitting(NamedTuple):
    """Stages that fit with some number of micro-batches in flight.

    Attributes:
        rows: Rows of the columns of `FamilyBound`, sorted by pair of places.
        seconds: x of each row.
        first: First row of every pair.
        pair: The pairs.
    """

    rows: Indices
    seconds: Floats
    first: Indices
    pair: Indices

    def least(self, values: Floats, shape: tuple[int, int]) -> Floats:
        """Return (places, width) least values by start and number of blocks; inf if no stage fits."""
        table = np.full(shape[0] * shape[1], inf)
        if len(self.first):
            table[self.pair] = np.minimum.reduceat(values, self.first)
        return table.reshape(shape)


class PricedSums(NamedTuple):
    """Least priced sums of pipelines whose longest stage takes from `low` to `high` seconds.

    Attributes:
        low: Least seconds of the longest stage.
        high: Most seconds of the longest stage.
        prices: (kinds,) price of a device.
        bounds: (stages,) bounds in seconds; index 0 is one stage.
        after: By number of stages from the end, the (places,) row `after` of the module's docstring.
        whole: The row `whole`, likewise.
        tables: The (places, width) tables from which these rows were computed.
    """

    low: float
    high: float
    prices: Floats
    bounds: Floats
    after: list[Floats]
    whole: list[Floats]
    tables: list[tuple[Floats, Floats, Floats]]

    def padded(self, stages: int) -> Floats:
        """Return (stages,) bounds, inf for numbers of stages without a pipeline."""
        bounds = np.full(stages, inf)
        bounds[: len(self.bounds)] = self.bounds[:stages]
        return bounds


class FamilyBound:
    """Bound of one configuration, for plans that take less than `limit` seconds.

    `after` is the factor with which a stage after the pivot counts.

    Args:
        space: Costs and limits.
        family: Configuration and devices.
        figures: Least costs of all stages.
        limit: Seconds of the best known step.
    """

    def __init__(self, space: Space, family: Family, figures: StageFigures, limit: float) -> None:
        config = family.config
        self.family, self.figures, self.limit = family, figures, limit
        self.micro_batches = count = config.micro_batches
        self.is_1f1b = config.schedule == "1f1b" and count > 1
        self.after = 2 if self.is_1f1b else 1 if config.schedule in SEARCHED else 0
        self.places = len(figures.cut_points)
        self.width = int((figures.end - figures.start).max(initial=0)) + 1
        self.devices = figures.devices
        self.most_stages = min(int(figures.devices.sum()), space.chain.max_stages)
        self.splits, modes = splits_backward(config), stage_modes(config)
        backward, once = figures.backward, figures.accumulation
        if count == 1:  # the only backward is a first one
            backward, once = backward - once, np.zeros_like(once)
        seconds = figures.forward * (1 if modes[0] == "never" else 2) + backward
        once = once + (figures.forward if config.recompute == "except_last" else 0.0)
        lead, exposed = self._lead(), figures.exposed_allreduce
        host_seconds = count * figures.launches + exposed
        alone = count * seconds - once + exposed
        self.single = self._single(alone, host_seconds, modes)
        arrived = alone + lead[figures.start]
        room = np.maximum.reduce([figures.room[mode] for mode in modes])
        keep = np.flatnonzero((np.maximum(arrived, host_seconds) * SAFE < limit) & (room >= 1))
        self.start, self.choice = figures.start[keep], figures.choice[keep]
        self.pair = self.start * self.width + figures.end[keep] - self.start
        self.forward, self.seconds, self.once = figures.forward[keep], seconds[keep], once[keep]
        self.exposed = exposed[keep]
        self.first_exposed = np.where(self.start == 0, self.exposed, 0.0)
        self.cut, self.ends, self.host_seconds = 2 * figures.cut[keep], arrived[keep], host_seconds[keep]
        self.rooms = [figures.room[mode][keep] for mode in modes]
        self._fitting: dict[tuple[int, float], _Fitting] = {}
        self._first_link = FirstLink(space.topology, figures.choices)

    def _lead(self) -> Floats:
        """Return (places,) least seconds until the first micro-batch arrives, on any devices."""
        figures = self.figures
        first_micro_batch = np.full(self.places * self.width, inf)
        pair = figures.start * self.width + figures.end - figures.start
        np.minimum.at(first_micro_batch, pair, figures.forward + figures.cut)
        table, lead = first_micro_batch.reshape(self.places, self.width), np.full(self.places, inf)
        lead[0] = 0.0
        for start in range(self.places - 1):
            top = min(self.width, self.places - start)
            lead[start + 1 : start + top] = np.minimum(
                lead[start + 1 : start + top], lead[start] + table[start, 1:top]
            )
        return lead

    def _single(self, alone: Floats, host_seconds: Floats, modes: Sequence[Recompute]) -> float:
        """Return the least step of one stage.

        `alone` are the seconds of stages in the first recomputation mode, `host_seconds` those of their
        hosts.
        """
        figures, least = self.figures, inf
        whole = np.flatnonzero((figures.start == 0) & (figures.end == self.places - 1))
        for number, mode in enumerate(modes):
            fits = whole[self.in_flight(1) <= figures.room[mode][whole]]
            seconds = alone[fits] + number * self.micro_batches * figures.forward[fits]
            least = min(least, float(np.maximum(seconds, host_seconds[fits]).min(initial=inf)))
        return least * SAFE

    @property
    def longest(self) -> float:
        """Seconds of a micro-batch that no stage of a plan below the limit exceeds."""
        count = self.micro_batches - (0.5 if self.family.config.recompute == "except_last" else 0.0)
        longest = float((self.seconds + (self.forward if len(self.rooms) > 1 else 0.0)).max(initial=0.0))
        return min(longest, (self.limit + float(self.once.max(initial=0.0))) / count / SAFE)

    def in_flight(self, remaining: int) -> int:
        """Return the micro-batches in flight on the `remaining`-th stage from the end, rounded down.

        Rounding leaves few distinct numbers, so that few tables are needed.
        """
        schedule, step = find_schedule(self.family.config.schedule), 1
        count = int(schedule.in_flight(0, remaining, self.micro_batches))
        while self.is_1f1b and count > EVERY_IN_FLIGHT * step:
            step += max(1, step // 4)
        return count - count % step

    def may_be_pivot(self, remaining: int) -> bool:
        """Return whether the `remaining`-th stage from the end may be the pivot."""
        return not self.is_1f1b or remaining < self.micro_batches

    def stands_for_earlier(self, remaining: int) -> bool:
        """Return whether that stage may be the pivot with any length, for longer stages before it."""
        return self.is_1f1b and remaining == self.micro_batches - 1 < self.most_stages

    def fitting(self, in_flight: int, high: float) -> _Fitting:
        """Return the stages with x <= `high` that fit with `in_flight` micro-batches."""
        key = in_flight, high
        if key not in self._fitting:
            if len(self._fitting) > 3 * EVERY_IN_FLIGHT:
                self._fitting = {}
            fits, seconds = in_flight <= self.rooms[0], self.seconds
            if len(self.rooms) > 1:
                seconds = np.where(fits, seconds, seconds + self.forward)
                more = self.micro_batches * (seconds - self.seconds)
                in_time = np.maximum(self.ends + more, self.host_seconds) * SAFE < self.limit
                fits = (fits | (in_flight <= self.rooms[1])) & in_time
            rows = np.flatnonzero(fits & (seconds <= high))
            pair = self.pair[rows]
            first = np.flatnonzero(np.append(True, pair[1:] != pair[:-1])) if len(pair) else pair
            self._fitting[key] = _Fitting(rows, seconds[rows], first, pair[first])
        return self._fitting[key]

    def fewest_devices(self, high: float) -> float:
        """Return the devices of a pipeline whose stages all have x <= `high`.

        Returns:
            Devices in units of the fastest kind: a number that suffices, else the fewest.
        """
        rows, fewest = [self._last], inf
        tables = dict[int, Floats]()
        devices = (self.figures.speed[self.figures.kind] * self.figures.replicas)[self.choice]
        for remaining in range(1, self.most_stages + 1):
            count = self.in_flight(remaining)
            if count not in tables:
                fitting = self.fitting(count, high)
                tables[count] = fitting.least(devices[fitting.rows], self.shape)
            rows.append((tables[count] + self._following(rows[-1])).min(axis=1))
            fewest = min(fewest, float(rows[-1][0]))
            if fewest <= self.capacity or not (rows[-1] <= self.capacity).any():
                break
        return fewest

    @cached_property
    def capacity(self) -> float:
        """All devices, in units of the fastest kind."""
        return float(self.figures.speed @ self.devices) * (1 + 1e-9)

    def count_devices(self, pipeline: Iterable[PricedStage]) -> Floats:
        """Return (kinds,) numbers of devices that a pipeline takes."""
        used = np.zeros(len(self.devices))
        for stage in pipeline:
            choice = self.choice[stage.row]
            used[self.figures.kind[choice]] += self.figures.replicas[choice]
        return used

    @property
    def shape(self) -> tuple[int, int]:
        """Number of places, and one more than the most blocks of a stage."""
        return self.places, self.width

    def _following(self, row: Floats) -> Floats:
        """Return (places, width) entries of a row at the end of each stage."""
        padded = np.append(row, np.full(self.width - 1, inf))
        return np.lib.stride_tricks.sliding_window_view(padded, self.width)

    @property
    def _last(self) -> Floats:
        row = np.full(self.places, inf)
        row[-1] = 0.0
        return row

    def price(self, low: float, high: float, prices: Floats) -> PricedSums:
        """Return the least priced sums of pipelines whose longest stage takes from `low` to `high` seconds.

        Args:
            low: Least seconds of the longest stage.
            high: Most seconds of the longest stage.
            prices: (kinds,) price of a device.
        """
        after, whole, sums = [self._last], [np.full(self.places, inf)], list[float]()
        by_count, tables = dict[int, tuple[Floats, Floats, Floats, Floats]](), [(self._last,) * 3]
        for remaining in range(1, self.most_stages + 1):
            count = self.in_flight(remaining)
            if count not in by_count:
                by_count[count] = self._tables(count, low, high, prices)
            later, earlier, longest, any_length = by_count[count]
            following = self._following(after[-1])
            rest = (earlier + self._following(whole[-1])).min(axis=1)
            row = rest
            if self.may_be_pivot(remaining):
                row = np.minimum(rest, (longest + following).min(axis=1) + self._rounded(remaining, high))
            sums.append(float(row[0]))
            if self.stands_for_earlier(remaining):
                longest = any_length
                row = np.minimum(rest, (longest + following).min(axis=1) + self._rounded(remaining, high))
            after.append((later + following).min(axis=1))
            whole.append(row)
            tables.append((later, earlier, longest))
            if not (np.isfinite(after[-1]).any() or np.isfinite(row).any()):
                break
        bounds = (np.array(sums) - float(prices @ self.devices)) * SAFE
        return PricedSums(low, high, prices, bounds, after, whole, tables)

    def _rounded(self, remaining: int, high: float) -> float:
        """Return seconds <= 0 to add to the pivot, whose table is for fewer micro-batches in flight."""
        return (self.in_flight(remaining) - remaining) * high if self.is_1f1b else 0.0

    def _tables(
        self, count: int, low: float, high: float, prices: Floats
    ) -> tuple[Floats, Floats, Floats, Floats]:
        """Return (places, width) least values by role: after the pivot, before it, pivot, any pivot."""
        fitting = self.fitting(count, high)
        values = self._values(fitting, count, prices)
        later, earlier, pivot = (fitting.least(value, self.shape) for value in values)
        longest = fitting.least(np.where(fitting.seconds >= low, values[2], inf), self.shape)
        return later, earlier, longest, pivot

    def _values(self, fitting: _Fitting, count: int, prices: Floats) -> tuple[Floats, Floats, Floats]:
        """Return (stages,) seconds that a stage counts after the pivot, before it, and as the pivot."""
        index, weight = fitting.rows, self.after
        cut, first = self.cut[index], self.first_exposed[index]
        paid = (prices[self.figures.kind] * self.figures.replicas)[self.choice[index]] - self.once[index]
        times = self.micro_batches - (count - 1 if self.is_1f1b else 0)
        trip, end = fitting.seconds + cut + first, first
        if self.splits:
            trip, end = self.forward[index] + cut / 2, self.exposed[index]
        return (
            weight * (fitting.seconds + cut) + paid,
            trip + paid,
            times * fitting.seconds + weight * cut + paid + end,
        )

    def joined(self, sums: PricedSums, stages: int) -> float:
        """Return a bound on pipelines of `stages` >= 2 stages that counts first link and all-reduce jointly.

        The rest of the bound are the priced sums. `FirstLink` bounds the two costs together.

        Args:
            sums: Priced sums.
            stages: Number of stages.

        Returns:
            Seconds.
        """
        if self._first_link.node >= self.devices.sum() or not self.after:
            return 0.0
        count, paid = self.in_flight(stages), float(sums.prices @ self.devices)
        fitting, following = self.fitting(count, sums.high), self._by_choice(sums, stages - 1)
        first = np.flatnonzero(self.start[fitting.rows] == 0)
        rows = fitting.rows[first]
        _, earlier, pivot = (values[first] for values in self._values(fitting, count, sums.prices))
        roles = [(earlier, following[1], 2)]
        if self.may_be_pivot(stages):
            if not self.stands_for_earlier(stages):
                pivot = np.where(fitting.seconds[first] >= sums.low, pivot, inf)
            roles.append((pivot + self._rounded(stages, sums.high), following[0], 2 * self.after))
        least = self.limit / SAFE + paid
        for values, rest, transfers in roles:
            lowest = values + rest.min(axis=0)[self.pair[rows]]
            for at in np.argsort(lowest).tolist():
                if lowest[at] >= least:
                    break
                row, place = rows[at], int(self.pair[rows[at]])
                second = np.flatnonzero(values[at] + rest[:, place] < least)
                extra = self._first_link.extra_seconds(
                    place, int(self.choice[row]), second, float(self.cut[row]) / 2, transfers
                )
                least = min(least, float((values[at] + rest[second, place] + extra).min()))
        return (least - paid) * SAFE

    def _by_choice(self, sums: PricedSums, remaining: int) -> tuple[Floats, Floats]:
        """Return (choices, places) least sums of `remaining` stages, by the choice of the first of them.

        The first table is for stages after the pivot, the second for stages with the pivot among them.
        """
        count = self.in_flight(remaining)
        fitting = self.fitting(count, sums.high)
        later, earlier, pivot = self._values(fitting, count, sums.prices)
        start, choice = self.start[fitting.rows], self.choice[fitting.rows]
        end = self.pair[fitting.rows] - start * (self.width - 1)
        after, whole = sums.after[remaining - 1], sums.whole[remaining - 1]
        with_pivot = earlier + whole[end]
        if self.may_be_pivot(remaining):
            if not self.stands_for_earlier(remaining):
                pivot = np.where(fitting.seconds >= sums.low, pivot, inf)
            with_pivot = np.minimum(with_pivot, pivot + after[end] + self._rounded(remaining, sums.high))
        tables = np.full((2, len(self.figures.replicas), self.places), inf)
        np.minimum.at(tables[0], (choice, start), later + after[end])
        np.minimum.at(tables[1], (choice, start), with_pivot)
        return tables[0], tables[1]

    def trace(self, sums: PricedSums, stages: int) -> tuple[PricedStage, ...]:
        """Return the pipeline of `stages` stages with the least priced sum; empty if none exists."""
        if not np.isfinite(sums.whole[stages][0]):
            return ()
        return tuple(self._trace(sums, stages))

    def _trace(self, sums: PricedSums, stages: int) -> Iterator[PricedStage]:
        place, passed = 0, False
        for remaining in range(stages, 0, -1):
            later_costs, earlier, longest = (table[place] for table in sums.tables[remaining])
            count, role = self.in_flight(remaining), 0
            after, whole = (
                np.append(rows[remaining - 1], np.full(self.width, inf))[place : place + self.width]
                for rows in (sums.after, sums.whole)
            )
            rest, any_length = later_costs + after, False
            if not passed:
                later, now = earlier + whole, longest + after
                if not self.may_be_pivot(remaining):
                    now = np.full_like(now, inf)
                any_length = self.stands_for_earlier(remaining)
                passed = bool(now.min() + self._rounded(remaining, sums.high) <= later.min())
                rest, role = (now, 2) if passed else (later, 1)
            at = place * self.width + int(rest.argmin())
            fitting = self.fitting(count, sums.high)
            first, top = np.searchsorted(self.pair[fitting.rows], [at, at + 1])
            value = self._values(fitting, count, sums.prices)[role][first:top]
            if role == 2 and not any_length:
                value = np.where(fitting.seconds[first:top] >= sums.low, value, inf)
            end = place + int(rest.argmin())
            yield PricedStage(place, end, int(fitting.rows[first + int(value.argmin())]))
            place = end

    def stages(self, pipeline: Iterable[PricedStage]) -> list[RoughStage]:
        """Return the stages of a pipeline without their prices."""
        stages, figures = list[RoughStage](), self.figures
        for stage in pipeline:
            choice, seconds = self.choice[stage.row], float(self.seconds[stage.row])
            replicas = int(figures.replicas[choice])
            end = figures.cut_points[stage.end]
            stages.append(RoughStage(end, int(figures.kind[choice]), replicas, seconds * replicas))
        return stages

    def move_prices(
        self, sums: PricedSums, pipeline: Sequence[PricedStage], lines: list[tuple[float, Floats]]
    ) -> Floats | None:
        """Return better prices, from the pipeline that attains a bound.

        Args:
            sums: Priced sums at the current prices.
            pipeline: Pipeline that attains the least of them.
            lines: Values and slopes of the prices tried so far, see `best_prices`. This one is appended.

        Returns:
            (kinds,) prices; None if no better ones are known.
        """
        slope = self.count_devices(pipeline) - self.devices
        if not pipeline or not slope.any():
            return None
        lines.append((float(sums.bounds[len(pipeline) - 1] - sums.prices @ slope), slope))
        moved = best_prices(lines, sums.prices, self.figures.speed)
        return None if np.allclose(moved, sums.prices, rtol=1e-4) else moved


@dataclass(frozen=True, eq=False)
class StageRange:
    """Pipelines whose longest stage takes from `low` to `high` seconds.

    Attributes:
        stages: Bound of the family.
        low: Least seconds of the longest stage.
        high: Most seconds of the longest stage.
        bounds: (stages,) bounds in seconds by number of stages.
        prices: (kinds,) prices with which they were computed.
    """

    stages: FamilyBound
    low: float
    high: float
    bounds: Floats
    prices: Floats

    @property
    def bound(self) -> float:
        """Lower bound in seconds on all of them."""
        return float(self.bounds.min(initial=inf))

    def least(self, stages: int) -> float:
        """Return the lower bound in seconds on those with `stages` stages."""
        return float(self.bounds[stages - 1]) if stages <= len(self.bounds) else inf


@dataclass(frozen=True, eq=False)
class StepRange:
    """Pipelines of a family of a long chain.

    Attributes:
        reach: Bound of the family.
        high: Shortest step in seconds known to have room for a pipeline; inf if none is known.
        is_possible: Whether some step has room.
    """

    reach: ReachBound
    high: float = inf
    is_possible: bool = False


Score = Callable[[Family, Sequence[RoughStage]], float]
"""Function that scores plans near a pipeline and returns the seconds that a better plan must stay below."""


@dataclass(eq=False)
class MemoryBound:
    """Bound on all families.

    Attributes:
        space: Costs and limits.
        families: Configurations on orders of the devices.
        counts: Numbers of stages.
        deeper: Whether all larger numbers of stages are allowed, too.
        budget: Budget of the bound.
        score: Function that is called with the pipelines that attain bounds.
        open_ranges: In the end, the ranges that may hold a plan below the limit.
        limit: Seconds that a plan must be faster than.
    """

    space: Space
    families: Sequence[Family]
    counts: Sequence[int]
    deeper: bool
    budget: SearchBudget
    score: Score | None = None
    every_range: bool = False
    """True to refine ranges that do not have the lowest bound, too, for a search that follows."""
    open_ranges: list[StageRange] = field(default_factory=list)
    limit: float = inf
    _closed: float = inf
    """Least bound of ranges that are not refined further."""
    _heap: list[tuple[float, int, StageRange | StepRange | Family]] = field(default_factory=list)
    _figures: dict[object, StageFigures | None] = field(default_factory=dict)
    _singles: dict[object, float] = field(default_factory=dict)
    _completions: dict[object, CompletionBound | None] = field(default_factory=dict)
    _pushed: int = 0

    def least(self, limit: float) -> float:
        """Return a bound on all plans; `limit` if no plan takes less than `limit` seconds."""
        self.limit = limit
        for family in distinct_families(self.families):
            self._push(quick_bound(self.space, family), family)
        while self._heap and self._heap[0][0] < self.limit:
            if self.budget.spent or (self._heap[0][0] >= self._closed and not self.every_range):
                break
            bound, _, item = heappop(self._heap)
            try:
                self._look(bound, item)
            except OutOfTime:
                self._push(bound, item)
                break
        return min([self.limit, self._closed, *(bound for bound, *_ in self._heap[:1])])

    def _push(self, bound: float, item: StageRange | StepRange | Family) -> None:
        if bound < self.limit:
            # Of equal bounds the latest range comes first: one family is finished before the next begins.
            self._pushed += 1
            order = self._pushed if isinstance(item, Family) else -self._pushed
            heappush(self._heap, (bound, order, item))

    def _look(self, bound: float, item: StageRange | StepRange | Family) -> None:
        """Refine the family or range with the lowest bound."""
        if isinstance(item, StepRange):
            self._halve(bound, item)
            return
        if isinstance(item, Family) and self.space.is_long:
            space = self.space.within(self.budget)
            self._push(max(bound, fill_bound(space, item, self.limit)), StepRange(ReachBound(space, item)))
            return
        if isinstance(item, Family):
            whole = self._whole_range(item, bound)
            if whole is not None:
                self._push(whole.bound, whole)
            return
        priced = self._improve(item)
        if priced.bound >= self.limit:
            return
        raised = priced.bound - item.bound >= LITTLE * (self.limit - item.bound)
        may_stop = self.every_range and self.limit < inf and len(priced.stages.figures.kinds) == 1
        if priced.high <= priced.low * NARROW or (may_stop and not raised):
            self._closed = min(self._closed, priced.bound)
            self.open_ranges.append(priced)
            return
        middle = sqrt(priced.low * priced.high)
        for low, high in ((priced.low, middle), (middle, priced.high)):
            self._push(priced.bound, replace(priced, low=low, high=high))

    def _halve(self, low: float, item: StepRange) -> None:
        """Narrow the range between the bound `low` and the shortest step with room for a pipeline."""
        high = min(item.high, self.limit)
        if high <= low * NARROW_STEP or low <= 0:
            self._closed = min(self._closed, low)
            return
        if high == inf and not item.is_possible:
            # If no pipeline fits in memory, no step is long enough.
            if item.reach.fewest_devices(inf, self._is_allowed) <= item.reach.capacity:
                self._push(low, replace(item, is_possible=True))
            return
        step = min(high, 2 * low) if item.high == inf else sqrt(low * high)
        if item.reach.fewest_devices(step, self._is_allowed) > item.reach.capacity:
            self._push(step, item)
            return
        pipeline = item.reach.pipeline()
        if self.score is not None and pipeline:
            self.limit = min(self.limit, self.score(item.reach.family, pipeline))
        self._push(low, replace(item, high=step))

    def _is_allowed(self, stages: int) -> bool:
        """Return whether plans may have this number of stages."""
        return may_have(stages, self.counts, deeper=self.deeper)

    def _whole_range(self, family: Family, bound: float) -> StageRange | None:
        """Return all pipelines of several stages of a family, and record the bound on its single stages."""
        figures = self._stage_figures(family)
        if figures is None:
            return None
        stages = FamilyBound(self.space, family, figures, self.limit)
        if 1 in self.counts:
            single = self._singles[family.config, family.replicas] = max(stages.single, bound)
            self._closed = min(self._closed, single)
        bounds = np.full(stages.most_stages, bound)
        numbers = np.arange(1, stages.most_stages + 1)
        allowed = np.isin(numbers, self.counts) | (self.deeper & (numbers > max(self.counts)))
        bounds[~allowed | (numbers == 1)] = inf
        high = stages.longest
        if not np.isfinite(bounds).any() or not high > 0 or stages.fewest_devices(high) > stages.capacity:
            return None
        low = min(shared_work(self.space, family) / stages.micro_batches, high)
        top = high
        for _ in range(HALVINGS):
            middle = sqrt(low * top)
            self._spend(stages, 0.25)
            low, top = (low, middle) if stages.fewest_devices(middle) <= stages.capacity else (middle, top)
        prices = figures.speed * bound / float(figures.speed @ figures.devices)
        return StageRange(stages, low, high, bounds, prices)

    def _stage_figures(self, family: Family) -> StageFigures | None:
        """Return the stage figures of a family, cached for all families that share them."""
        config = family.config
        key = config.micro_batch_size, family.replicas, stage_modes(config), splits_backward(config)
        if key not in self._figures:
            figures = self._figures[key] = make_stage_figures(self.space, family, self.limit)
            if figures is not None:
                self.budget.spend(5e6 * len(figures.kind) + 1e3 * len(figures.choice))
        return self._figures[key]

    def _spend(self, stages: FamilyBound, share: float = 1.0) -> None:
        """Count the work of a dynamic programme, or of a share of one."""
        self.budget.check()
        rows = 1e5 + 4.0 * stages.places * stages.width
        self.budget.spend(share * (min(stages.most_stages, stages.places) * rows + 1e3 * len(stages.pair)))

    def _improve(self, item: StageRange) -> StageRange:
        """Return the range with better bounds and prices."""
        stages, bounds, prices = item.stages, item.bounds.copy(), item.prices
        lines = dict[int, list[tuple[float, Floats]]]()
        for _ in range(LOOKS):
            self._spend(stages)
            sums = stages.price(item.low, item.high, prices)
            bounds = np.maximum(bounds, sums.padded(len(bounds)))
            weakest = int(bounds.argmin())
            if bounds[weakest] >= self.limit or len(sums.bounds) <= weakest:
                break
            pipeline = stages.trace(sums, weakest + 1)
            if self.score is not None and pipeline:
                self.limit = min(self.limit, self.score(stages.family, stages.stages(pipeline)))
            moved = stages.move_prices(sums, pipeline, lines.setdefault(weakest, []))
            if moved is None:
                break
            prices = moved
        while bounds.min() < self.limit and 1 < bounds.argmin() + 1 <= len(sums.bounds):
            weakest = int(bounds.argmin())
            raised = stages.joined(sums, weakest + 1)
            if raised <= bounds[weakest]:
                break
            bounds[weakest] = raised
        return replace(item, bounds=bounds, prices=prices)

    def left(self, family: Family) -> list[StageRange] | None:
        """Return the ranges of a family that may hold a plan below the limit; None if it was not examined."""
        key = family.config, family.replicas
        waiting = [item for _, _, item in self._heap]
        if any(isinstance(item, Family) and (item.config, item.replicas) == key for item in waiting):
            return None
        ranges = [*self.open_ranges, *(item for item in waiting if isinstance(item, StageRange))]
        return [
            stage_range
            for stage_range in ranges
            if (stage_range.stages.family.config, stage_range.stages.family.replicas) == key
            and stage_range.bound < self.limit
        ]

    def single(self, family: Family) -> float:
        """Return the bound on plans of one stage of a family that was examined; inf if it has none."""
        return self._singles.get((family.config, family.replicas), inf)

    def completion(self, family: Family, stages: int, limit: float) -> CompletionBound | None:
        """Return the bound on unfinished plans of a family, cached over its orders of the devices.

        Args:
            family: Configuration and devices.
            stages: Number of stages of the complete plans.
            limit: Seconds that a plan must be faster than.

        Returns:
            The bound; None if none exists.
        """
        key = family.config, family.replicas, stages
        if key not in self._completions:
            ranges = [
                stage_range for stage_range in self.left(family) or () if stage_range.least(stages) < limit
            ]
            self._completions[key] = CompletionBound(ranges, stages) if stages > 1 and ranges else None
        return self._completions[key]


class CompletionBound:
    """Bound on unfinished plans of one family with `count` stages.

    Args:
        ranges: Ranges that may hold the longest stage of a plan below the limit.
        count: Number of stages.
    """

    def __init__(self, ranges: Sequence[StageRange], count: int) -> None:
        weakest = min(ranges, key=lambda one: float(one.bounds[count - 1]))
        self.stages, self.count, prices = weakest.stages, count, weakest.prices
        self.low = min(one.low for one in ranges)
        high, lines = max(one.high for one in ranges), list[tuple[float, Floats]]()
        best: PricedSums | None = None
        for _ in range(LOOKS):
            sums = self.stages.price(self.low, high, prices)
            if len(sums.bounds) < count:
                best = sums
                break
            if best is None or sums.bounds[count - 1] > best.bounds[count - 1]:
                best = sums
            moved = self.stages.move_prices(sums, self.stages.trace(sums, count), lines)
            if moved is None:
                break
            prices = moved
        assert best is not None
        self.root = float(best.padded(count)[count - 1])
        self._after, self._whole, self._prices = best.after, best.whole, best.prices
        self._paid = float(best.prices @ self.stages.devices)

    def start(self) -> BoundState:
        """Return the state of the plan without stages."""
        return {"before": np.zeros(1), "pivot": np.full(1, NO_PIVOT), "longest": np.zeros(1)}

    def extend(self, state: BoundState, stage: Expansion) -> tuple[Floats, BoundState]:
        """Return the bound of plans with one further stage, and their states.

        Args:
            state: State of the plans, by entry of `stage`.
            stage: The further stages.

        Returns:
            (expansions,) bounds in seconds, and the new states.
        """
        bound, following = self.stages, stage.remaining - 1
        weight = bound.after
        fits = np.isfinite(stage.backward)
        x = np.where(fits, stage.forward + stage.backward, 0.0)
        paid = self._price(stage) * stage.group.replicas - stage.accumulation
        if bound.family.config.recompute == "except_last":
            paid = paid - stage.forward
        if stage.remaining == self.count:
            paid = paid + stage.exposed_allreduce
        cut = 2 * stage.cut
        times = bound.micro_batches - (following if bound.is_1f1b else 0)
        is_pivot = bound.may_be_pivot(stage.remaining)
        pivot = state["pivot"] + weight * (x + cut) + paid
        if is_pivot:
            pivot = np.maximum(pivot, state["before"] + cut + times * x + paid)
        earlier = state["before"] + cut + x + paid
        longest = np.maximum(state["longest"], x)
        after, whole = (
            rows[following][stage.end] if following < len(rows) else np.full(len(x), inf)
            for rows in (self._after, self._whole)
        )
        least_cut = 2 * stage.least_cut
        through_pivot = pivot + weight * least_cut + after
        rest = earlier + least_cut + whole
        if is_pivot:
            # A longest stage is one of the chosen stages or one of the missing ones.
            rest = np.where(longest < self.low, rest, -inf)
        seconds = np.where(fits, (np.maximum(through_pivot, rest) - self._paid) * SAFE, inf)
        return seconds, {"before": earlier, "pivot": pivot, "longest": longest}

    def _price(self, stage: Expansion) -> float:
        """Return the least price of a device of the stage's group."""
        if len(self._prices) == 1:
            return float(self._prices[0])
        kinds = self.stages.figures.kinds
        (ranks,) = stage.choices.ranges.devices_at(stage.group.keys[:1].tolist(), [stage.group.replicas])
        used = stage.choices.space.topology.count_kinds(ranks)
        return min(float(self._prices[kinds.index(kind)]) for kind in used)


def best_prices(lines: Sequence[tuple[float, Floats]], prices: Floats, speed: Floats) -> Floats:
    """Return the prices that raise the minimum of some lines most.

    With several kinds of devices, HiGHS solves a linear programme.

    Args:
        lines: Values at price 0 and (kinds,) slopes of sums that bound a step.
        prices: (kinds,) current prices. None moves by more than a factor of `MOST_MOVE`.
        speed: (kinds,) speeds. No kind is priced below a slower one, and kinds of equal speed cost the same.
    """
    if len(prices) == 1:
        return _best_price(lines, float(prices[0]))
    solver = new_solver()
    kinds = [
        solver.addVariable(lb=float(price) / MOST_MOVE, ub=float(price) * MOST_MOVE, obj=0.0)
        for price in prices
    ]
    least = solver.addVariable(lb=-inf, obj=1.0)
    for value, slope in lines:
        solver.addConstr(
            least - sum(float(each) * kind for each, kind in zip(slope, kinds, strict=True)) <= value
        )
    order = np.argsort(speed, kind="stable").tolist()
    for slower, faster in pairwise(order):
        solver.addConstr(kinds[faster] - kinds[slower] >= 0)
        if speed[faster] == speed[slower]:
            solver.addConstr(kinds[faster] - kinds[slower] <= 0)
    solver.maximize()
    solution = np.array(solver.getSolution().col_value[: len(kinds)])
    ascending = np.maximum.accumulate(solution[order])
    moved = np.empty_like(solution)
    moved[order] = ascending
    for value in set(speed.tolist()):
        moved[speed == value] = moved[speed == value].max()
    return moved


def _best_price(lines: Sequence[tuple[float, Floats]], price: float) -> Floats:
    """Return the best price of a single kind: an end of the range, or where two lines meet."""
    values, slopes = (
        np.array([value for value, _ in lines]),
        np.array([float(slope[0]) for _, slope in lines]),
    )
    first, second = np.triu_indices(len(lines), 1)
    meet = slopes[first] != slopes[second]
    crossings = (values[second] - values[first])[meet] / (slopes[first] - slopes[second])[meet]
    prices = np.append(crossings, [price / MOST_MOVE, price * MOST_MOVE])
    prices = prices.clip(price / MOST_MOVE, price * MOST_MOVE)
    least = (values[:, None] + slopes[:, None] * prices).min(axis=0)
    return prices[[int(least.argmax())]]
