"""`pplan simulate`: a plan, or costs given here, under any schedule; as tables, pictures and traces."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..api.stage_costs import CostOptions
from ..cost_models.errors import FileError, UsageError
from ..cost_models.machines import DeviceOptions
from ..planner.plan_options import Overrides
from .field_names import FIELDS, typed_text
from .output import AsJson, ProfileFile, choose_input

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
SvgFile = Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Write the timeline as SVG.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing FILE of --trace or --svg.")]
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
    svg: SvgFile = None,
    force: Force = False,
    as_json: AsJson = False,
    actions: Actions = False,
) -> None:
    """Simulate a step of a plan, or of given costs, under a schedule.

    It prints the timeline, and where the time goes.
    """
    from .simulate_tables import Pictures, show

    if actions and not as_json:
        raise UsageError("simulate --actions: without --json", "Give both: pplan simulate --json --actions")
    pictures = Pictures(trace, svg, force)
    if costs != CostOptions():
        _refuse_with_costs({"PLAN": plan_file, "--profile": profile_file})
        names = [name for name in ("replicas", *vars(machine)) if name in FIELDS]
        _refuse_with_costs({FIELDS[name]: typed_text(name) for name in names})
        pictures.check()
        from ..api.simulate import read_stage_costs, simulate_stages

        simulation = simulate_stages(read_stage_costs(costs), overrides)
    else:
        from ..api.load import read_plan
        from ..api.simulate import simulate_files

        files = read_plan(_plan_file(plan_file), profile_file)
        pictures.check(files.plan_file, files.profile_file, machine.topology)
        simulation = simulate_files(files, overrides, machine)
    show(simulation, pictures, as_json=as_json, actions=actions)


def _plan_file(path: Path | None) -> Path:
    """The plan that is named, or the newest. Raises FileError where there is none."""

    try:
        return choose_input(path, ("plan",))
    except FileError as error:
        costs = "or give costs: --forward-ms 18.5 --backward-ms 37"
        raise FileError(error.what, f"{error.hint}; {costs}") from error


def _refuse_with_costs(others: dict[str, Any]) -> None:
    for name, value in others.items():
        if value is not None:
            raise UsageError(
                f"simulate: both {name} {value} and costs",
                "Costs such as --forward-ms stand for themselves: omit one of the two.",
            )
