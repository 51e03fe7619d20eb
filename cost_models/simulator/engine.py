"""The engine: a program and its costs -> start and end of every action and transfer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from ..errors import UsageError
from . import loops
from .action_costs import FREE, ActionCosts, has_static_link_order
from .costs import Array
from .dependencies import NONE, Indices, Order

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
        return "numba" if loops.worth_starting(seconds) else "python"
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
    loop: Callable[..., Any] = loops.compiled_loops().run_in_order if fast else loops.run_in_order
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
    loop: Callable[..., Any] = loops.compiled_loops().run_by_events if fast else loops.run_by_events
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
    """All candidates in one pass: `loops.run_in_order` on rows of them."""
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
    loops.compiled_loops().run_many_in_order(
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
