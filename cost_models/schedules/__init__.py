"""Schedules, a file each: the order in which a stage runs the forwards and backwards of its micro-batches."""

from __future__ import annotations

from ..errors import UsageError
from . import gpipe, one_f_one_b
from .action import Action, Schedule

SCHEDULES: dict[str, Schedule] = {
    schedule.name: schedule for schedule in (one_f_one_b.SCHEDULE, gpipe.SCHEDULE)
}


def schedule_named(name: str) -> Schedule:
    """The schedule of that name. Raises UsageError, with the names there are."""
    try:
        return SCHEDULES[name]
    except KeyError:
        raise UsageError(
            f"schedule {name!r} is unknown", f"Use one of: {', '.join(sorted(SCHEDULES))}."
        ) from None


__all__ = ["SCHEDULES", "Action", "Schedule", "schedule_named"]
