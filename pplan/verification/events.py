"""A plain event loop: when every action of an order starts and ends.

A device runs its list in order, one action at a time, each when the one before has ended and what it needs
has arrived. What an action sends is ready when it ends; it leaves through a port, which serves one transfer
at a time, in the order in which they are ready (of several at once the first by the clock), each for its
occupancy; it arrives its latency later. Where one process launches for all devices, launches follow one
another in the order of the clock; an action neither starts before its launch starts nor ends before it ends.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from heapq import heappop, heappush

from .wiring import NONE, Wired

ENDS, ARRIVES, ASKS = range(3)
"""Events of one moment in this order: all that can run does before a port chooses."""


@dataclass(frozen=True, eq=False)
class StepWork:
    """Seconds by action, in the order of the clock. `port`: what a transfer leaves through, None where it
    waits for no other; `launched` and `launch_end` on the host, None where it is never late. `blocking`: a
    device starts nothing until what it sent has arrived."""

    wired: Wired
    seconds: list[float]
    port: list[Hashable | None]
    occupancy: list[float]
    latency: list[float]
    launched: list[float] | None = None
    launch_end: list[float] | None = None
    blocking: bool = False


@dataclass(frozen=True, eq=False)
class Ran:
    """By action its start and end; by device when it is free."""

    start: list[float]
    end: list[float]
    free: list[float]


class _Loop:
    def __init__(self, work: StepWork) -> None:
        wiring = work.wired
        count = len(wiring)
        self.work, self.wiring = work, wiring
        self.start, self.end = [0.0] * count, [0.0] * count
        self.free = [0.0] * wiring.order.devices
        self.following = [NONE] * count
        for index, before in enumerate(wiring.before):
            if before != NONE:
                self.following[before] = index
        self.waits = [
            (before != NONE) + (source != NONE)
            for before, source in zip(wiring.before, wiring.source, strict=True)
        ]
        self.events: list[tuple[float, int, int]] = []
        self.port_free: dict[Hashable, float] = {}

    def run(self) -> Ran:
        for index, count in enumerate(self.waits):
            if not count:
                self._begin(index)
        while self.events:
            now, what, index = heappop(self.events)
            (self._ended, self._arrived, self._served)[what](now, index)
        return Ran(self.start, self.end, self.free)

    def _begin(self, index: int) -> None:
        work = self.work
        if work.launched is not None:
            self.start[index] = max(self.start[index], work.launched[index])
        end = self.start[index] + work.seconds[index]
        if work.launch_end is not None:
            end = max(end, work.launch_end[index])
        self.end[index] = end
        heappush(self.events, (end, ENDS, index))

    def _meets(self, index: int, now: float) -> None:
        """One of the things that an action waits for has happened."""
        if index == NONE:
            return
        self.start[index] = max(self.start[index], now)
        self.waits[index] -= 1
        if not self.waits[index]:
            self._begin(index)

    def _ended(self, now: float, index: int) -> None:
        sends = self.wiring.target[index] != NONE
        if sends:
            heappush(self.events, (now, ASKS, index))
        if not (sends and self.work.blocking):
            self._released(now, index)

    def _released(self, now: float, index: int) -> None:
        device = self.wiring.device[index]
        self.free[device] = max(self.free[device], now)
        self._meets(self.following[index], now)

    def _served(self, now: float, index: int) -> None:
        begin, port = now, self.work.port[index]
        if port is not None:
            begin = max(now, self.port_free.get(port, 0.0))
            self.port_free[port] = begin + self.work.occupancy[index]
        arrival = begin + self.work.occupancy[index] + self.work.latency[index]
        heappush(self.events, (arrival, ARRIVES, index))

    def _arrived(self, now: float, index: int) -> None:
        if self.work.blocking:
            self._released(now, index)
        self._meets(self.wiring.target[index], now)


def run(work: StepWork) -> Ran:
    """Runs all of it."""
    return _Loop(work).run()
