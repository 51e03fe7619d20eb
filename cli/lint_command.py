"""`pplan lint`: what is wrong with a pipeline layout, for a model and a machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

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
from .option_parameters import Without
from .output import AsJson

if TYPE_CHECKING:
    from rich.console import Console

    from ..api.lint import LayoutReport

Layout = Annotated[
    str,
    typer.Argument(
        metavar="LAYOUT",
        help="Megatron-LM's layout, such as 'Et*3|(tt|)*29m|L'; even: none, as many blocks on every stage.",
        show_default=False,
    ),
]
Model = Annotated[
    Path, typer.Option("--model", metavar="CONFIG", help="The model's config.json.", show_default=False)
]


def lint_command(
    layout: Layout,
    *,
    model: Model,
    options: Annotated[DegreeOptions, Without("by_stage")],
    machine: MachineOptions,
    as_json: AsJson = False,
) -> None:
    """Check a pipeline layout without running it.

    Is it the model's, does it fit the memory, and how far is it from the best?
    """
    from ..api.lint import lint_layout
    from ..cost_models.transformer.configuration import load_transformer_shape
    from .streams import console, result, waiting

    shape = load_transformer_shape(model)
    with waiting("Searching"):
        report = lint_layout(layout, shape, machine, options)
    if as_json:
        result(report.to_json())
    else:
        _print(report, console())
    if not report.agrees:
        raise typer.Exit(DIFFERENCE)


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
