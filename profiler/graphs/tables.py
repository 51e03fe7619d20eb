"""Tables: what a model computes of buffers and sizes alone, as rotary embeddings, for many layers.

They need not cross a cut. What is cheap to compute is computed again behind it: exactly the same, as nothing
that it comes from is trained, drawn or changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from ..torch_internals import OpOverload
from .node_order import fed_by_inputs, is_random
from .trial import Trial

_WRITES = 16
"""Computing a table may write so many times the bytes that it has. Memory is faster than links by more."""
_FLOPS_A_BYTE = 64
"""And do so many operations for each of these bytes."""


class GraphTables:
    """Those of a traced graph."""

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
        found, pending = {node: None}, [node]
        while pending:
            for source in pending.pop().all_input_nodes:
                if source in self.exact and source not in found:
                    found[source] = None
                    pending.append(source)
        return list(found)

    def _bytes_written(self, node: fx.Node) -> int:
        """None of a view."""
        given = frozenset[int]().union(*(self._run.storages[source] for source in node.all_input_nodes))
        return 0 if self._run.storages[node] <= given else self._run.bytes[node]


def _is_of_torch(target: Any) -> bool:
    """Whether it is known to give the same each time."""
    if isinstance(target, str):
        return True
    if isinstance(target, OpOverload):
        return target.namespace == "aten"
    module = (getattr(target, "__module__", None) or "").partition(".")[0]
    # What torch.empty leaves behind is nobody's.
    return module in ("torch", "_operator", "builtins") and "empty" not in getattr(target, "__name__", "")
