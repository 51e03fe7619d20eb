"""A plan in the simulator: its candidate under any schedule, and what the stages of a candidate hold."""

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
from .candidate import MOST_MICRO_BATCHES, SEARCHED, Mode, PipelineConfig, Proposal, ScoredPlan, abbreviate
from .plan_file import Plan, PlannedStage, SharedWeight, plan_recompute
from .plan_options import Overrides
from .scoring import assemble
from .search.replica_group import HostMemory
from .search.space import Space, narrow_space
from .stage_table import WEIGHT_SHARE, part_seconds

LONG_ENOUGH = 8
"""Micro-batches a stage in a row from which an asynchronous schedule is taken to be steady."""
Placed = tuple[Proposal, tuple[Recompute, ...]]
"""A candidate, and the recomputation of each of its parts."""


def count_devices(plan: Plan, overrides: Overrides) -> int:
    """How many devices the topology must have."""
    used = 1 + max(device for stage in plan.stages for device in stage.devices)
    stages = overrides.stages or len(plan.stages) // plan.virtual_stages
    return max(used, plan.gpus or 1, stages * (overrides.replicas or 1))


def read_machine(plan: Plan, where: str) -> TopologyFile | None:
    """The machine that the plan was made for, as a topology file; None where it does not say. `where` names
    the plan in errors. Raises FileError."""
    return parse_topology(plan.machine, Path(f"{where}: machine")) if plan.machine else None


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of a device: the ledger as it holds most; and, over time, what it keeps always, what each
    micro-batch in flight adds on each of its chunks, and what the first of two parts of its backward adds
    besides, as it begins and as it ends."""

    terms: dict[str, int]
    resident_bytes: float
    bytes_in_flight: tuple[float, ...]
    limit_bytes: int | None
    first_part: tuple[tuple[float, float], ...] = ()

    @property
    def bytes(self) -> int:
        """What the device needs."""
        return sum(self.terms.values())

    def over_time(self, timeline: Timeline, stage: int) -> list[tuple[float, float]]:
        """(second, bytes from then on) of the device as `stage` of its timeline."""
        return timeline.memory_over_time(stage, self.resident_bytes, self.bytes_in_flight, self.first_part)


def device_memory(assembly: Assembly, device: int, timeline: Timeline) -> DeviceMemory:
    """The ledger of a device, and its bytes over time; the limit is that of its replica with the least
    memory."""
    terms = round_ledger(assembly.ledger(device))
    saves = assembly.recompute[device] == "never"
    chunks = [micro_batch_bytes(own, assembly.program)[saves] for own in assembly.chunk_bytes(device)]
    in_flight = tuple(sum(own.forward) for own in chunks)
    # What a recomputing micro-batch makes again in B is taken as there all the time, of the one at work.
    parts = tuple((sum(own.first_part), sum(own.behind_first_part)) for own in chunks)
    most = max(level for _, level in timeline.memory_over_time(device, 0.0, in_flight, parts))
    limit = assembly.smallest_device(device).memory_bytes
    return DeviceMemory(terms, sum(terms.values()) - most, in_flight, limit, parts)


@dataclass(frozen=True, eq=False)
class Simulation:
    """A simulated step: of a plan, or of costs alone.

    Attributes:
        plan: File of the plan.
        mini_batch: Global batch of the plan.
        plan_seconds: Seconds of a global batch of the plan itself, where something was overridden.
        layers: First and last layer (0-based) by device and chunk, of a plan.
        memory: Memory by device, of a plan.
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
        """`zb-h1, 8 stages, 24 micro-batches`."""
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
        """The rate of a plan, in the steady state where there is one."""
        if self.mini_batch is None:
            return None
        if self.steady is not None:
            return self.mini_batch / self.micro_batches / self.steady.seconds_per_micro_batch
        return self.mini_batch / self.timeline.step_seconds

    @property
    def mini_batch_seconds(self) -> float:
        """The step; with an asynchronous schedule, a plan's seconds per global batch in the steady state."""
        rate = self.samples_per_second
        if self.mini_batch is None or rate is None or self.steady is None:
            return self.timeline.step_seconds
        return self.mini_batch / rate

    @cached_property
    def steady(self) -> SteadyState | None:
        """The steady state of an asynchronous schedule, over as many micro-batches as it takes to see it."""
        if self.schedule.synchronous:
            return None
        rounds = max(-(-self.micro_batches // self.stages), LONG_ENOUGH)
        program = self.schedule.program(self.stages, rounds * self.stages, self.virtual_stages)
        if self.mini_batch is not None and (program.update_every or 0) > 1:
            # A plan's global batch is what an update is made from.
            program = replace(program, update_every=max(self.micro_batches, self.stages))
        return steady_state(program, self.timeline.costs)


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
        overrides: What to change of the plan; see `place_plan`.
        profiles: The same layers as measured on the kinds of devices that have a profile of their own, by its
            name in the topology.

    Raises:
        UsageError: The schedule, the global batch or the cuts do not allow these numbers, replicas cannot
            stay, or `profiles` are missing or of other layers.
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


def describe_lack(memory: Sequence[DeviceMemory]) -> Iterator[str]:
    """Where a stage has not enough memory, a sentence on the one that lacks most."""
    lacking = [
        (own.bytes - own.limit_bytes, stage, own.bytes, own.limit_bytes)
        for stage, own in enumerate(memory)
        if own.limit_bytes is not None and own.bytes > own.limit_bytes
    ]
    if lacking:
        _, stage, needed, limit = max(lacking)
        others = f" ({format_count(len(lacking), 'stage')} in all)" if len(lacking) > 1 else ""
        yield f"it does not fit: stage {stage} needs {format_bytes(needed)} of {format_bytes(limit)}{others}"


def plan_space(
    plan: Plan,
    schedule: str,
    chain: Chain,
    topology: Topology,
    profiles: Mapping[str, Chain] | None = None,
) -> Space:
    """The space of a plan's training setting, without the limits of its options.

    Args:
        plan: The plan.
        schedule: Where the plan's runtime does not run it, each stage has a process of its own.
        chain: The plan's layers.
        topology: Devices and links.
        profiles: As of `simulate_plan`.

    Raises:
        UsageError: The profiles are of other layers.
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
    """Return whether a candidate has the plan's cuts and devices."""
    ends = tuple(stage.last_layer + 1 for stage in plan.stages)
    return proposal.ends == ends and proposal.devices == tuple(tuple(stage.devices) for stage in plan.stages)


def place_plan(plan: Plan, chain: Chain, overrides: Overrides | None = None) -> Placed:
    """The plan as a candidate.

    Cuts and devices stay where the numbers of stages and of their parts do. Otherwise the layers are cut anew
    so that the slowest part is as fast as possible, on devices from rank 0 on. The replicas stay where the
    pipeline is as long and all stages have as many. The global batch stays.

    Args:
        plan: The plan.
        chain: Its layers.
        overrides: What to change of it.

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
    size, is_as_long, each = _micro_batch_size(plan, count), program.devices == planned, overrides.replicas
    keeps = is_as_long and program.slots == len(stages) and (each is None or counts == {each})
    ends = [stage.last_layer + 1 for stage in stages] if keeps else _cut_anew(plan, chain, size, program)
    cut_points = list_cut_points(chain)
    for end in ends:
        if end not in cut_points:
            raise UsageError(
                f"the plan has a stage end after layer {end - 1}, {chain.names[end - 1]}, where the "
                "profile allows no cut",
                "Make the plan again with pplan solve, or cut anew with `stages`.",
            )
    if is_as_long and each is None and not keeps and len(counts) > 1:
        text = "-".join(map(str, plan.replicas[:16]))
        raise UsageError(
            f"{schedule.name} with {program.slots} parts: the layers are cut anew, and the plan's "
            f"replicas ({text}) are those of its own stages",
            "Say how many each stage is to have: replicas=1, say.",
        )
    devices = [tuple(stage.devices) for stage in stages]
    if not is_as_long or (each is not None and counts != {each}):
        each = each or 1
        devices = [tuple(range(first, first + each)) for first in range(0, program.devices * each, each)]
    modes = _recompute(plan, schedule.name, program.devices, keeps=keeps)
    mode: Mode = "by_stage" if plan.recompute == "selective" else plan.recompute
    places = [place.device for place in program.pipes[0]]
    config = PipelineConfig(schedule.name, mode, count, size, virtual)
    proposal = Proposal(config, tuple(ends), tuple(devices[device] for device in places))
    return proposal, tuple(modes[device] for device in places)


def _program(schedule: Schedule, chain: Chain, stages: int, micro_batches: int, chunks: int) -> Program:
    if micro_batches > MOST_MICRO_BATCHES:
        raise UsageError(
            f"micro-batches {micro_batches}: at most {MOST_MICRO_BATCHES} are simulated",
            "Use fewer, larger ones.",
        )
    if stages * chunks > chain.max_stages:
        each = f" of {chunks} virtual stages each" if chunks > 1 else ""
        raise UsageError(
            f"stages {stages}{each}: the allowed cuts make at most {chain.max_stages} parts of the "
            f"{format_count(len(chain), 'layer')}",
            "Use fewer stages, or fewer virtual stages." if chunks > 1 else "Use fewer stages.",
        )
    return schedule.program(stages, micro_batches, chunks)


def _micro_batch_size(plan: Plan, count: int) -> int:
    """Samples of each of so many micro-batches."""
    batch = plan.mini_batch
    if batch % count:
        fitting = [parts for parts in range(1, min(batch, MOST_MICRO_BATCHES) + 1) if batch % parts == 0]
        raise UsageError(
            f"micro-batches {count}: a global batch of {batch} does not divide into so many",
            f"Use a divisor of {batch}: {abbreviate(fitting)}.",
        )
    return batch // count


def _cut_anew(plan: Plan, chain: Chain, size: int, program: Program) -> list[int]:
    """Ends of parts of which the slowest is as fast as possible."""
    costs = chain.at(size, past_largest=True)
    work = costs.forward_seconds * (1 + (plan.recompute != "never")) + costs.backward_seconds
    return list(accumulate(balance(work, program.slots, cut_after=chain.cut_after)))


def _recompute(plan: Plan, schedule: str, devices: int, *, keeps: bool) -> Sequence[Recompute]:
    """The recomputation of each device; only GPipe has `except_last`."""
    if plan.recompute == "except_last" and schedule != "gpipe":
        return ("always",) * devices
    if plan.recompute != "by_stage":
        return (plan.recompute,) * devices
    words = [stage.recompute for stage in plan.stages]
    if None in words:
        raise UsageError(
            "the plan's stages recompute differently, and it does not say how",
            "Simulate a plan with another recomputation.",
        )
    if not keeps:
        return ("always",) * devices
    return [str(word) if schedule in SEARCHED else whole_word(str(word)) for word in words[:devices]]


def _notes(plan: Plan, proposal: Proposal, modes: Sequence[Recompute]) -> Iterator[str]:
    """What is otherwise than in the plan."""
    keeps, replicas, schedule = keeps_stages(plan, proposal), proposal.replicas[0], proposal.config.schedule
    if not keeps:
        counts = ", ".join(str(end - first) for first, end in proposal.bounds)
        yield f"the layers are cut anew, the slowest part as fast as can be: {counts}"
        if replicas == 1 and max(plan.replicas) > 1:
            yield "the plan's replicas are left out: each stage is on one device"
        elif replicas > 1:
            yield f"each stage has {replicas} replicas"
    if plan.recompute in ("except_last", "by_stage") and plan.recompute not in modes:
        mode = plan.recompute.replace("_", "-")
        if plan.recompute == "except_last":
            yield f"recompute always: {mode} is for gpipe"
        elif not keeps:
            yield f"recompute {modes[0]} on every stage: the plan says it for its own stages"
    if plan.runtime is not None and not find_runtime(plan.runtime).runs(schedule):
        yield f"{plan.runtime} does not run {schedule}: as if each stage had a process of its own"


def list_prediction_limits(assembly: Assembly) -> Iterator[str]:
    """What was extrapolated, or taken for granted, in sentences."""
    chain, devices = assembly.chain, range(len(assembly.ranks))
    if assembly.program.splits_backward and chain.backward_weight_seconds is None:
        yield (
            f"the profile holds whole backwards: {100 * WEIGHT_SHARE:.0f} % of a layer with weights is "
            "taken as the weight gradient"
        )
    if assembly.program.splits_backward and chain.pending_gradient_bytes is None:
        yield (
            "the profile does not say which gradients the first part of a backward leaves for the second: of "
            "each layer as many bytes are taken as it saves, or hands on"
        )
    if assembly.program.splits_backward and set(assembly.recompute) != {"never"}:
        yield (
            "stages that recompute are charged one more forward a micro-batch: with a backward in two parts "
            "torch.utils.checkpoint runs it for the weight gradients, too, which is not in the prediction; "
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
"""Share of the step that launches, or the optimizer, must take for that to be said."""


@dataclass(frozen=True)
class OptimizerStep:
    """What the optimizer takes at the least on the device where it takes longest: it reads and writes `bytes`
    at the `bandwidth` of that device's memory, `updates` times a step."""

    bytes: float
    bandwidth: float
    rank: int
    updates: int

    @property
    def seconds(self) -> float:
        """Of all updates of a step."""
        return self.updates * self.bytes / self.bandwidth


def optimizer_step(assembly: Assembly, micro_batches: int | None = None) -> OptimizerStep | None:
    """None where no device's memory has a bandwidth that is known. `micro_batches`: of a step; None: the
    program's."""
    optimizer, precision = find_optimizer(assembly.optimizer), assembly.number_bytes
    every, micro_batches = assembly.program.update_every, micro_batches or assembly.program.micro_batches
    updates = 1 if every is None else micro_batches // every
    each = list[OptimizerStep]()
    for device, ranks in enumerate(assembly.ranks):
        parameters = sum(own.trainable for own in assembly.chunk_bytes(device)) / precision.weight
        share = len(ranks) if assembly.zero else 1
        amount = float(parameters) / share * optimizer.update_bytes(precision)
        first_ranks = {assembly.topology.device(rank).name: rank for rank in reversed(ranks)}
        for name, rank in sorted(first_ranks.items(), key=itemgetter(1)):
            if bandwidth := memory_bandwidth(name):
                each.append(OptimizerStep(amount, bandwidth, rank, updates))
    return max(each, key=attrgetter("seconds"), default=None)


def optimizer_note(
    assembly: Assembly, step_seconds: float, micro_batches: int | None = None
) -> Iterator[str]:
    """Where the updates that belong to a step take at least `WORTH` of it. Arguments as of
    `optimizer_step`."""
    own = optimizer_step(assembly, micro_batches)
    if own is not None and own.seconds >= WORTH * step_seconds > 0:
        often = "" if own.updates == 1 else f", {own.updates} times a step"
        yield (
            f"the optimizer's step is not in the prediction: {assembly.optimizer} reads and writes at least "
            f"{format_bytes(own.bytes)} on device {own.rank}{often}, which takes its memory of "
            f"{format_rate(own.bandwidth)} {format_seconds(own.seconds)} or more, "
            f"{percent(own.seconds / step_seconds)} of the step"
        )


def _slow_host(assembly: Assembly) -> Iterator[str]:
    """Of the device whose process takes longest to launch, where no device computes for as long, and the step
    is shorter without launches: else it waits for transfers or all-reduces."""
    if assembly.hosts == "one":
        return
    # Pipes of two directions share the micro-batches: a device has its places in each of them.
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
    on_device, on_host = (format_seconds(float(own[device])) for own in (computing, launching))
    yield (
        f"the step waits for the hosts: device {assembly.ranks[device][0]} computes a micro-batch in "
        f"{on_device}, and its process takes {on_host} to launch the operations; where that takes less "
        "(torch.compile, CUDA graphs), so does the step"
    )


def _launches_take_time(assembly: Assembly) -> bool:
    """Whether the step is shorter, by more than `WORTH` of it, where hosts launch in no time; of a schedule
    that is never flushed, a micro-batch in its steady state."""
    costs, program = assembly.costs(), assembly.program
    free = replace(costs, forward_launch=None, backward_launch=None)

    def seconds(own: Costs) -> float:
        if not assembly.schedule.synchronous:
            with suppress(UsageError):  # too few micro-batches
                return steady_state(program, own).seconds_per_micro_batch
        return float(step_seconds(program, own)[0])

    return seconds(free) < seconds(costs) * (1 - WORTH)


def plan_stages(space: Space, plan: ScoredPlan) -> list[PlannedStage]:
    """The parts of the layers in order. Where a device has several, the memory is that of all of them."""
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
    """What a replica keeps on its host at most, of a schedule with one stage a device."""
    device, program = assembly.program.pipes[0][part].device, assembly.program
    in_flight = assembly.schedule.in_flight(device, program.devices, program.micro_batches)
    return ceil(in_flight * assembly.offloaded_bytes(part))


def shared_weights(space: Space, plan: ScoredPlan) -> list[SharedWeight]:
    """The weights that several of its parts use."""
    sums = {own.name: own.seconds for own in assemble_candidate(space, plan).tied_sums}
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
    """Of a step of so many seconds: `busy` seconds of each rank that is used, at the watts of its kind while
    it computes and while it waits; None where a kind has none."""
    kinds = {rank: topology.device(rank).name for rank in busy}
    if not set(kinds.values()) <= set(watts):
        return None
    power = {rank: watts[kind] for rank, kind in kinds.items()}
    return sum(
        seconds * power[rank][0] + max(step - seconds, 0.0) * power[rank][1] for rank, seconds in busy.items()
    )


def busy_seconds(stages: Iterable[PlannedStage], micro_batches: int) -> dict[int, float]:
    """By rank, what its stages compute in a step."""
    busy = dict[int, float]()
    for stage in stages:
        seconds = micro_batches * (stage.forward_seconds + stage.backward_seconds)
        for rank in stage.devices:
            busy[rank] = busy.get(rank, 0.0) + seconds
    return busy
