"""What `pplan simulate` found, as its tables and pictures take it, and its JSON."""

from __future__ import annotations

from typing import ClassVar

from ..cost_models.document import Document, MadeBy, Record
from ..cost_models.number_format import compare_steps, percent, three_digits
from ..cost_models.quantities import format_seconds
from ..planner.plan_simulation import Simulation


def describe_simulation(simulation: Simulation) -> list[str]:
    """The step in a line, and what else there is to know of it."""
    timeline = simulation.timeline
    step = timeline.step_seconds
    samples = simulation.samples_per_second
    rate = "" if samples is None else f", {three_digits(samples)} samples/s"
    lines = [
        f"{simulation.title}: {format_seconds(step)} for all of them."
        if simulation.steady
        else f"{simulation.title}: {format_seconds(step)} a step{rate}.",
        f"Bubble {percent(timeline.bubble)} of all stages' time; {percent(timeline.bubble_rate_span)} of the "
        "longest span of a stage, from its first to its last action.",
    ]
    if simulation.steady is not None:
        pace = format_seconds(simulation.steady.seconds_per_micro_batch)
        nearly = "" if simulation.steady.exact else " (a mean: it does not repeat exactly)"
        lines.append(f"Steady: {pace} a micro-batch{nearly}{rate}.")
    if simulation.plan_seconds is not None:
        lines.append(_against_the_plan(simulation, simulation.plan_seconds))
    return lines


def _against_the_plan(simulation: Simulation, plan_seconds: float) -> str:
    """The seconds of a global batch against the plan's, each in its steady state where it has one."""
    difference = compare_steps(simulation.mini_batch_seconds, plan_seconds)
    verb = "" if difference.endswith("the same") else "this is "
    steady = "in the steady state " if simulation.steady else ""
    return f"{simulation.plan} as it is takes {format_seconds(plan_seconds)}: {steady}{verb}{difference}."


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
