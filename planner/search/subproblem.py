"""The plans of one configuration on one order of the devices: bounds, and extension stage by stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from ..candidate import Proposal, ScoredPlan
from ..plan_file import TIE
from ..stage_table import Floats, Indices
from .bound import CompletionBound, MemoryBound
from .bounds_1f1b import RoundTripBound
from .bounds_gpipe import GPipeBound
from .budget import SearchBudget
from .device_sets import DeviceSets
from .family import Family, quick_bound
from .partial import BoundState, Expansion, PartialPlans, empty_plans, extend_plans, join_plans
from .pipelines import LAUNCHES, Pipelines, build_pipelines, find_routes
from .placements import DeviceRanges, StagesBefore
from .space import Space
from .stage_choices import GroupChoices, StageChoices, list_stage_choices
from .stage_recompute import stage_word

BEAM = 32
CHUNK = 1_024
"""Unfinished plans that are extended side by side."""
A_ROOT = 30
"""Of counted work: a stage on a run of devices in the bound of a number of stages."""
BATCH = 64
"""Whole plans that are simulated side by side."""

Bound = RoundTripBound | GPipeBound
BOUNDS: dict[str, type[RoundTripBound] | type[GPipeBound]] = {"1f1b": RoundTripBound, "gpipe": GPipeBound}


@dataclass(frozen=True, eq=False)
class Chunk:
    """Plans of so many stages, of which `remaining` are missing, and their bounds, the lowest first."""

    plans: PartialPlans
    bounds: Floats
    stages: int
    remaining: int
    batch: int = 1
    """Of whole plans: how many are simulated next. The first is often the best, and excludes the others."""

    def __len__(self) -> int:
        return len(self.bounds)


class Subproblem:
    """The plans of one family, by number of stages."""

    def __init__(
        self,
        space: Space,
        family: Family,
        counts: Sequence[int],
        ranges: DeviceRanges | DeviceSets,
        work: SearchBudget,
        bound: MemoryBound | None = None,
    ) -> None:
        self.space, self.family, self.counts, self.ranges, self.work = space, family, counts, ranges, work
        self.quick_bound = quick_bound(space, family)
        self.open_ranges = None if bound is None else bound.left(family)
        """Where the bound on all families leaves plans; None: everywhere."""
        self.single = 0.0 if bound is None else bound.single(family)
        """The bound on plans of one stage."""
        if bound is not None and self.open_ranges is not None:
            least = min([self.single, *(one.bound for one in self.open_ranges)])
            self.quick_bound = max(self.quick_bound, min(least, bound.limit))
        self._memory_bound = bound
        self.roots: dict[int, float] = {}
        """By number of stages, the bound before searching, once it was needed."""
        self._choices_and_bound: tuple[StageChoices, Bound] | None = None

    @property
    def root(self) -> float:
        """The bound before searching: the quick one where no better was needed."""
        return max(self.quick_bound, min(self.roots.values(), default=-np.inf))

    def may_improve(self, limit: float) -> bool:
        """Whether there may be plans below `limit`. Makes the options and the bounds of all stage counts when
        they are first needed, and forgets the options where they are needed no more."""
        if self.quick_bound >= limit:
            return False
        if not self.roots:
            within = _within(limit)
            roots = {stages: min(self._least_sum(stages, within), within) for stages in self.counts}
            left = [stages for stages in self.counts if roots[stages] < limit]
            if left:
                choices, bound = self._bound(limit)
                for stages in left:
                    possible = choices.groups and stages <= choices.most_stages
                    # Plans that are slower than this are left out of the options.
                    root = bound.root(stages) if possible else np.inf
                    roots[stages] = min(max(root, roots[stages]), within)
                self.work.spend(A_ROOT * max(left) * choices.entries)
            self.roots = roots
        is_open = any(root < limit for root in self.roots.values())
        if not is_open:
            self._choices_and_bound = None
        return is_open

    def _least_sum(self, stages: int, limit: float) -> float:
        """The bound of `MemoryBound` on plans of so many stages."""
        if self.open_ranges is None:
            return self.quick_bound
        if stages == 1:
            return self.single
        least = min((one.least(stages) for one in self.open_ranges), default=np.inf)
        if least >= limit:
            return least
        completion = self._completion(stages, limit)
        return least if completion is None else max(least, completion.root)

    def _completion(self, stages: int, limit: float) -> CompletionBound | None:
        """The bound on unfinished plans of so many stages; None where there is none."""
        if self._memory_bound is None:
            return None
        self.work.check()
        return self._memory_bound.completion(self.family, stages, limit)

    def _bound(self, limit: float) -> tuple[StageChoices, Bound]:
        """The options and the bound for plans below `limit`."""
        if self._choices_and_bound is None:
            choices = list_stage_choices(self.space, self.family.config, self.ranges, _within(limit))
            self._choices_and_bound = choices, BOUNDS[self.family.config.schedule](choices, _within(limit))
        return self._choices_and_bound

    def seed(self, limit: float, first: int = 0, last: int | None = None) -> ScoredPlan | None:
        """A good plan that is faster than `limit`, where there may be one: the best of a narrow beam. Of the
        numbers of stages only some are tried, from the `first` on, those that may be the fastest first."""
        best: ScoredPlan | None = None
        if self.may_improve(limit):
            for stages in sorted(self.counts, key=lambda count: self.roots[count])[first:last]:
                if self.roots[stages] >= limit:
                    break
                plan = self.beam(stages, limit)
                if plan is not None:
                    best, limit = plan, plan.step_seconds
        return best

    def beam(self, stages: int, limit: float) -> ScoredPlan | None:
        """The best plan of so many stages that is faster than `limit`, of those that a narrow beam keeps."""
        chunk: Chunk | None = self.start(stages, limit)
        while chunk is not None and chunk.remaining:
            chunk = next(iter(self.extend(chunk, limit, BEAM)), None)
        return None if chunk is None else self.score_chunk(chunk, limit)[0]

    def start(self, stages: int, limit: float) -> Chunk:
        """All plans of so many stages, none of which is chosen yet."""
        _, bound = self._bound(limit)
        completion = self._completion(stages, limit)
        state = bound.start() | ({} if completion is None else completion.start())
        return Chunk(empty_plans(state), np.array([self.roots[stages]]), stages, stages)

    def extend(self, chunk: Chunk, limit: float, width: int = CHUNK) -> list[Chunk]:
        """The plans with every further stage whose bound stays below `limit`, the lowest bounds first."""
        choices, bound = self._bound(limit)
        completion = self._completion(chunk.stages, limit)
        remaining, parts, bounds = chunk.remaining, [], []
        for stage in expansions(choices, chunk.plans, remaining):
            self.work.check()
            state: BoundState = {name: values[stage.parent] for name, values in chunk.plans.state.items()}
            own, now = bound.extend(state, stage)
            if completion is not None:
                sums, more = completion.extend(state, stage)
                own, now = np.maximum(own, sums), now | more
            self.work.extend(len(own))
            if remaining == 1:
                done = (stage.end == choices.last_place) & choices.may_be_done[stage.end_position]
                own = np.where(done, own, np.inf)
            rows = np.flatnonzero(own < limit)
            if len(rows):
                parts.append(extend_plans(chunk.plans, stage, now, rows))
                bounds.append(own[rows])
        if not parts:
            return []
        plans, lowest = join_plans(parts), np.concatenate(bounds)
        return list(_chunks(plans, lowest, chunk.stages, remaining - 1, limit, width))

    def score_chunk(self, chunk: Chunk, limit: float) -> tuple[ScoredPlan | None, Chunk | None]:
        """The fastest of the first whole plans of a chunk, where it is faster than `limit`, and the rest."""
        choices, _ = self._bound(limit)
        order = np.arange(len(chunk))
        now, later = order[: chunk.batch], order[chunk.batch :]
        self.work.check()
        best = self._fastest(choices, join_plans([chunk.plans], now), limit)
        if not len(later):
            return best, None
        batch = min(8 * chunk.batch, BATCH)
        plans = join_plans([chunk.plans], later)
        return best, Chunk(plans, chunk.bounds[later], chunk.stages, 0, batch)

    def _fastest(self, choices: StageChoices, plans: PartialPlans, limit: float) -> ScoredPlan | None:
        """Of whole plans, where it is faster than `limit`."""
        pipelines = self._pipelines(choices, plans)
        if self.ranges.any_order:
            return self._fastest_order(choices, plans, pipelines, limit)
        steps = pipelines.step_seconds(limit)
        self.work.simulate(len(steps), 2 * pipelines.stages * self.family.config.micro_batches)
        first = int(steps.argmin())
        return self._candidate(choices, plans, first, steps[first]) if steps[first] < limit else None

    def _fastest_order(
        self, choices: StageChoices, plans: PartialPlans, pipelines: Pipelines, limit: float
    ) -> ScoredPlan | None:
        """The same with the replicas of the stages in any order: `pipelines` have the fastest transfers of
        all, which ports only make slower."""
        least, best = pipelines.without_sharing().step_seconds(), None
        for row in np.argsort(least, kind="stable").tolist():
            if least[row] >= limit:
                break
            plan = self._candidate(choices, plans, row, limit)
            orders = self.ranges.orders(plan.proposal.devices)
            while some := tuple(islice(orders, BATCH)):
                proposals = [replace(plan.proposal, devices=devices) for devices in some]
                own = build_pipelines(self.space, proposals, [plan.recompute] * len(proposals))
                steps = own.step_seconds(limit)
                self.work.simulate(len(steps), 2 * own.stages * self.family.config.micro_batches)
                self.work.check()
                first = int(steps.argmin())
                if steps[first] < limit:
                    limit = float(steps[first])
                    best = ScoredPlan(proposals[first], plan.recompute, limit)
        return best

    def _pipelines(self, choices: StageChoices, plans: PartialPlans) -> Pipelines:
        """Of whole plans."""
        columns = dict(plans.columns)
        starts = np.concatenate([np.zeros_like(plans.ends[:, :1]), plans.ends[:, :-1]], axis=1)
        for name in ("occupancy", "latency"):
            columns[name] = columns[name][:, 1:]
        columns |= _launches(choices, plans, starts)
        devices = [self._devices(choices, plans, row) for row in range(len(plans))]
        routes = find_routes(self.space, self.family.config, devices, starts, plans.ends)
        return Pipelines(self.family.config, **columns, hosts=self.space.hosts, routes=routes)

    def _devices(self, choices: StageChoices, plans: PartialPlans, row: int) -> tuple[tuple[int, ...], ...]:
        """Of the stages of a whole plan."""
        replicas = [choices.groups[group].replicas for group in plans.groups[row].tolist()]
        return self.ranges.devices_at(plans.keys[row].tolist(), replicas)

    def _candidate(self, choices: StageChoices, plans: PartialPlans, row: int, step: float) -> ScoredPlan:
        config, cut_points = self.family.config, choices.groups[0].costs.table.cut_points
        ends_at, again = plans.ends[row].tolist(), plans.again[row].tolist()
        places = zip([0, *ends_at[:-1]], again, ends_at, strict=True)
        modes = [stage_word(config, cut_points, *place) for place in places]
        ends = tuple(cut_points[end] for end in plans.ends[row])
        proposal = Proposal(config, ends, self._devices(choices, plans, row))
        return ScoredPlan(proposal, tuple(modes), float(step))


def _launches(choices: StageChoices, plans: PartialPlans, starts: Indices) -> dict[str, Floats]:
    """Host seconds of the stages of whole plans, by the names of `Pipelines`."""
    forward, plain, repeat = (np.zeros(plans.ends.shape) for _ in range(3))
    for number in sorted(set(plans.groups.flat)):
        table, own = choices.groups[number].costs.table, plans.groups == number
        forward[own] = table.forward_launch[starts[own], plans.ends[own]]
        plain[own] = table.backward_launch[starts[own], plans.ends[own]]
        repeat[own] = table.forward_launch[starts[own], np.maximum(plans.again[own], starts[own])]
    return dict(zip(LAUNCHES, (forward, plain + repeat, plain), strict=True))


def _chunks(
    plans: PartialPlans, bounds: Floats, stages: int, remaining: int, limit: float, width: int
) -> Iterator[Chunk]:
    """Those below `limit`, so many at a time, the lowest bounds first."""
    order = np.argsort(bounds, kind="stable")
    order = order[: int(np.searchsorted(bounds[order], limit))]
    for start in range(0, len(order), width):
        rows = order[start : start + width]
        yield Chunk(join_plans([plans], rows), bounds[rows], stages, remaining)


def _within(limit: float) -> float:
    """A little more, so that no plan as fast as the best is lost to rounding."""
    return limit * (1 + 2 * TIE)


def expansions(choices: StageChoices, plans: PartialPlans, remaining: int) -> Iterator[Expansion]:
    """Every further stage of the plans, which leaves a device and a block for each that is to follow."""
    rows, begins = choices.ranges.starts_from(plans.position)
    first = plans.ends.shape[1] == 0
    for index, group in enumerate(choices.groups):
        which, run = group.runs_from(begins)
        use = choices.ranges.devices_before[group.afters[run]] + remaining - 1 <= choices.devices
        parent, run = rows[which[use]], run[use]
        low, high = group.segments[plans.place[parent]], group.segments[plans.place[parent] + 1]
        counts = high - low
        if not counts.sum():
            continue
        which = np.repeat(np.arange(len(parent)), counts)
        pair = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts) + low[which]
        inner = group.end[pair] + remaining - 1 <= choices.last_place
        inner &= choices.space.may_be(plans.ends.shape[1], group.start[pair], group.end[pair])
        which, pair = which[inner], pair[inner]
        parent, key, after = parent[which], group.keys[run[which]], group.afters[run[which]]
        latency, occupancy = (np.zeros(len(pair)),) * 2 if first else _cut(choices, plans, group, parent, key)
        yield Expansion(choices, group, index, remaining, parent, key, after, pair, occupancy, latency)


def _cut(
    choices: StageChoices, plans: PartialPlans, group: GroupChoices, parent: Indices, key: Indices
) -> tuple[Floats, Floats]:
    """Latency of the transfer from the stage before, and the seconds for which it takes its links: the larger
    part of both sides."""
    replicas = np.array([own.replicas for own in choices.groups])
    tables = np.array([own.costs.table.crossing for own in choices.groups])
    before, place = plans.groups[parent, -1], plans.place[parent]
    sent = np.maximum(tables[before, place], group.costs.table.crossing[place])
    earlier = StagesBefore(replicas[before], plans.position[parent], plans.keys[parent, -1])
    latency, slowness = choices.ranges.pace(earlier, group.replicas, key)
    return latency, sent * slowness
