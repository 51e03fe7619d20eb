"""The exact search for the asynchronous pipeline with the highest throughput.

In steady state a micro-batch takes the longest of (a max-plus system's greatest cycle mean; see the tests)

    the stages s..t of any run of them    [sum of (f + b) + 2 sum of c of the cuts between them] / (t - s + 1)
    any cut                               its occupancy
    any stage                             its all-reduce, shared by the micro-batches between two updates
    any stage                             what its host takes to launch f and b

with f, b the forward and backward seconds (with what is run again) and c = occupancy + latency of a cut. A
stage i of p holds p - i micro-batches, so from F of stage s over F of stage t, B of t and back to F of s,
t - s + 1 micro-batches further.

Whether T seconds can be reached is then decided stage by stage from the last one back: with

    h(s) = f + b - T + max(0, 2 c + h(s + 1))

T is reached where no h is positive, and of all ways to continue the one with the least h is best. So a table
by number of stages, device, place and replicas decides T, and T is bisected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import inf

import numpy as np
import numpy.typing as npt

from ...cost_models.memory import LedgerOptions, Recompute
from ...cost_models.schedules import find_schedule
from ..asynchronous import TWO_VERSIONS, XPIPE, pace, reduced_seconds
from ..candidate import PipelineConfig, Proposal, ScoredPlan
from ..search.placements import Placement
from ..search.replica_group import ReplicaGroupCosts
from ..search.space import Space
from ..search.stage_recompute import stage_modes
from ..stage_table import Floats, Indices

SAME = 1e-9
"""Share of the seconds that the bisection leaves open, and below which two are equal."""
_LONGEST = 1e30
"""Seconds that no micro-batch takes."""
Row = dict[int, Floats]
"""By replicas, (positions + 1, cut points): the least h of a stage that starts there."""
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class _Group:
    """Runs of devices whose stages cost the same, and the positions where they begin."""

    costs: ReplicaGroupCosts
    positions: Indices

    @property
    def replicas(self) -> int:
        """Devices of a run."""
        return self.costs.replicas


@dataclass(frozen=True, eq=False)
class SteadySearch:
    """The pipelines of a configuration on an order of the devices, with these numbers of replicas and of
    stages. `micro_batches` of the configuration are those of a global batch. `on_all`: no device may stay
    free."""

    space: Space
    config: PipelineConfig
    placement: Placement
    replicas: tuple[int, ...]
    stage_counts: range
    on_all: bool = False

    def fastest(self, limit: float) -> tuple[ScoredPlan | None, float]:
        """Find the plan with the least seconds a global batch, if below `limit`, and a bound on all."""
        count = self.config.micro_batches
        if not self.groups or not self.counts:
            return None, inf
        best = self.find_pipeline(min(limit / count * (1 - SAME), _LONGEST))
        if best is None:
            return None, limit
        low, high = 0.0, best.step_seconds / count
        while high - low > SAME * high:
            trial = (low + high) / 2
            plan = self.find_pipeline(trial)
            if plan is None:
                low = trial
            else:
                best, high = plan, min(trial, plan.step_seconds / count)
        return best, low * count

    @cached_property
    def counts(self) -> range:
        """Numbers of stages: of 2BW no more than micro-batches between two updates, of XPipe more."""
        most = self.stage_counts[-1]
        least = self.config.micro_batches + 1 if self.config.schedule == XPIPE else 2
        if self.config.schedule == TWO_VERSIONS:
            most = min(most, self.config.micro_batches)
        return range(max(least, self.stage_counts[0]), most + 1)

    @property
    def devices(self) -> int:
        """In the order."""
        return len(self.placement.ranks)

    @cached_property
    def cut_points(self) -> tuple[int, ...]:
        """Where stages may begin and end, as numbers of layers."""
        return self.space.table(self.space.chain.sizes[0]).cut_points

    @cached_property
    def shape(self) -> tuple[int, int]:
        """Shape of tables by position among the devices, with the end, and by cut point."""
        return self.devices + 1, len(self.cut_points)

    @cached_property
    def groups(self) -> tuple[_Group, ...]:
        """The runs of devices that cost the same."""
        size, groups = self.config.micro_batch_size, dict[int, tuple[ReplicaGroupCosts, list[int]]]()
        for count in self.replicas:
            if count > min(self.devices, size) or not self.space.fits_someone(size, count):
                continue
            for position in range(self.devices - count + 1):
                costs = self.space.replica_group(size, self._run(position, count))
                groups.setdefault(id(costs), (costs, []))[1].append(position)
        return tuple(_Group(costs, np.array(where)) for costs, where in groups.values())

    def _run(self, position: int, count: int) -> tuple[int, ...]:
        return self.placement.ranks[position : position + count]

    @cached_property
    def starts(self) -> tuple[tuple[int, ...], ...]:
        """Positions where a stage may begin after one that ends at each position."""
        own = ((position,) for position in range(self.devices + 1))
        return tuple(own) if self.on_all else self.placement.starts

    @cached_property
    def _follows(self) -> tuple[Indices, Indices]:
        """Pairs of positions where a stage may end and the next one begin, as two arrays."""
        pairs = [(end, begin) for end in range(1, self.devices) for begin in self.starts[end]]
        ends, begins = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
        return ends, begins

    @cached_property
    def _routes(self) -> dict[tuple[int, int], Floats]:
        """Latency and seconds of each byte by replicas of a stage and of the next, (2, pairs of `_follows`);
        inf if they do not fit on the devices."""
        counts = sorted({group.replicas for group in self.groups})
        routes = {(a, b): np.full((2, len(self._follows[0])), inf) for a, b in product(counts, repeat=2)}
        for (count, following), values in routes.items():
            self.space.budget.check()
            for index, (end, begin) in enumerate(np.transpose(self._follows).tolist()):
                if count <= end and begin + following <= self.devices:
                    stages = self._run(end - count, count), self._run(begin, following)
                    values[:, index] = self.space.pace(*stages)
        return routes

    def find_pipeline(self, seconds: float) -> ScoredPlan | None:
        """A pipeline whose micro-batches take at most so many seconds each; the fewest stages first."""
        rows: list[Row] = []
        for stages in range(1, self.counts[-1] + 1):
            rows = [] if self._pinned else rows
            for k in range(len(rows) + 1, stages + 1):
                rows.append(self._row(k, stages - k, rows, seconds))
            if stages in self.counts and (start := self._start(rows[-1])) is not None:
                return self._build_plan(rows, start, seconds)
        return None

    @property
    def _pinned(self) -> bool:
        return bool(self.space.limits.pins)

    def _start(self, row: Row) -> tuple[int, int] | None:
        """Replicas and position of a first stage, or None if none is fast enough."""
        for position in self.starts[0]:
            for replicas, values in row.items():
                if values[position, 0] <= 0:
                    return replicas, position
        return None

    def _row(self, k: int, number: int, rows: Sequence[Row], seconds: float) -> Row:
        """Least h of the k-th stage from the end, the one with this number from the start."""
        self.space.budget.check()
        before = rows[-1] if k > 1 else None
        rows_by_count = {replicas: np.full(self.shape, inf) for replicas in self._crossing}
        afters = {replicas: self._after(replicas, before, seconds) for replicas in rows_by_count}
        for index, group in enumerate(self.groups):
            positions = group.positions
            after = afters[group.replicas][positions + group.replicas]
            own = self._own(index, k, number, seconds)
            least = np.min(own[None] + np.maximum(after, 0.0)[:, None, :], axis=2)
            rows_by_count[group.replicas][positions] = np.where(least <= 0, least, inf)
        return rows_by_count

    def _own(self, index: int, k: int, number: int, seconds: float) -> Floats:
        """Seconds f + b - T of every allowed stage, inf of all others: (cut points, cut points)."""
        computing, recompute = self._work(index, k)
        table = self.groups[index].costs.table
        launches = table.forward_launch * (1 + recompute) + table.backward_launch
        fits = (self._reduce_seconds[index] <= seconds) & (launches <= seconds)
        work = np.where(fits, computing - seconds, inf)
        if self._pinned:
            start, end = np.nonzero(np.isfinite(work))
            allowed = self.space.may_be(number, start, end)
            work[start, end] = np.where(allowed, work[start, end], inf)
        return work

    @cached_property
    def _crossing(self) -> dict[int, Floats]:
        """Bytes of each replica's share that cross a cut: by replicas, (cut points,)."""
        return {group.replicas: group.costs.table.crossing for group in self.groups}

    @cached_property
    def _group_at(self) -> dict[tuple[int, int], int]:
        """Index of the group of a run, by its replicas and position."""
        return {
            (group.replicas, position): index
            for index, group in enumerate(self.groups)
            for position in group.positions.tolist()
        }

    def _after(self, replicas: int, following: Row | None, seconds: float) -> Floats:
        """Least 2 c + h of what follows a stage, by where it ends: (positions + 1, cut points)."""
        after = np.full(self.shape, inf)
        if following is None:
            after[self.devices if self.on_all else 0 :, -1] = 0.0
            return after
        ends, begins = self._follows
        for other, values in following.items():
            np.minimum.at(after, ends, self._cut(replicas, other, seconds) + values[begins])
        return after

    def _cut(self, replicas: int, other: int, seconds: float) -> Floats:
        """Seconds 2 c of a cut between stages with these replicas, (pairs of `_follows`, cut points); inf if
        the cut alone is too slow."""
        latency, each = (values[:, None] for values in self._routes[replicas, other])
        with np.errstate(invalid="ignore"):  # no bytes on no way
            occupancy = np.maximum(self._crossing[replicas], self._crossing[other])[None] * each
        return np.where(occupancy <= seconds, 2 * (occupancy + latency), inf)

    def _build_plan(self, rows: Sequence[Row], start: tuple[int, int], seconds: float) -> ScoredPlan:
        """Trace the pipeline in the tables; its `step_seconds` are those of the module's formula."""
        (replicas, position), place = start, 0
        ends, devices, modes = list[int](), list[tuple[int, ...]](), list[Recompute]()
        for k in range(len(rows), 0, -1):
            index = self._group_at[replicas, position]
            after = self._after(replicas, rows[k - 2] if k > 1 else None, seconds)[position + replicas]
            end = int(np.argmin(self._own(index, k, len(rows) - k, seconds)[place] + np.maximum(after, 0.0)))
            ends.append(self.cut_points[end])
            devices.append(self._run(position, replicas))
            modes.append("always" if self._work(index, k)[1][place, end] else "never")
            if k > 1:
                replicas, position = self._next(replicas, position + replicas, end, rows[k - 2], seconds)
            place = end
        proposal = Proposal(self.config, tuple(ends), tuple(devices))
        each = pace(self.space, proposal, modes)
        return ScoredPlan(proposal, tuple(modes), each * self.config.micro_batches)

    def _next(self, replicas: int, end: int, place: int, following: Row, seconds: float) -> tuple[int, int]:
        """Replicas and the position of the best stage that follows."""
        pairs = np.flatnonzero(self._follows[0] == end)
        choices = []
        for other, values in following.items():
            reachable = (
                self._cut(replicas, other, seconds)[pairs, place] + values[self._follows[1][pairs], place]
            )
            best = int(np.argmin(reachable))
            choices.append((float(reachable[best]), other, int(self._follows[1][pairs[best]])))
        _, other, begin = min(choices)
        return other, begin

    def _work(self, index: int, k: int) -> tuple[Floats, Bools]:
        """Seconds f + b of the k-th stage from the end and which recompute, (cut points, cut points)."""
        if (index, k) not in self._works:
            group, costs = self.groups[index], self.groups[index].costs
            seconds, recompute = (
                np.full(costs.forward.shape, inf),
                np.zeros(costs.forward.shape, dtype=np.bool_),
            )
            for mode in reversed(stage_modes(self.config)):
                fits = self.space.usable & (self._bytes(group, k, mode) <= costs.limit * (1 + 1e-12))
                own = costs.forward * (1 + (mode != "never")) + costs.backward
                seconds, recompute = np.where(fits, own, seconds), np.where(fits, mode != "never", recompute)
            self._works[index, k] = seconds, recompute
        return self._works[index, k]

    @cached_property
    def _works(self) -> dict[tuple[int, int], tuple[Floats, Bools]]:
        return {}

    def _bytes(self, group: _Group, k: int, mode: Recompute) -> Floats:
        """Bytes of every stage as the k-th from the end; in-flight counts depend on k alone."""
        if group.costs.limit == inf:
            return np.zeros(group.costs.forward.shape)
        schedule = find_schedule(self.config.schedule)
        options: LedgerOptions = {**group.costs.ledger, "weight_versions": schedule.weight_versions(0, k, k)}
        return group.costs.table.memory(
            schedule.in_flight(0, k, k), mode, self.space.optimizer, group.replicas, **options
        )

    @cached_property
    def _reduce_seconds(self) -> list[Floats]:
        """All-reduce seconds of every stage per micro-batch: by group, (cut points, cut points)."""
        tables = []
        for group in self.groups:
            ranks = self._run(int(group.positions[0]), group.replicas)
            whole = reduced_seconds(self.space, ranks, np.asarray(group.costs.table.stage_bytes.trainable))
            tables.append(whole / self.config.micro_batches)
        return tables
