"""`pplan simulate`: a plan, or costs given here, under any schedule; as tables, pictures and traces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from ..cost_models.errors import FileError, UsageError
from ..cost_models.schedules import SCHEDULES
from .given_costs import GivenCosts, check_size, check_steady_size, milliseconds
from .machine_options import Bandwidth, Gpu, GpusPerNode, Latency, MachineOptions, Memory, TopologyFile
from .options import whole_number, word

if TYPE_CHECKING:
    from ..cost_models.schedules import Program
    from .simulation import Simulation

T = TypeVar("T")


def _costs(name: str, text: str) -> Any:
    return typer.Option(
        name,
        metavar="MS[,MS...]",
        help=text,
        rich_help_panel="Costs, instead of a plan: one value, or one a stage",
    )


PlanFile = Annotated[
    Path | None,
    typer.Argument(
        metavar="PLAN",
        help="A plan; default: newest in this directory, unless costs are given.",
        show_default=False,
    ),
]
ScheduleName = Annotated[
    str | None,
    typer.Option(
        "--schedule",
        metavar="NAME",
        help="Another schedule than the plan's; pplan schedules lists them.",
        parser=word("--schedule", SCHEDULES),
    ),
]
Stages = Annotated[
    int | None,
    typer.Option(
        "--stages",
        metavar="N",
        help="Devices of the pipeline; for a plan it cuts the layers anew.",
        parser=whole_number("--stages", at_least=1),
    ),
]
MicroBatches = Annotated[
    int | None,
    typer.Option(
        "--micro-batches",
        metavar="M",
        help="Of a step; a plan's global batch is cut into so many.",
        parser=whole_number("--micro-batches", at_least=1),
    ),
]
VirtualStages = Annotated[
    int | None,
    typer.Option(
        "--virtual-stages",
        metavar="V",
        help="Parts of the layers on each device; costs of a stage are shared by its parts equally.",
        parser=whole_number("--virtual-stages", at_least=1),
    ),
]
Replicas = Annotated[
    int | None,
    typer.Option(
        "--replicas",
        metavar="R",
        help="Devices that share each stage of a plan whose layers are cut anew; default: as many as now.",
        parser=whole_number("--replicas", at_least=1),
    ),
]
TRANSFERS = ("overlapped", "blocking", "blocking-receive", "rendezvous")
"""As of `Costs.transfers`, which is not imported here: the help would wait for numpy."""
Transfers = Annotated[
    str,
    typer.Option(
        "--transfers",
        metavar="|".join(TRANSFERS),
        help="Whether communication overlaps computation, or a stage waits for its sends, receives or both.",
        parser=word("--transfers", TRANSFERS),
    ),
]
Forward = Annotated[str | None, _costs("--forward-ms", "Forward of a micro-batch.")]
Backward = Annotated[
    str | None, _costs("--backward-ms", "Its backward; with --weight-ms, the gradient of the input alone.")
]
Weight = Annotated[str | None, _costs("--weight-ms", "The gradient of the weights.")]
Transfer = Annotated[
    str | None, _costs("--transfer-ms", "From a stage to the next, and back: latency only; default: 0.")
]
ProfileFile = Annotated[
    Path | None,
    typer.Option("--profile", metavar="FILE", help="The plan's profile, where it is not beside it."),
]
TraceFile = Annotated[
    Path | None,
    typer.Option("--trace", metavar="FILE", help="Write a Chrome trace (JSON), which Perfetto opens."),
]
SvgFile = Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Write the timeline as SVG.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing FILE of --trace or --svg.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Actions = Annotated[
    bool,
    typer.Option(
        "--actions", help="With --json: every action and transfer with start and end, memory over time."
    ),
]


def simulate_command(
    plan_file: PlanFile = None,
    schedule: ScheduleName = None,
    stages: Stages = None,
    micro_batches: MicroBatches = None,
    virtual_stages: VirtualStages = None,
    replicas: Replicas = None,
    transfers: Transfers = "overlapped",
    forward_ms: Forward = None,
    backward_ms: Backward = None,
    weight_ms: Weight = None,
    transfer_ms: Transfer = None,
    profile_file: ProfileFile = None,
    gpus_per_node: GpusPerNode = None,
    gpu: Gpu = None,
    memory: Memory = None,
    bandwidth: Bandwidth = None,
    latency: Latency = None,
    topology: TopologyFile = None,
    trace: TraceFile = None,
    svg: SvgFile = None,
    force: Force = False,
    as_json: AsJson = False,
    actions: Actions = False,
) -> None:
    """Simulate a step of a plan, or of given costs, under any schedule: its timeline, and where time goes."""
    from .simulation_output import Pictures, show

    if actions and not as_json:
        raise UsageError("simulate --actions: without --json", "Give both: pplan simulate --json --actions")
    asked = Asked(schedule, stages, micro_batches, virtual_stages, transfers, replicas)
    pictures = Pictures(trace, svg, force)
    costs = {
        "--forward-ms": forward_ms,
        "--backward-ms": backward_ms,
        "--weight-ms": weight_ms,
        "--transfer-ms": transfer_ms,
    }
    machine = MachineOptions(gpus_per_node, gpu, memory, bandwidth, latency, topology)
    if any(text is not None for text in costs.values()):
        _refuse_with_costs(
            {"PLAN": plan_file, "--profile": profile_file, "--replicas": replicas, **machine.by_name}
        )
        pictures.check()
        found = simulate_costs(costs, asked)
    else:
        from .simulated_plan import read_plan, simulate_read

        read = read_plan(_plan_file(plan_file), profile_file)
        pictures.check(read.plan_file, read.profile_file, topology)
        found = simulate_read(read, asked, machine)
    show(found, pictures, as_json=as_json, actions=actions)


@dataclass(frozen=True)
class Asked:
    """What the options say of the schedule; None: as the plan says, or what the schedule is used with."""

    schedule: str | None
    stages: int | None
    micro_batches: int | None
    virtual_stages: int | None
    transfers: str = "overlapped"
    replicas: int | None = None


def _plan_file(named: Path | None) -> Path:
    """The plan that is named, or the newest. Raises FileError where there is none."""
    from .default_input import named_or_newest

    try:
        return named_or_newest(named, ("plan",))
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


def simulate_costs(costs: dict[str, str | None], asked: Asked) -> Simulation:
    """A step of the costs given. Raises UsageError."""
    from ..cost_models.timeline import simulate
    from .simulation import LONG_ENOUGH, Simulation

    given = _given(costs)
    schedule = SCHEDULES[_needed("--schedule", "1f1b", asked.schedule)]
    stages = _needed("--stages", "8", asked.stages or _stages_of(given))
    count = _needed("--micro-batches", "32", asked.micro_batches)
    chunks = schedule.default_virtual_stages if asked.virtual_stages is None else asked.virtual_stages
    check_size(stages, count, chunks)
    if not schedule.synchronous:
        check_steady_size(stages, LONG_ENOUGH * stages, chunks)
    program = with_options(lambda: schedule.program(stages, count, chunks))
    return Simulation(
        schedule=schedule,
        micro_batches=count,
        virtual_stages=chunks,
        timeline=simulate(program, given.costs(program, asked.transfers)),
        notes=(*_notes(program, given), *told(asked.transfers)),
    )


def _given(costs: dict[str, str | None]) -> GivenCosts:
    def values(name: str) -> tuple[float, ...] | None:
        text = costs[name]
        return None if text is None else milliseconds(text, name)

    return GivenCosts(
        forward=milliseconds(_needed("--forward-ms", "18.5", costs["--forward-ms"]), "--forward-ms"),
        backward=milliseconds(_needed("--backward-ms", "37", costs["--backward-ms"]), "--backward-ms"),
        weight=values("--weight-ms"),
        transfer=values("--transfer-ms") or (0.0,),
    )


def _needed(name: str, example: str, value: T | None) -> T:
    if value is None:
        raise UsageError(
            f"simulate: missing option '{name}'", f"Costs without a plan need it, as in {name} {example}."
        )
    return value


def _stages_of(given: GivenCosts) -> int | None:
    """The stages, where values are given for each."""
    most = max(len(given.forward), len(given.backward), len(given.weight or ()))
    return most if most > 1 else None


def told(transfers: str) -> list[str]:
    """A note where transfers do not overlap."""
    return [] if transfers == "overlapped" else [f"transfers are {transfers}"]


def _notes(program: Program, given: GivenCosts) -> list[str]:
    notes = []
    if program.parts > 1:
        notes.append(
            f"each of the {program.parts:g} virtual stages of a device takes an equal part of its costs"
        )
    if given.weight is not None and not program.splits_backward:
        notes.append(
            "the schedule does not split the backward: a B is --backward-ms and --weight-ms together"
        )
    return notes


def with_options(make: Callable[[], T]) -> T:
    """What `make` returns; an error of it names the option instead of the argument."""
    try:
        return make()
    except UsageError as error:
        for argument in ("virtual stages", "micro-batches", "stages"):
            if error.what.startswith(f"{argument} "):
                option = f"--{argument.replace(' ', '-')}"
                raise UsageError(option + error.what.removeprefix(argument), error.hint) from error
        raise
