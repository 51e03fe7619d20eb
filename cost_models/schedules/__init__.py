"""Schedules, a file each: the order in which devices run the forwards and backwards; by name, and cached."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from functools import partial

from ..errors import UsageError, short_repr
from . import (
    autopipe,
    avgpipe,
    chimera,
    dapple,
    dualpipe_v,
    gpipe,
    interleaved,
    looped_bfs,
    naive,
    one_f_one_b,
    pipedream,
    pipedream_2bw,
    wpipe,
    xpipe,
    zb_h1,
    zb_h2,
    zb_v,
)
from .action import Action, Program, Schedule, StageSlot
from .schedule_text import ScheduleText, read_schedule

_ALL = (
    naive.SCHEDULE,
    gpipe.SCHEDULE,
    one_f_one_b.SCHEDULE,
    dapple.SCHEDULE,
    interleaved.SCHEDULE,
    looped_bfs.SCHEDULE,
    chimera.SCHEDULE,
    zb_h1.SCHEDULE,
    zb_h2.SCHEDULE,
    zb_v.SCHEDULE,
    dualpipe_v.SCHEDULE,
    pipedream.SCHEDULE,
    pipedream_2bw.SCHEDULE,
    wpipe.SCHEDULE,
    xpipe.SCHEDULE,
    avgpipe.SCHEDULE,
    autopipe.SCHEDULE,
)

SCHEDULES: dict[str, Schedule] = {schedule.name: schedule for schedule in _ALL}
"""Those of papers, and those that the user registered."""
PUBLISHED = frozenset(SCHEDULES)
MOST_COPIES = max(schedule.copies for schedule in _ALL)
"""Of the weights of a layer, that a micro-batch may be the first of."""


def schedule_named(name: str) -> Schedule:
    """The schedule of that name. Raises UsageError, with the names there are."""
    try:
        return SCHEDULES[name]
    except KeyError:
        raise UsageError(
            f"schedule {short_repr(name)} is unknown", f"Use one of: {', '.join(sorted(SCHEDULES))}."
        ) from None


def register_schedule(schedule: Schedule | ScheduleText | str) -> Schedule:
    """Makes a schedule known by its name, to whatever takes one; a text is that of `schedule_text`.

    Another of the same name is replaced. Raises UsageError for the name of a published schedule, and for a
    text that is none.
    """
    text = read_schedule(schedule) if isinstance(schedule, str) else schedule
    own = text.schedule if isinstance(text, ScheduleText) else text
    if own.name in PUBLISHED:
        raise UsageError(f"schedule {own.name!r} is pplan's own", "Give yours another name.")
    _ORDERS.pop(own.name, None)
    _CACHE.forget(own.name)
    SCHEDULES[own.name] = own
    return own


_Counts = tuple[int, int, int]
_ORDERS: dict[str, dict[_Counts, Program]] = {}
"""Of schedules that are known from plans alone: by name, devices, micro-batches and virtual stages."""


def register_order(text: ScheduleText, stages: int, micro_batches: int, virtual_stages: int) -> Schedule:
    """The schedule of a plan's order, which says what is done with these numbers alone: registered, unless it
    is known and does the same.

    Raises UsageError where the text is not of these numbers, or a schedule of this name does otherwise.
    """
    counts = (stages, micro_batches, virtual_stages)
    program = text.program(*counts)
    if text.name not in SCHEDULES:
        register_schedule(replace(text.schedule, build=partial(_order_of_a_plan, text.name)))
        _ORDERS[text.name] = {}
    orders = _ORDERS.get(text.name)
    known = SCHEDULES[text.name].program(*counts) if orders is None else orders.setdefault(counts, program)
    if (known.actions, known.pipes) != (program.actions, program.pipes):
        raise UsageError(
            f"schedule {text.name!r} is known with another order for {stages} devices and {micro_batches} "
            "micro-batches",
            "Rename one of the two.",
        )
    return SCHEDULES[text.name]


def _order_of_a_plan(name: str, *counts: int) -> Program:
    orders = _ORDERS.get(name, {})
    if counts not in orders:
        known = "; ".join(f"{p} devices with {m} micro-batches" for p, m, _ in orders)
        raise UsageError(
            f"schedule {name!r} is known of a plan alone, for {known}: not for {counts[0]} with {counts[1]}",
            "Give the schedule's own file.",
        )
    return orders[counts]


__all__ = [
    "MOST_COPIES",
    "PUBLISHED",
    "SCHEDULES",
    "Action",
    "Program",
    "Schedule",
    "StageSlot",
    "register_order",
    "register_schedule",
    "schedule_named",
]


KEPT_ACTIONS = 500_000
"""Of all kept programs together: some 300 bytes each."""


class ProgramCache:
    """The programs used last, of at most so many actions together."""

    def __init__(self, most: int) -> None:
        self.most, self.actions = most, 0
        self.programs: OrderedDict[tuple[str, int, int], Program] = OrderedDict()

    def program(self, schedule: str, stages: int, micro_batches: int) -> Program:
        """The program of a schedule by name."""
        key = (schedule, stages, micro_batches)
        if key in self.programs:
            self.programs.move_to_end(key)
            return self.programs[key]
        program = self.programs[key] = schedule_named(schedule).program(stages, micro_batches)
        self.actions += _actions(program)
        while self.actions > self.most:
            _, oldest = self.programs.popitem(last=False)
            self.actions -= _actions(oldest)
        return program

    def forget(self, schedule: str) -> None:
        """Drops the programs of a schedule."""
        for key in [key for key in self.programs if key[0] == schedule]:
            self.actions -= _actions(self.programs.pop(key))


def _actions(program: Program) -> int:
    return sum(len(own) for own in program.actions)


_CACHE = ProgramCache(KEPT_ACTIONS)
cached_program = _CACHE.program
