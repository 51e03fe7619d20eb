"""Exact search for the asynchronous pipeline with the highest throughput.

In the steady state a micro-batch takes the longest of (the greatest cycle mean of a max-plus system)

    the stages s..t of any run of them    [sum of (f + b) + 2 sum of c of the cuts between them] / (t - s + 1)
    any cut                               its occupancy
    any stage                             its all-reduce, shared by the micro-batches between two updates
    any stage                             host seconds to launch f and b

with f, b the forward and backward seconds (recomputation included) and c = occupancy + latency of a cut.
Stage i of p holds p - i micro-batches, so the cycle from F of stage s over F of stage t, B of t and back to F
of s is t - s + 1 micro-batches later.

T seconds can be reached if a recursion from the last stage back succeeds: with

    h(s) = f + b - T + max(0, 2 c + h(s + 1))

T is reached if no h is positive, and the continuation with the least h is best. So a table by number of
stages, device, place and replicas decides T, and T is bisected.
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
"""Relative difference of seconds at which the bisection ends, and below which two are equal."""
_LONGEST = 1e30
"""Seconds that no micro-batch takes."""
Row = dict[int, Floats]
"""By replicas, the (positions + 1, cut points) least h of a stage that starts there."""
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class SteadySearch:
    """Asynchronous pipelines of one configuration on one order of the devices.

    Attributes:
        space: Costs and limits.
        config: Configuration. Its `micro_batches` are those of a global batch.
        placement: Order of the devices.
        replicas: Numbers of replicas.
        stage_counts: Numbers of stages.
        on_all: Whether every device must be used.
    """

    space: Space
    config: PipelineConfig
    placement: Placement
    replicas: tuple[int, ...]
    stage_counts: range
    on_all: bool = False
    _stages: dict[tuple[int, int], tuple[Floats, Floats, Bools]] = field(default_factory=dict)

    def fastest(self, limit: float) -> tuple[ScoredPlan | None, float]:
        """Return the plan with the least seconds per global batch below `limit`, and a bound on all."""
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
        """Numbers of stages.

        PipeDream-2BW has at most as many as micro-batches between two updates, XPipe more.
        """
        most = self.stage_counts[-1]
        least = self.config.micro_batches + 1 if self.config.schedule == XPIPE else 2
        if self.config.schedule == TWO_VERSIONS:
            most = min(most, self.config.micro_batches)
        return range(max(least, self.stage_counts[0]), most + 1)

    @cached_property
    def ranges(self) -> DeviceRanges:
        """Runs of devices in the order."""
        return DeviceRanges(self.space, self.placement, self.replicas, self.on_all)

    @cached_property
    def choices(self) -> StageChoices:
        """Allowed stages on runs with equal costs."""
        return list_stage_choices(self.space, self.config, self.ranges, inf)

    def find_pipeline(self, seconds: float) -> ScoredPlan | None:
        """Return a pipeline whose micro-batches take at most `seconds` each, with the fewest stages.

        None if none exists.
        """
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
        """Return the least h of the k-th stage from the end, which is number `number` from the start."""
        self.space.budget.check()
        row = {replicas: np.full(self.choices.shape, inf) for replicas in self._crossing}
        afters = {replicas: self._after(replicas, rows[: k - 1], seconds) for replicas in row}
        for index, group in enumerate(self.choices.groups):
            work = self._own(index, k, number, seconds)
            after = np.maximum(afters[group.replicas][group.afters], 0.0)
            least = np.min(work[None] + after[:, None, :], axis=2)
            row[group.replicas][group.positions] = np.where(least <= 0, least, inf)
        return row

    def _own(self, index: int, k: int, number: int, seconds: float) -> Floats:
        """Return (cut points, cut points) seconds f + b - T of every allowed stage, inf for all others."""
        computing, waiting, _ = self._stage(index, k)
        work = np.where(waiting <= seconds, computing - seconds, inf)
        start, end = np.nonzero(np.isfinite(work))
        work[start, end] = np.where(self.space.may_be(number, start, end), work[start, end], inf)
        return work

    def _stage(self, index: int, k: int) -> tuple[Floats, Floats, Bools]:
        """Return three (cut points, cut points) figures of a group's stages as the k-th stage from the end.

        They are the seconds f + b, the longer of launches and all-reduce, and whether the stage recomputes.
        """
        if (index, k) not in self._stages:
            group, schedule = self.choices.groups[index], find_schedule(self.config.schedule)
            costs, table = group.costs, group.costs.table
            options: LedgerOptions = {**costs.ledger, "weight_versions": schedule.weight_versions(0, k, k)}
            computing = np.full(costs.forward.shape, inf)
            recomputes = np.zeros(costs.forward.shape, dtype=np.bool_)
            for mode in reversed(stage_modes(self.config)):
                in_flight, recompute = schedule.in_flight(0, k, k), mode != "never"
                need = table.memory(in_flight, mode, self.space.optimizer, group.replicas, **options)
                fits = self.space.usable & (need <= costs.limit * (1 + 1e-12))
                mode_seconds = costs.forward * (1 + recompute) + costs.backward
                computing, recomputes = (
                    np.where(fits, mode_seconds, computing),
                    np.where(fits, recompute, recomputes),
                )
            (ranks,) = self.ranges.devices_at(group.keys[:1].tolist(), [group.replicas])
            reduced = reduced_seconds(self.space, ranks, np.asarray(table.stage_bytes.trainable))
            launches = table.forward_launch * (1 + recomputes) + table.backward_launch
            waiting = np.maximum(reduced / self.config.micro_batches, launches)
            self._stages[index, k] = computing, waiting, recomputes
        return self._stages[index, k]

    @cached_property
    def _crossing(self) -> dict[int, Floats]:
        """(cut points,) bytes of each replica's share that cross a cut, by replicas."""
        return {group.replicas: group.costs.table.crossing for group in self.choices.groups}

    def _after(self, replicas: int, rows: Sequence[Row], seconds: float) -> Floats:
        """Return the (positions + 1, cut points) least 2 c + h of what follows a stage, by where it ends."""
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
        """Return (pairs of `_follows`, cut points) seconds 2 c of a cut between stages with these replicas.

        They are inf if the cut alone is too slow.
        """
        at = (self.replicas.index(replicas), *self._follows)
        latency, pace = (values[at][:, None] for values in self.ranges.routes(following))
        with np.errstate(invalid="ignore"):  # 0 bytes times inf seconds per byte
            occupancy = np.maximum(self._crossing[replicas], self._crossing[following])[None] * pace
        return np.where(occupancy <= seconds, 2 * (occupancy + latency), inf)

    def _trace(self, rows: Sequence[Row], replicas: int, position: int, seconds: float) -> ScoredPlan:
        """Return the pipeline that the tables contain.

        Its `step_seconds` are those of the module's formula.
        """
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
            work = self._own(index, k, len(rows) - k, seconds)[place]
            end = int(np.argmin(work + np.maximum(after, 0.0)))
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
        micro_batch_seconds = pace(self.space, proposal, modes)
        return ScoredPlan(proposal, tuple(modes), micro_batch_seconds * self.config.micro_batches)
