"""Simulated step: spans, times and memory of each stage, and the steady state.

A device runs its actions in the order of its list, one at a time. A forward needs the activation of the
previous place, a backward the gradient of the next place. Each is sent when it is computed. `Costs` describes
how long a transfer takes, which link it occupies, and what its devices do meanwhile.

If every link has one sender, every start is the latest of some ends, and the step is the longest path through
the dependencies. If several senders share a link, it serves the first ready one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from .collectives import ends_after_sums
from .errors import UsageError
from .program import Action, Program, linear_program
from .program_order import NONE, Indices, Order, resolve_order
from .quantities import SAME, format_count, format_seconds, percent
from .simulator import Reduction, Run, reductions, run, run_many
from .step_costs import (
    ActionCosts,
    Array,
    Costs,
    has_static_link_order,
    lower_costs,
)


class Span(NamedTuple):
    """Action on its stage, with start and end in seconds from the start of the step."""

    stage: int
    action: Action
    start: float
    end: float


class Transfer(NamedTuple):
    """Transfer of an action's result between two stages.

    Attributes:
        stage: Sending stage.
        to_stage: Receiving stage.
        action: Action that computed the result.
        ready: Seconds when the result is computed.
        start: Seconds when the transfer starts on its link.
        end: Seconds when the result has arrived.
    """

    stage: int
    to_stage: int
    action: Action
    ready: float
    start: float
    end: float


class StageTime(NamedTuple):
    """Seconds of the step on one stage, by cause. They sum to the step.

    Attributes:
        compute: Computing.
        transfer: Idle between two actions while the input of the second is transferred, or during a blocking
            send.
        warm_up_cool_down: Other idle time, which equal stages would also have.
        imbalance: Idle because the busiest stage computes longer. At most the difference of their compute.
        update: All-reduce and optimizer after the last action.
    """

    compute: float
    transfer: float
    warm_up_cool_down: float
    imbalance: float
    update: float


@dataclass(frozen=True, eq=False, repr=False)
class Timeline:
    """Simulated step.

    Attributes:
        order: Actions in the order of the clock.
        costs: Costs of the program.
        run: Simulated seconds by action.
        reductions: All-reduces of the gradients.
        stage_end: (stages,) seconds when each stage is done, including all-reduce and optimizer.
    """

    order: Order
    costs: Costs
    run: Run
    reductions: tuple[Reduction, ...]
    stage_end: tuple[float, ...]

    def __repr__(self) -> str:
        stages = format_count(self.stages, "stage")
        micro_batches = format_count(self.program.micro_batches, "micro-batch")
        step, bubble = format_seconds(self.step_seconds), percent(self.bubble)
        return f"<{type(self).__name__}: {stages}, {micro_batches}, {step} a step, bubble {bubble}>"

    @property
    def program(self) -> Program:
        """Simulated program."""
        return self.order.program

    @property
    def stages(self) -> int:
        """Number of devices of the pipeline."""
        return self.program.devices

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """All actions in order of start."""
        columns = (
            self.order.device.tolist(),
            self.order.actions,
            self.run.start.tolist(),
            self.run.end.tolist(),
        )
        spans = (Span(*values) for values in zip(*columns, strict=True))
        return tuple(sorted(spans, key=lambda span: (span.start, span.stage)))

    @cached_property
    def spans_by_stage(self) -> list[list[Span]]:
        """The actions of every stage in order of start."""
        rows: list[list[Span]] = [[] for _ in range(self.stages)]
        for span in self.spans:
            rows[span.stage].append(span)
        return rows

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """All transfers between stages in order of start."""
        order, run, sends = self.order, self.run, self.order.sends
        columns = (order.device[sends], order.device[order.target[sends]])
        times = (run.end[sends], run.begin[sends], run.arrival[sends])
        actions = [order.actions[i] for i in sends.tolist()]
        rows = zip(*(c.tolist() for c in columns), actions, *(t.tolist() for t in times), strict=True)
        return tuple(sorted((Transfer(*row) for row in rows), key=lambda t: (t.start, t.stage)))

    @cached_property
    def step_seconds(self) -> float:
        """Seconds from the first start to the last end, at least those of the most loaded port."""
        return max(*self.stage_end, self.costs.port_seconds)

    @cached_property
    def busy_seconds(self) -> tuple[float, ...]:
        """Computing seconds of each stage."""
        seconds = self.run.end - self.run.start
        return tuple(np.bincount(self.order.device, weights=seconds, minlength=self.stages).tolist())

    @property
    def bubble(self) -> float:
        """Idle share of all stages over the whole step."""
        return 1 - sum(self.busy_seconds) / (self.stages * self.step_seconds) if self.step_seconds else 0.0

    @property
    def bubble_rate_span(self) -> float:
        """Idle share of the longest stage span (last end - first start of one stage): (span - busy) / span.

        This is the rate in "Zero Bubble Pipeline Parallelism", ICLR 2024, table 5.
        """
        spans = self._spans(
            np.asarray(self.run.end)[[positions[-1] if len(positions) else 0 for positions in self._own]]
        )
        longest = max(spans)
        return 1 - self.busy_seconds[spans.index(longest)] / longest if longest else 0.0

    @property
    def longest_span_seconds(self) -> float:
        """Longest time from the first action of a stage to the end of its update.

        Steps of a synchronous schedule follow one another at this pace if no stage waits for another before
        it updates its weights.
        """
        return max(self._spans(self.stage_end))

    def _spans(self, ends: Sequence[float] | Array) -> list[float]:
        """Seconds from the first action of each stage to its end; 0 for stages without actions."""
        return [
            float(end - self.run.start[positions[0]]) if len(positions) else 0.0
            for end, positions in zip(ends, self._own, strict=True)
        ]

    @cached_property
    def _own(self) -> list[Indices]:
        """Actions of each stage, as positions in the order of the clock."""
        by_device = np.argsort(self.order.device, kind="stable")
        counts = np.bincount(self.order.device, minlength=self.stages)
        return np.split(by_device, np.cumsum(counts)[:-1])

    @cached_property
    def stage_times(self) -> tuple[StageTime, ...]:
        """Seconds of the step by cause, for each stage."""
        return tuple(self._stage_time(stage) for stage in range(self.stages))

    def _stage_time(self, stage: int) -> StageTime:
        positions, busy, step = self._own[stage], self.busy_seconds[stage], self.step_seconds
        if not len(positions):
            return StageTime(0.0, 0.0, step - max(self.busy_seconds), max(self.busy_seconds), 0.0)
        first, last = float(self.run.start[positions[0]]), float(self.run.end[positions[-1]])
        idle = float((self.run.start[positions[1:]] - self.run.end[positions[:-1]]).sum())
        waited = min(self._transfer_wait(positions), idle)
        sent = max(float(self.run.free[stage]), last)
        update = self._update(stage, sent)
        drain = max(step - sent - update, 0.0)
        waiting = first + idle - waited + drain
        imbalance = min(waiting, max(self.busy_seconds) - busy)
        return StageTime(busy, waited + sent - last, waiting - imbalance, imbalance, update)

    def _transfer_wait(self, positions: Indices) -> float:
        """Return the idle seconds during a transfer for the next action, or a blocking one of the last."""
        run, before, after = self.run, positions[:-1], positions[1:]
        gap_start, gap_end = run.end[before], run.start[after]
        source = self.order.source[after]
        receives = source != NONE
        ready = np.where(receives, run.end[source], np.inf)
        came = np.minimum(np.where(receives, run.arrival[source], -np.inf), gap_end)
        receiving: Array = np.maximum(came - np.maximum(ready, gap_start), 0.0)
        if self.costs.transfers not in ("rendezvous", "blocking"):
            return float(receiving.sum())
        sends = self.order.target[before] != NONE
        departure = np.where(sends, run.arrival[before], gap_start)
        both = np.maximum(np.minimum(departure, came) - np.maximum(ready, gap_start), 0.0)
        return float((receiving + (departure - gap_start) - both).sum())

    def _update(self, stage: int, since: float) -> float:
        """Return the all-reduce and optimizer seconds after the last action."""
        reduced = [r for r in self.reductions if stage in r.stages]
        seconds = sum(max(r.end - max(r.start, since), 0.0) for r in reduced)
        computed = max([since, *(r.end for r in reduced)])
        return seconds + (self.stage_end[stage] - computed)

    @cached_property
    def peak_in_flight(self) -> tuple[float, ...]:
        """Most micro-batches that each stage holds at a time. A chunk that is 1/v of its stage counts 1/v.

        A micro-batch is held from the start of F to the end of its W, or of its B if it has no W.
        """
        peaks = (max(self.program.in_flight(stage), default=0.0) for stage in range(self.stages))
        return tuple(int(peak) if peak == int(peak) else peak for peak in peaks)

    def memory_over_time(
        self,
        stage: int,
        resident_bytes: float,
        bytes_in_flight: float | Sequence[float],
        first_part: Sequence[tuple[float, float]] | None = None,
    ) -> list[tuple[float, float]]:
        """Return the memory of a stage over time, as (second, bytes from then on).

        Args:
            stage: Number of the stage.
            resident_bytes: Bytes that it holds all the time.
            bytes_in_flight: Bytes of every micro-batch in flight, of the whole stage or one value per chunk.
            first_part: By chunk, bytes that a B with a separate W adds at its start and at its end.

        Returns:
            The changes in order. If one action ends as another starts, the end comes first.
        """
        sizes = self._bytes_by_chunk(bytes_in_flight)
        parts = first_part or [(0.0, 0.0)] * len(sizes)
        level, points = float(resident_bytes), [(0.0, float(resident_bytes))]
        for i in self._own[stage].tolist():
            action, start, end = self.order.actions[i], float(self.run.start[i]), float(self.run.end[i])
            begins, ends = parts[action.chunk]
            if action.kind == "F":
                changes = [(start, sizes[action.chunk])]
            elif self.order.finishing[i]:
                freed = sizes[action.chunk] + (begins + ends if action.kind == "W" else 0.0)
                changes = [(end, -freed)]
            else:
                changes = [(start, begins), (end, ends)] if first_part is not None else []
            for second, change in changes:
                level += change * self.program.share(action.micro_batch)
                points.append((second, level))
        return points

    def _bytes_by_chunk(self, bytes_in_flight: float | Sequence[float]) -> list[float]:
        chunks = self.program.chunks
        if isinstance(bytes_in_flight, (int, float)):
            return [bytes_in_flight / self.program.parts] * chunks
        if len(bytes_in_flight) != chunks:
            raise UsageError(
                f"bytes_in_flight: {len(bytes_in_flight)} values for {chunks} chunks",
                "Give one for each chunk, or one value for the whole stage.",
            )
        return list(bytes_in_flight)


def simulate(actions: Program | Sequence[Sequence[Action]], costs: Costs) -> Timeline:
    """Simulate a program, or the lists of a linear pipeline, for one candidate.

    Args:
        actions: Program, or actions of each stage.
        costs: Costs of one candidate.

    Raises:
        UsageError: Lists are incomplete, repeat an action, or wait for each other forever, or the costs are
            invalid.
    """
    order = resolve_order(
        actions
        if isinstance(actions, Program)
        else linear_program([list(stage_actions) for stage_actions in actions])
    )
    if costs.candidates is not None:
        raise UsageError(
            f"costs of {costs.candidates} candidates: a timeline is of one",
            "Take one, costs.candidate(index), or ask for step_seconds.",
        )
    values = lower_costs(order, costs)
    ran = run(values)
    reduced = reductions(values, ran)
    return Timeline(order, values.costs, ran, reduced, _stage_ends(values, ran, reduced))


def step_seconds(program: Program, costs: Costs) -> Array:
    """Return the (candidates,) step seconds of many candidates, which are the last axis of the costs.

    The program's dependencies are resolved once and cached for its lifetime.
    """
    order = resolve_order(program)
    if costs.candidates in (None, 1):
        single = costs if costs.candidates is None else costs.candidate(0)
        return np.array([_step(lower_costs(order, single))])
    values = lower_costs(order, costs)
    if not (has_static_link_order(values) and _ends_alone(values)):
        singles = (costs.candidate(index) for index in range(values.duration.shape[1]))
        return np.array([_step(lower_costs(order, single)) for single in singles])
    ends = run_many(values)
    if costs.all_reduce is not None:
        ends = ends + costs.all_reduce[:, 0]
    ends = ends_after_sums(ends, costs.tied)
    if costs.optimizer is not None and not program.update_every:
        ends = ends + costs.optimizer
    latest: Array = np.maximum(np.max(ends, axis=0), costs.port_seconds)
    return latest


def device_ends(program: Program, costs: Costs) -> Array | None:
    """Return the (devices, candidates) seconds when each device has run its last action.

    None if several devices share a link, because its order is then not known beforehand.
    """
    order = resolve_order(program)
    if costs.candidates == 1:
        single = lower_costs(order, costs.candidate(0))
        return np.array(run(single).free)[:, None] if has_static_link_order(single) else None
    values = lower_costs(order, costs)
    return run_many(values) if has_static_link_order(values) else None


def runs_side_by_side(program: Program, costs: Costs) -> bool:
    """Return whether `step_seconds` simulates many such candidates in one pass, not one after another."""
    values = lower_costs(resolve_order(program), costs if costs.candidates is None else costs.candidate(0))
    return has_static_link_order(values) and _ends_alone(values)


def _step(values: ActionCosts) -> float:
    ran = run(values)
    return max(*_stage_ends(values, ran, reductions(values, ran)), values.costs.port_seconds)


def _stage_ends(values: ActionCosts, ran: Run, reduced: Sequence[Reduction]) -> tuple[float, ...]:
    """Return the seconds when each device is done, including all-reduce and optimizer."""
    ends: list[float] = ran.free.tolist()
    for reduction in reduced:
        for stage in reduction.stages:
            ends[stage] = max(ends[stage], reduction.end)
    program, optimizer = values.order.program, values.costs.optimizer
    if optimizer is not None and program.update_every is None:
        seconds = np.broadcast_to(optimizer, program.devices).tolist()
        ends = [end + more for end, more in zip(ends, seconds, strict=True)]
    return tuple(ends)


def _ends_alone(values: ActionCosts) -> bool:
    """Return whether each device's all-reduce follows its last action and overlaps with nothing."""
    program, costs = values.order.program, values.costs
    is_linear = len(program.pipes) == 1 and program.parts == 1
    if costs.tied and (costs.transfers != "overlapped" or not is_linear):
        return False
    alone = is_linear and costs.buckets == 1 and program.update_every is None
    if costs.reduce_loads:
        return False
    # A device that blocks sends its last result while it reduces.
    return costs.all_reduce is None or (alone and costs.transfers == "overlapped")


PERIODS = 3
"""Number of repetitions that confirm a period."""


class SteadyState(NamedTuple):
    """Steady state of an asynchronous program.

    Attributes:
        seconds_per_micro_batch: Seconds per micro-batch.
        period: Micro-batches after which everything repeats.
        exact: Whether a period was found. Otherwise the seconds are the mean over the later half of the
            simulated micro-batches.
    """

    seconds_per_micro_batch: float
    period: int
    exact: bool


def steady_state(program: Program, costs: Costs) -> SteadyState:
    """Return the steady state of an asynchronous program for one candidate.

    All-reduces run during computing, so the slower of the two sets the pace (PipeDream, SOSP 2019, section
    3.1). The same holds for launches: a slightly slower host falls behind only after many micro-batches.

    Raises:
        UsageError: The program flushes, or has too few micro-batches.
    """
    if program.update_every is None:
        raise UsageError(
            "the program updates once, at its end: it has no steady state", "Take an asynchronous schedule."
        )
    order = resolve_order(program)
    values = lower_costs(order, costs)
    completed = _completion_times(order, run(values).end)
    late = completed[len(completed) // 2 :]
    if len(late) < 2:
        raise UsageError(
            f"{program.micro_batches} micro-batches: too few for a steady state on {program.devices} stages",
            f"Use {8 * program.devices} or more.",
        )
    period = _period(late)
    count = period or len(late) - 1
    seconds = float(late[-1] - late[-1 - count]) / count
    launches = 0.0 if values.launches is None else float(values.launches.end.max())
    least = max(_reduction_seconds(order, costs), max(costs.port_seconds, launches) / program.micro_batches)
    return SteadyState(max(seconds, least), count, period is not None)


def _completion_times(order: Order, end: Array) -> Array:
    """Return the ascending seconds when micro-batches were done at all places, without those of the drain.

    The drain starts with the first micro-batch whose last action any device runs after its last forward.
    """
    program = order.program
    done = np.zeros(program.micro_batches)
    np.maximum.at(done, order.micro_batch, end)
    drains = np.zeros(program.micro_batches, dtype=np.bool_)
    for device_actions in program.actions:
        forwards = [index for index, action in enumerate(device_actions) if action.kind == "F"]
        drains[[action.micro_batch for action in device_actions[forwards[-1] + 1 if forwards else 0 :]]] = (
            True
        )
    limit = float(done[drains].min(initial=np.inf))
    return np.sort(done[~drains & (done <= limit)])


def _period(times: Array) -> int | None:
    """Return after how many entries the times advance by a constant amount, or None."""
    tolerance = SAME * float(times[-1])
    for period in range(1, (len(times) - 1) // PERIODS + 1):
        advance = times[period:] - times[:-period]
        if np.ptp(advance) <= tolerance:
            return period
    return None


def _reduction_seconds(order: Order, costs: Costs) -> float:
    """Return the all-reduce seconds per micro-batch on the device that has the most."""
    program = order.program
    if costs.all_reduce is None or program.update_every is None:
        return 0.0
    seconds = np.broadcast_to(costs.all_reduce, (program.devices, program.chunks))
    done = np.zeros_like(seconds)
    np.add.at(done, (order.device[order.finishing], order.chunk[order.finishing]), 1.0)
    return float((seconds * done).sum(axis=1).max()) / program.update_every / program.micro_batches
