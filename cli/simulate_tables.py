"""What `pplan simulate` prints: the answer, the drawing, and where the time of each stage goes."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from ..api.simulation import Simulation
from ..cost_models.quantities import format_bytes, format_seconds
from ..planner.plan_file import TIE
from .ledger_table import StageMemory, print_ledger
from .number_format import compared, percent, ranges, three_digits
from .table_style import Column, figure, line, table, text, titled
from .timeline_drawing import print_drawing


def print_simulation(found: Simulation, console: Console) -> None:
    """Prints everything about a simulated step."""
    answer, *more = answer_lines(found)
    line(console, answer, style="bold")
    for further in more:
        line(console, further)
    console.print()
    print_drawing(found.timeline, console)
    titled(console, "Where the time of each stage goes", _stages(found, console))
    if found.memory is not None:
        own = [StageMemory(stage.terms, stage.bytes, stage.limit_bytes) for stage in found.memory]
        print_ledger(own, console)
    if found.notes:
        console.print()
    for note in found.notes:
        line(console, f"Note: {note}")


def answer_lines(found: Simulation) -> list[str]:
    """The step in a line, and what else there is to know of it."""
    timeline = found.timeline
    step = timeline.step_seconds
    samples = found.samples_per_second
    rate = "" if samples is None else f", {three_digits(samples)} samples/s"
    lines = [
        f"{found.title}: {format_seconds(step)} for all of them."
        if found.steady
        else f"{found.title}: {format_seconds(step)} a step{rate}.",
        f"Bubble {percent(timeline.bubble)} of all stages' time; {percent(timeline.bubble_rate_span)} of the "
        "longest span of a stage, from its first to its last action.",
    ]
    if found.steady is not None:
        pace = format_seconds(found.steady.seconds_per_micro_batch)
        nearly = "" if found.steady.exact else " (a mean: it does not repeat exactly)"
        lines.append(f"Steady: {pace} a micro-batch{nearly}{rate}.")
    if found.plan_seconds is not None:
        lines.append(_against_the_plan(found.plan, step, found.plan_seconds))
    return lines


def _against_the_plan(plan: str, step: float, own: float) -> str:
    found = compared(step, own)
    verb = "" if found.endswith("the same") else "this is "
    return f"{plan} as it is takes {format_seconds(own)}: {verb}{found}."


def _stages(found: Simulation, console: Console) -> Table:
    columns = _columns(found)
    rows = [[cells[stage] for _, cells in columns] for stage in range(found.stages)]
    return table(console, [column for column, _ in columns], rows)


def _columns(found: Simulation) -> list[tuple[Column, list[str]]]:
    """Every column with its cells, those left out that have nothing to say."""
    times = found.timeline.stage_times
    made: list[tuple[Column, list[str]]] = [(figure("stage"), [str(stage) for stage in range(found.stages)])]
    if found.layers is not None:
        made.append((text("layers", leaves=2, folds_at=9), [_layers(chunks) for chunks in found.layers]))
    for name in ("compute", "transfer", "fill", "imbalance", "drain", "update"):
        seconds = [float(getattr(time, name)) for time in times]
        if any(seconds) or name != "update":
            shown = [_tidy(value, found.timeline.step_seconds) for value in seconds]
            made.append((figure(_HEADS.get(name, name), leaves=8 if name in ("fill", "drain") else 0), shown))
    made.append((figure("in flight", leaves=6), [f"{held:g}" for held in found.timeline.peak_in_flight]))
    if not found.schedule.synchronous:
        made.append((figure("versions", leaves=4), [f"{count:g}" for count in found.weight_versions]))
        made.append((figure("stale by", leaves=3), [str(updates) for updates in found.staleness]))
    return made + _memory_columns(found)


def _layers(chunks: Sequence[tuple[int, int]]) -> str:
    return ranges({layer for first, last in chunks for layer in range(first, last + 1)})


_HEADS = {"transfer": "transfers"}


def _memory_columns(found: Simulation) -> list[tuple[Column, list[str]]]:
    if found.memory is None:
        return []
    made = [(figure("memory", leaves=7), [format_bytes(own.bytes) for own in found.memory])]
    limits = [own.limit_bytes for own in found.memory]
    if any(limit is not None for limit in limits):
        shown = ["-" if limit is None else format_bytes(limit) for limit in limits]
        made.append((figure("limit", leaves=1), shown))
    return made


def _tidy(seconds: float, step: float) -> str:
    """What is left by the rounding of sums is nothing."""
    return "-" if seconds <= TIE * step else format_seconds(seconds)
