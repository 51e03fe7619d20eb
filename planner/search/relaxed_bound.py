"""The least of the bounds of `relaxed` over the families of a problem, and the pipelines that attain it.

Ranges of the longest stage's seconds lie in a heap, the one with the lowest bound first. It is looked at with
a few prices, moved towards those at which all devices are in use, and halved, until it is as good as the best
plan known, or narrow, or the budget is spent: what is lowest then is proven.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf, sqrt
from typing import TypeAlias

import numpy as np

from ..candidate import Proposal
from ..stage_table import Floats
from .budget import OutOfTime, SearchBudget
from .fill_bound import fill_bound
from .fluid_bound import fluid_bound
from .relaxed_problem import RelaxedProblem, Weights
from .relaxed_programme import CheapestStage, PricedSums, price_stages
from .relaxed_stages import RelaxedStages, make_relaxed_stages
from .rounding import round_stages
from .space import Space
from .subproblem import Family, quick_bound, shared_work

LOOKS = 4
"""Prices that are tried for a range, for each of the sums."""
PROPOSING = 0.4
"""Of the work, the part that scoring plans near the relaxed ones may be."""
SCORING = 1e4
"""Work for each device of a plan, of finding its ports above all."""
NARROW = 1.01
"""Ranges that end so near their beginning are not halved."""
QUESTIONS = 8
"""Steps for which it is asked whether a plan may be below them."""
FOR_FIRST = 0.3
"""Of the work, the part that the first question, about all plans below the best one, may take."""
MOST_MOVE = 2.0
"""The most by which one step changes a price."""

_Pipeline: TypeAlias = tuple[Family, tuple[CheapestStage, ...]]
Score = Callable[[Sequence[Proposal]], float]
"""Seconds of the best plan known, once these proposals were scored."""


@dataclass(frozen=True, eq=False)
class _StageRange:
    """Pipelines of a family whose longest stage takes from `low` to `high` seconds a micro-batch: bounds by
    number of stages, and the prices to begin with."""

    problem: RelaxedProblem
    family: Family
    low: float
    high: float
    bounds: Floats
    prices: Floats

    @property
    def bound(self) -> float:
        """On all of them."""
        return float(self.bounds.min(initial=inf))


@dataclass(eq=False)
class RelaxedBound:
    """The search for the bound. `counts`: numbers of stages; `deeper`: all larger ones, too. `score` is told
    of the pipelines that it comes across."""

    space: Space
    families: Sequence[Family]
    counts: Sequence[int]
    deeper: bool
    budget: SearchBudget
    score: Score | None = None
    step: float = inf
    _pushed: int = 0
    _heap: list[tuple[float, int, _StageRange | Family]] = field(default_factory=list)
    _tables: dict[Family, RelaxedStages | None] = field(default_factory=dict)
    _later: dict[_Pipeline, _StageRange] = field(default_factory=dict)
    _fluid: dict[Family, float] = field(default_factory=dict)
    _proposing: float = 0.0
    _closed: float = inf
    """The least bound of ranges that are not refined any more."""

    def __post_init__(self) -> None:
        self._at_first = self.budget.remaining

    def least(self, step: float) -> float:
        """A bound on all pipelines that take less than `step` seconds; else `step`."""
        low, high = self._least_below(step, (1 - FOR_FIRST) * self.budget.remaining), self.step
        for _ in range(QUESTIONS):
            if high <= low * NARROW or self.budget.spent:
                break
            middle = sqrt(low * high)
            proven = self._least_below(middle)
            low, high = max(low, proven), high if proven >= middle else middle
        return low

    def _least_below(self, step: float, left: float = 0.0) -> float:
        """The same, with the stages of plans below `step` only: the fewer, the better is the bound. So much
        work is left for other questions."""
        self.step, self._heap, self._closed = step, [], inf
        own = dict.fromkeys((family.config, family.replicas) for family in self.families)
        first = {key: next(f for f in self.families if (f.config, f.replicas) == key) for key in own}
        for family in first.values():
            self._push(max(quick_bound(self.space, family), self._fluid.get(family, 0.0)), family)
        while self._heap:
            lowest, _, range_ = self._heap[0]
            if lowest >= min(self.step, self._closed):
                break
            if self.budget.spent or self.budget.remaining <= left:
                return min(lowest, self._closed)
            heappop(self._heap)
            try:
                self._look(lowest, range_)
            except OutOfTime:
                return min(lowest, self._closed)
        return min(self.step, self._closed)

    def _push(self, bound: float, range_: _StageRange | Family) -> None:
        if bound < self.step:
            heappush(self._heap, (bound, self._pushed, range_))
            self._pushed += 1

    def _look(self, bound: float, range_: _StageRange | Family) -> None:
        if isinstance(range_, Family):
            # Of short chains the ranges of stages say more, in the time that it takes.
            if range_ not in self._fluid and self.space.is_long:
                own = self.space.within(self.budget)
                low = self._fluid[range_] = fluid_bound(own, range_, self.step)
                if low < self.step:
                    self._fluid[range_] = max(low, fill_bound(own, range_, self.step))
            bound = max(bound, min(self._fluid.get(range_, 0.0), self.step))
            if bound >= self.step:
                return
            for whole in self._whole_range(range_, bound):
                self._push(whole.bound, whole)
            return
        priced = self._improve_prices(range_)
        if priced.bound >= self.step:
            return
        if priced.high <= priced.low * NARROW:
            self._closed = min(self._closed, priced.bound)
            return
        for half in _halves(priced):
            self._push(half.bound, half)

    def _whole_range(self, family: Family, bound: float) -> Iterator[_StageRange]:
        """The whole range of a family; what has one stage is known at once."""
        stages = self._stages(family)
        if stages is None:
            return
        blocks, devices = len(stages.cut_points) - 1, int(stages.devices.sum())
        most = min(devices, self.space.chain.max_stages if not stages.exact else blocks)
        if not self.deeper:
            most = min(most, max(self.counts))
        problem = RelaxedProblem(family.config, stages, most, self.step)
        if 1 in self.counts:
            self._closed = min(self._closed, max(problem.single_stage_step, bound))
        if most == 1:
            return
        count = family.config.micro_batches
        low, high = shared_work(self.space, family) / count, self._longest(problem)
        if low <= high:
            bounds = np.full(problem.depth, bound)
            bounds[0] = inf
            allowed = [
                k in self.counts or (self.deeper and k > max(self.counts))
                for k in range(1, problem.depth + 1)
            ]
            allowed[-1] = allowed[-1] or most > problem.depth
            bounds[~np.array(allowed)] = inf
            yield _StageRange(problem, family, low, high, bounds, _first_prices(problem, bound))

    def _stages(self, family: Family) -> RelaxedStages | None:
        """The tables of a family, made once."""
        if family not in self._tables:
            self.budget.spend(1e7)
            self._tables[family] = make_relaxed_stages(self.space, family)
        return self._tables[family]

    def _longest(self, problem: RelaxedProblem) -> float:
        """Seconds of a micro-batch on the longest stage of a plan that is faster than the best one known."""
        config = problem.config
        count = config.micro_batches - (0.5 if config.recompute == "except_last" else 0.0)
        x = 2 * problem.stages.forward + problem.stages.backward
        longest = float(x[np.isfinite(x)].max(initial=0.0))
        once = problem.stages.accumulation
        most_once = float(once[np.isfinite(once)].max(initial=0.0))
        return min((self.step + most_once) / count, longest)

    def _improve_prices(self, range_: _StageRange) -> _StageRange:
        """The range with better bounds and prices."""
        problem, bounds, prices = range_.problem, range_.bounds.copy(), range_.prices
        for look in range(LOOKS):
            best: tuple[float, PricedSums, int] | None = None
            for weights in problem.weights:
                self.budget.check()
                priced = self._price_range(range_, weights, prices)
                weakest = int(bounds.argmin())
                bounds = np.maximum(bounds, priced.bounds)
                value = float(priced.bounds[weakest])
                if np.isfinite(value) and (best is None or value > best[0]):
                    best = (value, priced, weakest + 1)
            if bounds.min() >= self.step or best is None:
                break
            pipeline = best[1].pipeline(best[2])
            if not pipeline:
                break
            self._propose(range_, pipeline)
            prices = _move_prices(problem, prices, pipeline, 0.7**look)
        return _StageRange(problem, range_.family, range_.low, range_.high, bounds, prices)

    def _price_range(self, range_: _StageRange, weights: Weights, prices: Floats) -> PricedSums:
        problem = range_.problem
        sums = price_stages(problem, weights, range_.low, range_.high, prices)
        self.budget.spend(
            5e5 + 10.0 * problem.stages.forward.size + 4.0 * problem.depth * problem.cut_points**2
        )
        return sums

    def _propose(self, range_: _StageRange, pipeline: Sequence[CheapestStage]) -> None:
        """Has the plans near a pipeline scored: now, or where that takes more than its share, later."""
        if self.score is None:
            return
        self._later.setdefault((range_.family, tuple(pipeline)), range_)
        if self._proposing <= PROPOSING * (self._at_first - self.budget.remaining):
            self._score_next(next(reversed(self._later)), self.budget)

    def propose_rest(self, budget: SearchBudget) -> None:
        """Has those scored that were left, the ones of the lowest bounds first."""
        try:
            for key in sorted(self._later, key=lambda own: self._later[own].bound):
                if budget.spent:
                    return
                self._score_next(key, budget)
        except OutOfTime:
            return

    def _score_next(self, key: _Pipeline, budget: SearchBudget) -> None:
        (family, pipeline), problem = key, self._later.pop(key).problem
        proposals = round_stages(self.space, family, problem, pipeline, self.families)
        work = SCORING * int(problem.stages.devices.sum()) * (1 + len(proposals))
        self._proposing += work
        budget.spend(work)
        if self.score is not None:
            self.step = min(self.step, self.score(proposals))


def _halves(range_: _StageRange) -> Iterator[_StageRange]:
    middle = sqrt(range_.low * range_.high)
    for low, high in ((range_.low, middle), (middle, range_.high)):
        yield _StageRange(range_.problem, range_.family, low, high, range_.bounds, range_.prices)


def _first_prices(problem: RelaxedProblem, bound: float) -> Floats:
    """By kind: as if the seconds of a step were what all devices are worth, the faster ones more."""
    stages = problem.stages
    speed = np.array([1 / _longest_stage(stages, kind) for kind in range(len(stages.kinds))])
    return _by_speed(problem, speed * bound / float(speed @ stages.devices))


def _longest_stage(stages: RelaxedStages, kind: int) -> float:
    """Seconds of the longest stage that may be, on devices of a kind: that of all layers, unless a cut is
    asked for."""
    own = stages.kind == kind
    work = (stages.forward[own] + stages.backward[own]).min(axis=0)
    return float(work[np.isfinite(work)].max(initial=0.0)) or 1.0


def _move_prices(
    problem: RelaxedProblem, prices: Floats, pipeline: Iterable[CheapestStage], size: float
) -> Floats:
    """Dearer where the pipeline takes more devices than there are, cheaper where fewer."""
    used = np.zeros(len(prices))
    for stage in pipeline:
        used[problem.stages.kind[stage.choice]] += problem.stages.replicas[stage.choice]
    move = np.clip(used / problem.stages.devices, 1 / MOST_MOVE, MOST_MOVE)
    return _by_speed(problem, prices * move**size)


def _by_speed(problem: RelaxedProblem, prices: Floats) -> Floats:
    """None cheaper than a slower kind: the slowest kind of a stage is then its cheapest."""
    speeds = np.array([kind.speed for kind in problem.stages.kinds])
    order = np.argsort(speeds, kind="stable")
    scaled = prices.copy()
    scaled[order] = np.maximum.accumulate(prices[order])
    for speed in set(speeds.tolist()):  # as fast ones cost the same
        scaled[speeds == speed] = scaled[speeds == speed].max()
    return scaled
