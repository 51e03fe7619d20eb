"""The export of a plan from a transformer's configuration: its degrees in the words of each trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import gcd
from typing import Any, cast

from ..cost_models.document import MadeBy
from ..cost_models.errors import ExportError
from ..cost_models.runtime import OFFLOAD, Runtime
from ..cost_models.transformer.implementations import IMPLEMENTATIONS
from ..cost_models.transformer.parallel_degrees import UNSHARDED_STAGES
from ..cost_models.transformer.training_setting import block_ranges
from ..planner.plan_degrees import Degrees, TransformerTraining
from ..planner.plan_file import Plan, PlanRow, plan_word
from .documents import (
    ExportDocument,
    LayoutExport,
    NemoExport,
    TorchtitanExport,
    count_nodes,
    document_class,
    hash_layers,
)
from .trainer_words import (
    DISTRIBUTED_OPTIMIZER,
    INSTEAD,
    WORDS,
    ModuleNames,
    write_flags,
    write_layout,
    write_overrides,
)
from .transformer_blocks import find_blocks, first_block_words


@dataclass(frozen=True)
class DegreeRequest:
    """The plan, or one of its alternatives, on its way to a trainer."""

    plan: Plan
    choice: PlanRow
    training: TransformerTraining
    degrees: Degrees

    @property
    def blocks(self) -> tuple[int, ...]:
        """Number of blocks of each (virtual) stage."""
        return self.degrees.blocks(self.choice.balance, self.training)

    @property
    def samples(self) -> int:
        """Samples of a micro-batch on one replica."""
        return self.choice.micro_batch_size // self.degrees.data

    @property
    def layout(self) -> str:
        """The layout of Megatron-LM."""
        return write_layout(self.blocks, self.training.predictors, self.degrees.predictor_offset)


def degree_request(plan: Plan, training: TransformerTraining) -> DegreeRequest:
    """Choose the plan, or its fastest alternative where its stages have degrees of their own."""
    choice = plan.row
    if plan.degrees is None and not plan.alternatives:
        raise ExportError(
            "each stage of the plan has degrees of its own: trainers have one set of degrees for all stages",
            "Make a plan without `by_stage`.",
        )
    if plan.degrees is None:
        choice = min(plan.alternatives, key=lambda other: other.step_seconds)
    assert choice.degrees is not None
    return DegreeRequest(plan, choice, training, choice.degrees)


def without_degrees(plan: Plan) -> Plan:
    """Return a plan from a configuration as one of the layers that a profile of the model has.

    Raises:
        ExportError: Several devices share a layer, or what it runs again is no choice of whole layers.
    """
    degrees = plan.degrees
    if (
        degrees is None
        or degrees.sharers > 1
        or degrees.expert > 1
        or degrees.shared(degrees.pipeline).reduces_each
    ):
        shared = "each stage has degrees of its own" if degrees is None else degrees.describe()
        raise ExportError(
            f"the plan is from a configuration, with degrees of parallelism ({shared}) that only trainers of "
            "transformers have",
            f"Export it for one of {', '.join(EXPORTERS)}, or plan again: fix='tp=1,cp=1,ep=1,zero=1'.",
        )
    if degrees.recompute in ("selective", OFFLOAD):
        raise ExportError(
            f"the plan is from a configuration, and its recomputation ({degrees.recompute}) is inside layers",
            f"Export it for one of {', '.join(EXPORTERS)}, or plan again: recompute='always'.",
        )
    words: Sequence[str] = [degrees.recompute] * len(plan.stages)
    if degrees.first_blocks is not None:
        ends = list(accumulate(plan.balance))
        words = first_block_words(find_blocks(plan.layer_names), ends, degrees.first_blocks)
    word = plan_word(words)
    own = dict.fromkeys(("update_seconds", "transfer_seconds", "recompute"))
    stages = [
        stage.model_copy(update={**own, "recompute": None if each == word else each})
        for stage, each in zip(plan.stages, words, strict=True)
    ]
    update = {"stages": stages, "recompute": word, "training": None, "degrees": None, "alternatives": []}
    return plan.model_copy(update={**update, "zero": plan.zero if degrees.data > 1 else 0})


def export_degrees(
    runtime: Runtime, plan: Plan, training: TransformerTraining, made_by: MadeBy
) -> tuple[ExportDocument, str | None]:
    """Export a plan from a configuration for a trainer of transformers.

    Returns:
        The trainer's file, and a remark for standard error. The file's second line warns where the plan is
        for another implementation.

    Raises:
        ExportError: The runtime has no such degrees.
    """
    request = degree_request(plan, training)
    choice, degrees = request.choice, request.degrees
    warnings = code_warnings(training, runtime)
    processes = degrees.sharers * degrees.data * degrees.pipeline
    fields: dict[str, Any] = {
        "runtime": runtime.name,
        "model": plan.model,
        "layers_sha256": hash_layers(plan),
        "mini_batch": plan.mini_batch,
        "micro_batch_size": choice.micro_batch_size,
        "step_seconds": choice.step_seconds,
        "estimated": plan.profile.estimated,
        "made_by": made_by,
        "processes": processes,
        "nodes": count_nodes(tuple(range(processes)), plan.gpus_per_node),
        "pipeline_size": degrees.pipeline,
        "replicas": degrees.data,
        "order": choice.schedule,
        "virtual_stages": choice.virtual_stages,
        "recompute": "always" if degrees.recompute == "always" or degrees.first_blocks else "never",
        "warnings": warnings,
    }
    write, list_remarks = EXPORTERS[runtime.name]
    document = write(request, fields)
    sentences = [f"Warning: {text}" for text in warnings]
    if plan.degrees is None:
        sentences.append(
            f"{runtime.name} has one set of degrees for all stages{INSTEAD} the fastest alternative: "
            f"{degrees.describe()}, {fields['step_seconds']:.4g} s a step (the plan: "
            f"{plan.prediction.step_seconds:.4g} s)"
        )
    return document, " ".join(f"{text}." for text in [*sentences, *list_remarks(request)]) or None


def code_warnings(training: TransformerTraining, runtime: Runtime) -> list[str]:
    """Warn where the runtime runs other code than the plan costs."""
    if runtime.name in IMPLEMENTATIONS[training.implementation].runtimes:
        return []
    code = f"{training.implementation}'s code"
    code += " with Transformer Engine" * (training.implementation == "megatron")
    return [f"the plan's seconds and bytes are those of {code}, not of {runtime.name}'s"]


def megatron_arguments(request: DegreeRequest) -> list[str]:
    """The arguments of `pretrain_gpt.py` besides the model and the data."""
    degrees, settings, words = request.degrees, _megatron_settings(request), ["--bf16"]
    if request.choice.virtual_stages > 1 and "pipeline_model_parallel_layout" not in settings:
        settings["num_layers_per_virtual_pipeline_stage"] = request.blocks[0]
    if degrees.tensor > 1:
        words.append("--sequence-parallel")
    if degrees.zero:
        words.append("--use-distributed-optimizer")
    if degrees.zero > 1:
        words += ["--use-megatron-fsdp", "--no-gradient-accumulation-fusion"]
        settings["ckpt_format"] = "fsdp_dtensor"
    if degrees.recompute == OFFLOAD:
        words += ["--fine-grained-activation-offloading", "--offload-modules", *_offload_modules(request)]
    return write_flags(settings) + words


def _offload_modules(request: DegreeRequest) -> list[str]:
    """Those whose saved tensors megatron-core 0.16 keeps on the host: of dense feed-forward layers none."""
    experts = ["mlp_norm", "expert_fc1", "moe_act"] if request.training.has_experts else []
    return ["attn_norm", "qkv_linear", "core_attn", "attn_proj", *experts]


def megatron_remarks(request: DegreeRequest) -> list[str]:
    """Remarks on what Megatron-LM needs besides its arguments."""
    if request.degrees.recompute != OFFLOAD:
        return []
    experts = ", and --moe-grouped-gemm for that of experts" if request.training.has_experts else ""
    return [
        "Megatron-LM's and Megatron-Bridge's offload needs Transformer Engine, with NVTE_CPU_OFFLOAD_V1=1 in "
        f"the environment{experts}"
    ]


def megatron_bridge_overrides(request: DegreeRequest) -> list[str]:
    """Overrides of a recipe of Megatron-Bridge (NeMo), by its names of Megatron-LM's arguments."""
    degrees, settings = request.degrees, _megatron_settings(request)
    settings["sequence_parallel"] = str(degrees.tensor > 1).lower()
    if request.choice.virtual_stages > 1:
        settings["virtual_pipeline_model_parallel_size"] = request.choice.virtual_stages
    settings["grad_reduce_in_fp32"] = "true"
    if degrees.recompute == OFFLOAD:
        settings["fine_grained_activation_offloading"] = "true"
        settings["offload_modules"] = f"[{','.join(_offload_modules(request))}]"
    overrides = write_overrides(settings) + (DISTRIBUTED_OPTIMIZER if degrees.zero else [])
    return [*overrides, "ddp.use_megatron_fsdp=true"] if degrees.zero > 1 else overrides


def _megatron_settings(request: DegreeRequest) -> dict[str, object]:
    """What both take, by Megatron-LM's names."""
    degrees, blocks = request.degrees, request.blocks
    settings: dict[str, object] = {
        "num_layers": sum(blocks),
        "seq_length": request.training.sequence,
        "micro_batch_size": request.samples,
        "global_batch_size": request.plan.mini_batch,
        "tensor_model_parallel_size": degrees.tensor,
        "pipeline_model_parallel_size": degrees.pipeline,
        "context_parallel_size": degrees.context,
    }
    predictors = request.training.predictors
    if predictors:
        settings["mtp_num_layers"] = predictors
    if len(set(blocks)) > 1 or degrees.predictor_offset:
        settings["pipeline_model_parallel_layout"] = request.layout
    if degrees.context > 1:
        settings["cp_comm_type"] = _CONTEXT_WORDS[degrees.exchange]
    if degrees.expert > 1:
        settings |= {"expert_model_parallel_size": degrees.expert, "expert_tensor_parallel_size": 1}
    some = degrees.first_blocks
    if degrees.recompute == "selective":
        settings["recompute_granularity"] = "selective"
    elif degrees.recompute == "always" or some:
        settings["recompute_granularity"] = "full"
        settings["recompute_method"] = "uniform" if some is None else "block"
        # Of predictors megatron-core runs one at a time again.
        settings["recompute_num_layers"] = some or (1 if predictors else gcd(*blocks))
    if degrees.zero > 1:
        strategy = "optim_grads" if degrees.zero == 2 else "optim_grads_params"
        settings["data_parallel_sharding_strategy"] = strategy
    return settings


_CONTEXT_WORDS = {"all-to-all": "a2a", "ring": "p2p", "all-gather": "all_gather"}


def torchtitan_arguments(request: DegreeRequest) -> list[str]:
    """What `torchtitan.train` (0.3.0) takes after its module and its configuration.

    It counts a replica's batch: of all micro-batches of a pipeline, and of one where it has none, since it
    adds up gradients over as many as the global batch needs.
    """
    degrees, choice, prefix = request.degrees, request.choice, "--parallelism."
    micro_batches = choice.micro_batches if degrees.pipeline > 1 else 1
    flags: dict[str, object] = {
        "--training.seq_len": request.training.sequence,
        "--training.local_batch_size": micro_batches * request.samples,
        "--training.global_batch_size": request.plan.mini_batch,
        prefix + "data_parallel_replicate_degree": 1 if degrees.zero else degrees.data,
        prefix + "data_parallel_shard_degree": degrees.data if degrees.zero else 1,
        prefix + "tensor_parallel_degree": degrees.tensor,
        prefix + "context_parallel_degree": degrees.context,
        prefix + "expert_parallel_degree": degrees.expert,
        prefix + "pipeline_parallel_degree": degrees.pipeline,
    }
    if degrees.zero and degrees.pipeline == 1:
        flags[prefix + "fsdp_reshard_after_forward"] = "always" if degrees.zero == 3 else "never"
    if degrees.max_param_unsharded_stages != UNSHARDED_STAGES:
        most = degrees.max_param_unsharded_stages
        flags[prefix + "pipeline_parallel_max_param_unsharded_stages"] = most
    arguments = [str(part) for flag in flags.items() for part in flag]
    if degrees.pipeline > 1:
        arguments += [
            prefix + "pipeline_parallel_schedule",
            _schedule(request),
            prefix + "pipeline_parallel_microbatch_size",
            str(request.samples),
            prefix + "module_fqns_per_model_part",
            *map(",".join, _module_names(request.blocks, WORDS)),
            "--training.disable_cuda_graphs",
        ]
    if request.training.implementation == "torchtitan":  # which is costed as compiled
        arguments.append("--compile.enable")
    return [*arguments, f"activation_checkpoint:{_checkpoint_word(degrees)}"]


def _schedule(request: DegreeRequest) -> str:
    return "1F1B" if request.choice.virtual_stages == 1 else "Interleaved1F1B"


def _checkpoint_word(degrees: Degrees) -> str:
    words = {"never": "none", OFFLOAD: "none", "selective": "selective"}
    return words.get(degrees.recompute, "full")


def torchtitan_remarks(request: DegreeRequest) -> list[str]:
    """Remarks on where torchtitan does not train as the plan says."""
    degrees, remarks = request.degrees, _unsharding_remarks(request)
    if degrees.zero == 1 and degrees.pipeline == 1 and degrees.data > 1:
        remarks.append("torchtitan has FSDP in place of ZeRO 1: its gradients are spread, too")
    is_costed = request.training.implementation == "torchtitan"
    if degrees.context > 1 and degrees.exchange != "all-gather":
        remarks.append("torchtitan's context parallelism gathers keys and values on every device")
    elif degrees.context > 1 and not is_costed:
        remarks.append("torchtitan keeps the gathered keys and values of a block for its backward")
    if degrees.recompute == "selective" and not is_costed:
        remarks.append("torchtitan's selective checkpointing chooses operations, not the attention")
    if degrees.first_blocks is not None:
        remarks.append("torchtitan checkpoints every block or none, not the first ones of a stage")
    return [*remarks, *_lacking_remarks(request, "torchtitan")]


def _unsharding_remarks(request: DegreeRequest) -> list[str]:
    """Remarks on the weights that torch's schedules gather in a pipeline."""
    degrees, virtual = request.degrees, request.choice.virtual_stages
    most, remarks = degrees.max_param_unsharded_stages, list[str]()
    if most != UNSHARDED_STAGES:
        remarks.append(
            f"{most} virtual stages that stay gathered need a later torch than 2.14, whose schedules have 3 "
            "(pytorch pull request 196706, torchtitan 4592)"
        )
    if degrees.pipeline > 1 and virtual > most and degrees.zero in (1, 2) and degrees.data > 1:
        remarks.append(
            f"torch's schedules keep the weights of {most} virtual stages gathered, and gather others again, "
            "which the plan does not count"
        )
    return remarks


def _lacking_remarks(request: DegreeRequest, trainer: str) -> list[str]:
    """Remarks on what torchtitan and NeMo AutoModel do not have."""
    remarks = []
    if request.training.predictors:
        remarks.append(f"{trainer} is named no predictors of further tokens")
    if request.degrees.recompute == OFFLOAD:
        remarks.append(f"{trainer} offloads no activations: it keeps all on the GPU")
    return remarks


def _module_names(counts: tuple[int, ...], words: ModuleNames) -> list[list[str]]:
    """The modules of each (virtual) stage."""
    ranges = block_ranges(counts)
    names = [[f"{words.blocks}.{block}" for block in blocks] for blocks in ranges]
    names[0].insert(0, words.embedding)
    names[-1] += [words.norm, words.head]
    return names


_LLAMA = ModuleNames("model.embed_tokens", "model.layers", "model.norm", "lm_head")
"""What transformers calls the modules of Llama and its like."""


def _automodel_names(request: DegreeRequest) -> list[list[str]]:
    """The modules of each (virtual) stage; each with blocks computes the rotary embedding for itself."""
    rotary = [f"{_LLAMA.blocks.removesuffix('layers')}rotary_emb"]
    names = zip(_module_names(request.blocks, _LLAMA), request.blocks, strict=True)
    return [own + rotary * bool(blocks) for own, blocks in names]


def nemo_automodel_sections(request: DegreeRequest) -> dict[str, Any]:
    """Sections of a recipe of NeMo AutoModel 0.7, with the names of transformers' Llama: its `dp_size` counts
    replicas, of which `dp_replicate_size` are not sharded."""
    degrees, batch = request.degrees, request.choice.micro_batches * request.samples
    distributed: dict[str, Any] = {
        "strategy": "fsdp2",
        "tp_size": degrees.tensor,
        "cp_size": degrees.context,
        "pp_size": degrees.pipeline,
        "ep_size": degrees.expert,
        "dp_size": degrees.data,
        "dp_replicate_size": 1 if degrees.zero else degrees.data,
        "sequence_parallel": degrees.tensor > 1,
        "activation_checkpointing": {"none": False, "full": True}.get(
            _checkpoint_word(degrees), degrees.recompute
        ),
    }
    if degrees.zero > 1:
        distributed["reshard_after_forward"] = degrees.zero == 3 and degrees.pipeline == 1
        distributed["defer_fsdp_grad_sync"] = not degrees.shared(degrees.pipeline).reduces_each
    if degrees.pipeline > 1:
        distributed["pipeline"] = {
            "pp_schedule": _schedule(request),
            "pp_microbatch_size": request.samples,
            "module_fqns_per_model_part": _automodel_names(request),
        }
    return {
        "step_scheduler": {
            "global_batch_size": request.plan.mini_batch,
            "local_batch_size": batch if degrees.pipeline > 1 else request.samples,
        },
        "distributed": distributed,
    }


def nemo_automodel_remarks(request: DegreeRequest) -> list[str]:
    """Remarks on where NeMo AutoModel does not train as the plan says."""
    degrees, remarks = request.degrees, _unsharding_remarks(request)
    remarks += _lacking_remarks(request, "NeMo AutoModel")
    if request.training.implementation == "transformers":
        remarks.append(
            "the model is transformers' own: let NeMo AutoModel use none of its implementations "
            "(force_hf: true), and load float32 weights for AdamW in float32"
        )
    if degrees.data * degrees.context % degrees.expert:
        remarks.append(
            f"NeMo AutoModel spreads experts over replicas and context, not over {degrees.expert} devices"
        )
    return remarks


def _export_layout(request: DegreeRequest, fields: dict[str, Any]) -> LayoutExport:
    is_bridge = fields["runtime"] == "megatron-bridge"
    arguments = megatron_bridge_overrides(request) if is_bridge else megatron_arguments(request)
    return cast(type[LayoutExport], document_class(fields["runtime"]))(
        **fields,
        arguments=arguments,
        layout=request.layout,
        num_layers=sum(request.blocks),
        first_blocks=request.degrees.first_blocks,
    )


def _check_filled(request: DegreeRequest, runtime: str) -> None:
    """Raises ExportError for a stage without a layer."""
    if 0 in request.choice.balance:
        raise ExportError(
            f"stage {request.choice.balance.index(0)} has no layer, and {runtime} trains no empty stage",
            "Export it for megatron, or make a plan with fewer stages (`pp`).",
        )


def _export_torchtitan(request: DegreeRequest, fields: dict[str, Any]) -> TorchtitanExport:
    _check_filled(request, "torchtitan")
    names = _module_names(request.blocks, WORDS)
    arguments = torchtitan_arguments(request)
    return TorchtitanExport(**fields, module_fqns_per_model_part=names, arguments=arguments)


def _export_nemo(request: DegreeRequest, fields: dict[str, Any]) -> NemoExport:
    _check_filled(request, "nemo-automodel")
    names, sections = _automodel_names(request), nemo_automodel_sections(request)
    return NemoExport(**fields, module_fqns_per_model_part=names, sections=sections)


EXPORTERS: dict[
    str,
    tuple[Callable[[DegreeRequest, dict[str, Any]], ExportDocument], Callable[[DegreeRequest], list[str]]],
] = {
    "megatron": (_export_layout, megatron_remarks),
    "megatron-bridge": (_export_layout, megatron_remarks),
    "torchtitan": (_export_torchtitan, torchtitan_remarks),
    "nemo-automodel": (_export_nemo, nemo_automodel_remarks),
}
"""By trainer, what writes its file, and the remarks on it."""
