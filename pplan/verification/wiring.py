"""What every action of an order waits for, and an event loop: when every action starts and ends.

F waits for the F of the part before, B for the B of the part after and the F of its own, W for the B of its
own; each for the action before it on its device. They are sorted on a clock on which each takes one tick.

A device runs its list in order, one action at a time. What an action sends is ready when it ends; it leaves
through a port, which serves one transfer at a time, in the order in which they are ready (of several at once
the first by the clock), each for its occupancy; it arrives its latency later. An action neither starts before
its launch starts nor ends before it ends (`launch_times`).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise

from .orders import Action, ScheduleOrder
from .report import ImpossiblePlan

NONE = -1


@dataclass(frozen=True, eq=False)
class WiredOrder:
    """Every action, sorted by its tick (of one tick by device): its device, the action itself, its part of
    the layers and its route. `before`: the action before it on its device; `source`: what it receives from
    another device; `target`: what receives from it. `last`: whether it ends its micro-batch's work there.
    """

    order: ScheduleOrder
    device: list[int]
    action: list[Action]
    part: list[int]
    route: list[int]
    before: list[int]
    source: list[int]
    target: list[int]
    last: list[bool]

    def __len__(self) -> int:
        return len(self.device)


ActionName = tuple[str, int, int]
"""A kind, a micro-batch and a part: of all actions one."""


def wire_order(order: ScheduleOrder) -> WiredOrder:
    """Raises NotLegal for an order that misses or repeats an action, or whose actions wait in a circle."""
    devices = [device for device, own in enumerate(order.lists) for _ in own]
    actions = [action for own in order.lists for action in own]
    part_at = {(way, *place): part for way, own in enumerate(order.routes) for part, place in enumerate(own)}
    where: dict[ActionName, int] = {}
    for index, (device, (kind, batch, chunk)) in enumerate(zip(devices, actions, strict=True)):
        part = part_at.get((order.route_of[batch], device, chunk))
        if part is None or (kind, batch, part) in where:
            raise ImpossiblePlan(f"device {device} runs {kind}{batch}.{chunk} twice, or not where it belongs")
        where[kind, batch, part] = index
    _check_whole(order, where)
    names = sorted(where, key=where.__getitem__)
    needs = [_needs(name, where, order.parts) for name in names]
    before = [index - 1 if index and devices[index - 1] == own else NONE for index, own in enumerate(devices)]
    clock = _by_clock(
        [[*own, last] if last != NONE else own for own, last in zip(needs, before, strict=True)]
    )
    return _in_order(order, clock, devices, actions, names, needs, before, where)


def _check_whole(order: ScheduleOrder, where: dict[ActionName, int]) -> None:
    for batch in range(len(order.route_of)):
        for part in range(order.parts):
            if ("F", batch, part) not in where or ("B", batch, part) not in where:
                raise ImpossiblePlan(f"F or B of micro-batch {batch} is missing on part {part} of the layers")


def _needs(name: ActionName, where: dict[ActionName, int], parts: int) -> list[int]:
    kind, batch, part = name
    if kind == "F":
        return [where["F", batch, part - 1]] if part else []
    if kind == "W":
        return [where["B", batch, part]]
    own = [where["F", batch, part]]
    return [where["B", batch, part + 1], *own] if part + 1 < parts else own


def _by_clock(needs: list[list[int]]) -> list[int]:
    """All actions by the tick in which they run, where each takes one; of one tick as they are listed."""
    left = [len(own) for own in needs]
    followers: list[list[int]] = [[] for _ in needs]
    for index, own in enumerate(needs):
        for needed in own:
            followers[needed].append(index)
    now, clock = [index for index, count in enumerate(left) if not count], list[int]()
    while now:
        clock += now
        following = []
        for index in now:
            for other in followers[index]:
                left[other] -= 1
                if not left[other]:
                    following.append(other)
        now = sorted(following)
    if len(clock) < len(needs):
        raise ImpossiblePlan("some actions wait for each other in a circle")
    return clock


def _in_order(
    order: ScheduleOrder,
    clock: list[int],
    devices: list[int],
    actions: list[Action],
    names: list[ActionName],
    needs: list[list[int]],
    before: list[int],
    where: dict[ActionName, int],
) -> WiredOrder:
    rank = [0] * len(clock)
    for position, index in enumerate(clock):
        rank[index] = position
    source, target = [NONE] * len(clock), [NONE] * len(clock)
    for index, own in enumerate(needs):
        for needed in own:
            if devices[needed] != devices[index]:
                source[rank[index]], target[rank[needed]] = rank[needed], rank[index]
    split = {(batch, part) for kind, batch, part in where if kind == "W"}
    return WiredOrder(
        order=order,
        device=[devices[index] for index in clock],
        action=[actions[index] for index in clock],
        part=[names[index][2] for index in clock],
        route=[order.route_of[names[index][1]] for index in clock],
        before=[NONE if before[index] == NONE else rank[before[index]] for index in clock],
        source=source,
        target=target,
        last=[names[i][0] == "W" or (names[i][0] == "B" and names[i][1:] not in split) for i in clock],
    )


def most_in_flight(order: ScheduleOrder) -> list[float]:
    """By device, the most micro-batches that it holds: from the start of F to the end of W, of B without one.
    A chunk that is 1/v of the device's layers counts 1/v; whole copies of a stage count in full."""
    most = []
    chunks = len(set(order.routes[0])) / len({device for device, _ in order.routes[0]})
    for own in order.lists:
        split = {action[1:] for action in own if action[0] == "W"}
        level = peak = 0.0
        for kind, batch, chunk in own:
            if kind == "F":
                level += order.shares[batch]
                peak = max(peak, level)
            elif kind == "W" or (batch, chunk) not in split:
                level -= order.shares[batch]
        most.append(peak / chunks)
    return most


def check_order(order: ScheduleOrder) -> WiredOrder:
    """The order with what waits for what. Raises NotLegal also where a device holds more micro-batches than
    its schedule's definition says."""
    wired_order = wire_order(order)
    for device, (in_flight, most) in enumerate(zip(most_in_flight(order), order.most_in_flight, strict=True)):
        if in_flight > most + 1e-9:
            raise ImpossiblePlan(
                f"device {device} holds {in_flight:g} micro-batches, {most:g} at the most are allowed"
            )
    return wired_order


def cuts_crossed(order: ScheduleOrder) -> list[tuple[int, int, int, int]]:
    """(route, part before the cut, device before, device after) where a cut lies between two devices."""
    return [
        (way, part, here, there)
        for way, own in enumerate(order.routes)
        for part, ((here, _), (there, _)) in enumerate(pairwise(own))
        if here != there
    ]


ENDS, ARRIVES, ASKS = range(3)
"""Events of one moment in this order: all that can run does before a port chooses."""


@dataclass(frozen=True, eq=False)
class StepWork:
    """Seconds by action, in the order of the clock. `port`: what a transfer leaves through, None where it
    waits for no other; `launched` and `launch_end` on the host, None where it is never late. `blocking`: a
    device starts nothing until what it sent has arrived."""

    wired_order: WiredOrder
    seconds: list[float]
    port: list[Hashable | None]
    occupancy: list[float]
    latency: list[float]
    launch_start: list[float] | None = None
    launch_end: list[float] | None = None
    blocking: bool = False


@dataclass(frozen=True, eq=False)
class RunTimes:
    """By action its start and end; by device when it is free."""

    start: list[float]
    end: list[float]
    free: list[float]


class _Loop:
    def __init__(self, work: StepWork) -> None:
        wiring = work.wired_order
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

    def run(self) -> RunTimes:
        for index, count in enumerate(self.waits):
            if not count:
                self._begin(index)
        while self.events:
            now, what, index = heappop(self.events)
            (self._end_action, self._arrive, self._serve)[what](now, index)
        return RunTimes(self.start, self.end, self.free)

    def _begin(self, index: int) -> None:
        work = self.work
        if work.launch_start is not None:
            self.start[index] = max(self.start[index], work.launch_start[index])
        end = self.start[index] + work.seconds[index]
        if work.launch_end is not None:
            end = max(end, work.launch_end[index])
        self.end[index] = end
        heappush(self.events, (end, ENDS, index))

    def _satisfy(self, index: int, now: float) -> None:
        """One of the things that an action waits for has happened."""
        if index == NONE:
            return
        self.start[index] = max(self.start[index], now)
        self.waits[index] -= 1
        if not self.waits[index]:
            self._begin(index)

    def _end_action(self, now: float, index: int) -> None:
        sends = self.wiring.target[index] != NONE
        if sends:
            heappush(self.events, (now, ASKS, index))
        if not (sends and self.work.blocking):
            self._release(now, index)

    def _release(self, now: float, index: int) -> None:
        device = self.wiring.device[index]
        self.free[device] = max(self.free[device], now)
        self._satisfy(self.following[index], now)

    def _serve(self, now: float, index: int) -> None:
        begin, port = now, self.work.port[index]
        if port is not None:
            begin = max(now, self.port_free.get(port, 0.0))
            self.port_free[port] = begin + self.work.occupancy[index]
        arrival = begin + self.work.occupancy[index] + self.work.latency[index]
        heappush(self.events, (arrival, ARRIVES, index))

    def _arrive(self, now: float, index: int) -> None:
        if self.work.blocking:
            self._release(now, index)
        self._satisfy(self.wiring.target[index], now)


def simulate_events(work: StepWork) -> RunTimes:
    """Runs all of it."""
    return _Loop(work).run()
