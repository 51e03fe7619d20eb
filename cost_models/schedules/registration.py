"""Schedules of the user's own: registered by name, from a text, a file or a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import arguments
from ..errors import FileError, UsageError, short_repr
from ..text_files import read_text
from . import PROGRAMS, PUBLISHED, SCHEDULES, Program, Schedule

if TYPE_CHECKING:
    from .schedule_text import ScheduleText

WORDS = ("auto", "any", "synthesized")
"""That stand for a choice of schedules."""
SUFFIX = ".schedule"
LARGEST = 20_000_000
"""Bytes of a file."""


def register_schedule(schedule: Schedule | ScheduleText | str) -> Schedule:
    """Makes a schedule known by its name, to whatever takes one; a text is that of `schedule_text`.

    >>> import pplan
    >>> schedule = pplan.register_schedule("name: fill-drain\\ndevice i: F*m B*m")
    >>> pplan.simulate_costs(
    ...     schedule="fill-drain", stages=4, micro_batches=8, forward_ms=10, backward_ms=20
    ... )
    <SimulatedStep: 4 stages, 8 micro-batches, 330 ms a step, bubble 27.3 %>

    Another of the same name is replaced. Raises UsageError for the name of a published schedule, and for a
    text that is none.
    """
    from .schedule_text import ScheduleText, read_schedule  # most commands read none
    from .text_reader import HELP

    if not isinstance(schedule, str | ScheduleText | Schedule):
        raise UsageError(
            f"schedule={short_repr(schedule)}: is not a text of a schedule", f"Give its lines. {HELP}"
        )
    text = read_schedule(schedule) if isinstance(schedule, str) else schedule
    own = text.schedule if isinstance(text, ScheduleText) else text
    if own.name in (*PUBLISHED, *WORDS):
        raise UsageError(f"schedule {own.name!r} is pplan's own", "Give yours another name.")
    _ORDERS.pop(own.name, None)
    PROGRAMS.forget(own.name)
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
    other = SCHEDULES[text.name].program(*counts) if orders is None else orders.setdefault(counts, program)
    if (other.actions, other.pipes) != (program.actions, program.pipes):
        raise UsageError(
            f"schedule {text.name!r} is known with another order for {stages} devices and {micro_batches} "
            "micro-batches",
            "Rename one of the two.",
        )
    return SCHEDULES[text.name]


def _order_of_a_plan(name: str, *counts: int) -> Program:
    orders = _ORDERS.get(name, {})
    if counts not in orders:
        numbers = "; ".join(f"{p} devices with {m} micro-batches" for p, m, _ in orders)
        raise UsageError(
            f"schedule {name!r} is known of a plan alone, for {numbers}, and not for {counts[0]} with "
            f"{counts[1]}",
            "Give the schedule's own file.",
        )
    return orders[counts]


def read_schedule_file(path: Path) -> str:
    """The name of the schedule that a file describes, which is known from now on.

    Raises FileError for a file that cannot be read, UsageError, with the line, for what is no schedule.
    """
    from .text_reader import HELP, ScheduleTextError

    if path.is_file() and path.stat().st_size > LARGEST:
        raise FileError(f"{path}: has more than {LARGEST} bytes", HELP)
    try:
        return register_schedule(read_text(path, "schedule")).name
    except ScheduleTextError as error:
        raise UsageError(f"{path}: {error.what}", error.hint) from error


def schedule_word(field: str, value: Any, besides: Sequence[str] = WORDS) -> str:
    """The name of a known schedule, a word `besides`, or the name of the one that the file `value` describes.

    Raises UsageError for a name that is not known.
    """
    text = str(value) if isinstance(value, Path) else arguments.word(field, value)
    if text.endswith(SUFFIX):
        return read_schedule_file(Path(text))
    if text in besides or text in SCHEDULES:
        return text
    raise arguments.unknown_word(field, text, (*besides, *SCHEDULES), f"; or a file of your own, my{SUFFIX}")


def optional_schedule(field: str, value: Any) -> str | None:
    """The same, or None."""
    return None if value is None else schedule_word(field, value, ())
