"""Which blocks attend to the last tokens alone, and to how many: local and global attention in turn.

As the configurations of transformers say it, in `layer_types` or, in older files, in the keys of a family;
`tests/cost_models/transformer/test_attention_windows.py` compares both with its classes.
"""

from __future__ import annotations

from .configuration_sizes import ConfigurationSizes, wrong_value
from .transformer_shape import AttentionWindow

_WINDOWS = {
    **dict.fromkeys(("mistral", "gemma2", "gemma3_text", "cohere2", "olmo3", "exaone4", "dots1"), 4096),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), 4096),
    **dict.fromkeys(("ministral", "vaultgemma", "exaone_moe", "cohere2_moe"), 4096),
    **dict.fromkeys(("gpt_oss", "granite_swa", "granitemoe_swa"), 128),
    **dict.fromkeys(("flint", "kolibri1"), 513),
    "mellum": 1024,
    "cwm": 8192,
}
"""Tokens, where the key is missing: those of the family's class."""
_CHUNK = 8192
_EVERY_BLOCK = frozenset({"mistral", "mixtral", "phi3", "phimoe", "starcoder2", "qwen3_moe", "ministral"})
_TURNS = {
    **dict.fromkeys(("gemma2", "gpt_oss", "vaultgemma"), 2),
    **dict.fromkeys(("olmo3", "cohere2", "cohere2_moe", "exaone4", "exaone_moe"), 4),
    "kolibri1": 5,
    "gemma3_text": 6,
    "mellum": 1,
}
"""The last block of so many attends to all tokens; where it is no rule of its own, a key says how many."""
_FIRST_OF_FOUR = frozenset({"cwm", "granite_swa", "granitemoe_swa"})
"""Model types in which the first of four blocks attends to all tokens."""
_FROM_A_BLOCK = {"qwen2": 28, "qwen3": 28, "dots1": 62}
"""The first block with a window, where `max_window_layers` is missing. (Qwen2-MoE's come before it.)"""


def read_windows(sizes: ConfigurationSizes, family: str, blocks: int) -> tuple[AttentionWindow | None, ...]:
    """By block; None: it attends to all tokens. Empty where all do. Raises UsageError."""
    if family == "gpt_neo":
        window = AttentionWindow(sizes.optional("window_size") or 256)
        local = [kind == "local" for kind in _kinds_of_gpt_neo(sizes)] or [False]
        windows = [window if local[block % len(local)] else None for block in range(blocks)]
    elif family == "llama4_text":
        chunk = _size(sizes, "attention_chunk_size", _CHUNK)
        window = AttentionWindow(chunk, chunked=True)
        windows = [window if chunk and own else None for own in _is_chunked(sizes, blocks)]
    else:
        local = _is_local(sizes, family, blocks)
        # Elsewhere the key stays unused, so that a window of a family that has none refuses the model.
        size = _size(sizes, "sliding_window", _WINDOWS.get(family, 0)) if local else 0
        if not sizes.flag(("use_sliding_window", family not in ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"))):
            size = 0  # their files have a window that is not used
            sizes.ignore("sliding_window")
        window = AttentionWindow(size)
        windows = [window if size and own else None for own in local]
    return tuple(windows) if any(windows) else ()


def _size(sizes: ConfigurationSizes, key: str, missing: int) -> int:
    """0 where the key is null."""
    return sizes.optional(key) if sizes.has(key) else missing


def _is_local(sizes: ConfigurationSizes, family: str, blocks: int) -> list[bool]:
    """By block; empty where nothing says which blocks have a window."""
    kinds = sizes.members("layer_types", str, "a list of names")
    if kinds:
        # Further layers are like the first in turn.
        return [kinds[block % len(kinds)] != "full_attention" for block in range(blocks)]
    if family in _EVERY_BLOCK:
        return [True] * blocks
    if family in _FROM_A_BLOCK:
        first = _size(sizes, "max_window_layers", _FROM_A_BLOCK[family])
        return [block >= first for block in range(blocks)]
    if family == "qwen2_moe":
        last = _size(sizes, "max_window_layers", 28)
        return [block % 2 == 0 and block < last for block in range(blocks)]
    if family in _FIRST_OF_FOUR:
        return [block % 4 != 0 for block in range(blocks)]
    if family == "flint":
        return [block > 1 and block % 4 != 1 and block < blocks - 1 for block in range(blocks)]
    if family not in _TURNS:
        return []
    pattern = sizes.value("sliding_window_pattern")
    turn = len(pattern) if isinstance(pattern, str) else sizes.optional("sliding_window_pattern")
    turn = turn or _TURNS[family]
    return [(block + 1) % turn != 0 for block in range(blocks)]


def _is_chunked(sizes: ConfigurationSizes, blocks: int) -> list[bool]:
    """Of Llama 4: those with rotary positions."""
    kinds = sizes.members("layer_types", str, "a list of names")
    if kinds:
        return [kinds[block % len(kinds)] == "chunked_attention" for block in range(blocks)]
    rotary = sizes.members("no_rope_layers", int, "0 or 1 for each layer")
    if rotary:
        return [bool(rotary[block % len(rotary)]) for block in range(blocks)]
    turn = sizes.optional("no_rope_layer_interval") or 4
    return [(block + 1) % turn != 0 for block in range(blocks)]


def _kinds_of_gpt_neo(sizes: ConfigurationSizes) -> list[str]:
    """Of `attention_types`: kinds, and how often each list of them comes."""
    expected = "lists of kinds, each with a number"
    kinds: list[str] = []
    for own in sizes.members("attention_types", list, expected) or []:
        if len(own) != 2 or not isinstance(own[0], list) or type(own[1]) is not int or own[1] > 10**5:
            raise wrong_value("attention_types", sizes.value("attention_types"), expected)
        kinds += own[0] * own[1]
    return kinds
