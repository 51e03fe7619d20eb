"""The operations of a pass on the meta device: FLOPs and bytes of each, by layer and direction."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from .modes import MeasurementTarget
from .torch_private import (
    BATCH_NORMS,
    CPU_FLASH_BACKWARDS,
    CPU_FLASH_FORWARDS,
    FREE_OPERATORS,
    OpOverload,
    TorchDispatchMode,
    schema_arguments,
    suggest_memory_format,
    tree_leaves,
)

_aten: Any = torch.ops.aten


@dataclass(frozen=True)
class Operation:
    """One kernel. `flops` counts matrix products, convolutions and attention; other kernels have 0 and
    are bound by `bytes`.

    `conversion_bytes`: of a convolution whose tensors do not lie channels last, as tensor cores take them:
    cuDNN reads and writes each once more around it ("Tensor Layouts In Memory: NCHW vs NHWC", NVIDIA Deep
    Learning Performance Guide).
    """

    flops: int
    bytes: int
    dtype: str
    is_convolution: bool = False
    conversion_bytes: int = 0


@dataclass
class LayerOperations:
    """What a layer runs in one pass, in order."""

    forward: list[Operation] = field(default_factory=list)
    backward: list[Operation] = field(default_factory=list)


def operation_counter(subject: MeasurementTarget) -> OperationCounter:
    """For a pass of its layers, with its loss if there is one."""
    return OperationCounter(len(subject.chain) + (subject.loss is not None))


class OperationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes operations below autograd, and as the watcher of the pass for whom: of `layers`, and last of the
    loss."""

    supports_higher_order_operators = True

    def __init__(self, layers: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layers = [LayerOperations() for _ in range(layers)]
        self._now: list[Operation] | None = None

    def before(self, index: int, layer_input: Any) -> None:  # noqa: ARG002
        self._now = self.layers[index].forward

    def after(self, index: int, output: Any) -> None:  # noqa: ARG002
        self._now = None

    def backward_starts(self) -> None:
        self._now = self.layers[-1].backward

    def gradient(self, index: int, gradient: Tensor) -> None:  # noqa: ARG002
        self._now = self.layers[index].backward

    def backward_ends(self) -> None:
        self._now = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._now is not None and isinstance(func, OpOverload):
            self._now += _operations(func, args, kwargs, result)
        return result


def _operations(
    func: OpOverload[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> list[Operation]:
    """One for each kernel; none of what runs none: views, memory that is not written, numbers."""
    packet, written = func.overloadpacket, _tensors(result)
    if func.is_view or packet in _FREE or not written:
        return []
    read = _tensors((args, kwargs))
    if packet in _LOOK_UP:
        # Of the table only the rows asked for.
        read = [*read[1:], *written]
    read += [read[position] for position in _READ_TWICE.get(packet, ())]
    count = flop_registry.get(packet) or _FLOPS.get(packet) or _FLOPS_BY_NAME.get(str(packet))
    flops = int(count(*args, **kwargs, out_val=result)) if count is not None else 0
    if packet is _aten.convolution_backward:
        return _backward_of_convolution(flops, *read[:3], *result)
    if packet is _aten.convolution:
        return [_convolution(flops, read, written)]
    return [_kernel(flops // 2 if flops and _is_causal(func, args, kwargs) else flops, read, written)]


def _kernel(flops: int, read: Sequence[Tensor], written: Sequence[Tensor]) -> Operation:
    floating = [tensor.dtype for tensor in (*read, *written) if tensor.dtype.is_floating_point]
    return Operation(
        flops=flops,
        bytes=sum(map(_extent, read)) + sum(map(_extent, written)),
        dtype=str(floating[0] if floating else written[0].dtype).removeprefix("torch."),
    )


def _convolution(flops: int, read: Sequence[Tensor], written: Sequence[Tensor]) -> Operation:
    converted = 0 if any(map(_is_channels_last, (*read, *written))) else 2
    return dataclasses.replace(
        _kernel(flops, read, written),
        is_convolution=True,
        conversion_bytes=converted * sum(map(_extent, (*read, *written))),
    )


def _backward_of_convolution(
    flops: int, gradient: Tensor, layer_input: Tensor, weight: Tensor, *results: Tensor | None
) -> list[Operation]:
    """One kernel for the gradient of what was given, one for that of the weight and the bias."""
    kernels = []
    of_given, *of_weights = results
    if of_given is not None:
        kernels.append(((gradient, weight), [of_given]))
    if any(one is not None for one in of_weights):
        kernels.append(((gradient, layer_input), [one for one in of_weights if one is not None]))
    return [_convolution(flops // len(kernels), read, written) for read, written in kernels]


def _is_channels_last(tensor: Tensor) -> bool:
    return suggest_memory_format(tensor) is not torch.contiguous_format


def _is_causal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Fused attention leaves out what a causal mask hides: half."""
    names = [argument.name for argument in schema_arguments(func)]
    return bool({**dict(zip(names, args, strict=False)), **kwargs}.get("is_causal"))


def _tensors(values: Any) -> list[Tensor]:
    leaves: Iterable[Any] = tree_leaves(values)
    return list({id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}.values())


def _extent(tensor: Tensor) -> int:
    """An expanded tensor lies in less memory than it has elements."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
    return sdpa_flop_count(query.shape, key.shape, value.shape)  # type: ignore[no-untyped-call]


def _attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
    shapes = (tensor.shape for tensor in (grad, query, key, value))
    return sdpa_backward_flop_count(*shapes)  # type: ignore[no-untyped-call]


def _grouped_product(one: Tensor, other: Tensor, *_: Any, **__: Any) -> int:
    """Of experts: where both are matrices or one is, each row (or column) is of one group."""
    groups = one.shape[0] if one.dim() == other.dim() == 3 else 1
    return int(2 * groups * one.shape[-2] * one.shape[-1] * other.shape[-1])


def _grouped_product_backward(one: Tensor, other: Tensor, *_: Any, **__: Any) -> int:
    return 2 * _grouped_product(one, other)


_FLOPS: dict[Any, Any] = {
    **dict.fromkeys(CPU_FLASH_FORWARDS, _attention),
    **dict.fromkeys(CPU_FLASH_BACKWARDS, _attention_backward),
}
"""What earlier torches do not count."""
_FLOPS_BY_NAME = {
    "aten._grouped_mm": _grouped_product,
    "transformers.grouped_mm_fallback": _grouped_product,
    "transformers.grouped_mm_fallback_backward": _grouped_product_backward,
}
"""What torch does not count, and what is there only once transformers is imported."""
_FREE = {
    *(_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided),
    *(*FREE_OPERATORS, _aten.lift_fresh, _aten.detach),
}
_LOOK_UP = {_aten.embedding, _aten.index_select, _aten.index, _aten.gather}
_READ_TWICE = {
    **dict.fromkeys(BATCH_NORMS, (0,)),
    _aten.native_batch_norm_backward: (0, 1),
}
"""Of what was read, by position: once for the statistics of the batch, once to use them."""
