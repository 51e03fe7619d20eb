"""A model's config.json whose values are of wrong types, negative, huge, nested, NaN or missing: degrees and
models are refused in a sentence, or read."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pplan.api.degrees import read_shape, search_configuration
from pplan.cost_models.errors import ModelError, PplanError

SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100, "max_position_embeddings": 64}
DENSE = SIZES | {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 2, "head_dim": 16}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
TURNS = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 2,
    "topk_group": 1,
}
CONFIGURATIONS: list[dict[str, Any]] = [
    DENSE | {"model_type": "llama", "rope_parameters": ROPE, "architectures": ["LlamaForCausalLM"]},
    {"model_type": "gemma3", "text_config": DENSE | TURNS | {"model_type": "gemma3_text"}},
    DENSE | LATENT | {"model_type": "deepseek_v3"},
    DENSE | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 100},
]
NUMBERS = (0, -1, 1, 3, 2**31, 2**63, 10**400, -0.0, 0.5, 1e-300, 1e308, math.nan, math.inf, -math.inf)
OTHERS: tuple[Any, ...] = (None, True, False, "", "64", "nan", "silu", [], [1, 2], [None], [[]], {}, {"a": 1})
LISTS: tuple[Any, ...] = (
    ["full_attention"],
    ["x"] * 3,
    ["sliding_attention"] * 4,
    {"rope_type": []},
    "\u202e",
    "a" * 2000,
)


def list_paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of all that is inside."""
    if not isinstance(value, dict | list):
        return
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*path, key)
        yield from list_paths(inner, (*path, key))


def mutated(number: int) -> dict[str, Any]:
    """One of the configurations with one to three values that are others, gone, or one deeper."""
    rng = random.Random(number)
    config = copy.deepcopy(CONFIGURATIONS[number % len(CONFIGURATIONS)])
    for _ in range(rng.choice((1, 1, 2, 3))):
        if not (paths := list(list_paths(config))):
            break
        *outer, key = rng.choice(paths)
        place: Any = config
        for step in outer:
            place = place[step]
        kind = rng.random()
        if kind < 0.75:
            place[key] = copy.deepcopy(rng.choice((*NUMBERS, *OTHERS, *LISTS)))
        elif kind < 0.9:
            del place[key]
        else:
            place[key] = [place[key]] if kind < 0.95 else {str(key): place[key]}
    return config


def refuses(read: Any, number: int) -> bool:
    """Whether the reader refuses it, in words; anything else than that or an answer fails."""
    config = mutated(number)
    try:
        read(config)
    except PplanError:
        return True
    except Exception as error:
        raise AssertionError(number, config) from error
    return False


def test_plain_ones_are_read() -> None:
    assert all(read_shape(config).hidden == 64 for config in CONFIGURATIONS)


def test_degrees_read_or_refuse_what_is_hostile() -> None:
    refused = sum(refuses(read_shape, number) for number in range(1_000))
    assert 100 < refused < 950


def test_degrees_are_found_of_what_is_read() -> None:
    """Of those that are not refused: small, so that the search is short."""

    def solve(config: dict[str, Any]) -> None:
        shape = read_shape(config)
        if shape.blocks <= 64:
            search_configuration(
                config, gpus=2, gpu="h100", tp=(1,), pp=(1, 2), mini_batch=4, virtual_stages=(1,)
            )

    assert sum(not refuses(solve, number) for number in range(25)) > 2


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"architectures": True}, "architectures is no list of names of classes: True"),
        ({"architectures": {"a": 1}}, "architectures is no list"),
        ({"architectures": [5]}, "architectures is no list"),
        ({"num_hidden_layers": 2**31}, "num_hidden_layers is 2147483648: at most 131,072 layers"),
    ],
)
def test_models_of_configurations_that_were_found(change: dict[str, Any], what: str, tmp_path: Path) -> None:
    """A traceback, and a model that would never have been built."""
    loading = pytest.importorskip("pplan.profiler.transformers_models")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIGURATIONS[0] | change))
    with pytest.raises(ModelError, match=what):
        loading.load_transformers(str(file), {}, seed=0, device="meta")


def test_models_are_configured_or_refused(tmp_path: Path) -> None:
    loading = pytest.importorskip("pplan.profiler.transformers_models")
    sessions = pytest.importorskip("pplan.profiler.transformers_models")
    file = tmp_path / "config.json"

    def configure(config: dict[str, Any]) -> None:
        file.write_text(json.dumps(config))
        loading.configure_model(transformers, str(file), {})

    with sessions.transformers_session() as transformers:
        refused = sum(refuses(configure, number) for number in range(150))
    assert 20 < refused < 145
