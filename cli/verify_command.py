"""`pplan verify`: the structure, the sums and the feasibility of a plan file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .compare_command import DIFFERENCE
from .output import AsJson, choose_input

if TYPE_CHECKING:
    from rich.console import Console

    from ..api.verify import Line, Report, Value

PlanFile = Annotated[
    Path | None,
    typer.Argument(metavar="[PLAN]", help="A plan; default: newest in this directory.", show_default=False),
]
ProfileFile = Annotated[
    Path | None,
    typer.Argument(
        metavar="[PROFILE]", help="Its profile; default: the one it names, beside it.", show_default=False
    ),
]


def verify_command(
    plan_file: PlanFile = None, profile_file: ProfileFile = None, as_json: AsJson = False
) -> None:
    """Verify a plan file: its structure, its sums, and that it fits."""
    from ..api.verify import verify
    from .streams import console, remark, result

    report = verify(choose_input(plan_file, ("plan",)), profile_file)
    if as_json:
        result(report.to_json())
    else:
        _print(report, console())
    if not report.agrees:
        first = report.differing[0]
        remark(f"{report.plan}: {first.name} differs: {_difference(first)}")
        raise typer.Exit(DIFFERENCE)


def _print(report: Report, screen: Console) -> None:
    """A row for every line; those alike that are not checked together."""
    from .table import Column, line, print_table, text, word

    columns: list[Column[Line]] = [
        text("line", lambda row: row.name, min_width=20),
        word("", lambda row: row.state),
        text("what was checked, or why it was not", _detail, min_width=30),
    ]
    print_table(screen, columns, report.lines)
    screen.print()
    unchecked_count = len(report.unchecked)
    confirmed_count = len(report.lines) - unchecked_count - len(report.differing)
    against = f" with {report.profile}" if report.profile else ""
    line(
        screen,
        f"{report.plan}{against}: {confirmed_count} lines ok, {len(report.differing)} differ, "
        f"{unchecked_count} not checked",
        style="bold",
    )


def _detail(line: Line) -> str:
    return _difference(line) if line.state == "differs" else line.detail


def _difference(line: Line) -> str:
    """The two values of a line that differs."""
    if line.plan_value is None and line.expected_value is None:
        return line.detail
    plan, expected_value = _value_text(line.plan_value), _value_text(line.expected_value)
    return f"{line.detail}: the plan says {plan}, expected {expected_value}"


def _value_text(value: Value) -> str:
    return "nothing" if value is None else f"{value:.12g}" if isinstance(value, float) else str(value)[:200]
