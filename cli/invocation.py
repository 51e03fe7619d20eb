"""The arguments of the command that runs."""

from __future__ import annotations

import shlex
import sys
from contextvars import ContextVar
from typing import Any

ARGUMENTS: ContextVar[tuple[str, ...] | None] = ContextVar("ARGUMENTS", default=None)
"""Those that `main` was given; None outside of it."""

TYPED: ContextVar[dict[str, tuple[Any, Any]]] = ContextVar("TYPED")
"""By field, the value of an option that the user typed, and its text (or all of them, where it repeats)."""


def typed_text(field: str) -> str | None:
    """What the user typed for the option of a field; None where that is not given."""
    value_and_text = TYPED.get({}).get(field)
    return None if value_and_text is None else str(value_and_text[1])


def command_line() -> str:
    """The command as it was typed, or as `main` was given it."""
    words = ARGUMENTS.get()
    return shlex.join(["pplan", *(sys.argv[1:] if words is None else words)])
