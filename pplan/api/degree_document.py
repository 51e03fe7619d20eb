"""An answer by degrees as a file."""

from __future__ import annotations

from ..cost_models.document import MadeBy
from ..cost_models.quantities import format_count, format_seconds
from ..cost_models.transformer.kernel_table import TERA, KernelTable
from ..cost_models.transformer.layer_table import StageEstimate
from ..cost_models.transformer.transformer_shape import TransformerShape
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
from ..planner.degrees.degree_search import DegreeAnswer, DegreeBaseline, DegreePlan
from ..planner.degrees.stage_degree_search import OwnStage, StageAnswer
from .degree_arguments import (
    megatron_arguments,
    megatron_bridge_overrides,
    megatron_remarks,
    nemo_automodel_remarks,
    nemo_automodel_sections,
    torchtitan_arguments,
    torchtitan_remarks,
)


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
