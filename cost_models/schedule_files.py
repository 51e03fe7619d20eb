"""A schedule by its name, or by a file of its text."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import arguments
from .errors import FileError, UsageError
from .schedules import SCHEDULES, register_schedule
from .schedules.text_reader import HELP, ScheduleTextError

SUFFIX = ".schedule"
LARGEST = 20_000_000
"""Bytes of a file."""


def read_schedule_file(path: Path) -> str:
    """The name of the schedule that a file describes, which is known from now on.

    Raises FileError for a file that cannot be read, UsageError, with the line, for what is no schedule.
    """
    try:
        if path.stat().st_size > LARGEST:
            raise FileError(f"{path}: has more than {LARGEST} bytes", HELP)
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise FileError(f"{path}: cannot be read: {error}", "Give a text file of a schedule.") from error
    try:
        return register_schedule(text).name
    except ScheduleTextError as error:
        raise UsageError(f"{path}: {error.what}", error.hint) from error


def schedule_word(field: str, value: Any, besides: Sequence[str] = ("auto", "synthesized")) -> str:
    """The name of a known schedule, a word `besides`, or the name of the one that the file `value` describes.

    Raises UsageError for a name that is not known.
    """
    text = str(value) if isinstance(value, Path) else arguments.word(field, value)
    if text.endswith(SUFFIX):
        return read_schedule_file(Path(text))
    if text in besides or text in SCHEDULES:
        return text
    near = difflib.get_close_matches(text, SCHEDULES, n=1, cutoff=0.5)
    raise UsageError(
        f"{field}={text!r}: is not one of {', '.join(SCHEDULES)}",
        f"Did you mean {near[0]}?" if near else f"Give one of these, or a file, my{SUFFIX}, of your own.",
    )


def optional_schedule(field: str, value: Any) -> str | None:
    """The same, or None."""
    return None if value is None else schedule_word(field, value, ())
