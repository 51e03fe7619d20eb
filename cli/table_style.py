"""How every table looks, and what a narrow terminal leaves out of it.

Figures are never cut: the least important columns go first, then texts are folded, and a table that is too
wide even so is printed as wide as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from .field_names import as_options
from .streams import printable

Record = TypeVar("Record")

ROOMY = 100
"""Width of a terminal from which the columns stand two spaces apart."""


@dataclass(frozen=True)
class Column:
    """A column of a table.

    `leaves`: 0 stays on every terminal; of the others those with the smallest number are left out first,
    those with the same number together. `folds_at`: for a text, the width that other columns do not leave it;
    it is folded where it is longer. None: figures and words that stay on one line.
    """

    head: str
    leaves: int = 0
    folds_at: int | None = None
    right: bool = False

    def needs(self, natural: int) -> int:
        """The width below which another column is left out for this one."""
        return natural if self.folds_at is None else min(natural, self.folds_at)


def word(head: str, leaves: int = 0) -> Column:
    """A column of short words."""
    return Column(head, leaves)


def figure(head: str, leaves: int = 0) -> Column:
    """A column of figures."""
    return Column(head, leaves, right=True)


def text(head: str, leaves: int = 0, folds_at: int = 24) -> Column:
    """A column of texts of any length."""
    return Column(head, leaves, folds_at)


def table(
    console: Console,
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    *,
    rule_before: int | None = None,
) -> Table:
    """The table as far as it fits the console, with fields in the words of the command line; an empty line
    stands before the row `rule_before`."""
    cells = [[printable(as_options(cell)) for cell in row] for row in rows]
    apart = gap(console)
    natural = [_width(c.head, *(row[i] for row in cells)) for i, c in enumerate(columns)]
    kept = _kept(columns, natural, console.width, apart)
    widths = _widths([columns[i] for i in kept], [natural[i] for i in kept], console.width, apart)
    whole = sum(widths) + apart * (len(widths) - 1)
    made = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, apart - 1, 0, 0),
        pad_edge=False,
        show_edge=False,
        header_style="",
        width=whole if whole > console.width else None,
    )
    heads = _heads([columns[i] for i in kept])
    for index, head, width in zip(kept, heads, widths, strict=True):
        right = columns[index].right
        made.add_column(head, justify="right" if right else "left", width=width, overflow="fold")
    for number, row in enumerate(cells):
        if number == rule_before:
            made.add_section()
        made.add_row(*(row[index] for index in kept))
    return made


def table_of(
    console: Console, columns: Sequence[tuple[Column, Callable[[Record], str]]], records: Sequence[Record]
) -> Table:
    """A row for each record: every column stands beside what it says of one."""
    rows = [[say(record) for _, say in columns] for record in records]
    return table(console, [column for column, _ in columns], rows)


def _heads(columns: Sequence[Column]) -> list[str]:
    """Without an empty second line where no shown column has one."""
    if any(column.head.rstrip("\n").count("\n") for column in columns):
        return [column.head for column in columns]
    return [column.head.rstrip("\n") for column in columns]


def gap(console: Console) -> int:
    """Spaces between two columns."""
    return 2 if console.width >= ROOMY else 1


def _width(*texts: str) -> int:
    return max(cell_len(line) for text in texts for line in text.split("\n"))


def _kept(columns: Sequence[Column], natural: Sequence[int], width: int, apart: int) -> list[int]:
    """Indices of the columns that are shown."""
    kept = list(range(len(columns)))
    while True:
        needed = sum(columns[i].needs(natural[i]) for i in kept) + apart * (len(kept) - 1)
        least = min((columns[i].leaves for i in kept if columns[i].leaves), default=None)
        if needed <= width or least is None:
            return kept
        kept = [i for i in kept if columns[i].leaves != least]


def _widths(columns: Sequence[Column], natural: Sequence[int], width: int, apart: int) -> list[int]:
    """Widths of the shown columns: what is left over goes to the texts, from left to right."""
    widths = [column.needs(wanted) for column, wanted in zip(columns, natural, strict=True)]
    spare = width - sum(widths) - apart * (len(widths) - 1)
    for index, wanted in enumerate(natural):
        more = max(0, min(spare, wanted - widths[index]))
        widths[index] += more
        spare -= more
    return widths


def titled(console: Console, title: str, rows: Table) -> None:
    """Prints a table under its title, after an empty line."""
    console.print()
    line(console, title, style="bold")
    console.print(rows, crop=False)


def line(console: Console, text: str, style: str | None = None) -> None:
    """A line of text, with fields in the words of the command line; into a file or a pipe it goes whole."""
    console.print(printable(as_options(text)), style=style, soft_wrap=not console.is_terminal)
