"""Tensors that cross a cut between processes: contiguous, of floating point, and with a gradient coming back.

PyTorch 2.11 asks a gradient of everything that a stage is handed, so that masks and indices cannot cross as
they are: they travel as floating-point numbers of the same bits, and their gradient is zero.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

_CARRIERS = {torch.int16: torch.float16, torch.int32: torch.float32, torch.int64: torch.float64}
"""Of the same size; what takes one byte goes by value, which float16 holds exactly."""
_ASKS_FOR_ALL = "output_grads" not in inspect.signature(PipelineStage).parameters
"""Whether this PyTorch asks a gradient of every tensor that crosses a cut: 2.11 does, 2.15 does not."""


@dataclass(frozen=True)
class CutTensor:
    """A tensor at a cut: whether a gradient comes back for it, whether the stage behind overwrites it, and
    whether it crosses alone in a tuple, which that stage's first layer takes apart."""

    dtype: torch.dtype
    has_gradient: bool
    is_overwritten: bool = False
    in_tuple: bool = False

    @classmethod
    def of(cls, tensor: Tensor, *, in_tuple: bool = False) -> CutTensor:
        """The description of a tensor that the stage before hands out."""
        return cls(tensor.dtype, tensor.requires_grad, in_tuple=in_tuple)

    def receive(self, sent: Tensor) -> Tensor:
        """The tensor for the stage's layers, from what crossed the cut."""
        if self.has_gradient:
            return pass_on(sent)
        return _unpack(sent.detach(), self.dtype)


def as_layer_input(tensors: Sequence[Tensor], crossings: Sequence[CutTensor] | None) -> Any:
    """A tensor, or the tuple of several; also of one where it was in one."""
    in_tuple = crossings is not None and any(about.in_tuple for about in crossings)
    return tensors[0] if len(tensors) == 1 and not in_tuple else tuple(tensors)


def pack_tensor(tensor: Tensor) -> Tensor:
    """The tensor as it crosses the cut: itself, or its bits in floating point; contiguous."""
    if tensor.is_floating_point() or tensor.is_complex():
        contiguous = tensor.contiguous()
        return pass_on(contiguous) if contiguous.requires_grad else contiguous
    if tensor.dtype in _CARRIERS:
        return tensor.contiguous().view(_CARRIERS[tensor.dtype])
    return tensor.to(torch.float16).contiguous()


def attach_all(tensors: list[Tensor], *, always: bool = False) -> list[Tensor]:
    """`tensors`, those without a gradient attached to one that has one, where PyTorch asks that of all (or
    another runtime does, `always`)."""
    anchor = next((tensor for tensor in tensors if tensor.requires_grad), None)
    if anchor is None or not (always or _ASKS_FOR_ALL):
        return tensors
    return [tensor if tensor.requires_grad else _attach(tensor, anchor) for tensor in tensors]


def add_zero_gradients(output: Tensor, carried: tuple[Tensor, ...]) -> Tensor:
    """`output`, whose backward gives zeros for `carried`: the sum of none of their elements is added.

    An operation of PyTorch's own, for from those of others 2.11 does not compute weight gradients apart.
    """
    for tensor in carried:
        output = output + tensor.reshape(-1)[:0].sum().to(output.dtype)
    return output


def _unpack(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.dtype == dtype:
        return tensor
    return tensor.view(dtype) if dtype in _CARRIERS else tensor.to(dtype)


def pass_on(tensor: Tensor, share: float = 1.0) -> Tensor:
    """`tensor`, in the same memory, as one that is neither a leaf nor a view, and that no operation saved;
    its gradient is multiplied by `share` on the way back.

    PyTorch detaches the outputs of a stage in place, before it computes weight gradients from what was saved.
    """
    tensor_on: Tensor = _PassOn.apply(tensor, share)
    return tensor_on


class _PassOn(torch.autograd.Function):
    """The gradient of what a stage was handed is sent back, and so must be contiguous."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, share: float) -> Tensor:
        ctx.share = share
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        own = gradient.contiguous()
        return own if ctx.share == 1 else own * ctx.share, None


def _attach(tensor: Tensor, anchor: Tensor) -> Tensor:
    attached: Tensor = _Attach.apply(tensor, anchor)
    return attached


class _Attach(torch.autograd.Function):
    """Hands its first argument on, as if it had been computed from the second."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, anchor: Tensor) -> Tensor:  # noqa: ARG004
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:  # noqa: ARG004
        return None, None
