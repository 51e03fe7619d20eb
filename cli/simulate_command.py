"""`pplan simulate`: a plan, or costs given here, under any schedule; as tables, pictures and traces."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..api.stage_costs import CostOptions
from ..cost_models.errors import FileError, UsageError
from ..cost_models.figures import FigureOptions
from ..cost_models.machines import DeviceOptions
from ..planner.plan_options import Overrides
from .field_names import FIELDS, typed_text
from .output import AsJson, ProfileFile, choose_input
from .streams import console, result

if TYPE_CHECKING:
    from ..planner.plan_simulation import Simulation

PlanFile = Annotated[
    Path | None,
    typer.Argument(
        metavar="PLAN",
        help="A plan; default: newest in this directory, unless costs are given.",
        show_default=False,
    ),
]
TraceFile = Annotated[
    Path | None,
    typer.Option("--trace", metavar="FILE", help="Write a Chrome trace (JSON), which Perfetto opens."),
]
PlotFile = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE", help="Draw the timeline: FILE ends in .pdf, .png or .svg."),
]
PlotSchedules = Annotated[
    str | None,
    typer.Option(
        "--plot-schedules",
        metavar="NAME[,NAME...]",
        help="Schedules that --plot draws below it, on the same time axis.",
    ),
]
List = Annotated[
    bool,
    typer.Option("--list", help="List the schedules, or show that of --schedule, without plan or costs."),
]
AsText = Annotated[
    bool,
    typer.Option(
        "--text", help="With --list --schedule NAME: its actions as text, to start your own FILE from."
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing FILE of --trace or --plot.")]
Actions = Annotated[
    bool,
    typer.Option(
        "--actions", help="With --json: every action and transfer with start and end, memory over time."
    ),
]


def simulate_command(
    plan_file: PlanFile = None,
    *,
    overrides: Overrides,
    costs: CostOptions,
    profile_file: ProfileFile = None,
    machine: DeviceOptions,
    trace: TraceFile = None,
    plot: PlotFile = None,
    plot_schedules: PlotSchedules = None,
    figure: FigureOptions,
    force: Force = False,
    as_json: AsJson = False,
    actions: Actions = False,
    list_them: List = False,
    as_text: AsText = False,
) -> None:
    """Simulate a step of a plan, or of given costs, under a schedule.

    It prints the timeline, and where the time goes.
    """
    if list_them or as_text:
        _refuse_with(
            "--list" if list_them else "--text",
            {
                "PLAN": plan_file,
                "--trace": trace,
                "--plot": plot,
                "--plot-schedules": plot_schedules,
                "--actions": actions or None,
                **{
                    FIELDS[name]: typed_text(name)
                    for name in vars(costs) | vars(machine) | vars(figure)
                    if name in FIELDS
                },
                **{FIELDS[name]: typed_text(name) for name in ("replicas", "transfers")},
            },
            "The schedules are shown without a plan and costs: omit it.",
        )
        _show_schedules(overrides, as_text=as_text, as_json=as_json)
        return
    from .simulate_tables import Pictures, show

    if actions and not as_json:
        raise UsageError("simulate --actions: without --json", "Give both: pplan simulate --json --actions")
    pictures = Pictures(trace, plot, force, figure)
    schedules = [] if plot_schedules is None else plot_schedules.split(",")
    if plot is None and (schedules or figure != FigureOptions()):
        raise UsageError(
            "simulate: options of a figure without --plot", "Name the file: pplan simulate --plot step.pdf"
        )
    if costs != CostOptions():
        names = [name for name in ("replicas", *vars(machine)) if name in FIELDS]
        _refuse_with(
            "costs",
            {
                "PLAN": plan_file,
                "--profile": profile_file,
                **{FIELDS[name]: typed_text(name) for name in names},
            },
            "Costs such as --forward-ms stand for themselves: omit one of the two.",
        )
        pictures.check()
        from ..api.simulate import read_stage_costs, simulate_stages

        def simulated(numbers: Overrides) -> Simulation:
            return simulate_stages(read_stage_costs(costs), numbers)

    else:
        from ..api.load import read_plan
        from ..api.simulate import simulate_files

        files = read_plan(_plan_file(plan_file), profile_file)
        pictures.check(files.plan_file, files.profile_file, machine.topology)

        def simulated(numbers: Overrides) -> Simulation:
            return simulate_files(files, numbers, machine)

    others = [simulated(replace(overrides, schedule=name)) for name in schedules]
    show(simulated(overrides), pictures, others, as_json=as_json, actions=actions)


def _plan_file(path: Path | None) -> Path:
    """The plan that is named, or the newest. Raises FileError where there is none."""

    try:
        return choose_input(path, ("plan",))
    except FileError as error:
        costs = "or give costs: --forward-ms 18.5 --backward-ms 37"
        raise FileError(error.what, f"{error.hint}; {costs}") from error


def _refuse_with(what: str, others: dict[str, Any], hint: str) -> None:
    for name, value in others.items():
        if value is not None:
            raise UsageError(f"simulate: both {name}{'' if value is True else f' {value}'} and {what}", hint)


def _show_schedules(size: Overrides, *, as_text: bool, as_json: bool) -> None:
    """Print all schedules, or the one that is named."""
    from .schedule_tables import make_program, print_schedule, print_schedules, schedule_text, schedules_json

    if size.schedule is None:
        for name in ("stages", "micro_batches", "virtual_stages"):
            if (text := typed_text(name)) is not None:
                raise UsageError(
                    f"simulate --list: both {FIELDS[name]} {text} and all schedules",
                    f"Name one: pplan simulate --list --schedule zb-h1 {FIELDS[name]} {text}",
                )
        if as_text:
            raise UsageError(
                "simulate --text: of which schedule?",
                "Name it: pplan simulate --list --schedule zb-h1 --text",
            )
        if as_json:
            result(schedules_json())
        else:
            print_schedules(console())
        return
    if as_json:
        raise UsageError("simulate --list --schedule: with --json", "Use --text, or give costs.")
    from ..cost_models.schedules import find_schedule

    schedule = find_schedule(size.schedule)
    program = make_program(schedule, size.stages, size.micro_batches, size.virtual_stages)
    if as_text:
        result(schedule_text(schedule, program))
    else:
        print_schedule(schedule, program, console())
