"""The table of a sweep, and its rows as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from ..cost_models.quantities import format_bytes, format_rate, format_seconds
from ..planner.problem_grid import SweepResult, SweepRow
from .frontier_table import shape
from .number_format import percent, three_digits
from .table_style import figure, line, table, text, word

FIGURES = [name for name in SweepRow.model_fields if name not in ("point", "warnings")]


def print_sweep(sweep: SweepResult, console: Console) -> None:
    """Prints a row for every point."""
    for warning in sweep.warnings:
        line(console, f"Warning: {warning}")
    keys = keys_of(sweep)
    columns = [
        *(figure(key.replace("_bytes", "").replace("_", "-")) for key in keys),
        figure("step"),
        figure("samples/s"),
        figure("gap", leaves=3),
        figure("needs" if "memory_bytes" in keys else "memory", leaves=5),
        figure("used", leaves=4),
        text("stages", leaves=6, folds_at=16),
        *([] if "schedule" in keys else [word("schedule", leaves=2)]),
        text("configuration / reason", folds_at=20),
    ]
    rows = [[*(_shown(key, row.point[key]) for key in keys), *_cells(row, keys)] for row in sweep.rows]
    console.print(table(console, columns, rows), crop=False)


def keys_of(sweep: SweepResult) -> list[str]:
    """What was swept, in order."""
    return list(sweep.rows[0].point) if sweep.rows else []


def _shown(key: str, value: Any) -> str:
    if key == "memory_bytes":
        return format_bytes(value)
    if key == "bandwidth":
        values = value if isinstance(value, Sequence) else (value,)
        return ", ".join(format_rate(float(own)) for own in values)
    return str(value)


def _cells(row: SweepRow, keys: Sequence[str]) -> list[str]:
    swept = "schedule" in keys
    if row.step_seconds is None:
        return ["-"] * (6 if swept else 7) + [row.reason or ""]
    gap = "-" if row.gap is None else percent(row.gap)
    recompute = (row.recompute or "").replace("_", "-")
    found = f"{row.schedule}, " if swept and row.schedule != row.point["schedule"] else ""
    return [
        format_seconds(row.step_seconds),
        three_digits(row.samples_per_second or 0.0),
        gap if row.exact or row.gap else "-",
        format_bytes(row.memory_bytes or 0),
        str(row.gpus_used),
        shape(row.balance, row.replicas),
        *([] if swept else [row.schedule or ""]),
        f"{found}{row.micro_batches} of {row.micro_batch_size}, recompute {recompute}",
    ]


def as_csv(sweep: SweepResult) -> str:
    """A line for every point, with a head; lists have blanks between their values. A figure of the plan that
    has the name of what is swept is called plan_NAME: `auto` was asked for, `gpipe` found."""
    keys, lines = keys_of(sweep), io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerow([*keys, *(f"plan_{name}" if name in keys else name for name in FIGURES)])
    for row in sweep.rows:
        values = [row.point[key] for key in keys] + [getattr(row, name) for name in FIGURES]
        writer.writerow([_field(value) for value in values])
    return lines.getvalue()


def _field(value: Any) -> Any:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else value
