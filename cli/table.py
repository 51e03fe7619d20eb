"""A table: its columns, how it looks, and what a narrow terminal leaves out of it.

Numbers are never cut: the least important columns are dropped first, then texts are folded, and a table that
is too wide even so is printed as wide as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .field_names import as_options
from .streams import printable

Row = TypeVar("Row")
Value = TypeVar("Value")

ROOMY = 100
"""Width of a terminal from which the columns stand two spaces apart."""


@dataclass(frozen=True)
class Column(Generic[Row]):
    """A column: its heading and the cell of a row.

    `drop`: 0 stays on every terminal; of the others those with the smallest number are dropped first, those
    with the same number together. `min_width`: for a text, the width that other columns do not take from it;
    it is folded where it is longer. None: numbers and words that stay on one line. `visible`: whether the
    table has the column at all.
    """

    heading: str
    cell: Callable[[Row], str]
    drop: int = 0
    min_width: int | None = None
    right: bool = False
    visible: bool = True

    def needs(self, natural: int) -> int:
        """The width below which another column is dropped for this one."""
        return natural if self.min_width is None else min(natural, self.min_width)


def word(
    heading: str,
    value: Callable[[Row], Value | None],
    format: Callable[[Value], str] = str,
    drop: int = 0,
    *,
    none: str = "-",
    visible: bool = True,
) -> Column[Row]:
    """A column of short words."""
    return Column(heading, _cell(value, format, none), drop, visible=visible)


def number(
    heading: str,
    value: Callable[[Row], Value | None],
    format: Callable[[Value], str] = str,
    drop: int = 0,
    *,
    none: str = "-",
    visible: bool = True,
) -> Column[Row]:
    """A column of numbers, to the right."""
    return Column(heading, _cell(value, format, none), drop, right=True, visible=visible)


def text(
    heading: str,
    value: Callable[[Row], Value | None],
    format: Callable[[Value], str] = str,
    drop: int = 0,
    *,
    min_width: int = 24,
    none: str = "-",
    visible: bool = True,
) -> Column[Row]:
    """A column of texts of any length."""
    return Column(heading, _cell(value, format, none), drop, min_width, visible=visible)


def _cell(
    value: Callable[[Row], Value | None], format: Callable[[Value], str], none: str
) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        content = value(row)
        return none if content is None else format(content)

    return cell


def print_table(
    console: Console,
    columns: Sequence[Column[Row]],
    rows: Sequence[Row | None],
    totals: Sequence[Row] = (),
    *,
    title: str = "",
) -> None:
    """Prints `table`, under its title after an empty line where it has one."""
    if title:
        console.print()
        line(console, title, style="bold")
    console.print(table(console, columns, rows, totals), crop=False)


def table(
    console: Console,
    columns: Sequence[Column[Row]],
    rows: Sequence[Row | None],
    totals: Sequence[Row] = (),
) -> Table:
    """The table as far as it fits the console, with fields in the words of the command line.

    A row that is None stands for those that are left out; totals stand below an empty line.
    """
    columns = [column for column in columns if column.visible]
    cells = [
        ["..." if row is None else printable(as_options(column.cell(row))) for column in columns]
        for row in (*rows, *totals)
    ]
    gap_width = gap(console)
    natural = [_width(c.heading, *(row[i] for row in cells)) for i, c in enumerate(columns)]
    indices = _fitting_columns(columns, natural, console.width, gap_width)
    widths = _widths([columns[i] for i in indices], [natural[i] for i in indices], console.width, gap_width)
    table_width = sum(widths) + gap_width * (len(widths) - 1)
    grid = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, gap_width - 1, 0, 0),
        pad_edge=False,
        show_edge=False,
        header_style="",
        width=table_width if table_width > console.width else None,
    )
    headings = _headings([columns[i] for i in indices])
    for index, heading, width in zip(indices, headings, widths, strict=True):
        right = columns[index].right
        grid.add_column(heading, justify="right" if right else "left", width=width, overflow="fold")
    for position, row in enumerate(cells):
        if totals and position == len(rows):
            grid.add_section()
        grid.add_row(*(row[index] for index in indices))
    return grid


def _headings(columns: Sequence[Column[Row]]) -> list[str]:
    """The headings of the shown columns, without a second line that would be empty."""
    if any(column.heading.rstrip("\n").count("\n") for column in columns):
        return [column.heading for column in columns]
    return [column.heading.rstrip("\n") for column in columns]


def gap(console: Console) -> int:
    """Spaces between two columns."""
    return 2 if console.width >= ROOMY else 1


def _width(*texts: str) -> int:
    return max(cell_len(line) for text in texts for line in text.split("\n"))


def _fitting_columns(
    columns: Sequence[Column[Row]], natural: Sequence[int], width: int, gap_width: int
) -> list[int]:
    """Indices of the columns that are not dropped."""
    indices = list(range(len(columns)))
    while True:
        needed = sum(columns[i].needs(natural[i]) for i in indices) + gap_width * (len(indices) - 1)
        least = min((columns[i].drop for i in indices if columns[i].drop), default=None)
        if needed <= width or least is None:
            return indices
        indices = [i for i in indices if columns[i].drop != least]


def _widths(columns: Sequence[Column[Row]], natural: Sequence[int], width: int, gap_width: int) -> list[int]:
    """Widths of the shown columns: what is left over goes to the texts, from left to right."""
    widths = [column.needs(length) for column, length in zip(columns, natural, strict=True)]
    spare = width - sum(widths) - gap_width * (len(widths) - 1)
    for index, length in enumerate(natural):
        extra = max(0, min(spare, length - widths[index]))
        widths[index] += extra
        spare -= extra
    return widths


def print_head(console: Console, lines: Sequence[str]) -> None:
    """The answer, in bold, and the lines under it."""
    for position, text in enumerate(lines):
        line(console, text, style=None if position else "bold")


def print_notes(console: Console, notes: Sequence[str]) -> None:
    """The notes, after an empty line where there are some."""
    if notes:
        console.print()
    for note in notes:
        line(console, f"Note: {note}")


def height(console: Console, text: str) -> int:
    """Number of lines that `line` prints on a terminal."""
    return len(Text(printable(as_options(text))).wrap(console, console.width))


def line(console: Console, text: str, style: str | None = None) -> None:
    """A line of text, with fields in the words of the command line; into a file or a pipe it goes whole."""
    console.print(printable(as_options(text)), style=style, soft_wrap=not console.is_terminal)
