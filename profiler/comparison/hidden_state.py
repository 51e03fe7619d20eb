"""Layers that read what another layer keeps in Python: apart from each other they would not be the model.

A skip connection through a list or an attribute of a module beside is no tensor that crosses a cut. So each
layer that runs code of the user's is run once more by itself, a copy on what it was given before.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..graphs.tracing_patches import leave_vmap
from ..torch_internals import tensor_version, tree_map_only
from ..user_model.flat_output import flat
from ..user_model.loaded_model import ModelInput
from ..user_model.seeding import reseed
from ..user_model.shared_parameters import tensors_used
from .side_by_side import SideBySide

_WITHOUT_STATE = ("torch.", "torchvision.", "pplan.")
"""Packages whose modules keep nothing beside parameters and buffers."""


def find_reader(side: SideBySide, layer_names: Sequence[str]) -> str:
    """A layer that fails, or returns something else, without the layers before it; else nothing.

    Raises whatever the layers raise where they run one after another.
    """
    layers = side.layered().layers
    suspects = [index for index, layer in enumerate(layers[1:], 1) if _runs_own_code(layer)]
    if not suspects:
        return ""
    pair = side.example(2)
    first, second = (_sample(pair, index) for index in range(2))
    versions = {id(tensor): tensor_version(tensor) for layer in layers for tensor in tensors_used(layer)}
    inputs, expected = _run_all(layers, first, side.seed, suspects)
    shared = set(_changed_by_another(layers, versions))
    # What copies have in common, a closure or a global, then holds what another sample left.
    _run_all(layers, second, side.seed, ())
    alone = side.layered().layers
    # From behind, so that none finds there what it should have been left by another.
    for index in reversed(suspects):
        if index in shared:
            continue
        try:
            actual = _run(_copied(alone[index]), inputs[index], side.seed + index)
        except Exception:
            return layer_names[index]
        if not _is_same(actual, expected[index]):
            return layer_names[index]
    return ""


def _copied(layer: nn.Module) -> nn.Module:
    """A copy; the layer itself where it holds what cannot be copied, which says nothing about its state."""
    try:
        return copy.deepcopy(layer)
    except Exception:
        return layer


def _runs_own_code(layer: nn.Module) -> bool:
    return any(not type(part).__module__.startswith(_WITHOUT_STATE) for part in layer.modules())


def _sample(pair: ModelInput, index: int) -> ModelInput:
    return pair.mapped(
        lambda tensor: tensor[index : index + 1].clone() if tensor.dim() and len(tensor) == 2 else tensor
    )


def _run_all(
    layers: Sequence[nn.Module], example: ModelInput, seed: int, suspects: Sequence[int]
) -> tuple[dict[int, Any], dict[int, list[Any]]]:
    """What the `suspects` layers were given, and what they returned."""
    value: Any = example.layer_input
    inputs, returned = dict[int, Any](), dict[int, list[Any]]()
    for index, layer in enumerate(layers):
        if index in suspects:
            inputs[index] = _detached(value)
        value = _run(layer, value, seed + index)
        if index in suspects:
            returned[index] = flat(_detached(value))[0]
    return inputs, returned


def _run(layer: nn.Module, value: Any, seed: int) -> Any:
    with torch.enable_grad(), leave_vmap(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reseed(seed)
        return layer(value)


def _detached(value: Any) -> Any:
    """In memory of its own: the next layer may work in place."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), value)


def _changed_by_another(layers: Sequence[nn.Module], before: dict[int, int]) -> Iterator[int]:
    """Layers that use a parameter or buffer of an earlier one which has changed."""
    earlier = dict[int, Tensor]()
    for index, layer in enumerate(layers):
        own = {id(tensor): tensor for tensor in tensors_used(layer)}
        if any(tensor_version(earlier[key]) != before[key] for key in own.keys() & earlier.keys()):
            yield index
        earlier |= own


def _is_same(actual: Any, expected: list[Any]) -> bool:
    """Tensors within rounding: the layers' copies may lie otherwise in memory, and what another sample left
    there makes more of a difference."""
    leaves = flat(actual)[0]
    return len(leaves) == len(expected) and all(map(_is_alike, leaves, expected))


def _is_alike(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return type(one) is type(other)
    if one.shape != other.shape or one.dtype != other.dtype or one.layout is not torch.strided:
        return one.shape == other.shape and one.dtype == other.dtype
    if not (other.is_floating_point() or other.is_complex()):
        return torch.equal(one, other)
    # Of the largest element: what cancels out to nearly zero is all rounding.
    finite = other[other.isfinite()].abs()
    tolerance = torch.finfo(other.dtype).eps ** 0.5 * float(finite.max() if finite.numel() else 0)
    return torch.allclose(one, other, rtol=0, atol=tolerance, equal_nan=True)
