"""The search for the fastest pipeline: cuts, replicas, placement, micro-batches, schedule, recomputation.

Every subproblem (a setting, an order of the devices and a stage count) has a proven bound. Three passes:

1. It starts from plans that were scored before (of the named planners, say).
2. A narrow beam of the plans with the lowest bounds gives every subproblem that is still of interest a plan.
3. Branch and bound, a stage at a time for all unfinished plans at once, keeps each whose bound lies below the
   best plan known; the whole plans that are left are simulated, the lowest bounds first.

Where the number of unfinished plans passes a fixed width, those with the highest bounds are put aside; where
the work that a search may spend is done, the rest stays unscored. The smallest of their bounds then limits
what is proven. Work is counted, not timed: the same input always gives the same answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..candidate import Candidate, Proposal
from ..plan_file import TIE
from ..setting import Setting
from ..stage_table import Floats
from .gpipe import GPipeBound
from .one_f_one_b import RoundTripBound
from .options import Group, Indices, Options, options_of
from .partial import Expansion, Known, Partial, extended, joined, nothing
from .pipelines import Pipelines
from .placements import Placement
from .runs import Runs
from .space import Space, share_of

BEAM = 32
WIDTH = 500_000
"""Unfinished plans x columns that are kept side by side."""
BATCH = 128
WORK = 4e8
"""What a search may spend on proving that its best plan is the best there is, see `Work`."""

Bound = RoundTripBound | GPipeBound
BOUNDS: dict[str, type[RoundTripBound] | type[GPipeBound]] = {"1f1b": RoundTripBound, "gpipe": GPipeBound}


@dataclass(frozen=True)
class Found:
    """What a search found and proved of its space.

    `bound_seconds` holds for every plan of the space; `root_bound_seconds` is the bound before searching.
    Both are inf where the space holds no plan that fits.
    """

    best: Candidate | None
    bound_seconds: float
    root_bound_seconds: float
    exact: bool


@dataclass(frozen=True)
class Family:
    """The pipelines of a setting on an order of the devices, whose stages have these numbers of replicas;
    `on_all`: only those that leave no device free."""

    setting: Setting
    placement: Placement
    replicas: tuple[int, ...]
    on_all: bool = False
    unit: int = 1
    """Stages begin at multiples of so many positions."""


class Work:
    """What may still be spent, in nanoseconds or so: counted from the sizes of tables, never timed."""

    def __init__(self, amount: float) -> None:
        self.left = amount

    def extend(self, entries: int) -> None:
        """Bounds were computed for so many unfinished plans and next stages."""
        self.left -= 20_000 + 250 * entries

    def simulate(self, plans: int, actions: int) -> None:
        """So many plans of so many actions were simulated side by side."""
        self.left -= actions * (1_500 if plans == 1 else 3_000 + 25 * plans)


def search(
    space: Space,
    families: Sequence[Family],
    stage_counts: Iterable[int],
    seeds: Iterable[Candidate] = (),
    work: float | None = None,
    limit: float = np.inf,
) -> Found:
    """The fastest plan of these families and stage counts, no slower than the seeds, where there is one
    faster than `limit` seconds.

    Among plans within `TIE` of each other: the fewest stages, then the family that stands first.
    """
    budget = Work(WORK if work is None else work)
    return _Search(space, families, stage_counts, budget, limit).run(seeds)


class _Search:
    """A search under way: the best plan so far, and the subproblems."""

    def __init__(
        self,
        space: Space,
        families: Sequence[Family],
        stage_counts: Iterable[int],
        work: Work,
        limit: float,
    ) -> None:
        self.space, self.work, self.limit = space, work, limit
        self.counts = sorted(set(stage_counts))
        self.families = families
        self.best: Candidate | None = None

    @property
    def step(self) -> float:
        """Of the best plan so far."""
        return self.limit if self.best is None else self.best.step_seconds

    def run(self, seeds: Iterable[Candidate]) -> Found:
        for seed in seeds:
            self._take(seed)
        runs = {
            key: Runs(self.space, *key)
            for key in dict.fromkeys(_runs_key(family) for family in self.families)
        }
        problems = [
            _Subproblem(self.space, family, self.counts, self.work, runs[_runs_key(family)])
            for family in self.families
        ]
        for problem in sorted(problems, key=lambda p: p.quick_bound):
            self._take(problem.seed(self.step))
        seed, limit = self.best, self.step * (1 + TIE)
        best: Candidate | None = None
        for stages in self.counts:
            for problem in problems:
                found = problem.solve(stages, limit)
                if found is not None:
                    best, limit = found, found.step_seconds
        best = best or seed
        return self._found(best, problems)

    def _found(self, best: Candidate | None, problems: Sequence[_Subproblem]) -> Found:
        step = best.step_seconds if best else np.inf
        proven = min((problem.proven for problem in problems), default=np.inf)
        root = min((problem.root for problem in problems), default=np.inf)
        exact = proven >= step * (1 - TIE)
        return Found(best, step if exact else proven, min(root, step), exact)

    def _take(self, found: Candidate | None) -> None:
        if found is not None and found.step_seconds < self.step:
            self.best = found


class _Subproblem:
    """The plans of one family, by number of stages."""

    def __init__(self, space: Space, family: Family, counts: Sequence[int], work: Work, runs: Runs) -> None:
        self.space, self.family, self.counts, self.work, self.runs = space, family, counts, work, runs
        self.quick_bound = quick_bound(space, family)
        self.proven = np.inf
        """A bound on the plans that were not scored, where some may be faster than the best known."""
        self._made: tuple[Options, Bound] | None = None
        self._roots: dict[int, float] = {}

    @property
    def root(self) -> float:
        """The bound before searching: the quick one where no better was needed."""
        return max(self.quick_bound, min(self._roots.values(), default=-np.inf))

    def _opened(self, limit: float) -> bool:
        """Whether there may be plans below `limit`. Makes the options and the bounds of all stage counts when
        they are first needed, and forgets the options where they are needed no more."""
        if self.quick_bound >= limit:
            return False
        if not self._roots:
            options, bound = self._bound(limit)
            for stages in self.counts:
                possible = options.groups and stages <= options.most_stages
                # Plans that are slower than this are left out of the options.
                self._roots[stages] = min(bound.root(stages) if possible else np.inf, _within(limit))
        open_ = any(root < limit for root in self._roots.values())
        if not open_:
            self._made = None
        return open_

    def _bound(self, limit: float) -> tuple[Options, Bound]:
        """The options and the bound for plans below `limit`."""
        if self._made is None:
            family = self.family
            within = _within(limit)
            options = options_of(self.space, family.setting, self.runs, within)
            self._made = options, BOUNDS[family.setting.schedule](options, within)
        return self._made

    def seed(self, limit: float) -> Candidate | None:
        """A good plan that is faster than `limit`, where there may be one."""
        best: Candidate | None = None
        if self._opened(limit):
            for stages in sorted(self.counts, key=lambda count: self._roots[count]):
                if self._roots[stages] >= limit:
                    break
                plans, _ = self._unfinished(stages, limit, BEAM)
                found, _ = self._fastest(plans, limit)
                if found is not None:
                    best, limit = found, found.step_seconds
        return best

    def solve(self, stages: int, limit: float) -> Candidate | None:
        """The fastest plan of so many stages below `limit`, by branch and bound; None where there is none."""
        if not self._opened(limit) or self._roots[stages] >= limit:
            return None
        if self.work.left <= 0:
            self.proven = min(self.proven, max(self._roots[stages], self.quick_bound))
            return None
        plans, aside = self._unfinished(stages, limit, max(BEAM, WIDTH // (10 + 10 * stages)))
        best, left = self._fastest(plans, limit)
        self.proven = min(self.proven, aside, left)
        return best

    def _fastest(self, plans: Partial | None, limit: float) -> tuple[Candidate | None, float]:
        """The fastest of these plans, where it is faster than `limit`, and the least bound of those that the
        work did not reach (inf: none). The lowest bounds are simulated first, more and more side by side."""
        if plans is None or not len(plans):
            return None, np.inf
        options, bound = self._bound(limit)
        pipelines = self._pipelines(options, plans)
        bounds = bound.finished(pipelines)
        order = np.argsort(bounds, kind="stable")
        best: Candidate | None = None
        start, batch = 0, 1
        while start < len(order) and bounds[order[start]] < limit * (1 - TIE if best else 1):
            if start and self.work.left <= 0:
                return best, float(bounds[order[start]])
            chosen = order[start : start + batch]
            steps = pipelines.some(chosen).step_seconds()
            self.work.simulate(len(steps), 2 * pipelines.stages * self.family.setting.micro_batches)
            first = int(steps.argmin())
            if steps[first] < limit:
                best, limit = (
                    self._candidate(options, plans, chosen[first], steps[first]),
                    float(steps[first]),
                )
            start, batch = start + batch, min(8 * batch, BATCH)
        return best, np.inf

    def _pipelines(self, options: Options, plans: Partial) -> Pipelines:
        runtime, columns = self.space.runtime, dict(plans.columns)
        for name in ("occupancy", "latency"):
            columns[name] = columns[name][:, 1:]
        if self.space.one_process:
            table = options.groups[0].team.table
            starts = np.concatenate([np.zeros_like(plans.ends[:, :1]), plans.ends[:, :-1]], axis=1)
            columns["forward_launch"] = table.forward_launch[starts, plans.ends]
            columns["backward_launch"] = table.backward_launch[starts, plans.ends]
        transfers = "overlapped" if runtime is None else runtime.transfers
        return Pipelines(self.family.setting, **columns, transfers=transfers)

    def _candidate(self, options: Options, plans: Partial, row: int, step: float) -> Candidate:
        places, ranks = options.groups[0].team.table.places, self.family.placement.ranks
        devices, modes = [], []
        for begin, group, again in zip(plans.begins[row], plans.groups[row], plans.again[row], strict=True):
            devices.append(ranks[begin : begin + options.groups[group].replicas])
            mode = self.family.setting.recompute
            modes.append(("always" if again else "never") if mode == "by_stage" else mode)
        ends = tuple(places[end] for end in plans.ends[row])
        return Candidate(Proposal(self.family.setting, ends, tuple(devices)), tuple(modes), float(step))

    def _unfinished(self, stages: int, limit: float, width: int) -> tuple[Partial | None, float]:
        """Whole plans whose bound lies below `limit`, at most `width` unfinished ones at a time, and the
        smallest bound of those put aside (inf: none)."""
        options, bound = self._bound(limit)
        plans: Partial | None = nothing(bound.start())
        aside = np.inf
        for remaining in range(stages, 0, -1):
            if plans is None:
                break
            plans, least = self._extended(options, bound, plans, remaining, limit, width)
            aside = min(aside, least)
        return plans, aside

    def _extended(
        self, options: Options, bound: Bound, plans: Partial, remaining: int, limit: float, width: int
    ) -> tuple[Partial | None, float]:
        """The plans with every further stage, and the least bound of those put aside."""
        parts, bounds = [], []
        for stage in expansions(options, plans, remaining):
            known: Known = {name: values[stage.parent] for name, values in plans.known.items()}
            own, now = bound.extend(known, stage)
            self.work.extend(len(own))
            if remaining == 1:
                done = (stage.end == options.last_place) & (stage.end_position >= options.least_used)
                own = np.where(done, own, np.inf)
            kept = np.flatnonzero(own < limit)
            if len(kept) > width:
                kept = np.sort(kept[np.argsort(own[kept], kind="stable")[: width + 1]])
            if len(kept):
                parts.append(extended(plans, stage, now, kept))
                bounds.append(own[kept])
        if not parts:
            return None, np.inf
        every = np.concatenate(bounds)
        if len(every) <= width:
            return joined(parts), np.inf
        order = np.argsort(every, kind="stable")
        return joined(parts, np.sort(order[:width])), float(every[order[width]])


def _runs_key(family: Family) -> tuple[Placement, tuple[int, ...], bool, int]:
    """Families of the same runs share them."""
    return family.placement, family.replicas, family.on_all, family.unit


def _within(limit: float) -> float:
    """A little more, so that no plan as fast as the best is lost to rounding."""
    return limit * (1 + 2 * TIE)


def expansions(options: Options, plans: Partial, remaining: int) -> Iterator[Expansion]:
    """Every further stage of the plans, which leaves a device and a block for each that is to follow."""
    starts = options.runs.starts
    pairs = [(row, begin) for row, end in enumerate(plans.position.tolist()) for begin in starts[end]]
    rows, begins = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    first = plans.ends.shape[1] == 0
    for index, group in enumerate(options.groups):
        use = group.at[begins] & (begins + group.replicas + remaining - 1 <= options.devices)
        parent, position = rows[use], begins[use]
        low, high = group.segments[plans.place[parent]], group.segments[plans.place[parent] + 1]
        counts = high - low
        if not counts.sum():
            continue
        which = np.repeat(np.arange(len(parent)), counts)
        pair = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts) + low[which]
        inner = group.end[pair] + remaining - 1 <= options.last_place
        inner &= options.space.may_be(plans.ends.shape[1], group.start[pair], group.end[pair])
        which, pair = which[inner], pair[inner]
        parent, position = parent[which], position[which]
        latency, occupancy = (
            (np.zeros(len(pair)),) * 2 if first else _cut(options, plans, group, parent, position)
        )
        yield Expansion(options, group, index, remaining, parent, position, pair, occupancy, latency)


def _cut(
    options: Options, plans: Partial, group: Group, parent: Indices, position: Indices
) -> tuple[Floats, Floats]:
    """Latency of the transfer from the stage before, and the seconds for which it takes its links: the larger
    part of both sides."""
    latency, slowness = options.runs.ways(group.replicas)
    counts = np.array([options.runs.counts.index(own.replicas) for own in options.groups])
    tables = np.array([own.team.table.crossing for own in options.groups])
    before, place = plans.groups[parent, -1], plans.place[parent]
    sent = np.maximum(tables[before, place], group.team.table.crossing[place])
    at = counts[before], plans.position[parent] // options.runs.unit, position // options.runs.unit
    return latency[at], sent * slowness[at]


def quick_bound(space: Space, family: Family) -> float:
    """A bound that needs no tables of stages: the work, as cheap as any number of replicas makes each layer,
    shared evenly over all devices."""
    setting, devices = family.setting, len(family.placement.ranks)
    size, again = setting.micro_batch_size, setting.recompute == "always"
    counts = [n for n in family.replicas if n <= min(devices, size) and space.fits_someone(size, n)]
    if not counts:
        return np.inf
    work = np.minimum.reduce([n * space.least_work(share_of(size, n), again=again) for n in counts])
    return float(setting.micro_batches * work.sum() / devices)
