"""A plan in the simulator: its costs and its memory under any schedule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from ..cost_models.device_memory import micro_batch_bytes, round_ledger
from ..cost_models.layer import Chain, align_profiles, list_cut_points
from ..cost_models.quantities import format_bytes, format_count
from ..cost_models.runtime import find_runtime
from ..cost_models.schedules import Schedule
from ..cost_models.timeline import Timeline, simulate
from ..cost_models.topology import Topology
from .assembly import Assembly
from .layout import Layout
from .overrides import Overrides
from .plan_file import Plan
from .plan_stages import list_prediction_limits, optimizer_note


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
    most = timeline.peak_memory(device, 0.0, in_flight, parts).bytes
    limit = assembly.smallest_device(device).memory_bytes
    return DeviceMemory(terms, sum(terms.values()) - most, in_flight, limit, parts)


@dataclass(frozen=True, eq=False)
class SimulatedPlan:
    """What was simulated. `layers`: by device and chunk, the first and the last layer (0-based)."""

    schedule: Schedule
    virtual_stages: int
    micro_batch_size: int
    timeline: Timeline
    layers: tuple[tuple[tuple[int, int], ...], ...]
    memory: tuple[DeviceMemory, ...]
    notes: tuple[str, ...]


def simulate_plan(
    plan: Plan,
    chain: Chain,
    topology: Topology,
    overrides: Overrides | None = None,
    profiles: Mapping[str, Chain] | None = None,
) -> SimulatedPlan:
    """The plan of this chain on this topology, simulated.

    The plan's cuts and devices stay where the number of stages and of their parts does; otherwise the layers
    are cut anew so that the slowest part is as fast as can be. The plan's replicas stay where the pipeline is
    as long, all stages have as many and no other number is named; stages that are named are on one device
    each. The global batch stays, so that other micro-batches are of another
    size. `profiles`: the same layers as measured on the
    kinds of devices that have a profile of their own, by its name in the topology.

    Raises UsageError for numbers that the schedule, the global batch or the cuts do not allow, for replicas
    that cannot stay, and for `profiles` that are missing or of other layers.
    """
    layout = Layout(plan, chain, overrides or Overrides())
    assembly = with_own_cuts(assemble_layout(layout, topology, align_profiles(chain, profiles or {})))
    timeline = simulate(assembly.program, assembly.costs())
    memory = tuple(device_memory(assembly, device, timeline) for device in range(assembly.program.devices))
    return SimulatedPlan(
        schedule=layout.schedule,
        virtual_stages=layout.virtual_stages,
        micro_batch_size=layout.size,
        timeline=timeline,
        layers=tuple(layout.layers(device) for device in range(assembly.program.devices)),
        memory=memory,
        notes=(
            *_notes(layout),
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


def assemble_layout(layout: Layout, topology: Topology, profiles: Mapping[str, Chain]) -> Assembly:
    """The pipeline of a layout, for the simulator and the ledger. Raises UsageError as `Layout` does."""
    return Assembly(
        schedule=layout.schedule,
        program=layout.program,
        chain=layout.chain,
        topology=topology,
        size=layout.size,
        bounds=layout.bounds,
        ranks=layout.ranks,
        recompute=layout.recompute,
        optimizer=layout.plan.optimizer,
        dtype=layout.plan.profile.dtype,
        precision=layout.plan.training_precision.bytes,
        zero=layout.plan.zero,
        hosts=layout.hosts,
        transfers=layout.overrides.transfers,
        receives_ahead=layout.receives_ahead,
        profiles=profiles,
        host_bandwidth=layout.plan.options.host_bandwidth,
    )


def with_own_cuts(assembly: Assembly) -> Assembly:
    """The same pipeline of a chain that can be cut nowhere else: its tables of stages are as small."""
    cut_points = list_cut_points(assembly.chain)
    cut_after = np.zeros_like(assembly.chain.cut_after)
    cut_after[[cut_points[end] - 1 for _, end in assembly.bounds[:-1]]] = True
    return replace(
        assembly,
        chain=replace(assembly.chain, cut_after=cut_after),
        profiles={name: replace(own, cut_after=cut_after) for name, own in assembly.profiles.items()},
        bounds=list(pairwise(range(len(assembly.bounds) + 1))),
    )


def _notes(layout: Layout) -> Iterator[str]:
    """What is otherwise than in the plan."""
    plan = layout.plan
    if not layout.keeps_stages:
        counts = ", ".join(map(str, layout.balance))
        yield f"the layers are cut anew, the slowest part as fast as can be: {counts}"
        if layout.replicas == 1 and max(plan.replicas) > 1:
            yield "the plan's replicas are left out: each stage is on one device"
        elif layout.replicas > 1:
            yield f"each stage has {layout.replicas} replicas"
    if plan.recompute in ("except_last", "selective") and plan.recompute not in layout.recompute:
        mode = plan.recompute.replace("_", "-")
        if plan.recompute == "except_last":
            yield f"recompute always: {mode} is for gpipe"
        elif not layout.keeps_stages:
            yield f"recompute {layout.recompute[0]} on every stage: the plan says it for its own stages"
    runtime = plan.runtime
    if runtime is not None and not find_runtime(runtime).runs(layout.schedule.name):
        name = layout.schedule.name
        yield f"{runtime} does not run {name}: as if each stage had a process of its own"
