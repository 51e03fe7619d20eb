"""A transformer's sizes, of its published configuration (`config.json`)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import FileError, UsageError
from ..quantities import format_count
from ..text_files import read_text
from .attention_windows import read_windows
from .configuration_sizes import NO_DECODER, ConfigurationSizes, wrong_value
from .known_keys import is_part, refuse_unknown, unknown_keys
from .model_families import FAMILIES, FOREIGN_FAMILIES, LAYER_NAMES, SIZE_KEYS, ModelFamily
from .transformer_shape import (
    MOST_BLOCKS,
    AttentionShape,
    ExpertShape,
    LayerNames,
    LayerParameters,
    TransformerShape,
    VectorParameters,
)

_ATTENTION_KINDS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
_TEXT = "text_config"
_SECTIONS = ("attn_config", "ffn_config")
"""Sections of DBRX and MPT."""


def load_transformer_shape(path: Path) -> TransformerShape:
    """Of a `config.json` as the transformers library writes it. Raises FileError."""
    return parse_transformer_shape(read_text(path, "configuration"), path)


def parse_transformer_shape(text: str, path: Path) -> TransformerShape:
    """Read the sizes from the text of a `config.json`. Raises FileError."""
    try:
        return transformer_shape(parse_configuration(text, path), path.stem)
    except UsageError as error:
        raise FileError(f"{path}: {error.what}", error.hint) from error


def parse_configuration(text: str, path: Path) -> dict[str, Any]:
    """Read the keys of a `config.json` with their values. Raises FileError."""
    try:
        keys = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: not JSON: {error}", "Give the model's config.json.") from error
    if not isinstance(keys, dict):
        raise FileError(f"{path}: not the configuration of a model", "Give the model's config.json.")
    return keys


PREDICTOR_KEYS = ("num_nextn_predict_layers", "mtp_num_layers", "num_mtp_modules")


def transformer_shape(keys: Mapping[str, Any], name: str = "") -> TransformerShape:
    """Read the sizes of a transformer from its configuration, in any of the families' spellings.

    Args:
        keys: The configuration. A model that reads more than text has that of its text in `text_config`.
        name: What the model is called where the configuration has no `model_type`.

    Raises:
        UsageError: A size is missing or cannot be, or a key is neither used nor known to be harmless.
    """
    whole = ConfigurationSizes(keys)
    text = _section(whole, _TEXT)
    sizes = ConfigurationSizes(_text_keys(keys, text))
    kind = sizes.text("model_type")
    _check_kind(whole, sizes, kind)
    family = FAMILIES.get(kind, ModelFamily())
    hidden, heads = sizes.needed(*SIZE_KEYS["hidden"]), sizes.needed(*SIZE_KEYS["heads"])
    blocks = sizes.needed(*SIZE_KEYS["layers"])
    experts = _experts(sizes, family)
    shape = TransformerShape(
        name=kind or name,
        hidden=hidden,
        vocabulary=sizes.needed(*SIZE_KEYS["vocabulary"]),
        feed_forward=_feed_forward_width(sizes, hidden, family),
        attention=_attention(sizes, hidden, heads, family),
        routed=tuple(_routed(sizes, blocks)) if experts else (False,) * min(blocks, MOST_BLOCKS),
        experts=experts,
        gated=family.gated,
        tied=sizes.flag(("tie_word_embeddings", family.tied)),
        note=_note(kind, is_part=_has_parts(keys, kind)),
        predictors=sizes.optional(*PREDICTOR_KEYS),
        windows=read_windows(sizes, kind, min(blocks, MOST_BLOCKS)),
        names=LAYER_NAMES.get(kind, LayerNames()),
    )
    shape = replace(shape, vectors=_vectors(shape, family, sizes)).with_blocks(blocks)
    refuse_unknown(_unknown_keys(keys, text, sizes, kind))
    return shape


def _text_keys(keys: Mapping[str, Any], text: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys of the model that reads text, with those of its sections."""
    if text:
        outside = {"tie_word_embeddings": keys.get("tie_word_embeddings")}
        keys = {**{key: value for key, value in outside.items() if value is not None}, **text}
    sizes = ConfigurationSizes(keys)
    for name in _SECTIONS:
        keys = {**_section(sizes, name), **keys}
    return keys


def _unknown_keys(
    keys: Mapping[str, Any], text: Mapping[str, Any], sizes: ConfigurationSizes, kind: str
) -> dict[str, Any]:
    """Return the keys of the text configuration and those outside it that it does not define."""
    inside = _text_keys(keys, text)
    unknown = unknown_keys(inside, {*sizes.used, _TEXT, *_SECTIONS}, kind)
    if text:
        unknown |= unknown_keys(keys, {*inside, _TEXT, "tie_word_embeddings"}, kind)
    return unknown


def _has_parts(keys: Mapping[str, Any], kind: str) -> bool:
    """Return whether the model has parts that read no text."""
    is_inside = bool(keys.get(_TEXT)) and keys.get("model_type") != kind
    return is_inside or any(is_part(str(key)) and isinstance(value, Mapping) for key, value in keys.items())


def _section(sizes: ConfigurationSizes, name: str) -> Mapping[str, Any]:
    """The keys under a key; none where it is missing, or null."""
    section = sizes.value(name)
    if section is not None and not isinstance(section, Mapping):
        raise wrong_value(name, section, "keys with their values")
    return section or {}


def _check_kind(whole: ConfigurationSizes, sizes: ConfigurationSizes, kind: str) -> None:
    """Raises UsageError for a model that is not blocks of attention and feed-forward layers."""
    if kind in FOREIGN_FAMILIES:
        raise UsageError(
            f"{kind}: its blocks have parts that are not counted",
            "Give a decoder-only model of another family.",
        )
    kinds = sizes.members("layer_types", str, "a list of names") or []
    other = next((f"layer_types: {each}" for each in kinds if each not in _ATTENTION_KINDS), None)
    if whole.flag(("is_encoder_decoder", False)) or sizes.flag(("is_encoder_decoder", False)):
        other = "is_encoder_decoder"
    if other:
        raise UsageError(
            f"{kind or 'the model'}: {other[:60]}: not a stack of blocks with attention", NO_DECODER
        )


def _note(kind: str, *, is_part: bool) -> str:
    """What is not known, or not counted; `is_part`: of a model that reads more than text."""
    notes = []
    if kind not in FAMILIES:
        what = f"the model_type {kind[:40]!r} is not known" if kind else "the configuration has no model_type"
        notes.append(f"{what}, its blocks are taken for Llama's: compare its number of parameters")
    if is_part:
        notes.append("the text model alone is counted, and nothing that reads pictures or sound")
    return "; ".join(notes)


def _feed_forward_width(sizes: ConfigurationSizes, hidden: int, family: ModelFamily) -> int:
    """Of the blocks without experts."""
    width = sizes.optional("intermediate_size_mlp", *SIZE_KEYS["intermediate"])
    if not width and family.gated:
        sizes.refuse_null(*SIZE_KEYS["intermediate"])
    return width or (sizes.optional("expansion_ratio") or 4) * hidden


def _attention(sizes: ConfigurationSizes, hidden: int, heads: int, family: ModelFamily) -> AttentionShape:
    latent = sizes.optional("kv_lora_rank")
    if latent:
        rotary = sizes.needed("qk_rope_head_dim")
        # Each head has its own keys, of the widths that these models name.
        sizes.ignore(*SIZE_KEYS["key_value_heads"], *SIZE_KEYS["head_width"])
        return AttentionShape(
            heads=heads,
            key_value_heads=heads,
            head_width=sizes.needed("qk_nope_head_dim") + rotary,
            value_width=sizes.needed("v_head_dim"),
            latent_queries=sizes.optional("q_lora_rank"),
            latent_keys=latent,
            rotary_width=rotary,
        )
    own_width = sizes.optional(*SIZE_KEYS["head_width"])
    if not own_width and hidden % heads:
        raise UsageError(
            f"hidden_size={hidden} is no multiple of num_attention_heads={heads}",
            "Give head_dim, or other sizes.",
        )
    width, shared = own_width or hidden // heads, _key_value_heads(sizes, heads)
    if heads % shared:
        raise UsageError(
            f"num_attention_heads={heads} is no multiple of num_key_value_heads={shared}",
            "Correct the configuration.",
        )
    return AttentionShape(heads, shared, width, width, causal=not family.encoder)


def _key_value_heads(sizes: ConfigurationSizes, heads: int) -> int:
    """Those of one head where the key is multi_query; Falcon's later ones have their number."""
    grouped = sizes.optional(*SIZE_KEYS["key_value_heads"]) or heads
    if not sizes.has("multi_query") or sizes.flag(("new_decoder_architecture", False)):
        return grouped
    return 1 if sizes.flag(("multi_query", True)) else heads


_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
_EXPERTS_EACH = (
    "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k", "top_k_experts",
)  # fmt: skip
"""Keys for the number of experts of a token."""
_SHARED_EXPERTS = ("n_shared_experts", "moe_num_shared_experts", "num_shared_experts")


def _experts(sizes: ConfigurationSizes, family: ModelFamily) -> ExpertShape | None:
    number = sizes.optional(*_EXPERTS)
    if not number or family.dense:
        # Where a file says that there are none, their other keys mean nothing.
        if any(sizes.has(name) for name in _EXPERTS):
            sizes.ignore(*_EXPERTS_EACH, *_SHARED_EXPERTS, "moe_intermediate_size")
        return None
    sizes.refuse_null("moe_intermediate_size")
    width = sizes.optional("moe_intermediate_size") or sizes.needed(*SIZE_KEYS["intermediate"])
    shared = sizes.optional("shared_expert_intermediate_size", "shared_intermediate_size")
    if sizes.has("interleave_moe_layer_step"):  # of Llama 4: one expert for all tokens
        shared = width
    if shared:
        sizes.ignore(*_SHARED_EXPERTS)
    shared = shared or width * sizes.optional(*_SHARED_EXPERTS)
    per_token = sizes.needed(*_EXPERTS_EACH)
    if per_token > number:
        raise UsageError(
            f"num_experts_per_tok={per_token}: there {'is' if number == 1 else 'are'} "
            f"{format_count(number, 'expert')}",
            "Correct the configuration.",
        )
    return ExpertShape(number, per_token, width, shared)


_FIRST_ROUTED = ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers")
_ROUTED_TURNS = ("decoder_sparse_step", "moe_layer_interval", "interleave_moe_layer_step")


def _routed(sizes: ConfigurationSizes, blocks: int) -> Iterator[bool]:
    """By block: `mlp_layer_types` (transformers 5) says which have none ("dense"), or else
    `first_k_dense_replace` (DeepSeek), `mlp_only_layers` and `decoder_sparse_step` (Qwen), `moe_layer_freq`,
    `moe_layer_start_index` (Ernie), `moe_layers` (Llama 4), `num_dense_layers`; without them all have."""
    kinds = sizes.members("mlp_layer_types", str, "a list of names")
    if kinds:
        if other := next((kind for kind in kinds if kind not in ("dense", "sparse")), None):
            raise wrong_value("mlp_layer_types", other, "dense or sparse for each layer")
        sizes.ignore(
            *_FIRST_ROUTED, *_ROUTED_TURNS, "moe_layer_end_index", "mlp_only_layers", "moe_layer_freq"
        )
        for block in range(min(blocks, MOST_BLOCKS)):
            yield kinds[min(block, len(kinds) - 1)] == "sparse"
        return
    first = sizes.optional(*_FIRST_ROUTED)
    last = sizes.optional("moe_layer_end_index") or MOST_BLOCKS
    step = sizes.optional(*_ROUTED_TURNS) or 1
    plain, members = (
        set(sizes.members(name, int, "a list of layers' numbers") or ())
        for name in ("mlp_only_layers", "moe_layers")
    )
    flags, every = list[int](), 1
    if isinstance(sizes.value("moe_layer_freq"), list):
        expected = "a whole number, or 0 or 1 for each layer"
        flags = sizes.members("moe_layer_freq", int, expected) or []
        if not flags or not set(flags) <= {0, 1}:
            raise wrong_value("moe_layer_freq", flags, expected)
    else:
        every = sizes.optional("moe_layer_freq") or 1
    for block in range(min(blocks, MOST_BLOCKS)):
        if flags:
            yield flags[min(block, len(flags) - 1)] == 1
        elif members:
            yield block in members
        else:
            inside = first <= block <= last and block not in plain
            yield inside and (block + 1) % step == 0 and block % every == 0


def _vectors(shape: TransformerShape, family: ModelFamily, sizes: ConfigurationSizes) -> VectorParameters:
    """Biases, norms and tables of positions."""
    norm = {"rms": 1, "layer": 2, "scale": 1, "none": 0}[family.norm] * shape.hidden
    last = norm if not family.encoder else shape.hidden * (shape.hidden + 3)
    first = norm if family.embedding_norm else 0
    if family.positions:
        positions = sizes.optional(*SIZE_KEYS["positions"]) + family.position_offset
        first += (positions + sizes.optional("type_vocab_size")) * shape.hidden
    return VectorParameters(
        _attention_vectors(shape, family, sizes, norm),
        _dense_vectors(shape, family, sizes, norm),
        _expert_vectors(shape, family, sizes, norm),
        first,
        last,
        1 if family.encoder or sizes.flag(family.head_bias) else 0,
    )


def _norms_before(family: ModelFamily, sizes: ConfigurationSizes) -> tuple[int, int]:
    """Norms of attention and feed-forward layer; blocks that compute both side by side can have one."""
    both = family.attention_norms, family.feed_forward_norms
    one = family.attention_norms, 0
    if sizes.flag(("use_parallel_residual", False)) and family.head_norm:  # StableLM
        return one
    if not sizes.has("parallel_attn"):
        return both
    if sizes.flag(("new_decoder_architecture", False)):  # Falcon
        return both if (sizes.optional("num_ln_in_parallel_attn") or 2) == 2 else one
    return one if sizes.flag(("parallel_attn", True)) else both


def _attention_vectors(
    shape: TransformerShape, family: ModelFamily, sizes: ConfigurationSizes, norm: int
) -> LayerParameters:
    attention = shape.attention
    whole, shared = norm * _norms_before(family, sizes)[0], 0
    if attention.is_latent:
        whole += attention.latent_queries + attention.latent_keys
        if sizes.flag(family.query_bias):
            latent = attention.latent_keys + attention.rotary_width
            whole += shape.hidden + latent + attention.latent_queries
        return LayerParameters(whole, shared, 0)
    if sizes.flag(family.query_bias):
        shared += attention.fused_size
    if sizes.flag(family.output_bias):
        whole += shape.hidden
    if family.head_norm and family.has_head_norm is True:
        sizes.ignore("use_qk_norm", "qk_norm", "qk_norm_type")
    if family.head_norm and sizes.flag(family.has_head_norm):
        heads = 2 if family.head_norm == "width" else attention.heads + attention.key_value_heads
        whole += heads * attention.head_width * (2 if family.head_norm_bias else 1)
    return LayerParameters(whole, shared + attention.heads * family.sinks, 0)


def _dense_vectors(
    shape: TransformerShape, family: ModelFamily, sizes: ConfigurationSizes, norm: int
) -> LayerParameters:
    whole = norm * _norms_before(family, sizes)[1] + family.block_scalars
    if not sizes.flag(family.feed_forward_bias):
        return LayerParameters(whole, 0, 0)
    return LayerParameters(whole + shape.hidden, (2 if shape.gated else 1) * shape.feed_forward, 0)


def _expert_vectors(
    shape: TransformerShape, family: ModelFamily, sizes: ConfigurationSizes, norm: int
) -> LayerParameters:
    if shape.experts is None:
        return LayerParameters(0, 0, 0)
    experts = shape.experts
    whole = norm * _norms_before(family, sizes)[1] + experts.number * family.router_bias
    whole += shape.hidden * family.shared_gate
    if not sizes.flag(family.feed_forward_bias):
        return LayerParameters(whole, 0, 0)
    ups = 2 if shape.gated else 1
    shared = ups * experts.shared_width
    whole += shape.hidden if experts.shared_width else 0
    routed = experts.number * (ups * experts.width + shape.hidden) if family.expert_bias else 0
    return LayerParameters(whole, shared, routed)
