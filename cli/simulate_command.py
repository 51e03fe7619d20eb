"""`pplan simulate`: a plan, or costs given here, under any schedule; as tables, pictures and traces."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from ..cost_models.errors import FileError, UsageError
from ..cost_models.schedules import SCHEDULES
from .machine_options import Bandwidth, Gpu, GpusPerNode, Latency, Memory, TopologyFile, TypedMachine
from .options import whole_number, word

if TYPE_CHECKING:
    from ..api.simulation import Simulation
    from ..api.stage_costs import StageCosts
    from ..planner.layout import Overrides

T = TypeVar("T")
MOST_MILLISECONDS = 1e9
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


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
    from ..planner.layout import Overrides
    from .simulation_output import Pictures, show

    if actions and not as_json:
        raise UsageError("simulate --actions: without --json", "Give both: pplan simulate --json --actions")
    asked = Overrides(schedule, stages, micro_batches, virtual_stages, transfers, replicas)
    pictures = Pictures(trace, svg, force)
    costs = {
        "--forward-ms": forward_ms,
        "--backward-ms": backward_ms,
        "--weight-ms": weight_ms,
        "--transfer-ms": transfer_ms,
    }
    machine = TypedMachine(gpus_per_node, gpu, memory, bandwidth, latency, topology)
    if any(text is not None for text in costs.values()):
        _refuse_with_costs(
            {"PLAN": plan_file, "--profile": profile_file, "--replicas": replicas, **machine.by_name}
        )
        pictures.check()
        found = _simulate_costs(costs, asked)
    else:
        from ..api.load import read_plan
        from ..api.simulate import simulate_files

        read = read_plan(_plan_file(plan_file), profile_file)
        pictures.check(read.plan_file, read.profile_file, topology)
        found = simulate_files(read, asked, machine.arguments(), topology)
    show(found, pictures, as_json=as_json, actions=actions)


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


def _simulate_costs(costs: dict[str, str | None], asked: Overrides) -> Simulation:
    """A step of the costs given. Raises UsageError."""
    from ..api.simulate import simulate_costs

    given = _stage_costs(costs)
    return simulate_costs(
        given,
        schedule=_needed("--schedule", "1f1b", asked.schedule),
        stages=_needed("--stages", "8", asked.stages or _stages_of(given)),
        micro_batches=_needed("--micro-batches", "32", asked.micro_batches),
        virtual_stages=asked.virtual_stages,
        transfers=asked.transfers,
    )


def _stage_costs(costs: dict[str, str | None]) -> StageCosts:
    from ..api.stage_costs import StageCosts

    def values(name: str) -> tuple[float, ...] | None:
        text = costs[name]
        return None if text is None else milliseconds(text, name)

    return StageCosts(
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


def _stages_of(given: StageCosts) -> int | None:
    """The stages, where values are given for each."""
    most = max(len(given.forward), len(given.backward), len(given.weight or ()))
    return most if most > 1 else None


def milliseconds(text: str, name: str) -> tuple[float, ...]:
    """`18.5` or `18.5,20,19` as seconds. Raises UsageError."""
    return tuple(_seconds(part.strip(), f"{name} {text}", name) for part in text.split(","))


def _seconds(part: str, shown: str, name: str) -> float:
    hint = f"Give milliseconds, one value or one a stage: {name} 18.5 or {name} 18.5,20,19"
    if not _NUMBER.fullmatch(part):
        raise UsageError(f"{shown}: {part!r} is not a number of milliseconds", hint)
    value = float(part)
    if value < 0:
        raise UsageError(f"{shown}: {part} must not be negative", hint)
    if not math.isfinite(value) or value > MOST_MILLISECONDS:
        raise UsageError(f"{shown}: {part} must be at most {MOST_MILLISECONDS:.0f}", hint)
    return value / 1e3
