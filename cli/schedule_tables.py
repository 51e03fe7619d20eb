"""Output of `pplan simulate --list`: tables of all schedules, or one schedule as a drawing or text."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ..api.stage_costs import StageCosts, check_size
from ..cost_models.quantities import percent
from ..cost_models.runtime import list_runtimes
from ..cost_models.schedule_text import write_program
from ..cost_models.schedules import SCHEDULES
from ..cost_models.timeline import simulate
from .table import Column, line, number, print_table, text, word
from .timeline_drawing import print_drawing

if TYPE_CHECKING:
    from rich.console import Console

    from ..cost_models.program import Program, Schedule

STAGES, MICRO_BATCHES = 4, 8
"""The size of a schedule that is shown, where none is given."""


def make_program(
    schedule: Schedule, stages: int | None, micro_batches: int | None, virtual_stages: int | None
) -> Program:
    """Make the actions of a schedule. Raises UsageError for a size that it cannot run."""
    size = (
        stages or STAGES,
        micro_batches or MICRO_BATCHES,
        virtual_stages or schedule.default_virtual_stages,
    )
    check_size(*size)
    return schedule.program(*size)


def schedule_text(schedule: Schedule, program: Program) -> str:
    """The actions of a schedule as text, from which a user starts another."""
    return write_program(f"my-{schedule.name}", program, schedule.source)


def print_schedule(schedule: Schedule, program: Program, console: Console) -> None:
    """Print a step of equal stages; F, B and W take the same time, a B without a W as long as both."""
    weight = (1e-3,) if program.splits_backward else None
    costs = StageCosts((1e-3,), (1e-3,) if weight else (2e-3,), weight, (0.0,)).costs(program)
    timeline = simulate(program, costs)
    line(console, f"{schedule.name}: {schedule.source}. Needs: {schedule.needs}.", style="bold")
    print_drawing(timeline, console)
    in_flight = ", ".join(f"{max(program.in_flight(device)):g}" for device in range(program.devices))
    line(
        console,
        f"Bubble {percent(timeline.bubble)} of all stages' time; {percent(timeline.bubble_rate_span)} of the "
        "longest span of a stage, from its first to its last action.",
    )
    seconds = "B takes twice as long as F"
    if weight:
        seconds = "F, B and W take the same time, a B without a W as long as both"
    line(console, f"Equal stages without transfers; {seconds}; in flight {in_flight}.")


def print_schedules(console: Console) -> None:
    """Print all schedules with their formulas, runtimes, needs and sources."""
    name: Column[Schedule] = word("name", lambda schedule: schedule.name)
    columns: list[Column[Schedule]] = [
        word("name\n", lambda schedule: schedule.name),
        text("bubble\n", lambda schedule: schedule.bubble, min_width=20),
        text("micro-batches\nin flight", lambda schedule: schedule.in_flight_formula, min_width=20),
        number("weights\n", _weights, drop=3),
        number("stale by\n", _staleness, drop=2),
    ]
    schedules = list(SCHEDULES.values())
    line(console, "Schedules for pplan simulate --schedule", style="bold")
    print_table(console, columns, schedules)
    line(
        console,
        "Stage i of p (0-based), m micro-batches, v virtual stages a device; F, B, W: seconds of a forward, "
        "a backward (of the input, where there is W) and a weight gradient.",
    )
    line(
        console,
        "Bubble: idle share of the longest span of a stage, from its first to its last action, of equal "
        "stages without transfers. Weights: versions, or copies, that a device keeps. Stale by: updates.",
    )
    runs: list[Column[Schedule]] = [
        name,
        text("runs in", lambda schedule: ", ".join(list_runtimes(schedule.name)) or None),
    ]
    print_table(console, runs, schedules, title="What runs them")
    needs: list[Column[Schedule]] = [name, text("needs", lambda schedule: schedule.needs)]
    print_table(console, needs, schedules, title="What they need")
    sources: list[Column[Schedule]] = [name, text("paper", lambda schedule: schedule.source)]
    print_table(console, sources, schedules, title="Sources")


EXAMPLE = (4, 8)
"""Stages and micro-batches at which versions and staleness are told from their functions."""
FORMULAS = {(4, 3, 2, 1): "p-i", (3, 2, 1, 0): "p-1-i"}


def _weights(schedule: Schedule) -> str:
    return f"{schedule.copies} copies" if schedule.copies > 1 else _versions(schedule)


def _versions(schedule: Schedule) -> str:
    return _by_stage([schedule.weight_versions(stage, *EXAMPLE) for stage in range(EXAMPLE[0])])


def _staleness(schedule: Schedule) -> str:
    return _by_stage([schedule.staleness(stage, *EXAMPLE) for stage in range(EXAMPLE[0])])


def _by_stage(values: list[Any]) -> str:
    if len(set(values)) == 1:
        return f"{values[0]:g}"
    return FORMULAS.get(tuple(values), f"{min(values):g} to {max(values):g}")


def schedules_json() -> str:
    """The schedules as JSON."""
    records = [_record(schedule) for schedule in SCHEDULES.values()]
    return json.dumps(records, indent=1, ensure_ascii=False) + "\n"


def _record(schedule: Schedule) -> dict[str, Any]:
    return {
        "name": schedule.name,
        "bubble": schedule.bubble,
        "in_flight": schedule.in_flight_formula,
        "weight_versions": _versions(schedule),
        "staleness": _staleness(schedule),
        "synchronous": schedule.synchronous,
        "virtual_stages": schedule.default_virtual_stages,
        "copies": schedule.copies,
        "needs": schedule.needs,
        "runtimes": list_runtimes(schedule.name),
        "source": schedule.source,
    }
