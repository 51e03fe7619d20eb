"""The arguments of the command that runs."""

from __future__ import annotations

from contextvars import ContextVar

GIVEN: ContextVar[tuple[str, ...] | None] = ContextVar("GIVEN", default=None)
"""Those that `main` was given; None outside of it."""
