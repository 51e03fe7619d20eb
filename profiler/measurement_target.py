"""The model that is measured: its working copy on the device, its layers and the clock."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from math import inf

import torch

from ..cost_models.errors import ModelError
from .clocks import Clock
from .layer import LayerChain
from .local_machine import DTYPES, parse_dtype
from .losses import Loss
from .modes import Modes
from .user_model import (
    LoadedModel,
    own_dtype,
    refuse_unusable,
)


@dataclass(frozen=True)
class MeasurementTarget:
    """The working copy of the model, its layers, and the clock."""

    loaded: LoadedModel
    chain: LayerChain
    device: torch.device
    dtype: torch.dtype
    clock: Clock
    seed: int
    notes: tuple[str, ...] = ()
    """What the profile is to say of it."""
    modes: Modes = field(default_factory=Modes)
    """The working copy is converted already."""
    loss: Loss | None = None


@dataclass(frozen=True)
class Setup:
    """How a model is to be measured."""

    device: torch.device
    dtype: str | None
    granularity: str
    keep_together: tuple[str, ...]
    loss: str
    modes: Modes
    seed: int
    clock: Clock
    verify_seconds: float = inf
    """That comparing layers and model may take, but for a first pass."""


def dtype_for(loaded: LoadedModel, name: str | None) -> tuple[torch.dtype, tuple[str, ...]]:
    """What the model is converted to, and what is to be said of it. Raises UsageError, ModelError."""
    dtype = None if name is None else parse_dtype(name)
    module = loaded.module
    refuse_unusable(loaded.name, module)
    tensors = list(itertools.chain(module.named_parameters(), module.named_buffers()))
    for path, tensor in tensors:
        if tensor.is_complex():
            raise ModelError(
                f"{loaded.name}: {path} is {dtype_text(tensor.dtype)}; only real numbers can be measured",
                "Keep real and imaginary parts in tensors of their own (torch.view_as_real).",
            )
    if dtype is not None:
        return dtype, ()
    own = own_dtype(module)
    if own is not None and own in DTYPES.values():
        return own, ()
    kinds = sorted({dtype_text(tensor.dtype) for _, tensor in tensors if tensor.dtype.is_floating_point})
    note = f"the model is in {' and '.join(kinds)} and was measured in float32; choose another with `dtype`"
    return torch.float32, (note,) if kinds else ()


def dtype_text(dtype: torch.dtype) -> str:
    """Return the dtype's name as options say it."""
    return str(dtype).removeprefix("torch.")
