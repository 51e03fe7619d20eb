"""Simulation of a plan under any schedule, and what the stages of a plan hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import ceil, inf
from operator import attrgetter, itemgetter
from pathlib import Path

import numpy as np

from ..cost_models.errors import UsageError
from ..cost_models.layer import Chain, align_profiles, list_cut_points, parts_warning
from ..cost_models.machines import memory_bandwidth
from ..cost_models.memory import Recompute, micro_batch_bytes, repeat_word, round_ledger, whole_word
from ..cost_models.optimizers import find_optimizer
from ..cost_models.program import Program, Schedule, StageSlot
from ..cost_models.quantities import (
    compare_steps,
    format_bytes,
    format_count,
    format_rate,
    format_seconds,
    percent,
    three_digits,
)
from ..cost_models.runtime import OFFLOAD, find_runtime
from ..cost_models.schedules import find_schedule
from ..cost_models.step_costs import Costs
from ..cost_models.timeline import SteadyState, Timeline, simulate, steady_state, step_seconds
from ..cost_models.topology import Topology
from ..cost_models.topology_file import TopologyFile, parse_topology
from .assembly import Assembly
from .asynchronous import assemble_candidate
from .balance import balance
from .batch_sizes import size_of_parts
from .candidate import MOST_MICRO_BATCHES, SEARCHED, Mode, PipelineConfig, Proposal, ScoredPlan
from .plan_file import Plan, PlannedStage, SharedWeight, plan_recompute
from .plan_options import Overrides
from .scoring import assemble
from .search.replica_group import HostMemory
from .search.space import Space, narrow_space
from .stage_table import WEIGHT_SHARE, part_seconds

LONG_ENOUGH = 8
"""Micro-batches per stage from which an asynchronous schedule is assumed to be steady."""
Placed = tuple[Proposal, tuple[Recompute, ...]]
"""A proposal, and the recomputation of each of its parts."""


def count_devices(plan: Plan, overrides: Overrides) -> int:
    """Return the number of devices that the topology must have."""
    used = 1 + max(device for stage in plan.stages for device in stage.devices)
    stages = overrides.stages or len(plan.stages) // plan.virtual_stages
    return max(used, plan.gpus or 1, stages * (overrides.replicas or 1))


def read_machine(plan: Plan, where: str) -> TopologyFile | None:
    """Return the machine for which the plan was made, as a topology file.

    None if the plan does not state it.

    Args:
        plan: The plan.
        where: Name of the plan in errors.

    Raises:
        FileError: The description is invalid.
    """
    return parse_topology(plan.machine, Path(f"{where}: machine")) if plan.machine else None


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of a device at its peak and over time.

    Attributes:
        terms: Ledger at the peak.
        resident_bytes: Bytes that the device always holds.
        bytes_in_flight: By chunk, bytes that each micro-batch in flight adds.
        limit_bytes: Bytes that the device may hold. None if unknown.
        first_part: By chunk, bytes that the first of two parts of a backward adds as it begins and as it
            ends.
    """

    terms: dict[str, int]
    resident_bytes: float
    bytes_in_flight: tuple[float, ...]
    limit_bytes: int | None
    first_part: tuple[tuple[float, float], ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes that the device needs."""
        return sum(self.terms.values())

    def over_time(self, timeline: Timeline, stage: int) -> list[tuple[float, float]]:
        """Return (second, bytes from then on) pairs of the device as `stage` of its timeline."""
        return timeline.memory_over_time(stage, self.resident_bytes, self.bytes_in_flight, self.first_part)


def device_memory(assembly: Assembly, device: int, timeline: Timeline) -> DeviceMemory:
    """Return the ledger of a device, and its bytes over time.

    The limit is that of its replica with the least memory.

    Args:
        assembly: The pipeline.
        device: Device of the program.
        timeline: Its simulated step.
    """
    terms = round_ledger(assembly.ledger(device))
    saves = assembly.recompute[device] == "never"
    chunks = [micro_batch_bytes(chunk, assembly.program)[saves] for chunk in assembly.chunk_bytes(device)]
    in_flight = tuple(sum(chunk.forward) for chunk in chunks)
    # What the micro-batch at work recomputes in B is counted all the time.
    parts = tuple((sum(chunk.first_part), sum(chunk.after_first_part)) for chunk in chunks)
    most = max(level for _, level in timeline.memory_over_time(device, 0.0, in_flight, parts))
    limit = assembly.smallest_device(device).memory_bytes
    return DeviceMemory(terms, sum(terms.values()) - most, in_flight, limit, parts)


@dataclass(frozen=True, eq=False)
class Simulation:
    """A simulated step of a plan, or of costs alone.

    Attributes:
        schedule: Schedule.
        micro_batches: Micro-batches of the step.
        virtual_stages: Virtual stages per device.
        timeline: Simulated actions.
        plan: File of the plan.
        mini_batch: Global batch of the plan.
        plan_seconds: Seconds of a global batch of the plan itself, if something was overridden.
        layers: First and last layer (0-based) by device and chunk, of a plan.
        memory: Memory by device, of a plan.
        notes: Notes on the prediction.
    """

    schedule: Schedule
    micro_batches: int
    virtual_stages: int
    timeline: Timeline
    plan: str = ""
    mini_batch: int | None = None
    plan_seconds: float | None = None
    layers: tuple[tuple[tuple[int, int], ...], ...] = ()
    memory: tuple[DeviceMemory, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def stages(self) -> int:
        """Devices of the pipeline."""
        return self.timeline.stages

    @property
    def title(self) -> str:
        """Title such as `zb-h1, 8 stages, 24 micro-batches`."""
        chunks = f" of {self.virtual_stages} virtual stages" if self.virtual_stages > 1 else ""
        stages, parts = format_count(self.stages, "stage"), format_count(self.micro_batches, "micro-batch")
        return f"{self.schedule.name}, {stages}{chunks}, {parts}"

    @property
    def weight_versions(self) -> list[float]:
        """Weight versions by stage."""
        return [
            self.schedule.weight_versions(stage, self.stages, self.micro_batches)
            for stage in range(self.stages)
        ]

    @property
    def staleness(self) -> list[int]:
        """Staleness by stage, in updates."""
        return [
            self.schedule.staleness(stage, self.stages, self.micro_batches) for stage in range(self.stages)
        ]

    @property
    def samples_per_second(self) -> float | None:
        """Samples per second of a plan, in the steady state if there is one."""
        if self.mini_batch is None:
            return None
        if self.steady is not None:
            return self.mini_batch / self.micro_batches / self.steady.seconds_per_micro_batch
        return self.mini_batch / self.timeline.step_seconds

    @property
    def mini_batch_seconds(self) -> float:
        """Seconds of the step; of an asynchronous plan, seconds per global batch in the steady state."""
        rate = self.samples_per_second
        if self.mini_batch is None or rate is None or self.steady is None:
            return self.timeline.step_seconds
        return self.mini_batch / rate

    @cached_property
    def steady(self) -> SteadyState | None:
        """Steady state of an asynchronous schedule, over as many micro-batches as it needs."""
        if self.schedule.synchronous:
            return None
        rounds = max(-(-self.micro_batches // self.stages), LONG_ENOUGH)
        program = self.schedule.program(self.stages, rounds * self.stages, self.virtual_stages)
        if self.mini_batch is not None and (program.update_every or 0) > 1:
            # An update takes the gradients of one global batch.
            program = replace(program, update_every=max(self.micro_batches, self.stages))
        return steady_state(program, self.timeline.costs)


def describe_simulation(simulation: Simulation) -> list[str]:
    """Return the step in a line, and further lines about it."""
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
    """Compare the seconds of a global batch with the plan's, each in its steady state if it has one."""
    difference = compare_steps(simulation.mini_batch_seconds, plan_seconds)
    verb = "" if difference.endswith("the same") else "this is "
    steady = "in the steady state " if simulation.steady else ""
    return f"{simulation.plan} as it is takes {format_seconds(plan_seconds)}: {steady}{verb}{difference}."


def simulate_plan(
    plan: Plan,
    chain: Chain,
    topology: Topology,
    overrides: Overrides | None = None,
    profiles: Mapping[str, Chain] | None = None,
) -> Simulation:
    """Simulate a plan of this chain on this topology.

    Args:
        plan: The plan.
        chain: Its layers.
        topology: Devices and links.
        overrides: What to change in the plan, see `place_plan`.
        profiles: The same layers as measured on the kinds of devices with their own profile, by its name in
            the topology.

    Raises:
        UsageError: The schedule, the global batch or the cuts do not allow these numbers, replicas cannot
            stay, or `profiles` are missing or have other layers.
    """
    overrides = overrides or Overrides()
    proposal, modes = place_plan(plan, chain, overrides)
    space = plan_space(plan, proposal.config.schedule, chain, topology, profiles)
    assembly = replace(
        assemble(narrow_space(space, proposal.ends), proposal, modes), transfers=overrides.transfers
    )
    program, timeline = assembly.program, simulate(assembly.program, assembly.costs())
    devices, chunks = range(program.devices), range(program.chunks)
    layers = [(first, end - 1) for first, end in proposal.bounds]
    memory = tuple(device_memory(assembly, device, timeline) for device in devices)
    return Simulation(
        schedule=assembly.schedule,
        micro_batches=proposal.config.micro_batches,
        virtual_stages=proposal.config.virtual_stages,
        timeline=timeline,
        mini_batch=plan.mini_batch,
        layers=tuple(
            tuple(layers[program.parts_by_slot[StageSlot(device, chunk)]] for chunk in chunks)
            for device in devices
        ),
        memory=memory,
        notes=(
            *_notes(plan, proposal, modes),
            *list_prediction_limits(assembly),
            *optimizer_note(assembly, timeline.step_seconds),
            *describe_lack(memory),
        ),
    )


def simulate_stage_seconds(plan: Plan) -> Simulation:
    """Simulate a plan from a configuration, from the seconds of its stages and transfers."""
    schedule = find_schedule(plan.schedule)
    program = schedule.program(plan.pipeline_stages, plan.micro_batches, plan.virtual_stages)
    forward = np.zeros((program.devices, program.chunks, 1))
    backward, update = np.zeros_like(forward), np.zeros(program.devices)
    for stage, slot in zip(plan.stages, program.pipes[0], strict=True):
        forward[slot.device, slot.chunk] = stage.forward_seconds
        backward[slot.device, slot.chunk] = stage.backward_seconds
        update[slot.device] = max(update[slot.device], stage.update_seconds or 0.0)
    transfers = np.array([[stage.transfer_seconds or 0.0 for stage in plan.stages[:-1]]])
    nothing = np.zeros_like(transfers)
    costs = Costs(
        forward=forward,
        backward=backward,
        forward_occupancy=transfers,
        forward_latency=nothing,
        backward_occupancy=transfers,
        backward_latency=nothing,
        optimizer=update,
    )
    timeline = simulate(program, costs)
    return Simulation(schedule, plan.micro_batches, plan.virtual_stages, timeline, mini_batch=plan.mini_batch)


def describe_lack(memory: Sequence[DeviceMemory]) -> Iterator[str]:
    """Yield a sentence on the stage that lacks most memory, if any does."""
    lacking = [
        (device.bytes - device.limit_bytes, stage, device.bytes, device.limit_bytes)
        for stage, device in enumerate(memory)
        if device.limit_bytes is not None and device.bytes > device.limit_bytes
    ]
    if lacking:
        _, stage, needed, limit = max(lacking)
        in_all = f" ({format_count(len(lacking), 'stage')} in all)" if len(lacking) > 1 else ""
        yield f"it does not fit: stage {stage} needs {format_bytes(needed)} of {format_bytes(limit)}{in_all}"


def plan_space(
    plan: Plan,
    schedule: str,
    chain: Chain,
    topology: Topology,
    profiles: Mapping[str, Chain] | None = None,
) -> Space:
    """Return the space of a plan's training setting, without the limits of its options.

    Args:
        plan: The plan.
        schedule: Schedule to run. If the plan's runtime does not run it, each stage has its own process.
        chain: The plan's layers.
        topology: Devices and links.
        profiles: See `simulate_plan`.

    Raises:
        UsageError: The profiles have other layers.
    """
    runtime, bandwidth = plan.runtime and find_runtime(plan.runtime), plan.options.host_bandwidth
    return Space(
        chain=chain,
        topology=topology,
        optimizer=plan.optimizer,
        runtime=runtime if runtime and runtime.runs(schedule) else None,
        dtype=plan.profile.dtype,
        precision=plan.training_precision.bytes,
        zero=plan.zero,
        profiles=align_profiles(chain, profiles or {}),
        mini_batch=plan.mini_batch if runtime and runtime.receives_ahead else None,
        host=None if bandwidth is None else HostMemory(bandwidth),
    )


def keeps_stages(plan: Plan, proposal: Proposal) -> bool:
    """Return whether a proposal has the plan's cuts and devices."""
    ends = tuple(stage.last_layer + 1 for stage in plan.stages)
    return proposal.ends == ends and proposal.devices == tuple(tuple(stage.devices) for stage in plan.stages)


def place_plan(plan: Plan, chain: Chain, overrides: Overrides | None = None) -> Placed:
    """Return the plan as a proposal.

    Cuts and devices stay if the numbers of stages and parts do. Otherwise the layers are cut so that the
    slowest part is as fast as possible, on devices from rank 0 on. The replicas stay if the pipeline has the
    same length and all stages have equally many. The global batch stays.

    Args:
        plan: The plan.
        chain: Its layers.
        overrides: What to change.

    Raises:
        UsageError: The schedule, the global batch or the cuts do not allow these numbers, or replicas cannot
            stay.
    """
    overrides, stages, counts = overrides or Overrides(), plan.stages, set(plan.replicas)
    schedule, count = find_schedule(overrides.schedule or plan.schedule), plan.micro_batches
    virtual = plan.virtual_stages if schedule.name == plan.schedule else schedule.default_virtual_stages
    virtual = virtual if overrides.virtual_stages is None else overrides.virtual_stages
    planned, count = max(len(stages) // plan.virtual_stages, 1), overrides.micro_batches or count
    program = _program(schedule, chain, overrides.stages or planned, count, virtual)
    size, is_as_long, replicas = (
        size_of_parts(plan.mini_batch, count, f"micro-batches {count}"),
        program.devices == planned,
        overrides.replicas,
    )
    keeps = is_as_long and program.slots == len(stages) and (replicas is None or counts == {replicas})
    ends = [stage.last_layer + 1 for stage in stages] if keeps else _cut_anew(plan, chain, size, program)
    cut_points = list_cut_points(chain)
    for end in ends:
        if end not in cut_points:
            raise UsageError(
                f"the plan has a stage end after layer {end - 1}, {chain.names[end - 1]}, where the "
                "profile allows no cut",
                "Solve again with pplan solve, or give `stages` to cut the layers anew.",
            )
    if is_as_long and replicas is None and not keeps and len(counts) > 1:
        text = "-".join(map(str, plan.replicas[:16]))
        raise UsageError(
            f"{schedule.name} has {program.slots} parts, so the layers are cut anew, and the plan's "
            f"replicas ({text}) do not apply to the new stages",
            "Set the replicas of each stage, for example replicas=1.",
        )
    devices = [tuple(stage.devices) for stage in stages]
    if not is_as_long or (replicas is not None and counts != {replicas}):
        replicas = replicas or 1
        devices = [
            tuple(range(first, first + replicas)) for first in range(0, program.devices * replicas, replicas)
        ]
    modes = _recompute(plan, schedule.name, program.devices, keeps=keeps)
    mode: Mode = "by_stage" if plan.recompute == "selective" else plan.recompute
    places = [place.device for place in program.pipes[0]]
    config = PipelineConfig(schedule.name, mode, count, size, virtual)
    proposal = Proposal(config, tuple(ends), tuple(devices[device] for device in places))
    return proposal, tuple(modes[device] for device in places)


def _program(schedule: Schedule, chain: Chain, stages: int, micro_batches: int, chunks: int) -> Program:
    """Return the program of a schedule. Raises UsageError for too many micro-batches or parts."""
    if micro_batches > MOST_MICRO_BATCHES:
        raise UsageError(
            f"micro-batches {micro_batches}: at most {MOST_MICRO_BATCHES} are simulated",
            "Use fewer, larger micro-batches.",
        )
    if stages * chunks > chain.max_stages:
        chunks_each = f" of {chunks} virtual stages each" if chunks > 1 else ""
        raise UsageError(
            f"stages {stages}{chunks_each}: the allowed cuts make at most {chain.max_stages} parts of the "
            f"{format_count(len(chain), 'layer')}",
            "Use fewer stages, or fewer virtual stages." if chunks > 1 else "Use fewer stages.",
        )
    return schedule.program(stages, micro_batches, chunks)


def _cut_anew(plan: Plan, chain: Chain, size: int, program: Program) -> list[int]:
    """Return the ends of parts whose slowest is as fast as possible."""
    costs = chain.at(size, past_largest=True)
    work = costs.forward_seconds * (1 + (plan.recompute != "never")) + costs.backward_seconds
    return list(accumulate(balance(work, program.slots, cut_after=chain.cut_after)))


def _recompute(plan: Plan, schedule: str, devices: int, *, keeps: bool) -> Sequence[Recompute]:
    """Return the recomputation of each device. Only GPipe has `except_last`."""
    if plan.recompute == "except_last" and schedule != "gpipe":
        return ("always",) * devices
    if plan.recompute != "by_stage":
        return (plan.recompute,) * devices
    words = [stage.recompute for stage in plan.stages]
    if None in words:
        raise UsageError(
            "the plan does not state the recomputation of each stage",
            "Simulate a plan with another recomputation.",
        )
    if not keeps:
        return ("always",) * devices
    return [str(word) if schedule in SEARCHED else whole_word(str(word)) for word in words[:devices]]


def _notes(plan: Plan, proposal: Proposal, modes: Sequence[Recompute]) -> Iterator[str]:
    """Yield the differences from the plan."""
    keeps, replicas, schedule = keeps_stages(plan, proposal), proposal.replicas[0], proposal.config.schedule
    if not keeps:
        counts = ", ".join(str(end - first) for first, end in proposal.bounds)
        yield f"the layers are cut anew to balance the parts: {counts}"
        if replicas == 1 and max(plan.replicas) > 1:
            yield "the plan's replicas are dropped: each stage is on one device"
        elif replicas > 1:
            yield f"each stage has {replicas} replicas"
    if plan.recompute in ("except_last", "by_stage") and plan.recompute not in modes:
        mode = plan.recompute.replace("_", "-")
        if plan.recompute == "except_last":
            yield f"recompute always: {mode} is for gpipe"
        elif not keeps:
            yield f"recompute {modes[0]} on every stage: the plan's modes do not apply to the new stages"
    if plan.runtime is not None and not find_runtime(plan.runtime).runs(schedule):
        yield f"{plan.runtime} does not run {schedule}: simulated with one process per stage"


def list_prediction_limits(assembly: Assembly) -> Iterator[str]:
    """Yield sentences about what was extrapolated or assumed."""
    chain, devices = assembly.chain, range(len(assembly.ranks))
    if assembly.program.splits_backward and chain.backward_weight_seconds is None:
        yield (
            f"the profile measured whole backwards: {100 * WEIGHT_SHARE:.0f} % of a layer with weights is "
            "assumed to be the weight gradient"
        )
    if assembly.program.splits_backward and chain.pending_gradient_bytes is None:
        yield (
            "the profile does not state which gradients the first part of a backward leaves for the second: "
            "each layer is assumed to leave as many bytes as it saves or outputs"
        )
    if assembly.program.splits_backward and set(assembly.recompute) != {"never"}:
        yield (
            "stages that recompute are charged one more forward per micro-batch; with a backward in two "
            "parts, torch.utils.checkpoint runs another one for the weight gradients, which is not included; "
            "recompute='never' avoids it"
        )
    tables = {assembly.per_replica_batch(device): assembly.table(device) for device in devices}
    for _, table in sorted(tables.items(), key=lambda item: item[0]):
        if assembly.program.splits_backward:
            parts = part_seconds(table.costs, "input") + part_seconds(table.costs, "weight")
            if whole := float(table.costs.backward_seconds.sum()):
                yield from parts_warning(table.costs.size, float(parts.sum()) / whole)
        if outside := table.costs.outside:
            yield outside
    yield from _slow_host(assembly)


WORTH = 0.01
"""Least share of the step of launches, or of the optimizer, that is reported."""


@dataclass(frozen=True)
class OptimizerStep:
    """Least seconds of the optimizer step on the device where it takes longest.

    Attributes:
        bytes: Bytes that it reads and writes.
        bandwidth: Bytes per second of the device's memory.
        rank: Rank of the device.
        updates: Updates in a step.
    """

    bytes: float
    bandwidth: float
    rank: int
    updates: int

    @property
    def seconds(self) -> float:
        """Seconds of all updates of a step."""
        return self.updates * self.bytes / self.bandwidth


def optimizer_step(assembly: Assembly, micro_batches: int | None = None) -> OptimizerStep | None:
    """Return the optimizer step of the slowest device; None if no memory bandwidth is known.

    Args:
        assembly: The pipeline.
        micro_batches: Micro-batches of a step. Defaults to the program's.
    """
    optimizer, precision = find_optimizer(assembly.optimizer), assembly.number_bytes
    update_every, micro_batches = (
        assembly.program.update_every,
        micro_batches or assembly.program.micro_batches,
    )
    updates = 1 if update_every is None else micro_batches // update_every
    candidates = list[OptimizerStep]()
    for device, ranks in enumerate(assembly.ranks):
        parameters = sum(chunk.trainable for chunk in assembly.chunk_bytes(device)) / precision.weight
        share = len(ranks) if assembly.zero else 1
        amount = float(parameters) / share * optimizer.update_bytes(precision)
        first_ranks = {assembly.topology.device(rank).name: rank for rank in reversed(ranks)}
        for name, rank in sorted(first_ranks.items(), key=itemgetter(1)):
            if bandwidth := memory_bandwidth(name):
                candidates.append(OptimizerStep(amount, bandwidth, rank, updates))
    return max(candidates, key=attrgetter("seconds"), default=None)


def optimizer_note(
    assembly: Assembly, step_seconds: float, micro_batches: int | None = None
) -> Iterator[str]:
    """Yield a note if the updates of a step take at least `WORTH` of it.

    Args:
        assembly: The pipeline.
        step_seconds: Seconds of the step.
        micro_batches: See `optimizer_step`.
    """
    update = optimizer_step(assembly, micro_batches)
    if update is not None and update.seconds >= WORTH * step_seconds > 0:
        often = "" if update.updates == 1 else f" {update.updates} times a step"
        yield (
            f"optimizer step not included: {assembly.optimizer} reads and writes at least "
            f"{format_bytes(update.bytes)} on device {update.rank}{often}, which takes "
            f"{format_seconds(update.seconds)} or more at {format_rate(update.bandwidth)}, "
            f"{percent(update.seconds / step_seconds)} of the step"
        )


def _slow_host(assembly: Assembly) -> Iterator[str]:
    """Yield a note if the step waits for the host whose launches take longest.

    That is the case if no device computes for as long, and the step is shorter without launches.
    """
    if assembly.hosts == "one":
        return
    # Pipes in two directions share the micro-batches, and a device has stages in each of them.
    pipes = len(assembly.program.pipes)
    repeats = np.array([repeat_word(mode) != "never" for mode in assembly.recompute])[:, None, None]
    times = 1 + repeats * assembly.first_shares("forward_launch")
    launches = times * assembly.launch_seconds("forward_launch")
    launching = (launches + assembly.launch_seconds("backward_launch")).sum(axis=(1, 2)) / pipes
    forward = (1 + repeats * assembly.first_shares("forward")) * assembly.by_place("forward")
    passes = forward + assembly.by_place("backward")
    computing = passes.sum(axis=(1, 2)) / pipes
    device = int(launching.argmax())
    if launching[device] <= computing.max() or not _launches_take_time(assembly):
        return
    on_device, on_host = (format_seconds(float(seconds[device])) for seconds in (computing, launching))
    yield (
        f"the step waits for the hosts: device {assembly.ranks[device][0]} computes a micro-batch in "
        f"{on_device}, and its process takes {on_host} to launch the operations; faster launches "
        "(torch.compile, CUDA graphs) shorten the step"
    )


def _launches_take_time(assembly: Assembly) -> bool:
    """Return whether the step is shorter, by more than `WORTH` of it, if launches take no time.

    For an asynchronous schedule, a micro-batch in its steady state is compared.
    """
    costs, program = assembly.costs(), assembly.program
    free = replace(costs, forward_launch=None, backward_launch=None)

    def seconds(trial: Costs) -> float:
        if not assembly.schedule.synchronous:
            with suppress(UsageError):  # too few micro-batches
                return steady_state(program, trial).seconds_per_micro_batch
        return float(step_seconds(program, trial)[0])

    return seconds(free) < seconds(costs) * (1 - WORTH)


def plan_stages(space: Space, plan: ScoredPlan) -> list[PlannedStage]:
    """Return the parts of the layers in order. If a device has several, the memory is that of all of them.

    Args:
        space: Costs and limits.
        plan: The scored plan.
    """
    assembly = assemble_candidate(space, plan)
    forward, backward = assembly.by_place("forward"), assembly.by_place("backward")
    shares = assembly.first_shares("forward")
    mixed = plan_recompute(plan) == "by_stage"
    stages = []
    for part, place in enumerate(assembly.program.pipes[0]):
        (first, end), mode = plan.proposal.bounds[part], plan.recompute[part]
        repeats = repeat_word(mode) != "never"
        recompute = float(shares[place.device, 0, 0] * forward[place][0]) if repeats else 0.0
        ledger, limit = round_ledger(assembly.ledger(place.device)), space.limit(assembly.ranks[place.device])
        stages.append(
            PlannedStage(
                first_layer=first,
                last_layer=end - 1,
                replicas=len(plan.proposal.devices[part]),
                devices=list(plan.proposal.devices[part]),
                forward_seconds=float(forward[place][0]),
                backward_seconds=float(backward[place][0] + recompute),
                memory_bytes=sum(ledger.values()),
                memory_limit_bytes=None if limit == inf else int(limit),
                memory=ledger,
                recompute=mode if mixed else None,
                host_bytes=_host_bytes(assembly, part) if mode == OFFLOAD else None,
            )
        )
    return stages


def _host_bytes(assembly: Assembly, part: int) -> int:
    """Return the most bytes that a replica keeps on its host, for a schedule with one stage per device."""
    device, program = assembly.program.pipes[0][part].device, assembly.program
    in_flight = assembly.schedule.in_flight(device, program.devices, program.micro_batches)
    return ceil(in_flight * assembly.offloaded_bytes(part))


def shared_weights(space: Space, plan: ScoredPlan) -> list[SharedWeight]:
    """Return the weights that several parts of a plan use."""
    sums = {tied_sum.name: tied_sum.seconds for tied_sum in assemble_candidate(space, plan).tied_sums}
    weights = []
    for weight in space.chain.tied:
        parts = [part for part, bounds in enumerate(plan.proposal.bounds) if weight.is_used(*bounds)]
        if len(parts) > 1:
            seconds = sums.get(weight.name, 0.0)
            weights.append(
                SharedWeight(tensor=weight.name, bytes=round(weight.bytes), stages=parts, sum_seconds=seconds)
            )
    return weights


def energy_joules(
    topology: Topology, busy: Mapping[int, float], step: float, watts: Mapping[str, tuple[float, float]]
) -> float | None:
    """Return the energy of a step in joules; None if a kind of device has no power figure.

    Args:
        topology: Devices.
        busy: By rank in use, seconds of compute in a step.
        step: Seconds of the step.
        watts: By kind of device, power while computing and while waiting.
    """
    kinds = {rank: topology.device(rank).name for rank in busy}
    if not set(kinds.values()) <= set(watts):
        return None
    power = {rank: watts[kind] for rank, kind in kinds.items()}
    return sum(
        seconds * power[rank][0] + max(step - seconds, 0.0) * power[rank][1] for rank, seconds in busy.items()
    )


def busy_seconds(stages: Iterable[PlannedStage], micro_batches: int) -> dict[int, float]:
    """Return the seconds that each rank computes in a step."""
    busy = dict[int, float]()
    for stage in stages:
        seconds = micro_batches * (stage.forward_seconds + stage.backward_seconds)
        for rank in stage.devices:
            busy[rank] = busy.get(rank, 0.0) + seconds
    return busy
