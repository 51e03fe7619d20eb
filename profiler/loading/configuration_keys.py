"""The keys of transformers' configurations that hold sizes: their names by family, and which must agree.

Every family names its sizes in its own way (`n_layer`, `num_layers`, `encoder_layers`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, TypeGuard

from ...cost_models.transformer.model_families import SIZE_KEYS

_OPEN: dict[str, dict[str, Any]] = {
    "blip-2": {"image_token_index": 50265},
    "instructblip": {"image_token_index": 50265},
    "dbrx": {"attn_config": {"clip_qkv": 8, "rope_theta": 500000}},
    "deepseek_v2": {"num_experts_per_tok": 6, "moe_intermediate_size": 1408},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "ministral": {"head_dim": 128},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
    "autoformer": {"prediction_length": 24},
    "informer": {"prediction_length": 24},
    "time_series_transformer": {"prediction_length": 24},
    "wav2vec2-bert": {"vocab_size": 32},
    "wav2vec2-conformer": {"vocab_size": 32},
    "xmod": {"default_language": "en_XX"},
}
"""Keys that a family cannot do without and that its class has no value for, as published models have them."""
_WIDTH_UNIT = 8
"""Kernels want rows of whole 16 bytes; published widths are multiples of more."""


def configured_size(config: Any, word: str) -> int | None:
    """The configuration's size of this name in words; the smallest where there are several, None without."""
    sizes = [key_value(config, key) for key in size_keys(config, word)]
    return min((size for size in sizes if is_size(size)), default=None)


def size_keys(config: Any, word: str) -> list[str]:
    """The configuration's own keys for a size, each once."""
    if word == "classes":
        return ["num_labels"]
    names = key_names(config)
    if word in ("layers", "hidden") and "patch_embeds_hidden_size" in names:
        # The number of stages, and the width of the last.
        return []
    mapped = (config.attribute_map.get(key, key) for key in SIZE_KEYS[word])
    settable = (int, type(None)) if word == "intermediate" else int
    return [
        key
        for key in dict.fromkeys(mapped)
        # A stage has several layers.
        if key in names and key != "num_stages" and isinstance(key_value(config, key, ""), settable)
    ]


def key_names(config: Any) -> set[str]:
    """The keys that a configuration of this class can be given."""
    fields = (
        {field.name for field in dataclasses.fields(config)} if dataclasses.is_dataclass(config) else set()
    )
    return {name for name in fields or config.to_dict() if not name.startswith("_")}


def key_value(config: Any, key: str, otherwise: object = None) -> Any:
    """A key's value, or `otherwise` where each layer has its own: asking for one raises an error."""
    try:
        return getattr(config, key, otherwise)
    except Exception:
        return otherwise


def is_size(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def open_keys(kind: str) -> dict[str, Any]:
    """What a model type needs besides the values of its class."""
    return dict(_OPEN.get(kind, {}))


def in_proportion(width: int, hidden: int, before: int) -> int:
    """`width` as it is at `hidden` instead of `before`: if that does not come out, a multiple of 8 near."""
    exact = width * hidden / before
    if exact.is_integer() and (int(exact) % 4 == 0 or width % 4):
        return int(exact)
    return max(1, round(exact / _WIDTH_UNIT)) * _WIDTH_UNIT


def agreeing_sizes(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """What else must change where the hidden size or the number of heads was set.

    `sizes` are all keys of the configuration, with the values that they are to have so far.
    """
    return _rotary(sizes) | _state_space(sizes) | _axial(sizes) | _boxes(sizes)


def _rotary(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """GPT-J turns a part of each head, which cannot be wider than the head."""
    heads = _first(sizes, "num_attention_heads", "n_head")
    hidden = _first(sizes, "hidden_size", "n_embd")
    rotary = sizes.get("rotary_dim")
    if not (heads and hidden and rotary):
        return {}
    return {"rotary_dim": min(rotary, hidden // heads // 2 * 2)}


def _state_space(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """The heads of a state space model have its inner width together."""
    hidden = sizes.get("hidden_size")
    for heads, width, expand, groups in (
        ("mamba_n_heads", "mamba_d_head", "mamba_expand", "mamba_n_groups"),
        ("num_heads", "head_dim", "expand", "n_groups"),
        ("mamba_num_heads", "mamba_head_dim", "expand", "n_groups"),
    ):
        if not (hidden and all(key in sizes for key in (heads, width, expand, groups))):
            continue
        inner = sizes.get("mamba_d_ssm") or sizes[expand] * hidden
        # As many as before where the width can follow, else the most that divide the inner width.
        count = max(n for n in range(1, max(1, min(sizes[heads], inner // 4)) + 1) if inner % n == 0)
        return {heads: count, width: inner // count, groups: math.gcd(sizes[groups], count)}
    return {}


def _axial(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Reformer's two tables of positions have the hidden size together."""
    parts = sizes.get("axial_pos_embds_dim")
    hidden = sizes.get("hidden_size")
    if not parts or not hidden or sum(parts) == hidden:
        return {}
    first = hidden * parts[0] // sum(parts)
    return {"axial_pos_embds_dim": [first, hidden - first]}


def _boxes(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """LayoutLMv3's tables for the places of words, four coordinates and two sides, have it together."""
    hidden = sizes.get("hidden_size")
    if not hidden or "coordinate_size" not in sizes or "shape_size" not in sizes:
        return {}
    coordinate = hidden // 6
    return {"coordinate_size": coordinate, "shape_size": (hidden - 4 * coordinate) // 2}


def lists_of_layers(sizes: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Keys that name the kind of each layer: the kinds in turn."""
    lists: dict[str, Any] = {}
    if "attention_types" in sizes:
        kinds = ["global", "local"]
        lists["attention_types"] = [[[kinds[index % 2]], 1] for index in range(layers)]
    for key in ("attn_layers", "layers_block_type"):
        kinds = list(sizes.get(key) or ())
        if kinds:
            # As many of each kind as there are beside the others, and at least one.
            rare = [kind for kind in dict.fromkeys(kinds) if kind not in kinds[:layers]][: layers - 1]
            lists[key] = [*(kinds[index % len(kinds)] for index in range(layers - len(rare))), *rare]
    stages = sizes.get("out_features") or ()
    if stages and "num_hidden_layers" in sizes and "depths" not in sizes:
        # A stage is a layer, and what is handed on comes from the last ones.
        lists["out_indices"] = list(range(max(1, layers - len(stages) + 1), layers + 1))
        lists["out_features"] = [f"stage{index}" for index in lists["out_indices"]]
    if sizes.get("backbone_out_indices"):
        count, last = len(sizes["backbone_out_indices"]), max(sizes["backbone_out_indices"])
        lists["backbone_out_indices"] = [
            max(index, (own + 1) * layers // (last + 1) - 1)
            for index, own in enumerate(sizes["backbone_out_indices"][: min(count, layers)])
        ]
    return lists


def _first(sizes: Mapping[str, Any], *keys: str) -> int | None:
    return next((sizes[key] for key in keys if sizes.get(key)), None)
