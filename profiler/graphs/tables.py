"""Tables: what a model computes of buffers and sizes alone, as rotary embeddings, for many layers.

They need not cross a cut. In the order in which a graph's operations run, what depends on no input comes next
to its first user. What is cheap to compute is computed again behind the cut: exactly the same, as nothing
that it comes from is trained, random or changed.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

from torch import Tag, fx

from ..operator_internals import OpOverload
from .graph_run import GraphRun
from .trial import Trial

_WRITES = 16
"""Computing a table may write so many times the bytes that it has. Memory is faster than links by more."""
_FLOPS_A_BYTE = 64
"""And do so many operations for each of these bytes."""


_RANDOM = ("rand", "dropout", "bernoulli", "normal", "multinomial", "poisson", "exponential", "uniform")
"""In the names of functions that draw random numbers: they keep their order, so that seeds mean the same."""


class GraphTables:
    """The tables of a traced graph."""

    def __init__(self, graph: fx.Graph, trial: Trial) -> None:
        self._trial, self._run = trial, trial.first
        self._written = frozenset[int]().union(*self._run.overwrites.values())
        fed = fed_by_inputs(graph, self._run)
        self.exact: set[fx.Node] = set()
        """Nodes that give the same wherever they run."""
        for node in graph.nodes:
            if node not in fed and self._is_exact(node):
                self.exact.add(node)
        self._cheap: dict[fx.Node, bool] = {}

    def is_made_again(self, node: fx.Node) -> bool:
        """Whether layers behind a cut make it again instead of taking it over."""
        if node not in self.exact or not self._run.storages[node]:
            return False
        if node not in self._cheap:
            self._cheap[node] = self._is_cheap(node)
        return self._cheap[node]

    def sizes(self, node: fx.Node) -> Iterator[fx.Node]:
        """What it is computed from that is, and holds, no tensor: sizes, devices and the like."""
        for source in dict.fromkeys(
            source for own in self._ancestors(node) for source in own.all_input_nodes
        ):
            if source.op != "get_attr" and not self._run.storages[source]:
                yield source

    def _is_exact(self, node: fx.Node) -> bool:
        if node.op not in ("call_function", "call_method") or not self._run.storages[node]:
            return False
        stored = self._run.storages[node].union(*(self._run.storages[n] for n in node.all_input_nodes))
        if (
            not _is_of_torch(node.target)
            or is_random(node.target)
            or self._run.overwrites[node]
            or stored & self._written
        ):
            return False
        return all(
            source in self.exact or not self._run.storages[source] or self._is_constant(source)
            for source in node.all_input_nodes
        )

    def _is_constant(self, node: fx.Node) -> bool:
        is_written = str(node.target) in self._trial.writes
        return node.op == "get_attr" and not is_written and not self._trial.trains(node)

    def _is_cheap(self, node: fx.Node) -> bool:
        own = self._ancestors(node)
        bytes = self._run.bytes[node]
        if sum(map(self._bytes_written, own)) > _WRITES * bytes:
            return False
        if any(size not in self._trial.values for size in self.sizes(node)):
            return False
        return sum(self._trial.flops.get(each, 0) for each in own) <= _FLOPS_A_BYTE * bytes

    def _ancestors(self, node: fx.Node) -> list[fx.Node]:
        ancestors, pending = {node: None}, [node]
        while pending:
            for source in pending.pop().all_input_nodes:
                if source in self.exact and source not in ancestors:
                    ancestors[source] = None
                    pending.append(source)
        return list(ancestors)

    def _bytes_written(self, node: fx.Node) -> int:
        """None of a view."""
        sources = frozenset[int]().union(*(self._run.storages[source] for source in node.all_input_nodes))
        return 0 if self._run.storages[node] <= sources else self._run.bytes[node]


def _is_of_torch(target: Any) -> bool:
    """Whether it is known to give the same each time."""
    if isinstance(target, str):
        return True
    if isinstance(target, OpOverload):
        return target.namespace == "aten"
    module = (getattr(target, "__module__", None) or "").partition(".")[0]
    # What torch.empty leaves behind is nobody's.
    return module in ("torch", "_operator", "builtins") and "empty" not in getattr(target, "__name__", "")


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
    fed: set[fx.Node] = set()
    for node in graph.nodes:
        sources = (source for source in node.all_input_nodes if run.storages.get(source))
        if node.op == "placeholder" or any(source in fed for source in sources):
            fed.add(node)
    return fed


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
