"""Inputs made up from a configuration: each family trains on them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pplan.cost_models.errors import ModelError
from pplan.profiler.transformers_models import load_transformers

pytest.importorskip("transformers")

SIZES = {"layers": 1, "hidden": 32, "heads": 4}
TEXT = {**SIZES, "vocabulary": 64, "sequence": 8}
PICTURE = {"image_size": 32, "patch_size": 16}


@pytest.mark.parametrize(
    ("name", "settings", "shapes"),
    [
        (
            "whisper",
            {**TEXT, "max_source_positions": 30},
            {"input_features": (2, 80, 60), "decoder_input_ids": (2, 8)},
        ),
        ("wav2vec2", {**SIZES, "conv_dim": [32] * 7}, {"input_values": (2, 16000)}),
        (
            "audio-spectrogram-transformer",
            {**SIZES, "max_length": 64},
            {"input_values": (2, 64, 128)},
        ),
        ("timesformer", {**SIZES, **PICTURE, "num_frames": 2}, {"pixel_values": (2, 2, 3, 32, 32)}),
        ("vilt", {**TEXT, **PICTURE}, {"input_ids": (2, 8), "pixel_values": (2, 3, 32, 32)}),
        ("blip", {**TEXT, **PICTURE}, {"input_ids": (2, 8), "pixel_values": (2, 3, 32, 32)}),
        ("canine", {**SIZES, "max_position_embeddings": 128}, {"input_ids": (2, 128)}),
        (
            "pix2struct",
            {**TEXT, "hidden": 64, "patch_embed_hidden_size": 48},
            {"flattened_patches": (2, 64, 50), "decoder_input_ids": (2, 8)},
        ),
        (
            "timesfm",
            {"layers": 1, "heads": 4, "hidden": 64, "context_length": 64},
            {"past_values": (2, 64), "past_values_padding": (2, 64), "freq": (2, 1)},
        ),
        (
            "siglip2",
            {**SIZES, "num_patches": 16, "patch_size": 4},
            {"pixel_values": (2, 16, 48), "pixel_attention_mask": (2, 16), "spatial_shapes": (2, 2)},
        ),
        ("patchtst", {"heads": 4, "d_model": 32, "context_length": 16}, {"past_values": (2, 16, 1)}),
        (
            "decision_transformer",
            SIZES,
            {
                "states": (2, 20, 17),
                "actions": (2, 20, 4),
                "rewards": (2, 20, 1),
                "returns_to_go": (2, 20, 1),
                "timesteps": (2, 20),
            },
        ),
    ],
)
def test_a_family_trains_on_what_is_made_up(
    name: str, settings: dict[str, Any], shapes: dict[str, tuple[int, ...]]
) -> None:
    made = load_transformers(name, settings, seed=0)
    assert {key: tuple(tensor.shape) for key, tensor in made.example.kwargs.items()} == shapes
    output = made.example.repeated(3).call(made.module)
    tensors = [value for value in output.values() if isinstance(value, torch.Tensor) and value.requires_grad]
    assert tensors
    torch.autograd.backward(tensors, [torch.ones_like(tensor) for tensor in tensors])
    assert any(parameter.grad is not None for parameter in made.module.parameters())


def test_what_is_drawn_in_python_is_off_and_said() -> None:
    made = load_transformers("wav2vec2", {**SIZES, "conv_dim": [32] * 7}, seed=0, device="meta")
    config: Any = made.module.config
    assert (config.apply_spec_augment, config.layerdrop) == (False, 0.0)
    assert "apply_spec_augment=False instead of True: it is drawn in Python" in made.notes
    assert "layerdrop=0.0 instead of 0.1: it is drawn in Python" in made.notes
    asked = load_transformers("m2m_100", {**TEXT, "encoder_layerdrop": 0.2}, seed=0, device="meta")
    kept: Any = asked.module.config
    assert (kept.encoder_layerdrop, kept.decoder_layerdrop) == (0.2, 0.0)


def test_what_cannot_be_made_up_is_named() -> None:
    with pytest.raises(ModelError, match="takes task_inputs, which pplan cannot make up") as caught:
        load_transformers("oneformer", {}, seed=0, device="meta")
    assert "input_like" in caught.value.hint


def test_masks_of_sound_have_one_switch_or_two() -> None:
    made = load_transformers("data2vec-audio", {**SIZES, "conv_dim": [32] * 7}, seed=0, device="meta")
    config: Any = made.module.config
    assert (config.mask_time_prob, config.mask_feature_prob) == (0.0, 0.0)
    other = load_transformers("wav2vec2", {**SIZES, "conv_dim": [32] * 7}, seed=0, device="meta")
    assert not any("mask_time_prob" in note for note in other.notes)
