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
from dataclasses import dataclass, field
from functools import cached_property
from math import inf

import numpy as np
import numpy.typing as npt

from ...cost_models.memory import LedgerOptions, Recompute
from ...cost_models.schedules import find_schedule
from ..asynchronous import TWO_VERSIONS, XPIPE, pace, reduced_seconds
from ..candidate import PipelineConfig, Proposal, ScoredPlan
from ..search.placements import DeviceRanges, Placement
from ..search.space import Space
from ..search.stage_choices import StageChoices, list_stage_choices
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
    _stages: dict[tuple[int, int], tuple[Floats, Floats, Bools]] = field(default_factory=dict)

    def fastest(self, limit: float) -> tuple[ScoredPlan | None, float]:
        """Find the plan with the least seconds a global batch, if below `limit`, and a bound on all."""
        count = self.config.micro_batches
        if not self.choices.groups or not self.counts:
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

    @cached_property
    def ranges(self) -> DeviceRanges:
        """The runs of the devices in the order."""
        return DeviceRanges(self.space, self.placement, self.replicas, self.on_all)

    @cached_property
    def choices(self) -> StageChoices:
        """The stages on runs that cost the same."""
        return list_stage_choices(self.space, self.config, self.ranges, inf)

    def find_pipeline(self, seconds: float) -> ScoredPlan | None:
        """A pipeline whose micro-batches take at most so many seconds each; the fewest stages first."""
        rows: list[Row] = []
        for stages in range(1, self.counts[-1] + 1):
            rows = [] if self.space.limits.pins else rows
            for k in range(len(rows) + 1, stages + 1):
                rows.append(self._row(k, stages - k, rows, seconds))
            for position in self.ranges.starts[0] if stages in self.counts else ():
                for replicas, values in rows[-1].items():
                    if values[position, 0] <= 0:
                        return self._trace(rows, replicas, position, seconds)
        return None

    def _row(self, k: int, number: int, rows: Sequence[Row], seconds: float) -> Row:
        """Least h of the k-th stage from the end, the one with this number from the start."""
        self.space.budget.check()
        row = {replicas: np.full(self.choices.shape, inf) for replicas in self._crossing}
        afters = {replicas: self._after(replicas, rows[: k - 1], seconds) for replicas in row}
        for index, group in enumerate(self.choices.groups):
            own = self._own(index, k, number, seconds)
            after = np.maximum(afters[group.replicas][group.afters], 0.0)
            least = np.min(own[None] + after[:, None, :], axis=2)
            row[group.replicas][group.positions] = np.where(least <= 0, least, inf)
        return row

    def _own(self, index: int, k: int, number: int, seconds: float) -> Floats:
        """Seconds f + b - T of every allowed stage, inf of all others: (cut points, cut points)."""
        computing, waiting, _ = self._stage(index, k)
        work = np.where(waiting <= seconds, computing - seconds, inf)
        start, end = np.nonzero(np.isfinite(work))
        work[start, end] = np.where(self.space.may_be(number, start, end), work[start, end], inf)
        return work

    def _stage(self, index: int, k: int) -> tuple[Floats, Floats, Bools]:
        """Of a group as the k-th stage from the end, (cut points, cut points) each: seconds f + b, the longer
        of launches and all-reduce, and which recompute."""
        if (index, k) not in self._stages:
            group, schedule = self.choices.groups[index], find_schedule(self.config.schedule)
            costs, table = group.costs, group.costs.table
            options: LedgerOptions = {**costs.ledger, "weight_versions": schedule.weight_versions(0, k, k)}
            computing = np.full(costs.forward.shape, inf)
            again = np.zeros(costs.forward.shape, dtype=np.bool_)
            for mode in reversed(stage_modes(self.config)):
                in_flight, recompute = schedule.in_flight(0, k, k), mode != "never"
                need = table.memory(in_flight, mode, self.space.optimizer, group.replicas, **options)
                fits = self.space.usable & (need <= costs.limit * (1 + 1e-12))
                own = costs.forward * (1 + recompute) + costs.backward
                computing, again = np.where(fits, own, computing), np.where(fits, recompute, again)
            (ranks,) = self.ranges.devices_at(group.keys[:1].tolist(), [group.replicas])
            reduced = reduced_seconds(self.space, ranks, np.asarray(table.stage_bytes.trainable))
            launches = table.forward_launch * (1 + again) + table.backward_launch
            waiting = np.maximum(reduced / self.config.micro_batches, launches)
            self._stages[index, k] = computing, waiting, again
        return self._stages[index, k]

    @cached_property
    def _crossing(self) -> dict[int, Floats]:
        """Bytes of each replica's share that cross a cut: by replicas, (cut points,)."""
        return {group.replicas: group.costs.table.crossing for group in self.choices.groups}

    def _after(self, replicas: int, rows: Sequence[Row], seconds: float) -> Floats:
        """Least 2 c + h of what follows a stage, by where it ends: (positions + 1, cut points)."""
        if not rows:
            return self.choices.after_last
        after = np.full(self.choices.shape, inf)
        ends, begins = self._follows
        for following, values in rows[-1].items():
            np.minimum.at(after, ends, self._cut(replicas, following, seconds) + values[begins])
        return after

    @cached_property
    def _follows(self) -> tuple[Indices, Indices]:
        """Pairs of positions where a stage may end and the next one begin, as two arrays."""
        return self.ranges.starts_from(self.ranges.devices_before)

    def _cut(self, replicas: int, following: int, seconds: float) -> Floats:
        """Seconds 2 c of a cut between stages with these replicas, (pairs of `_follows`, cut points); inf if
        the cut alone is too slow."""
        at = (self.replicas.index(replicas), *self._follows)
        latency, each = (values[at][:, None] for values in self.ranges.routes(following))
        with np.errstate(invalid="ignore"):  # no bytes on no way
            occupancy = np.maximum(self._crossing[replicas], self._crossing[following])[None] * each
        return np.where(occupancy <= seconds, 2 * (occupancy + latency), inf)

    def _trace(self, rows: Sequence[Row], replicas: int, position: int, seconds: float) -> ScoredPlan:
        """Trace the pipeline in the tables; its `step_seconds` are those of the module's formula."""
        (ends, begins), place, cuts = self._follows, 0, list[int]()
        devices, modes = list[tuple[int, ...]](), list[Recompute]()
        for k in range(len(rows), 0, -1):
            index = next(
                index
                for index, group in enumerate(self.choices.groups)
                if group.replicas == replicas and position in group.positions
            )
            devices += self.ranges.devices_at([position], [replicas])
            after = self._after(replicas, rows[: k - 1], seconds)[position + replicas]
            own = self._own(index, k, len(rows) - k, seconds)[place]
            end = int(np.argmin(own + np.maximum(after, 0.0)))
            modes.append("always" if self._stage(index, k)[2][place, end] else "never")
            place = end
            cuts.append(end)
            if k > 1:
                pairs = np.flatnonzero(ends == position + replicas)
                _, replicas, position = min(
                    (float(reach), following, int(begin))
                    for following, values in rows[k - 2].items()
                    for reach, begin in zip(
                        self._cut(replicas, following, seconds)[pairs, end] + values[begins[pairs], end],
                        begins[pairs],
                        strict=True,
                    )
                )
        points = self.space.table(self.space.chain.sizes[0]).cut_points
        proposal = Proposal(self.config, tuple(points[cut] for cut in cuts), tuple(devices))
        each = pace(self.space, proposal, modes)
        return ScoredPlan(proposal, tuple(modes), each * self.config.micro_batches)
