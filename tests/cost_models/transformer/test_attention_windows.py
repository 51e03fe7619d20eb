"""Windows of attention, against the masks and the configurations of transformers."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from pplan.cost_models.errors import UsageError
from pplan.cost_models.transformer.attention_kernels import attention_work
from pplan.cost_models.transformer.configuration import transformer_shape
from pplan.cost_models.transformer.kernel_table import AttentionKernel, RingAttention
from pplan.cost_models.transformer.layer_work import Tokens
from pplan.cost_models.transformer.parallel_degrees import ParallelDegrees
from pplan.cost_models.transformer.transformer_shape import AttentionWindow, TransformerShape

SIZES = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "intermediate_size": 48,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "num_local_experts": 4, "moe_intermediate_size": 32}


@pytest.mark.parametrize("window", [1, 3, 7, 8, 20])
@pytest.mark.parametrize("sequence", [1, 7, 8, 13])
def test_pairs_are_those_of_the_mask(window: int, sequence: int) -> None:
    masks = pytest.importorskip("transformers.masking_utils")
    torch = pytest.importorskip("torch")
    sliding = masks.sliding_window_causal_mask_function(window)
    chunked = masks.chunked_causal_mask_function(window, torch.zeros(1, dtype=torch.int))
    places = torch.arange(sequence)
    for mask, is_chunked in ((sliding, False), (chunked, True)):
        pairs = sum(int(mask(0, 0, query, key)) for query in places for key in places)
        assert AttentionWindow(window, is_chunked).pairs(sequence) == pairs


def _drawn_keys(random: Random) -> dict[str, Any]:
    """Of those that say which blocks have a window, some."""
    values: dict[str, Callable[[], object]] = {
        "sliding_window": lambda: random.choice((None, 8, 4096)),
        "use_sliding_window": lambda: random.random() < 0.5,
        "max_window_layers": lambda: random.choice((0, 2, 5)),
        "sliding_window_pattern": lambda: random.choice((2, 3)),
        "attention_chunk_size": lambda: random.choice((None, 16)),
        "no_rope_layer_interval": lambda: random.choice((2, 3)),
        "window_size": lambda: random.choice((4, 16)),
    }
    return {key: value() for key, value in values.items() if random.random() < 0.6}


FAMILIES = [
    "llama", "mistral", "mixtral", "phi3", "phimoe", "starcoder2", "gemma", "gemma2", "gemma3_text", "cohere",
    "cohere2", "gpt_oss", "olmo2", "olmo3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "llama4_text",
    "exaone4", "gpt_neo", "dots1", "deepseek_v3", "cohere2_moe", "cwm", "exaone_moe", "flint", "granite_swa",
    "granitemoe_swa", "kolibri1", "mellum", "ministral", "vaultgemma",
]  # fmt: skip
ALWAYS_LOCAL = ("exaone4", "exaone_moe", "kolibri1", "cwm", "flint")
"""Their classes refuse a window that is null, or divide by 0."""


@pytest.mark.parametrize("family", FAMILIES)
def test_windows_are_those_of_the_familys_own_class(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    for seed in range(12):
        random = Random(f"{family} {seed}")
        layers = random.choice((3, 6, 8))
        own = {"num_layers": layers, "attention_types": [[["global", "local"], layers // 2]], **SIZES}
        own["num_layers"] = layers // 2 * 2
        keys = {"num_hidden_layers": layers, **SIZES, **EXPERTS, **_drawn_keys(random)}
        keys = {**own, **_drawn_keys(random)} if family == "gpt_neo" else keys
        if family in ("dots1", "deepseek_v3"):
            keys["n_routed_experts"] = 4
        # Each class as it is: the rest of a random draw is foreign to it.
        names = set(transformers.CONFIG_MAPPING[family]().to_dict())
        names |= {"no_rope_layer_interval"} if family == "llama4_text" else set()
        names |= {"sliding_window_pattern"} if family in ("gemma3_text", "cohere2") else set()
        keys = {key: value for key, value in keys.items() if key in names or key in own}
        if family in ALWAYS_LOCAL and keys.get("sliding_window", 1) is None:
            del keys["sliding_window"]
        config = transformers.CONFIG_MAPPING[family](**keys)
        for file in (keys, {**SIZES, **config.to_dict()}):
            shape = transformer_shape({**file, "model_type": family})
            windows = shape.windows or (None,) * shape.blocks
            assert windows == tuple(_windows_of(config, shape.blocks)), (keys, file is keys)


def _windows_of(config: Any, blocks: int) -> list[AttentionWindow | None]:
    if config.model_type == "gpt_neo":
        local = [kind == "local" for kind in config.attention_layers]
        return [AttentionWindow(config.window_size) if own else None for own in local]
    size = getattr(config, "sliding_window", None)
    every = ["sliding_attention" if size else "full_attention"] * blocks
    kinds = getattr(config, "layer_types", None) or every
    chunk = getattr(config, "attention_chunk_size", None)
    windows = {
        "full_attention": None,
        "sliding_attention": AttentionWindow(size) if size else None,
        "chunked_attention": AttentionWindow(chunk, chunked=True) if chunk else None,
    }
    return [windows[kind] for kind in kinds]


def gemma(**keys: object) -> TransformerShape:
    return transformer_shape(
        {"model_type": "gemma2", "num_hidden_layers": 4, "sliding_window": 16, **SIZES, **keys}
    )


def test_attention_takes_the_mean_of_all_blocks() -> None:
    """Half of the blocks attend to 16 of 64 tokens: 16 x 17 / 2 + 48 x 16 pairs; the others: 64 x 65 / 2."""
    tokens, whole = Tokens(64, 2), gemma(sliding_window=None)
    share = (904 / 2080 + 1) / 2
    for degrees in (ParallelDegrees(), ParallelDegrees(context=2, exchange="all-to-all")):
        own, other = (attention_work(shape, degrees, tokens).forward for shape in (gemma(), whole))
        kernels = [kernel for kernel in own if isinstance(kernel, AttentionKernel)]
        assert [kernel.attended for kernel in kernels] == [pytest.approx(share)]
        assert all(not isinstance(kernel, AttentionKernel) or kernel.attended == 1 for kernel in other)
    ring = attention_work(gemma(), ParallelDegrees(context=2, exchange="ring"), tokens).forward
    assert [kernel.step.attended for kernel in ring if isinstance(kernel, RingAttention)] == [1]


def test_more_and_fewer_blocks() -> None:
    windows = gemma().windows
    assert gemma().with_blocks(7).windows == (windows * 2)[:7]
    assert gemma().with_blocks(1).attended_share(64) == pytest.approx(904 / 2080)
    assert gemma(sliding_window=None).windows == ()
    assert gemma().attended_share(16) == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sliding_window", -1),
        ("sliding_window", "4096"),
        ("sliding_window", 1.5),
        ("use_sliding_window", "no"),
        ("sliding_window_pattern", -2),
        ("sliding_window_pattern", [2]),
        ("layer_types", "sliding_attention"),
    ],
)
def test_wrong_values(key: str, value: object) -> None:
    with pytest.raises(UsageError, match=f"{key}=.*: must be"):
        gemma(**{key: value})
