"""Plans by degrees of parallelism, from the configuration of a transformer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from ..cost_models import arguments
from ..cost_models.arguments import describe_options, options_from
from ..cost_models.document import MadeBy
from ..cost_models.errors import InfeasibleError, UsageError
from ..cost_models.machines import (
    ROOFLINES,
    MachineKeywords,
    MachineOptions,
    device_context,
    device_preset,
    host_bandwidth,
)
from ..cost_models.memory import FRAGMENTATION_RESERVE
from ..cost_models.quantities import format_bytes, format_count, format_seconds
from ..cost_models.topology import UNKNOWN_DEVICE, Topology
from ..cost_models.topology_file import ProfiledDevice, make_topology
from ..cost_models.transformer.configuration import load_transformer_shape, transformer_shape
from ..cost_models.transformer.kernel_table import TERA, KernelTable
from ..cost_models.transformer.kernel_table_file import load_kernel_table
from ..cost_models.transformer.layer_table import StageEstimate
from ..cost_models.transformer.rank_costs import DeviceLimits, RankCosts, TopologyLinks
from ..cost_models.transformer.transformer_shape import TransformerShape
from ..planner.degrees.degree_baselines import degree_baselines
from ..planner.degrees.degree_combinations import options_to_allow
from ..planner.degrees.degree_file import (
    BaselineEntry,
    ByStageEntry,
    DegreesFile,
    LedgerEntry,
    OwnStageEntry,
    PlanEntry,
    StageEntry,
    StagePlanEntry,
)
from ..planner.degrees.degree_options import DegreeKeywords, DegreeOptions
from ..planner.degrees.degree_search import DegreeAnswer, DegreeBaseline, DegreePlan, search_degrees
from ..planner.degrees.stage_degree_bound import check_device_parts
from ..planner.degrees.stage_degree_search import OwnStage, StageAnswer, check_blocks, search_stage_degrees
from .degree_arguments import (
    megatron_arguments,
    megatron_bridge_overrides,
    megatron_remarks,
    nemo_automodel_remarks,
    nemo_automodel_sections,
    torchtitan_arguments,
    torchtitan_remarks,
)
from .machine import count_gpus

_GPUS = ", ".join(name for name, roofline in ROOFLINES.items() if "bfloat16" in roofline.peaks)


class DegreesKeywords(MachineKeywords, DegreeKeywords, total=False):
    """The options of `degrees`, besides the configuration."""


@describe_options(DegreesKeywords, DegreeOptions, MachineOptions)
def degrees(
    config: str | Path | Mapping[str, Any],
    *,
    gpus: int | None = None,
    kernels: str | Path | None = None,
    **options: Unpack[DegreesKeywords],
) -> DegreeAnswer:
    """The fastest ways to train a transformer on `gpus`, or on all of a `topology`: tensor, context, expert,
    pipeline and data parallelism.

    `config`: the model's config.json (its path, or what it says). `kernels`: a CSV file of measured kernels.
    The machine as of `solve`, `gpu` or a topology with devices of a preset; options as of `DegreeOptions`.
    Of the result: `plans`, the fastest first, each with its `estimate` of step and memory, and
    `bound_seconds`; with `by_stage` also `by_stage.plan`, whose stages have degrees of their own, where that
    is faster.

    >>> import pplan
    >>> config = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
    >>> answer = pplan.degrees(config, gpus=8, gpu="h100", mini_batch=64)
    >>> answer.plans[0].degrees
    ParallelDegrees(tensor=1, context=1, expert=1, pipeline=1, data=8, zero=2, exchange='all-to-all')

    Raises UsageError, FileError, and InfeasibleError where nothing fits.
    """
    table = arguments.optional_path("kernels", kernels)
    values: dict[str, Any] = dict(options) if gpus is None else {**options, "gpus": gpus}
    if "batch_size" in values:  # the name of earlier versions
        values.setdefault("mini_batch", values.pop("batch_size"))
    degree_options, machine = options_from(values, DegreeOptions, MachineOptions, of="degrees")
    return find_degrees(read_shape(config), machine, degree_options, table)


def read_shape(config: str | Path | Mapping[str, Any]) -> TransformerShape:
    """Of a config.json (its path, or what it says). Raises UsageError and FileError."""
    if isinstance(config, Mapping):
        return transformer_shape(config)
    return load_transformer_shape(arguments.path("config", config))


def find_degrees(
    shape: TransformerShape, machine: MachineOptions, options: DegreeOptions, kernels: Path | None
) -> DegreeAnswer:
    """The same, of what is read."""
    if options.layers is not None:
        shape = shape.with_blocks(options.layers)
    if options.by_stage:
        options.check_by_stage()
        check_blocks(shape)
    topology, costs, limit = machine_costs(machine, kernels, options.host_bandwidth)
    if options.by_stage:
        check_device_parts(topology)
    try:
        answer = search_degrees(shape, topology.gpus, costs, options, limit)
    except InfeasibleError as error:
        raise _with_memory(error, topology) from None
    if options.by_stage:
        best = answer.plans[0].estimate.step_seconds
        by_stage = search_stage_degrees(shape, topology, costs, options, limit, best)
        answer = replace(answer, by_stage=by_stage)
    return answer.with_baselines(degree_baselines(shape, topology, costs, options, limit))


def machine_costs(
    machine: MachineOptions, kernels: Path | None, host_rate: float | None = None
) -> tuple[Topology, RankCosts, float]:
    """The devices and links, what kernels take on them, and what the ledger of a device may add up to.
    `host_rate`: bytes per second of copies to the host; None: those of the GPU's link."""
    topology = build_machine(machine)
    costs = rank_costs(topology, None if kernels is None else load_kernel_table(kernels))
    rate = host_bandwidth(topology.device(0).name) if host_rate is None else host_rate
    return topology, replace(costs, host_bandwidth=rate), usable_bytes(topology)


def _with_memory(error: InfeasibleError, topology: Topology) -> InfeasibleError:
    """The same, with the memory of a device that would do, its context and the reserve included."""
    device = topology.device(0)
    context = device_context(device.name)
    needed = error.details["needed_bytes"] * (1 + FRAGMENTATION_RESERVE)
    needed += 0 if context is None else context.value
    would_fit = f"memory='{needed / 2**30 + 0.005:.2f}GiB' a device"
    return InfeasibleError(
        f"{error.what} of its {format_bytes(device.memory_bytes or 0)}",
        f"What would fit: {would_fit}. Or {error.hint[:1].lower()}{error.hint[1:]}",
        error.details | {"would_fit": [would_fit]},
    )


def usable_bytes(topology: Topology) -> float:
    """What the ledger of a device may add up to: its memory without the process's context, and without the
    share that the caching allocator cannot use."""
    device = topology.device(0)
    if device.memory_bytes is None:
        return float("inf")
    context = device_context(device.name)
    memory_bytes = device.memory_bytes - (0 if context is None else context.value)
    return memory_bytes / (1 + FRAGMENTATION_RESERVE)


def build_machine(machine: MachineOptions) -> Topology:
    """The topology. Raises UsageError where the number of devices is missing, or they are unlike."""
    gpus = count_gpus(machine)
    if machine.gpu is None and machine.topology is None:
        raise UsageError("`gpu` is missing", f"Name the GPU: `gpu`, one of {_GPUS}.")
    no_profile = ProfiledDevice(UNKNOWN_DEVICE, "", None)
    topology = make_topology(gpus=gpus, file=machine.topology, profiled=no_profile, **machine.parts)
    if len(topology.kinds) > 1:
        kinds = ", ".join(kind.name for kind in topology.kinds)
        raise UsageError(f"devices of several kinds ({kinds})", "Degrees are found for devices of one kind.")
    return topology


def rank_costs(topology: Topology, table: KernelTable | None) -> RankCosts:
    """The costs of the device's preset. Raises UsageError where its FLOP/s are not known."""
    name = topology.device(0).name
    preset = device_preset(name)
    if preset is None or preset.name not in ROOFLINES:
        raise UsageError(f"there are no figures of the FLOP/s of {name}", f"Name one with `gpu`: {_GPUS}.")
    roofline = ROOFLINES[preset.name]
    if table is None and "bfloat16" not in roofline.peaks:
        raise UsageError(
            f"{preset.name} does not compute in bfloat16, as this training does",
            f"Name one that does with `gpu`: {_GPUS}; or give a table of its kernels, `kernels`.",
        )
    stated = roofline.peak("bfloat16") if "bfloat16" in roofline.peaks else None
    peak = roofline.peak("bfloat16") if table is None else table.peak
    limits = DeviceLimits(peak, roofline.bandwidth.value, stated_flops=stated)
    return RankCosts(limits, TopologyLinks(topology), table)


def build_degrees_file(answer: DegreeAnswer, made_by: MadeBy) -> DegreesFile:
    """The answer as a file."""
    shape = answer.shape
    return DegreesFile(
        model=shape.name,
        layer_count=shape.blocks,
        parameters=shape.parameters(),
        active_parameters=shape.active_parameters(),
        devices=answer.devices,
        mini_batch=answer.options.mini_batch,
        sequence=answer.options.sequence,
        combinations=answer.combinations,
        bound_seconds=answer.bound_seconds,
        gap=answer.gap,
        limit_bytes=answer.limit_bytes if answer.limit_bytes < float("inf") else None,
        kernels=len(answer.kernels),
        assumed_kernels=len(answer.assumed_kernels),
        plans=[_plan_entry(answer, plan) for plan in answer.plans],
        baselines=[_baseline_entry(own) for own in answer.baselines],
        by_stage=None if answer.by_stage is None else _by_stage_entry(answer.by_stage),
        notes=_notes(answer),
        made_by=made_by,
    )


def _baseline_entry(baseline: DegreeBaseline) -> BaselineEntry:
    plan, by_layer = baseline.plan, baseline.by_layer
    if by_layer is not None:
        return BaselineEntry(
            name=baseline.name,
            degrees=by_layer.describe(),
            recompute=by_layer.recompute,
            micro_batch_size=by_layer.micro_batch_size,
            step_seconds=by_layer.step_seconds,
        )
    if plan is None:
        return BaselineEntry(name=baseline.name, reason=baseline.reason)
    return BaselineEntry(
        name=baseline.name,
        degrees=plan.degrees.describe(),
        recompute=plan.recompute,
        micro_batch_size=plan.micro_batch_size,
        step_seconds=plan.estimate.step_seconds,
    )


def _by_stage_entry(answer: StageAnswer) -> ByStageEntry:
    plan = answer.plan
    if plan is None:
        return ByStageEntry(plan=None, bound_seconds=answer.bound_seconds)
    stages = zip(plan.stages, plan.estimate.stages, strict=True)
    entry = StagePlanEntry(
        micro_batch_size=plan.samples,
        micro_batches=plan.micro_batches,
        step_seconds=plan.estimate.step_seconds,
        pipeline_seconds=plan.estimate.pipeline_seconds,
        update_seconds=plan.estimate.update_seconds,
        transfer_seconds=list(plan.transfers),
        peak_bytes=plan.estimate.peak_bytes,
        stages=[_own_stage_entry(own, costs) for own, costs in stages],
    )
    return ByStageEntry(plan=entry, bound_seconds=answer.bound_seconds)


def _own_stage_entry(own: OwnStage, costs: StageEstimate) -> OwnStageEntry:
    degrees = own.devices.degrees
    return OwnStageEntry(
        first_device=own.devices.first,
        devices=own.devices.size,
        degrees=degrees.describe(),
        tensor=degrees.tensor,
        context=degrees.context,
        expert=degrees.expert,
        data=degrees.data,
        zero=degrees.zero,
        exchange=degrees.exchange,
        recompute=own.recompute.kind,
        recompute_blocks=own.recompute.blocks,
        costs=_stage_entry(costs),
    )


def _stage_entry(stage: StageEstimate) -> StageEntry:
    return StageEntry(
        blocks=[(blocks.start, blocks.stop - 1) for blocks in stage.blocks],
        forward_seconds=stage.forward_seconds,
        backward_seconds=stage.backward_seconds,
        update_seconds=stage.update_seconds,
        ledger=LedgerEntry(**stage.ledger),
        host_bytes=stage.host_bytes,
    )


def _plan_entry(answer: DegreeAnswer, plan: DegreePlan) -> PlanEntry:
    estimate = plan.estimate
    return PlanEntry(
        degrees=plan.degrees.describe(),
        **vars(plan.degrees),
        micro_batch_size=plan.micro_batch_size,
        micro_batches=plan.micro_batches,
        recompute=plan.recompute,
        recompute_blocks=plan.recompute_blocks,
        schedule="1f1b" if plan.virtual_stages == 1 else "interleaved",
        virtual_stages=plan.virtual_stages,
        predictors=plan.setting.predictors,
        predictor_offset=plan.setting.predictor_offset,
        step_seconds=estimate.step_seconds,
        pipeline_seconds=estimate.pipeline_seconds,
        update_seconds=estimate.update_seconds,
        peak_bytes=estimate.peak_bytes,
        blocks=list(plan.blocks),
        stages=[_stage_entry(stage) for stage in estimate.stages],
        megatron=megatron_arguments(answer, plan),
        megatron_bridge=megatron_bridge_overrides(answer, plan),
        torchtitan=torchtitan_arguments(answer, plan),
        nemo_automodel=nemo_automodel_sections(answer, plan),
        remarks=megatron_remarks(plan) + torchtitan_remarks(plan) + nemo_automodel_remarks(plan),
    )


def configuration_notes(shape: TransformerShape, sequence: int, predictors: int) -> list[str]:
    """Say what is not known of a configuration, or not counted.

    Args:
        shape: What was read.
        sequence: Tokens of a sample.
        predictors: Multi-token predictors that are counted.
    """
    notes = [shape.note] if shape.note else []
    if (share := shape.attended_share(sequence)) < 1:
        local = sum(own is not None for own in shape.windows)
        notes.append(
            f"attention of {local} of {len(shape.windows)} blocks is local; each block is given the mean, "
            f"{share:.0%} of what whole attention computes, and a ring of context parallelism all of it"
        )
    if shape.predictors > predictors:
        notes.append(
            f"the configuration has {format_count(shape.predictors, 'multi-token predictor')}, of which "
            f"{predictors} are counted: set `predictors`, or place each in the layout as m"
        )
    return notes


def _by_stage_notes(answer: DegreeAnswer) -> list[str]:
    assert answer.by_stage is not None
    if answer.by_stage.plan is None:
        return []
    notes = [
        "no arguments for degrees by stage: Megatron-LM, torchtitan and NeMo AutoModel have one set of "
        "degrees for all stages, and a stage of PyTorch's pipelining sends to one rank; a runtime must send "
        "from every device of a stage to those of the next that hold the same tokens (as Alpa's cross-mesh "
        "resharding)"
    ]
    if answer.shape.tied:
        notes.append(
            "embedding and head share their weights: adding up their gradients is not counted, nor what "
            "it takes where the first and the last stage have different degrees"
        )
    return notes


_LEAST_PEAK, _LARGEST_PEAK = 0.3, 1.05
"""Of what the maker states: a table without a stated peak has that of its fastest kernel."""


def _offload_note(answer: DegreeAnswer) -> str:
    rate, stated = answer.costs.host_bandwidth or 0.0, answer.options.host_bandwidth is not None
    source = "as given" if stated else "an assumption: 85 % of the GPU's own PCIe link, shared with none"
    return (
        f"offload is an estimate, of which nothing was measured: copies to the host and back run at "
        f"{rate / 1e9:.3g} GB/s each ({source}; `host_bandwidth` gives another), beside the computing, and "
        "slow it only where they take longer; whether the host has the memory is not checked"
    )


def _assumed_note(answer: DegreeAnswer, table: KernelTable, shares: str) -> str:
    """Of the kernels of the fastest that the table has no row of."""
    neighbours = [kernel for kernel in answer.assumed_kernels if table.knows(kernel)]
    beyond = sum(not table.surrounds(kernel) for kernel in neighbours)
    note = (
        f"{len(answer.assumed_kernels)} of {len(answer.kernels)} kernels of the fastest are not in the table"
    )
    parts = []
    if neighbours:
        parts.append(f"{len(neighbours)} are taken from its nearest shapes")
        parts[-1] += f", {beyond} of them beyond its smallest or largest sizes" if beyond else ""
    if missing := len(answer.assumed_kernels) - len(neighbours):
        parts.append(f"{missing}, of whose kind it has none, are assumed to reach {shares}")
    return f"{note}: {'; '.join(parts)}"


def _notes(answer: DegreeAnswer) -> list[str]:
    limits, overheads = answer.costs.limits, answer.costs.overheads
    shares = (
        f"products {limits.product_share:.0%} of the GPU's FLOP/s, attention {limits.attention_share:.0%}, "
        f"passes over memory {limits.memory_share:.0%} of its bandwidth"
    )
    notes = configuration_notes(answer.shape, answer.options.sequence, answer.options.predictors)
    best = answer.plans[0].estimate.step_seconds
    for own in answer.baselines:
        plan = own.plan
        if plan is not None and plan.estimate.step_seconds < best:
            changes = options_to_allow(answer.shape, plan, answer.options)
            notes.append(
                f"the baseline {own.name} is faster, but not among what is allowed: "
                f"{plan.degrees.describe()}; allow it with "
                + " and ".join(f"{field}={value!r}" for field, value in changes.items())
            )
        if own.by_layer is not None and own.by_layer.step_seconds < best:
            notes.append(
                f"the baseline {own.name} is faster: its blocks have degrees of their own, which no trainer "
                "takes whose arguments are written here"
            )
    if answer.by_stage is not None:
        notes += _by_stage_notes(answer)
    if answer.options.offload:
        notes.append(_offload_note(answer))
    if answer.costs.table is None:
        notes.append(
            f"no kernels are measured: by assumption they reach {shares}; give a table with `kernels`"
        )
    else:
        if limits.stated_flops and not _LEAST_PEAK <= limits.flops / limits.stated_flops <= _LARGEST_PEAK:
            notes.append(
                f"the table's peak is {limits.flops / TERA:g} TFLOP/s, and that of the GPU in bfloat16 "
                f"{limits.stated_flops / TERA:g}: its kernels may be another device's"
            )
        if answer.assumed_kernels:
            notes.append(_assumed_note(answer, answer.costs.table, shares))
    notes.append(
        f"as fitted to a training loop on B200, {format_seconds(overheads.gap)} follow each pass over memory "
        f"and each pass of a layer with experts waits for {format_seconds(overheads.dispatch)}"
    )
    notes.append(
        "not modelled: overlap of the communication inside a layer with computing (but a ring's with its "
        "attention), experts that get unequal numbers of tokens, expert-tensor parallelism"
    )
    return notes
