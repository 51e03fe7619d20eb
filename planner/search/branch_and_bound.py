"""Search for the fastest pipeline: cuts, replicas, placement, micro-batches, schedule, recomputation.

Every subproblem (a configuration, an order of the devices and a stage count) has a proven bound.

1. `MemoryBound` bounds all families. Plans near the pipelines that attain its bounds are simulated.
2. Branch and bound extends unfinished plans by one stage, over all subproblems at once, lowest bound first,
while the lowest bound is below the best known plan. A complete plan is simulated when its bound is the lowest
of all.

Problems with too many layers or devices (`is_large`) have no stage tables on runs of devices and no second
step. Their plans come from equal replicas, from the bound and from `improve_plans`.

When the work or the time of the search is spent, the lowest remaining bound is what is proven. If there are
too many unfinished plans, those with the highest bounds are dropped, and the lowest of the dropped bounds
limits what can be proven. Work is counted, so that the same input gives the same answer. Time ends a search
only if the counted work would take longer than the budget's time.
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
"""Default counted work of a search, see `SearchBudget`."""
FIRST_COUNTS = 6
"""Numbers of stages for which every subproblem gets a plan before any subproblem gets more."""
FOR_REST = 0.2
"""Share of the work and the time kept for branch and bound while first plans are made."""
FOR_BOUND, FOR_LARGE = 0.5, 0.75
"""Share of the work and the time for the bound on all families: before branch and bound, and without it."""
FEW_CUTS = 100
"""Number of cuts to which a long chain is reduced if no other method finds a plan."""
MOST_UNFINISHED = 400_000
"""Most unfinished plans that are kept."""
MOST_ENTRIES = 16e6
"""Most (stage, run of devices) pairs between all cut points that are searched."""
MOST_LINEAR = 256
"""Most devices for which all plans with one device a stage are searched. Otherwise `MOST_DEVICES` holds."""


@dataclass(frozen=True)
class SearchResult:
    """Best plan of a search and what it proved about its space.

    Attributes:
        best: The fastest plan; None if none fits.
        bound_seconds: Lower bound on every plan of the space; inf if no plan fits.
        root_bound_seconds: The bound before searching.
        exact: Whether `best` is proven optimal.
        universal: Whether the bound also holds for plans outside the space, one of which is `best` (see
            `planner.universal_bound`).
        other_bound: Bound on the plans of schedules that only `cut_search` searches. None if it did not
            search.
        other_plans: Good plans of those schedules.
    """

    best: ScoredPlan | None
    bound_seconds: float
    root_bound_seconds: float
    exact: bool
    universal: bool = False
    other_bound: float | None = None
    other_plans: tuple[ScoredPlan, ...] = ()


def is_large(space: Space, families: Sequence[Family]) -> bool:
    """Return whether stage tables on runs of devices would be too large."""
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
    """Search the fastest plan of these families and stage counts, no slower than the seeds.

    Among plans within `TIE` of each other, it prefers fewer stages, then earlier families.

    Args:
        space: Costs and limits.
        families: Configurations on orders of the devices.
        stage_counts: Numbers of stages.
        seeds: Plans that were scored earlier.
        work: Counted work, see `SearchBudget`. Defaults to `WORK`.
        limit: Seconds that a plan must be faster than.
        deeper: Whether plans with more stages are allowed, too. They are bounded but not searched.

    Returns:
        The best plan, and the bound on all plans.

    Raises:
        UsageError: Too many layers or devices for a recomputation that the bound does not cover.
        DefectError: A plan is below the bound of a large problem.
    """
    large = is_large(space, families)
    by_layer = bool(families) and families[0].config.recompute in UNPROPOSED
    if large and by_layer:
        devices, cuts = len(families[0].placement.ranks), space.chain.max_stages - 1
        raise UsageError(
            f"recompute={families[0].config.recompute!r} cannot be searched for {devices} devices and "
            f"{cuts} cut points",
            f"Use recompute='auto', or at most {MOST_DEVICES} devices and {MOST_BLOCKS} cut points "
            "(fewer of each if both are many).",
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
        reduced = with_cuts(space, spread_cuts(space, FEW_CUTS))
        if families and not is_large(reduced, families):
            # With few cuts the search is possible. It respects pins, which the bound ignores.
            _BranchAndBound(reduced, families, counts, budget, incumbent, None).run()
    step = inf if incumbent.best is None else incumbent.best.step_seconds
    if bound is not None and proven > step * (1 + 3 * TIE):
        raise DefectError(f"a plan of {step!r} s is below its bound of {proven!r} s: {incumbent.best}")
    proven = min(proven, step)
    root = min([step, *(quick_bound(space, family) for family in families)])
    exact = proven >= step * (1 - TIE)
    return SearchResult(incumbent.best, step if exact else proven, min(root, proven), exact)


class _BranchAndBound:
    """A search in progress: the best plan so far, and the subproblems."""

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
        """Subproblems to explore. The plans of the others are among these, so they only seed the search."""

    @property
    def step(self) -> float:
        """Step seconds of the best plan so far."""
        return self.incumbent.step

    def run(self) -> SearchResult:
        """Run the search and return its result."""
        try:
            self._begin()
            proven = self._explore()
            self._prefer_simple()
        except OutOfTime:
            proven = -inf
        best = self.incumbent.best
        step = inf if best is None else best.step_seconds
        root = min((problem.root for problem in self.whole), default=inf)
        proven = max(proven, root)  # an interrupted search may have computed better roots
        exact = proven >= step * (1 - TIE)
        return SearchResult(best, step if exact else proven, min(root, step), exact)

    def _begin(self) -> None:
        """List the stage choices of all subproblems as far as the budget allows, and find good plans.

        Every subproblem is tried first with `FIRST_COUNTS` numbers of stages, then with the rest.
        """
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
        """Return whether a subproblem may have better plans and its stage choices were not listed."""
        return bool(self.counts) and problem.quick_bound < self.step and not problem.roots

    def _explore(self) -> float:
        """Run branch and bound.

        Returns:
            A bound on all plans that were not scored; inf if none can be faster.
        """
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
        """Replace the best plan by an equally fast, simpler one if a beam search finds it.

        Simpler plans have fewer stages, or belong to an earlier family.
        """
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
    """Return the subproblems in the order in which they are begun.

    Every configuration comes on its first order of the devices, then all on their second. Among these the
    least `quick_bound` comes first; of equal ones, fewer micro-batches, which have fewer stage choices.
    """
    earlier = Counter[tuple[object, ...]]()

    def rank(problem: Subproblem) -> tuple[int, float, int]:
        key = _config_key(problem.family)
        earlier[key] += 1
        return earlier[key], problem.quick_bound, problem.family.config.micro_batches

    return sorted(problems, key=rank)


_RangesKey = tuple[Placement, tuple[int, ...], bool]


def _ranges_key(family: Family) -> _RangesKey:
    """Return a key that is equal for families with the same runs of devices."""
    return family.placement, family.replicas, family.on_all


def _config_key(family: Family) -> tuple[object, ...]:
    """Return a key that is equal for families that differ only in the order of the devices."""
    return family.config, family.replicas, family.on_all
