"""The input and the gradients of a segment that runs without the rest of its model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..passes.timing import OutputGradients
from ..torch_internals import tree_flatten, tree_leaves, tree_unflatten


@dataclass(frozen=True)
class Boundary:
    """What crosses from one segment to the next, on the host; a tensor or several, and facts of each."""

    value: Any
    needs_gradient: tuple[bool, ...]
    is_counted: tuple[bool, ...]
    """Whether an earlier segment counts it as saved."""

    @classmethod
    def of_input(cls, inputs: Any) -> Boundary:
        """Of the first segment, which is fed the model's own input."""
        leaves = tree_leaves(inputs)
        return cls(inputs, (False,) * len(leaves), (False,) * len(leaves))

    def on(self, device: torch.device) -> Any:
        """A copy on `device`, which a layer may work on in place, as if operations before had made it."""
        leaves, form = tree_flatten(self.value)
        tensors = [
            _as_if_made(leaf.to(device, copy=True), needs) if isinstance(leaf, Tensor) else leaf
            for leaf, needs in zip(leaves, self.needs_gradient, strict=True)
        ]
        return tree_unflatten(tensors, form)

    def counted_tensors(self, inputs: Any, *, whether: bool = True) -> list[Tensor]:
        """The tensors of `inputs`, made by `on`, that an earlier segment counts as saved; or the others."""
        return [
            leaf
            for leaf, counted in zip(tree_leaves(inputs), self.is_counted, strict=True)
            if isinstance(leaf, Tensor) and counted == whether
        ]

    @property
    def gradient_bytes(self) -> int:
        """Of the gradients that come back through it."""
        pairs = zip(tree_leaves(self.value), self.needs_gradient, strict=True)
        return sum(leaf.nbytes for leaf, needs in pairs if needs)


def _as_if_made(value: Tensor, needs_gradient: bool) -> Tensor:
    if not needs_gradient:
        return value
    output: Tensor = _LeafAsResult.apply(torch.ones((), requires_grad=True), value)
    return output


class _LeafAsResult(torch.autograd.Function):
    """Returns `value` as the result of an operation, whose gradient ends here.

    Unlike a leaf it may be overwritten, and unlike a copy of a leaf it takes no memory twice, nor keeps its
    gradient.
    """

    @staticmethod
    def forward(ctx: Any, switch: Tensor, value: Tensor) -> Tensor:  # noqa: ARG004
        # The same memory, but no view: views made in here could not be overwritten.
        return torch.empty(0, dtype=value.dtype, device=value.device).set_(value)  # type: ignore[call-overload, no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:  # noqa: ARG004
        return None, None


class InnerGradients(OutputGradients):
    """The gradients that backward starts from in a segment that others follow.

    None where all weights so far are frozen: there is no backward. It starts behind the output, not at it, so
    that the output's memory is free as soon as it is in the whole, where the layers behind hold it no longer.
    """

    def of(self, output: Any) -> tuple[list[Tensor], list[Tensor]]:
        if not any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(output)):
            return [], []
        tensors, starts = super().of(output)
        ends: list[Tensor] = [
            _Behind.apply(tensor, start) for tensor, start in zip(tensors, starts, strict=True)
        ]
        return ends, [torch.zeros_like(end) for end in ends]


class _Behind(torch.autograd.Function):
    """A number made of a tensor, whose gradient is `start` whatever the number's."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, start: Tensor) -> Tensor:
        ctx.start = start
        return tensor.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return ctx.start, None
