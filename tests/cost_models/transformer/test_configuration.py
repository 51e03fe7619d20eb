"""Sizes from configurations, against published counts of parameters and against transformers' own models."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from pplan.cost_models.errors import FileError, UsageError
from pplan.cost_models.transformer.configuration import load_transformer_shape, transformer_shape
from pplan.cost_models.transformer.model_families import FAMILIES

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


SMALL = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 96}
EXPERTS = {"num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 2}
LATENT: dict[str, Any] = {
    **EXPERTS,
    "moe_intermediate_size": 48,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 24,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "head_dim": 8,
    "num_key_value_heads": 4,
}
MORE: dict[str, dict[str, Any]] = {
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "dots1": {**EXPERTS, "moe_intermediate_size": 48, "n_shared_experts": 2, "first_k_dense_replace": 2},
    "glm4_moe": {**EXPERTS, "moe_intermediate_size": 48, "head_dim": 16},
    "qwen3_moe": {**EXPERTS, "moe_intermediate_size": 48, "decoder_sparse_step": 2},
    "qwen2_moe": {
        **EXPERTS, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 32, "mlp_only_layers": [0]
    },
    "ernie4_5_moe": {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 48},
    "llama4_text": {"num_local_experts": 8, "intermediate_size_mlp": 80, "interleave_moe_layer_step": 2},
    "dbrx": {
        "d_model": 64, "n_heads": 4, "n_layers": 3,
        "attn_config": {"clip_qkv": 8, "rope_theta": 500000, "kv_n_heads": 2},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "flint": {
        **EXPERTS, "num_hidden_layers": 4, "mlp_layer_types": ["dense", "sparse", "dense", "sparse"]
    },
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]]},
    "hunyuan_v1_dense": {"head_dim": 16},
}  # fmt: skip
ENCODERS = ("bert", "roberta", "xlm-roberta", "camembert", "data2vec-text", "ernie", "megatron-bert")
SWITCHES = [
    "attention_bias", "attention_out_bias", "mlp_bias", "use_bias", "bias", "qkv_bias", "use_qkv_bias",
    "enable_bias", "lm_head_bias", "use_qk_norm", "qk_layernorm", "tie_word_embeddings", "multi_query",
    "new_decoder_architecture", "parallel_attn", "use_parallel_residual",
]  # fmt: skip
"""Keys of several families that are true or false."""


def random_keys(family: str, names: set[str], random: Random) -> dict[str, Any]:
    """A small configuration, of the family's `names`; the sizes of attention and switches by chance."""
    keys = {**SMALL, "intermediate_size": 160, **EXPERTS}
    keys |= {"num_key_value_heads": random.choice((1, 2, 4)), "head_dim": random.choice((16, 32))}
    if family in ("starcoder2", "stablelm", "phi", "gpt_neox", "glm", "glm4", "dbrx", "phi3", "helium"):
        keys["head_dim"] = 16
    keys |= {switch: random.random() < 0.5 for switch in SWITCHES}
    keys |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 1)
    if family in (*ENCODERS, "dbrx"):
        del keys["tie_word_embeddings"]
    return {key: value for key, value in keys.items() if key in names} | MORE.get(family, {})


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(FAMILIES)[::3])
def test_as_many_parameters_as_the_model_of_transformers_has(family: str) -> None:
    """A third of the families: importing one takes longer than counting. All are in `COUNTED`."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    kind = transformers.CONFIG_MAPPING[family]
    build = transformers.AutoModelForMaskedLM if family in ENCODERS else transformers.AutoModelForCausalLM
    for seed in range(2):
        names = {*kind(**MORE.get(family, {})).to_dict(), *kind.attribute_map}
        config = kind(**random_keys(family, names, Random(f"{family} {seed}")))
        with torch.device("meta"):
            model = build.from_config(config)
        shape = transformer_shape({**config.to_dict(), "model_type": family})
        assert shape.parameters() == sum(each.numel() for each in model.parameters()), config
        assert not shape.note


COUNTED: list[tuple[int, dict[str, Any]]] = json.loads(
    (Path(__file__).parent / "models_of_transformers.json").read_text()
)
"""Two of these for each family, as transformers 5.23 builds and counts them; keys with its own values left
out."""


@pytest.mark.parametrize(("parameters", "keys"), COUNTED, ids=[keys["model_type"] for _, keys in COUNTED])
def test_as_many_parameters_as_transformers_counted(parameters: int, keys: dict[str, Any]) -> None:
    shape = transformer_shape(keys)
    assert shape.parameters() == parameters
    assert not shape.note


def test_every_family_was_counted() -> None:
    assert {keys["model_type"] for _, keys in COUNTED} == set(FAMILIES)


@pytest.mark.parametrize(
    ("keys", "parameters"),
    [
        # What the files of these models on the hub say, and the parameters that their cards or transformers
        # count: keys are missing that have the family's usual value.
        (
            {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024}
            | {"vocab_size": 50257},
            124_439_808,
        ),
        (
            {"model_type": "falcon", "hidden_size": 4544, "num_attention_heads": 71, "vocab_size": 65024}
            | {"num_hidden_layers": 32, "bias": False, "multi_query": True, "parallel_attn": True},
            6_921_720_704,
        ),
        ({**LLAMA, "model_type": "llama"}, 70_553_706_496),
    ],
)
def test_files_with_few_keys(keys: dict[str, Any], parameters: int) -> None:
    assert transformer_shape(keys).parameters() == parameters


def test_a_text_model_inside_another() -> None:
    """As Gemma 3's files have it; what else there is of the model is not counted, which is said."""
    outer = {"model_type": "llava", "vision_config": {"hidden_size": 1}, "text_config": LLAMA}
    shape = transformer_shape(outer)
    assert shape.parameters() == transformer_shape(LLAMA).parameters()
    assert "text model alone" in shape.note
    assert not transformer_shape({"model_type": "llama", "text_config": LLAMA}).note
    with pytest.raises(UsageError, match="is_encoder_decoder"):
        transformer_shape({**outer, "is_encoder_decoder": True})


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_a_single_expert_is_one(family: str) -> None:
    """With a router, and of its own width: as transformers' model is built."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    one = {"num_local_experts": 1, "num_experts": 1, "num_experts_per_tok": 1}
    if family == "qwen3_moe":
        one["moe_intermediate_size"] = 48
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"num_hidden_layers": 3, "vocab_size": 100, "head_dim": 16}
    config = transformers.AutoConfig.for_model(family, **sizes, **one, eos_token_id=1)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    shape = transformer_shape(config.to_dict())
    assert shape.parameters() == shape.active_parameters() == sum(own.numel() for own in model.parameters())


def test_a_family_that_is_not_known_is_said() -> None:
    shape = transformer_shape({**LLAMA, "model_type": "llama9"})
    assert shape.parameters() == transformer_shape(LLAMA).parameters()
    assert "llama9" in shape.note


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
        ({**MIXTRAL, "num_local_experts": 1}, "there is 1 expert"),
        ({**DEEPSEEK_V3, "v_head_dim": None}, "v_head_dim"),
        ({**LLAMA, "layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({**LLAMA, "mamba_d_state": 16}, "mamba_d_state"),
        ({**LLAMA, "is_encoder_decoder": True}, "is_encoder_decoder"),
        ({**LLAMA, "conv_dim": [512, 512]}, "not known.*: conv_dim"),
        ({**LLAMA, "model_type": "jetmoe"}, "its blocks"),
    ],
)
def test_what_is_no_transformer(keys: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=says):
        transformer_shape(keys)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(keys))
    with pytest.raises(FileError, match=r"config\.json"):
        load_transformer_shape(file)


WRONG: dict[str, list[object]] = {
    "text_config": [1, "llama", [{}]],
    "ffn_config": [[1]],
    "model_type": [1, ["llama"], "llama" * 50],
    "layer_types": ["full_attention", [["full_attention"]], [1]],
    "is_encoder_decoder": ["no", 2, [], {}],
    "tie_word_embeddings": ["false", 0.5, []],
    "attention_bias": ["true", 7, float("nan")],
    "hidden_size": ["8192", True, float("inf"), [8192]],
    "mlp_only_layers": [3, "3", [True], ["3"], {"3": 1}],
    "moe_layers": [7, [1.0]],
    "moe_layer_freq": ["1", -1, 1.5, [], [2], ["1"], [[1]]],
    "decoder_sparse_step": [[1], -2, "2"],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, own in WRONG.items() for value in own])
def test_values_of_the_wrong_kind(key: str, value: object) -> None:
    with pytest.raises(UsageError, match=f"{key}=.*: must be") as caught:
        transformer_shape({**MIXTRAL, key: value})
    assert len(caught.value.what) < 200


def test_a_number_that_python_does_not_print() -> None:
    with pytest.raises(UsageError, match="more than 40 digits"):
        transformer_shape({**LLAMA, "hidden_size": 10**5000})


@pytest.mark.parametrize("key", ["tie_word_embeddings", "layer_types", "moe_layer_freq", "text_config"])
def test_null_is_as_missing(key: str) -> None:
    assert transformer_shape({**MIXTRAL, key: None}) == transformer_shape(
        {name: value for name, value in MIXTRAL.items() if name != key}
    )


def test_which_layers_have_experts() -> None:
    """By 0 or 1 for each layer; further layers are like the last."""
    keys = {**MIXTRAL, "num_hidden_layers": 5, "moe_layer_freq": [0, 1, 0, 1]}
    assert transformer_shape(keys).routed == (False, True, False, True, True)
    assert transformer_shape({**keys, "moe_layer_freq": 2}).routed == (True, False, True, False, True)


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
