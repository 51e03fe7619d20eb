"""The simulator: a program and its costs -> start and end of every action, transfer and all-reduce.

One event loop, `run_by_events`, runs any program. Where each link serves in a known order, `run_in_order`
gives the same bits, of one candidate or of many side by side (tests/cost_models/simulator/test_engine.py).
`linear_ends` (test_linear.py) runs 1F1B and GPipe with one stage a device, all stages at once:

Every action has a tick, at which no stage has two, behind the ticks of all that it waits for: of stage s of
p, and micro-batch m of M,

    1F1B    F at s + 2 m              B at 2 p - 1 - s + 2 m
    GPipe   F at s + m                B at 2 (M + p - 1) - s - m - 1, the last micro-batch first

A stage's ticks come in the order of its actions, and so an array of all stages takes one tick after another
where the loops take one action after another: the same sums and comparisons, and so the same bits. With 256
stages and 4,096 micro-batches these are 8,700 ticks instead of 2,097,152 actions. The replicas of a stage are
alike, its slowest stands for all: how many devices there are does not count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, NamedTuple

import numpy as np

from .collectives import Loads, end_on_ports
from .errors import UsageError
from .program import list_unshards
from .program_order import NONE, Indices, Order
from .step_costs import ActionCosts, Array, Costs, has_static_link_order, recompute_seconds, update_actions


class Run(NamedTuple):
    """Simulated seconds of one candidate, by action in the order of the clock.

    Attributes:
        start: (actions,) starts.
        end: (actions,) ends.
        begin: (actions,) starts of the transfer of each action that sends.
        arrival: (actions,) ends of that transfer.
        free: (devices,) ends of each device's last action or blocking transfer.
    """

    start: Array
    end: Array
    begin: Array
    arrival: Array
    free: Array


def run(values: ActionCosts) -> Run:
    """Simulate one candidate.

    Raises:
        UsageError: Devices wait for each other forever.
    """
    if not has_static_link_order(values):
        return run_by_events(values)
    rows: list[tuple[float, float, float, float]] = []
    free = run_in_order(values, rows)
    start, end, begin, arrival = np.array(rows).T
    return Run(start, end, begin, arrival, np.array(free))


def run_many(values: ActionCosts) -> Array:
    """Return when each device is done, for links that serve in a known order.

    Returns:
        (stages, candidates) seconds.
    """
    return np.array(run_in_order(values))


def run_in_order(values: ActionCosts, rows: list[Any] | None = None) -> list[Any]:
    """Return the seconds when each device is done, for links that serve in the order of the clock.

    Every start is then the latest of some ends. Values of many candidates are arrays.

    Args:
        values: Costs of every action.
        rows: List that receives start, end, begin and arrival of each action.
    """
    lists, launches, many = values.order.lists, values.launches, values.duration.ndim > 1
    later: Any = np.maximum if many else max
    zero: Any = 0 * values.duration[0]
    free, link_free = [zero] * values.order.program.devices, [zero] * values.links
    durations, occupancy, latency, *hosted = (
        list(column) if many else column.tolist()
        for column in (values.duration, values.occupancy, values.latency, *(launches or ())[:2])
    )
    waits, cuts = values.costs.transfers == "blocking", values.cut.tolist()
    arrived: list[Any] = [None] * len(values.order)
    columns = (*(lists[name] for name in ("device", "source", "target")), values.link.tolist(), durations)
    for i, (device, sender, target, line, seconds) in enumerate(zip(*columns, strict=True)):
        begins = free[device]
        if sender >= 0:
            other, arrived[sender] = arrived[sender], None
            begins = np.maximum(begins, other) if many else other if other > begins else begins
        if hosted:
            begins = later(begins, hosted[0][i])
        ends = begins + seconds
        if hosted:
            ends = later(ends, hosted[1][i])
        free[device] = begin = arrival = ends
        if target >= 0:
            if line >= 0:
                other = link_free[line]
                begin = np.maximum(ends, other) if many else other if other > ends else ends
            arrival = begin + occupancy[cuts[i]]
            if line >= 0:
                link_free[line] = arrival
            arrived[i] = arrival = arrival + latency[cuts[i]]
            if waits:
                free[device] = arrival
        if rows is not None:
            rows.append((begins, ends, begin, arrival))
    return free


def run_by_events(values: ActionCosts) -> Run:
    """Simulate one candidate with an event loop.

    Links serve the first ready transfer, on ties the first on the clock.

    `action_waits` and `transfer_waits` count the events that are still missing. `start` and `ready` (of
    transfers) hold the latest event so far. An action that can run runs at once. If none can, the transfer
    that was ready first starts: nothing unknown becomes ready earlier.

    Raises:
        UsageError: Devices wait for each other forever.
    """
    order, count = values.order, len(values.order)
    sender_waits = values.costs.transfers in ("rendezvous", "blocking")
    receiver_waits = values.costs.transfers in ("rendezvous", "blocking-receive")
    waits = _waits(order, sender_waits, receiver_waits)
    action_waits, transfer_waits = (own.tolist() for own in waits)
    ready, start, end, begin, arrival = ([0.0] * count for _ in range(5))
    free, link_free = [0.0] * order.program.devices, [0.0] * values.links
    columns = (order.device, order.source, order.target, _following(order), values.link, values.duration)
    device, source, target, following, link, duration = (own.tolist() for own in columns)
    cut, occupancy, latency = values.cut.tolist(), values.occupancy.tolist(), values.latency.tolist()
    launches = values.launches
    hosted = None if launches is None else (launches.start.tolist(), launches.end.tolist())
    gathers = None if values.costs.unshard is None else _Gathers(order, values.costs)
    can_run = [i for i, waiting in enumerate(action_waits) if not waiting]
    requests: list[tuple[float, int]] = []

    def release(action: int, second: float) -> None:
        """Record an event that an action waits for."""
        start[action] = max(start[action], second)
        action_waits[action] -= 1
        if not action_waits[action]:
            can_run.append(action)

    def offer(transfer: int, second: float) -> None:
        """Record an event that a transfer waits for."""
        ready[transfer] = max(ready[transfer], second)
        transfer_waits[transfer] -= 1
        if not transfer_waits[transfer]:
            heappush(requests, (ready[transfer], transfer))

    while can_run or requests:
        if can_run:
            i = can_run.pop()
            if gathers is not None:
                start[i] = gathers.begin(i, start[i], free[device[i]])
            if hosted is not None:
                start[i] = max(start[i], hosted[0][i])
            end[i] = start[i] + duration[i]
            if hosted is not None:
                end[i] = max(end[i], hosted[1][i])
            free[device[i]] = end[i]
            j = following[i]
            if j >= 0:
                release(j, end[i])
                if receiver_waits and source[j] >= 0:
                    offer(source[j], end[i])
            if target[i] >= 0:
                offer(i, end[i])
            continue
        begins, i = heappop(requests)
        line = link[i]
        if line >= 0:
            begins = max(begins, link_free[line])
            link_free[line] = begins + occupancy[cut[i]]
        begin[i] = begins
        arrival[i] = begins + occupancy[cut[i]] + latency[cut[i]]
        release(target[i], arrival[i])
        if sender_waits:
            free[device[i]] = max(free[device[i]], arrival[i])
            if following[i] >= 0:
                release(following[i], arrival[i])
    if any(action_waits):
        raise _stuck(values, np.asarray(action_waits) > 0, np.asarray(transfer_waits) > 0)
    return Run(*map(np.array, (start, end, begin, arrival, free)))


class _Gathers:
    """Sequential gathers of weights during the actions of each device (see `Costs`)."""

    def __init__(self, order: Order, costs: Costs) -> None:
        program = order.program
        assert costs.unshard is not None
        self.seconds = np.broadcast_to(costs.unshard, (program.devices, program.chunks)).tolist()
        self.lists = [iter(list_unshards(actions, costs.unsharded_chunks)) for actions in program.actions]
        self.free = [0.0] * program.devices
        self.there: dict[tuple[int, int], float] = {}
        self.places = list(zip(order.device.tolist(), order.chunk.tolist(), strict=True))

    def begin(self, action: int, second: float, last_end: float) -> float:
        """Return the start of an action in seconds.

        Args:
            action: Number of the action.
            second: Earliest start without gathers.
            before: End of the device's last action.
        """
        device, chunk = self.places[action]
        for gathered in next(self.lists[device])[0]:
            self.free[device] = max(self.free[device], last_end) + self.seconds[device][gathered]
            self.there[device, gathered] = self.free[device]
        return max(second, self.there[device, chunk])


def _following(order: Order) -> Indices:
    following = np.full(len(order) + 1, NONE)
    following[order.previous] = np.arange(len(order))
    return following[:-1]


def _waits(order: Order, sender_waits: bool, receiver_waits: bool) -> tuple[Indices, Indices]:
    """Return the (actions,) numbers of events that each action, and each transfer, waits for."""
    has_previous = order.previous != NONE
    receives = order.source != NONE
    sends = order.target != NONE
    actions = has_previous.astype(np.int64) + receives
    transfers = sends.astype(np.int64)
    if sender_waits:
        actions += has_previous & sends[order.previous]
    if receiver_waits:
        transfers[order.source[receives]] += has_previous[receives]
    return actions, transfers


def _stuck(values: ActionCosts, waiting: Any, unsent: Any) -> UsageError:
    """Return the error that names, for each waiting device, its first blocked action and the cause."""
    order, waits = values.order, []
    for device in range(order.program.devices):
        stuck = np.flatnonzero((order.device == device) & waiting)
        if len(stuck):
            head, before = int(stuck[0]), int(order.previous[stuck[0]])
            source, target = int(order.source[head]), int(order.target[before])
            reasons = []
            if before != NONE and unsent[before]:
                reasons.append(f"for stage {order.device[target]} to receive {order.actions[before]}")
            if source != NONE and unsent[source]:
                reasons.append(f"for {order.actions[source]} of stage {order.device[source]}")
            waits.append(f"stage {device} waits at {order.actions[head]} {' and '.join(reasons)}")
    return UsageError(
        f"with {values.costs.transfers} transfers the stages wait for each other: " + "; ".join(waits),
        "Use overlapped or blocking transfers, or another schedule.",
    )


class Reduction(NamedTuple):
    """All-reduce of the gradients of a part of the layers, or of one bucket of them.

    Attributes:
        part: Number of the part.
        stages: Devices that take part.
        start: Start in seconds.
        end: End in seconds.
    """

    part: int
    stages: tuple[int, ...]
    start: float
    end: float


class _Request(NamedTuple):
    ready: float
    part: int
    nth: int
    stages: tuple[int, ...]
    seconds: float
    loads: Loads


def reductions(values: ActionCosts, run: Run) -> tuple[Reduction, ...]:
    """Return all all-reduces of one candidate.

    The one that is ready first begins first, when its devices have ended earlier ones. Shared ports process
    them one after another.
    """
    table, shared = values.costs.all_reduce, values.costs.reduce_loads
    if (table is None or not table.any()) and not shared:
        return tuple(_tied_reductions(values, run, ()))
    free, ports = [0.0] * values.order.program.devices, Loads()
    done = []
    for request in sorted(_requests(values, run), key=lambda request: request[:3]):
        start = max(request.ready, *(free[stage] for stage in request.stages))
        end = end_on_ports(start + request.seconds, request.loads, ports)
        for stage in request.stages:
            free[stage] = end
        done.append(Reduction(request.part, request.stages, start, end))
    return (*done, *_tied_reductions(values, run, done))


def _tied_reductions(values: ActionCosts, run: Run, earlier: Sequence[Reduction]) -> Iterator[Reduction]:
    """Yield the gradient sums of weights that several parts use. Each counts for the first of these parts."""
    ends: list[float] = run.free.tolist()
    for reduction in earlier:
        for stage in reduction.stages:
            ends[stage] = max(ends[stage], reduction.end)
    for tied_sum in values.costs.tied:
        start = max(ends[stage] for stage in tied_sum.stages)
        for stage in tied_sum.stages:
            ends[stage] = start + tied_sum.seconds
        yield Reduction(tied_sum.parts[0], tied_sum.stages, start, start + tied_sum.seconds)


def _requests(values: ActionCosts, run: Run) -> list[_Request]:
    program, buckets = values.order.program, values.costs.buckets
    table = values.costs.all_reduce
    seconds = np.broadcast_to(0.0 if table is None else table, (program.devices, program.chunks))
    last = _last_actions(values)
    # Gradients appear only after the recomputed forward.
    lead = recompute_seconds(values.order, values.costs).tolist()
    requests = []
    for part in range(program.slots):
        members = sorted({pipe[part] for pipe in program.pipes})
        longest = float(max(seconds[member] for member in members))
        loads = {port: load / buckets for port, load in values.costs.reduce_loads.get(part, {}).items()}
        if not longest and not loads:
            continue
        rounds = [last.get((device, chunk), []) for device, chunk in members]
        for nth in range(max(map(len, rounds))):
            taking_part = [(m, ends[nth]) for m, ends in zip(members, rounds, strict=True) if nth < len(ends)]
            stages = tuple(sorted({place.device for place, _ in taking_part}))
            for bucket in range(1, buckets + 1):
                ready = max(
                    float(run.end[i] - (run.end[i] - run.start[i] - lead[i]) * (1 - bucket / buckets))
                    for _, i in taking_part
                )
                requests.append(_Request(ready, part, nth, stages, longest / buckets, loads))
    return requests


def _last_actions(values: ActionCosts) -> dict[tuple[int, int], list[int]]:
    """Return the actions that complete gradients to be reduced, by (device, chunk)."""
    order = values.order
    every = order.program.update_every
    actions = np.flatnonzero(order.finishing) if every is None else update_actions(order)
    by_chunk: dict[tuple[int, int], list[int]] = {}
    for i in actions.tolist():
        key = (int(order.device[i]), int(order.chunk[i]))
        if every is None:
            by_chunk[key] = [i]
        else:
            by_chunk.setdefault(key, []).append(i)
    return by_chunk


@dataclass(frozen=True, eq=False)
class LinearCosts:
    """Costs of a pipeline with one stage per device, in seconds.

    Attributes:
        forward: (stages, candidates) forward of a micro-batch.
        backward: (stages, candidates) backward of a micro-batch.
        accumulation: (stages, candidates) seconds that the first backward saves.
        occupancy: (cuts, candidates) seconds of a transfer on its link, equal in both directions.
        latency: (cuts, candidates) latency of a transfer, equal in both directions.
        links: (stages, stages) number of what a transfer occupies. None if each pair has a separate link.
        forward_launch: (stages, candidates) seconds of a separate host of each stage. None if the host is
            never late.
        backward_launch: Like `forward_launch`, for backwards.
    """

    forward: Array
    backward: Array
    accumulation: Array
    occupancy: Array
    latency: Array
    links: Indices | None = None
    forward_launch: Array | None = None
    backward_launch: Array | None = None


def linear_ends(schedule: str, micro_batches: int, costs: LinearCosts) -> Array | None:
    """Return when each stage of a `1f1b` or `gpipe` pipeline ends its last action, with overlapped transfers.

    Returns:
        (stages, candidates) seconds. None if stages share a link, because it serves the first ready transfer.
    """
    lines = _lines(costs)
    if lines is None:
        return None
    run = _Run(micro_batches, costs, lines)
    stages = len(costs.forward)
    numbers = np.arange(stages)
    if schedule == "1f1b":
        for tick in range(2 * (stages + micro_batches) - 1):
            # Of two neighbours one runs forward, the other backward.
            even = numbers[tick % 2 :: 2]
            odd = numbers[(tick + 1) % 2 :: 2]
            run.forward(even, (tick - even) // 2)
            run.backward(odd, (tick - 2 * stages + 1 + odd) // 2, first=0)
        return run.free
    for tick in range(stages + micro_batches - 1):
        run.forward(numbers, tick - numbers)
    for tick in range(stages + micro_batches - 1, 2 * (stages + micro_batches - 1)):
        later = 2 * (stages + micro_batches - 1) - 1 - tick - numbers
        run.backward(numbers, later, first=micro_batches - 1)
    return run.free


def _lines(costs: LinearCosts) -> tuple[Indices, Indices] | None:
    """Return the link of each stage's results to the next stage, and of its gradients to the previous one."""
    stages = len(costs.forward)
    here = np.arange(stages)
    if costs.links is None:
        return here, here + stages
    onward, back = np.full(stages, NONE), np.full(stages, NONE)
    onward[:-1], back[1:] = costs.links[here[:-1], here[1:]], costs.links[here[1:], here[:-1]]
    occupied = costs.occupancy.any(axis=1)
    used = np.append(onward[:-1][occupied], back[1:][occupied])
    onward, back = (np.where(np.isin(lines, used), lines, NONE) for lines in (onward, back))
    pairs = {
        (int(line), stage) for lines in (onward, back) for stage, line in enumerate(lines) if line != NONE
    }
    if len({line for line, _ in pairs}) < len(pairs):
        return None
    numbers = {line: number for number, line in enumerate(sorted({line for line, _ in pairs}))}
    numbers[NONE] = NONE
    return (
        np.array([numbers[int(line)] for line in onward]),
        np.array([numbers[int(line)] for line in back]),
    )


class _Run:
    """State of a simulation after some ticks.

    `arrived_forward` and `arrived_backward` hold, by stage, the arrival of the input of its next action.
    """

    def __init__(self, micro_batches: int, costs: LinearCosts, lines: tuple[Indices, Indices]) -> None:
        self.micro_batches, self.costs, self.lines = micro_batches, costs, lines
        shape = costs.forward.shape
        self.free, self.host_free = np.zeros(shape), np.zeros(shape)
        self.link_free = np.zeros((int(max(numbers.max() for numbers in lines)) + 2, shape[1]))
        self.arrived_forward, self.arrived_backward = np.zeros(shape), np.zeros(shape)

    def forward(self, stages: Indices, micro_batch: Indices) -> None:
        """Run the forwards of one tick.

        Args:
            stages: Stages that may run a forward in this tick.
            micro_batch: Micro-batch of each stage. Numbers out of range are skipped.
        """
        running = stages[(micro_batch >= 0) & (micro_batch < self.micro_batches)]
        if not len(running):
            return
        starts = np.maximum(self.free[running], self.arrived_forward[running])
        ends = self._launch(running, starts, self.costs.forward[running], self.costs.forward_launch)
        self.free[running] = ends
        sends = running < len(self.free) - 1
        self._send(running[sends], ends[sends], 0, self.arrived_forward, running[sends] + 1, running[sends])

    def backward(self, stages: Indices, micro_batch: Indices, first: int) -> None:
        """Run the backwards of one tick.

        Args:
            stages: Stages that may run a backward in this tick.
            micro_batch: Micro-batch of each stage. Numbers out of range are skipped.
            first: Micro-batch that accumulates no gradients.
        """
        has = (micro_batch >= 0) & (micro_batch < self.micro_batches)
        running, numbers = stages[has], micro_batch[has]
        if not len(running):
            return
        seconds = self.costs.backward[running]
        if (numbers == first).any():
            seconds = np.where(
                (numbers == first)[:, None], seconds - self.costs.accumulation[running], seconds
            )
        starts = np.maximum(self.free[running], self.arrived_backward[running])
        ends = self._launch(running, starts, seconds, self.costs.backward_launch)
        self.free[running] = ends
        sends = running > 0
        self._send(
            running[sends], ends[sends], 1, self.arrived_backward, running[sends] - 1, running[sends] - 1
        )

    def _launch(self, stages: Indices, starts: Array, seconds: Array, launch: Array | None) -> Array:
        """Return the ends of actions, which neither start nor end before their launches do."""
        if launch is None:
            return starts + seconds
        begun = self.host_free[stages]
        self.host_free[stages] = launch_end = begun + launch[stages]
        ends: Array = np.maximum(np.maximum(starts, begun) + seconds, launch_end)
        return ends

    def _send(
        self, stages: Indices, ends: Array, direction: int, arrived: Array, receivers: Indices, cuts: Indices
    ) -> None:
        lines = self.lines[direction][stages]
        sent = np.where((lines == NONE)[:, None], ends, np.maximum(ends, self.link_free[lines]))
        sent = sent + self.costs.occupancy[cuts]
        self.link_free[lines] = sent  # the last row is for free transfers and never read
        arrived[receivers] = sent + self.costs.latency[cuts]
