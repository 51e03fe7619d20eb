"""What torch.export marks as run without gradients or under autocast becomes one call of a module again."""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx, nn

from .remodule import attribute

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
