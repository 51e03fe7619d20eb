"""The order that a plan writes out, action by action: read, and judged like any other."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .orders import Action, Place, ScheduleOrder
from .report import ImpossiblePlan
from .wiring import most_in_flight

_ACTION = re.compile(r"([FBW])(\d{1,7})(?:\.(\d{1,3}))?")


def read_written_order(lines: Sequence[str], p: int, m: int, v: int) -> ScheduleOrder:
    """The order of p devices, m micro-batches and v parts of the layers on each device.

    Raises ImpossiblePlan for lines that are none; that the actions are complete and can be run is checked when
    they are wired."""
    places = "line"
    lists: dict[int, list[Action]] = {}
    for line in lines:
        key, _, content = line.partition(":")
        if key == "places":
            places = content.strip()
        elif key.startswith("device "):
            number = key.removeprefix("device ")
            if not number.isdigit() or len(number) > 7 or int(number) in lists:
                raise ImpossiblePlan(f"{line[:40]!r} is a line of no device, or of one that has one already")
            lists[int(number)] = [_action(word) for word in content.split()]
        elif key not in ("name", "source", "chunks"):
            raise ImpossiblePlan(f"{line[:40]!r} is no line of an order")
    if sorted(lists) != list(range(p)):
        raise ImpossiblePlan(f"the order is of {len(lists)} devices, the plan's pipeline has {p}")
    own = [lists[device] for device in range(p)]
    made = ScheduleOrder(own, [_route(places, p, v)], [0] * m, [1.0] * m, [0.0] * p, "as the plan writes it")
    if any(batch >= m or chunk >= v for actions in own for _, batch, chunk in actions):
        raise ImpossiblePlan(f"an action is of none of the {m} micro-batches, or of no part of its device")
    made.most_in_flight[:] = most_in_flight(made)
    return made


def _action(word: str) -> Action:
    found = _ACTION.fullmatch(word)
    if found is None:
        raise ImpossiblePlan(f"{word[:40]!r} is no action")
    return found[1], int(found[2]), int(found[3] or 0)


def _route(places: str, p: int, v: int) -> list[Place]:
    if places == "v" and v == 2:
        return [(device, 0) for device in range(p)] + [(device, 1) for device in reversed(range(p))]
    if places == "loop" or (places == "line" and v == 1):
        return [(device, chunk) for chunk in range(v) for device in range(p)]
    raise ImpossiblePlan(f"places {places[:40]!r} with {v} parts of the layers on a device")
