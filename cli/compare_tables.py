"""What `pplan compare` prints: a row for every plan."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from ..cost_models.quantities import format_bytes, format_seconds
from ..planner.explanation.compare import Compared, Comparison
from .field_names import as_options
from .number_format import compared, percent, three_digits
from .table_style import figure, line, table, text


def print_comparison(made: Comparison, console: Console) -> None:
    """Prints the table, and what the plans do not have in common."""
    console.print(_rows(made, console), crop=False)
    if made.notes:
        console.print()
    for note in made.notes:
        line(console, f"Note: {as_options(note)}")


def _rows(made: Comparison, console: Console) -> Table:
    columns = [
        text("plan\n", folds_at=10),
        figure("step\n"),
        figure("samples/s\n", leaves=7),
        text("vs. the\nfirst", folds_at=9),
        figure("bubble\n", leaves=4),
        figure("most\nmemory", leaves=6),
        figure("GPUs\n", leaves=5),
        figure("gap\n", leaves=3),
        text("configuration\n/ reason", leaves=1, folds_at=13),
    ]
    return table(console, columns, [_row(row, index == 0) for index, row in enumerate(made.rows)])


def _row(row: Compared, first: bool) -> list[str]:
    return [
        row.name,
        "-" if row.step_seconds is None else format_seconds(row.step_seconds),
        "-" if row.samples_per_second is None else three_digits(row.samples_per_second),
        "-" if first or row.slower is None else compared(1 + row.slower, 1),
        "-" if row.bubble is None else percent(row.bubble),
        "-" if row.memory_bytes is None else format_bytes(row.memory_bytes),
        "-" if row.devices is None else str(row.devices),
        "-" if row.gap is None else percent(row.gap),
        as_options(row.reason) if row.reason else _how(row),
    ]


def _how(row: Compared) -> str:
    balance = "-".join(map(str, row.balance[:16])) + ("-…" if len(row.balance) > 16 else "")
    return f"{balance}, {row.micro_batches} x {row.micro_batch_size}, {row.schedule}"
