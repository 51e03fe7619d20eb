"""What `pplan simulate` prints: the answer, the drawing, and where the time of each stage goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console

from ..api.simulation import Simulation
from ..cost_models.quantities import format_bytes, format_seconds
from ..cost_models.simulator.result import StageTime
from ..planner.plan_records import TIE
from .number_format import compared, percent, ranges, three_digits
from .plan_tables import StageMemory, print_ledger
from .table import Column, number, print_head, print_notes, print_table, text
from .timeline_drawing import print_drawing


def print_simulation(found: Simulation, console: Console) -> None:
    """Prints everything about a simulated step."""
    print_head(console, answer_lines(found))
    console.print()
    print_drawing(found.timeline, console)
    _print_stages(found, console)
    if found.memory is not None:
        own = [StageMemory(stage.terms, stage.bytes, stage.limit_bytes) for stage in found.memory]
        print_ledger(own, console)
    print_notes(console, found.notes)


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


def _print_stages(found: Simulation, console: Console) -> None:
    """A row a stage; columns that have nothing to say are left out."""
    chunks, memory = found.layers or (), found.memory or ()
    columns: list[Column[int]] = [
        number("stage", lambda row: row),
        text("layers", lambda row: _layers(chunks[row]), drop=2, min_width=9, shown=bool(found.layers)),
        *_times(found),
        number("in flight", lambda row: found.timeline.peak_in_flight[row], "{:g}".format, drop=6),
        *_weights(found),
        number("memory", lambda row: memory[row].bytes, format_bytes, drop=7, shown=bool(memory)),
        number(
            "limit",
            lambda row: memory[row].limit_bytes,
            format_bytes,
            drop=1,
            shown=any(own.limit_bytes is not None for own in memory),
        ),
    ]
    print_table(console, columns, range(found.stages), title="Where the time of each stage goes")


def _layers(chunks: Sequence[tuple[int, int]]) -> str:
    return ranges({layer for first, last in chunks for layer in range(first, last + 1)})


def _times(found: Simulation) -> list[Column[int]]:
    times = found.timeline.stage_times

    def seconds(heading: str, value: Callable[[StageTime], float], drop: int = 0) -> Column[int]:
        return number(heading, lambda row: _tidy(value(times[row]), found.timeline.step_seconds), drop=drop)

    columns = [
        seconds("compute", lambda own: own.compute),
        seconds("transfers", lambda own: own.transfer),
        seconds("fill", lambda own: own.fill, drop=8),
        seconds("imbalance", lambda own: own.imbalance),
        seconds("drain", lambda own: own.drain, drop=8),
    ]
    if any(own.update for own in times):
        columns.append(seconds("update", lambda own: own.update))
    return columns


def _weights(found: Simulation) -> list[Column[int]]:
    """Of an asynchronous schedule."""
    if found.schedule.synchronous:
        return []
    return [
        number("versions", lambda row: found.weight_versions[row], "{:g}".format, drop=4),
        number("stale by", lambda row: found.staleness[row], drop=3),
    ]


def _tidy(seconds: float, step: float) -> str:
    """What is left by the rounding of sums is nothing."""
    return "-" if seconds <= TIE * step else format_seconds(seconds)
