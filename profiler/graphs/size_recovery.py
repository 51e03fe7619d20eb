"""Sizes, devices and dtypes do not cross a cut: a layer computes them again from the tensors it is given.

Both frontends leave nodes that compute such values: torch.fx `x.size(0)`, `x.shape`, `x.device`; torch.export
`aten.sym_size.int`, arithmetic on it, and `device_of`. What the values are is not read from the graph but
seen in trial runs at several batch sizes: a number that stays the same is a constant, one that moves with
the batch is found in a dimension that moves with it.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, fx

from ..torch_internals import tree_map_only


@dataclass(frozen=True)
class TensorMeta:
    """What a trial run remembers of a tensor."""

    shape: tuple[int, ...]
    device: torch.device
    dtype: torch.dtype


TrialValues = Mapping[fx.Node, tuple[Any, ...]]
"""Of each node its values in the trial runs, one per batch size, as `describe_tensors` returns them."""


def describe_tensors(value: object) -> Any:
    """`value` with every tensor in it replaced by its TensorMeta."""

    def described(tensor: Tensor) -> TensorMeta:
        return TensorMeta(tuple(map(int, tensor.shape)), tensor.device, tensor.dtype)

    return tree_map_only(Tensor, described, value, is_leaf=lambda part: isinstance(part, torch.Size))


def recover_sizes(
    node: fx.Node,
    available: Sequence[fx.Node],
    graph: fx.Graph,
    copies: dict[fx.Node, fx.Node],
    values: TrialValues,
) -> fx.Node | None:
    """Emits at the end of `graph` what recomputes the non-tensor `node`; None where that cannot be.

    `available` are nodes of the traced graph whose values are tensors and whose counterparts in `graph` are
    in `copies`: the crossing tensors. `values` holds what `node`, all that it is computed from, and the
    tensors of `available` were in the trial runs, which were at two or more different batch sizes (a third
    proves that a size is linear in the batch). The node made is also put in `copies`.

    A number that moved is a rational multiple of a dimension, plus a constant; a device or a floating dtype
    is that of a tensor which had the same; what never moved is a constant, so the layers are for inputs whose
    other dimensions are the example's. What depends on a tensor's contents (`item`) gives None.
    """
    if node in copies:
        return copies[node]
    if not _is_of_shapes(node, values):
        return None
    try:
        copies[node] = _Finder(available, graph, copies, values).node(node)
    except _CannotBeFoundError:
        return None
    return copies[node]


def device_of(tensor: Tensor) -> torch.device:
    """In a graph: where a device was that of the tensors at work. Any tensor of the graph gives the same."""
    return tensor.device


def constant(value: Any) -> Any:
    """In a graph: a value that is the same at every batch size, as a node."""
    return value


_ATTRIBUTES = frozenset(
    {"shape", "device", "dtype", "ndim", "layout", "is_cuda", "requires_grad", "itemsize"}
)
_METHODS = frozenset({
    "size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "get_device",
    "is_floating_point", "is_complex", "is_contiguous", "__len__",
})  # fmt: skip
_FUNCTIONS: frozenset[Any] = frozenset({
    len, device_of, isinstance, torch.numel, torch.is_tensor, torch.is_floating_point, torch.is_complex,
    torch.ops.aten.sym_size.int, torch.ops.aten.sym_numel.default, torch.ops.aten.sym_stride.int,
})  # fmt: skip


def _is_of_shapes(node: fx.Node, values: TrialValues) -> bool:
    """Whether its value comes from what tensors are, not from what they hold."""
    pending, visited = [node], set[fx.Node]()
    while pending:
        current = pending.pop()
        if current in visited or _asks_shape(current):
            continue
        visited.add(current)
        is_tensor = any(isinstance(value, TensorMeta) for value in values.get(current, ()))
        if is_tensor or current.op not in ("call_function", "call_method"):
            return False
        pending += current.all_input_nodes
    return True


def _asks_shape(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in _METHODS
    if node.op != "call_function":
        return False
    return node.target in _FUNCTIONS or (node.target is getattr and node.args[1] in _ATTRIBUTES)


class _CannotBeFoundError(Exception):
    """No tensor at hand tells the value."""


class _Finder:
    def __init__(
        self,
        available: Sequence[fx.Node],
        graph: fx.Graph,
        copies: dict[fx.Node, fx.Node],
        values: TrialValues,
    ) -> None:
        self._graph, self._copies, self._values = graph, copies, values
        self._tensors = [(copies[node], values[node]) for node in available]

    def node(self, node: fx.Node) -> fx.Node:
        """The value as a node; what no tensor tells directly is computed again from what it came from."""
        if node in self._copies:
            return self._copies[node]
        try:
            value = self._value(self._values[node])
        except _CannotBeFoundError:
            if _asks_shape(node) or not node.all_input_nodes:
                raise
            inputs = {source: self.node(source) for source in node.all_input_nodes}
            return self._graph.node_copy(node, inputs.__getitem__)
        return value if isinstance(value, fx.Node) else self._graph.call_function(constant, (value,))

    def _value(self, moments: tuple[Any, ...]) -> Any:
        """A constant, or a node."""
        first = moments[0]
        if isinstance(first, tuple | list):
            return self._several(moments)
        if isinstance(first, torch.device):
            return self._device(moments)
        if any(type(moment) is not type(first) or moment != first for moment in moments):
            return self._moving(moments)
        if isinstance(first, torch.dtype) and first.is_floating_point:
            return self._dtype(first)
        if first is None or isinstance(first, _CONSTANTS):
            return first
        raise _CannotBeFoundError

    def _several(self, moments: tuple[Any, ...]) -> Any:
        if len({len(moment) for moment in moments}) > 1:
            raise _CannotBeFoundError
        parts = [self._value(parts) for parts in zip(*moments, strict=True)]
        kind = type(moments[0])
        if not any(isinstance(part, fx.Node) for part in parts) and kind in (tuple, list):
            return kind(parts)
        if kind not in (tuple, list, torch.Size):
            raise _CannotBeFoundError
        return self._graph.call_function(kind, (parts,))

    def _device(self, moments: tuple[torch.device, ...]) -> fx.Node | torch.device:
        for tensor, shapes in self._tensors:
            if all(shape.device == device for shape, device in zip(shapes, moments, strict=True)):
                return self._graph.call_function(device_of, (tensor,))
        return moments[0]

    def _dtype(self, dtype: torch.dtype) -> fx.Node | torch.dtype:
        for tensor, shapes in self._tensors:
            if shapes[0].dtype == dtype:
                return self._graph.call_function(getattr, (tensor, "dtype"))
        return dtype

    def _moving(self, moments: tuple[Any, ...]) -> fx.Node:
        """A number that moves with the batch, of the dimension that moves most like it."""
        if not all(type(moment) is int for moment in moments):
            raise _CannotBeFoundError
        fits = [
            (factor, offset, tensor, index)
            for tensor, shapes in self._tensors
            for index, sizes in enumerate(zip(*(shape.shape for shape in shapes), strict=False))
            for factor, offset in _linear(sizes, moments)
        ]
        if not fits:
            raise _CannotBeFoundError
        simplest = min(fits, key=lambda fit: (fit[0] != 1 or fit[1] != 0, fit[0].denominator, abs(fit[1])))
        factor, offset, tensor, index = simplest
        node = self._graph.call_method("size", (tensor, index))
        for operation, operand, idle in (
            (operator.mul, factor.numerator, 1),
            (operator.add, int(offset * factor.denominator), 0),
            (operator.floordiv, factor.denominator, 1),
        ):
            if operand != idle:
                node = self._graph.call_function(operation, (node, operand))
        return node


_CONSTANTS = (bool, int, float, complex, str, torch.dtype, torch.layout, torch.memory_format)


def _linear(sizes: tuple[int, ...], moments: tuple[int, ...]) -> list[tuple[Fraction, Fraction]]:
    """Factor and offset that make each of `moments` of each of `sizes`; none, or the one pair."""
    moved = next((i for i, size in enumerate(sizes) if size != sizes[0]), None)
    if moved is None:
        return []
    factor = Fraction(moments[moved] - moments[0], sizes[moved] - sizes[0])
    offset = moments[0] - factor * sizes[0]
    fit = all(factor * size + offset == moment for size, moment in zip(sizes, moments, strict=True))
    # Otherwise the division would round.
    return [(factor, offset)] if fit and (offset * factor.denominator).denominator == 1 else []
