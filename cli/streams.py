"""The two streams: results on standard output, progress and remarks on standard error."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

UNCONFINED_WIDTH = 120
"""Columns of a table that goes into a file or a pipe."""


def console() -> Console:
    """Where tables are printed: no markup, so that names with brackets come out as they are."""
    from rich.console import Console

    confined = sys.stdout.isatty() or "COLUMNS" in os.environ
    width = None if confined else UNCONFINED_WIDTH
    return Console(file=sys.stdout, width=width, markup=False, highlight=False, emoji=False)


def remark(text: str) -> None:
    """One line on standard error."""
    print(text, file=sys.stderr, flush=True)


def result(text: str) -> None:
    """Text on standard output as it is, without wrapping."""
    sys.stdout.write(text)


def watched() -> bool:
    """Whether somebody watches standard error: a bar makes sense."""
    return sys.stderr.isatty()
