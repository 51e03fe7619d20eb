"""torch.export's result as a graph that torch.fx could have traced: without checks, for any device."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor, fx, nn

from ..torch_internals import EXPORT_CHECKS, EXPORT_GUARDS
from .graph import TracedGraph
from .opaque_calls import OpaqueCalls
from .regions import bodies, replace_regions
from .remodule import attribute, drop_aliases, module_path, modules_around, restore_leaf_calls
from .size_recovery import device_of

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
