"""Copies of a model to do things to: as it is, or on the meta device at no cost."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from ...cost_models.errors import ModelError
from ..torch_internals import copy_as
from .failures import at_user_line, first_line, is_out_of_memory


def copy_model(model: nn.Module, name: str) -> nn.Module:
    """A copy, where the model is. Raises ModelError; where memory runs out, what the allocator raises."""
    return _copy(model, name, {})


def copy_to_host(model: nn.Module, name: str) -> nn.Module:
    """A copy on the CPU; nothing is allocated where the model is. Raises as `copy_model` does."""
    tensors = (*model.parameters(), *model.buffers())
    return _copy(model, name, {id(tensor): _on_the_host(tensor) for tensor in tensors}, "cpu")


def copy_to_meta(model: nn.Module, name: str) -> nn.Module:
    """A copy on the meta device: parameters and buffers without values. Raises as `copy_model` does.

    Nothing is allocated where the model is: copying first and moving then would hold the weights twice.
    """
    tensors = (*model.parameters(), *model.buffers())
    return _copy(model, name, {id(tensor): _without_values(tensor) for tensor in tensors}, "meta")


def _copy(model: nn.Module, name: str, memo: dict[int, object], device: str | None = None) -> nn.Module:
    """Also moved to `device`."""
    for path, part in model.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise ModelError(
                f"{name} cannot be copied: {path or 'the model'} was made by torch.jit, and training a copy "
                "of it trains the original",
                "Give the module as it was before torch.jit.script or torch.jit.trace.",
            )
    try:
        copied = copy.deepcopy(model, memo)
        return copied if device is None else copied.to(device)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise ModelError(
            f"{name} cannot be copied: {first_line(error)}{at_user_line(error)}",
            "It is measured on a copy; keep only parameters, buffers and plain values in its attributes.",
        ) from error


def _without_values(tensor: Tensor) -> Tensor:
    return copy_as(tensor, torch.empty_like(tensor.detach(), device="meta"))


def _on_the_host(tensor: Tensor) -> Tensor:
    return copy_as(tensor, tensor.detach().to("cpu", copy=True))
