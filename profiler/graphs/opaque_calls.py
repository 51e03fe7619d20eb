"""Modules that torch.export cannot look into: each call of one is an operation of its own in the graph.

What the call returns is told by two real runs of the model at different batch sizes: how many tensors, of
which dtypes, and which of their sizes move with the batch.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..torch_internals import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from ..user_model.flat_output import Structure, flat
from ..user_model.loaded_model import ModelInput

_library = torch.library.Library("pplan", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("opaque_call(int number, Tensor[] given) -> Tensor[]")  # type: ignore[no-untyped-call]
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)


class CannotBeOpaque(Exception):
    """A call that takes or returns what a graph cannot hold."""


@dataclass(eq=False)
class _OpaqueCall:
    """One call of a module, as two runs saw it."""

    path: str
    arguments: list[tuple[tuple[int, ...], ...]] = field(default_factory=list)
    """The shapes of the input tensors of each run."""
    results: list[tuple[tuple[int, ...], ...]] = field(default_factory=list)
    dtypes: tuple[torch.dtype, ...] = ()
    leaves: list[Any] = field(default_factory=list)
    """Of the output; None in the place of each tensor."""
    are_tensors: list[bool] = field(default_factory=list)
    structure: Structure | None = None
    spec: TreeSpec | None = None
    """Of the arguments, as they were while it was traced."""
    constants: list[Any] = field(default_factory=list)
    """Their leaves; None in the place of each tensor."""
    given_tensors: list[bool] = field(default_factory=list)

    def note(self, args: Any, kwargs: Any, output: Any) -> None:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self.arguments.append(tuple(tuple(tensor.shape) for tensor in tensors))
        leaves, self.structure = flat(output)
        results = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self.results.append(tuple(tuple(tensor.shape) for tensor in results))
        self.dtypes = tuple(tensor.dtype for tensor in results)
        self.leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.are_tensors = [isinstance(leaf, Tensor) for leaf in leaves]

    def like_results(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Empty tensors of the shapes that the module would return for these."""
        device = inputs[0].device
        sizes = [
            [self._size(shapes, inputs) for shapes in zip(*both, strict=True)]
            for both in zip(*self.results, strict=True)
        ]
        return [
            torch.empty(shape, dtype=dtype, device=device)
            for shape, dtype in zip(sizes, self.dtypes, strict=True)
        ]

    def _size(self, sizes: tuple[int, int], inputs: Sequence[Tensor]) -> Any:
        if sizes[0] == sizes[1]:
            return sizes[0]
        for tensor, (first, second) in zip(inputs, zip(*self.arguments, strict=True), strict=True):
            for dimension, (a, b) in enumerate(zip(first, second, strict=True)):
                if a != b and sizes[0] * b == sizes[1] * a and sizes[0] % a == 0:
                    return tensor.shape[dimension] * (sizes[0] // a)
        raise CannotBeOpaque(f"{self.path}: a size of what it returns follows no size of what it is given")


_now: dict[int, _OpaqueCall] = {}
"""While a model is traced: its calls of opaque modules, by number."""


@torch.library.register_fake("pplan::opaque_call", lib=_library)  # type: ignore[untyped-decorator]
def _like_results(number: int, inputs: Sequence[Tensor]) -> list[Tensor]:
    return _now[number].like_results(inputs)


class OpaqueCalls:
    """The calls of the modules `paths` of copies of one model."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = tuple(paths)
        self._calls: list[_OpaqueCall] = []

    def watch(self, model: nn.Module, inputs: Sequence[ModelInput]) -> None:
        """Runs `model`, which it may change, once on each of two inputs of different batch sizes."""
        runs: list[list[_OpaqueCall]] = []
        for example in inputs:
            calls: list[_OpaqueCall] = []
            with _forwards(model, self._paths, lambda path, forward: _noting(path, forward, calls)):  # noqa: B023
                example.clone().call(model)
            runs.append(calls)
        if [call.path for call in runs[0]] != [call.path for call in runs[1]]:
            raise CannotBeOpaque("the modules are called in another order at another batch size")
        for first, second in zip(*runs, strict=True):
            if any(a != b for a, b in zip(first.leaves, second.leaves, strict=True) if isinstance(a, _PLAIN)):
                raise CannotBeOpaque(f"{first.path} returns other numbers at another batch size")
            first.arguments += second.arguments
            first.results += second.results
            self._calls.append(first)

    @contextlib.contextmanager
    def inside(self, model: nn.Module) -> Iterator[None]:
        """While it lasts, `model` can be traced: the modules are not gone into."""
        numbers = iter(range(len(self._calls)))

        def opaque(path: str, _: Any) -> Any:
            def forward(*args: Any, **kwargs: Any) -> Any:
                number = next(numbers)
                call = self._calls[number]
                if call.path != path:
                    raise CannotBeOpaque(f"{path} is called in another order while it is traced")
                return _traced(call, number, args, kwargs)

            return forward

        _now.update(enumerate(self._calls))
        try:
            with _forwards(model, self._paths, opaque):
                yield
        finally:
            _now.clear()

    def write_calls(self, graph: fx.Graph, regions: Sequence[fx.GraphModule]) -> None:
        """Replaces the operations by calls of the modules, in place. Raises CannotBeOpaque where one is in a
        region: that belongs to the graph, and not to the model, whose module it would call."""
        operation = torch.ops.pplan.opaque_call.default
        if any(node.target is operation for region in regions for node in region.graph.nodes):
            raise CannotBeOpaque("a module that cannot be traced runs without gradients, or under autocast")
        for node in list(graph.nodes):
            if node.target is operation:
                self._write(graph, node, self._calls[node.args[0]])

    def _write(self, graph: fx.Graph, node: fx.Node, call: _OpaqueCall) -> None:
        operands: Any = node.args[1]
        tensors = iter(operands)
        assert call.spec is not None
        leaves = [
            next(tensors) if is_tensor else leaf
            for leaf, is_tensor in zip(call.constants, call.given_tensors, strict=True)
        ]
        args, kwargs = tree_unflatten(leaves, call.spec)
        alone = call.structure is not None and call.structure.spec.is_leaf() and call.are_tensors == [True]
        alone = alone and call.structure is not None and call.structure.objects == (None,)
        with graph.inserting_before(node):
            call_node = graph.create_node("call_module", call.path, args, kwargs)
            call_node.meta = dict(node.meta)
            call_node.meta["value_kind"] = "tensor" if alone else "other"
            parts = call_node if alone else graph.call_function(tensors_in, (call_node,))
            if not alone:
                parts.meta = {**node.meta, "value_kind": "other"}
        for user in list(node.users):
            if user.target is not operator.getitem:
                raise CannotBeOpaque(f"{call.path}: its outputs are used as one")
            if alone:
                call_node.meta["val"] = user.meta.get("val")
                user.replace_all_uses_with(call_node)
                graph.erase_node(user)
            else:
                user.args = (parts, user.args[1])
        graph.erase_node(node)


def tensors_in(value: Any) -> tuple[Tensor, ...]:
    """In a graph: what a module returned, without what is no tensor."""
    return tuple(leaf for leaf in flat(value)[0] if isinstance(leaf, Tensor))


def _traced(call: _OpaqueCall, number: int, args: Any, kwargs: Any) -> Any:
    leaves, call.spec = tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    call.given_tensors = [isinstance(leaf, Tensor) for leaf in leaves]
    call.constants = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    for leaf in (*call.constants, *call.leaves):
        if not isinstance(leaf, _PLAIN):
            raise CannotBeOpaque(f"{call.path} takes or returns an object of type {type(leaf).__name__}")
    if not tensors or call.structure is None:
        raise CannotBeOpaque(f"{call.path} is given no tensor")
    results = iter(torch.ops.pplan.opaque_call(number, tensors))
    return call.structure(
        [
            next(results) if is_tensor else leaf
            for leaf, is_tensor in zip(call.leaves, call.are_tensors, strict=True)
        ]
    )


def _noting(path: str, forward: Any, calls: list[_OpaqueCall]) -> Any:
    def noting(*args: Any, **kwargs: Any) -> Any:
        call = _OpaqueCall(path)
        calls.append(call)
        output = forward(*args, **kwargs)
        call.note(args, kwargs, output)
        return output

    return noting


@contextlib.contextmanager
def _forwards(model: nn.Module, paths: Sequence[str], change: Any) -> Iterator[None]:
    """While it lasts, the modules have `change` of their forward."""
    modules = [(path, model.get_submodule(path)) for path in paths]
    before = [vars(module).get("forward") for _, module in modules]
    for path, module in modules:
        module.forward = change(path, module.forward)
    try:
        yield
    finally:
        for (_, module), own in zip(modules, before, strict=True):
            del module.forward
            if own is not None:
                module.forward = own
