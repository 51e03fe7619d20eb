"""The dimension of the input that holds the samples, by what one sample changes in the outputs of others."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .user_model import ModelInput, copy_model, flat, is_out_of_memory

_ALIKE = 1e-3
"""Relative; far above what the batch size does to rounding, far below what another sample does."""
_PAIR = 2


def batch_note(model: nn.Module, name: str, pair: ModelInput) -> str:
    """A note where samples along dimension 0 change each other's outputs; empty where they do not.

    Only of models with a module that takes the batch second. One sample of the `pair` is run by itself and
    behind the other, on a copy in evaluation mode, where batch norm and dropout do not mix them; then the
    same along dimension 1.
    """
    names = [
        f"{path or name} ({type(module).__name__})"
        for path, module in model.named_modules()
        if isinstance(module, nn.RNNBase | nn.MultiheadAttention) and not module.batch_first
    ]
    if not names:
        return ""
    # In evaluation mode, or of one sample, the model may not run: then nothing is known.
    copy = copy_model(model, name).eval()
    if not _mixes(copy, pair, 0):
        return ""
    is_second = all(tensor.dim() > 1 and tensor.shape[1] > 1 for tensor in pair.tensors)
    if is_second and _mixes(copy, _part(pair, 1, slice(0, _PAIR)), 1) is False:
        return (
            f"dimension 0 of the input does not look like the batch: {names[0]} takes the batch second "
            "(batch_first=False), and the samples lie in dimension 1; micro-batch sizes count dimension 0: "
            "set batch_first=True, or transpose in forward"
        )
    return (
        "what the model computes of a sample depends on the others of its batch, as a contrastive loss does: "
        "in a pipeline each sample is compared with those of its micro-batch alone"
    )


def _mixes(model: nn.Module, pair: ModelInput, dimension: int) -> bool | None:
    """Return whether the second of two samples along the dimension has other outputs than by itself.

    None where the model does not run.
    """
    try:
        with torch.no_grad():
            together, _ = flat(pair.clone().call(model))
            alone, _ = flat(_part(pair, dimension, slice(1, _PAIR)).clone().call(model))
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return None
    tensors = [
        (both, one)
        for both, one in zip(together, alone, strict=True)
        if isinstance(both, Tensor)
        and isinstance(one, Tensor)
        and both.is_floating_point()
        and both.dim() > 0
    ]
    return any(_differs(both, one) for both, one in tensors)


def _differs(both: Tensor, one: Tensor) -> bool:
    """Return whether `one` is not the second part of `both` in whichever dimension has two instead of one."""
    sizes = list(enumerate(zip(both.shape, one.shape, strict=False)))
    places = [place for place, (two, single) in sizes if two != single]
    if both.dim() == one.dim() and len(places) == 1 and sizes[places[0]][1] == (_PAIR, 1):
        both = both.narrow(places[0], 1, 1)
    return both.shape != one.shape or not torch.allclose(both, one, _ALIKE, _ALIKE, equal_nan=True)


def _part(example: ModelInput, dimension: int, part: slice) -> ModelInput:
    """Take the samples of `part` along the dimension."""

    def cut(tensor: Tensor) -> Tensor:
        if dimension:
            return tensor[:, part].clone()
        return tensor[part].clone() if tensor.dim() and len(tensor) == _PAIR else tensor

    return example.mapped(cut)
