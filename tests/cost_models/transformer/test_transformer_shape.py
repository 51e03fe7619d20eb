"""Sizes from configurations, against published counts of parameters and against transformers' own models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pplan.cost_models.errors import FileError, UsageError
from pplan.cost_models.transformer.transformer_shape import load_transformer_shape, transformer_shape

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_hidden_layers": 80,
    "vocab_size": 128256,
}
MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "num_hidden_layers": 61,
    "vocab_size": 129280,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
QWEN3_MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_hidden_layers": 48,
    "vocab_size": 151936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}


@pytest.mark.parametrize(
    ("keys", "parameters", "active"),
    [
        # The models' own cards: Llama 3 70B and 8B, Mixtral 8x7B, DeepSeek-V3 (671B, 37B active),
        # Qwen3-30B-A3B.
        (LLAMA, 70.55e9, 70.55e9),
        (
            {
                **LLAMA,
                "hidden_size": 4096,
                "intermediate_size": 14336,
                "num_attention_heads": 32,
                "num_hidden_layers": 32,
            },
            8.03e9,
            8.03e9,
        ),
        (MIXTRAL, 46.7e9, 12.9e9),
        (DEEPSEEK_V3, 671e9, 37e9),
        (QWEN3_MOE, 30.5e9, 3.3e9),
    ],
)
def test_published_counts(keys: dict[str, Any], parameters: float, active: float) -> None:
    shape = transformer_shape(keys)
    assert shape.parameters() == pytest.approx(parameters, rel=2e-3)
    assert shape.active_parameters() == pytest.approx(active, rel=2e-2)


SMALL = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 96}


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama", {"num_key_value_heads": 2, "intermediate_size": 160}),
        ("mistral", {"num_key_value_heads": 1, "intermediate_size": 160, "head_dim": 32}),
        (
            "mixtral",
            {
                "num_key_value_heads": 2,
                "intermediate_size": 96,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
            },
        ),
        (
            "qwen3_moe",
            {
                "num_key_value_heads": 2,
                "intermediate_size": 160,
                "moe_intermediate_size": 48,
                "num_experts": 6,
                "num_experts_per_tok": 2,
                "decoder_sparse_step": 2,
                "head_dim": 16,
            },
        ),
        (
            "qwen3_moe",
            {
                "num_key_value_heads": 2,
                "intermediate_size": 160,
                "moe_intermediate_size": 48,
                "num_experts": 6,
                "num_experts_per_tok": 2,
                "mlp_only_layers": [0],
                "head_dim": 16,
            },
        ),
        (
            "deepseek_v3",
            {
                "num_key_value_heads": 4,
                "intermediate_size": 160,
                "moe_intermediate_size": 48,
                "n_routed_experts": 8,
                "n_group": 2,
                "topk_group": 1,
                "n_shared_experts": 1,
                "num_experts_per_tok": 2,
                "first_k_dense_replace": 1,
                "kv_lora_rank": 24,
                "q_lora_rank": 40,
                "qk_nope_head_dim": 16,
                "qk_rope_head_dim": 8,
                "v_head_dim": 12,
            },
        ),
        (
            "deepseek_v2",
            {
                "num_key_value_heads": 4,
                "intermediate_size": 160,
                "moe_intermediate_size": 48,
                "n_routed_experts": 8,
                "n_group": 2,
                "topk_group": 1,
                "n_shared_experts": 2,
                "num_experts_per_tok": 2,
                "first_k_dense_replace": 1,
                "kv_lora_rank": 24,
                "q_lora_rank": None,
                "qk_nope_head_dim": 16,
                "qk_rope_head_dim": 8,
                "v_head_dim": 12,
                "head_dim": 8,
            },
        ),
        ("gpt_neox", {"intermediate_size": 256}),
    ],
)
def test_as_many_as_the_model_of_transformers_has(family: str, more: dict[str, Any]) -> None:
    """But for biases and the norms inside attention, which are vectors."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    keys = {**SMALL, **more}
    config = transformers.AutoConfig.for_model(family, **keys)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    matrices = sum(each.numel() for each in model.parameters() if each.dim() > 1)
    shape = transformer_shape(config.to_dict())
    own = shape.parameters() - shape.hidden * (2 * shape.blocks + 1)
    if shape.attention.is_latent:
        own -= shape.blocks * (shape.attention.latent_queries + shape.attention.latent_keys)
    assert own == matrices


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({}, "num_attention_heads|hidden_size"),
        ({**LLAMA, "num_attention_heads": 7}, "no multiple"),
        ({**LLAMA, "num_key_value_heads": 7}, "no multiple"),
        ({**LLAMA, "hidden_size": -1}, "whole number"),
        ({**LLAMA, "hidden_size": 10**40}, "whole number"),
        ({**LLAMA, "hidden_size": 8192.0}, "whole number"),
        ({**LLAMA, "num_hidden_layers": 2**30}, "layers="),
        ({**MIXTRAL, "num_experts_per_tok": 9}, "8 experts"),
        ({**DEEPSEEK_V3, "v_head_dim": None}, "v_head_dim"),
    ],
)
def test_what_is_no_transformer(keys: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=says):
        transformer_shape(keys)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(keys))
    with pytest.raises(FileError, match=r"config\.json"):
        load_transformer_shape(file)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": ' * 5000, "\x00"])
def test_what_is_no_configuration(text: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(FileError):
        load_transformer_shape(file)


def test_fewer_and_more_layers() -> None:
    shape = transformer_shape(DEEPSEEK_V3)
    assert shape.with_blocks(4).routed == (False, False, False, True)
    assert shape.with_blocks(70).routed == shape.routed + (True,) * 9
