"""The search for the fastest pipeline: cuts, replicas, placement, micro-batches, schedule, recomputation.

Every subproblem (a configuration, an order of the devices and a stage count) has a proven bound.

1. `MemoryBound` bounds all families, and plans near the pipelines that attain its bounds are simulated.
2. Branch and bound extends unfinished plans by a stage, over all subproblems at once, those with the lowest
   bounds first, as long as the lowest bound lies below the best plan known. Whole plans are simulated when
   their bound is the lowest of all.

Problems with too many layers or devices (`is_large`) have no tables of stages on runs of devices, and no
second step. Their plans come from equal replicas, from the bound and from `improve_plans`.

When the work or the time that a search may spend is done, the lowest bound that is left is what is proven. Of
too many unfinished plans those with the highest bounds are dropped, and the lowest of these limits what can
be proven. Work is counted, so that the same input gives the same answer; time ends a search only where that
would take longer than the whole of a budget's time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from ...cost_models.errors import DefectError, UsageError
from ..candidate import UNPROPOSED, ScoredPlan
from ..plan_file import TIE
from .bound import MemoryBound
from .budget import OutOfTime, SearchBudget
from .device_sets import make_ranges
from .family import Family, quick_bound
from .local_search import improve_plans
from .near_plans import Incumbent, score_equal
from .placements import ANY, MOST_DEVICES, Placement
from .space import MOST_BLOCKS, Space, with_cuts
from .stage_figures import spread_cuts
from .subproblem import Chunk, Subproblem

WORK = 3e9
"""Default work of a search, see `SearchBudget`."""
FIRST_COUNTS = 6
"""Numbers of stages of which a plan is made first, of every subproblem."""
FOR_REST = 0.2
"""Share of the work that is left once options were listed, for the search."""
FOR_BOUND, FOR_LARGE = 0.5, 0.75
"""Share of the work and the time for the bound on all families; where no branch and bound follows."""
FEW_CUTS = 100
"""Places to cut a long chain where nothing else finds a plan."""
MOST_UNFINISHED = 400_000
"""Unfinished plans that are kept."""
MOST_ENTRIES = 16e6
"""Stages on runs of devices, between all cut points, that are searched."""
MOST_LINEAR = 256
"""Devices up to which all plans are searched where every stage has one; else `MOST_DEVICES`."""


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


def is_large(space: Space, families: Sequence[Family]) -> bool:
    """Return whether there are too many layers or devices for tables of all stages on runs of devices."""
    if space.is_long:
        return True
    pairs = (space.chain.max_stages + 1) ** 2
    return any(
        len(family.placement.ranks) > (MOST_LINEAR if family.replicas == (1,) else MOST_DEVICES)
        or len(family.placement.ranks) * len(family.replicas) * pairs > MOST_ENTRIES
        for family in families
    )


def search(
    space: Space,
    families: Sequence[Family],
    stage_counts: Iterable[int],
    seeds: Iterable[ScoredPlan] = (),
    work: float | None = None,
    limit: float = inf,
    *,
    deeper: bool = False,
) -> SearchResult:
    """The fastest plan of these families and stage counts, no slower than the seeds.

    Among plans within `TIE` of each other: one of few stages, of a family that stands early.

    Args:
        space: Costs and limits.
        families: Configurations on orders of the devices.
        stage_counts: Numbers of stages.
        seeds: Plans that were scored before.
        work: See `SearchBudget`; default `WORK`.
        limit: Seconds that a plan must be faster than.
        deeper: Plans with more stages are allowed, too: they are bounded, not searched.

    Raises:
        UsageError: Too many layers or devices for a way to recompute that the bound does not know.
        DefectError: A plan is below the bound of a large problem.
    """
    large = is_large(space, families)
    by_layer = bool(families) and families[0].config.recompute in UNPROPOSED
    if large and by_layer:
        devices, cuts = len(families[0].placement.ranks), space.chain.max_stages - 1
        raise UsageError(
            f"recompute={families[0].config.recompute!r} of so many devices or layers: {devices} devices and "
            f"{cuts} places to cut are too many to search",
            f"Use recompute='auto', or at most {MOST_DEVICES} devices and {MOST_BLOCKS} places to cut, fewer "
            "where there are many of both.",
        )
    budget = space.budget.part(WORK if work is None else work)
    counts = sorted(set(stage_counts))
    incumbent = Incumbent(space, families, counts, budget, limit, deeper=deeper, any_order=large)
    for seed in seeds:
        incumbent.take(seed)
    bound, proven = None, inf
    if families and counts and not by_layer:
        share = FOR_LARGE if large else FOR_BOUND
        part = budget.part(share * budget.remaining, share=share)
        if large:
            with suppress(OutOfTime):
                score_equal(incumbent)
        bound = MemoryBound(space, families, counts, deeper, part, incumbent, every_range=not large)
        proven = bound.least(incumbent.within)
        if proven < incumbent.step and large:
            improve_plans(incumbent, budget)
    if not large:
        return _BranchAndBound(space, families, counts, budget, incumbent, bound).run()
    if space.is_long and proven < inf and (incumbent.best is None or space.limits.are_set):
        few = with_cuts(space, spread_cuts(space, FEW_CUTS))
        if families and not is_large(few, families):
            # The few cuts allow a search, which knows pins; the bound does not.
            _BranchAndBound(few, families, counts, budget, incumbent, None).run()
    step = inf if incumbent.best is None else incumbent.best.step_seconds
    if bound is not None and proven > step * (1 + 3 * TIE):
        raise DefectError(f"a plan of {step!r} s is below its bound of {proven!r} s: {incumbent.best}")
    proven = min(proven, step)
    root = min([step, *(quick_bound(space, family) for family in families)])
    exact = proven >= step * (1 - TIE)
    return SearchResult(incumbent.best, step if exact else proven, min(root, proven), exact)


class _BranchAndBound:
    """A search under way: the best plan so far, and the subproblems."""

    def __init__(
        self,
        space: Space,
        families: Sequence[Family],
        counts: Sequence[int],
        work: SearchBudget,
        incumbent: Incumbent,
        bound: MemoryBound | None,
    ) -> None:
        self.space, self.work, self.counts, self.incumbent = space, work, counts, incumbent
        ranges = {key: make_ranges(space, *key) for key in dict.fromkeys(map(_ranges_key, families))}
        self.problems = [
            Subproblem(space, family, counts, ranges[_ranges_key(family)], work, bound) for family in families
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
        """Step seconds of the best plan so far."""
        return self.incumbent.step

    def run(self) -> SearchResult:
        """The answer."""
        try:
            self._begin()
            proven = self._explore()
            self._prefer_simple()
        except OutOfTime:
            proven = -inf
        best = self.incumbent.best
        step = inf if best is None else best.step_seconds
        root = min((problem.root for problem in self.whole), default=inf)
        proven = max(proven, root)  # roots that a search which was stopped worked out after it
        exact = proven >= step * (1 - TIE)
        return SearchResult(best, step if exact else proven, min(root, step), exact)

    def _begin(self) -> None:
        """Lists the options of all subproblems as far as there is time, and takes good plans of each: first
        of a few numbers of stages, then of the others."""
        work, seconds = FOR_REST * self.work.remaining, FOR_REST * self.work.seconds_left
        problems = _in_order(self.problems)
        for part in ((0, FIRST_COUNTS), (FIRST_COUNTS, None)):
            for problem in problems:
                if problem.quick_bound >= self.step * (1 - TIE):
                    continue
                in_time = self.work.remaining > work and self.work.seconds_left >= seconds
                if in_time or self.incumbent.best is None:
                    self.incumbent.take(problem.seed(self.step, *part))

    def _is_left(self, problem: Subproblem) -> bool:
        """Whether it may have plans of interest, and its options were not listed."""
        return bool(self.counts) and problem.quick_bound < self.step and not problem.roots

    def _explore(self) -> float:
        """Branch and bound. A bound on all plans that were not scored; inf where none can be faster."""
        heap: list[tuple[float, int, Subproblem, Chunk]] = []
        open_plans = pushed = 0

        def push(problem: Subproblem, chunk: Chunk) -> None:
            nonlocal open_plans, pushed
            if chunk.bounds[0] < self.step:
                heappush(heap, (float(chunk.bounds[0]), pushed, problem, chunk))
                open_plans, pushed = open_plans + len(chunk), pushed + 1

        left_out = inf
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
                    self.incumbent.take(plan)
                    if rest is not None:
                        push(problem, rest)
            except OutOfTime:
                return min(lowest, left_out)
        return left_out if left_out < self.step * (1 - TIE) else inf

    def _prefer_simple(self) -> None:
        """Of plans as fast as the best one of fewer stages or an earlier family, where a beam finds it."""
        best = self.incumbent.best
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
                        self.incumbent.best = plan
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


_RangesKey = tuple[Placement, tuple[int, ...], bool]


def _ranges_key(family: Family) -> _RangesKey:
    """Families of the same runs share them."""
    return family.placement, family.replicas, family.on_all


def _config_key(family: Family) -> tuple[object, ...]:
    """The same for families that differ by the order of the devices alone."""
    return family.config, family.replicas, family.on_all
