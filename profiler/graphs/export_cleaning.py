"""What torch.export bakes into a graph and a profile has no use for: checks, and the device of the trace."""

from __future__ import annotations

from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor, fx

from ..torch_internals import EXPORT_CHECKS, EXPORT_GUARDS
from .size_recovery import device_of

_CHECKS = (
    *EXPORT_CHECKS,
    "sym_constrain_range",
    "sym_constrain_range_for_size",
)


def drop_checks(graph: fx.Graph) -> None:
    """Erases assertions, whose values hold at the traced batch size, and the sizes that only they ask for."""
    for node in list(graph.nodes):
        is_guard = node.op == "call_module" and str(node.target).startswith(EXPORT_GUARDS)
        if is_guard or _packet(node) in _CHECKS:
            graph.erase_node(node)
    drop_unused_sizes(graph)


def drop_unused_sizes(graph: fx.Graph) -> None:
    """Erases numbers that nothing asks for; tensors stay, as eager code computes them too."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and value_kind(node) in ("size", "device"):
            graph.erase_node(node)


def write_early(graph: fx.Graph) -> None:
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


def ask_devices(graph: fx.Graph, device: torch.device) -> None:
    """Asks the first tensor given for its device wherever `device`, that of the trace, is baked in."""
    tensors = [node for node in graph.nodes if node.op == "placeholder" and value_kind(node) == "tensor"]
    if not tensors:
        return
    for node in graph.nodes:
        if node.op == "call_function" and _packet(node) == "to" and _stays(node, device):
            node.kwargs = {key: value for key, value in node.kwargs.items() if key != "device"}
    with graph.inserting_after(tensors[-1]):
        asked = graph.call_function(device_of, (tensors[0],))
    asked.meta["val"] = device

    def changed(value: Any) -> Any:
        return asked if isinstance(value, torch.device) and _is_same(value, device) else value

    for node in graph.nodes:
        if node.op == "call_function" and node is not asked:
            node.args = fx.node.map_aggregate(node.args, changed)
            node.kwargs = fx.node.map_aggregate(node.kwargs, changed)
    if not asked.users:
        graph.erase_node(asked)


def value_kind(node: fx.Node) -> str:
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
    value, wanted = node.all_input_nodes[0].meta.get("val"), node.kwargs.get("device")
    return isinstance(value, Tensor) and _is_same(value.device, device) and _is_same(wanted, device)


def _is_same(device: object, other: torch.device) -> bool:
    """`cuda` is `cuda:0` where that is what the tensors are on."""
    if not isinstance(device, torch.device):
        return False
    return device.type == other.type and device.index in (None, other.index)
