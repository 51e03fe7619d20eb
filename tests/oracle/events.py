"""What every action of an order waits for, when it is launched, and an event loop.

F waits for the F of the part before, B for the B of the part after and the F of its own, W for the B of its
own; each for the action before it on its device. They are sorted on a clock on which each takes one tick.

A device runs its list in order, one action at a time. What an action sends is ready when it ends; it leaves
through a port, which serves one transfer at a time, in the order in which they are ready (of several at once
the first by the clock), each for its occupancy; it arrives its latency later. An action neither starts before
its launch starts nor ends before it ends.

A process a device launches its device's list, one after another. One process for all devices has a thread a
device for the backwards, as PyTorch's autograd engine has, and launches everything that is Python one after
another: forwards, and what backwards run again of them. A backward's launch waits for the one before on its
device, for that of the backward its gradients come from, and for the forwards before it on the clock; a
forward waits for all backwards before it. No launch waits for a device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise

from .orders import Action, ImpossiblePlanError, Order

NONE = -1
ActionName = tuple[str, int, int]
"""A kind, a micro-batch and a part: of all actions one."""


@dataclass
class WiredAction:
    """An action of a device, its part of the layers, and the numbers of others: of the one `before` it on its
    device, of the `source` that it receives from, of the `target` that receives from it."""

    device: int
    action: Action
    part: int
    before: int
    source: int = NONE
    target: int = NONE


def wire_order(order: Order) -> list[WiredAction]:
    """Every action, sorted by its tick, of one tick by device. Raises ImpossiblePlanError for an order that
    misses or repeats an action, or whose actions wait in a circle."""
    part_at = {(i, *slot): part for i, route in enumerate(order.routes) for part, slot in enumerate(route)}
    where: dict[ActionName, int] = {}
    wired = list[WiredAction]()
    for device, actions in enumerate(order.lists):
        for position, (kind, batch, chunk) in enumerate(actions):
            part = part_at.get((order.route_of[batch], device, chunk))
            if part is None or (kind, batch, part) in where:
                raise ImpossiblePlanError(f"device {device} runs {kind}{batch}.{chunk} twice, or elsewhere")
            where[kind, batch, part] = len(wired)
            wired.append(
                WiredAction(device, (kind, batch, chunk), part, len(wired) - 1 if position else NONE)
            )
    for batch in range(len(order.route_of)):
        for part in range(order.parts):
            if ("F", batch, part) not in where or ("B", batch, part) not in where:
                raise ImpossiblePlanError(f"F or B of micro-batch {batch} is missing on part {part}")
    needs = [_needs(name, where, order.parts) for name in where]
    waits = [[*own, wired[i].before] if wired[i].before != NONE else own for i, own in enumerate(needs)]
    clock = _sort_by_tick(waits)
    rank = {index: position for position, index in enumerate(clock)} | {NONE: NONE}
    for index, needed in ((index, needed) for index, own in enumerate(needs) for needed in own):
        if wired[needed].device != wired[index].device:
            wired[index].source, wired[needed].target = rank[needed], rank[index]
    for action in wired:
        action.before = rank[action.before]
    return [wired[index] for index in clock]


def _needs(name: ActionName, where: dict[ActionName, int], parts: int) -> list[int]:
    kind, batch, part = name
    if kind == "F":
        return [where["F", batch, part - 1]] if part else []
    if kind == "W":
        return [where["B", batch, part]]
    later = [where["B", batch, part + 1]] if part + 1 < parts else []
    return [*later, where["F", batch, part]]


def _sort_by_tick(needs: list[list[int]]) -> list[int]:
    """All actions by the tick in which they run, where each takes one; of one tick as they are listed."""
    left = [len(needed) for needed in needs]
    followers = defaultdict[int, list[int]](list)
    for index, needed in enumerate(needs):
        for other in needed:
            followers[other].append(index)
    now, clock = [index for index, count in enumerate(left) if not count], list[int]()
    while now:
        clock += now
        following = []
        for follower in (follower for index in now for follower in followers[index]):
            left[follower] -= 1
            if not left[follower]:
                following.append(follower)
        now = sorted(following)
    if len(clock) < len(needs):
        raise ImpossiblePlanError("some actions wait for each other in a circle")
    return clock


def list_crossed_cuts(order: Order) -> list[tuple[int, int, int, int]]:
    """(route, part before the cut, device before, device after) where a cut lies between two devices."""
    return [
        (number, part, here, there)
        for number, route in enumerate(order.routes)
        for part, ((here, _), (there, _)) in enumerate(pairwise(route))
        if here != there
    ]


def launch_times(
    wired: list[WiredAction], again: list[float], rest: list[float], *, one_process: bool
) -> tuple[list[float], list[float]]:
    """By action, when its launch starts and ends. By action, `again` are the host's seconds of the forward
    that runs again, which comes first, and `rest` those of the rest."""
    starts, ends = list[float](), list[float]()
    forwards = backwards = repeated = 0.0
    threads = defaultdict[int, float](float)
    for action, first, second in zip(wired, again, rest, strict=True):
        device, is_forward = action.device, action.action[0] == "F"
        start = threads[device]
        if one_process:
            source = ends[action.source] if action.source != NONE and not is_forward else 0.0
            start = max(forwards, backwards if is_forward else start, source, repeated if first > 0 else 0.0)
        end = start + (first + second)
        starts.append(start)
        ends.append(end)
        if is_forward and one_process:
            forwards = end
        else:
            threads[device] = end
            backwards, repeated = max(backwards, end), max(repeated, start + first)
    return starts, ends


ENDS, ARRIVES, ASKS = range(3)
"""Events of one moment in this order: all that can run does before a port chooses."""


Transport = tuple[Hashable, float, float]
"""What a transfer leaves through, for how long it occupies that, and its latency."""


def simulate(
    wired: list[WiredAction],
    seconds: list[float],
    transfers: list[Transport | None],
    launches: tuple[list[float], list[float]],
) -> tuple[list[float], list[float]]:
    """By action its start and end. `launches`: when they start and end on the host."""
    start, end = list(launches[0]), [0.0] * len(wired)
    following = {action.before: index for index, action in enumerate(wired)}
    waits = [(action.before != NONE) + (action.source != NONE) for action in wired]
    events: list[tuple[float, int, int]] = []
    port_free = defaultdict[Hashable, float](float)

    def satisfy(index: int, now: float, number: int = 1) -> None:
        """Begin the action where all that it waits for has happened."""
        if index == NONE:
            return
        start[index] = max(start[index], now)
        waits[index] -= number
        if not waits[index]:
            end[index] = max(start[index] + seconds[index], launches[1][index])
            heappush(events, (end[index], ENDS, index))

    for index in [index for index, number in enumerate(waits) if not number]:
        satisfy(index, 0.0, 0)
    while events:
        now, what, index = heappop(events)
        if what == ENDS:
            satisfy(following.get(index, NONE), now)
            if wired[index].target != NONE:
                heappush(events, (now, ASKS, index))
        elif what == ARRIVES:
            satisfy(wired[index].target, now)
        else:
            port, occupancy, latency = transfers[index] or (None, 0.0, 0.0)
            sent = max(now, port_free[port]) + occupancy
            port_free[port] = sent
            heappush(events, (sent + latency, ARRIVES, index))
    return start, end
