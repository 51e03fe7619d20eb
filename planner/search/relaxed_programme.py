"""The least sums of `relaxed_problem` over all pipelines: a dynamic programme from the last stage back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..stage_table import Floats
from .relaxed_problem import DOUBLE, EVERY_IN_FLIGHT, SAFE, RelaxedProblem, StageEntries, Weights


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


def price_stages(
    problem: RelaxedProblem, weights: Weights, low: float, high: float, prices: Floats
) -> PricedSums:
    """The least sums where x of stage s lies between `low` and `high`; `prices`: by kind of device."""
    programme = _Programme(problem, weights, low, high, prices)
    return PricedSums(programme.bounds(), programme)


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
        self._least: dict[tuple[float, int | None], tuple[Floats, Floats, Floats]] = {}

    def bounds(self) -> Floats:
        """By number of stages; the last also for all that have more."""
        for remaining in range(1, self.problem.depth + 1):
            after, whole = self._row(remaining)
            self.after.append(after)
            self.whole.append(whole)
        sums = np.array([row[0] for row in self.whole[1:]])
        if self.problem.most_stages > self.problem.depth:
            sums[-1] = min(sums[-1], self._deeper())
        possible = [self._is_bound(count) for count in range(1, len(sums) + 1)]
        possible[-1] = self._is_bound(self.problem.most_stages)  # then of fewer, too
        bounds: Floats = np.where(possible, (sums - self.paid) * SAFE, -np.inf)
        return bounds

    def _row(self, remaining: int) -> tuple[Floats, Floats]:
        after, before, busiest = self._tables(remaining)
        rest = self.after[-1][None, :]
        whole = np.minimum((busiest + rest).min(axis=1), (before + self.whole[-1][None, :]).min(axis=1))
        return (after + rest).min(axis=1), whole

    def _is_bound(self, remaining: int) -> bool:
        """Whether the sum bounds pipelines in which so many stages remain from s on."""
        return bool(np.isfinite(self.problem.coefficient(self.weights, remaining)))

    def _deeper(self) -> float:
        """The least sum of pipelines with more stages than are counted, of which all hold as many."""
        after, before, _ = self._tables(self.problem.depth)
        busiest = self._tables(self.problem.most_stages)[2]
        last, whole = self.after[-1], self.whole[-1]
        for _ in range(self.problem.cut_points):
            last = np.minimum(last, (after + last[None, :]).min(axis=1))
        whole = np.minimum(whole, (busiest + last[None, :]).min(axis=1))
        for _ in range(self.problem.cut_points):
            whole = np.minimum(whole, (before + whole[None, :]).min(axis=1))
        return float(whole[0])

    def _tables(self, remaining: int) -> tuple[Floats, Floats, Floats]:
        """(cut points, cut points) each: the least of a stage after s, before it, and of s."""
        in_flight, exact = self.problem.in_flight(remaining), self._own_in_flight(remaining)
        if (in_flight, exact) not in self._least:
            entries = self.problem.entries(in_flight, self.high)
            sums = (self._after(entries), self._before(entries), self._busiest(entries, remaining))
            cut_points = self.problem.cut_points
            tables = []
            for values in sums:
                table = np.full(cut_points * cut_points, np.inf)
                if len(entries.first):
                    table[entries.pair[entries.first]] = np.minimum.reduceat(values, entries.first)
                tables.append(table.reshape(cut_points, cut_points))
            self._least[in_flight, exact] = tables[0], tables[1], tables[2]
        after, before, busiest = self._least[in_flight, exact]
        if exact is None:
            busiest = busiest + self.problem.coefficient(self.weights, remaining) * self.low
        return after, before, busiest

    def _own_in_flight(self, remaining: int) -> int | None:
        """What x of s counts by, where that is worth tables of its own: micro-batches that s may hold."""
        if self.problem.config.schedule == "gpipe":
            return 0
        in_flight = min(self.problem.config.micro_batches, remaining)
        return in_flight if in_flight <= EVERY_IN_FLIGHT else None

    def _plain(self, entries: StageEntries) -> Floats:
        """x, of the micro-batch without what is run again where there is one."""
        last_differs = self.problem.config.recompute == "except_last"
        return entries.x - entries.forward if last_differs else entries.x

    def _after(self, entries: StageEntries) -> Floats:
        seconds = self.weights.after * (self._plain(entries) + 2 * entries.cut) - entries.accumulation
        total: Floats = seconds + self.price[entries.choice]
        return total

    def _before(self, entries: StageEntries) -> Floats:
        if self.weights.reduced:
            seconds = entries.forward + entries.cut
        else:
            seconds = self._plain(entries) + 2 * entries.cut - entries.accumulation
        total: Floats = seconds + self.price[entries.choice]
        return total

    def _busiest(self, entries: StageEntries, remaining: int) -> Floats:
        reduced = entries.exposed_allreduce if self.weights.reduced else 0.0
        seconds = self.weights.after * 2 * entries.cut + reduced - entries.accumulation
        total: Floats = seconds + self.price[entries.choice] + self._own(entries, remaining)
        return total

    def _own(self, entries: StageEntries, remaining: int) -> Floats | float:
        """What counts of x of s; 0 where its least is added to the whole table instead."""
        in_flight = self._own_in_flight(remaining)
        if in_flight is None:
            return 0.0
        x = np.maximum(entries.x, self.low)
        coefficient = self.problem.coefficient(self.weights, remaining)
        if not in_flight or self.weights is DOUBLE:
            return x * coefficient
        longer = np.maximum(entries.forward, entries.x - entries.forward)
        # Of x at the least `low`, the longer part is at the least a half.
        once, several = self.problem.config.micro_batches - in_flight + 1, in_flight - 1
        own: Floats = once * x + several * np.maximum(longer, self.low / 2)
        return own

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
                now, later = busiest + self.after[remaining - 1], before + self.whole[remaining - 1]
                passed = bool(now.min() <= later.min())
                rest, role = (now, "busiest") if passed else (later, "before")
            end = int(rest.argmin())
            yield CheapestStage(place, end, self._choice(remaining, place, end, role))
            place = end

    def _choice(self, remaining: int, start: int, end: int, role: str) -> int:
        entries = self.problem.entries(self.problem.in_flight(remaining), self.high)
        pair = start * self.problem.cut_points + end
        low, high = np.searchsorted(entries.pair, [pair, pair + 1])
        if role == "busiest":
            values = self._busiest(entries, remaining)
        else:
            values = {"after": self._after, "before": self._before}[role](entries)
        return int(entries.choice[low + int(values[low:high].argmin())])
