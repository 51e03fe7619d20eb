"""Inputs made up for a model of transformers by its configuration: tokens, pictures, clips, sound, series."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .configuration import configured_size

SAMPLES = 2
_SIDE = 224
"""Of a picture, where the configuration says nothing."""
_WAVE = 16_000
"""Numbers of one second of sound."""
_FRAMES = 128
"""Of sound turned into features."""
_STEPS = 20
"""Of a series of decisions."""
_BYTES = 256
"""Tokens of a model without a vocabulary, which reads characters."""
_OBJECTS = 36
"""Of a picture that comes as features of what is in it."""
_OF_OTHER_KINDS = ("pixel_values", "input_features", "input_values", "visual_feats", "visual_pos")
"""What a model that reads text may take beside it."""


class InputMaker:
    """Makes up arguments of `module`: 2 samples, drawn from `seed`, texts of `sequence` tokens."""

    def __init__(self, module: nn.Module, config: Any, sequence: int, seed: int) -> None:
        self._module, self._config, self._sequence = module, config, sequence
        self._text = config.get_text_config()
        self._generator = torch.Generator().manual_seed(seed)
        main = getattr(module, "main_input_name", "input_ids")
        self._main = str(main[0] if isinstance(main, list) else main)
        parameters = inspect.signature(module.forward).parameters
        self._names = list(parameters)
        self._needed = [
            name
            for name, parameter in parameters.items()
            if parameter.default is parameter.empty
            and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        ]

    def proposals(self) -> Iterator[dict[str, Tensor]]:
        """Keywords to call it with: with all kinds of inputs that it takes, and with those it must have."""
        more = ["decoder_input_ids"] if self._config.is_encoder_decoder else []
        must = dict.fromkeys([self._main, *self._needed, *(name for name in more if name in self._names)])
        if "spatial_shapes" in self._names and self._main == "pixel_values":
            must |= dict.fromkeys(("pixel_attention_mask", "spatial_shapes"))
        if "image_embeds_position_mask" in self._names:
            must["image_embeds_position_mask"] = None
        if self._config.model_type == "fsmt":
            # Else forward decides by values whether there is padding.
            must["decoder_attention_mask"] = None
        every = must | dict.fromkeys(name for name in _OF_OTHER_KINDS if name in self._names)
        if "past_time_features" in must:
            every |= dict.fromkeys(name for name in self._names if name.startswith("future_"))
        if self._main == "states":
            every |= dict.fromkeys(("actions", "rewards", "returns_to_go", "timesteps"))
        if "pixel_values" in every and "input_ids" in self._names:
            every["input_ids"] = None
        tensors = {name: self._make(name) for name in every}
        whole = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        if must.keys() <= whole.keys():
            yield self._with_places_for_pictures(whole)
            if whole.keys() != must.keys():
                yield {name: whole[name] for name in must}

    @property
    def lacking(self) -> list[str]:
        """The arguments that it must have and that cannot be made up."""
        return [name for name in dict.fromkeys([self._main, *self._needed]) if self._make(name) is None]

    def _make(self, name: str) -> Tensor | None:
        makers: dict[str, Callable[[], Tensor | None]] = {
            "input_ids": self._tokens,
            "inputs": self._tokens,
            "decoder_input_ids": self._tokens,
            "qformer_input_ids": self._tokens,
            "pixel_values": self._pictures,
            "input_values": self._sound,
            "input_features": self._features,
            "visual_feats": lambda: self._noise(_OBJECTS, self._size("visual_feat_dim")),
            "visual_pos": lambda: self._noise(_OBJECTS, self._size("visual_pos_dim")),
            "states": lambda: self._noise(_STEPS, self._size("state_dim")),
            "actions": lambda: self._noise(_STEPS, self._size("act_dim")),
            "rewards": lambda: self._noise(_STEPS, 1),
            "returns_to_go": lambda: self._noise(_STEPS, 1),
            "timesteps": lambda: torch.arange(_STEPS, device="cpu").repeat(SAMPLES, 1),
            "flattened_patches": self._placed_patches,
            "pixel_attention_mask": lambda: torch.ones(SAMPLES, self._patches_a_side**2, device="cpu"),
            "image_embeds_position_mask": self._picture_places,
            "decoder_attention_mask": lambda: torch.ones(SAMPLES, self._sequence, device="cpu"),
            "spatial_shapes": lambda: torch.full((SAMPLES, 2), self._patches_a_side, device="cpu"),
            "freq": lambda: torch.zeros(SAMPLES, 1, dtype=torch.long, device="cpu"),
        }
        if name.startswith(("past_", "future_")):
            return self._series(name)
        return makers[name]() if name in makers else None

    def _noise(self, *shape: int | None) -> Tensor | None:
        if any(size is None for size in shape):
            return None
        sizes = [size for size in shape if size is not None]
        return torch.randn((SAMPLES, *sizes), generator=self._generator, device="cpu")

    def _size(self, *keys: str) -> int | None:
        """Of the configuration, or of one inside it."""
        parts = [getattr(self._config, key, None) for key in getattr(self._config, "sub_configs", {})]
        values = (getattr(part, key, None) for part in (self._config, *parts) for key in keys)
        return next((size for size in values if isinstance(size, int) and not isinstance(size, bool)), None)

    def _tokens(self) -> Tensor:
        """Random ids of shape (2, sequence), none of them special: padding is skipped, an end ends."""
        vocabulary = configured_size(self._text, "vocabulary") or _BYTES
        special = {
            token
            for config in (self._config, self._text)
            for key, value in config.to_dict().items()
            if key.endswith(("_token_id", "_token_index"))
            for token in (value if isinstance(value, list) else [value])
        }
        plain = [token for token in range(vocabulary) if token not in special] or list(range(vocabulary))
        indices = torch.randint(
            len(plain), (SAMPLES, self._sequence), generator=self._generator, device="cpu"
        )
        return torch.tensor(plain, device="cpu")[indices]

    def _pictures(self) -> Tensor | None:
        """Noise of shape (2, channels, height, width), for clips (2, frames, channels, height, width)."""
        vision = getattr(self._config, "vision_config", None) or getattr(
            self._config, "image_config", self._config
        )
        side = getattr(vision, "image_size", None) or getattr(self._config, "image_size", None) or _SIDE
        height, width = side if isinstance(side, list | tuple) else (side, side)
        channels = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", None) or 3
        if "spatial_shapes" in self._names:
            return self._noise(self._patches_a_side**2, channels * vision.patch_size**2)
        frames = getattr(vision, "num_frames", None)
        return self._noise(*([frames] if frames else []), channels, height, width)

    @property
    def _patches_a_side(self) -> int:
        """Of a picture that comes as patches."""
        return math.isqrt(self._size("num_patches") or 64)

    def _picture_places(self) -> Tensor | None:
        """Kosmos-2 puts so many vectors of a picture in the place of the first words."""
        count = self._size("latent_query_num")
        if count is None:
            return None
        return (torch.arange(count + self._sequence, device="cpu") < count).long().repeat(SAMPLES, 1)

    def _placed_patches(self) -> Tensor | None:
        """Behind the row and the column of each, from 1 on, as Pix2Struct takes them."""
        patches = self._noise(self._patches_a_side**2, self._size("patch_embed_hidden_size"))
        if patches is None:
            return None
        places = torch.arange(1, self._patches_a_side + 1, device="cpu")
        grid = torch.cartesian_prod(places, places).float().expand(SAMPLES, -1, 2)
        return torch.cat([grid, patches], 2)

    def _sound(self) -> Tensor | None:
        bins, frames = self._size("num_mel_bins"), self._size("max_length")
        return self._noise(frames, bins) if bins and frames else self._noise(_WAVE)

    def _features(self) -> Tensor | None:
        """As Whisper takes them (bins first), CLAP (a picture of them), and others (frames first)."""
        bins, positions = self._size("num_mel_bins"), self._size("max_source_positions")
        if self._size("spec_size") and bins:
            return self._noise(1, (self._size("spec_size") or 0) * (self._size("freq_ratio") or 4), bins)
        channels = self._size("input_feat_per_channel", "feature_projection_input_dim")
        if channels:
            return self._noise(_FRAMES, channels)
        return self._noise(bins, 2 * positions) if bins and positions else None

    def _series(self, name: str) -> Tensor | None:
        context, ahead = self._size("context_length"), self._size("prediction_length")
        lags = max(getattr(self._config, "lags_sequence", None) or [0])
        steps = ahead if name.startswith("future_") else (context or ahead or 0) + lags
        if name.endswith("_padding"):
            return torch.zeros(SAMPLES, steps or 0, dtype=torch.long, device="cpu")
        if name.endswith("_time_features"):
            return self._noise(steps, (self._size("num_time_features") or 0))
        channels = self._size("num_input_channels")
        values = self._noise(steps, channels) if channels else self._noise(steps)
        return torch.ones_like(values) if values is not None and name.endswith("_mask") else values

    def _with_places_for_pictures(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The text begins with as many tokens for pictures as the model makes of one."""
        if "image_embeds_position_mask" in inputs:
            count = int(inputs["image_embeds_position_mask"][0].sum())
            places = torch.full((SAMPLES, count), int(inputs["input_ids"][0, 0]), device="cpu")
            return inputs | {"input_ids": torch.cat([places, inputs["input_ids"]], 1)}
        names = ("image_token_id", "image_token_index")
        token = next(
            (getattr(self._config, n) for n in names if getattr(self._config, n, None) is not None), None
        )
        ask = getattr(self._module, "get_image_features", None)
        if token is None or ask is None or "pixel_values" not in inputs or "input_ids" not in inputs:
            return inputs
        device = next(self._module.parameters()).device
        try:
            with torch.no_grad():
                answer = ask(pixel_values=inputs["pixel_values"][:1].to(device))
        except Exception:
            return inputs
        parts = getattr(answer, "pooler_output", answer)
        tensors = parts if isinstance(parts, list | tuple) else [parts]
        count = sum(part.numel() // part.shape[-1] for part in tensors)
        places = torch.full((SAMPLES, count), token, device="cpu")
        return inputs | {"input_ids": torch.cat([places, inputs["input_ids"]], 1)}
