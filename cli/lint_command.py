"""`pplan lint`: what is wrong with a pipeline layout, for a model and a machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..cost_models.machines import MachineOptions
from ..planner.degrees.degree_options import DegreeOptions
from .compare_command import DIFFERENCE
from .degrees_command import Kernels
from .option_parameters import Without
from .output import AsJson

if TYPE_CHECKING:
    from rich.console import Console

    from ..api.lint import LayoutReport
    from ..cost_models.transformer.layer_table import StageEstimate

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
    kernels: Kernels = None,
    as_json: AsJson = False,
) -> None:
    """Check a pipeline layout: is it the model's, does it fit the memory, how far is it from the best."""
    from ..api.lint import lint_layout
    from ..cost_models.transformer.configuration import load_transformer_shape
    from .streams import console, result, waiting

    shape = load_transformer_shape(model)
    with waiting("Searching"):
        report = lint_layout(layout, shape, machine, options, kernels)
    if as_json:
        result(report.to_json())
    else:
        _print(report, console())
    if not report.agrees:
        raise typer.Exit(DIFFERENCE)


def _print(report: LayoutReport, screen: Console) -> None:
    from ..cost_models.quantities import format_count
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
    from ..cost_models.quantities import (
        compare_percent,
        format_bytes,
        format_count,
        format_seconds,
        percent_at_most,
    )
    from ..cost_models.transformer.weight_update import NUMERIC_FORMATS
    from .degrees_tables import recompute_words

    plan, best = report.plan, report.best
    assert plan is not None
    peak, limit = format_bytes(plan.estimate.peak_bytes), format_bytes(max(report.limit_bytes, 0.0))
    setting = (
        f"{plan.degrees.describe()}, {format_count(plan.micro_batches, 'micro-batch')} of "
        f"{plan.micro_batch_size}, recompute {recompute_words(plan)}, in {NUMERIC_FORMATS}"
    )
    if not report.fits:
        lines = [
            f"It does not fit: where it needs least, {peak} of the {limit} that may be used, with {setting}."
        ]
    else:
        step = format_seconds(plan.estimate.step_seconds)
        lines = [f"{step} a step, {peak} of {limit} at most: {setting}."]
    if best is None:
        return [*lines, "None that fits at these degrees was found."]
    fastest = best.plans[0]
    how = (
        f"{format_count(fastest.micro_batches, 'micro-batch')} of {fastest.micro_batch_size}, recompute "
        f"{recompute_words(fastest)}, "
        f"{report.best_layout or fastest.blocks}"
    )
    seconds, gap = format_seconds(fastest.estimate.step_seconds), percent_at_most(best.gap)
    lines.append(f"The best found at these degrees: {seconds}, at most {gap} from its bound: {how}.")
    if report.slower is not None:
        difference = compare_percent(1 + report.slower, 1.0)
        than = {"the same": "as fast as", "nearly the same": "nearly as fast as"}.get(
            difference, f"{difference} than"
        )
        lines.append(f"The layout is {than} that.")
    return lines


def _print_stages(report: LayoutReport, screen: Console) -> None:
    from ..cost_models.quantities import format_bytes, format_seconds
    from .table import Column, number, print_table, text

    assert report.plan is not None
    rows = list(enumerate(report.plan.estimate.stages))
    columns: list[Column[tuple[int, StageEstimate]]] = [
        number("rank", lambda row: row[0]),
        text("layout", lambda row: _letters(report, row[0]), min_width=8),
        number("forward", lambda row: row[1].forward_seconds, format_seconds),
        number("backward", lambda row: row[1].backward_seconds, format_seconds),
        number("memory", lambda row: row[1].bytes, format_bytes),
    ]
    print_table(screen, columns, rows, title="Ranks of the pipeline")


def _letters(report: LayoutReport, rank: int) -> str:
    """Of each virtual stage of a rank: `Ettt tt`, an empty one as `-`."""
    return " ".join(letters or "-" for letters in report.stages[rank :: report.pipeline])
