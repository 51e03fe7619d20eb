"""Plans of one configuration on one order of the devices: bounds and extension stage by stage."""

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
from .stage_recompute import name_recompute

BEAM = 32
"""Unfinished plans that the beam search for a first plan keeps."""
CHUNK = 1_024
"""Unfinished plans that are extended together as arrays."""
A_ROOT = 30
"""Counted work of a (stage, run of devices) pair in the root bound of one number of stages."""
BATCH = 64
"""Most whole plans that are simulated together as arrays."""

Bound = RoundTripBound | GPipeBound
BOUNDS: dict[str, type[RoundTripBound] | type[GPipeBound]] = {"1f1b": RoundTripBound, "gpipe": GPipeBound}


@dataclass(frozen=True, eq=False)
class Chunk:
    """Unfinished plans with equal numbers of stages, and their bounds in seconds, lowest first.

    Attributes:
        plans: The plans.
        bounds: (plans,) bounds.
        stages: Number of stages of the complete plans.
        remaining: Number of stages that are missing.
    """

    plans: PartialPlans
    bounds: Floats
    stages: int
    remaining: int
    batch: int = 1
    """Number of complete plans to simulate next. It begins with 1, because the first is often the best."""

    def __len__(self) -> int:
        """Return the number of plans."""
        return len(self.bounds)


class Subproblem:
    """Plans of one family, by number of stages.

    Args:
        space: Costs and limits.
        family: Configuration on an order of the devices.
        counts: Numbers of stages.
        ranges: Runs or sets of devices.
        work: Budget of the search.
        bound: Bound on all families. None if it was not computed.
    """

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
        """Bound in seconds before searching: the quick one if no better one was needed."""
        return max(self.quick_bound, min(self.roots.values(), default=-np.inf))

    def may_improve(self, limit: float) -> bool:
        """Return whether plans below `limit` seconds may exist, by the bounds.

        Stage choices and root bounds of all stage counts are computed when they are first needed. The choices
        are dropped when no plan can be below the limit.
        """
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
                    # The stage choices leave out plans that are slower than `within`.
                    root = bound.root(stages) if possible else np.inf
                    roots[stages] = min(max(root, roots[stages]), within)
                self.work.spend(A_ROOT * max(left) * choices.entries)
            self.roots = roots
        is_open = any(root < limit for root in self.roots.values())
        if not is_open:
            self._choices_and_bound = None
        return is_open

    def _least_sum(self, stages: int, limit: float) -> float:
        """Return the `MemoryBound` on plans of `stages` stages."""
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
        """Return the bound on unfinished plans of `stages` stages; None if none exists."""
        if self._memory_bound is None:
            return None
        self.work.check()
        return self._memory_bound.completion(self.family, stages, limit)

    def _bound(self, limit: float) -> tuple[StageChoices, Bound]:
        """Return the stage choices and the bound for plans below `limit` seconds."""
        if self._choices_and_bound is None:
            choices = list_stage_choices(self.space, self.family.config, self.ranges, _within(limit))
            self._choices_and_bound = choices, BOUNDS[self.family.config.schedule](choices, _within(limit))
        return self._choices_and_bound

    def seed(self, limit: float, first: int = 0, last: int | None = None) -> ScoredPlan | None:
        """Return a good plan below `limit` seconds, from narrow beam searches.

        Args:
            limit: Seconds that the plan must be faster than.
            first: First of the numbers of stages to try, in the order of their `roots`.
            last: End of the numbers of stages to try. None for all.

        Returns:
            The plan; None if none was found.
        """
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
        """Return the best plan of `stages` stages below `limit` seconds that a narrow beam search finds."""
        chunk: Chunk | None = self.start(stages, limit)
        while chunk is not None and chunk.remaining:
            chunk = next(iter(self.extend(chunk, limit, BEAM)), None)
        return None if chunk is None else self.score_chunk(chunk, limit)[0]

    def start(self, stages: int, limit: float) -> Chunk:
        """Return the chunk with the one plan whose stages are all missing."""
        _, bound = self._bound(limit)
        completion = self._completion(stages, limit)
        state = bound.start() | ({} if completion is None else completion.start())
        return Chunk(empty_plans(state), np.array([self.roots[stages]]), stages, stages)

    def extend(self, chunk: Chunk, limit: float, width: int = CHUNK) -> list[Chunk]:
        """Extend plans by every possible next stage whose bound stays below `limit` seconds.

        Args:
            chunk: Plans to extend.
            limit: Seconds that a plan must be faster than.
            width: Most plans of a chunk.

        Returns:
            The extended plans, lowest bounds first.
        """
        choices, bound = self._bound(limit)
        completion = self._completion(chunk.stages, limit)
        remaining, parts, bounds = chunk.remaining, [], []
        for stage in expansions(choices, chunk.plans, remaining):
            self.work.check()
            state: BoundState = {name: values[stage.parent] for name, values in chunk.plans.state.items()}
            seconds, now = bound.extend(state, stage)
            if completion is not None:
                sums, more = completion.extend(state, stage)
                seconds, now = np.maximum(seconds, sums), now | more
            self.work.extend(len(seconds))
            if remaining == 1:
                done = (stage.end == choices.last_place) & choices.may_be_done[stage.end_position]
                seconds = np.where(done, seconds, np.inf)
            rows = np.flatnonzero(seconds < limit)
            if len(rows):
                parts.append(extend_plans(chunk.plans, stage, now, rows))
                bounds.append(seconds[rows])
        if not parts:
            return []
        plans, lowest = join_plans(parts), np.concatenate(bounds)
        return list(_chunks(plans, lowest, chunk.stages, remaining - 1, limit, width))

    def score_chunk(self, chunk: Chunk, limit: float) -> tuple[ScoredPlan | None, Chunk | None]:
        """Simulate the first complete plans of a chunk.

        Returns:
            The fastest of them if it is below `limit` seconds, and the rest of the chunk.
        """
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
        """Return the fastest complete plan if it is below `limit` seconds."""
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
        """Return the fastest complete plan over all orders of the replicas, if it is below `limit` seconds.

        `pipelines` have the fastest transfer of any order. Shared ports only make a step longer, so their
        step without sharing excludes slow plans.
        """
        least, best = pipelines.without_sharing().step_seconds(), None
        for row in np.argsort(least, kind="stable").tolist():
            if least[row] >= limit:
                break
            plan = self._candidate(choices, plans, row, limit)
            orders = self.ranges.orders(plan.proposal.devices)
            while batch := tuple(islice(orders, BATCH)):
                proposals = [replace(plan.proposal, devices=devices) for devices in batch]
                ordered = build_pipelines(self.space, proposals, [plan.recompute] * len(proposals))
                steps = ordered.step_seconds(limit)
                self.work.simulate(len(steps), 2 * ordered.stages * self.family.config.micro_batches)
                self.work.check()
                first = int(steps.argmin())
                if steps[first] < limit:
                    limit = float(steps[first])
                    best = ScoredPlan(proposals[first], plan.recompute, limit)
        return best

    def _pipelines(self, choices: StageChoices, plans: PartialPlans) -> Pipelines:
        """Return the costs of complete plans."""
        columns = dict(plans.columns)
        starts = np.concatenate([np.zeros_like(plans.ends[:, :1]), plans.ends[:, :-1]], axis=1)
        for name in ("occupancy", "latency"):
            columns[name] = columns[name][:, 1:]
        columns |= _launches(choices, plans, starts)
        devices = [self._devices(choices, plans, row) for row in range(len(plans))]
        routes = find_routes(self.space, self.family.config, devices, starts, plans.ends)
        return Pipelines(self.family.config, **columns, hosts=self.space.hosts, routes=routes)

    def _devices(self, choices: StageChoices, plans: PartialPlans, row: int) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of each stage of the complete plan in one row."""
        replicas = [choices.groups[group].replicas for group in plans.groups[row].tolist()]
        return self.ranges.devices_at(plans.keys[row].tolist(), replicas)

    def _candidate(self, choices: StageChoices, plans: PartialPlans, row: int, step: float) -> ScoredPlan:
        """Return the plan in one row as a proposal with its recomputation and step seconds."""
        config, cut_points = self.family.config, choices.groups[0].costs.table.cut_points
        ends_at, recompute_end = plans.ends[row].tolist(), plans.recompute_end[row].tolist()
        places = zip([0, *ends_at[:-1]], recompute_end, ends_at, strict=True)
        modes = [name_recompute(config, cut_points, *place) for place in places]
        ends = tuple(cut_points[end] for end in plans.ends[row])
        proposal = Proposal(config, ends, self._devices(choices, plans, row))
        return ScoredPlan(proposal, tuple(modes), float(step))


def _launches(choices: StageChoices, plans: PartialPlans, starts: Indices) -> dict[str, Floats]:
    """Return the host seconds of the stages of complete plans, by the names of `Pipelines`."""
    forward, plain, repeat = (np.zeros(plans.ends.shape) for _ in range(3))
    for number in sorted(set(plans.groups.flat)):
        table, in_group = choices.groups[number].costs.table, plans.groups == number
        forward[in_group] = table.forward_launch[starts[in_group], plans.ends[in_group]]
        plain[in_group] = table.backward_launch[starts[in_group], plans.ends[in_group]]
        repeat[in_group] = table.forward_launch[
            starts[in_group], np.maximum(plans.recompute_end[in_group], starts[in_group])
        ]
    return dict(zip(LAUNCHES, (forward, plain + repeat, plain), strict=True))


def _chunks(
    plans: PartialPlans, bounds: Floats, stages: int, remaining: int, limit: float, width: int
) -> Iterator[Chunk]:
    """Yield chunks of at most `width` plans whose bounds are below `limit`, lowest bounds first."""
    order = np.argsort(bounds, kind="stable")
    order = order[: int(np.searchsorted(bounds[order], limit))]
    for start in range(0, len(order), width):
        rows = order[start : start + width]
        yield Chunk(join_plans([plans], rows), bounds[rows], stages, remaining)


def _within(limit: float) -> float:
    """Return slightly more than `limit`, so that rounding excludes no plan as fast as the best."""
    return limit * (1 + 2 * TIE)


def expansions(choices: StageChoices, plans: PartialPlans, remaining: int) -> Iterator[Expansion]:
    """Yield every possible next stage of the plans, one group at a time.

    Each expansion leaves a device and a block for every stage that has to follow.

    Args:
        choices: Allowed stages.
        plans: Unfinished plans.
        remaining: Missing stages, this one included.
    """
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
    """Return latency and link seconds of the transfers from the previous stages.

    The sender's and the receiver's share may differ; the larger one decides.
    """
    replicas = np.array([stage_group.replicas for stage_group in choices.groups])
    tables = np.array([stage_group.costs.table.crossing for stage_group in choices.groups])
    before, place = plans.groups[parent, -1], plans.place[parent]
    sent = np.maximum(tables[before, place], group.costs.table.crossing[place])
    earlier = StagesBefore(replicas[before], plans.position[parent], plans.keys[parent, -1])
    latency, slowness = choices.ranges.pace(earlier, group.replicas, key)
    return latency, sent * slowness
