"""What `pplan compare` prints: a row for every plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

from ..cost_models.quantities import format_bytes, format_seconds
from ..planner.explanation.compare import Compared, Comparison
from .number_format import compared, percent, three_digits
from .table_style import Column, figure, line, table_of, text


def print_comparison(made: Comparison, console: Console) -> None:
    """Prints the table, and what the plans do not have in common."""
    console.print(_rows(made, console), crop=False)
    if made.notes:
        console.print()
    for note in made.notes:
        line(console, f"Note: {note}")


def _rows(made: Comparison, console: Console) -> Table:
    first = made.rows[0]
    columns: list[tuple[Column, Callable[[Compared], str]]] = [
        (text("plan\n", folds_at=10), lambda row: row.name),
        (figure("step\n"), lambda row: _shown(format_seconds, row.step_seconds)),
        (figure("samples/s\n", leaves=7), lambda row: _shown(three_digits, row.samples_per_second)),
        (text("vs. the\nfirst", folds_at=9), lambda row: "-" if row is first else _versus(row)),
        (figure("bubble\n", leaves=4), lambda row: _shown(percent, row.bubble)),
        (figure("most\nmemory", leaves=6), lambda row: _shown(format_bytes, row.memory_bytes)),
        (figure("GPUs\n", leaves=5), lambda row: _shown(str, row.devices)),
        (figure("gap\n", leaves=3), lambda row: _shown(percent, row.gap)),
        (
            text("configuration\n/ reason", leaves=1, folds_at=13),
            lambda row: row.reason or _how(row),
        ),
    ]
    return table_of(console, columns, made.rows)


def _shown(form: Callable[[Any], str], value: float | None) -> str:
    return "-" if value is None else form(value)


def _versus(row: Compared) -> str:
    """Seconds a sample against those of the first."""
    return "-" if row.slower is None else compared(1 + row.slower, 1)


def _how(row: Compared) -> str:
    balance = "-".join(map(str, row.balance[:16])) + ("-…" if len(row.balance) > 16 else "")
    return f"{balance}, {row.micro_batches} x {row.micro_batch_size}, {row.schedule}"
