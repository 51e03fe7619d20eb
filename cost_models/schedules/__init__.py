"""Schedules, a file each: the order in which devices run the forwards and backwards; by name, and cached."""

from __future__ import annotations

from collections import OrderedDict

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


def find_schedule(name: str) -> Schedule:
    """The schedule of that name. Raises UsageError, with the names there are."""
    try:
        return SCHEDULES[name]
    except KeyError:
        raise UsageError(
            f"schedule {short_repr(name)} is unknown", f"Use one of: {', '.join(sorted(SCHEDULES))}."
        ) from None


__all__ = [
    "MOST_COPIES",
    "PUBLISHED",
    "SCHEDULES",
    "Action",
    "Program",
    "Schedule",
    "StageSlot",
    "find_schedule",
]


KEPT_ACTIONS = 500_000
"""Of all kept programs together, where they are several: some 300 bytes each."""


class ProgramCache:
    """The programs used last, of at most so many actions together, but always the last one."""

    def __init__(self, most: int) -> None:
        self.most, self.actions = most, 0
        self.programs: OrderedDict[tuple[str, int, int], Program] = OrderedDict()

    def program(self, schedule: str, stages: int, micro_batches: int) -> Program:
        """The program of a schedule by name."""
        key = (schedule, stages, micro_batches)
        if key in self.programs:
            self.programs.move_to_end(key)
            return self.programs[key]
        program = self.programs[key] = find_schedule(schedule).program(stages, micro_batches)
        self.actions += _actions(program)
        while self.actions > self.most and len(self.programs) > 1:
            _, oldest = self.programs.popitem(last=False)
            self.actions -= _actions(oldest)
        return program

    def forget(self, schedule: str) -> None:
        """Drops the programs of a schedule."""
        for key in [key for key in self.programs if key[0] == schedule]:
            self.actions -= _actions(self.programs.pop(key))


def _actions(program: Program) -> int:
    return sum(len(own) for own in program.actions)


PROGRAMS = ProgramCache(KEPT_ACTIONS)
cached_program = PROGRAMS.program
