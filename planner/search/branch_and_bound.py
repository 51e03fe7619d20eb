"""The search for the fastest pipeline: cuts, replicas, placement, micro-batches, schedule, recomputation.

Every subproblem (a configuration, an order of the devices and a stage count) has a proven bound.

1. It starts from plans that were scored before (of the named planners, say).
2. A narrow beam of the plans with the lowest bounds gives every subproblem that is still of interest a plan.
3. Branch and bound, over all subproblems at once: of all unfinished plans those with the lowest bounds are
   extended by a stage, as long as the lowest bound lies below the best plan known. Whole plans are simulated
   when their bound is the lowest of all.

Where the work that a search may spend is done, the lowest bound of all that is left is what is proven. Of too
many unfinished plans those with the highest bounds are dropped, of which the lowest is the most that can then
be proven; subproblems that there was no time to begin have a bound of `relaxed_bound`. Work is counted, so
that the same input gives the same answer; only where that would take longer than the whole of a budget's
time, time ends it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from ..candidate import ScoredPlan
from ..pipeline_config import UNPROPOSED
from ..plan_records import TIE
from .budget import OutOfTime, SearchBudget
from .device_sets import make_ranges
from .placements import ANY, Placement
from .relaxed_bound import RelaxedBound
from .space import Space
from .subproblem import Chunk, Family, Subproblem

WORK = 3e9
"""The default work of a search, see `SearchBudget`."""
FOR_ROOTS = 1e9
"""Further work on bounds and beams of subproblems that were not searched."""
FIRST_COUNTS = 6
"""Numbers of stages of which a plan is made first, of every subproblem."""
FOR_REST = 0.2
"""Share of the work that is left once options were listed, for the search."""
FOR_RELAXED = 1e9
"""Further work on a bound on the subproblems whose options were not listed."""
MOST_UNFINISHED = 400_000
"""Unfinished plans that are kept."""


@dataclass(frozen=True)
class SearchResult:
    """What a search found and proved of its space.

    `bound_seconds` holds for every plan of the space; `root_bound_seconds` is the bound before searching.
    Both are inf where the space holds no plan that fits. `universal`: it holds for plans outside of the
    space, too (see `planner.universal_bound`), of which `best` is one. `other_bound`: that on the plans of
    the schedules that only `cut_search` searches, None where it did not, and `other_plans` good ones.
    """

    best: ScoredPlan | None
    bound_seconds: float
    root_bound_seconds: float
    exact: bool
    universal: bool = False
    other_bound: float | None = None
    other_plans: tuple[ScoredPlan, ...] = ()


def search(
    space: Space,
    families: Sequence[Family],
    stage_counts: Iterable[int],
    seeds: Iterable[ScoredPlan] = (),
    work: float | None = None,
    limit: float = np.inf,
) -> SearchResult:
    """The fastest plan of these families and stage counts, no slower than the seeds, where there is one
    faster than `limit` seconds.

    Among plans within `TIE` of each other: one of few stages, of a family that stands early.
    """
    budget = space.budget.part(WORK if work is None else work)
    return _BranchAndBound(space, families, sorted(set(stage_counts)), budget, limit).run(seeds)


class _BranchAndBound:
    """A search under way: the best plan so far, and the subproblems."""

    def __init__(
        self,
        space: Space,
        families: Sequence[Family],
        counts: Sequence[int],
        work: SearchBudget,
        limit: float,
    ) -> None:
        self.space, self.work, self.limit, self.counts = space, work, limit, counts
        self.best: ScoredPlan | None = None
        ranges = {key: make_ranges(space, *key) for key in dict.fromkeys(map(_ranges_key, families))}
        self.problems = [
            Subproblem(space, family, counts, ranges[_ranges_key(family)], work) for family in families
        ]
        anywhere = {_config_key(family) for family in families if family.placement.name == ANY}
        self.whole = [
            problem
            for problem in self.problems
            if problem.family.placement.name == ANY or _config_key(problem.family) not in anywhere
        ]
        """Without those whose plans are among another's, which only start the search."""

    @property
    def step(self) -> float:
        """Of the best plan so far."""
        return self.limit if self.best is None else self.best.step_seconds

    def run(self, seeds: Iterable[ScoredPlan]) -> SearchResult:
        """The answer."""
        for seed in seeds:
            self._take(seed)
        try:
            self._begin()
            self._bound_rest()
            proven = self._explore()
            self._prefer_simple()
        except OutOfTime:
            proven = -np.inf
        step = np.inf if self.best is None else self.best.step_seconds
        root = min((problem.root for problem in self.whole), default=np.inf)
        proven = max(proven, root)  # roots that a search which was stopped worked out after it
        exact = proven >= step * (1 - TIE)
        return SearchResult(self.best, step if exact else proven, min(root, step), exact)

    def _begin(self) -> None:
        """Lists the options of all subproblems as far as there is time, and takes good plans of each: first
        of a few numbers of stages, then of the others."""
        work, seconds = FOR_REST * self.work.remaining - FOR_ROOTS, FOR_REST * self.work.seconds_left
        problems = _in_order(self.problems)
        for part in ((0, FIRST_COUNTS), (FIRST_COUNTS, None)):
            for problem in problems:
                in_time = self.work.remaining > work and self.work.seconds_left >= seconds
                if in_time or self.best is None:
                    self._take(problem.seed(self.step, *part))

    def _bound_rest(self) -> None:
        """Bounds the plans of the subproblems for whose options there was no time."""
        rest = [problem for problem in self.whole if self._is_left(problem)]
        if not rest or self.limit < np.inf or rest[0].family.config.recompute in UNPROPOSED:
            return
        families, budget = [problem.family for problem in rest], self.space.budget.part(FOR_RELAXED)
        bound = RelaxedBound(self.space, families, self.counts, False, budget).least(self.step)
        for problem in rest:
            problem.quick_bound = max(problem.quick_bound, bound)

    def _is_left(self, problem: Subproblem) -> bool:
        """Whether it may have plans of interest, and its options were not listed."""
        return bool(self.counts) and problem.quick_bound < self.step and not problem.roots

    def _take(self, plan: ScoredPlan | None) -> None:
        if plan is not None and plan.step_seconds < self.step:
            self.best = plan

    def _explore(self) -> float:
        """Branch and bound. A bound on all plans that were not scored; inf where none can be faster."""
        heap: list[tuple[float, int, Subproblem, Chunk]] = []
        open_plans = pushed = 0

        def push(problem: Subproblem, chunk: Chunk) -> None:
            nonlocal open_plans, pushed
            if chunk.bounds[0] < self.step:
                heappush(heap, (float(chunk.bounds[0]), pushed, problem, chunk))
                open_plans, pushed = open_plans + len(chunk), pushed + 1

        left_out = np.inf
        for problem in self.whole:
            if self._is_left(problem):
                left_out = min(left_out, problem.quick_bound)
            elif problem.may_improve(self.step):
                for stages in self.counts:
                    if problem.roots[stages] < self.step:
                        push(problem, problem.start(stages, self.step))
        while heap:
            lowest, _, problem, chunk = heappop(heap)
            open_plans -= len(chunk)
            if lowest >= min(self.step * (1 - TIE), left_out):
                break
            if self.work.spent:
                return min(lowest, left_out)
            if open_plans > MOST_UNFINISHED:
                heap.sort()
                while heap and open_plans > MOST_UNFINISHED // 2:
                    bound, _, _, dropped = heap.pop()
                    open_plans, left_out = open_plans - len(dropped), min(left_out, bound)
            try:
                if chunk.remaining:
                    for further in problem.extend(chunk, self.step):
                        push(problem, further)
                else:
                    plan, rest = problem.score_chunk(chunk, self.step)
                    self._take(plan)
                    if rest is not None:
                        push(problem, rest)
            except OutOfTime:
                return min(lowest, left_out)
        return left_out if left_out < self.step * (1 - TIE) else np.inf

    def _prefer_simple(self) -> None:
        """Of plans as fast as the best one of fewer stages or an earlier family, where a beam finds it."""
        best = self.best
        if best is None or self.work.spent:
            return
        limit = best.step_seconds * (1 + TIE)
        for stages in self.counts:
            for problem in self.problems:
                is_best = stages == len(best.proposal.ends) and problem.family.config == best.config
                if stages > len(best.proposal.ends) or is_best:
                    return
                if problem.may_improve(limit) and problem.roots[stages] < limit:
                    plan = problem.beam(stages, limit)
                    if plan is not None:
                        self.best = plan
                        return


def _in_order(problems: Iterable[Subproblem]) -> list[Subproblem]:
    """As they are begun: every configuration on one order of the devices before the others on a second one;
    of each by the least seconds, and of those alike first the ones with fewer micro-batches, which have fewer
    options."""
    earlier = Counter[tuple[object, ...]]()

    def rank(problem: Subproblem) -> tuple[int, float, int]:
        key = _config_key(problem.family)
        earlier[key] += 1
        return earlier[key], problem.quick_bound, problem.family.config.micro_batches

    return sorted(problems, key=rank)


_RangesKey = tuple[Placement, tuple[int, ...], bool, int]


def _ranges_key(family: Family) -> _RangesKey:
    """Families of the same runs share them."""
    return family.placement, family.replicas, family.on_all, family.unit


def _config_key(family: Family) -> tuple[object, ...]:
    """The same for families that differ by the order of the devices alone."""
    return family.config, family.replicas, family.on_all
