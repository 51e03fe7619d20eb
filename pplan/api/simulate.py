"""A simulated step: of a plan, on its machine or another one, or of costs given instead of a plan's."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from ..cost_models.arguments import Converted, arguments_class, list_declarations, options_from, takes
from ..cost_models.document import Document, MadeBy, Record
from ..cost_models.errors import MachineError, UsageError
from ..cost_models.figures import Drawing, draw_timelines, figure_options
from ..cost_models.machines import DeviceOptions
from ..cost_models.program import Program
from ..cost_models.quantities import format_seconds, html_table
from ..cost_models.schedules import find_schedule
from ..cost_models.timeline import Timeline
from ..cost_models.timeline import simulate as simulate_program
from ..cost_models.topology import Topology
from ..cost_models.topology_file import check_processor_seconds, make_topology
from ..planner.plan_file import TIE, Plan
from ..planner.plan_options import Overrides, StepOptions
from ..planner.plan_simulation import (
    LONG_ENOUGH,
    Simulation,
    count_devices,
    read_machine,
    simulate_plan,
)
from ..profiler.profile_file import Profile, profiled_device
from .load import PlanAndProfile, as_plan, check_layers, profile_and_reference
from .machine import own_profiles
from .stage_costs import CostOptions, StageCosts, check_size, check_steady_size
from .trace import trace_json

T = TypeVar("T")


@dataclass(frozen=True, eq=False, repr=False)
class SimulatedStep(Timeline):
    """The timeline of a plan's step, and what was simulated."""

    simulation: Simulation

    def plot(self, **style: Any) -> Drawing:
        """Draw the timeline with matplotlib.

        Args:
            style: Fields of `FigureOptions`: `title`, `size`, `font`, `font_size`, `greyscale`, `colour_by`.

        Returns:
            The figure. A notebook shows it; `save("step.pdf")` writes it as PDF, PNG or SVG.

        Raises:
            MachineError: matplotlib is not installed.
            UsageError: An option is wrong.
        """
        return plot_timelines({"": self}, **{"title": self.simulation.title, **style})

    def to_trace(self) -> str:
        """The step as a Chrome trace (JSON), which https://ui.perfetto.dev opens."""
        return trace_json(self.simulation)

    def to_records(self) -> list[dict[str, Any]]:
        """Every action: its stage, kind ("F", "B" or "W"), micro-batch, chunk, start and end in seconds."""
        return [action.model_dump() for action in simulated_actions(self.simulation)]

    def to_dataframe(self) -> Any:
        """`to_records` as a DataFrame of pandas. Raises MachineError where pandas is not installed."""
        try:
            import pandas
        except ModuleNotFoundError:
            raise MachineError(
                "a DataFrame needs pandas, which is not installed",
                "Install it: pip install pandas; or take to_records().",
            ) from None
        return pandas.DataFrame.from_records(self.to_records())

    def _repr_html_(self) -> str:
        """Show in a notebook where the time of each stage goes."""
        rows = [
            [str(stage), *map(format_seconds, times), f"{peak:g}"]
            for stage, (times, peak) in enumerate(zip(self.stage_times, self.peak_in_flight, strict=True))
        ]
        causes = ("compute", "transfers", "warm-up, cool-down", "imbalance", "update")
        return html_table(repr(self)[1:-1], ("stage", *causes, "in flight"), rows)


def plot_timelines(timelines: Mapping[str, Timeline], **style: Any) -> Drawing:
    """Draw timelines below each other on one time axis.

    Args:
        timelines: Simulated steps by their names.
        style: Fields of `FigureOptions`: `title`, `size`, `font`, `font_size`, `greyscale`, `colour_by`.

    Returns:
        The figure. A notebook shows it; `save("steps.pdf")` writes it as PDF, PNG or SVG.

    Raises:
        MachineError: matplotlib is not installed.
        UsageError: An option is wrong, or there is no timeline.

    >>> import pplan
    >>> costs = dict(stages=4, micro_batches=8, forward_ms=10, backward_ms=10, weight_ms=10)
    >>> steps = {name: pplan.simulate_costs(schedule=name, **costs) for name in ("1f1b", "zb-h1")}
    >>> pplan.plot_timelines(steps, title="Zero bubble", greyscale=True)
    <Drawing: Zero bubble>
    """
    options = figure_options(style)
    if not isinstance(timelines, Mapping) or not timelines:
        raise UsageError(
            f"timelines={timelines!r}: is no mapping of names to timelines but of type "
            f"{type(timelines).__name__}",
            'For example: {"1f1b": pplan.simulate(plan, profile)}.',
        )
    return draw_timelines(options.title or "Timelines", timelines, options)


def as_step(simulation: Simulation) -> SimulatedStep:
    """The timeline of a simulation, with all that a caller may make of it."""
    timeline = simulation.timeline
    return SimulatedStep(
        order=timeline.order,
        costs=timeline.costs,
        run=timeline.run,
        reductions=timeline.reductions,
        stage_end=timeline.stage_end,
        simulation=simulation,
    )


@arguments_class
class SimulateArguments(Overrides, DeviceOptions):
    """The arguments of `simulate`: overrides of the plan, and of its machine."""

    plan: Plan | str | Path = field(kw_only=False)
    profile: Profile | str | Path = field(kw_only=False)


@takes(SimulateArguments)
def simulate(
    plan: Plan | str | Path,
    profile: Profile | str | Path,
    **options: Any,
) -> SimulatedStep:
    """A step of `plan`, simulated with the costs of `profile`: start and end of every action.

    `plan` and `profile` may be the paths of their files. The `options` are the fields of `Overrides`, what is
    simulated otherwise than the plan says, and of `DeviceOptions` (but `gpus`): another machine than the
    plan's, or what is changed of it; those of `pplan simulate --help`. The plan's replicas stay, or have to
    be named where they cannot; other `stages` than the plan's are on one device each.

    Of the result: `step_seconds`, `bubble`, `stage_times`, `peak_in_flight`, `spans`, `transfers`, and
    `plot()`, `to_trace()`, `to_records()`, `to_dataframe()`.

    >>> import pplan
    >>> pplan.simulate("gpt.plan.json", "gpt.profile.json", schedule="gpipe")
    <SimulatedStep: 3 stages, 16 micro-batches, 439 ms a step, bubble 18.4 %>

    Raises UsageError (numbers that the schedule, the global batch or the cuts do not allow, a profile of
    other layers), FileError.
    """
    plan_document = as_plan(plan)
    measured_profile, reference = profile_and_reference(profile, "", "", plan_document)
    check_layers(plan_document, reference)
    overrides, other = options_from(
        options, *(Overrides, DeviceOptions), of="simulate", takes=list_declarations(SimulateArguments)
    )
    machine = _topology(
        plan_document, measured_profile, other, count_devices(plan_document, overrides), "plan"
    )
    profiles = own_profiles(machine, other.folder)
    chain = measured_profile.chain()
    return as_step(_name_fields(lambda: simulate_plan(plan_document, chain, machine, overrides, profiles)))


def simulate_files(files: PlanAndProfile, overrides: Overrides, machine: DeviceOptions) -> Simulation:
    """A step of the plan, on its machine or on `machine`. Raises UsageError, FileError."""
    plan, chain = files.plan, files.profile.chain()
    topology = _topology(plan, files.profile, machine, count_devices(plan, overrides), str(files.plan_file))
    profiles = own_profiles(topology, files.plan_file.parent if machine.topology is None else machine.folder)
    simulation = _name_fields(lambda: simulate_plan(plan, chain, topology, overrides, profiles))
    as_it_is = overrides == Overrides()
    unchanged = simulation if as_it_is else simulate_plan(plan, chain, topology, profiles=profiles)
    differences = _differences(plan, unchanged.mini_batch_seconds, are_overridden=machine != DeviceOptions())
    return replace(
        simulation,
        plan=files.plan_file.name,
        plan_seconds=None if as_it_is else unchanged.mini_batch_seconds,
        notes=(*simulation.notes, *transfer_note(overrides.transfers), *differences),
    )


@arguments_class
class SimulateCostsArguments(CostOptions, StepOptions):
    """The arguments of `simulate_costs`."""

    schedule: str = field()
    forward_ms: Converted[float | Sequence[float] | None, tuple[float, ...] | None] = field()
    backward_ms: Converted[float | Sequence[float] | None, tuple[float, ...] | None] = field()
    micro_batches: int = field()


@takes(SimulateCostsArguments)
def simulate_costs(**options: Any) -> SimulatedStep:
    """A step of a pipeline of which only costs are known, without a model, a profile or a plan.

    `forward_ms`, `backward_ms`, `weight_ms` (the gradient of the weights, for schedules that run it apart;
    `backward_ms` is then the gradient of the input alone) and `transfer_ms`: milliseconds of a micro-batch,
    one value or one a stage. `stages` may be left out where values are given for each.

    >>> import pplan
    >>> step = pplan.simulate_costs(
    ...     schedule="1f1b", stages=4, micro_batches=8, forward_ms=10, backward_ms=20
    ... )
    >>> step
    <SimulatedStep: 4 stages, 8 micro-batches, 330 ms a step, bubble 27.3 %>
    >>> round(step.bubble, 4) == round((4 - 1) / (8 + 4 - 1), 4)
    True

    Of the result: as of `simulate`. Raises UsageError.
    """
    names = list_declarations(SimulateCostsArguments)
    overrides, costs = options_from(options, Overrides, CostOptions, of="simulate_costs", takes=names)
    return as_step(simulate_stages(read_stage_costs(costs), overrides))


def read_stage_costs(costs: CostOptions) -> StageCosts:
    """The costs in seconds. Raises UsageError."""
    for name in ("forward_ms", "backward_ms"):
        if costs.seconds(name) is None:
            raise UsageError(f"`{name}` is missing", f"Give milliseconds, as in {name}=18.5.")
    return StageCosts(
        costs.seconds("forward_ms") or (),
        costs.seconds("backward_ms") or (),
        costs.seconds("weight_ms"),
        costs.seconds("transfer_ms") or (0.0,),
    )


def simulate_stages(costs: StageCosts, overrides: Overrides) -> Simulation:
    """A step of the costs given, of which `overrides` says the schedule, the stages and the micro-batches.

    Raises UsageError.
    """
    schedule = find_schedule(_required("schedule", overrides.schedule, '"1f1b"'))
    stages = _required("stages", overrides.stages or costs.stages, "8")
    micro_batches = _required("micro_batches", overrides.micro_batches, "32")
    chunks = overrides.virtual_stages or schedule.default_virtual_stages
    check_size(stages, micro_batches, chunks)
    if not schedule.synchronous:
        check_steady_size(stages, LONG_ENOUGH * stages, chunks)
    program = _name_fields(lambda: schedule.program(stages, micro_batches, chunks))
    return Simulation(
        schedule=schedule,
        micro_batches=micro_batches,
        virtual_stages=chunks,
        timeline=simulate_program(program, costs.costs(program, overrides.transfers)),
        notes=(*_notes(program, costs), *transfer_note(overrides.transfers)),
    )


def _required(name: str, value: T | None, example: str) -> T:
    if value is None:
        raise UsageError(f"`{name}` is missing", f"Costs without a plan need it, as in {name}={example}.")
    return value


def transfer_note(transfers: str) -> list[str]:
    """A note where transfers do not overlap."""
    return [] if transfers == "overlapped" else [f"transfers are {transfers}"]


def _notes(program: Program, costs: StageCosts) -> list[str]:
    notes = []
    if program.parts > 1:
        notes.append(
            f"each of the {program.parts:g} virtual stages of a device takes an equal part of its costs"
        )
    if costs.weight is not None and not program.splits_backward:
        notes.append(
            "the schedule does not split the backward: a B is `backward_ms` and `weight_ms` together"
        )
    return notes


def _name_fields(make: Callable[[], T]) -> T:
    """Returns what `make` returns; an error that begins with a number of stages or micro-batches gets the
    field's name."""
    try:
        return make()
    except UsageError as error:
        match = re.match(r"(virtual stages|micro-batches|stages) (\d+)", error.what)
        if match is None:
            raise
        field = match[1].replace(" ", "_").replace("-", "_")
        raise UsageError(f"{field}={match[2]}{error.what[match.end() :]}", error.hint) from error


def _topology(plan: Plan, profile: Profile, machine: DeviceOptions, gpus: int, where: str) -> Topology:
    """The machine that the plan was made for, with what the options change of it; another one where they name
    a topology or a GPU. `where` names the plan in errors."""
    another = machine.topology is not None or machine.gpu is not None
    profiled = profiled_device(profile)
    file = machine.topology if another else read_machine(plan, where)
    topology = make_topology(gpus=gpus, **machine.parts, file=file, profiled=profiled)
    if another:
        topology = topology.in_groups(profile.tensor_parallel)
        check_processor_seconds(profiled, topology, plan.options.seconds_of)
    return topology


def _differences(plan: Plan, step: float, *, are_overridden: bool) -> list[str]:
    """A note where the unchanged plan takes other `step` seconds than it says: it was made for another
    machine."""
    predicted_step = plan.prediction.step_seconds
    # A difference that does not show would read as a contradiction.
    if abs(step - predicted_step) <= 1e3 * TIE * predicted_step or format_seconds(step) == format_seconds(
        predicted_step
    ):
        return []
    advice = "" if are_overridden else "; name that with `topology`, `gpu`, `bandwidth` or `latency`"
    return [
        f"the plan as it is takes {format_seconds(step)} here, it says {format_seconds(predicted_step)}: "
        f"it was made for {plan.topology or 'another machine'}{advice}"
    ]


class SimulatedStage(Record):
    """Where the step goes on one stage: the seconds sum to the step. `layers`: first and last (0-based) of
    each chunk. `memory`: the ledger as the stage holds most, bytes by term; `memory_over_time`: the second of
    every change, and the bytes from then on."""

    stage: int
    compute_seconds: float
    transfer_seconds: float
    warm_up_cool_down_seconds: float
    imbalance_seconds: float
    update_seconds: float
    peak_in_flight: int | float
    layers: list[tuple[int, int]] | None = None
    memory: dict[str, int] | None = None
    memory_bytes: int | None = None
    memory_limit_bytes: int | None = None
    memory_over_time: list[tuple[float, float]] | None = None


class SimulatedAction(Record):
    """When an action ran."""

    stage: int
    kind: str
    micro_batch: int
    chunk: int
    start_seconds: float
    end_seconds: float


class SimulatedTransfer(Record):
    """The result of an action on its way: on its link from `start_seconds`, there at `end_seconds`."""

    stage: int
    to_stage: int
    kind: str
    micro_batch: int
    chunk: int
    start_seconds: float
    end_seconds: float


class SimulationFile(Document):
    """A simulated step. Lists by stage; `bubble` is over the step, `bubble_rate_span` over the longest span
    of a stage; `steady_seconds` of a micro-batch, for asynchronous schedules."""

    kind: ClassVar[str] = "simulation"

    schedule: str
    micro_batches: int
    virtual_stages: int
    step_seconds: float
    samples_per_second: float | None = None
    steady_seconds: float | None = None
    bubble: float
    bubble_rate_span: float
    peak_in_flight: list[int | float]
    weight_versions: list[int | float]
    staleness: list[int]
    stages: list[SimulatedStage]
    actions: list[SimulatedAction] | None = None
    transfers: list[SimulatedTransfer] | None = None
    plan: str | None = None
    plan_step_seconds: float | None = None
    notes: list[str] = []
    made_by: MadeBy = MadeBy()


def simulation_file(simulation: Simulation, origin: MadeBy, *, actions: bool = False) -> SimulationFile:
    """The simulation as JSON; `actions`: with every action and transfer, and the memory of a plan's stages
    over time."""
    timeline = simulation.timeline
    return SimulationFile(
        schedule=simulation.schedule.name,
        micro_batches=simulation.micro_batches,
        virtual_stages=simulation.virtual_stages,
        step_seconds=timeline.step_seconds,
        samples_per_second=simulation.samples_per_second,
        steady_seconds=simulation.steady.seconds_per_micro_batch if simulation.steady else None,
        bubble=timeline.bubble,
        bubble_rate_span=timeline.bubble_rate_span,
        peak_in_flight=list(timeline.peak_in_flight),
        weight_versions=simulation.weight_versions,
        staleness=simulation.staleness,
        stages=[_stage(simulation, stage, over_time=actions) for stage in range(simulation.stages)],
        actions=simulated_actions(simulation) if actions else None,
        transfers=_transfers(simulation) if actions else None,
        plan=simulation.plan or None,
        plan_step_seconds=simulation.plan_seconds,
        notes=list(simulation.notes),
        made_by=origin,
    )


def _stage(simulation: Simulation, stage: int, *, over_time: bool) -> SimulatedStage:
    times = simulation.timeline.stage_times[stage]
    memory = simulation.memory[stage] if simulation.memory else None
    return SimulatedStage(
        stage=stage,
        **{f"{name}_seconds": seconds for name, seconds in times._asdict().items()},
        peak_in_flight=simulation.timeline.peak_in_flight[stage],
        layers=list(simulation.layers[stage]) if simulation.layers else None,
        memory=None if memory is None else memory.terms,
        memory_bytes=None if memory is None else memory.bytes,
        memory_limit_bytes=None if memory is None else memory.limit_bytes,
        memory_over_time=memory.over_time(simulation.timeline, stage)
        if memory is not None and over_time
        else None,
    )


def simulated_actions(simulation: Simulation) -> list[SimulatedAction]:
    """All actions in order of start."""
    return [
        SimulatedAction(
            stage=span.stage,
            kind=span.action.kind,
            micro_batch=span.action.micro_batch,
            chunk=span.action.chunk,
            start_seconds=span.start,
            end_seconds=span.end,
        )
        for span in simulation.timeline.spans
    ]


def _transfers(simulation: Simulation) -> list[SimulatedTransfer]:
    return [
        SimulatedTransfer(
            stage=transfer.stage,
            to_stage=transfer.to_stage,
            kind=transfer.action.kind,
            micro_batch=transfer.action.micro_batch,
            chunk=transfer.action.chunk,
            start_seconds=transfer.start,
            end_seconds=transfer.end,
        )
        for transfer in simulation.timeline.transfers
    ]
