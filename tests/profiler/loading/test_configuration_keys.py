"""Sizes of transformers' configurations that must agree: what changes with those that were set."""

from __future__ import annotations

from typing import Any

import pytest

from pplan.profiler.configuration import in_proportion, lists_of_layers
from pplan.profiler.transformers_models import load_transformers
from pplan.profiler.user_model import LoadedModel

pytest.importorskip("transformers")

SIZES = {"layers": 2, "hidden": 32, "heads": 4, "vocabulary": 64, "sequence": 8}


def loaded(name: str, **more: Any) -> LoadedModel:
    return load_transformers(name, {**SIZES, **more}, seed=0)


@pytest.mark.parametrize(
    ("width", "hidden", "before", "expected"),
    [
        (3072, 64, 768, 256),
        (11008, 1024, 4096, 2752),
        (2752, 60, 1024, 160),
        (1536, 32, 2560, 16),
        (64, 32, 4096, 8),
        (10, 1, 5, 2),
    ],
)
def test_widths_stay_multiples_that_kernels_take(width: int, hidden: int, before: int, expected: int) -> None:
    assert in_proportion(width, hidden, before) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gptj", {"rotary_dim": 8}),
        ("gpt_neo", {"attention_layers": ["global", "local"]}),
        ("mamba2", {"num_heads": 4, "head_dim": 16, "n_groups": 4}),
        ("bamba", {"mamba_n_heads": 16, "mamba_d_head": 4}),
        ("nemotron", {"head_dim": 8, "num_key_value_heads": 1}),
        ("esm", {"vocab_size": 64, "pad_token_id": 1}),
        ("deepseek_v2", {"num_experts_per_tok": 6, "moe_intermediate_size": 8}),
        ("ernie4_5_moe", {"moe_intermediate_size": 16}),
        ("xmod", {"default_language": "en_XX"}),
        ("zamba2", {"layers_block_type": ["linear_attention", "hybrid"]}),
    ],
)
def test_a_small_one_of_the_family_runs(name: str, expected: dict[str, Any]) -> None:
    made = loaded(name)
    config: Any = made.module.config
    assert {key: getattr(config, key) for key in expected} == expected
    output = made.example.call(made.module)
    assert output.logits.shape == (2, 8, 64)


def test_reformers_tables_have_the_hidden_size_together() -> None:
    sizes = {"hidden": 64, "heads": 4, "vocabulary": 64, "sequence": 64, "axial_pos_shape": [8, 8]}
    config: Any = load_transformers("reformer", sizes, seed=0).module.config
    assert (list(config.axial_pos_embds_dim), config.attention_head_size) == ([16, 48], 16)


def test_words_for_pictures_fit_into_a_smaller_vocabulary_each_apart() -> None:
    made = loaded("llava", image_size=28, patch_size=14)
    config: Any = made.module.config
    assert config.image_token_index < 64
    tokens, pictures = made.example.kwargs["input_ids"], made.example.kwargs["pixel_values"]
    assert (tokens.shape, pictures.shape) == ((2, 4 + 8), (2, 3, 28, 28))
    assert ((tokens == config.image_token_index).sum(1) == 4).all()


def test_sizes_reach_the_configurations_inside() -> None:
    sizes = {"layers": 2, "hidden": 32, "heads": 4, "vocabulary": 64, "sequence": 8, "image_size": 32}
    made = load_transformers("blip", {**sizes, "patch_size": 16}, seed=0)
    config: Any = made.module.config
    for part in (config.text_config, config.vision_config):
        assert (part.num_hidden_layers, part.hidden_size, part.num_attention_heads) == (2, 32, 4)
        assert part.intermediate_size == 128
    assert (config.text_config.vocab_size, config.vision_config.image_size) == (64, 32)
    assert "vision_config.intermediate_size=128: in proportion to `hidden` and `heads`" in made.notes


@pytest.mark.parametrize(
    ("sizes", "layers", "expected"),
    [
        ({"layers_block_type": ["a", "a", "b"] * 4}, 7, {"layers_block_type": list("aabaaba")}),
        ({"layers_block_type": ["a", "a", "b"] * 4}, 2, {"layers_block_type": ["a", "b"]}),
        ({"layers_block_type": ["a", "a", "b"]}, 1, {"layers_block_type": ["a"]}),
        ({"attn_layers": ["x", "y"]}, 3, {"attn_layers": ["x", "y", "x"]}),
        ({"backbone_out_indices": [2, 5, 8, 11]}, 24, {"backbone_out_indices": [5, 11, 17, 23]}),
        ({"backbone_out_indices": [2, 5, 8, 11]}, 4, {"backbone_out_indices": [0, 1, 2, 3]}),
    ],
)
def test_lists_of_layers(sizes: dict[str, Any], layers: int, expected: dict[str, Any]) -> None:
    assert lists_of_layers(sizes, layers) == expected


def test_layoutlms_tables_of_places_have_the_hidden_size_together() -> None:
    config: Any = loaded("layoutlmv3").module.config
    assert 4 * config.coordinate_size + 2 * config.shape_size == config.hidden_size == 32
