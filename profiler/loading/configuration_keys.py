"""What the families of transformers call the sizes of their configurations, and how such a key is read.

Every family names its sizes in its own way (`n_layer`, `num_layers`, `encoder_layers`).
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeGuard

KEYS: dict[str, tuple[str, ...]] = {
    "layers": (
        "num_hidden_layers", "n_layer", "n_layers", "num_layers",
        "encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers",
    ),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "heads": (
        "num_attention_heads", "n_head", "n_heads", "num_heads",
        "encoder_attention_heads", "decoder_attention_heads",
    ),
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
"""What a size is called in the families. A family's `attribute_map` adds its own names."""


def size_of(config: Any, word: str) -> int | None:
    """The configuration's size of this name in words; the smallest where there are several, None without."""
    sizes = [value_of(config, key) for key in keys_of(config, word)]
    return min((size for size in sizes if is_size(size)), default=None)


def keys_of(config: Any, word: str) -> list[str]:
    """The configuration's own keys for a size, each once."""
    if word == "classes":
        return ["num_labels"]
    names = names_of(config)
    if word in ("layers", "hidden") and "patch_embeds_hidden_size" in names:
        # The number of stages, and the width of the last.
        return []
    mapped = (config.attribute_map.get(key, key) for key in KEYS[word])
    settable = (int, type(None)) if word == "intermediate" else int
    return [
        key
        for key in dict.fromkeys(mapped)
        # A stage has several layers.
        if key in names and key != "num_stages" and isinstance(value_of(config, key, ""), settable)
    ]


def names_of(config: Any) -> set[str]:
    """The keys that a configuration of this class can be given."""
    fields = (
        {field.name for field in dataclasses.fields(config)} if dataclasses.is_dataclass(config) else set()
    )
    return {name for name in fields or config.to_dict() if not name.startswith("_")}


def value_of(config: Any, key: str, otherwise: object = None) -> Any:
    """A key's value, or `otherwise` where each layer has its own: asking for one raises an error."""
    try:
        return getattr(config, key, otherwise)
    except Exception:
        return otherwise


def is_size(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
