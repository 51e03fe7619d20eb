"""The part of `pplan solve` that solves a grid of problems."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from ..api.solve_options import SweepOptions
from ..cost_models.errors import InfeasibleError
from ..cost_models.quantities import (
    format_batch,
    format_bytes,
    format_count,
    format_rate,
    format_seconds,
    percent,
    three_digits,
)
from ..cost_models.text_files import write_whole
from ..planner.problem_grid import SweepResult, SweepRow
from .frontier_table import shape
from .output import Target
from .streams import console, remark, result, waiting
from .sweep_options import GridOptions
from .table import Column, line, number, print_table, text, word

if TYPE_CHECKING:
    from rich.console import Console

    from ..profiler.profile_file import Profile

FIGURES = [name for name in SweepRow.model_fields if name not in ("point", "warnings")]


def run_sweep(
    grid: GridOptions,
    options: SweepOptions,
    profile: Profile,
    keywords: Mapping[str, Any],
    *,
    force: bool,
    as_json: bool,
) -> None:
    """Solves the grid and prints it; `keywords` are the arguments of `solve` that the options hold.

    What the grid has replaces what is given. Raises UsageError, FileError, MachineError.
    """
    from ..api.sweep import sweep

    if grid.csv is not None:
        Target(grid.csv, force).check()
    keywords_of_all = {name: value for name, value in keywords.items() if name not in grid.sweep}
    points = prod(map(len, grid.sweep.values()))
    with waiting(f"Solving {format_count(points, 'problem')}") as wait:
        outcome = sweep(profile, grid.sweep, progress=wait.tell_share, **vars(options), **keywords_of_all)
    if as_json:
        result(outcome.to_json())
    else:
        print_sweep(outcome, console())
    if grid.csv is not None:
        write_whole(grid.csv, as_csv(outcome), force=force)
        remark(f"Wrote {grid.csv}")
    if all(row.step_seconds is None for row in outcome.rows):
        raise InfeasibleError("no point of the sweep has a plan", "Every row says why.")


def print_sweep(sweep: SweepResult, console: Console) -> None:
    """Prints a row for every point; one without a plan has its reason alone."""
    for warning in sweep.warnings:
        line(console, f"Warning: {warning}")
    keys = _keys(sweep)
    columns: list[Column[SweepRow]] = [
        *(number(key.replace("_bytes", "").replace("_", "-"), _point(key)) for key in keys),
        number("step", lambda row: row.step_seconds, format_seconds),
        number("samples/s", lambda row: row.samples_per_second, three_digits),
        number("gap", lambda row: row.gap if row.exact or row.gap else None, percent, drop=3),
        number(
            "needs" if "memory_bytes" in keys else "memory",
            lambda row: row.memory_bytes,
            format_bytes,
            drop=5,
        ),
        number("used", lambda row: row.gpus_used, drop=4),
        text(
            "stages",
            lambda row: shape(row.balance, row.replicas) if row.balance else None,
            drop=6,
            min_width=16,
        ),
        word("schedule", lambda row: row.schedule, drop=2, visible="schedule" not in keys),
        text("configuration / reason", _configuration, min_width=20),
    ]
    print_table(console, columns, sweep.rows)


def _keys(sweep: SweepResult) -> list[str]:
    """The swept options, in order."""
    return list(sweep.rows[0].point) if sweep.rows else []


def _point(key: str) -> Callable[[SweepRow], str]:
    """A column with the value that a row has of an option of the grid."""
    format: Callable[[Any], str] = {"memory_bytes": format_bytes, "bandwidth": _rates}.get(key, str)
    return lambda row: format(row.point[key])


def _rates(value: Any) -> str:
    values = value if isinstance(value, Sequence) else (value,)
    return ", ".join(format_rate(float(rate)) for rate in values)


def _configuration(row: SweepRow) -> str:
    if row.step_seconds is None:
        return row.reason or ""
    schedule = f"{row.schedule}, " if row.schedule != row.point.get("schedule", row.schedule) else ""
    recompute = (row.recompute or "").replace("_", "-")
    batch = format_batch(row.micro_batches or 0, row.micro_batch_size or 0, short=True)
    return f"{schedule}{batch}, recompute {recompute}"


def as_csv(sweep: SweepResult) -> str:
    """A line for every point, with a head; lists have blanks between their values. A figure of the plan that
    has the name of what is swept is called plan_NAME: `auto` was asked for, `gpipe` found."""
    keys, lines = _keys(sweep), io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerow([*keys, *(f"plan_{name}" if name in keys else name for name in FIGURES)])
    for row in sweep.rows:
        values = [row.point[key] for key in keys] + [getattr(row, name) for name in FIGURES]
        writer.writerow([_field(value) for value in values])
    return lines.getvalue()


def _field(value: Any) -> Any:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else value
