"""The order in which a graph's operations run, with what depends on no input put next to its first user."""

from __future__ import annotations

import operator
from typing import Any

from torch import Tag, fx

from ..torch_internals import OpOverload
from .graph_run import GraphRun

_RANDOM = ("rand", "dropout", "bernoulli", "normal", "multinomial", "poisson", "exponential", "uniform")
"""In the names of functions that draw random numbers: they keep their order, so that seeds mean the same."""


def operations(graph: fx.Graph, run: GraphRun) -> list[fx.Node]:
    """The nodes that compute, in an order that gives the same results as the graph's own.

    Parts of a tuple are taken out of it at once, so that tensors are what is passed on. A table that is
    computed early from no input, and used late, is computed late: otherwise every cut between would hand it
    on. It stays where it is when something that it reads is overwritten in between.
    """
    order = _parts_first([n for n in graph.nodes if n.op not in ("placeholder", "get_attr", "output")], run)
    place = {node: index for index, node in enumerate(order)}
    fed = fed_by_inputs(graph, run)
    anchors: dict[fx.Node, int] = {}
    for node in reversed(order):
        own = place[node]
        first = min((anchors[user] for user in node.users if user in anchors), default=own)
        movable = node not in fed and first > own and _may_move(node, order[own + 1 : first], run)
        anchors[node] = first if movable else own
    return sorted(order, key=lambda node: (anchors[node], place[node]))


def fed_by_inputs(graph: fx.Graph, run: GraphRun) -> set[fx.Node]:
    """The nodes that a tensor of the input leads to by way of tensors: sizes lead on to nothing."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        sources = (source for source in node.all_input_nodes if run.storages.get(source))
        if node.op == "placeholder" or any(source in found for source in sources):
            found.add(node)
    return found


def _parts_first(nodes: list[fx.Node], run: GraphRun) -> list[fx.Node]:
    order: dict[fx.Node, None] = {}

    def add(node: fx.Node) -> None:
        order[node] = None
        if isinstance(run.values[node], tuple | list) and run.storages[node]:
            for user in node.users:
                if _takes_a_part(user) and user not in order:
                    add(user)

    for node in nodes:
        if node not in order:
            add(node)
    return list(order)


def _takes_a_part(node: fx.Node) -> bool:
    return node.target is operator.getitem and not isinstance(node.args[1], fx.Node)


def _may_move(node: fx.Node, over: list[fx.Node], run: GraphRun) -> bool:
    if node.op == "call_module" or run.overwrites[node] or not run.storages[node] or is_random(node.target):
        return False
    read = run.storages[node].union(*(run.storages[source] for source in node.all_input_nodes))
    return not any(run.overwrites[other] & read for other in over)


def is_random(target: Any) -> bool:
    """Whether the function draws random numbers."""
    if isinstance(target, OpOverload):
        return Tag.nondeterministic_seeded in target.tags
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return any(word in name for word in _RANDOM)
