"""A model that was built, with the input it is measured on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .inputs import ModelInput


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A module, and what it is called with."""

    module: nn.Module
    name: str
    example: ModelInput
    """At least one sample; inputs of other sizes repeat them."""
    classes: int | None = None
    loss: str = "none"
    """The usual one for such a model, as `losses.loss_named` knows it."""
    granularity: str = "block"
    """The usual one for such a model."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """What its factory or configuration was given."""
    notes: tuple[str, ...] = ()

    @property
    def settings_in_json(self) -> dict[str, Any]:
        """Those whose values JSON can say."""
        return {name: value for name, value in self.settings.items() if _is_json(value)}

    def example_input_for(self, batch: int) -> ModelInput:
        """An input of `batch` samples, in memory of its own, the same at every call."""
        return self.example.repeated(batch)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample of the first tensor."""
        return tuple(self.example.tensors[0].shape[1:])


def _is_json(value: object) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False


def noise(shape: Sequence[int], seed: int, samples: int = 2) -> Tensor:
    """Random samples of this shape, the same for the same seed; the caller's random state is left alone."""
    return torch.randn((samples, *shape), generator=torch.Generator().manual_seed(seed))
