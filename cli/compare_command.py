"""`pplan compare`: plans side by side, or what every named planner makes of a plan's problem."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..cost_models.errors import UsageError
from ..cost_models.quantities import (
    MOST_SHARE,
    compare_steps,
    format_bytes,
    format_seconds,
    percent,
    three_digits,
)
from ..cost_models.text_files import REPORT
from .output import AsJson, Force, choose_input, choose_target
from .streams import console, remark, result, waiting

if TYPE_CHECKING:
    from rich.console import Console

    from ..planner.explanation.compare import ComparisonRow, OtherMethod, PlanComparison

DIFFERENCE = 4
"""Exit status: what the user asked to be told about was found."""


def share(text: str) -> float:
    """`10%`, or `0.1`, as a share. Raises UsageError."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*(%?)", text.strip(), re.ASCII)
    limit = float(match[1]) / (100 if match[2] else 1) if match else math.inf
    if limit > MOST_SHARE:
        what = f"must be at most {MOST_SHARE:g}" if match else "is not a share of the step"
        raise UsageError(f"--fail-above {text}: {what}", "Write --fail-above 10%, or 0.1.")
    return limit


Plans = Annotated[
    list[Path],
    typer.Argument(
        metavar="PLAN",
        help="Plans; default: newest in this directory, with --planners.",
        show_default=False,
    ),
]
Planners = Annotated[
    bool,
    typer.Option(
        "--planners", help="What every named planner makes of the first plan's model, machine and options."
    ),
]
ProfileFile = Annotated[
    Path | None,
    typer.Option("--profile", metavar="FILE", help="The first plan's profile, where it is not beside it."),
]
FailAbove = Annotated[
    float | None,
    typer.Option(
        "--fail-above",
        metavar="10%",
        help=f"End with status {DIFFERENCE} where the first plan is slower than the best of the others by "
        "more.",
        parser=share,
    ),
]
Watts = Annotated[
    str | None,
    typer.Option(
        "--watts",
        metavar="KIND=BUSY/IDLE,...",
        help="Watts of each kind of device, computing and waiting: prints the energy of steps.",
    ),
]


Page = Annotated[
    Path | None,
    typer.Option(
        "-o", "--output", metavar="FILE", help="Also write the page of `pplan report` about the plans."
    ),
]


LONGEST_WHOLE = 20
"""Characters of a name that is not folded: of any planner's."""


def compare_command(
    plan_files: Plans = [],  # noqa: B006  typer takes a list
    planners: Planners = False,
    profile_file: ProfileFile = None,
    fail_above: FailAbove = None,
    watts: Watts = None,
    output: Page = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Compare plans side by side, or with those of other planners.

    The table has step, samples/s, bubble, memory, devices and gap.
    """
    from ..api.explain import compare

    paths = plan_files or [choose_input(None, ("plan",))]
    if planners or len(paths) == 1:
        from ..api.load import read_plan

        profile_file = read_plan(paths[0], profile_file).profile_file
    elif profile_file is not None:
        raise UsageError(
            f"compare --profile {profile_file}: without --planners",
            "The figures of several plans are those in their files: omit it, or give --planners.",
        )
    target = None
    if output is not None:
        target = choose_target(output, "", force=force, kind=REPORT)
        target.check(*paths)
    with waiting("Asking the planners" if profile_file is not None else "Reading the plans"):
        comparison = compare(*paths, profile=profile_file, watts=watts)
    if as_json:
        result(comparison.to_json())
    else:
        print_comparison(comparison, console())
    if target is not None:
        from ..api.html_report import find_beside, report

        with waiting("Making the page"):
            page = report(paths[0], find_beside(paths[0]).profile, others=paths[1:])
        target.write_text(page.html)
        remark(f"Wrote {target.path}")
    _print_result(comparison, fail_above)


def print_comparison(comparison: PlanComparison, console: Console) -> None:
    """Prints a row for every plan, and what the plans do not have in common."""
    from .table import Column, number, print_notes, print_table, text

    first = comparison.rows[0]
    # Names of planners stay whole; a long one of a file may take several lines.
    longest = max((len(row.name) for row in comparison.rows if len(row.name) <= LONGEST_WHOLE), default=0)
    is_transformer = any(row.mfu is not None for row in comparison.rows)
    columns: list[Column[ComparisonRow]] = [
        text("plan\n", lambda row: row.name, min_width=max(longest, 10)),
        number("step\n", lambda row: row.step_seconds, format_seconds),
        number(
            "own\nestimate",
            lambda row: row.estimate_seconds,
            format_seconds,
            drop=8,
            visible=any(row.estimate_seconds is not None for row in comparison.rows),
        ),
        number(
            "samples/s\n",
            lambda row: None if row.plan is None else row.plan.samples_per_second,
            three_digits,
            drop=7,
        ),
        text("vs. the\nfirst", lambda row: None if row is first else row.slower, _versus, min_width=9),
        number("bubble\n", lambda row: row.bubble, percent, drop=4),
        number("most\nmemory", lambda row: row.memory_bytes, format_bytes, drop=6),
        number(
            "energy\n",
            lambda row: row.energy_joules,
            _joules,
            drop=6,
            visible=any(row.energy_joules is not None for row in comparison.rows),
        ),
        number("MFU\n", lambda row: row.mfu, percent, visible=is_transformer),
        number(
            "TFLOP/s\na GPU",
            lambda row: row.tflops_per_gpu,
            three_digits,
            drop=5,
            visible=is_transformer,
        ),
        number(
            "tokens/s\na GPU",
            lambda row: row.tokens_per_second_per_gpu,
            three_digits,
            drop=6,
            visible=is_transformer,
        ),
        number("GPUs\n", lambda row: row.plan and row.plan.device_count, drop=5),
        number("gap\n", lambda row: row.gap, percent, drop=3),
        text("configuration\n/ reason", lambda row: row.reason or _configuration(row), drop=1, min_width=13),
    ]
    print_table(console, columns, comparison.rows)
    if comparison.other_methods:
        _print_other_methods(comparison.other_methods, console)
    print_notes(console, comparison.notes)


def _print_other_methods(methods: list[OtherMethod], console: Console) -> None:
    """What is no plan of pplan."""
    from .table import Column, number, print_table, text

    columns: list[Column[OtherMethod]] = [
        text("method\n", lambda row: row.name, min_width=10),
        number("step\n", lambda row: row.step_seconds, format_seconds),
        number("samples/s\n", lambda row: row.samples_per_second, three_digits, drop=4),
        number("most\nmemory", lambda row: row.memory_bytes, format_bytes, drop=3),
        number(
            "energy\n",
            lambda row: row.energy_joules,
            _joules,
            drop=2,
            visible=any(row.energy_joules is not None for row in methods),
        ),
        number("stale-\nness", lambda row: None if row.staleness is None else row, _staleness),
        text("configuration\n/ reason", lambda row: row.reason or row.detail, drop=1, min_width=13),
    ]
    title = "Other methods: by their own time models, no plans of pplan; staleness in updates"
    print_table(console, columns, methods, title=title)


def _joules(energy: float) -> str:
    return f"{three_digits(energy)} J"


def _staleness(method: OtherMethod) -> str:
    return f"{'<= ' if method.staleness_bounded else ''}{method.staleness:.3g}"


def _versus(slower: float) -> str:
    """Seconds a sample against those of the first."""
    return compare_steps(1 + slower, 1)


def _configuration(row: ComparisonRow) -> str:
    plan = row.plan
    if plan is None:
        return ""
    balance = "-".join(map(str, plan.balance[:16])) + ("-…" if len(plan.balance) > 16 else "")
    return f"{balance}, {plan.short_batch}, {plan.schedule}"


def _print_result(comparison: PlanComparison, fail_above: float | None) -> None:
    """Ends with status 4 where the first plan is too slow."""
    slower = comparison.first_slower
    if fail_above is None or slower is None or slower <= fail_above:
        return

    remark(f"{comparison.rows[0].name} is {percent(slower)} slower than the best of the others")
    raise typer.Exit(DIFFERENCE)
