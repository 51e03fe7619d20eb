"""What every action of an order waits for, and the clock on which each action takes one tick.

F waits for the F of the place before, B for the B of the place after and the F of its own, W for the B of its
own; each for the action before it on its device.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from .orders import Action, ScheduleOrder
from .report import NotLegal

NONE = -1


@dataclass(frozen=True, eq=False)
class Wired:
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


Named = tuple[str, int, int]
"""A kind, a micro-batch and a part: of all actions one."""


def wired(order: ScheduleOrder) -> Wired:
    """Raises NotLegal for an order that misses or repeats an action, or whose actions wait in a circle."""
    devices = [device for device, own in enumerate(order.lists) for _ in own]
    actions = [action for own in order.lists for action in own]
    part_at = {(way, *place): part for way, own in enumerate(order.routes) for part, place in enumerate(own)}
    where: dict[Named, int] = {}
    for index, (device, (kind, batch, chunk)) in enumerate(zip(devices, actions, strict=True)):
        part = part_at.get((order.route_of[batch], device, chunk))
        if part is None or (kind, batch, part) in where:
            raise NotLegal(f"device {device} runs {kind}{batch}.{chunk} twice, or not where it belongs")
        where[kind, batch, part] = index
    _check_whole(order, where)
    names = sorted(where, key=where.__getitem__)
    needs = [_needs(name, where, order.parts) for name in names]
    before = [index - 1 if index and devices[index - 1] == own else NONE for index, own in enumerate(devices)]
    clock = _by_clock(
        [[*own, last] if last != NONE else own for own, last in zip(needs, before, strict=True)]
    )
    return _in_order(order, clock, devices, actions, names, needs, before, where)


def _check_whole(order: ScheduleOrder, where: dict[Named, int]) -> None:
    for batch in range(len(order.route_of)):
        for part in range(order.parts):
            if ("F", batch, part) not in where or ("B", batch, part) not in where:
                raise NotLegal(f"F or B of micro-batch {batch} is missing on part {part} of the layers")


def _needs(name: Named, where: dict[Named, int], parts: int) -> list[int]:
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
        raise NotLegal("some actions wait for each other in a circle")
    return clock


def _in_order(
    order: ScheduleOrder,
    clock: list[int],
    devices: list[int],
    actions: list[Action],
    names: list[Named],
    needs: list[list[int]],
    before: list[int],
    where: dict[Named, int],
) -> Wired:
    rank = [0] * len(clock)
    for position, index in enumerate(clock):
        rank[index] = position
    source, target = [NONE] * len(clock), [NONE] * len(clock)
    for index, own in enumerate(needs):
        for needed in own:
            if devices[needed] != devices[index]:
                source[rank[index]], target[rank[needed]] = rank[needed], rank[index]
    split = {(batch, part) for kind, batch, part in where if kind == "W"}
    return Wired(
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


def check_order(order: ScheduleOrder) -> Wired:
    """The order with what waits for what. Raises NotLegal also where a device holds more micro-batches than
    its schedule's definition says."""
    made = wired(order)
    for device, (held, most) in enumerate(zip(most_in_flight(order), order.most_held, strict=True)):
        if held > most + 1e-9:
            raise NotLegal(f"device {device} holds {held:g} micro-batches, {most:g} at the most are allowed")
    return made


def cuts_crossed(order: ScheduleOrder) -> list[tuple[int, int, int, int]]:
    """(route, part before the cut, device before, device after) where a cut lies between two devices."""
    return [
        (way, part, here, there)
        for way, own in enumerate(order.routes)
        for part, ((here, _), (there, _)) in enumerate(pairwise(own))
        if here != there
    ]
