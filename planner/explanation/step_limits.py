"""Limits of the step: the critical path by kind and by stage, the busiest stage, and memory.

Every start in a timeline is the latest of some ends: of the previous action on its device, of the transfer
that it receives, of its launch. Following the latest back gives a path without gaps whose parts sum to the
step. To shorten the step, something on it must become shorter. Of several equally late ends, the device's own
action is followed, so that the path stays where the work is. If the step is as long as a port that several
devices share is busy, the path ends with the rest of that time after the last stage is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from math import inf
from typing import Literal, NamedTuple

import numpy as np

from ...cost_models.document import Record
from ...cost_models.program_order import NONE, Indices
from ...cost_models.step_costs import lower_costs, preceding_launches, recompute_seconds
from ...cost_models.timeline import Timeline
from ..candidate import ScoredPlan
from ..plan_file import TIE, PlanRow, plan_row
from ..stage_table import Floats
from .explain_context import ExplainContext, resolve, with_memory

Kind = Literal["compute", "recompute", "transfer", "host", "all_reduce", "optimizer", "port"]
KINDS: dict[str, str] = {
    "compute": "computing",
    "recompute": "running forward again",
    "transfer": "transfers",
    "host": "launches by the host",
    "all_reduce": "all-reduce",
    "optimizer": "the optimizer",
    "port": "the most loaded port of the network",
}
"""Kinds of parts of the path, in words for the user."""


def list_recompute_seconds(timeline: Timeline) -> Floats:
    """Return the seconds of recomputation of each action."""
    shares = timeline.program.shares
    parts = 1.0 if shares is None else np.asarray(shares)[timeline.order.micro_batch]
    seconds: Floats = recompute_seconds(timeline.order, timeline.costs) * parts
    return seconds


class Segment(NamedTuple):
    """A part of the path, in seconds from the start of the step. `to_stage` is the receiver of a transfer."""

    kind: Kind
    stage: int
    to_stage: int | None
    start: float
    end: float


def critical_path(timeline: Timeline) -> tuple[Segment, ...]:
    """Return the path from 0 to the end of the step. Each part begins where the previous one ends."""
    done = max(timeline.stage_end)
    port = Segment("port", timeline.stage_end.index(done), None, done, timeline.costs.port_seconds)
    parts = [port, *_Walk(timeline).back()]
    return tuple(reversed([part for part in parts if part.end > part.start]))


class _Cause(NamedTuple):
    """Something that ended at `until`.

    `follow` returns its parts, latest first, and its own cause.
    """

    until: float
    follow: Callable[[], tuple[list[Segment], _Cause | None]]


class _Walk:
    """A timeline that is followed back. Actions are positions in the order of the clock."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline, self.order, self.run = timeline, timeline.order, timeline.run
        self.values = lower_costs(timeline.order, timeline.costs)
        self.recomputed = list_recompute_seconds(timeline)
        self.sender_waits = timeline.costs.transfers in ("rendezvous", "blocking")
        self.receiver_waits = timeline.costs.transfers in ("rendezvous", "blocking-receive")

    def back(self) -> Iterator[Segment]:
        """Yield the parts of the path, latest first."""
        cause: _Cause | None = self._step()
        while cause is not None:
            parts, cause = cause.follow()
            yield from parts

    def _step(self) -> _Cause:
        """Return the end of the step, which is that of the stage that is done last."""
        ends = self.timeline.stage_end
        stage = ends.index(max(ends))

        def follow() -> tuple[list[Segment], _Cause | None]:
            cause = _latest(
                self._action(int(self._own[stage][-1])),
                *(
                    self._reduction(k)
                    for k, reduction in enumerate(self.timeline.reductions)
                    if stage in reduction.stages
                ),
                *(self._transfer(i) for i in self._sent_by(stage)),
            )
            since = 0.0 if cause is None else cause.until
            return [Segment("optimizer", stage, None, since, ends[stage])], cause

        return _Cause(ends[stage], follow)

    @cached_property
    def _own(self) -> list[Indices]:
        """Actions of each stage."""
        return [np.flatnonzero(self.order.device == stage) for stage in range(self.timeline.stages)]

    def _sent_by(self, stage: int) -> list[int]:
        """Return the last action of a stage if the stage waits for its transfer."""
        sends = [i for i in self._own[stage][-1:].tolist() if self.order.target[i] != NONE]
        return sends if self.sender_waits else []

    def _action(self, i: int, until: float | None = None) -> _Cause:
        """Return an action, up to its end or an earlier second."""
        order, values, stage = self.order, self.values, int(self.order.device[i])
        start, end = float(self.run.start[i]), float(self.run.end[i])
        upto = end if until is None else until
        launches = values.launches
        late = launches is not None and launches.end[i] > start + values.duration[i]

        def follow() -> tuple[list[Segment], _Cause | None]:
            if late and until is None:
                return [], self._launch(i, end)
            recompute = min(start + float(self.recomputed[i]), upto)
            parts: list[Segment] = [
                Segment("compute", stage, None, recompute, upto),
                Segment("recompute", stage, None, start, recompute),
            ]
            previous, source = int(order.previous[i]), int(order.source[i])
            causes = []
            if previous != NONE:
                causes.append(self._action(previous))
                if self.sender_waits and order.target[previous] != NONE:
                    causes.append(self._transfer(previous))
            if source != NONE:
                causes.append(self._transfer(source))
            if launches is not None and launches.start[i] > 0:
                causes.append(self._launch(int(self._launched_after[i]), float(launches.start[i])))
            return parts, _latest(*causes)

        return _Cause(upto, follow)

    def _transfer(self, i: int, until: float | None = None) -> _Cause:
        """Return what action i sent, up to its arrival or to when it left its link."""
        order, begin = self.order, float(self.run.begin[i])
        target = int(order.target[i])
        upto = float(self.run.arrival[i]) if until is None else until

        def follow() -> tuple[list[Segment], _Cause | None]:
            part = Segment("transfer", int(order.device[i]), int(order.device[target]), begin, upto)
            causes = [self._action(i)]
            if self.receiver_waits and order.previous[target] != NONE:
                causes.append(self._action(int(order.previous[target])))
            causes += self._before_on_link(i)
            return [part], _latest(*causes)

        return _Cause(upto, follow)

    def _before_on_link(self, i: int) -> list[_Cause]:
        """Return the transfer that occupied the link before that of action i."""
        line = int(self.values.link[i])
        if line == NONE:
            return []
        senders = self._on_link(line)
        position = int(np.flatnonzero(senders == i)[0]) - 1
        if position < 0:
            return []
        j = int(senders[position])
        occupied = float(self.values.occupancy[self.values.cut[j]])
        return [self._transfer(j, float(self.run.begin[j]) + occupied)]

    def _on_link(self, line: int) -> Indices:
        """Return the senders of a link by when their transfers began, then by when they were ready.

        Transfers that take no time on the link may begin together.
        """
        if line not in self._links:
            senders = np.flatnonzero(self.values.link == line)
            ready = self.run.end[senders]
            if self.receiver_waits:
                previous = self.order.previous[self.order.target[senders]]
                ready = np.where(previous == NONE, ready, np.maximum(ready, self.run.end[previous]))
            self._links[line] = senders[np.lexsort((ready, self.run.begin[senders]))]
        return self._links[line]

    @cached_property
    def _links(self) -> dict[int, Indices]:
        """Cache of `_on_link`."""
        return {}

    @cached_property
    def _launched_after(self) -> Indices:
        """Launch that each action's launch follows, by action."""
        assert self.values.launches is not None
        return preceding_launches(self.order, self.timeline.costs, self.values.launches)

    def _launch(self, i: int, until: float) -> _Cause:
        """Return the launch of action i up to a second, and all launches before it."""
        launches = self.values.launches
        assert launches is not None
        parts, upto = [], until
        while i != NONE:
            start = float(launches.start[i])
            parts.append(Segment("host", int(self.order.device[i]), None, start, upto))
            i, upto = int(self._launched_after[i]), start
        return _Cause(until, lambda: (parts, None))

    def _reduction(self, k: int) -> _Cause:
        """Return an all-reduce."""
        reduction = self.timeline.reductions[k]

        def follow() -> tuple[list[Segment], _Cause | None]:
            part = Segment("all_reduce", reduction.stages[0], None, reduction.start, reduction.end)
            whole: list[_Cause] = []
            cut: list[_Cause] = []
            for stage in reduction.stages:
                actions = self._own[stage]
                # An action that takes no time may begin and end just as the all-reduce begins.
                begun = actions[
                    (self.run.start[actions] < reduction.start) | (self.run.end[actions] <= reduction.start)
                ]
                if len(begun):
                    i = int(begun[-1])
                    over = self.run.end[i] > reduction.start
                    (cut if over else whole).append(self._action(i, reduction.start if over else None))
            earlier_reductions = [
                self._reduction(j)
                for j, earlier in enumerate(self.timeline.reductions)
                if j != k and earlier.end <= reduction.start and set(earlier.stages) & set(reduction.stages)
            ]
            return [part], _latest(*whole, *earlier_reductions, *cut)

        return _Cause(reduction.end, follow)


def _latest(*causes: _Cause) -> _Cause | None:
    """Return the latest cause, the first of several."""
    return max(causes, key=lambda cause: cause.until, default=None)


class PathShare(Record):
    """Seconds of the critical path in one kind of part, on a stage or between two stages."""

    kind: str
    stage: int | None = None
    to_stage: int | None = None
    seconds: float
    share: float
    """Share of the step."""


class BusiestStage(Record):
    """Stage that computes longest, including recomputation and waits for launches.

    `busy` is its share of the step.
    """

    stage: int
    seconds: float
    busy: float


class StepLimits(Record):
    """Parts of the critical path for which the step waits.

    Attributes:
        kinds: Shares of the path by kind. They sum to the step.
        places: Shares of the path by stage or transfer, largest first. They sum to the step.
        busiest: The stage that computes longest.
        without_memory_limit: The best plan without memory limits, if it is faster. None if none was found.
        memory_forbids_nothing: Whether it is proven that no searched plan is faster without memory limits.
        memory_known: Whether any device has a limit.
    """

    kinds: list[PathShare]
    places: list[PathShare]
    busiest: BusiestStage
    without_memory_limit: PlanRow | None = None
    memory_forbids_nothing: bool = False
    memory_known: bool = True


def find_limits(context: ExplainContext, seeds: Sequence[ScoredPlan]) -> StepLimits:
    """Return the limits of the plan. The search without a memory limit starts from the seeds."""
    timeline = context.timeline
    path, step = critical_path(timeline), timeline.step_seconds
    faster, is_proven = _without_memory_limit(context, seeds)
    return StepLimits(
        kinds=_by_kind(path, step),
        places=_by_place(path, step),
        busiest=find_busiest(timeline),
        without_memory_limit=faster,
        memory_forbids_nothing=faster is None and is_proven,
        memory_known=is_memory_known(context),
    )


def is_memory_known(context: ExplainContext) -> bool:
    """Return whether any device of the machine has a limit."""
    return context.problem.space.limit(range(context.problem.gpus)) < inf


def find_busiest(timeline: Timeline) -> BusiestStage:
    """Return the stage that computes longest, the first of several."""
    busy, step = timeline.busy_seconds, timeline.step_seconds
    stage = busy.index(max(busy))
    return BusiestStage(stage=stage, seconds=busy[stage], busy=busy[stage] / step)


def _by_kind(path: Sequence[Segment], step: float) -> list[PathShare]:
    sums = {kind: sum(part.end - part.start for part in path if part.kind == kind) for kind in KINDS}
    return [
        PathShare(kind=kind, seconds=seconds, share=seconds / step)
        for kind, seconds in sums.items()
        if seconds
    ]


def _by_place(path: Sequence[Segment], step: float) -> list[PathShare]:
    sums: dict[tuple[str, int, int | None], float] = {}
    for part in path:
        key = (part.kind, part.stage, part.to_stage)
        sums[key] = sums.get(key, 0.0) + part.end - part.start
    shares = [
        PathShare(kind=kind, stage=stage, to_stage=other, seconds=seconds, share=seconds / step)
        for (kind, stage, other), seconds in sums.items()
    ]
    return sorted(shares, key=lambda share: -share.seconds)


def _without_memory_limit(
    context: ExplainContext, seeds: Sequence[ScoredPlan]
) -> tuple[PlanRow | None, bool]:
    """Return the best plan without a limit if it is faster, and whether it is proven optimal.

    The proof is the search's bound.
    """
    problem = context.problem
    if not is_memory_known(context):
        return None, True
    result = resolve(with_memory(problem, None), seeds)
    best, limit = result.best, context.present.step_seconds * (1 - TIE)
    fastest_seed = min((seed.step_seconds for seed in seeds), default=limit)
    # The limit does not forbid a plan that is as fast as one under the limit.
    if best is None or best.step_seconds >= min(limit, fastest_seed * (1 - TIE)):
        return None, result.exact
    return plan_row(best, exact=result.exact), result.exact
