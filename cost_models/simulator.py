"""The simulator: a program and its costs -> start and end of every action, transfer and all-reduce.

One event loop runs any program. Where each link serves in a known order a simpler loop gives the same bits,
and `linear_ends` runs 1F1B and GPipe with one stage a device, all stages at once:

Every action has a tick, at which no stage has two, behind the ticks of all that it waits for: of stage s of
p, and micro-batch m of M,

    1F1B    F at s + 2 m              B at 2 p - 1 - s + 2 m
    GPipe   F at s + m                B at 2 (M + p - 1) - s - m - 1, the last micro-batch first

A stage's ticks come in the order of its actions, and so an array of all stages takes one tick after another
where `engine` takes one action after another: the same sums and comparisons, and so the same bits. With 256
stages and 4,096 micro-batches these are 8,700 ticks instead of 2,097,152 actions. The replicas of a stage are
alike, its slowest stands for all: how many devices there are does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from heapq import heappop, heappush
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import numpy as np

from .collectives import Loads, end_on_ports
from .errors import MachineError, UsageError
from .program_order import NONE, Indices, Order
from .step_costs import FREE, ActionCosts, Array, has_static_link_order, recompute_seconds, update_actions


def run_in_order(
    device: Any,
    source: Any,
    link: Any,
    duration: Any,
    cut: Any,
    occupancy: Any,
    latency: Any,
    launch_start: Any,
    launch_end: Any,
    waits: bool,
    free: Any,
    link_free: Any,
    start: Any,
    end: Any,
    begin: Any,
    arrival: Any,
) -> None:
    """Where each link serves in the order of the clock: every start is the latest of some ends.

    Inputs by action, in the order of the clock; `launched` and `launch_end` are empty where no host is late.
    `waits`: a device is busy until what it sent has arrived. Fills `start` and `end`, when each transfer
    begins and arrives, and `free`, when each device is free.
    """
    hosted = len(launch_start) > 0
    columns = zip(device, source, link, cut, duration)  # noqa: B905 - numba knows no strict
    for i, (own, sender, line, row, seconds) in enumerate(columns):
        begins = free[own]
        if sender >= 0 and arrival[sender] > begins:
            begins = arrival[sender]
        ends = begins + seconds
        if hosted:
            if launch_start[i] > begins:
                begins = launch_start[i]
                ends = begins + seconds
            if launch_end[i] > ends:
                ends = launch_end[i]
        start[i] = begins
        end[i] = ends
        free[own] = ends
        begin[i] = ends
        if line >= 0:
            if link_free[line] > ends:
                begin[i] = ends = link_free[line]
            ends += occupancy[row]
            link_free[line] = ends
        else:
            ends += occupancy[row]
        ends += latency[row]
        arrival[i] = ends
        if waits:
            free[own] = ends


def run_by_events(
    device: Any,
    source: Any,
    target: Any,
    following: Any,
    link: Any,
    duration: Any,
    cut: Any,
    occupancy: Any,
    latency: Any,
    launch_start: Any,
    launch_end: Any,
    sender_waits: bool,
    receiver_waits: bool,
    action_waits: Any,
    transfer_waits: Any,
    ready: Any,
    free: Any,
    link_free: Any,
    start: Any,
    end: Any,
    begin: Any,
    arrival: Any,
) -> int:
    """Where links serve whoever is ready first (of several at once the first in the order of the clock).

    `following`: the next action on the same device. `action_waits` and `transfer_waits`: how many events each
    waits for, counted down here; `start` and `ready` (of transfers) hold the latest of those that happened.
    An action that can run is run at once; when none can, the transfer that was ready first goes on its link:
    whatever is not known yet becomes ready no earlier. Returns how many actions ran.
    """
    hosted = len(launch_start) > 0
    can_run = [i for i in range(len(device)) if action_waits[i] == 0]
    requests = [(0.0, i) for i in can_run[:0]]
    ran = 0
    while len(can_run) > 0 or len(requests) > 0:
        if len(can_run) > 0:
            i = can_run.pop()
            ran += 1
            if hosted and launch_start[i] > start[i]:
                start[i] = launch_start[i]
            end[i] = start[i] + duration[i]
            if hosted and launch_end[i] > end[i]:
                end[i] = launch_end[i]
            free[device[i]] = end[i]
            j = following[i]
            if j >= 0:
                if end[i] > start[j]:
                    start[j] = end[i]
                action_waits[j] -= 1
                if action_waits[j] == 0:
                    can_run.append(j)
                if receiver_waits and source[j] >= 0:
                    t = source[j]
                    if end[i] > ready[t]:
                        ready[t] = end[i]
                    transfer_waits[t] -= 1
                    if transfer_waits[t] == 0:
                        heappush(requests, (ready[t], t))
            if target[i] >= 0:
                if end[i] > ready[i]:
                    ready[i] = end[i]
                transfer_waits[i] -= 1
                if transfer_waits[i] == 0:
                    heappush(requests, (ready[i], i))
            continue
        begins, i = heappop(requests)
        line = link[i]
        if line >= 0:
            if link_free[line] > begins:
                begins = link_free[line]
            link_free[line] = begins + occupancy[cut[i]]
        begin[i] = begins
        arrival[i] = begins + occupancy[cut[i]] + latency[cut[i]]
        j = target[i]
        if arrival[i] > start[j]:
            start[j] = arrival[i]
        action_waits[j] -= 1
        if action_waits[j] == 0:
            can_run.append(j)
        if sender_waits:
            if arrival[i] > free[device[i]]:
                free[device[i]] = arrival[i]
            j = following[i]
            if j >= 0:
                if arrival[i] > start[j]:
                    start[j] = arrival[i]
                action_waits[j] -= 1
                if action_waits[j] == 0:
                    can_run.append(j)
    return ran


def run_many_in_order(
    device: Any,
    source: Any,
    link: Any,
    duration: Any,
    cut: Any,
    occupancy: Any,
    latency: Any,
    launch_start: Any,
    launch_end: Any,
    waits: bool,
    free: Any,
    link_free: Any,
    arrival: Any,
) -> None:
    """`run_in_order` with a second axis of candidates, for numba alone: plain Python takes numpy's rows."""
    hosted = len(launch_start) > 0
    for i in range(len(device)):
        own, sender, line, row = device[i], source[i], link[i], cut[i]
        for c in range(duration.shape[1]):
            begins = free[own, c]
            if sender >= 0 and arrival[sender, c] > begins:
                begins = arrival[sender, c]
            if hosted and launch_start[i, c] > begins:
                begins = launch_start[i, c]
            ends = begins + duration[i, c]
            if hosted and launch_end[i, c] > ends:
                ends = launch_end[i, c]
            free[own, c] = ends
            if line >= 0:
                if link_free[line, c] > ends:
                    ends = link_free[line, c]
                link_free[line, c] = ends + occupancy[row, c]
            arrival[i, c] = ends + occupancy[row, c] + latency[row, c]
            if waits:
                free[own, c] = arrival[i, c]


class CompiledLoops(NamedTuple):
    """The loops as numba compiled them."""

    run_in_order: Callable[..., Any]
    run_by_events: Callable[..., Any]
    run_many_in_order: Callable[..., Any]


def available() -> bool:
    """Whether numba is installed."""
    return find_spec("numba") is not None


@lru_cache(maxsize=1)
def compiled_loops() -> CompiledLoops:
    """The compiled loops; the first call of each takes a second or so. Raises MachineError without numba."""
    if not available():
        raise MachineError("numba is not installed", "pip install pplan[numba], or use the engine python.")
    import numba

    return CompiledLoops(
        numba.njit(run_in_order),
        numba.njit(run_by_events),
        numba.njit(run_many_in_order),
    )


STARTING_SECONDS = 3.0
"""About what numba takes to be imported and to compile."""
_spent = 0.0


def worth_starting(seconds: float) -> bool:
    """Whether to take numba for what plain Python does in about so many seconds: where it was started before,
    or where plain Python has been given more, in this process, than numba takes to start. Counted from the
    sizes of problems, not timed."""
    global _spent
    if compiled_loops.cache_info().currsize:
        return True
    _spent += seconds
    return _spent > STARTING_SECONDS and available()


Engine = Literal["auto", "python", "numba"]
SECONDS_AN_ACTION = 3e-7
SECONDS_A_CANDIDATE = 1e-8
"""About what plain Python takes for an action, and besides for each candidate side by side."""


def _column(index: int) -> cached_property[Array]:
    return cached_property(lambda run: np.asarray(run.columns[index]))


@dataclass(frozen=True, eq=False)
class Run:
    """Seconds of one candidate, as the loops left them: arrays, or lists that become arrays when read."""

    columns: tuple[Any, Any, Any, Any, Any]

    start = _column(0)
    """Of each action, in the order of the clock."""
    end = _column(1)
    """Of each action."""
    begin = _column(2)
    """When the transfer of each action that sends goes on its link."""
    arrival = _column(3)
    """When that transfer is there."""
    free = _column(4)
    """When each device is done."""


def choose_engine(engine: Engine, seconds: float) -> Literal["python", "numba"]:
    """What runs the loops. "auto" takes numba where it is installed, and started already or worth it for what
    plain Python does in about so many seconds.

    Raises UsageError for another word, MachineError where numba is asked for and not installed."""
    if engine == "auto":
        return "numba" if worth_starting(seconds) else "python"
    if engine not in ("python", "numba"):
        raise UsageError(f"engine {engine!r}: not known", "Use one of: auto, python, numba.")
    return engine


def run(values: ActionCosts, engine: Engine = "auto") -> Run:
    """Runs one candidate. Raises UsageError where devices wait for each other for ever."""
    fast = choose_engine(engine, SECONDS_AN_ACTION * len(values.order)) == "numba"
    return _in_order(values, fast) if has_static_link_order(values) else _by_events(values, fast)


def run_many(values: ActionCosts, engine: Engine = "auto") -> Array:
    """When each device is done, shape (stages, candidates), where links serve in a known order."""
    order, candidates = values.order, values.duration.shape[1]
    seconds = len(order) * (10 * SECONDS_AN_ACTION + SECONDS_A_CANDIDATE * candidates)
    if choose_engine(engine, seconds) == "numba":
        return _many_compiled(values)
    return _side_by_side(values)


def _hosted(values: ActionCosts, fast: bool) -> tuple[Any, Any]:
    """The launches, empty where no host is late."""
    launches = values.launches
    start = np.zeros((0, *values.duration.shape[1:])) if launches is None else launches.start
    end = start if launches is None else launches.end
    return (start, end) if fast else (start.tolist(), end.tolist())


def _blank(count: int, fast: bool) -> Any:
    return np.zeros(count) if fast else [0.0] * count


def _plain(values: Any, fast: bool) -> Any:
    return values if fast else values.tolist()


def _link(values: ActionCosts, fast: bool) -> Any:
    cached = values.link is values.order.pair_link and not fast
    return values.order.lists["pair_link"] if cached else _plain(values.link, fast)


def _cut(values: ActionCosts, fast: bool) -> Any:
    cached = values.cut is values.order.cut and not fast
    return values.order.lists["cut"] if cached else _plain(values.cut, fast)


def _in_order(values: ActionCosts, fast: bool) -> Run:
    order, count = values.order, len(values.order)
    free, start, end, begin, arrival = (
        _blank(n, fast) for n in (order.program.devices, count, count, count, count)
    )
    loop: Callable[..., Any] = compiled_loops().run_in_order if fast else run_in_order
    loop(
        order.device if fast else order.lists["device"],
        order.source if fast else order.lists["source"],
        _link(values, fast),
        _plain(values.duration, fast),
        _cut(values, fast),
        _plain(values.occupancy, fast),
        _plain(values.latency, fast),
        *_hosted(values, fast),
        values.costs.transfers == "blocking",
        free,
        _blank(values.links, fast),
        start,
        end,
        begin,
        arrival,
    )
    return Run((start, end, begin, arrival, free))


def _by_events(values: ActionCosts, fast: bool) -> Run:
    order, count = values.order, len(values.order)
    sender_waits = values.costs.transfers in ("rendezvous", "blocking")
    receiver_waits = values.costs.transfers in ("rendezvous", "blocking-receive")
    following = _following(order)
    action_waits, transfer_waits = _waits(order, sender_waits, receiver_waits)
    ready, start, end, begin, arrival = (_blank(count, fast) for _ in range(5))
    free = _blank(order.program.devices, fast)
    loop: Callable[..., Any] = compiled_loops().run_by_events if fast else run_by_events
    waits, in_transfer = _plain(action_waits, fast), _plain(transfer_waits, fast)
    columns = (order.device, order.source, order.target, following, values.link)
    seconds = (values.duration, values.cut, values.occupancy, values.latency)
    ran = loop(
        *(_plain(array, fast) for array in columns),
        *(_plain(array, fast) for array in seconds),
        *_hosted(values, fast),
        sender_waits,
        receiver_waits,
        waits,
        in_transfer,
        ready,
        free,
        _blank(values.links, fast),
        start,
        end,
        begin,
        arrival,
    )
    if ran < count:
        raise _stuck(values, np.asarray(waits) > 0, np.asarray(in_transfer) > 0)
    return Run((start, end, begin, arrival, free))


def _following(order: Order) -> Indices:
    following = np.full(len(order) + 1, NONE)
    following[order.previous] = np.arange(len(order))
    return following[:-1]


def _waits(order: Order, sender_waits: bool, receiver_waits: bool) -> tuple[Indices, Indices]:
    """How many events each action, and each transfer, waits for."""
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
    """Each device that waits, at its first action that could not run, and what for."""
    order, waits = values.order, []
    for device in range(order.program.devices):
        own = np.flatnonzero((order.device == device) & waiting)
        if len(own):
            head, before = int(own[0]), int(order.previous[own[0]])
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


def _side_by_side(values: ActionCosts) -> Array:
    """All candidates in one pass: `run_in_order` on rows of them."""
    order, candidates = values.order, values.duration.shape[1]
    lists = order.lists
    free = [np.zeros(candidates)] * order.program.devices
    link_free = [np.zeros(candidates)] * values.links
    arrived: dict[int, Array] = {}
    links, cut = values.link.tolist(), values.cut.tolist()
    occupancy, latency = list(values.occupancy), list(values.latency)
    waits = values.costs.transfers == "blocking"
    launches = values.launches
    for i, (own, sender, line) in enumerate(zip(lists["device"], lists["source"], links, strict=True)):
        begins = free[own] if sender < 0 else np.maximum(free[own], arrived.pop(sender))
        if launches is not None:
            begins = np.maximum(begins, launches.start[i])
            ends = np.maximum(begins + values.duration[i], launches.end[i])
        else:
            ends = begins + values.duration[i]
        free[own] = ends
        if lists["target"][i] != NONE:
            sent = ends
            if line != FREE:
                link_free[line] = np.maximum(ends, link_free[line]) + occupancy[cut[i]]
                sent = link_free[line]
            else:
                sent = ends + occupancy[cut[i]]
            arrived[i] = sent + latency[cut[i]]
            if waits:
                free[own] = arrived[i]
    return np.array(free)


def _many_compiled(values: ActionCosts) -> Array:
    order, candidates = values.order, values.duration.shape[1]
    free = np.zeros((order.program.devices, candidates))
    compiled_loops().run_many_in_order(
        order.device,
        order.source,
        values.link,
        values.duration,
        values.cut,
        values.occupancy,
        values.latency,
        *_hosted(values, True),
        values.costs.transfers == "blocking",
        free,
        np.zeros((values.links, candidates)),
        np.zeros_like(values.duration),
    )
    return free


class Reduction(NamedTuple):
    """An all-reduce of the gradients of a part of the layers (or of a bucket of them), seconds."""

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
    """All of one candidate: whoever is ready first begins first, once its devices have ended others; on ports
    that several go through, each takes its turn."""
    table, shared = values.costs.all_reduce, values.costs.reduce_loads
    if (table is None or not table.any()) and not shared:
        return tuple(_tied_reductions(values, run, ()))
    free, ports = [0.0] * values.order.program.devices, Loads()
    done = []
    for request in sorted(_requests(values, run), key=lambda own: own[:3]):
        start = max(request.ready, *(free[stage] for stage in request.stages))
        end = end_on_ports(start + request.seconds, request.loads, ports)
        for stage in request.stages:
            free[stage] = end
        done.append(Reduction(request.part, request.stages, start, end))
    return (*done, *_tied_reductions(values, run, done))


def _tied_reductions(values: ActionCosts, run: Run, earlier: Sequence[Reduction]) -> Iterator[Reduction]:
    """The sums of weights that several parts use; each counts for the first of these parts."""
    ends: list[float] = run.free.tolist()
    for reduction in earlier:
        for stage in reduction.stages:
            ends[stage] = max(ends[stage], reduction.end)
    for own in values.costs.tied:
        start = max(ends[stage] for stage in own.stages)
        for stage in own.stages:
            ends[stage] = start + own.seconds
        yield Reduction(own.parts[0], own.stages, start, start + own.seconds)


def _requests(values: ActionCosts, run: Run) -> list[_Request]:
    program, buckets = values.order.program, values.costs.buckets
    table = values.costs.all_reduce
    seconds = np.broadcast_to(0.0 if table is None else table, (program.devices, program.chunks))
    last = _last_actions(values)
    lead = _lead(values)
    requests = []
    for part in range(program.slots):
        members = sorted({pipe[part] for pipe in program.pipes})
        longest = float(max(seconds[member] for member in members))
        loads = {port: own / buckets for port, own in values.costs.reduce_loads.get(part, {}).items()}
        if not longest and not loads:
            continue
        rounds = [last.get((device, chunk), []) for device, chunk in members]
        for nth in range(max(map(len, rounds))):
            taking_part = [(m, own[nth]) for m, own in zip(members, rounds, strict=True) if nth < len(own)]
            stages = tuple(sorted({place.device for place, _ in taking_part}))
            for bucket in range(1, buckets + 1):
                ready = max(
                    float(run.end[i] - (run.end[i] - run.start[i] - lead[i]) * (1 - bucket / buckets))
                    for _, i in taking_part
                )
                requests.append(_Request(ready, part, nth, stages, longest / buckets, loads))
    return requests


def _last_actions(values: ActionCosts) -> dict[tuple[int, int], list[int]]:
    """By (device, chunk), the actions that complete gradients to be reduced."""
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


def _lead(values: ActionCosts) -> list[float]:
    """Seconds of each action before its gradients begin to appear: the forward that is run again."""
    order, costs = values.order, values.costs
    lead = np.zeros(len(order))
    _, backwards, _ = order.of_kind
    if costs.recompute is not None:
        lead[backwards] = recompute_seconds(order, costs, backwards)
    seconds: list[float] = lead.tolist()
    return seconds


@dataclass(frozen=True, eq=False)
class LinearCosts:
    """Seconds (stages, candidates) of every micro-batch: `forward`, `backward`, and `accumulation`, what the
    first backward does not take; (cuts, candidates), the same both ways: `occupancy` and `latency`.
    `links` (stages, stages): a number for what a transfer occupies; None: each its own. `forward_launch` and
    `backward_launch` (stages, candidates): seconds of each stage's own host; None: it is never late."""

    forward: Array
    backward: Array
    accumulation: Array
    occupancy: Array
    latency: Array
    links: Indices | None = None
    forward_launch: Array | None = None
    backward_launch: Array | None = None


def linear_ends(schedule: str, micro_batches: int, costs: LinearCosts) -> Array | None:
    """(stages, candidates): when each stage of a `1f1b` or `gpipe` pipeline has run its last action, where
    transfers overlap with computing; None where stages share a link, which serves whoever is ready."""
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
    """By stage, the link that its results take to the next stage, and its gradients to the one before."""
    stages = len(costs.forward)
    here = np.arange(stages)
    if costs.links is None:
        return here, here + stages
    onward, back = np.full(stages, NONE), np.full(stages, NONE)
    onward[:-1], back[1:] = costs.links[here[:-1], here[1:]], costs.links[here[1:], here[:-1]]
    occupied = costs.occupancy.any(axis=1)
    used = np.append(onward[:-1][occupied], back[1:][occupied])
    onward, back = (np.where(np.isin(own, used), own, NONE) for own in (onward, back))
    pairs = {(int(line), stage) for own in (onward, back) for stage, line in enumerate(own) if line != NONE}
    if len({line for line, _ in pairs}) < len(pairs):
        return None
    numbers = {line: number for number, line in enumerate(sorted({line for line, _ in pairs}))}
    numbers[NONE] = NONE
    return (
        np.array([numbers[int(line)] for line in onward]),
        np.array([numbers[int(line)] for line in back]),
    )


class _Run:
    """What is known after some ticks. `arrived_forward` and `arrived_backward`: by stage, when what its next
    action waits for is there."""

    def __init__(self, micro_batches: int, costs: LinearCosts, lines: tuple[Indices, Indices]) -> None:
        self.micro_batches, self.costs, self.lines = micro_batches, costs, lines
        shape = costs.forward.shape
        self.free, self.host_free = np.zeros(shape), np.zeros(shape)
        self.link_free = np.zeros((int(max(own.max() for own in lines)) + 2, shape[1]))
        self.arrived_forward, self.arrived_backward = np.zeros(shape), np.zeros(shape)

    def forward(self, stages: Indices, micro_batch: Indices) -> None:
        """Of each of these stages that has one."""
        own = stages[(micro_batch >= 0) & (micro_batch < self.micro_batches)]
        if not len(own):
            return
        starts = np.maximum(self.free[own], self.arrived_forward[own])
        ends = self._launch(own, starts, self.costs.forward[own], self.costs.forward_launch)
        self.free[own] = ends
        sends = own < len(self.free) - 1
        self._send(own[sends], ends[sends], 0, self.arrived_forward, own[sends] + 1, own[sends])

    def backward(self, stages: Indices, micro_batch: Indices, first: int) -> None:
        """The same; micro-batch `first` is the one that adds to no gradients."""
        has = (micro_batch >= 0) & (micro_batch < self.micro_batches)
        own, numbers = stages[has], micro_batch[has]
        if not len(own):
            return
        seconds = self.costs.backward[own]
        if (numbers == first).any():
            seconds = np.where((numbers == first)[:, None], seconds - self.costs.accumulation[own], seconds)
        starts = np.maximum(self.free[own], self.arrived_backward[own])
        ends = self._launch(own, starts, seconds, self.costs.backward_launch)
        self.free[own] = ends
        sends = own > 0
        self._send(own[sends], ends[sends], 1, self.arrived_backward, own[sends] - 1, own[sends] - 1)

    def _launch(self, own: Indices, starts: Array, seconds: Array, launch: Array | None) -> Array:
        """When the actions end that may start then, and no earlier than their launches do."""
        if launch is None:
            return starts + seconds
        begun = self.host_free[own]
        self.host_free[own] = launch_end = begun + launch[own]
        ends: Array = np.maximum(np.maximum(starts, begun) + seconds, launch_end)
        return ends

    def _send(
        self, own: Indices, ends: Array, way: int, arrived: Array, receivers: Indices, cuts: Indices
    ) -> None:
        lines = self.lines[way][own]
        sent = np.where((lines == NONE)[:, None], ends, np.maximum(ends, self.link_free[lines]))
        sent = sent + self.costs.occupancy[cuts]
        self.link_free[lines] = sent  # the last row is of what occupies nothing, and not looked at
        arrived[receivers] = sent + self.costs.latency[cuts]
