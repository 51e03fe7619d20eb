"""A bound on all pipelines of a configuration whichever devices they take, for problems with many devices.

The letters are those of `one_f_one_b`, x = f + b. Let s be the stage with the largest x of p stages, w the
micro-batches that it may hold, A = sum of (x + 2 c) of the stages before it, D as there (2 c of its cut and
the sum of (x + 2 c) of those after it). Then a step takes no less than each of

    M > w    A + (M - w + 1) x + 2 D             the module's X >= f + D and Y >= b + D
             A + (M - w + 1 + (w - 1) / 2) x + D     X + Y >= x + D + (w - 1) max(f, b)
    M = w    A + (1 + (M - 1) / 2) x + D
    GPipe    A + M x + D

and with e of s in place of the backwards (and their cuts) of the stages before it, which come after its last.
All of these are sums over the stages, in which s counts otherwise. Each is the length of a path, or of two on
average, which meets the first backward of a stage once at most: what that does not take is left out of every
stage once. For x of s between `low` and `high` no
other stage takes more than `high`, and s counts at least with `low`. What is left to respect is that all
stages together have no more devices than there are, and that is priced: with a price of every device,

    min over all pipelines of (sum of the stages' seconds + prices of their devices) - prices of all devices

is no more than the least sum of a pipeline that fits (Everett, Generalized Lagrange multiplier method,
Operations Research 11(3), 1963), and a dynamic programme from the last stage back finds it: over cut points
and stages, without positions, so that 16,384 devices take no longer than 64. A stage on several kinds of
devices takes the seconds of its slowest kind and so no less than as many devices of that kind, which cost no
more, as no kind is priced below a slower one (of kinds that were profiled themselves: of its cheapest kind).
The bound is the least over ranges of x, the weakest of which are halved again and again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...cost_models.schedules import find_schedule
from ..pipeline_config import PipelineConfig
from ..stage_table import Floats
from .pipelines import stage_modes
from .relaxed_stages import RelaxedStages

Indices = npt.NDArray[np.int64]
SAFE = 1 - 1e-9
"""Of a bound, so that none is above a step by rounding."""
EVERY_IN_FLIGHT = 8
"""Up to so many micro-batches held, memory is checked for each number; beyond, for every eighth more."""


@dataclass(frozen=True)
class Weights:
    """A sum that bounds a step: what x counts in stages before s and after it; `reduced`: with e of s, and
    without the backwards before it."""

    name: str
    after: float
    reduced: bool = False


DOUBLE, SINGLE = Weights("double", 2.0), Weights("single", 1.0)
REDUCED = Weights("reduced", 1.0, reduced=True)


class CheapestStage(NamedTuple):
    """A stage of the pipeline that attains the least sum: cut points, and the choice of `RelaxedStages`."""

    start: int
    end: int
    choice: int


@dataclass(frozen=True, eq=False)
class PricedSums:
    """The least sums by number of stages, index 0 for one stage; and what traces one of them back."""

    bounds: Floats
    programme: _Programme

    def pipeline(self, stages: int) -> list[CheapestStage]:
        """The stages with the least sum."""
        return self.programme.trace_back(stages)


@dataclass(frozen=True, eq=False)
class RelaxedProblem:
    """The pipelines of a configuration with 1 to `most_stages` stages."""

    config: PipelineConfig
    stages: RelaxedStages
    most_stages: int
    _entries: dict[tuple[float, float], _Entries] = field(default_factory=dict)

    @property
    def cut_points(self) -> int:
        """Of the tables, the last behind all layers."""
        return len(self.stages.cut_points)

    @property
    def weights(self) -> tuple[Weights, ...]:
        """The sums that bound its steps."""
        gpipe = self.config.schedule == "gpipe"
        return (SINGLE, REDUCED) if gpipe else (DOUBLE, SINGLE, REDUCED)

    def coefficient(self, weights: Weights, remaining: int) -> float:
        """Of x of stage s as the `remaining`-th from the end; inf where the sum is no bound."""
        count = self.config.micro_batches
        if self.config.schedule == "gpipe":
            return count - 0.5 if self.config.recompute == "except_last" else float(count)
        in_flight = min(count, remaining)
        if weights is DOUBLE:
            return count - in_flight + 1.0 if count > in_flight else np.inf
        return count - in_flight + 1 + (in_flight - 1) / 2

    def in_flight(self, remaining: int) -> float:
        """Micro-batches in flight, of a few numbers: no more than there are."""
        count = find_schedule(self.config.schedule).in_flight(0, remaining, self.config.micro_batches)
        if self.config.schedule == "gpipe":
            return count
        step = 1
        while count > EVERY_IN_FLIGHT * step:
            step += max(1, step // 4)
        return count - count % step if step > 1 else count

    @cached_property
    def depth(self) -> int:
        """Stages that are counted by their number; deeper pipelines are bounded together."""
        return min(self.most_stages, self.cut_points)

    def seconds(self, in_flight: float) -> Floats:
        """x of every stage that holds so many micro-batches, by choice and place; inf where it does not
        fit."""
        seconds = np.full(self.stages.forward.shape, np.inf)
        for mode in reversed(stage_modes(self.config)):
            recompute = 0.0 if mode == "never" else self.stages.forward
            own = self.stages.forward + self.stages.backward + recompute
            seconds = np.where(in_flight <= self.stages.room[mode], own, seconds)
        return seconds

    @cached_property
    def alone(self) -> float:
        """The least step of one stage."""
        x, count = self.seconds(self.in_flight(1))[:, 0, -1], self.config.micro_batches
        once = self.stages.forward[:, 0, -1] if self.config.recompute == "except_last" else 0.0
        once = once + self.stages.accumulation[:, 0, -1]
        with np.errstate(invalid="ignore"):
            steps = count * x - once + self.stages.exposed_allreduce[:, 0, -1]
        steps = np.where(np.isfinite(x), steps, np.inf)
        return float(steps.min()) * SAFE

    def price_stages(self, weights: Weights, low: float, high: float, prices: Floats) -> PricedSums:
        """The least sums where x of stage s lies between `low` and `high`; `prices`: by kind of device."""
        programme = _Programme(self, weights, low, high, prices)
        return PricedSums(programme.bounds(), programme)

    def entries(self, in_flight: float, high: float) -> _Entries:
        """The stages that hold so many micro-batches and take no longer than `high`."""
        key = (in_flight, high)
        if key not in self._entries:
            for old in [old for old in self._entries if old[1] != high]:
                del self._entries[old]
            self._entries[key] = _Entries.of(self, in_flight, high)
        return self._entries[key]


@dataclass(frozen=True, eq=False)
class _Entries:
    """Stages, sorted by their pair of cut points: `pair` of each, `first` of every pair's, `choice`;
    seconds."""

    pair: Indices
    first: Indices
    choice: Indices
    x: Floats
    accumulation: Floats
    forward: Floats
    exposed_allreduce: Floats
    cut: Floats

    @classmethod
    def of(cls, problem: RelaxedProblem, in_flight: float, high: float) -> _Entries:
        stages, cut_points = problem.stages, problem.cut_points
        choices = len(stages.kind)
        x = problem.seconds(in_flight).reshape(choices, -1).T
        at = np.flatnonzero(x <= high)
        pair, choice = np.divmod(at, choices)
        first = np.flatnonzero(np.append(True, pair[1:] != pair[:-1])) if len(pair) else pair

        def own(values: Floats) -> Floats:
            column: Floats = values.reshape(choices, -1).T.reshape(-1)[at]
            return column

        cut = stages.cut[choice, pair % cut_points]
        accumulation, forward = own(stages.accumulation), own(stages.forward)
        reduced = own(stages.exposed_allreduce)
        return cls(pair, first, choice, x.reshape(-1)[at], accumulation, forward, reduced, cut)


class _Programme:
    """The dynamic programme for a sum, a range of x and prices."""

    def __init__(
        self, problem: RelaxedProblem, weights: Weights, low: float, high: float, prices: Floats
    ) -> None:
        self.problem, self.weights, self.low, self.high = problem, weights, low, high
        stages = problem.stages
        self.price = prices[stages.kind] * stages.replicas
        self.paid = float(prices @ stages.devices)
        nothing = np.full(problem.cut_points, np.inf)
        nothing[-1] = 0.0
        self.after, self.whole = [nothing], [np.full(problem.cut_points, np.inf)]
        self._least: dict[float, tuple[Floats, Floats, Floats]] = {}

    def bounds(self) -> Floats:
        """By number of stages; the last also for all that have more."""
        for remaining in range(1, self.problem.depth + 1):
            after, whole = self._row(remaining)
            self.after.append(after)
            self.whole.append(whole)
        sums = np.array([row[0] for row in self.whole[1:]])
        if self.problem.most_stages > self.problem.depth:
            sums[-1] = min(sums[-1], self._deeper())
        possible = [np.isfinite(self._busiest_seconds(count)) for count in range(1, len(sums) + 1)]
        possible[-1] = possible[-1] and bool(np.isfinite(self._busiest_seconds(self.problem.most_stages)))
        bounds: Floats = np.where(possible, (sums - self.paid) * SAFE, -np.inf)
        return bounds

    def _row(self, remaining: int) -> tuple[Floats, Floats]:
        after, before, busiest = self._tables(remaining)
        rest = self.after[-1][None, :]
        own = self._busiest_seconds(remaining)
        whole = np.minimum((own + busiest + rest).min(axis=1), (before + self.whole[-1][None, :]).min(axis=1))
        return (after + rest).min(axis=1), whole

    def _busiest_seconds(self, remaining: int) -> float:
        """What x of stage s counts at the least; inf where the sum is no bound: see `bounds`."""
        coefficient = self.problem.coefficient(self.weights, remaining)
        return coefficient * self.low if np.isfinite(coefficient) else np.inf

    def _deeper(self) -> float:
        """The least sum of pipelines with more stages than are counted, of which all hold as many."""
        after, before, busiest = self._tables(self.problem.depth)
        last, whole = self.after[-1], self.whole[-1]
        own = self._busiest_seconds(self.problem.most_stages)
        for _ in range(self.problem.cut_points):
            last = np.minimum(last, (after + last[None, :]).min(axis=1))
        whole = np.minimum(whole, (own + busiest + last[None, :]).min(axis=1))
        for _ in range(self.problem.cut_points):
            whole = np.minimum(whole, (before + whole[None, :]).min(axis=1))
        return float(whole[0])

    def _tables(self, remaining: int) -> tuple[Floats, Floats, Floats]:
        """(cut points, cut points) each: the least of a stage after s, before it, and of s but for x."""
        in_flight = self.problem.in_flight(remaining)
        if in_flight not in self._least:
            entries = self.problem.entries(in_flight, self.high)
            sums = (self._after(entries), self._before(entries), self._busiest(entries))
            cut_points = self.problem.cut_points
            tables = []
            for values in sums:
                table = np.full(cut_points * cut_points, np.inf)
                if len(entries.first):
                    table[entries.pair[entries.first]] = np.minimum.reduceat(values, entries.first)
                tables.append(table.reshape(cut_points, cut_points))
            self._least[in_flight] = tables[0], tables[1], tables[2]
        return self._least[in_flight]

    def _plain(self, entries: _Entries) -> Floats:
        """x, of the micro-batch without what is run again where there is one."""
        last_differs = self.problem.config.recompute == "except_last"
        return entries.x - entries.forward if last_differs else entries.x

    def _after(self, entries: _Entries) -> Floats:
        seconds = self.weights.after * (self._plain(entries) + 2 * entries.cut) - entries.accumulation
        total: Floats = seconds + self.price[entries.choice]
        return total

    def _before(self, entries: _Entries) -> Floats:
        if self.weights.reduced:
            seconds = entries.forward + entries.cut
        else:
            seconds = self._plain(entries) + 2 * entries.cut - entries.accumulation
        total: Floats = seconds + self.price[entries.choice]
        return total

    def _busiest(self, entries: _Entries) -> Floats:
        reduced = entries.exposed_allreduce if self.weights.reduced else 0.0
        seconds = self.weights.after * 2 * entries.cut + reduced - entries.accumulation
        total: Floats = seconds + self.price[entries.choice]
        return total

    def trace_back(self, stages: int) -> list[CheapestStage]:
        """The pipeline of so many stages with the least sum; none where there is none."""
        if not np.isfinite(self.whole[stages][0]):
            return []
        return list(self._trace(stages))

    def _trace(self, stages: int) -> Iterator[CheapestStage]:
        place, passed = 0, False
        for remaining in range(stages, 0, -1):
            after, before, busiest = (table[place] for table in self._tables(remaining))
            rest, role = after + self.after[remaining - 1], "after"
            if not passed:
                own = self._busiest_seconds(remaining)
                now, later = own + busiest + self.after[remaining - 1], before + self.whole[remaining - 1]
                passed = bool(now.min() <= later.min())
                rest, role = (now, "busiest") if passed else (later, "before")
            end = int(rest.argmin())
            yield CheapestStage(place, end, self._choice(remaining, place, end, role))
            place = end

    def _choice(self, remaining: int, start: int, end: int, role: str) -> int:
        entries = self.problem.entries(self.problem.in_flight(remaining), self.high)
        pair = start * self.problem.cut_points + end
        low, high = np.searchsorted(entries.pair, [pair, pair + 1])
        values = {"after": self._after, "before": self._before, "busiest": self._busiest}[role](entries)
        return int(entries.choice[low + int(values[low:high].argmin())])
