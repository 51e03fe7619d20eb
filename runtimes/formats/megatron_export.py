"""Megatron-LM (https://github.com/NVIDIA/Megatron-LM, megatron-core 0.16.1), and Megatron-Bridge above it.

A layout names what each stage holds: E the embedding, t a transformer block, L the head with its loss; stages
are divided by `|`, and x*n stands for n of x. Stage v * p + r is part v of pipeline rank r of p. Ranks of the
processes count the replicas of a stage before the next stage. Sources: megatron-core's
`transformer/pipeline_parallel_layer_layout.py` and `transformer/transformer_config.py`, Megatron-LM's
`megatron/training/arguments.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from math import gcd
from typing import Any, ClassVar, Literal, TypeVar

from ...cost_models.document import LayerCount, MadeBy
from ...cost_models.errors import ExportError
from ...cost_models.first_layers import recompute_kinds
from ...cost_models.runtime import find_runtime
from ...cost_models.transformer.pipeline_layout import stage_letters
from ...planner.plan_file import Plan
from .first_blocks import count_first_blocks
from .plan_choice import Choice, choose
from .trainer_text import TrainerArguments, device_remark, join_remarks, trainer_fields
from .transformer_blocks import Transformer, check_whole_blocks, ends_remark, find_plan_blocks, is_small

E = TypeVar("E", bound="LayoutExport")
ArgumentWriter = Callable[[dict[str, Any], Plan, int | None], list[str]]
"""Makes arguments of the fields of a document, the plan, and the blocks that are recomputed together."""


class LayoutExport(TrainerArguments):
    """A layout and what goes with it; `layout` tells the virtual stages by how many stages it has."""

    layout: str
    num_layers: LayerCount
    """Transformer blocks."""
    first_blocks: LayerCount | None = None
    """Of every stage, that it recomputes; None: all, where `recompute` is always."""


class MegatronExport(LayoutExport):
    """Arguments of Megatron-LM's training scripts.

    The layout does not stand together with --num-layers-per-virtual-pipeline-stage,
    --num-virtual-stages-per-pipeline-rank, --decoder-first-pipeline-num-layers,
    --decoder-last-pipeline-num-layers, --account-for-embedding-in-pipeline-split and
    --account-for-loss-in-pipeline-split.
    """

    kind: ClassVar[str] = "megatron"
    command: ClassVar[str] = "pretrain_gpt.py"
    runtime: Literal["megatron"]


class MegatronBridgeExport(LayoutExport):
    """Overrides of the configuration of a recipe of Megatron-Bridge."""

    kind: ClassVar[str] = "megatron-bridge"
    command: ClassVar[str] = "RECIPE.py"
    runtime: Literal["megatron-bridge"]


def export(plan: Plan, *, device: str, made_by: MadeBy) -> tuple[MegatronExport, str | None]:
    """The arguments, and a remark where they are not the plan itself. Raises ExportError.

    `device` changes nothing: Megatron-LM runs on CUDA devices only.
    """
    del device
    choice, remark = choose(plan, find_runtime("megatron"))
    return _build_document(MegatronExport, plan, choice, remark, _flags, made_by)


def export_bridge(plan: Plan, *, device: str, made_by: MadeBy) -> tuple[MegatronBridgeExport, str | None]:
    """As `export`, for Megatron-Bridge."""
    del device
    choice, remark = choose(plan, find_runtime("megatron-bridge"))
    return _build_document(MegatronBridgeExport, plan, choice, remark, _overrides, made_by)


def _build_document(
    kind: type[E], plan: Plan, choice: Choice, remark: str | None, words: ArgumentWriter, made_by: MadeBy
) -> tuple[E, str | None]:
    """The document of class `kind`, whose arguments `words` makes."""
    model = find_plan_blocks(plan, kind.kind)
    ends = tuple(accumulate(choice.balance))
    check_whole_blocks(plan, model, ends, kind.kind)
    stages = _blocks_by_stage(plan, model, ends, kind.kind)
    layout_fields: dict[str, Any] = {"layout": write_layout(stages), "num_layers": model.blocks}
    first_blocks = _first_blocks(model, ends, choice)
    if first_blocks is not None:
        layout_fields |= {"first_blocks": first_blocks, "recompute": "always"}
    fields = trainer_fields(plan, choice, kind.kind) | layout_fields
    document = kind(
        **fields,
        arguments=words(fields, plan, _recompute(choice, stages)),
        made_by=made_by,
    )
    return document, join_remarks(
        remark,
        ends_remark(model, kind.kind),
        *_remarks(model, ends, choice, stages, kind.kind),
        _tied_remark(plan, kind.kind),
        device_remark(choice),
    )


def write_layout(blocks: Sequence[int], predictors: int = 0, predictor_offset: int = 0) -> str:
    """The layout of stages with so many transformer blocks, the embedding on the first and the head on the
    last: `Et*3|t|t*2L` for 3, 1 and 2. Multi-token predictors, m, stand so many stages before the last."""
    stages = "|".join(stage_letters(blocks, predictors, predictor_offset))
    return re.sub(r"([tm])\1+", lambda match: f"{match[1]}*{len(match[0])}", stages)


def _blocks_by_stage(plan: Plan, model: Transformer, ends: Sequence[int], runtime: str) -> list[int]:
    """Transformer blocks of each stage. Raises ExportError where a stage ends inside the head."""
    stages = [model.blocks_before(end) - model.blocks_before(first) for first, end in pairwise((0, *ends))]
    for stage, (first, end) in enumerate(pairwise((0, *ends[:-1]))):
        moved = model.names[max(model.ends[-1], first) : end]
        if moved and not (stages[stage] and all(map(is_small, moved))):
            raise ExportError(
                f"stage {stage} computes {', '.join(moved)}, a later one the rest of the head: {runtime} has "
                "the head on the last stage",
                f"Measure it as one layer: pplan.profile({plan.model!r}, "
                f"granularity='module:{model.list_name}.*'), and make the plan again: pplan solve",
            )
    return stages


def _recompute(choice: Choice, stages: Sequence[int]) -> int | None:
    """Blocks that are recomputed together, as many as divide every stage: its uniform method steps through a
    stage by this number and does not look where the stage ends. None: nothing is recomputed."""
    return gcd(*stages) if choice.recompute == "always" else None


def _first_blocks(model: Transformer, ends: Sequence[int], choice: Choice) -> int | None:
    """The blocks that every stage recomputes, of a plan that recomputes the first layers of one."""
    if "first_layers" not in recompute_kinds(choice.stage_recompute):
        return None
    return count_first_blocks(model, ends, choice.stage_recompute)


def write_flags(settings: Mapping[str, object]) -> list[str]:
    """Megatron-LM's arguments, of settings by its names for them."""
    return [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def write_overrides(settings: Mapping[str, object]) -> list[str]:
    """The same as overrides of a recipe of Megatron-Bridge (NeMo), whose sections have those names."""
    sections = {
        **dict.fromkeys(("micro_batch_size", "global_batch_size"), "train"),
        **dict.fromkeys(("data_parallel_sharding_strategy", "grad_reduce_in_fp32"), "ddp"),
    }
    return [f"{sections.get(name, 'model')}.{name}={value}" for name, value in settings.items()]


DISTRIBUTED_OPTIMIZER = [f"{section}.use_distributed_optimizer=true" for section in ("ddp", "optimizer")]
"""Overrides of Megatron-Bridge."""


def _settings(fields: dict[str, Any], plan: Plan, recompute: int | None) -> dict[str, object]:
    """Megatron-LM counts a micro-batch by what one replica computes of it."""
    settings: dict[str, object] = {
        "num_layers": fields["num_layers"],
        "pipeline_model_parallel_size": fields["pipeline_size"],
        "pipeline_model_parallel_layout": fields["layout"],
        "micro_batch_size": fields["micro_batch_size"] // fields["replicas"],
        "global_batch_size": fields["mini_batch"],
    }
    if plan.profile.tensor_parallel > 1:
        settings["tensor_model_parallel_size"] = plan.profile.tensor_parallel
    number = fields.get("first_blocks") or recompute
    if number is not None:
        settings |= {
            "recompute_granularity": "full",
            "recompute_method": "block" if fields.get("first_blocks") else "uniform",
            "recompute_num_layers": number,
        }
    return settings


def _flags(fields: dict[str, Any], plan: Plan, recompute: int | None) -> list[str]:
    words = {"bfloat16": ["--bf16"], "float16": ["--fp16"]}.get(plan.profile.dtype, [])
    if plan.profile.dtype == "bfloat16" and plan.gradient_dtype == "bf16":
        words.append("--grad-reduce-in-bf16")
    if plan.profile.dtype == "float16" and plan.gradient_dtype == "fp32":
        words.append("--accumulate-allreduce-grads-in-fp32")
    spread = ["--use-distributed-optimizer"] if _spreads(plan, fields) else []
    return write_flags(_settings(fields, plan, recompute)) + words + spread


def _spreads(plan: Plan, fields: dict[str, Any]) -> bool:
    """Whether its distributed optimizer is the plan's: ZeRO-1 over the replicas of a stage."""
    return plan.zero == 1 and fields["replicas"] > 1


def _overrides(fields: dict[str, Any], plan: Plan, recompute: int | None) -> list[str]:
    settings = _settings(fields, plan, recompute)
    if plan.tied:
        settings["share_embeddings_and_output_weights"] = "true"
    if fields["virtual_stages"] > 1:
        settings["virtual_pipeline_model_parallel_size"] = fields["virtual_stages"]
    if plan.profile.dtype == "bfloat16" and plan.gradient_dtype is not None:
        settings["grad_reduce_in_fp32"] = str(plan.gradient_dtype == "fp32").lower()
    return write_overrides(settings) + (DISTRIBUTED_OPTIMIZER if _spreads(plan, fields) else [])


def _tied_remark(plan: Plan, runtime: str) -> str | None:
    """A remark on tied weights, where no flag sets them."""
    if runtime != "megatron" or not plan.tied:
        return None
    return (
        "The plan's embedding and head share a weight, as Megatron-LM's do without "
        "--untie-embeddings-and-output-weights."
    )


def _remarks(
    model: Transformer, ends: Sequence[int], choice: Choice, stages: Sequence[int], runtime: str
) -> list[str]:
    """Remarks on what the trainer does otherwise than the plan."""
    remarks = []
    moved = model.names[model.ends[-1] : ends[-2]] if len(ends) > 1 else ()
    if moved:
        remarks.append(
            f"{runtime} computes {', '.join(moved)} with the head, on the last stage; the plan has it on "
            "the stage before."
        )
    first_blocks = _first_blocks(model, ends, choice)
    if first_blocks is not None:
        remarks.append(
            f"{runtime} runs each of the first {first_blocks} blocks of a stage again by itself and keeps "
            "its input, and never the embedding; the plan counts one checkpoint of all of a stage."
        )
        return remarks
    together = _recompute(choice, stages)
    if together is not None and together < max(stages):
        remarks.append(
            f"{runtime} recomputes {together} of a stage's blocks at a time, since the stages have different "
            "numbers of them: it keeps the input of each, the plan counts only the stage's."
        )
    return remarks
