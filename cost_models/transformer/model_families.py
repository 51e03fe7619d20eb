"""What a configuration does not say of a model: which norms, biases and tables its family has.

As the transformers library builds them; `tests/cost_models/transformer/test_configuration.py` counts the
parameters of its models. A family that is not listed is taken for one like Llama.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from .transformer_shape import LayerNames

SIZE_KEYS: dict[str, tuple[str, ...]] = {
    "layers": (
        "num_hidden_layers", "n_layer", "n_layers", "num_layers",
        "encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers",
    ),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim", "n_embed"),
    "heads": (
        "num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads",
        "encoder_attention_heads", "decoder_attention_heads",
    ),
    "key_value_heads": ("kv_n_heads", "num_key_value_heads", "num_kv_heads"),
    "head_width": ("head_dim", "d_kv", "kv_channels", "attention_head_size", "d_head"),
    "intermediate": (
        "intermediate_size", "n_inner", "d_ff", "d_inner", "ffn_dim", "hidden_dim", "dff", "ffn_hidden_size",
        "encoder_ffn_dim", "decoder_ffn_dim",
    ),
    "vocabulary": ("vocab_size",),
    "positions": (
        "max_position_embeddings", "n_positions", "max_seq_len", "context_length", "model_max_length",
    ),
    "classes": ("num_labels",),
}  # fmt: skip
"""What a size is called in the families of transformers' configurations."""

Flag: TypeAlias = bool | tuple[str, bool]
"""Whether a family has something: always or never, or what a key says, with its value where it is missing."""
Norm = Literal["rms", "layer", "scale", "none"]
"""Vectors of a norm: a scale (RMS norm), a scale and a bias (layer norm), a layer norm's scale, none."""


@dataclass(frozen=True)
class ModelFamily:
    """Of the models of one `model_type`.

    `attention_norms`, `feed_forward_norms`: of a block. `head_norm`: of queries and keys, one for the width
    of a head, or one for all heads together. `expert_bias`: whether routed experts have the biases of
    feed-forward layers. `positions`: whether there is a table of learned positions, with
    `position_offset` rows more than the configuration's positions. `block_scalars`: numbers that a
    feed-forward layer learns besides. `encoder`: every token attends to all (BERT). `dense`: no
    experts, although its files have keys of them.
    """

    gated: bool = True
    tied: bool = False
    norm: Norm = "rms"
    attention_norms: int = 1
    feed_forward_norms: int = 1
    query_bias: Flag = ("attention_bias", False)
    output_bias: Flag = ("attention_bias", False)
    feed_forward_bias: Flag = ("mlp_bias", False)
    expert_bias: bool = False
    router_bias: bool = False
    shared_gate: bool = False
    sinks: bool = False
    head_norm: Literal["", "width", "all"] = ""
    has_head_norm: Flag = True
    head_norm_bias: bool = False
    head_bias: Flag = False
    embedding_norm: bool = False
    positions: bool = False
    position_offset: int = 0
    block_scalars: int = 0
    encoder: bool = False
    dense: bool = False


_BIASES: dict[str, Flag] = {"query_bias": True, "output_bias": True, "feed_forward_bias": True}


def _like_gpt2(**other: Flag | str | int) -> ModelFamily:
    """Layer norms, biases everywhere, one matrix up, head and embedding tied."""
    values: dict[str, object] = {"gated": False, "tied": True, "norm": "layer", **_BIASES, **other}
    return ModelFamily(**values)  # type: ignore[arg-type]


_LLAMA = ModelFamily()
_GPTJ = _like_gpt2(tied=False, feed_forward_norms=0, query_bias=False, output_bias=False, head_bias=True)
_QWEN3 = ModelFamily(head_norm="width")
_OLMO2 = ModelFamily(head_norm="all")
_COHERE = ModelFamily(
    tied=True, norm="scale", feed_forward_norms=0, head_norm="all", has_head_norm=("use_qk_norm", False)
)
_BERT = _like_gpt2(positions=True, embedding_norm=True, encoder=True)
_USES_BIAS: Flag = ("use_bias", False)
_ERNIE = ModelFamily(tied=True, query_bias=_USES_BIAS, output_bias=_USES_BIAS, feed_forward_bias=_USES_BIAS)

FAMILIES: dict[str, ModelFamily] = {
    **dict.fromkeys(("llama", "mistral", "mixtral", "phi3", "granite", "granitemoe", "deepseek_v2"), _LLAMA),
    **dict.fromkeys(("deepseek_v3", "cwm", "exaone", "granitemoeshared", "iquestcoder", "internlm3"), _LLAMA),
    **dict.fromkeys(("minicpm3", "ministral", "ministral3", "sarvam_mla", "youtu", "aria_text"), _LLAMA),
    "glm4_moe_lite": _LLAMA,
    "solar_open": ModelFamily(output_bias=False),
    "vaultgemma": ModelFamily(tied=True),
    **dict.fromkeys(("granite_swa", "granitemoe_swa"), ModelFamily(sinks=True)),
    "flint": ModelFamily(head_norm="width", sinks=True),
    "kolibri1": ModelFamily(head_norm="width", attention_norms=2, feed_forward_norms=2),
    **dict.fromkeys(("mellum", "exaone_moe", "hy_v3"), _QWEN3),
    "sarvam_moe": ModelFamily(head_norm="width", has_head_norm=("use_qk_norm", True), output_bias=False),
    "minimax_m2": _OLMO2,
    "jais2": ModelFamily(
        gated=False,
        norm="layer",
        query_bias=("attention_bias", True),
        output_bias=("attention_bias", True),
        feed_forward_bias=("mlp_bias", True),
    ),
    "nanochat": ModelFamily(gated=False, norm="none"),
    "cohere2_moe": ModelFamily(tied=True, norm="scale", feed_forward_norms=0),
    "apertus1p5_text": ModelFamily(gated=False, head_norm="width", block_scalars=2),
    **dict.fromkeys(("data2vec-text", "ernie", "megatron-bert"), _BERT),
    "helium": ModelFamily(output_bias=False),
    "smollm3": ModelFamily(tied=True),
    "gemma": ModelFamily(tied=True),
    "gemma2": ModelFamily(tied=True, attention_norms=2, feed_forward_norms=2),
    "gemma3_text": ModelFamily(tied=True, attention_norms=2, feed_forward_norms=2, head_norm="width"),
    "qwen2": ModelFamily(query_bias=True, output_bias=False),
    "qwen2_moe": ModelFamily(query_bias=("qkv_bias", True), output_bias=False, shared_gate=True),
    "qwen3": _QWEN3,
    "qwen3_moe": _QWEN3,
    "exaone4": _QWEN3,
    "dots1": _QWEN3,
    "hunyuan_v1_dense": replace(_QWEN3, dense=True),
    "olmo": ModelFamily(norm="none"),
    "olmo2": _OLMO2,
    "olmo3": _OLMO2,
    "olmoe": _OLMO2,
    "flex_olmo": _OLMO2,
    "glm": ModelFamily(query_bias=("attention_bias", True), output_bias=False),
    "glm4": ModelFamily(
        query_bias=("attention_bias", True), output_bias=False, attention_norms=2, feed_forward_norms=2
    ),
    "glm4_moe": ModelFamily(output_bias=False, head_norm="width", has_head_norm=("use_qk_norm", False)),
    "seed_oss": ModelFamily(query_bias=("attention_bias", True), output_bias=("attention_out_bias", False)),
    "gpt_oss": ModelFamily(
        query_bias=("attention_bias", True),
        output_bias=("attention_bias", True),
        feed_forward_bias=True,
        expert_bias=True,
        router_bias=True,
        sinks=True,
    ),
    "ernie4_5": _ERNIE,
    "ernie4_5_moe": replace(_ERNIE, router_bias=True, head_bias=_USES_BIAS),
    "llama4_text": _LLAMA,
    "arcee": ModelFamily(gated=False),
    # Its activation has two numbers to learn.
    "apertus": ModelFamily(gated=False, head_norm="width", block_scalars=2),
    "nemotron": ModelFamily(gated=False, norm="layer"),
    "persimmon": _like_gpt2(
        tied=False, head_norm="width", has_head_norm=("qk_layernorm", True), head_norm_bias=True
    ),
    "phi": _like_gpt2(
        tied=False,
        feed_forward_norms=0,
        head_bias=True,
        head_norm="width",
        has_head_norm=("qk_layernorm", False),
        head_norm_bias=True,
    ),
    "phimoe": ModelFamily(norm="layer", head_bias=("lm_head_bias", False)),
    "stablelm": ModelFamily(
        norm="layer",
        query_bias=("use_qkv_bias", False),
        output_bias=False,
        head_norm="all",
        has_head_norm=("qk_layernorm", False),
    ),
    "starcoder2": _like_gpt2(
        query_bias=("use_bias", True), output_bias=("use_bias", True), feed_forward_bias=("use_bias", True)
    ),
    "cohere": _COHERE,
    "cohere2": _COHERE,
    "gpt2": _like_gpt2(positions=True),
    "gpt_bigcode": _like_gpt2(positions=True),
    "gpt_neo": _like_gpt2(positions=True, query_bias=False),
    "gpt_neox": _like_gpt2(
        tied=False, query_bias=("attention_bias", True), output_bias=("attention_bias", True)
    ),
    "gptj": _GPTJ,
    "codegen": _GPTJ,
    "opt": _like_gpt2(
        positions=True,
        position_offset=2,
        query_bias=("enable_bias", True),
        output_bias=("enable_bias", True),
        feed_forward_bias=("enable_bias", True),
    ),
    "biogpt": _like_gpt2(positions=True, position_offset=2),
    "xglm": _like_gpt2(),
    "bloom": _like_gpt2(embedding_norm=True),
    "falcon": _like_gpt2(
        query_bias=("bias", False), output_bias=("bias", False), feed_forward_bias=("bias", False)
    ),
    "mpt": _like_gpt2(norm="scale", query_bias=False, output_bias=False, feed_forward_bias=False),
    "dbrx": ModelFamily(norm="scale"),
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert"), _BERT),
}

_GPT2_NAMES = LayerNames("transformer.wte", "transformer.h", ("transformer.ln_f", "lm_head"))
_MPT_NAMES = LayerNames("transformer.wte", "transformer.blocks", ("transformer.norm_f", "lm_head"))
_LAST_NORM = LayerNames(ends=("model.final_layernorm", "lm_head"))
LAYER_NAMES: dict[str, LayerNames] = {
    **dict.fromkeys(("gpt2", "gpt_bigcode", "gpt_neo", "gptj", "codegen"), _GPT2_NAMES),
    **dict.fromkeys(("mpt", "dbrx"), _MPT_NAMES),
    **dict.fromkeys(("phi", "persimmon"), _LAST_NORM),
    **dict.fromkeys(
        ("granite", "granitemoe", "granitemoeshared", "granite_swa", "granitemoe_swa"),
        LayerNames(ends=("model.norm", "lm_head", "div")),
    ),
    **dict.fromkeys(
        ("gemma2", "vaultgemma", "nanochat", "cohere2_moe"), LayerNames(ends=("model.norm", "lm_head", "mul"))
    ),
    "gpt_neox": LayerNames("gpt_neox.embed_in", "gpt_neox.layers", ("gpt_neox.final_layer_norm", "lm_head")),
    "opt": LayerNames(
        "model.decoder.embed_tokens", "model.decoder.layers", ("model.decoder.final_layer_norm", "lm_head")
    ),
    "biogpt": LayerNames("biogpt.embed_tokens", "biogpt.layers", ("biogpt.layer_norm", "output_projection")),
    "xglm": LayerNames(ends=("model.layer_norm", "lm_head")),
    "falcon": LayerNames("transformer.word_embeddings", "transformer.h", ("transformer.ln_f", "lm_head")),
    **{
        kind: LayerNames(f"{kind}.embeddings", f"{kind}.encoder.layer", ("cls",))
        for kind in ("bert", "ernie")
    },
}
"""Names of layers of transformers' models where they are not Llama's."""

FOREIGN_FAMILIES = frozenset(
    {
        "beam", "bert-generation", "big_bird", "bitnet", "cpmant", "ctrl", "diffllama", "doge", "electra",
        "gemma4_text", "gemma4_unified_text", "git", "gpt_neox_japanese", "hrm_text", "hunyuan_v1_moe",
        "jetmoe", "longcat_flash", "modernbert-decoder", "moshi", "openai-gpt", "phi4_multimodal", "qwen",
        "reformer", "rembert", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta-xl", "xlnet",
        "xlstm", "xmod", "zamba", "zamba2",
    }
)  # fmt: skip
"""Whose blocks, or what is around them, have parts that are not counted here."""
