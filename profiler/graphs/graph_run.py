"""One run of a traced graph, node by node, and what it shows of the values that pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import flop_registry

from ..torch_internals import CONVERSION, TorchDispatchMode, tensor_version, tree_leaves
from ..user_model.failures import is_out_of_memory, layer_failure
from ..user_model.loaded_model import ModelInput
from .graph import TracedGraph, find_attribute
from .size_recovery import describe_tensors

_CONVERSIONS = frozenset({"to", "type", "type_as", "float", "double", "half", "bfloat16", CONVERSION})


@dataclass(eq=False)
class GraphRun:
    """What a run found at each node. Storages are identified by numbers."""

    values: dict[fx.Node, Any] = field(default_factory=dict)
    """As `size_recovery.describe_tensors` returns them."""
    same: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """Of nodes whose value is, in every mode, the very tensor of another: the first that had it."""
    storages: dict[fx.Node, frozenset[int]] = field(default_factory=dict)
    """Where the tensors of its value live, those shared with views included."""
    overwrites: dict[fx.Node, frozenset[int]] = field(default_factory=dict)
    """What the operation changed in place of what was there before it."""
    bytes: dict[fx.Node, int] = field(default_factory=dict)
    flops: dict[fx.Node, int] = field(default_factory=dict)
    """Of matrix products, convolutions and attention; empty where they were not counted."""
    writes: frozenset[str] = frozenset()
    """Buffers of the model that the run changed, or put others in place of, by each of their names."""
    output: Any = None
    """The graph's result, as `values` hold those of nodes."""


def run_graph(
    traced: TracedGraph, model: nn.Module, example: ModelInput, *, count_flops: bool = False
) -> GraphRun:
    """Runs the graph with the modules and parameters of `model`, where they are.

    Values are let go of after their last use. Raises ModelError that names the operation and the shape it was
    given, where one fails; where memory runs out, what the allocator raises.
    """
    runner = _Runner(traced, model, example)
    before = _versions(model)
    with runner.counter if count_flops else contextlib.nullcontext():
        run = runner.run()
    run.writes = frozenset(name for name, now in _versions(model).items() if before.get(name) != now)
    if not count_flops:
        run.flops.clear()
    return run


def _versions(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Of each buffer which tensor it is, and how often that was changed."""
    return {
        name: (id(buffer), tensor_version(buffer))
        for name, buffer in model.named_buffers(remove_duplicate=False)
    }


class _FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        count = flop_registry.get(getattr(func, "overloadpacket", None))
        self.total += int(count(*args, **(kwargs or {}), out_val=result)) if count is not None else 0
        return result


class _Runner:
    def __init__(self, traced: TracedGraph, model: nn.Module, example: ModelInput) -> None:
        self._traced, self._model, self._constants = traced, model, traced.constants_of(model)
        self._inputs = dict(zip(traced.inputs, example.tensors, strict=True))
        self._device = example.tensors[0].device
        self._now: dict[fx.Node, Any] = {}
        """Values that are still needed."""
        self._numbers: dict[int, tuple[int, StorageWeakRef]] = {}
        """By the address of a storage, which the reference keeps from being given to another."""
        self.record = GraphRun()
        self.counter = _FlopCounter()

    def run(self) -> GraphRun:
        unneeded = _unneeded_after(self._traced.graph)
        for node in self._traced.graph.nodes:
            if node.op == "output":
                self.record.output = describe_tensors(self._plain(node.args[0]))
                break
            before = self.counter.total
            self._note(node, *self._result(node))
            self.record.flops[node] = self.counter.total - before
            for done in unneeded.get(node, ()):
                del self._now[done]
        return self.record

    def _result(self, node: fx.Node) -> tuple[Any, frozenset[int]]:
        """The value, and what was overwritten for it."""
        if node.op == "placeholder":
            return self._inputs.get(node), frozenset()
        if node.op == "get_attr":
            value = find_attribute(str(node.target), self._model, self._constants)
            # A tensor that is neither parameter nor buffer stays behind when a model is moved to meta.
            on_meta = self._device.type == "meta" and isinstance(value, Tensor)
            return value.to("meta") if on_meta else value, frozenset()
        before = [(tensor, tensor_version(tensor)) for tensor in _tensors(list(self._now.values()))]
        value = self._call(node)
        changed = [tensor for tensor, version in before if tensor_version(tensor) != version]
        return value, self._storages(changed)

    def _call(self, node: fx.Node) -> Any:
        args, kwargs = self._plain(node.args), self._plain(node.kwargs)
        run = self._callable(node)
        try:
            if node.op == "call_method":
                return getattr(args[0], str(node.target))(*args[1:], **kwargs)
            return run(*args, **kwargs)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            path = self._traced.paths.get(node, "")
            name = str(node.target) if node.op == "call_module" else path or node.name
            first = next(_tensors((args, kwargs)), args[0] if args else None)
            raise layer_failure(name, _kind(node, run), first, error) from error

    def _plain(self, argument: Any) -> Any:
        """Values for nodes; fx keeps lists that cannot be changed, which functions may want to."""
        if isinstance(argument, fx.Node):
            return self._now[argument]
        if isinstance(argument, slice):
            return slice(*map(self._plain, (argument.start, argument.stop, argument.step)))
        if isinstance(argument, list):
            return [self._plain(part) for part in argument]
        if isinstance(argument, dict):
            return {key: self._plain(part) for key, part in argument.items()}
        if isinstance(argument, tuple) and not isinstance(argument, torch.Size):
            parts = [self._plain(part) for part in argument]
            return type(argument)(*parts) if hasattr(argument, "_fields") else tuple(parts)
        return argument

    def _callable(self, node: fx.Node) -> Any:
        if node.op == "call_module":
            return find_attribute(str(node.target), self._model, self._constants)
        return node.target

    def _note(self, node: fx.Node, value: Any, overwritten: frozenset[int]) -> None:
        self.record.values[node] = describe_tensors(value)
        self.record.overwrites[node] = overwritten
        self.record.storages[node] = self._storages(_tensors(value))
        self.record.bytes[node] = sum(
            tensor.nbytes for tensor in {id(t): t for t in _tensors(value)}.values()
        )
        if isinstance(value, Tensor):
            source = next((n for n in node.all_input_nodes if self._now.get(n) is value), None)
            if source is not None and (overwritten or self._is_same_in_every_mode(node)):
                self.record.same[node] = self.record.same.get(source, source)
        self._now[node] = value

    def _is_same_in_every_mode(self, node: fx.Node) -> bool:
        """A dropout that hands its input on does not in the other mode, nor a conversion under autocast."""
        if node.op == "call_module":
            return type(self._callable(node)) is nn.Identity
        return _name(node.target).partition(".")[0] not in _CONVERSIONS

    def _storages(self, tensors: Any) -> frozenset[int]:
        return frozenset(self._number(tensor) for tensor in tensors)

    def _number(self, tensor: Tensor) -> int:
        try:
            reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        except (RuntimeError, NotImplementedError):
            # Sparse tensors, and some subclasses, have none.
            return -id(tensor)
        return self._numbers.setdefault(reference.cdata, (len(self._numbers), reference))[0]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    else:
        yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def _kind(node: fx.Node, run: Any) -> str:
    if node.op == "call_module":
        return type(run).__name__
    return _name(run)


def _name(target: Any) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


def _unneeded_after(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """After each node, the values that nothing later takes."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    unneeded: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op != "output":
            last = max((node, *node.users), key=order.__getitem__)
            unneeded.setdefault(last, []).append(node)
    return unneeded
