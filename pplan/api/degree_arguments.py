"""What training programs take of a plan by degrees: arguments of Megatron-LM and torchtitan, and DeepSpeed's
configuration."""

from __future__ import annotations

from math import gcd
from typing import Any

from ..cost_models.errors import ExportError
from ..cost_models.transformer.pipeline_layout import stage_letters
from ..cost_models.transformer.training_setting import block_ranges
from ..planner.degrees.degree_search import DegreeAnswer, DegreePlan
from ..runtimes.exports import (
    DISTRIBUTED_OPTIMIZER,
    WORDS,
    ModuleNames,
    write_flags,
    write_layout,
    write_overrides,
)


def megatron_arguments(answer: DegreeAnswer, plan: DegreePlan) -> list[str]:
    """The arguments of `pretrain_gpt.py` besides the model and the data."""
    degrees, settings, words = plan.degrees, _megatron_settings(answer, plan), ["--bf16"]
    if plan.virtual_stages > 1 and "pipeline_model_parallel_layout" not in settings:
        settings["num_layers_per_virtual_pipeline_stage"] = plan.blocks[0]
    if degrees.tensor > 1:
        words.append("--sequence-parallel")
    if degrees.zero:
        words.append("--use-distributed-optimizer")
    if degrees.zero > 1:
        words += ["--use-megatron-fsdp", "--no-gradient-accumulation-fusion"]
        settings["ckpt_format"] = "fsdp_dtensor"
    if plan.recompute == "offload":
        words += ["--fine-grained-activation-offloading", "--offload-modules", *_offload_modules(answer)]
    return write_flags(settings) + words


def _offload_modules(answer: DegreeAnswer) -> list[str]:
    """Those whose saved tensors megatron-core 0.16 keeps on the host: of dense feed-forward layers none."""
    experts = ["mlp_norm", "expert_fc1", "moe_act"] if any(answer.shape.routed) else []
    return ["attn_norm", "qkv_linear", "core_attn", "attn_proj", *experts]


def megatron_remarks(plan: DegreePlan) -> list[str]:
    """Remarks on what Megatron-LM needs besides its arguments."""
    if plan.recompute != "offload":
        return []
    experts = ", and --moe-grouped-gemm for that of experts" if any(plan.layers.shape.routed) else ""
    return [
        "Megatron-LM's and Megatron-Bridge's offload needs Transformer Engine, with NVTE_CPU_OFFLOAD_V1=1 in "
        f"the environment{experts}"
    ]


def megatron_bridge_overrides(answer: DegreeAnswer, plan: DegreePlan) -> list[str]:
    """Overrides of a recipe of Megatron-Bridge (NeMo), by its names of Megatron-LM's arguments."""
    degrees, settings = plan.degrees, _megatron_settings(answer, plan)
    settings["sequence_parallel"] = str(degrees.tensor > 1).lower()
    if plan.virtual_stages > 1:
        settings["virtual_pipeline_model_parallel_size"] = plan.virtual_stages
    settings["grad_reduce_in_fp32"] = "true"
    if plan.recompute == "offload":
        settings["fine_grained_activation_offloading"] = "true"
        settings["offload_modules"] = f"[{','.join(_offload_modules(answer))}]"
    overrides = write_overrides(settings) + (DISTRIBUTED_OPTIMIZER if degrees.zero else [])
    return [*overrides, "ddp.use_megatron_fsdp=true"] if degrees.zero > 1 else overrides


def _megatron_settings(answer: DegreeAnswer, plan: DegreePlan) -> dict[str, object]:
    """What both take, by Megatron-LM's names."""
    degrees = plan.degrees
    settings: dict[str, object] = {
        "num_layers": sum(plan.blocks),
        "seq_length": answer.options.sequence,
        "micro_batch_size": plan.micro_batch_size,
        "global_batch_size": answer.options.mini_batch,
        "tensor_model_parallel_size": degrees.tensor,
        "pipeline_model_parallel_size": degrees.pipeline,
        "context_parallel_size": degrees.context,
    }
    predictors, offset = plan.setting.predictors, plan.setting.predictor_offset
    if predictors:
        settings["mtp_num_layers"] = predictors
    if len(set(plan.blocks)) > 1 or offset:
        settings["pipeline_model_parallel_layout"] = write_layout(plan.blocks, predictors, offset)
    if degrees.context > 1:
        settings["cp_comm_type"] = _CONTEXT_WORDS[degrees.exchange]
    if degrees.expert > 1:
        settings |= {"expert_model_parallel_size": degrees.expert, "expert_tensor_parallel_size": 1}
    if plan.recompute not in ("none", "offload"):
        settings["recompute_granularity"] = plan.recompute
    if plan.recompute == "full":
        some = plan.recompute_blocks
        settings["recompute_method"] = "uniform" if some is None else "block"
        # Of predictors megatron-core runs one at a time again.
        settings["recompute_num_layers"] = some or (1 if predictors else gcd(*plan.blocks))
    if degrees.zero > 1:
        strategy = "optim_grads" if degrees.zero == 2 else "optim_grads_params"
        settings["data_parallel_sharding_strategy"] = strategy
    return settings


_CONTEXT_WORDS = {"all-to-all": "a2a", "ring": "p2p", "all-gather": "all_gather"}


def torchtitan_arguments(answer: DegreeAnswer, plan: DegreePlan) -> list[str]:
    """What `torchtitan.train` (0.3.0) takes after --module and --config.

    It counts a replica's batch: of all micro-batches of a pipeline, and of one where it has none, since it
    adds up gradients over as many as the global batch needs.
    """
    degrees, prefix = plan.degrees, "--parallelism."
    micro_batches = plan.micro_batches if degrees.pipeline > 1 else 1
    flags: dict[str, object] = {
        "--training.seq_len": answer.options.sequence,
        "--training.local_batch_size": micro_batches * plan.micro_batch_size,
        "--training.global_batch_size": answer.options.mini_batch,
        prefix + "data_parallel_replicate_degree": 1 if degrees.zero else degrees.data,
        prefix + "data_parallel_shard_degree": degrees.data if degrees.zero else 1,
        prefix + "tensor_parallel_degree": degrees.tensor,
        prefix + "context_parallel_degree": degrees.context,
        prefix + "expert_parallel_degree": degrees.expert,
        prefix + "pipeline_parallel_degree": degrees.pipeline,
    }
    if degrees.zero and degrees.pipeline == 1:
        flags[prefix + "fsdp_reshard_after_forward"] = "always" if degrees.zero == 3 else "never"
    arguments = [str(part) for flag in flags.items() for part in flag]
    if degrees.pipeline > 1:
        arguments += [
            prefix + "pipeline_parallel_schedule",
            "1F1B" if plan.virtual_stages == 1 else "Interleaved1F1B",
            prefix + "pipeline_parallel_microbatch_size",
            str(plan.micro_batch_size),
            prefix + "module_fqns_per_model_part",
            *map(",".join, _module_names(plan.blocks, WORDS)),
            "--training.disable_cuda_graphs",
        ]
    return [*arguments, f"activation_checkpoint:{_checkpoint_word(plan)}"]


def _checkpoint_word(plan: DegreePlan) -> str:
    return "none" if plan.recompute == "offload" else plan.recompute


def torchtitan_remarks(plan: DegreePlan) -> list[str]:
    """Remarks on where torchtitan does not train as the plan says."""
    degrees, remarks = plan.degrees, []
    if degrees.zero == 1 and degrees.pipeline == 1 and degrees.data > 1:
        remarks.append("torchtitan has FSDP in place of ZeRO 1: its gradients are spread, too")
    if degrees.context > 1 and degrees.exchange != "all-gather":
        remarks.append("torchtitan's context parallelism gathers keys and values on every device")
    elif degrees.context > 1:
        remarks.append("torchtitan keeps the gathered keys and values of a block for its backward")
    if any(not letters for letters in stage_letters(plan.blocks)):
        remarks.append(
            "torchtitan and NeMo AutoModel train no stage without a layer: use Megatron-LM for this plan"
        )
    if plan.setting.predictors:
        remarks.append("torchtitan and NeMo AutoModel are named no predictors of further tokens")
    if plan.recompute == "offload":
        remarks.append("torchtitan and NeMo AutoModel offload no activations: they keep all on the GPU")
    if plan.recompute == "selective":
        remarks.append("torchtitan's selective checkpointing chooses operations, not the attention")
    if plan.recompute_blocks is not None:
        remarks.append("torchtitan checkpoints every block or none, not the first ones of a stage")
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


def nemo_automodel_sections(answer: DegreeAnswer, plan: DegreePlan) -> dict[str, Any]:
    """Sections of a recipe of NeMo AutoModel 0.7, with the names of transformers' Llama: its `dp_size` counts
    replicas, of which `dp_replicate_size` are not sharded."""
    degrees = plan.degrees
    batch = plan.micro_batches * plan.micro_batch_size
    distributed: dict[str, Any] = {
        "strategy": "fsdp2",
        "tp_size": degrees.tensor,
        "cp_size": degrees.context,
        "pp_size": degrees.pipeline,
        "ep_size": degrees.expert,
        "dp_size": degrees.data,
        "dp_replicate_size": 1 if degrees.zero else degrees.data,
        "sequence_parallel": degrees.tensor > 1,
        "activation_checkpointing": {"none": False, "full": True}.get(_checkpoint_word(plan), plan.recompute),
    }
    if degrees.pipeline > 1:
        rotary = [f"{_LLAMA.blocks.removesuffix('layers')}rotary_emb"]
        names = _module_names(plan.blocks, _LLAMA)
        distributed["pipeline"] = {
            "pp_schedule": "1F1B" if plan.virtual_stages == 1 else "Interleaved1F1B",
            "pp_microbatch_size": plan.micro_batch_size,
            "module_fqns_per_model_part": [
                own + rotary * bool(blocks) for own, blocks in zip(names, plan.blocks, strict=True)
            ],
        }
    return {
        "step_scheduler": {
            "global_batch_size": answer.options.mini_batch,
            "local_batch_size": batch if degrees.pipeline > 1 else plan.micro_batch_size,
        },
        "distributed": distributed,
    }


def nemo_automodel_remarks(plan: DegreePlan) -> list[str]:
    """Remarks on where NeMo AutoModel does not train as the plan says, and torchtitan does."""
    degrees, remarks = plan.degrees, []
    if degrees.data * degrees.context % degrees.expert:
        remarks.append(
            f"NeMo AutoModel spreads experts over replicas and context, not over {degrees.expert} devices"
        )
    return remarks


def deepspeed_config(answer: DegreeAnswer, plan: DegreePlan) -> dict[str, Any]:
    """DeepSpeed's configuration. Raises ExportError where it has no such degrees."""
    degrees = plan.degrees
    if degrees.pipeline > 1 or degrees.context > 1 or degrees.expert > 1:
        raise ExportError(
            f"{degrees.describe()}: DeepSpeed's configuration has data and tensor parallelism only",
            "Give pp=1, cp=1 and ep=1, or take the arguments of Megatron-LM.",
        )
    if plan.recompute == "offload":
        raise ExportError(
            "recompute=offload: DeepSpeed's configuration keeps no module's activations on the host",
            "Take the arguments of Megatron-LM, or omit `offload`.",
        )
    config: dict[str, Any] = {
        "train_batch_size": answer.options.mini_batch,
        "train_micro_batch_size_per_gpu": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.micro_batches,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {"stage": degrees.zero},
    }
    if degrees.tensor > 1:
        config["tensor_parallel"] = {"autotp_size": degrees.tensor}
    return config
