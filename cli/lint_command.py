"""`pplan lint`: what is wrong with a plan file, or with a pipeline layout for a model and a machine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..cost_models.errors import UsageError
from ..cost_models.machines import MachineOptions
from ..cost_models.quantities import (
    compare_percent,
    format_bytes,
    format_count,
    format_seconds,
    percent_at_most,
)
from ..planner.degrees.degree_options import DegreeOptions
from .compare_command import DIFFERENCE
from .field_names import FIELDS
from .option_parameters import Typed, Without
from .output import AsJson, choose_input
from .streams import console, remark, result, waiting

if TYPE_CHECKING:
    from rich.console import Console

    from ..api.lint import Line, PlanReport, Value
    from ..api.lint_layout import LayoutReport

Sources = Annotated[
    list[str],
    typer.Argument(
        metavar="PLAN|LAYOUT",
        help="Plans; default: newest in this directory. With --model Megatron-LM's layout, such as "
        "'Et*3|(tt|)*29m|L', or even: as many blocks on every stage.",
        show_default=False,
    ),
]
ProfileFile = Annotated[
    Path | None,
    typer.Option(
        "--profile", metavar="FILE", help="The plan's profile; default: the one it names, beside it."
    ),
]
Model = Annotated[
    Path | None,
    typer.Option("--model", metavar="CONFIG", help="The config.json of a layout's model."),
]
LAYOUT = re.compile(r"even|E[EtmL|()*,\d\s]*")


def lint_command(
    sources: Sources = [],  # noqa: B006  typer takes a list
    *,
    profile_file: ProfileFile = None,
    model: Model = None,
    options: Annotated[Typed[DegreeOptions], Without("by_stage")],
    machine: Typed[MachineOptions],
    as_json: AsJson = False,
) -> None:
    """Check plan files, or a pipeline layout, without running them.

    Of a plan: its structure, its sums, that it fits and runs, and that nobody changed it. Of a layout: is it
    the model's, does it fit the memory, and how far is it from the best?
    """
    if model is None:
        for name in sorted(options.names | machine.names):
            raise UsageError(
                f"lint {FIELDS[name]}: is for a layout", "Name the layout's model, too: --model config.json"
            )
        _lint_plans(sources, profile_file, as_json=as_json)
        return
    from ..api.degrees import read_shape
    from ..api.lint_layout import check_layout

    if len(sources) != 1 or profile_file is not None:
        raise UsageError(
            f"lint --model {model}: takes one layout",
            f"For example: pplan lint 'Et*3|(tt|)*29m|L' --model {model}. Plans have no --model.",
        )
    degrees, place = options.read(), machine.read()
    shape = read_shape(str(model))
    with waiting("Searching"):
        report = check_layout(sources[0], shape, place, degrees)
    if as_json:
        result(report.to_json())
    else:
        _print(report, console())
    if not report.agrees:
        raise typer.Exit(DIFFERENCE)


def _lint_plans(sources: list[str], profile_file: Path | None, *, as_json: bool) -> None:
    """Check plan files; one that differs is repeated on standard error."""
    from ..api.lint import lint

    for source in sources:
        if not Path(source).exists() and LAYOUT.fullmatch(source):
            raise UsageError(f"lint {source}: a layout without its model", "Name it: --model config.json")
    if profile_file is not None and len(sources) > 1:
        raise UsageError(
            f"lint --profile {profile_file}: with {len(sources)} plans", "Name one plan, or omit --profile."
        )
    paths = [choose_input(Path(source), ("plan",)) for source in sources] or [choose_input(None, ("plan",))]
    reports = [lint(path, profile_file) for path in paths]
    if as_json:
        texts = [report.to_json() for report in reports]
        result(
            texts[0] if len(texts) == 1 else json.dumps([json.loads(text) for text in texts], indent=1) + "\n"
        )
    else:
        for report in reports:
            _print_plan(report, console())
    for report in reports:
        if not report.agrees:
            first = report.differing[0]
            remark(f"{report.plan}: {first.name} differs: {_difference(first)}")
    if not all(report.agrees for report in reports):
        raise typer.Exit(DIFFERENCE)


def _print_plan(report: PlanReport, screen: Console) -> None:
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


def _print(report: LayoutReport, screen: Console) -> None:
    from .table import print_head, print_notes

    virtual = f", {report.virtual_stages} virtual stages a device" if report.virtual_stages > 1 else ""
    size = f"{format_count(len(report.stages), 'stage')}, a pipeline of {report.pipeline}{virtual}"
    if report.problems:
        print_head(screen, [f"The layout does not train {report.model} ({size}):", *report.problems])
        print_notes(screen, report.remarks)
        return
    head = [f"The layout places every layer of {report.model}: {size}."]
    if report.plan is not None:
        head += _estimate_lines(report)
    print_head(screen, head)
    if report.plan is not None:
        _print_stages(report, screen)
    print_notes(screen, report.remarks)


def _estimate_lines(report: LayoutReport) -> list[str]:
    from ..api.plan_summary import plan_setting
    from ..cost_models.transformer.weight_update import NUMERIC_FORMATS

    plan, best = report.plan, report.best
    assert plan is not None
    peak = format_bytes(report.peak_bytes)
    limit = "unknown memory" if report.limit_bytes is None else format_bytes(report.limit_bytes)
    setting = f"{plan_setting(plan)}, in {NUMERIC_FORMATS}"
    if not report.fits:
        lines = [f"It does not fit: where it needs least, {peak} of the {limit} of a device, with {setting}."]
    else:
        step = format_seconds(plan.prediction.step_seconds)
        lines = [f"{step} a step, {peak} of {limit} at most: {setting}."]
    if best is None:
        return [*lines, "None that fits at these degrees was found."]
    seconds, gap = format_seconds(best.prediction.step_seconds), percent_at_most(best.prediction.gap)
    how = f"{plan_setting(best)}, {report.best_layout}"
    lines.append(f"The best found at these degrees: {seconds}, at most {gap} from its bound: {how}.")
    if report.slower is not None:
        difference = compare_percent(1 + report.slower, 1.0)
        than = {"the same": "as fast as", "nearly the same": "nearly as fast as"}.get(
            difference, f"{difference} than"
        )
        lines.append(f"The layout is {than} that.")
    return lines


def _print_stages(report: LayoutReport, screen: Console) -> None:
    from .table import Column, number, print_table, text

    assert report.plan is not None
    parts = [report.plan.stages[rank :: report.pipeline] for rank in range(report.pipeline)]
    columns: list[Column[int]] = [
        number("rank", lambda rank: rank),
        text("layout", lambda rank: _letters(report, rank), min_width=8),
        number("forward", lambda rank: sum(part.forward_seconds for part in parts[rank]), format_seconds),
        number("backward", lambda rank: sum(part.backward_seconds for part in parts[rank]), format_seconds),
        number("memory", lambda rank: parts[rank][0].memory_bytes, format_bytes),
    ]
    print_table(screen, columns, range(report.pipeline), title="Ranks of the pipeline")


def _letters(report: LayoutReport, rank: int) -> str:
    """Of each virtual stage of a rank: `Ettt tt`, an empty one as `-`."""
    return " ".join(letters or "-" for letters in report.stages[rank :: report.pipeline])
