"""Schedules, a file each: the order in which devices run the forwards and backwards of micro-batches."""

from __future__ import annotations

from ..errors import UsageError
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
MOST_COPIES = max(schedule.copies for schedule in _ALL)
"""Of the weights of a layer, that a micro-batch may be the first of."""


def schedule_named(name: str) -> Schedule:
    """The schedule of that name. Raises UsageError, with the names there are."""
    try:
        return SCHEDULES[name]
    except KeyError:
        raise UsageError(
            f"schedule {name!r} is unknown", f"Use one of: {', '.join(sorted(SCHEDULES))}."
        ) from None


__all__ = ["MOST_COPIES", "SCHEDULES", "Action", "Program", "Schedule", "StageSlot", "schedule_named"]
