"""The engine's two loops over the actions of a program. Plain Python over lists, and compiled by numba over
arrays: the same code, of additions and comparisons alone, so the results are the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from heapq import heappop, heappush
from importlib.util import find_spec
from typing import Any, NamedTuple

from ..errors import MachineError


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
