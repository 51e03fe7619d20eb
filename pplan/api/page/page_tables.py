"""The tables of the report's page: what is drawn stands in one of them in numbers as well."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...cost_models.quantities import (
    compare_steps,
    format_bytes,
    format_seconds,
    percent,
    ranges,
    three_digits,
    whole_percent,
)
from ...planner.plan_file import Plan, PlannedStage
from ...planner.plan_simulation import Simulation
from ...profiler.profile_file import Profile
from ..plan_summary import step_interval

if TYPE_CHECKING:
    from ...planner.explanation.compare import ComparisonRow

MOST_LAYERS = 2000
"""Rows of the table of layers."""
MOST_PARTS = 32
"""Parts of the layers of which a balance lists the layers."""


@dataclass(frozen=True)
class TableCell:
    """What a cell says; `order`: the number that it is sorted by; `share`: how long the bar in it is."""

    text: str
    order: float | None = None
    share: float | None = None


@dataclass(frozen=True)
class PageTable:
    """A table of a page: headings, those of numbers, and rows of as many cells."""

    caption: str
    headings: Sequence[str]
    rows: Sequence[Sequence[TableCell]]
    numbers: frozenset[int] = field(default_factory=frozenset)
    note: str = ""


Column = tuple[str, Callable[[Any], TableCell]]


def make_table(caption: str, columns: Sequence[Column], rows: Sequence[Any], note: str = "") -> PageTable:
    """A table with a row for each of the `rows`; columns in which all is empty are left out."""
    cells = [[cell(row) for _, cell in columns] for row in rows]
    used = [i for i in range(len(columns)) if any(row[i].text not in ("", "-") for row in cells)]
    return PageTable(
        caption,
        [columns[i][0] for i in used],
        [[row[i] for i in used] for row in cells],
        frozenset(n for n, i in enumerate(used) if any(row[i].order is not None for row in cells)),
        note,
    )


def seconds_cell(seconds: float | None, share: float | None = None) -> TableCell:
    """Seconds; `-` where there are none."""
    return TableCell("-") if seconds is None else TableCell(format_seconds(seconds), seconds, share)


def bytes_cell(size: float | None, share: float | None = None) -> TableCell:
    """Bytes; `-` where there are none."""
    return TableCell("-") if size is None else TableCell(format_bytes(size), float(size), share)


def share_cell(share: float | None) -> TableCell:
    """A share in percent."""
    return TableCell("-") if share is None else TableCell(percent(share), share)


def count_cell(count: float | None) -> TableCell:
    """A whole number."""
    return TableCell("-") if count is None else TableCell(f"{count:g}", float(count))


def stage_table(plan: Plan) -> PageTable:
    """The stages: their layers, devices, seconds and memory."""
    names = plan.layer_names

    def name(layer: int) -> str:
        return f"{layer} {names[layer]}" if layer < len(names) else str(layer)

    columns: list[Column] = [
        ("stage", lambda row: count_cell(row[0])),
        ("devices", lambda row: TableCell(ranges(row[1].devices))),
        ("layers", lambda row: count_cell(row[1].layers)),
        ("first layer", lambda row: TableCell(name(row[1].first_layer))),
        ("last layer", lambda row: TableCell(name(row[1].last_layer))),
        ("forward", lambda row: seconds_cell(row[1].forward_seconds)),
        ("backward", lambda row: seconds_cell(row[1].backward_seconds)),
        ("memory", lambda row: bytes_cell(row[1].memory_bytes)),
        ("limit", lambda row: bytes_cell(row[1].memory_limit_bytes)),
    ]
    if any(stage.host_bytes is not None for stage in plan.stages):
        columns.insert(8, ("on the host", lambda row: bytes_cell(row[1].host_bytes)))
    if plan.recompute == "by_stage":
        columns.insert(3, ("recomputed", lambda row: count_cell(row[1].layers_again)))
    each = " per replica" if max(plan.replicas) > 1 else ""
    return make_table(f"Stages; time per micro-batch{each}", columns, list(enumerate(plan.stages)))


def time_table(simulation: Simulation) -> PageTable:
    """Where the time of each device goes."""
    step = simulation.timeline.step_seconds
    times = list(enumerate(simulation.timeline.stage_times))
    names = ("compute", "transfer", "warm_up_cool_down", "imbalance", "update")

    def column(name: str) -> Column:
        heading = "warm-up and cool-down" if name == "warm_up_cool_down" else name
        return heading, lambda row: seconds_cell(getattr(row[1], name) or None, getattr(row[1], name) / step)

    columns: list[Column] = [
        ("stage", lambda row: count_cell(row[0])),
        *map(column, names),
        ("in flight", lambda row: count_cell(simulation.timeline.peak_in_flight[row[0]])),
    ]
    note = (
        "transfer: idle while data is on its way. imbalance: idle because the busiest stage computes longer. "
        "warm-up and cool-down: the rest of the idle time, which equal stages would have, too. "
        "update: all-reduces, without the optimizer step."
    )
    return make_table("Where the time of each stage goes", columns, times, note)


@dataclass(frozen=True)
class MemoryBar:
    """A device's memory: its terms with their share of the longest bar, and where its limit lies on it."""

    stage: int
    terms: Sequence[tuple[str, float, str]]
    bytes: str
    limit: str
    limit_share: float | None
    used: str
    over: bool


def memory_bars(stages: Sequence[PlannedStage]) -> list[MemoryBar]:
    """A bar for every stage, all of one scale."""
    longest = max(max(stage.memory_bytes, stage.memory_limit_bytes or 0) for stage in stages) or 1
    return [_memory_bar(number, stage, longest) for number, stage in enumerate(stages)]


def _memory_bar(number: int, stage: PlannedStage, longest: int) -> MemoryBar:
    limit = stage.memory_limit_bytes
    return MemoryBar(
        stage=number,
        terms=[
            (term.replace("_", " "), amount / longest, format_bytes(amount))
            for term, amount in stage.memory.items()
            if amount
        ],
        bytes=format_bytes(stage.memory_bytes),
        limit="no limit" if limit is None else format_bytes(limit),
        limit_share=None if limit is None else limit / longest,
        used="" if limit is None else whole_percent(stage.memory_bytes / limit),
        over=limit is not None and stage.memory_bytes > limit,
    )


def ledger_table(stages: Sequence[PlannedStage]) -> PageTable:
    """Memory of one device of each stage by term."""
    terms = list(dict.fromkeys(term for stage in stages for term, amount in stage.memory.items() if amount))
    columns: list[Column] = [
        ("stage", lambda row: count_cell(row[0])),
        *((term.replace("_", " "), _term(term)) for term in terms),
        ("all", lambda row: bytes_cell(row[1].memory_bytes)),
        ("limit", lambda row: bytes_cell(row[1].memory_limit_bytes)),
    ]
    return make_table("Memory of one device of each stage, by term", columns, list(enumerate(stages)))


def _term(term: str) -> Callable[[Any], TableCell]:
    return lambda row: bytes_cell(row[1].memory.get(term, 0))


def baseline_table(plan: Plan) -> PageTable:
    """The plan, and what simpler tools would make."""
    own = plan.prediction.step_seconds
    rows: list[tuple[str, float | None, str]] = [("this plan", own, "")]
    rows += [
        (base.name, base.step_seconds, "; ".join(part for part in (base.reason, base.detail) if part))
        for base in plan.baselines
    ]
    return _steps_table("Baselines", "plan", rows, own)


def comparison_table(rows: Sequence[tuple[ComparisonRow, Plan]], notes: Sequence[str]) -> PageTable:
    """Tabulate plans with their schedules and machines, a column each, the first as the reference."""
    first = rows[0][0]
    lines: list[Column] = [
        ("step", lambda row: seconds_cell(row[0].step_seconds)),
        (
            "vs. the first",
            lambda row: TableCell("-" if row[0] is first else compare_steps(1 + (row[0].slower or 0.0), 1)),
        ),
        ("samples/s", lambda row: _figure_cell(row[1].prediction.samples_per_second)),
        ("MFU", lambda row: share_cell(row[0].mfu)),
        ("TFLOP/s a GPU", lambda row: _figure_cell(row[0].tflops_per_gpu)),
        ("tokens/s a GPU", lambda row: _figure_cell(row[0].tokens_per_second_per_gpu)),
        ("bubble", lambda row: share_cell(row[0].bubble)),
        ("gap to the bound", lambda row: share_cell(row[0].gap)),
        ("most memory", lambda row: bytes_cell(row[0].memory_bytes)),
        ("GPUs", lambda row: count_cell(row[1].device_count)),
        ("degrees", lambda row: TableCell("-" if row[1].degrees is None else row[1].degrees.describe())),
        ("schedule", lambda row: TableCell(row[1].schedule)),
        ("micro-batches", lambda row: TableCell(row[1].short_batch)),
        ("recompute", lambda row: TableCell((row[1].degrees or row[1]).recompute.replace("_", "-"))),
        ("balance", lambda row: TableCell("-".join(map(str, row[1].balance[:MOST_PARTS])))),
        ("machine", lambda row: TableCell(row[1].topology)),
    ]
    cells = [[TableCell(name), *map(cell, rows)] for name, cell in lines]
    used = [line for line in cells if any(cell.text not in ("", "-") for cell in line[1:])]
    note = "".join(f"{note}. " for note in notes)
    return PageTable("Plans side by side", ["", *(row.name for row, _ in rows)], used, note=note)


def _figure_cell(value: float | None) -> TableCell:
    """Three digits of a figure; `-` where there is none."""
    return TableCell("-") if value is None else TableCell(three_digits(value), value)


def schedule_table(steps: Sequence[tuple[str, float | None, str]], own: float) -> PageTable:
    """The schedules on the same cuts: name, step and what is to be said."""
    return _steps_table("Other schedules on the same cuts and micro-batches", "schedule", steps, own)


def _steps_table(
    caption: str, name: str, rows: Sequence[tuple[str, float | None, str]], own: float
) -> PageTable:
    longest = max((step for _, step, _ in rows if step is not None), default=own)
    columns: list[Column] = [
        (name, lambda row: TableCell(row[0])),
        ("step", lambda row: seconds_cell(row[1], None if row[1] is None else row[1] / longest)),
        (
            "vs. this plan",
            lambda row: TableCell("-" if row[1] is None else compare_steps(row[1], own), row[1]),
        ),
        ("configuration / reason", lambda row: TableCell(row[2])),
    ]
    return make_table(caption, columns, rows)


def layer_table(profile: Profile, plan: Plan) -> PageTable:
    """The layers as profiled, at the plan's micro-batch size, and the stage of each."""
    size = -(-plan.micro_batch_size // max(plan.replicas))
    costs = profile.chain().at(size, past_largest=True)
    stage_numbers = [number for number, layers in enumerate(plan.balance) for _ in range(layers)]
    most = float((costs.forward_seconds + costs.backward_seconds).max()) or 1.0

    def seconds(name: str) -> Callable[[int], TableCell]:
        values = getattr(costs, name)
        return lambda row: seconds_cell(float(values[row]), float(values[row]) / most)

    def size_of(name: str) -> Callable[[int], TableCell]:
        values = getattr(costs, name)
        return lambda row: bytes_cell(float(values[row]))

    columns: list[Column] = [
        ("layer", count_cell),
        ("name", lambda row: TableCell(profile.layers[row].name)),
        ("kind", lambda row: TableCell(profile.layers[row].kind)),
        ("stage", lambda row: count_cell(stage_numbers[row])),
        ("forward", seconds("forward_seconds")),
        ("backward", seconds("backward_seconds")),
        ("parameters", size_of("parameter_bytes")),
        ("output", size_of("output_bytes")),
        ("saved", size_of("saved_bytes")),
        ("cut after", lambda row: TableCell(_cut_text(profile, row))),
    ]
    count = min(len(profile.layers), MOST_LAYERS)
    note = "" if count == len(profile.layers) else f"The first {count} of {len(profile.layers)} layers. "
    note += costs.outside[:1].upper() + costs.outside[1:]
    caption = f"Layers at {size} sample{'s' if size > 1 else ''} per micro-batch of a replica"
    return make_table(caption, columns, range(count), note)


def _cut_text(profile: Profile, row: int) -> str:
    layer = profile.layers[row]
    if row == len(profile.layers) - 1:
        return "end"
    return "allowed" if layer.cut_after else layer.cut_reason or "forbidden"


def figure_list(plan: Plan) -> Iterator[tuple[str, str]]:
    """The figures at the head of the page."""
    predicted = plan.prediction
    interval = step_interval(predicted)
    yield "step", f"{format_seconds(predicted.step_seconds)}{f' ({interval})' if interval else ''}"
    yield "samples/s", three_digits(predicted.samples_per_second)
    if predicted.mfu is not None:
        yield "MFU", percent(predicted.mfu)
        yield "TFLOP/s a GPU", three_digits(predicted.tflops_per_gpu or 0.0)
        yield "tokens/s a GPU", three_digits(predicted.tokens_per_second_per_gpu or 0.0)
    yield "bubble", percent(predicted.bubble)
    yield "proven bound", format_seconds(predicted.lower_bound_seconds)
