"""How every table looks."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

ROOMY = 100
"""Columns of a terminal from which the lesser columns of a table are shown too."""


def table(console: Console) -> Table:
    """An empty table: one rule under the heads; close columns on a narrow terminal."""
    return Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1 if console.width >= ROOMY else 0, 0, 0),
        pad_edge=False,
        show_edge=False,
        header_style="",
    )


def titled(console: Console, title: str, rows: Table) -> None:
    """Prints a table under its title, after an empty line."""
    console.print()
    line(console, title, style="bold")
    console.print(rows)


def line(console: Console, text: str, style: str | None = None) -> None:
    """A line of text; into a file or a pipe it goes whole."""
    console.print(text, style=style, soft_wrap=not console.is_terminal)
