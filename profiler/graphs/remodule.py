"""torch.export takes modules apart; here the operations of a leaf module become one call of it again.

Then train() and eval() act on it, its hooks run, and it is known as what it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..torch_internals import EXPORT_NO_MODULE, tree_map_only


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
