"""The arguments of the command that runs."""

from __future__ import annotations

import shlex
import sys
from contextvars import ContextVar

GIVEN: ContextVar[tuple[str, ...] | None] = ContextVar("GIVEN", default=None)
"""Those that `main` was given; None outside of it."""


def command_line() -> str:
    """The command as it was typed, or as `main` was given it."""
    given = GIVEN.get()
    return shlex.join(["pplan", *(sys.argv[1:] if given is None else given)])
