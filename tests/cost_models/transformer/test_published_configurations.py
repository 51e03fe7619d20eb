"""Configurations as their models were published, with the keys that their files have: read or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pplan.cost_models.errors import FileError, UsageError
from pplan.cost_models.transformer.configuration import load_transformer_shape, transformer_shape


class Published(NamedTuple):
    """A file with the parameters, in billions, that the model's card states; `noted`: with a note."""

    keys: dict[str, Any]
    parameters: float
    active: float | None = None
    noted: bool = False


COMMON: dict[str, Any] = {
    "_name_or_path": "x", "architectures": ["XForCausalLM"], "auto_map": {"AutoConfig": "x.X"},
    "bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": None, "torch_dtype": "bfloat16",
    "transformers_version": "4.40.0", "use_cache": True, "initializer_range": 0.02, "pretraining_tp": 1,
    "task_specific_params": None, "quantization_config": {"quant_method": "fp8"}, "unsloth_fixed": True,
    "max_position_embeddings": 32768, "rope_theta": 1e6,
    "rope_scaling": {"factor": 8.0, "rope_type": "llama3"},
}  # fmt: skip
SILU = {**COMMON, "hidden_act": "silu", "rms_norm_eps": 1e-5, "attention_dropout": 0.0}


def sizes(hidden: int, inner: int, layers: int, heads: int, shared: int, vocabulary: int) -> dict[str, Any]:
    """Keys of most files."""
    return {
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": shared, "vocab_size": vocabulary,
    }  # fmt: skip


def experts(number: int, per_token: int, width: int | None = None, **more: Any) -> dict[str, Any]:
    """In the spelling of Qwen and Mixtral."""
    keys = {"num_experts": number, "num_experts_per_tok": per_token, "router_aux_loss_coef": 0.001, **more}
    return keys if width is None else keys | {"moe_intermediate_size": width, "norm_topk_prob": True}


def latent(rank: int | None, **more: Any) -> dict[str, Any]:
    """Latent attention and experts of DeepSeek; `rank`: of the queries."""
    return {
        "kv_lora_rank": 512, "q_lora_rank": rank, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "aux_loss_alpha": 0.001, "ep_size": 1, "moe_layer_freq": 1, "n_group": 8,
        "norm_topk_prob": True, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "seq_aux": True,
        "topk_group": 4, "topk_method": "noaux_tc", "attention_bias": False, **more,
    }  # fmt: skip


UNTIED, TIED = {"tie_word_embeddings": False}, {"tie_word_embeddings": True}
V3 = {
    **SILU,
    **UNTIED,
    **sizes(7168, 18432, 61, 128, 128, 129280),
    "model_type": "deepseek_v3",
    **latent(1536, n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8, first_k_dense_replace=3),
    "moe_intermediate_size": 2048,
    "num_nextn_predict_layers": 1,
}
QWEN2 = {"use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 28}
SCOUT = {
    **SILU,
    **sizes(5120, 8192, 48, 40, 8, 202048),
    "model_type": "llama4_text",
    "attention_bias": False,
    "attention_chunk_size": 8192,
    "head_dim": 128,
    "interleave_moe_layer_step": 1,
    "no_rope_layers": [],
    "intermediate_size_mlp": 16384,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
    "use_qk_norm": True,
    "attn_temperature_tuning": 4,
    "floor_scale": 8192,
    "router_jitter_noise": 0.0,
    "for_llm_compressor": None,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "attn_scale": 0.1,
}
READ: dict[str, Published] = {
    "Llama 2 7B": Published(
        {**SILU, **UNTIED, **sizes(4096, 11008, 32, 32, 32, 32000), "model_type": "llama"}, 6.738
    ),
    "Llama 3.2 1B": Published(
        {**SILU, **TIED, **sizes(2048, 8192, 16, 32, 8, 128256), "model_type": "llama", "head_dim": 64}
        | {"attention_bias": False, "mlp_bias": False},
        1.236,
    ),
    "Llama 4 Scout": Published(
        {
            "model_type": "llama4",
            "text_config": SCOUT,
            "vision_config": {"hidden_size": 1408},
            "boi_token_index": 1,
        }
        | {
            "eoi_token_index": 2,
            "image_token_index": 3,
            "architectures": ["Llama4"],
            "torch_dtype": "bfloat16",
        },
        107.77,
        17.17,
        noted=True,
    ),
    "Mistral 7B": Published(
        {
            **SILU,
            **UNTIED,
            **sizes(4096, 14336, 32, 32, 8, 32000),
            "model_type": "mistral",
            "sliding_window": 4096,
        }
        | {"head_dim": None},
        7.242,
    ),
    "Mixtral 8x7B": Published(
        {
            **SILU,
            **UNTIED,
            **sizes(4096, 14336, 32, 32, 8, 32000),
            "model_type": "mixtral",
            "sliding_window": None,
        }
        | {"num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.02},
        46.70,
        12.88,
    ),
    "Qwen2.5 7B": Published(
        {**SILU, **UNTIED, **sizes(3584, 18944, 28, 28, 4, 152064), "model_type": "qwen2", **QWEN2}
        | {"use_mrope": False},
        7.616,
    ),
    "Qwen3 8B": Published(
        {**SILU, **UNTIED, **sizes(4096, 12288, 36, 32, 8, 151936), "model_type": "qwen3", "head_dim": 128}
        | {**QWEN2, "sliding_window": None, "attention_bias": False},
        8.191,
    ),
    "Qwen3 30B-A3B": Published(
        {**SILU, **UNTIED, **sizes(2048, 6144, 48, 32, 4, 151936), "model_type": "qwen3_moe", "head_dim": 128}
        | {**experts(128, 8, 768), "decoder_sparse_step": 1, "mlp_only_layers": [], "use_qk_norm": True}
        | {**QWEN2, "sliding_window": None, "output_router_logits": False},
        30.53,
        3.35,
    ),
    "Qwen1.5 MoE A2.7B": Published(
        {**SILU, **UNTIED, **sizes(2048, 5632, 24, 16, 16, 151936), "model_type": "qwen2_moe"}
        | {**experts(60, 4, 1408), "shared_expert_intermediate_size": 5632, "decoder_sparse_step": 1}
        | {"use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 21},
        14.32,
        2.69,
    ),
    "Gemma 2 9B": Published(
        {**COMMON, **sizes(3584, 14336, 42, 16, 8, 256000), "model_type": "gemma2", "head_dim": 256}
        | {
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": 4096,
        }
        | {"sliding_window_size": 4096, "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0}
        | {"final_logit_softcapping": 30.0, "cache_implementation": "hybrid", "attention_bias": False},
        9.242,
    ),
    "Gemma 3 27B": Published(
        {"model_type": "gemma3", "vision_config": {"hidden_size": 1152}, "mm_tokens_per_image": 256}
        | {"boi_token_index": 255999, "eoi_token_index": 256000, "image_token_index": 262144}
        | {
            "text_config": {
                "model_type": "gemma3_text",
                **sizes(5376, 21504, 62, 32, 16, 262208),
                "head_dim": 128,
            }
            | {"sliding_window": 1024, "query_pre_attn_scalar": 168, "rope_local_base_freq": 1e4}
            | {"sliding_window_pattern": 6, "rope_scaling": {"factor": 8.0}}
        },
        27.01,
        noted=True,
    ),
    "Phi-3 mini": Published(
        {
            **SILU,
            **UNTIED,
            **sizes(3072, 8192, 32, 32, 32, 32064),
            "model_type": "phi3",
            "sliding_window": 2047,
        }
        | {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "original_max_position_embeddings": 4096},
        3.821,
    ),
    "Phi-2": Published(
        {
            **COMMON,
            **UNTIED,
            **sizes(2560, 10240, 32, 32, 32, 51200),
            "model_type": "phi",
            "qk_layernorm": False,
        }
        | {"hidden_act": "gelu_new", "partial_rotary_factor": 0.4, "layer_norm_eps": 1e-5, "rotary_dim": 32},
        2.780,
    ),
    "Phi-3.5 MoE": Published(
        {
            **SILU,
            **UNTIED,
            **sizes(4096, 6400, 32, 32, 8, 32064),
            "model_type": "phimoe",
            "attention_bias": True,
        }
        | {
            "num_local_experts": 16,
            "num_experts_per_tok": 2,
            "lm_head_bias": True,
            "input_jitter_noise": 0.01,
        }
        | {"router_jitter_noise": 0.01, "sliding_window": 131072, "hidden_dropout": 0.0},
        41.87,
        6.64,
    ),
    "DeepSeek V2 Lite": Published(
        {**SILU, **UNTIED, **sizes(2048, 10944, 27, 16, 16, 102400), "model_type": "deepseek_v2"}
        | latent(
            None, n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6, first_k_dense_replace=1
        )
        | {"moe_intermediate_size": 1408},
        15.71,
        2.66,
    ),
    "DeepSeek V3": Published(V3, 671.0, 37.55),
    "Kimi K2": Published(
        {**V3, **sizes(7168, 18432, 61, 64, 64, 163840), "model_type": "kimi_k2", "n_routed_experts": 384}
        | {"first_k_dense_replace": 1, "num_nextn_predict_layers": 0, "n_group": 1, "topk_group": 1},
        1026.4,
        32.9,
        noted=True,
    ),
    "GLM-4.5 Air": Published(
        {**SILU, **UNTIED, **sizes(4096, 10944, 46, 96, 8, 151552), "model_type": "glm4_moe", "head_dim": 128}
        | {
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 1,
        }
        | {"moe_intermediate_size": 1408, "attention_bias": True, "use_qk_norm": False, "n_group": 1}
        | {"partial_rotary_factor": 0.5, "num_nextn_predict_layers": 1, "routed_scaling_factor": 1.0},
        106.8,
    ),
    "gpt-oss 20B": Published(
        {**SILU, **UNTIED, **sizes(2880, 2880, 24, 64, 8, 201088), "model_type": "gpt_oss", "head_dim": 64}
        | {"num_local_experts": 32, "num_experts_per_tok": 4, "experts_per_token": 4, "attention_bias": True}
        | {"layer_types": ["sliding_attention", "full_attention"] * 12, "sliding_window": 128}
        | {"swiglu_limit": 7.0, "initial_context_length": 4096, "output_router_logits": False},
        20.91,
    ),
    "MiniMax M2": Published(
        {
            **SILU,
            **UNTIED,
            **sizes(3072, 1536, 62, 48, 8, 200064),
            "model_type": "minimax_m2",
            "head_dim": 128,
        }
        | {
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
            "attn_type_list": [1] * 62,
            "use_qk_norm": True,
        }
        | {"use_mtp": True, "mtp_transformer_layers": 1, "num_mtp_modules": 3, "qk_norm_type": "per_layer"}
        | {
            "rotary_dim": 64,
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "shared_intermediate_size": 0,
        },
        228.7,
        11.03,
    ),
    "OLMo 2 7B": Published(
        {
            **SILU,
            **UNTIED,
            **sizes(4096, 11008, 32, 32, 32, 100352),
            "model_type": "olmo2",
            "attention_bias": False,
        },
        7.299,
    ),
    "OLMoE 1B-7B": Published(
        {**SILU, **UNTIED, **sizes(2048, 1024, 16, 16, 16, 50304), "model_type": "olmoe", "clip_qkv": None}
        | {**experts(64, 8), "norm_topk_prob": False, "attention_bias": False},
        6.919,
        1.28,
    ),
    "Falcon 7B": Published(
        {"model_type": "falcon", "hidden_size": 4544, "num_attention_heads": 71, "num_hidden_layers": 32}
        | {"vocab_size": 65024, "alibi": False, "bias": False, "multi_query": True, "parallel_attn": True}
        | {"new_decoder_architecture": False, "apply_residual_connection_post_layernorm": False}
        | {
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "layer_norm_epsilon": 1e-5,
            "initializer_range": 0.02,
        },
        6.922,
    ),
    "Pythia 6.9B": Published(
        {**COMMON, **UNTIED, **sizes(4096, 16384, 32, 32, 32, 50432), "model_type": "gpt_neox"}
        | {"hidden_act": "gelu", "rotary_pct": 0.25, "rotary_emb_base": 10000, "use_parallel_residual": True}
        | {"layer_norm_eps": 1e-5},
        6.857,
    ),
    "GPT-2": Published(
        {"activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1}
        | {"embd_pdrop": 0.1, "layer_norm_epsilon": 1e-5, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768}
        | {"n_head": 12, "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1, "summary_type": "cls_index"}
        | {"task_specific_params": {"text-generation": {"do_sample": True}}, "vocab_size": 50257},
        0.12444,
    ),
    "GPT-J": Published(
        {
            "activation_function": "gelu_new",
            "model_type": "gptj",
            "n_embd": 4096,
            "n_head": 16,
            "n_inner": None,
        }
        | {"n_layer": 28, "n_positions": 2048, "rotary": True, "rotary_dim": 64, "scale_attn_weights": True}
        | {
            **UNTIED,
            "tokenizer_class": "GPT2Tokenizer",
            "gradient_checkpointing": False,
            "vocab_size": 50400,
        },
        6.051,
    ),
    "GPT-Neo 1.3B": Published(
        {
            "activation_function": "gelu_new",
            "attention_types": [[["global", "local"], 12]],
            "model_type": "gpt_neo",
        }
        | {"attention_layers": ["global", "local"] * 12, "hidden_size": 2048, "intermediate_size": None}
        | {"num_heads": 16, "num_layers": 24, "vocab_size": 50257, "window_size": 256, "resid_dropout": 0}
        | {"max_position_embeddings": 2048, "embed_dropout": 0, "layer_norm_epsilon": 1e-5},
        1.316,
    ),
    "OPT 1.3B": Published(
        {
            "model_type": "opt",
            "hidden_size": 2048,
            "ffn_dim": 8192,
            "num_hidden_layers": 24,
            "vocab_size": 50272,
        }
        | {"num_attention_heads": 32, "max_position_embeddings": 2048, "word_embed_proj_dim": 2048}
        | {"do_layer_norm_before": True, "_remove_final_layer_norm": False, "activation_function": "relu"}
        | {"layerdrop": 0.0, "prefix": "</s>", "init_std": 0.02, "dropout": 0.1, "activation_dropout": 0.0},
        1.316,
    ),
    "BLOOM 7B1": Published(
        {
            "model_type": "bloom",
            "n_layer": 30,
            "num_attention_heads": 32,
            "n_embed": 4096,
            "vocab_size": 250880,
        }
        | {"bias_dropout_fusion": True, "masked_softmax_fusion": True, "n_inner": None, "offset_alibi": 100}
        | {"seq_length": 2048, "skip_bias_add": True, "skip_bias_add_qkv": False, "slow_but_exact": False}
        | {
            "attention_softmax_in_fp32": True,
            "apply_residual_connection_post_layernorm": False,
            "unk_token_id": 0,
        },
        7.069,
    ),
    "MPT 7B": Published(
        {"model_type": "mpt", "d_model": 4096, "n_heads": 32, "n_layers": 32, "vocab_size": 50432}
        | {"expansion_ratio": 4, "max_seq_len": 2048, "no_bias": True, "norm_type": "low_precision_layernorm"}
        | {
            "attn_config": {
                "alibi": True,
                "attn_type": "multihead_attention",
                "attn_impl": "torch",
                "qk_ln": False,
            }
            | {"prefix_lm": False, "clip_qkv": None, "attn_pdrop": 0, "softmax_scale": None}
        }
        | {"init_config": {"name": "kaiming_normal_"}, "init_device": "cpu", "learned_pos_emb": True},
        6.649,
    ),
    "StarCoder2 7B": Published(
        {**COMMON, **sizes(4608, 18432, 32, 36, 4, 49152), "model_type": "starcoder2", "sliding_window": 4096}
        | {
            "hidden_act": "gelu_pytorch_tanh",
            "mlp_type": "default",
            "norm_type": "layer_norm",
            "use_bias": True,
        }
        | {"norm_epsilon": 1e-5, "residual_dropout": 0.1, "embedding_dropout": 0.1},
        7.174,
    ),
    "ERNIE 4.5 21B-A3B": Published(
        {
            **SILU,
            **TIED,
            **sizes(2560, 12288, 28, 20, 4, 103424),
            "model_type": "ernie4_5_moe",
            "use_bias": False,
        }
        | {"moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": 1536, "moe_num_shared_experts": 2}
        | {"moe_layer_start_index": 1, "moe_layer_end_index": 27, "moe_layer_interval": 1, "moe_gate": "topk"}
        | {"moe_capacity": [64, 64, 64], "moe_use_aux_free": True, "hidden_dropout_prob": 0.0},
        21.83,
    ),
    "Granite 3.1 8B": Published(
        {
            **SILU,
            **TIED,
            **sizes(4096, 12800, 40, 32, 8, 49155),
            "model_type": "granite",
            "attention_bias": False,
        }
        | {"attention_multiplier": 0.0078125, "embedding_multiplier": 12.0, "logits_scaling": 16.0}
        | {"residual_multiplier": 0.22, "mlp_bias": False},
        8.171,
    ),
    "Command R": Published(
        {**COMMON, **sizes(8192, 22528, 40, 64, 64, 256000), "model_type": "cohere", "hidden_act": "silu"}
        | {"layer_norm_eps": 1e-5, "logit_scale": 0.0625, "use_qk_norm": False, "attention_bias": False},
        34.98,
    ),
    "Minitron 4B": Published(
        {
            **COMMON,
            **UNTIED,
            **sizes(3072, 9216, 32, 24, 8, 256000),
            "model_type": "nemotron",
            "head_dim": 128,
        }
        | {"hidden_act": "relu2", "norm_eps": 1e-5, "partial_rotary_factor": 0.5, "kv_channels": 128},
        4.19,
    ),
    "SmolLM3 3B": Published(
        {
            **SILU,
            **TIED,
            **sizes(2048, 11008, 36, 16, 4, 128256),
            "model_type": "smollm3",
            "attention_bias": False,
        }
        | {"no_rope_layers": [1, 1, 1, 0] * 9, "no_rope_layer_interval": 4, "use_sliding_window": False}
        | {"layer_types": ["full_attention"] * 36, "sliding_window": None, "max_window_layers": 28},
        3.075,
    ),
    "Hunyuan 7B": Published(
        {
            **SILU,
            **TIED,
            **sizes(4096, 14336, 32, 32, 8, 128167),
            "model_type": "hunyuan_v1_dense",
            "head_dim": 128,
        }
        | {
            "num_experts": 1,
            "moe_topk": 1,
            "num_shared_expert": 1,
            "moe_intermediate_size": None,
            "use_cla": False,
        }
        | {"use_mla": False, "kv_lora_rank": None, "v_head_dim": None, "use_mixed_mlp_moe": False}
        | {"use_qk_norm": True, "cla_share_factor": 2, "norm_type": "rms", "use_rotary_pos_emb": True}
        | {
            "moe_drop_tokens": False,
            "moe_layer_num_skipped": 0,
            "add_classification_head": False,
            "class_num": 0,
        },
        7.505,
    ),
    "StableLM 3B": Published(
        {
            **SILU,
            **UNTIED,
            **sizes(2560, 6912, 32, 32, 32, 50304),
            "model_type": "stablelm",
            "use_qkv_bias": False,
        }
        | {"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25},
        2.795,
    ),
    "Yi 34B": Published(
        {**SILU, **UNTIED, **sizes(7168, 20480, 60, 56, 8, 64000), "model_type": "llama"}, 34.39
    ),
    "MiMo 7B": Published(
        {**SILU, **UNTIED, **sizes(4096, 11008, 36, 32, 8, 151680), "model_type": "mimo", "head_dim": 128}
        | {**QWEN2, "sliding_window": 32768, "attention_bias": True, "num_nextn_predict_layers": 1},
        7.62,
        noted=True,
    ),
    "Qwen2.5-VL 7B": Published(
        {**SILU, **UNTIED, **sizes(3584, 18944, 28, 28, 4, 152064), "model_type": "qwen2_5_vl", **QWEN2}
        | {
            "vision_config": {"depth": 32, "hidden_size": 1280},
            "vision_start_token_id": 1,
            "video_token_id": 2,
        },
        7.616,
        noted=True,
    ),
}


def test_the_configuration_of_the_text_decides() -> None:
    """Files of older versions repeat its keys outside, also with other values; but who ties the embedding
    says so outside alone."""
    text = {**READ["Qwen2.5 7B"].keys, "sliding_window": None}
    del text["tie_word_embeddings"]
    outside = {**READ["Qwen2.5-VL 7B"].keys, "sliding_window": 32768, "hidden_size": 64}
    shape = transformer_shape({**outside, "text_config": text})
    assert shape.parameters() == transformer_shape(READ["Qwen2.5 7B"].keys).parameters()
    tied = transformer_shape({**outside, "text_config": text, "tie_word_embeddings": True})
    assert shape.parameters() - tied.parameters() == 152064 * 3584


@pytest.mark.parametrize("model", READ)
def test_published_models_are_read(model: str) -> None:
    published = READ[model]
    shape = transformer_shape(published.keys)
    assert shape.parameters() == pytest.approx(published.parameters * 1e9, rel=2e-3)
    if published.active is not None:
        assert shape.active_parameters() == pytest.approx(published.active * 1e9, rel=1e-2)
    assert bool(shape.note) == published.noted


LLAMA = READ["Llama 2 7B"].keys
SPARSE = {"index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048}
DSA = {**V3, "model_type": "glm_moe_dsa"}
KIMI_LINEAR = {
    **SILU,
    **UNTIED,
    **sizes(2304, 9216, 27, 32, 32, 163840),
    "model_type": "kimi_linear",
    "num_experts": 256,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 1024,
    "num_experts_per_token": 8,
    "num_shared_experts": 1,
    "linear_attn_config": {"kda_layers": [1, 2, 3, 5], "full_attn_layers": [4], "head_dim": 128},
}
V4 = {
    **SILU,
    **UNTIED,
    **sizes(4096, 2048, 43, 64, 1, 129280),
    "model_type": "deepseek_v4",
    "head_dim": 512,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 2048,
    "q_lora_rank": 1024,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "qk_rope_head_dim": 64,
    "sliding_window": 128,
    "hc_mult": 4,
    "num_hash_layers": 3,
    "compress_ratios": [0, 0, 4, 128],
    **SPARSE,
}
REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "DeepSeek V4": (
        V4,
        ["q_lora_rank=1024", "o_lora_rank", "o_groups", "hc_mult=4", "compress_ratios", *SPARSE],
    ),
    "DeepSeek V3.2": ({**V3, **SPARSE, "model_type": "deepseek_v32"}, list(SPARSE)),
    "GLM 5 by index_topk": ({**DSA, **SPARSE}, ["index_topk=2048"]),
    "GLM 5 by layer_types": (
        {**DSA, "layer_types": ["deepseek_sparse_attention"] * 61},
        ["sparse_attention"],
    ),
    "Kimi Linear": (KIMI_LINEAR, ["linear_attn_config"]),
    "MiniMax Text 01": (
        {**SILU, **sizes(6144, 9216, 80, 64, 8, 200064), "model_type": "minimax_text_01", "postnorm": True}
        | {"attn_type_list": [0, 0, 1], "layernorm_full_attention_alpha": 3.5, "head_dim": 128},
        ["attn_type_list", "layernorm_full_attention_alpha=3.5", "postnorm=true"],
    ),
    "MiMo V2 Flash": (
        {**SILU, **sizes(4096, 16384, 48, 64, 4, 152576), "model_type": "mimo_v2_flash", "head_dim": 192}
        | {"v_head_dim": 128, "sliding_window": 128, "hybrid_layer_pattern": [0, 1], "swa_head_dim": 192},
        ["v_head_dim=128", "sliding_window=128", "hybrid_layer_pattern", "swa_head_dim"],
    ),
    "Nemotron Super 49B": (
        {**LLAMA, "model_type": "nemotron-nas", "block_configs": [{"ffn": {"no_op": True}}]},
        ["block_configs"],
    ),
    "Qwen3 Next": (
        {**SILU, **sizes(2048, 5120, 48, 16, 2, 151936), "model_type": "qwen3_next", **experts(512, 10, 512)}
        | {"linear_num_key_heads": 16, "full_attention_interval": 4, "linear_conv_kernel_dim": 4},
        ["linear_num_key_heads=16", "full_attention_interval=4"],
    ),
    "Qwen 1": ({**LLAMA, "model_type": "qwen", "kv_channels": 128, "no_bias": True}, ["qwen: its blocks"]),
    "Jamba": (
        {**SILU, **LLAMA, "model_type": "jamba", "mamba_d_state": 16, "attn_layer_period": 8},
        ["mamba_d_state"],
    ),
    "OPT 350M": (READ["OPT 1.3B"].keys | {"word_embed_proj_dim": 512}, ["word_embed_proj_dim=512"]),
    "a feed-forward layer without a gate": (
        {**LLAMA, "model_type": "llama9", "hidden_act": "relu2"},
        ['hidden_act="relu2"'],
    ),
    "a draft model outside the text": (
        {"model_type": "llava", "vision_config": {}, "text_config": LLAMA, "recurrent_depth": 4},
        ["recurrent_depth=4"],
    ),
    "windows of a family without": ({**LLAMA, "sliding_window": 4096}, ["sliding_window=4096"]),
}


@pytest.mark.parametrize("model", REFUSED)
def test_structures_that_are_not_counted_are_refused(model: str, tmp_path: Path) -> None:
    """By the names of the keys that say them."""
    keys, names = REFUSED[model]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(keys))
    with pytest.raises(FileError) as caught:
        load_transformer_shape(file)
    assert caught.value.what.startswith(str(file))
    assert all(name in caught.value.what for name in names)


@pytest.mark.parametrize(
    ("key", "off", "on"),
    [
        ("index_topk", None, 2048),
        ("sliding_window", None, 4096),
        ("attn_type_list", [1, 1], [1, 0]),
        ("use_cla", False, True),
        ("attn_output_gate", False, True),
        ("add_cross_attention", False, True),
        ("cross_attention_layers", [], [3, 8]),
        ("block_configs", [], [{}]),
        ("moe_layer_num_skipped", 0, 2),
        ("use_bidirectional_attention", False, True),
        ("num_kv_shared_layers", 0, 15),
    ],
)
def test_a_structure_that_is_switched_off_is_harmless(key: str, off: object, on: object) -> None:
    assert transformer_shape({**LLAMA, key: off}) == transformer_shape(LLAMA)
    with pytest.raises(UsageError, match=key):
        transformer_shape({**LLAMA, key: on})


@pytest.mark.parametrize(
    "key",
    ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"],
)
def test_a_size_that_is_null_is_refused(key: str) -> None:
    with pytest.raises(UsageError, match=f"{key}=null: must be a whole number"):
        transformer_shape({**LLAMA, key: None})


@pytest.mark.parametrize(
    "key", ["moe_intermediate_size", "num_experts_per_tok", "v_head_dim", "qk_rope_head_dim"]
)
def test_a_size_of_experts_or_latent_attention_that_is_null_is_refused(key: str) -> None:
    with pytest.raises(UsageError, match=f"{key}=null: must be a whole number"):
        transformer_shape({**V3, key: None})


def test_a_file_without_a_model_type_is_not_given_one_by_its_name(tmp_path: Path) -> None:
    file = tmp_path / "gpt2.json"
    file.write_text(json.dumps({key: value for key, value in LLAMA.items() if key != "model_type"}))
    shape = load_transformer_shape(file)
    assert shape.name == "gpt2"
    assert shape.note.startswith("the configuration has no model_type")
    assert shape.parameters() == transformer_shape(LLAMA).parameters()
