"""What operations return on the meta device, made what the CPU's return where the two differ in bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..operator_internals import EMBEDDING_BAGS, schema_arguments, suggest_memory_format
from ..torch_internals import TorchDispatchMode
from .meta_results import run_on_meta

_CHANNELS_LAST = (torch.channels_last, torch.channels_last_3d)
_SUM = 0
"""The mode of an embedding bag."""
_ADDED_UP = (torch.float32, torch.float16, torch.bfloat16)

_Arguments = Mapping[str, Any]
"""What an operation was given, by the names of its schema."""


class MetaOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Below autograd, so that what it returns is what is saved for backward.

    torch's own functions for meta tensors follow CUDA, or no device: norms return their statistics in
    float32, in evaluation too, convolutions forget channels_last, so that a view there is a copy here,
    what is folded takes no more than it needs, and bags of embeddings are indexed otherwise.
    """

    supports_higher_order_operators = True

    def __init__(self, corrections: Mapping[Any, Callable[[Any, _Arguments], Any]] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._corrections = _CORRECTIONS if corrections is None else corrections

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = run_on_meta(func, args, kwargs or {})
        corrected = self._corrections.get(func)
        if corrected is None or not args[0].is_meta:
            return result
        return corrected(result, _bind_arguments(func, args, kwargs or {}))


def _bind_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Arguments:
    """Arguments that are the default are left out of a call."""
    arguments = schema_arguments(func)
    by_name = {argument.name: value for argument, value in zip(arguments, args, strict=False)}
    defaults = {argument.name: argument.default_value for argument in arguments}
    return {**defaults, **by_name, **kwargs}


def _statistics(result: Sequence[Tensor], arguments: _Arguments) -> tuple[Tensor, Tensor, Tensor]:
    """In the input's dtype, or in that of the weights where they are float32 and the input is not
    (aten/native/cpu/mixed_data_type.h: param_scalar_type)."""
    output, mean, scale = result
    dtype = arguments["input"].dtype
    kinds = {value.dtype for value in arguments.values() if isinstance(value, Tensor)}
    if dtype.itemsize == 2 and torch.float32 in kinds:
        dtype = torch.float32
    return output, mean.to(dtype), scale.to(dtype)


def _batch_statistics(result: Sequence[Tensor], arguments: _Arguments) -> tuple[Tensor, Tensor, Tensor]:
    """None in evaluation."""
    output, mean, scale = _statistics(result, arguments)
    if arguments["training"]:
        return output, mean, scale
    return output, mean.new_empty(0), scale.new_empty(0)


def _laid_out(result: Tensor, arguments: _Arguments) -> Tensor:
    """Channels last where the input or the weight is."""
    layouts = [suggest_memory_format(arguments[name]) for name in ("input", "weight")]
    layout = next((layout for layout in layouts if layout in _CHANNELS_LAST), None)
    return result if layout is None else result.to(memory_format=layout)


def _folded(result: Tensor, arguments: _Arguments) -> Tensor:
    """In memory as large as that of what was unfolded: the CPU makes it so, then changes its shape."""
    unfolded: Tensor = arguments["self"]
    if unfolded.numel() <= result.numel():
        return result
    return unfolded.new_empty(unfolded.numel())[: result.numel()].view(result.shape)


def _bags(result: Sequence[Tensor], arguments: _Arguments) -> tuple[Tensor, ...]:
    """The bag of each index is not kept where rows are just added up; else it has one entry to spare, as the
    bags' sizes have where `offsets` ends with the last one's (aten/native/EmbeddingBag.cpp)."""
    output, _, _, largest = result
    offsets, count, bags = arguments["offsets"], arguments["indices"].numel(), output.shape[0]
    is_added_up = arguments["mode"] == _SUM and arguments["padding_idx"] < 0 and output.dtype in _ADDED_UP
    return (
        output,
        offsets.new_empty(0) if is_added_up else offsets.new_empty(count + 1)[:-1],
        offsets.new_empty(offsets.shape)[:bags],
        largest if largest.numel() else offsets.new_empty(bags),
    )


_aten: Any = torch.ops.aten
_CORRECTIONS: dict[Any, Callable[[Any, _Arguments], Any]] = {
    _aten.native_layer_norm.default: _statistics,
    _aten.native_group_norm.default: _statistics,
    _aten.native_batch_norm.default: _batch_statistics,
    _aten.convolution.default: _laid_out,
    _aten.col2im.default: _folded,
    **dict.fromkeys(EMBEDDING_BAGS, _bags),
}
ON_A_GPU: dict[Any, Callable[[Any, _Arguments], Any]] = {_aten.convolution.default: _laid_out}
"""All else that torch returns for meta tensors is what CUDA returns."""
