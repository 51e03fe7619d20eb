"""Whether the lists of a schedule's text can be run to their end: no device waits for another for ever."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

from .action import Action, StageSlot
from .text_reader import ScheduleTextError

MOST_NAMED = 3
"""Devices of a circle that are named."""


def check_progress(
    actions: Sequence[Sequence[Action]], pipe: Sequence[StageSlot], lines: Sequence[int]
) -> None:
    """Raises ScheduleTextError where devices wait for each other for ever, with those that do."""
    part_of = {slot: part for part, slot in enumerate(pipe)}
    done: set[tuple[str, int, int]] = set()
    at = [0] * len(actions)
    moved = True
    while moved:
        moved = False
        for device, own in enumerate(actions):
            while at[device] < len(own):
                action = own[at[device]]
                part = part_of[StageSlot(device, action.chunk)]
                if not _needs(action, part, len(pipe)) <= done:
                    break
                done.add((action.kind, action.micro_batch, part))
                at[device] += 1
                moved = True
    waits = dict[int, tuple[Action, str, int]]()
    for device, own in enumerate(actions):
        if at[device] < len(own):
            action = own[at[device]]
            part = part_of[StageSlot(device, action.chunk)]
            # What the device itself does later comes first, as it waits for that whatever the others do.
            kind, m, other = min(
                sorted(_needs(action, part, len(pipe)) - done),
                key=lambda need: pipe[need[2]].device != device,
            )
            waits[device] = action, f"{kind}{m}", pipe[other].device
    if waits:
        _refuse_circle(waits, lines)


def _refuse_circle(waits: Mapping[int, tuple[Action, str, int]], lines: Sequence[int]) -> NoReturn:
    """Of the devices that wait for ever: at which action, for what of which device; the first circle."""
    order, device = list[int](), min(waits)
    while device not in order:
        order.append(device)
        device = waits[device][2]
    circle = order[order.index(device) :]
    first = circle.index(min(circle))
    places = [
        f"line {lines[own]}: device {own} waits for ever at {action}, for {missing} of device {other}"
        for own in (*circle[first:], *circle[:first])
        for action, missing, other in [waits[own]]
    ]
    raise ScheduleTextError(
        "; ".join(places[:MOST_NAMED]),
        "Order the actions so that what an action needs comes first: F of the part before, B of the "
        "part after, and F, B, W of one micro-batch in this order.",
    )


def _needs(action: Action, part: int, parts: int) -> set[tuple[str, int, int]]:
    """What must have run before, as (kind, micro-batch, part)."""
    kind, m = action.kind, action.micro_batch
    if kind == "F":
        return {("F", m, part - 1)} if part else set()
    if kind == "W":
        return {("B", m, part)}
    return {("F", m, part)} | ({("B", m, part + 1)} if part + 1 < parts else set())
