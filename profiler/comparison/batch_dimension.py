"""Whether dimension 0 of a model's input is the batch: its samples must not change each other's outputs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..user_model.failures import is_out_of_memory
from ..user_model.flat_output import flat
from ..user_model.loaded_model import ModelInput
from .side_by_side import SideBySide

_ALIKE = 1e-3
"""Relative; far above what the batch size does to rounding, far below what another sample does."""


def mixing_module(side: SideBySide) -> str:
    """A module that takes the batch second, where the model does not take it first; else nothing.

    Only of models that have such a module: one sample is run by itself and behind another, in evaluation
    mode, where batch norm and dropout do not mix them.
    """
    names = [
        f"{path or side.name} ({type(module).__name__})"
        for path, module in side.model.named_modules()
        if isinstance(module, nn.RNNBase | nn.MultiheadAttention) and not module.batch_first
    ]
    if not names:
        return ""
    try:
        return names[0] if _mixes(side) else ""
    except Exception as error:
        if is_out_of_memory(error):
            raise
        # In evaluation mode, or of one sample, the model may not run: then nothing is known.
        return ""


def _mixes(side: SideBySide) -> bool:
    pair, model = side.example(2), side.plain().model.eval()
    single = _second(pair)
    with torch.no_grad():
        together, _ = flat(pair.clone().call(model))
        alone, _ = flat(single.clone().call(model))
    both = [
        (a, b)
        for a, b in zip(together, alone, strict=True)
        if isinstance(a, Tensor) and isinstance(b, Tensor) and a.is_floating_point() and a.dim() > 0
    ]
    return not all(
        len(a) == 2 and a[1:].shape == b.shape and torch.allclose(a[1:], b, _ALIKE, _ALIKE, equal_nan=True)
        for a, b in both
    )


def _second(pair: ModelInput) -> ModelInput:
    """The second of two samples."""
    return pair.mapped(lambda tensor: tensor[1:].clone() if tensor.dim() and len(tensor) == 2 else tensor)
