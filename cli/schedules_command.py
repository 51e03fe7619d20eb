"""`pplan schedules`: the schedules that `pplan simulate` knows, or one of them, drawn or written out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..cost_models import arguments
from ..cost_models.arguments import Options, option, options_class
from ..cost_models.errors import UsageError
from ..cost_models.runtime import list_runtimes
from .option_parameters import action_parser
from .streams import console, result

if TYPE_CHECKING:
    from rich.console import Console

    from ..cost_models.program import Schedule


ACTIONS = ("list", "show")


@options_class
class ScheduleSize(Options):
    """The numbers with which a schedule is shown."""

    stages: int = option(4, arguments.whole, "Devices of the pipeline that is shown.", "N", least=1)
    micro_batches: int = option(8, arguments.whole, "Its micro-batches.", "M", least=1)
    virtual_stages: int | None = option(
        None, arguments.optional_whole, "Parts of the layers on each device.", "V", least=1
    )


def _list_names() -> Iterable[str]:
    from ..cost_models.schedules import SCHEDULES

    return SCHEDULES


def schedules_command(
    action: Annotated[
        str,
        typer.Argument(
            metavar="[list|show]",
            help="List all, or show one.",
            parser=action_parser("schedules", ACTIONS, _list_names),
        ),
    ] = "list",
    name: Annotated[
        str | None, typer.Argument(metavar="NAME|FILE", help="A schedule, or your own.", show_default=False)
    ] = None,
    *,
    size: ScheduleSize,
    as_text: Annotated[
        bool, typer.Option("--text", help="Print its actions as text, to start your own FILE from.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """List the schedules, or show one.

    The list has their bubble, memory and weights, what they need, what runs them, and their source.
    """

    if action == "show":
        if name is None:
            raise UsageError("schedules show: no schedule", "For example: pplan schedules show zb-h1")
        if as_json:
            raise UsageError("schedules show: with --json", "Use --text, or pplan simulate --json --actions.")
        _show(name, size, as_text=as_text)
        return
    if name is not None or as_text or size != ScheduleSize():
        raise UsageError("schedules list: shows no single one", "To see one: pplan schedules show zb-h1")
    if as_json:
        result(_json())
    else:
        _print(console())


def _show(name: str, size: ScheduleSize, *, as_text: bool) -> None:
    """A step in which F, B and W take the same time, and a B without W as long as both; or the actions."""
    from ..api.stage_costs import StageCosts, check_size
    from ..cost_models.quantities import percent
    from ..cost_models.schedule_text import schedule_word, write_program
    from ..cost_models.schedules import find_schedule
    from ..cost_models.timeline import simulate
    from .table import line
    from .timeline_drawing import print_drawing

    schedule = find_schedule(schedule_word("schedule", name, ()))
    chunks = size.virtual_stages or schedule.default_virtual_stages
    check_size(size.stages, size.micro_batches, chunks)
    program = schedule.program(size.stages, size.micro_batches, chunks)
    if as_text:
        result(write_program(f"my-{schedule.name}", program, schedule.source))
        return
    weight = (1e-3,) if program.splits_backward else None
    costs = StageCosts((1e-3,), (1e-3,) if weight else (2e-3,), weight, (0.0,)).costs(program)
    timeline = simulate(program, costs)
    line(console(), f"{schedule.name}: {schedule.source}. Needs: {schedule.needs}.", style="bold")
    print_drawing(timeline, console())
    flying = ", ".join(f"{max(program.in_flight(device)):g}" for device in range(program.devices))
    line(
        console(),
        f"Bubble {percent(timeline.bubble)} of all stages' time; {percent(timeline.bubble_rate_span)} of the "
        "longest span of a stage, from its first to its last action.",
    )
    seconds = "B takes twice as long as F"
    if weight:
        seconds = "F, B and W take the same time, a B without a W as long as both"
    line(console(), f"Equal stages without transfers; {seconds}; in flight {flying}.")


def _print(console: Console) -> None:
    from ..cost_models.schedules import SCHEDULES
    from .table import Column, line, number, print_table, text, word

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


def _json() -> str:
    import json

    from ..cost_models.schedules import SCHEDULES

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
