"""The simulator: lists of actions and their costs -> start and end of every action.

A stage runs its actions in the order of its list, one at a time. A forward needs the activation of the
stage before, a backward the gradient of the stage after, each sent when it is made. A transfer takes its
latency and occupies its link (one for each boundary and direction) for bytes / bandwidth; computing goes on
beside it.
Where one process drives all stages, an action can neither start before its launch starts nor end before its
launch ends, and the launches follow one another without waiting for the devices.

So every start is the latest of some ends: the step is the longest path through the dependencies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .errors import UsageError
from .schedules import Action, schedule_named

Array = npt.NDArray[np.float64]
Order = list[tuple[int, Action]]
"""Actions with their stages."""


@dataclass(frozen=True, eq=False)
class PipelineCosts:
    """Seconds of one plan, or of many side by side.

    `forward` and `backward` have shape (stages, micro-batches), `occupancy` and `latency` of the transfers
    between neighbours shape (stages - 1,), the same both ways; a further last axis holds candidates.
    `forward_launch` and `backward_launch` (shape as `forward`) are host seconds where one process drives all
    stages, else None. `all_reduce` (stages,) follows the last backward of a stage.
    """

    forward: Array
    backward: Array
    occupancy: Array
    latency: Array
    forward_launch: Array | None = None
    backward_launch: Array | None = None
    all_reduce: Array | None = None

    def candidate(self, index: int) -> PipelineCosts:
        """The costs of one of many candidates."""

        def pick(values: Any) -> Any:
            return None if values is None else values[..., index]

        return PipelineCosts(*(pick(getattr(self, field.name)) for field in fields(self)))

    def check(self, stages: int, micro_batches: int) -> None:
        """Raises UsageError where a shape or a value cannot be."""
        if self.forward.shape != (stages, micro_batches) or self.backward.shape != (stages, micro_batches):
            raise UsageError(
                f"costs of shape {self.forward.shape} and {self.backward.shape} for {stages} stages and "
                f"{micro_batches} micro-batches",
                f"Give forward and backward as ({stages}, {micro_batches}).",
            )
        for name in (field.name for field in fields(self)):
            values = getattr(self, name)
            if values is None:
                continue
            if len(values) != (stages - 1 if name in ("occupancy", "latency") else stages):
                raise UsageError(
                    f"{name} has {len(values)} entries for {stages} stages",
                    "Give one an entry a stage (transfers: one a boundary, one less than stages).",
                )
            bad = np.asarray(values)[~(np.isfinite(values) & (np.asarray(values) >= 0))]
            if bad.size:
                raise UsageError(f"{name} holds {bad.flat[0]}", "Costs must be finite and not negative.")


def uniform_costs(
    forward: Sequence[float], backward: Sequence[float], micro_batches: int, transfer_latency: float = 0.0
) -> PipelineCosts:
    """Costs of stages whose micro-batches all cost the same, seconds; transfers are latency only."""
    cuts = max(len(forward) - 1, 0)
    return PipelineCosts(
        forward=np.repeat(np.asarray(forward, dtype=np.float64)[:, None], micro_batches, axis=1),
        backward=np.repeat(np.asarray(backward, dtype=np.float64)[:, None], micro_batches, axis=1),
        occupancy=np.zeros(cuts),
        latency=np.full(cuts, transfer_latency),
    )


class Span(NamedTuple):
    """When an action ran on its stage, seconds from the start of the step."""

    stage: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A simulated step. `spans` in order of start; `stage_end` includes the all-reduce."""

    stages: int
    spans: tuple[Span, ...]
    stage_end: tuple[float, ...]

    @cached_property
    def step_seconds(self) -> float:
        """From the first start to the last end."""
        return max(self.stage_end)

    @cached_property
    def busy_seconds(self) -> tuple[float, ...]:
        """Computing seconds of each stage."""
        busy = [0.0] * self.stages
        for span in self.spans:
            busy[span.stage] += span.end - span.start
        return tuple(busy)

    @property
    def bubble(self) -> float:
        """Idle share of all stages over the whole step."""
        return 1 - sum(self.busy_seconds) / (self.stages * self.step_seconds) if self.step_seconds else 0.0

    @property
    def bubble_rate_span(self) -> float:
        """Idle share over the longest stage span (last end - first start of one stage), as in "Zero Bubble
        Pipeline Parallelism", ICLR 2024, table 5: (span - busy) / span of that stage."""
        spans = [
            max(s.end for s in self.spans if s.stage == stage)
            - min(s.start for s in self.spans if s.stage == stage)
            for stage in range(self.stages)
        ]
        longest = max(spans)
        return 1 - self.busy_seconds[spans.index(longest)] / longest if longest else 0.0

    @property
    def peak_in_flight(self) -> tuple[int, ...]:
        """Most micro-batches that each stage holds at a time, from the start of F to the end of B."""
        return tuple(
            int(max(held for _, held in self.memory_over_time(stage, 0, 1))) for stage in range(self.stages)
        )

    def memory_over_time(
        self, stage: int, resident_bytes: float, bytes_in_flight: float
    ) -> list[tuple[float, float]]:
        """(second, bytes from then on) of a stage that keeps `resident_bytes` and `bytes_in_flight` for every
        micro-batch in flight. Where one ends as another starts, the end comes first."""
        changes = [
            (span.start, 1, bytes_in_flight) if span.action.kind == "F" else (span.end, 0, -bytes_in_flight)
            for span in self.spans
            if span.stage == stage
        ]
        level, points = float(resident_bytes), [(0.0, float(resident_bytes))]
        for second, _, change in sorted(changes):
            level += change
            points.append((second, level))
        return points


def simulate(actions: Sequence[Sequence[Action]], costs: PipelineCosts) -> Timeline:
    """Runs each stage's list of actions with these costs (one candidate).

    Raises UsageError for lists that are incomplete, repeat an action, or wait for each other for ever.
    """
    order = _order(actions)
    costs.check(len(actions), 1 + max(action.micro_batch for _, action in order))
    spans: list[Span] = []
    ends = _run(order, _as_lists(costs), max, spans)
    return Timeline(
        len(actions), tuple(sorted(spans, key=lambda span: (span.start, span.stage))), tuple(ends)
    )


def step_seconds(schedule: str, costs: PipelineCosts) -> Array:
    """Step seconds of many candidates side by side, shape (candidates,): the costs' last axis."""
    stages, micro_batches, candidates = costs.forward.shape
    order = _schedule_order(schedule, stages, micro_batches)
    if candidates == 1:
        return np.array([max(_run(order, _as_lists(costs.candidate(0)), max, None))])
    ends = _run(order, costs, np.maximum, None)
    latest: Array = np.max(np.broadcast_arrays(*ends), axis=0)
    return latest


CACHED_ACTIONS = 50_000
"""Orders of more actions than this are made anew each time: keeping them would take hundreds of megabytes."""


def _schedule_order(schedule: str, stages: int, micro_batches: int) -> Order:
    if 2 * stages * micro_batches > CACHED_ACTIONS:
        return _order(schedule_named(schedule).actions(stages, micro_batches))
    return _cached_order(schedule, stages, micro_batches)


@lru_cache(maxsize=64)
def _cached_order(schedule: str, stages: int, micro_batches: int) -> Order:
    return _order(schedule_named(schedule).actions(stages, micro_batches))


def _order(actions: Sequence[Sequence[Action]]) -> Order:
    """All actions, each after what it needs, in the order of a clock on which each takes one tick: the order
    in which one process that drives all stages launches them (torchgpipe's clock cycles)."""
    _check_complete(actions)
    stages, micro_batches = len(actions), len(actions[0]) // 2
    forward_done = [bytearray(micro_batches) for _ in actions]
    backward_done = [bytearray(micro_batches) for _ in actions]
    done = {"F": forward_done, "B": backward_done}
    # What a forward or a backward of a stage waits for: here all, there nothing more.
    everything = bytearray(b"\1" * micro_batches)
    before = [everything, *forward_done[:-1]]
    after = [*backward_done[1:], everything]
    order: list[tuple[int, Action]] = []
    next_index = [0] * stages
    while len(order) < 2 * stages * micro_batches:
        ready = []
        for stage, index in enumerate(next_index):
            if index == 2 * micro_batches:
                continue
            kind, m = action = actions[stage][index]
            if before[stage][m] if kind == "F" else after[stage][m] and forward_done[stage][m]:
                ready.append((stage, action))
        if not ready:
            raise _deadlock(actions, next_index)
        for stage, (kind, m) in ready:
            done[kind][stage][m] = 1
            next_index[stage] += 1
        order += ready
    return order


def _check_complete(actions: Sequence[Sequence[Action]]) -> None:
    if not actions:
        raise UsageError("no stages: there are no lists of actions", "Give each stage its list.")
    micro_batches = 1 + max((action.micro_batch for stage in actions for action in stage), default=0)
    expected = {Action(kind, m) for kind in ("F", "B") for m in range(micro_batches)}
    for index, stage in enumerate(actions):
        if len(set(stage)) < len(stage):
            repeated = next(action for i, action in enumerate(stage) if action in stage[:i])
            raise UsageError(f"stage {index} runs {repeated} twice", "List every action once.")
        if set(stage) != expected:
            odd = min(expected.symmetric_difference(stage))
            raise UsageError(
                f"stage {index}: {odd} is {'missing' if odd in expected else 'not an action'}",
                f"Every stage runs F and B of the micro-batches 0 to {micro_batches - 1}.",
            )


def _deadlock(actions: Sequence[Sequence[Action]], next_index: Sequence[int]) -> UsageError:
    done = [set(own[:index]) for own, index in zip(actions, next_index, strict=True)]
    waits = []
    for stage, (own, index) in enumerate(zip(actions, next_index, strict=True)):
        if index < len(own):
            other, missing = _missing(own[index], stage, done)
            waits.append(f"stage {stage} waits at {own[index]} for {missing} of stage {other}")
    return UsageError(
        "the actions wait for each other: " + "; ".join(waits), "Change the order of one of them."
    )


def _missing(action: Action, stage: int, done: Sequence[set[Action]]) -> tuple[int, Action]:
    """What an action that cannot run yet waits for: (stage, action)."""
    forward = Action("F", action.micro_batch)
    if action.kind == "B" and forward not in done[stage]:
        return stage, forward
    return stage - 1 if action.kind == "F" else stage + 1, action


class _Lists(NamedTuple):
    """PipelineCosts as nested lists: plain floats run several times faster than numpy's scalars."""

    forward: Any
    backward: Any
    occupancy: Any
    latency: Any
    forward_launch: Any
    backward_launch: Any
    all_reduce: Any


def _as_lists(costs: PipelineCosts) -> _Lists:
    values = (getattr(costs, name) for name in _Lists._fields)
    return _Lists(*(None if value is None else value.tolist() for value in values))


def _run(order: Order, costs: PipelineCosts | _Lists, later: Any, spans: list[Span] | None) -> list[Any]:
    """End of every stage, all-reduce included. `later` is max for floats, np.maximum for candidates."""
    stages = len(costs.forward)
    free: list[Any] = [0.0] * stages
    # By kind: what each takes and launches, when links get free, when what the action needs has arrived.
    durations = {"F": costs.forward, "B": costs.backward}
    launches: dict[str, Any] = {"F": costs.forward_launch, "B": costs.backward_launch}
    links: dict[str, list[Any]] = {"F": [0.0] * stages, "B": [0.0] * stages}
    arrived: dict[str, list[dict[int, Any]]] = {kind: [{} for _ in free] for kind in ("F", "B")}
    occupancy, latency, launched = costs.occupancy, costs.latency, 0.0
    for stage, action in order:
        kind, m = action
        start = free[stage]
        if m in arrived[kind][stage]:
            start = later(start, arrived[kind][stage].pop(m))
        if launches[kind] is None:
            end = start + durations[kind][stage][m]
        else:
            start, launched = later(start, launched), launched + launches[kind][stage][m]
            end = later(start + durations[kind][stage][m], launched)
        free[stage] = end
        target = stage + 1 if kind == "F" else stage - 1
        if 0 <= target < stages:
            boundary = stage if kind == "F" else target
            sent = later(end, links[kind][boundary]) + occupancy[boundary]
            links[kind][boundary] = sent
            arrived[kind][target][m] = sent + latency[boundary]
        if spans is not None:
            spans.append(Span(stage, action, start, end))
    if costs.all_reduce is not None:
        free = [end + seconds for end, seconds in zip(free, costs.all_reduce, strict=True)]
    return free
