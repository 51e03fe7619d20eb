"""torch.export's result as a graph that torch.fx could have traced: without checks, for any device."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from .graph import TracedGraph, check_value, device_of
from .torch_private import (
    EXPORT_CHECKS,
    EXPORT_GUARDS,
    EXPORT_NO_MODULE,
    TreeSpec,
    tree_flatten,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
)
from .trial import NoOtherGraph
from .user_model import ModelInput, Structure, flat

# torch.export takes modules apart; here the operations of a leaf module become one call of it again.
#
# Then train() and eval() act on it, its hooks run, and it is known as what it is.


def restore_leaf_calls(graph: fx.Graph, model: nn.Module, apart: Collection[nn.Module] = ()) -> None:
    """Replaces, in place, the nodes of each call of a leaf module by one `call_module` node.

    A leaf has no children and its forward one argument, and nothing else; its nodes take one tensor besides
    its own parameters and buffers, and give one. Others stay as they are, and those of `apart`. `model` is
    what was traced.
    Nodes carry torch.export's `nn_module_stack` and `val`, and `value_kind`.
    """
    places = {node: place for place, node in enumerate(graph.nodes)}
    for key, nodes in _by_call(graph).items():
        path = _innermost(nodes[0])[1]
        leaf = _leaf(model, path)
        if leaf is not None and leaf not in apart:
            call = _ModuleCall(graph, model, leaf, nodes, places)
            if call.is_whole:
                call.make(path, key)


def alias_leaf_inputs(model: nn.Module) -> set[nn.Module]:
    """Before `model` is traced: every leaf is called with an alias of its input. The set that it returns will
    hold, when it was, the leaves that returned something else than a tensor.

    An operation that returns its input itself (dropout in eval, `to` the dtype it has) would otherwise stand
    for that input everywhere behind it: `x + dropout(x)` would be traced as `y = dropout(x); y + y`.
    """

    def aliased(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map_only(Tensor, torch.ops.aten.alias.default, (args, kwargs))

    modules: set[nn.Module] = set()

    def note(module: nn.Module, _: Any, output: Any) -> None:
        if not isinstance(output, Tensor):
            modules.add(module)

    for module in model.modules():
        if not any(True for _ in module.children()):
            module.register_forward_pre_hook(aliased, with_kwargs=True)
            module.register_forward_hook(note)
    return modules


def drop_aliases(graph: fx.Graph) -> None:
    """Drops the aliases of the inputs of leaf modules whose calls could not be restored."""
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.alias.default:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def module_path(node: fx.Node) -> str:
    """The name of the innermost module whose forward the node ran in; `@1` ends that of its second call."""
    key, path = _innermost(node)
    return path + ("@" + key.rpartition("@")[2] if "@" in key else "")


def modules_around(node: fx.Node) -> list[str]:
    """The names of the modules whose forward the node ran in, outermost first."""
    stored: list[str] | None = node.meta.get("modules_around")
    return stored or [path for _, path in _stack(node)]


def attribute(module: nn.Module, path: str) -> Any:
    """What a dotted name leads to; None where it leads nowhere."""
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part, None)
    return value


def _innermost(node: fx.Node) -> tuple[str, str]:
    """torch.export's key of the call and the module's path."""
    return (_stack(node) or [("", "")])[-1]


def _stack(node: fx.Node) -> list[tuple[str, str]]:
    """As torch.export writes it down: passes that add nodes leave a placeholder instead of a path."""
    calls = [(key, path) for key, (path, _) in node.meta.get("nn_module_stack", {}).items()]
    return [("", "") if path.startswith(EXPORT_NO_MODULE) else (key, path) for key, path in calls]


def _by_call(graph: fx.Graph) -> dict[str, list[fx.Node]]:
    calls: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        key, path = _innermost(node)
        if path and node.op in ("call_function", "call_module") and node.meta["value_kind"] != "size":
            calls.setdefault(key, []).append(node)
    return calls


def _leaf(model: nn.Module, path: str) -> nn.Module | None:
    module = attribute(model, path)
    if not isinstance(module, nn.Module) or any(True for _ in module.children()):
        return None
    parameters = list(inspect.signature(module.forward).parameters.values())
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return module if len(parameters) == 1 and parameters[0].kind in plain else None


def _is_tensor(node: fx.Node) -> bool:
    return node.meta.get("value_kind") == "tensor"


class _ModuleCall:
    """The nodes of one call of a leaf, and what passes between them and the others."""

    def __init__(
        self,
        graph: fx.Graph,
        model: nn.Module,
        leaf: nn.Module,
        nodes: list[fx.Node],
        places: dict[fx.Node, int],
    ) -> None:
        self._graph, self._model = graph, model
        self._own = {id(tensor) for tensor in (*leaf.parameters(), *leaf.buffers())}
        self._places = places
        self._last = nodes[-1]
        self._inside = self._with_sizes(nodes)
        self._nodes = sorted(self._inside, key=self._places.__getitem__)
        self._inputs = list(dict.fromkeys(self._outer_inputs()))
        self._outputs = [node for node in self._nodes if not self._inside.issuperset(node.users)]

    @property
    def is_whole(self) -> bool:
        if len(self._inputs) != 1 or len(self._outputs) != 1:
            return False
        source, output = self._inputs[0], self._outputs[0]
        return (
            _is_tensor(source)
            and _is_tensor(output)
            and self._places[source] < min(self._places[node] for node in self._nodes)
            and all(
                self._places[user] > self._places[self._last]
                for user in output.users
                if user not in self._inside
            )
        )

    def make(self, path: str, key: str) -> None:
        output = self._outputs[0]
        with self._graph.inserting_after(self._last):
            call = self._graph.create_node("call_module", path, (self._inputs[0],))
        self._places[call] = self._places[self._last]
        around = modules_around(output)
        call.meta = {**output.meta, "nn_module_stack": {key: (path, "")}, "modules_around": around}
        output.replace_all_uses_with(call)
        for node in reversed(self._nodes):
            self._graph.erase_node(node)

    def _with_sizes(self, nodes: list[fx.Node]) -> set[fx.Node]:
        """With the sizes of what is computed inside: torch.export does not tell where they were asked for."""
        inside = set(nodes)
        node = nodes[0]
        while node is not self._last:
            is_size = node.meta.get("value_kind") == "size"
            if is_size and not inside.isdisjoint(node.all_input_nodes):
                inside.add(node)
            node = node.next
        return inside

    def _outer_inputs(self) -> Iterable[fx.Node]:
        """Sizes come from the tensors, so they are none."""
        for node in self._nodes:
            for source in node.all_input_nodes:
                is_known = source in self._inside or source.meta.get("value_kind") in ("size", "device")
                if not is_known and not (source.op == "get_attr" and self._is_own(source)):
                    yield source

    def _is_own(self, node: fx.Node) -> bool:
        value = attribute(self._model, str(node.target))
        if isinstance(value, Tensor) and id(value) in self._own:
            return True
        # A constant that forward itself makes.
        return self._inside.issuperset(node.users) and not isinstance(value, nn.Parameter)


# What torch.export marks as run without gradients or under autocast becomes one call of a module again.

_SET_GRADIENTS = torch.ops.higher_order.wrap_with_set_grad_enabled
_AUTOCAST = torch.ops.higher_order.wrap_with_autocast


class GradientsSwitched(nn.Module):
    """Runs `body` with gradients on or off."""

    def __init__(self, body: nn.Module, enabled: bool) -> None:
        super().__init__()
        self.body, self.enabled = body, enabled

    def forward(self, *inputs: Any) -> Any:
        with torch.set_grad_enabled(self.enabled):
            return self.body(*inputs)


class AutocastSwitched(nn.Module):
    """Runs `body` under autocast, or without, on the device that its first tensor is on."""

    def __init__(self, body: nn.Module, dtype: torch.dtype | None, enabled: bool, cache: bool | None) -> None:
        super().__init__()
        self.body, self.dtype, self.enabled, self.cache = body, dtype, enabled, cache

    def forward(self, *inputs: Any) -> Any:
        kind = next((value.device.type for value in inputs if isinstance(value, Tensor)), "cpu")
        with torch.autocast(kind, dtype=self.dtype, enabled=self.enabled, cache_enabled=self.cache):
            return self.body(*inputs)


def replace_regions(
    module: fx.GraphModule, needing: Collection[fx.Node] = (), *, gradients_enabled: bool = True
) -> None:
    """Replaces the regions in `module`'s graph, in place; `needing`: placeholders that need gradients.

    Where nothing in it needs a gradient, or the switch changes nothing, a region is opened: its operations
    join the graph. Otherwise it stays whole, and is a call of a module of this file, added to `module`.
    """
    needing = _needing_gradients(module.graph, needing)
    for node in list(module.graph.nodes):
        if node.target is _SET_GRADIENTS:
            enabled, body, *operands = node.args
            inner = _body(module, body, operands)
            wanting = _placeholders_of(inner, operands, needing)
            is_idle = enabled == gradients_enabled or not _needing_gradients(inner.graph, wanting)
            replace_regions(inner, wanting, gradients_enabled=gradients_enabled if is_idle else enabled)
            if is_idle and all(user.target is operator.getitem for user in node.users):
                _open(module, node, inner, operands)
            else:
                _call(module, node, GradientsSwitched(inner, enabled), operands)
        elif node.target is _AUTOCAST:
            _, dtype, enabled, cache, body, *operands = node.args
            inner = _body(module, body, operands)
            replace_regions(
                inner, _placeholders_of(inner, operands, needing), gradients_enabled=gradients_enabled
            )
            _call(module, node, AutocastSwitched(inner, dtype, enabled, cache), operands)


def bodies(module: nn.Module) -> list[fx.GraphModule]:
    """The graphs of the regions that stayed whole, at any depth."""
    return [
        inner.body
        for inner in module.modules()
        if isinstance(inner, GradientsSwitched | AutocastSwitched) and isinstance(inner.body, fx.GraphModule)
    ]


def _free_name(module: nn.Module, word: str) -> str:
    """`word_0`, or the next number that `module` has no attribute of."""
    number = 0
    while hasattr(module, f"{word}_{number}"):
        number += 1
    return f"{word}_{number}"


def _needing_gradients(graph: fx.Graph, inputs: Collection[fx.Node]) -> set[fx.Node]:
    """Nodes that a parameter or one of `inputs` leads to by floating tensors."""
    needing = set(inputs)
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op == "get_attr":
            leads = isinstance(value, Tensor) and value.requires_grad
        else:
            leads = not needing.isdisjoint(node.all_input_nodes)
        is_floating = not isinstance(value, Tensor) or value.is_floating_point() or value.is_complex()
        if leads and is_floating and not (node.target is _SET_GRADIENTS and not node.args[0]):
            needing.add(node)
    return needing


def _body(module: fx.GraphModule, node: fx.Node, operands: list[Any]) -> fx.GraphModule:
    body = attribute(module, str(node.target))
    for placeholder, operand in zip(_placeholders(body.graph), operands, strict=True):
        # torch.export does not say of a region's inputs what they are.
        if isinstance(operand, fx.Node) and "val" in operand.meta:
            placeholder.meta.setdefault("val", operand.meta["val"])
    return body  # type: ignore[no-any-return]


def _placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def _placeholders_of(body: fx.GraphModule, operands: list[Any], values: Collection[fx.Node]) -> list[fx.Node]:
    pairs = zip(_placeholders(body.graph), operands, strict=True)
    return [placeholder for placeholder, operand in pairs if operand in values]


def _open(module: fx.GraphModule, node: fx.Node, body: fx.GraphModule, operands: list[Any]) -> None:
    copies: dict[fx.Node, Any] = dict(zip(_placeholders(body.graph), operands, strict=True))
    results: Any = ()
    with module.graph.inserting_before(node):
        for inner in body.graph.nodes:
            if inner.op == "output":
                results = fx.node.map_arg(inner.args[0], copies.__getitem__)
            elif inner.op != "placeholder":
                copies[inner] = module.graph.node_copy(inner, copies.__getitem__)
                if inner.op in ("get_attr", "call_module"):
                    copies[inner].target = _taken_over(module, body, str(inner.target))
    for user in list(node.users):
        user.replace_all_uses_with(results[user.args[1]])
        module.graph.erase_node(user)
    module.graph.erase_node(node)


def _taken_over(module: fx.GraphModule, body: fx.GraphModule, target: str) -> str:
    name = _free_name(module, "of_region")
    setattr(module, name, attribute(body, target))
    return name


def _call(module: fx.GraphModule, node: fx.Node, region: nn.Module, operands: list[Any]) -> None:
    name = _free_name(module, "region")
    module.add_submodule(name, region)
    with module.graph.inserting_before(node):
        call = module.graph.call_module(name, tuple(operands))
    call.meta = dict(node.meta)
    node.replace_all_uses_with(call)
    module.graph.erase_node(node)


# Modules that torch.export cannot look into: each call of one is an operation of its own in the graph.
#
# What the call returns is told by two real runs of the model at different batch sizes: how many tensors, of
# which dtypes, and which of their sizes move with the batch.

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


# Numbers that the model's Python code takes out of a tensor, as in `if mask.all():`.
#
# torch.export does not know them. A real run tells what they were; the trace goes on with that, and the layer
# that has the tensor compares at every run.

_library.define("read_value(int number, Tensor tensor) -> ()")  # type: ignore[no-untyped-call]
torch.library.register_fake("pplan::read_value", lambda number, tensor: None, lib=_library)  # noqa: ARG005
fx.node.has_side_effect(torch.ops.pplan.read_value.default)
_READS: dict[Any, str] = {
    getattr(Tensor, name): name
    for name in ("__bool__", "__int__", "__float__", "__index__", "item", "tolist")
}
_Place = tuple[str, int]


class _WhileReading(TorchFunctionMode):
    """Calls `read` instead of what takes a number out of a tensor, with the line that asks for it."""

    def __init__(self, read: Callable[[Any, Tensor, _Place], Any]) -> None:
        super().__init__()
        self._read = read

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _READS:
            return func(*args, **(kwargs or {}))
        frame = inspect.currentframe()
        while frame is not None and frame.f_globals.get("__name__", "").startswith(_OF_TRACING):
            frame = frame.f_back
        place = ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
        return self._read(func, args[0], place)


_OF_TRACING = (__name__, "torch.fx", "torch.export", "torch.overrides", "torch.utils", "torch._")


class ValueReads:
    """The numbers that copies of one model take out of tensors."""

    def __init__(self, *, of_the_input: bool = False) -> None:
        """`of_the_input`: answers (True, False) may depend on the samples, and on what is trained."""
        self._of_the_input = of_the_input
        self._values: dict[_Place, list[Any]] = {}
        self._calls: list[tuple[str, Any, _Place]] = []

    def watch(self, model: nn.Module, inputs: Sequence[ModelInput]) -> None:
        """Run `model`, which it may change, on different inputs, which must give the same."""
        runs: list[dict[_Place, list[Any]]] = []
        for example in inputs:
            values: dict[_Place, list[Any]] = {}

            def note(
                read: Any, tensor: Tensor, place: _Place, values: dict[_Place, list[Any]] = values
            ) -> Any:
                values.setdefault(place, []).append(read(tensor))
                return values[place][-1]

            with _WhileReading(note):
                example.clone().call(model)
            runs.append(values)
        if any(run != runs[0] for run in runs):
            raise CannotBeOpaque("its forward takes other numbers out of tensors on another input")
        if not runs[0]:
            raise NoOtherGraph("its forward takes no numbers out of tensors", "Nothing is to be done.")
        self._values = runs[0]

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """While it lasts, a traced model is given the numbers of the run."""
        left = {place: iter(values) for place, values in self._values.items()}

        def replay(read: Any, tensor: Tensor, place: _Place) -> Any:
            for value in itertools.islice(left.get(place, iter(())), 1):
                torch.ops.pplan.read_value(len(self._calls), tensor)
                self._calls.append((_READS[read], value, place))
                return value
            return read(tensor)

        with _WhileReading(replay) if left else contextlib.nullcontext():
            yield

    def write_checks(self, graph: fx.Graph, batches: Collection[fx.Node]) -> None:
        """Replace the operations by comparisons, in place. `batches`: inputs that hold the samples.

        Raises CannotBeOpaque where a number is another at the next step: it is random, the model writes it,
        or, unless it is an answer and that was asked for, it is trained or made of the samples.
        """
        writes = [node.args[0] for node in graph.nodes if _packet(node) == "copy_"]
        written = {node.target for node in writes if isinstance(node, fx.Node)}
        for node in [n for n in graph.nodes if n.target is torch.ops.pplan.read_value.default]:
            name, value, (file, line) = self._calls[node.args[0]]
            sources = _ancestors(node)
            may_move = isinstance(value, bool) and self._of_the_input
            for source in sources:
                is_attribute = source.op == "get_attr"
                is_other = torch.Tag.nondeterministic_seeded in getattr(source.target, "tags", ())
                is_other |= is_attribute and source.target in written
                moves = source in batches or (is_attribute and source.meta["val"].requires_grad)
                if is_other or (moves and not may_move):
                    raise CannotBeOpaque(f"its forward depends on numbers in tensors ({file}:{line})")
            node.target, node.args = check_value, (node.args[1], name, value)


def _ancestors(node: fx.Node) -> set[fx.Node]:
    """What the numbers in the tensors of the node come from; sizes lead on to nothing."""
    ancestors, pending = set[fx.Node](), [node]
    while pending:
        sources = [n for n in pending.pop().all_input_nodes if _value_kind(n) not in ("size", "device")]
        pending += [source for source in sources if source not in ancestors]
        ancestors.update(sources)
    return ancestors


# torch.export's result as a graph that torch.fx could have traced: without checks, for any device.

_CHECKS = (
    *EXPORT_CHECKS,
    "sym_constrain_range",
    "sym_constrain_range_for_size",
)


@dataclass(frozen=True, eq=False)
class ExportedModule:
    """What torch.export made of a copy of the model, `traced`."""

    module: fx.GraphModule
    traced: nn.Module
    """The copy: its parameters have the graph's names, and its devices the graph's."""
    device: torch.device
    inputs: tuple[fx.Node, ...]
    finish: Callable[[Any], Any] | None
    no_tensors: Set[nn.Module]
    """Modules of `traced` that return something else than a tensor."""
    calls: OpaqueCalls
    reads: ValueReads
    batches: Set[fx.Node]
    """The inputs that hold the samples."""
    modes: Mapping[str, str]
    """Modules of `traced` whose mode was read, with the line that did."""


def rebuild_graph(model: nn.Module, export: ExportedModule, opaque: Collection[str] = ()) -> TracedGraph:
    """The graph of `model`. `opaque`: names of modules of which each call stays one operation."""
    module = export.module
    replace_regions(module)
    for body in (module, *bodies(module)):
        _drop_checks(body.graph)
        _join_samples(body.graph)
        _write_early(body.graph)
        _ask_devices(body.graph, export.device)
    for node in module.graph.nodes:
        node.meta["value_kind"] = _value_kind(node)
    export.calls.write_calls(module.graph, bodies(module))
    export.reads.write_checks(module.graph, export.batches)
    restore_leaf_calls(
        module.graph, export.traced, {*export.no_tensors, *map(export.traced.get_submodule, opaque)}
    )
    drop_aliases(module.graph)
    for body in bodies(module):
        drop_aliases(body.graph)
        body.recompile()
    _drop_unused_sizes(module.graph)
    return _rebuilt(model, export)


def _rebuilt(model: nn.Module, export: ExportedModule) -> TracedGraph:
    """The graph as torch.fx would have left it: inputs first, attributes where they are first asked for."""
    graph, constants = fx.Graph(), nn.Module()
    copies: dict[fx.Node, fx.Node] = {}
    renamed: dict[str, str] = {}
    paths: dict[fx.Node, str] = {}

    def copied_over(node: fx.Node) -> fx.Node:
        if node in copies:
            return copies[node]
        target, name = node.target, node.name
        if node.op in ("get_attr", "call_module"):
            target = _target(str(target), model, export.module, constants, renamed)
            name = target.replace(".", "_")
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), copied_over)
        copy = copies[node] = graph.create_node(node.op, target, args, kwargs, name, node.type)
        copy.meta = {"value_kind": node.meta["value_kind"], "modules_around": modules_around(node)}
        paths[copy] = module_path(node)
        return copy

    for placeholder in export.inputs:
        if placeholder.users:
            copied_over(placeholder)
    for node in export.module.graph.nodes:
        if node.op == "output":
            leaves = node.args[0] if export.finish is not None else node.args[0][0]
            graph.output(fx.node.map_arg(leaves, copied_over))
        elif node.op not in ("get_attr", "placeholder"):
            copied_over(node)
    graph.lint()
    inputs = tuple(copies.get(node) for node in export.inputs)
    return TracedGraph(graph, inputs, constants, paths, export.finish, modes=export.modes)


def _target(
    target: str, model: nn.Module, traced: nn.Module, constants: nn.Module, renamed: dict[str, str]
) -> str:
    """The model's own name; or, where it has none, a new one in `constants`."""
    if isinstance(attribute(model, target), Tensor | nn.Module):
        return target
    if target not in renamed:
        name = renamed[target] = next(
            name
            for name in (f"exported_{number}" for number in itertools.count(len(renamed)))
            if not hasattr(model, name)
        )
        value = attribute(traced, target)
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            constants.register_buffer(name, value, persistent=False)
        else:
            setattr(constants, name, value)
    return renamed[target]


def _drop_checks(graph: fx.Graph) -> None:
    """Erases assertions, whose values hold at the traced batch size, and the sizes that only they ask for."""
    for node in list(graph.nodes):
        is_guard = node.op == "call_module" and str(node.target).startswith(EXPORT_GUARDS)
        if is_guard or _packet(node) in _CHECKS:
            graph.erase_node(node)
    _drop_unused_sizes(graph)


def _drop_unused_sizes(graph: fx.Graph) -> None:
    """Erases numbers that nothing asks for; tensors stay, as eager code computes them too."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and _value_kind(node) in ("size", "device"):
            graph.erase_node(node)


def _join_samples(graph: fx.Graph) -> None:
    """Where a tensor is taken apart along dimension 0 and all parts are joined again, of which torch.export
    knows as many as the example has, that is one operation for any number."""
    for node in list(graph.nodes):
        parts: Any = node.args[0] if _packet(node) == "cat" and len(node.args) == 1 else ()
        apart: Any = parts[0].args[0] if parts and parts[0].target is operator.getitem else node
        in_order = [(part.target, part.args) for part in parts] == [
            (operator.getitem, (apart, index)) for index in range(len(apart.users))
        ]
        alone = all(len(part.users) == 1 for part in parts)
        if _packet(apart) == "unbind" and len(apart.args) == 1 and in_order and alone:
            with graph.inserting_before(node):
                joined = graph.call_function(torch.ops.aten.flatten.using_ints, (apart.args[0], 0, 1))
            joined.meta = dict(node.meta)
            node.replace_all_uses_with(joined)
            for unused in (node, *parts, apart):
                graph.erase_node(unused)


def _write_early(graph: fx.Graph) -> None:
    """Puts the writing of a buffer's new value, which torch.export leaves to the end, behind that value.

    Otherwise every cut between would hand it on. It stays where the buffer is read in between.
    """
    for write in [node for node in graph.nodes if _packet(node) == "copy_"]:
        buffer, value = write.args[:2]
        if not (isinstance(buffer, fx.Node) and isinstance(value, fx.Node) and buffer.op == "get_attr"):
            continue
        places = {node: place for place, node in enumerate(graph.nodes)}
        users = [user for node in graph.nodes if node.target == buffer.target for user in node.users]
        if all(user is write or places[user] <= places[value] for user in users):
            value.append(write)


def _ask_devices(graph: fx.Graph, device: torch.device) -> None:
    """Asks the first tensor given for its device wherever `device`, that of the trace, is baked in."""
    tensors = [node for node in graph.nodes if node.op == "placeholder" and _value_kind(node) == "tensor"]
    if not tensors:
        return
    for node in graph.nodes:
        if node.op == "call_function" and _packet(node) == "to" and _stays(node, device):
            node.kwargs = {key: value for key, value in node.kwargs.items() if key != "device"}
    with graph.inserting_after(tensors[-1]):
        device_node = graph.call_function(device_of, (tensors[0],))
    device_node.meta["val"] = device

    def changed(value: Any) -> Any:
        return device_node if isinstance(value, torch.device) and _is_same(value, device) else value

    for node in graph.nodes:
        if node.op == "call_function" and node is not device_node:
            node.args = fx.node.map_aggregate(node.args, changed)
            node.kwargs = fx.node.map_aggregate(node.kwargs, changed)
    if not device_node.users:
        graph.erase_node(device_node)


def _value_kind(node: fx.Node) -> str:
    """`tensor`, `size` (a number), `device` or `other`."""
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return "tensor"
    if isinstance(value, SymInt | SymFloat | SymBool | int | float):
        return "size"
    return "device" if isinstance(value, torch.device) else "other"


def _packet(node: fx.Node) -> str:
    """The operation without its overload: `to` of `aten.to.dtype_layout`."""
    packet = getattr(node.target, "overloadpacket", None)
    return packet.__name__ if packet is not None and node.op == "call_function" else ""


def _stays(node: fx.Node, device: torch.device) -> bool:
    """Whether what is moved is there already."""
    value, target = node.all_input_nodes[0].meta.get("val"), node.kwargs.get("device")
    return isinstance(value, Tensor) and _is_same(value.device, device) and _is_same(target, device)


def _is_same(device: object, other: torch.device) -> bool:
    """`cuda` is `cuda:0` where that is what the tensors are on."""
    if not isinstance(device, torch.device):
        return False
    return device.type == other.type and device.index in (None, other.index)
