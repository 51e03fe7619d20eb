"""A model's computation as one graph, one run of it node by node, and the sizes that a part of it needs."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import flop_registry

from ..cost_models.errors import ModelError
from .torch_private import (
    CONVERSION,
    TorchDispatchMode,
    is_persistent,
    make_transient,
    tensor_version,
    tree_leaves,
    tree_map_only,
)
from .user_model import ModelInput, failing_as, layer_failure

# Sizes, devices and dtypes do not cross a cut: a layer computes them again from the tensors it is given.
#
# Both frontends leave nodes that compute such values: torch.fx `x.size(0)`, `x.shape`, `x.device`;
# torch.export
# `aten.sym_size.int`, arithmetic on it, and `device_of`. What the values are is not read from the graph but
# seen in trial runs at several batch sizes: a number that stays the same is a constant, one that moves with
# the batch is found in a dimension that moves with it.


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


def check_value(tensor: Tensor, read: str, expected: Any) -> None:
    """In a layer: raise ModelError where a number in a tensor is not what it was when the layer was made."""
    if isinstance(tensor, fx.Proxy):
        # torch.load traces a layer's code to have its graph.
        tensor.tracer.create_proxy("call_function", check_value, (tensor, read, expected), {})
    elif not tensor.is_meta and (number := getattr(tensor, read)()) != expected:
        raise ModelError(
            f"a number that forward takes out of a tensor is {number}; these layers were made for {expected}",
            "Make the layers anew, with an example that has it, or name the module that reads it a layer.",
        )


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


# A model's computation as one graph, whichever tool traced it, and a module that runs such a graph.

AROUND = "torch.export around "
"""What `TracedGraph.tool` begins with where modules are taken whole; their names follow."""


@dataclass(frozen=True, eq=False)
class TracedGraph:
    """The graph of a model's forward; its nodes stand in the order they run.

    What the nodes name (`get_attr`, `call_module`) are the model's own dotted names, or names in `constants`,
    so that a part of the graph can be bound to the model or to any copy of it.
    """

    graph: fx.Graph
    inputs: tuple[fx.Node | None, ...]
    """The placeholder of each tensor of the input, in the order of `ModelInput.tensors`; None: unused."""
    constants: nn.Module
    """Holds the tensors and modules that tracing itself made, which the model lacks."""
    paths: dict[fx.Node, str]
    """The innermost module whose forward each operation ran in ("": the model's own); a second call of a
    module ends with `@1`."""
    finish: Callable[[Any], Any] | None = None
    """Makes what the model returns of the output node's value; None: that is it."""
    recomputes: bool = False
    """Whether the model recomputes parts of itself (torch.utils.checkpoint), which the graph does not."""
    tool: str = "torch.fx"
    """What drew it, in words."""
    parts: Callable[[nn.Module], nn.Module] | None = None
    """Makes `constants` of the modules of a model, where they run some."""
    modes: Mapping[str, str] = field(default_factory=dict)
    """Modules whose `training` was read while it was drawn, or whose forward read it, with the line."""

    @property
    def fixed_modes(self) -> dict[str, str]:
        """Entries of `modes` with code in the graph, which computes as in the traced mode."""
        called = [str(node.target) for node in self.graph.nodes if node.op == "call_module"]
        return {path: line for path, line in self.modes.items() if not (path and is_inside(path, called))}

    def constants_of(self, model: nn.Module) -> nn.Module:
        """`constants` for a copy of the model."""
        return self.constants if self.parts is None else self.parts(model)


def is_inside(path: str, modules: Iterable[str]) -> bool:
    """Whether a module is one of `modules`, or inside one of them; by their names."""
    return any(f"{path}.".startswith(f"{module}.") for module in modules)


def module_around(traced: TracedGraph, node: fx.Node) -> str:
    """The innermost module that the operation ran in by the way that the model called it: what several blocks
    share goes by one name, and ran in each of them."""
    around = ""
    for path in node.meta.get("modules_around") or _stack(node):
        if around and not is_inside(path, [around]):
            break
        around = path or around
    return around or traced.paths.get(node, "").partition("@")[0]


def _stack(node: fx.Node) -> list[str]:
    """As torch.fx writes it down."""
    return [key.partition("@")[0] for key in node.meta.get("nn_module_stack", {})]


def graph_module(graph: fx.Graph, *sources: nn.Module, name: str = "GraphModule") -> fx.GraphModule:
    """Runs `graph` with what it names, each taken from the first of `sources` that has it.

    A buffer is part of the state where it is part of its source's. The mode is the first source's. In
    `graph`, which is the module's own from then on, names that a GraphModule keeps to itself are others.
    """
    naming = [node for node in graph.nodes if node.op in ("get_attr", "call_module")]
    targets = {node: str(node.target) for node in naming}
    having = {
        top: _first_having(top, sources) for top in (each.partition(".")[0] for each in targets.values())
    }
    root = nn.Module()
    root.training = sources[0].training
    for top, source in having.items():
        setattr(root, _allowed(top, having), getattr(source, top))
    for node, target in targets.items():
        top, dot, rest = target.partition(".")
        node.target = _allowed(top, having) + dot + rest
    module = fx.GraphModule(root, graph, name)
    for node, target in targets.items():
        if node.op == "get_attr":
            _keep_persistence(module, str(node.target), having[target.partition(".")[0]], target)
    return module


_OF_GRAPH_MODULES = frozenset(dir(fx.GraphModule(nn.Module(), fx.Graph()))).difference(dir(nn.Module()))
"""Such as `code` and `graph`, which a model may call modules of its own."""


def _allowed(top: str, used: Container[str]) -> str:
    """The name itself, or with underscores behind it."""
    if top in _OF_GRAPH_MODULES:
        top += "_"
        while top in used or top in _OF_GRAPH_MODULES:
            top += "_"
    return top


def find_attribute(target: str, *sources: nn.Module) -> Any:
    """The module or tensor of this dotted name, of the first of `sources` that has it."""
    value: Any = _first_having(target.partition(".")[0], sources)
    for part in target.split("."):
        value = getattr(value, part)
    return value


def _first_having(top: str, sources: tuple[nn.Module, ...]) -> nn.Module:
    return next((source for source in sources if hasattr(source, top)), sources[-1])


def _keep_persistence(module: nn.Module, target: str, source: nn.Module, own_target: str) -> None:
    """GraphModule registers every tensor that is no parameter as a buffer of the state."""
    path, _, field = target.rpartition(".")
    own_path, _, own_field = own_target.rpartition(".")
    owner, of_source = module.get_submodule(path), source.get_submodule(own_path)
    if owner is not of_source and not is_persistent(of_source, own_field):
        make_transient(owner, field)


# One run of a traced graph, node by node, and what it shows of the values that pass.

_CONVERSIONS = frozenset({"to", "type", "type_as", "float", "double", "half", "bfloat16", CONVERSION})


@dataclass(eq=False)
class GraphRun:
    """What a run found at each node. Storages are identified by numbers."""

    values: dict[fx.Node, Any] = field(default_factory=dict)
    """As `describe_tensors` returns them."""
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

        def failure(error: Exception) -> ModelError:
            path = self._traced.paths.get(node, "")
            name = str(node.target) if node.op == "call_module" else path or node.name
            first = next(_tensors((args, kwargs)), args[0] if args else None)
            return layer_failure(name, _kind(node, run), first, error)

        with failing_as(failure):
            if node.op == "call_method":
                return getattr(args[0], str(node.target))(*args[1:], **kwargs)
            return run(*args, **kwargs)

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
