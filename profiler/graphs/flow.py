"""A traced graph in the order it runs: what crosses each place in it, and where it can be cut."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from torch import fx, nn

from ..torch_internals import CONVERSION
from .graph import TracedGraph
from .size_recovery import TensorMeta, recover_sizes
from .tables import GraphTables, fed_by_inputs, operations
from .trial import Trial

_MOVES = frozenset({
    "reshape", "flatten", "contiguous", "unflatten", "ravel", "clone", "to", "type_as", CONVERSION,
})  # fmt: skip
"""Operations that compute nothing, even where they copy."""
_MOVING_MODULES = (nn.Identity, nn.Flatten, nn.Unflatten)


@dataclass(frozen=True, eq=False)
class Position:
    """A place in the order of operations, and the values that are made before it and used after."""

    index: int
    """Number of operations before it."""
    crossing: tuple[fx.Node, ...]
    """Those that are, or hold, tensors: the same tensor once."""
    rest: tuple[fx.Node, ...]
    """Sizes, devices and the like, which are found again and not handed on; those of tables, too."""
    bytes: int
    """Of the tensors, each once."""


class Flow:
    """A traced graph in the order it runs, with what a trial run showed of its values."""

    def __init__(self, traced: TracedGraph, trial: Trial) -> None:
        self.traced, self.trial = traced, trial
        self._run = trial.first
        self.order = operations(traced.graph, trial.first)
        self.output = next(node for node in reversed(traced.graph.nodes) if node.op == "output")
        self._fed = fed_by_inputs(traced.graph, trial.first)
        self.tables = GraphTables(traced.graph, trial)

    def same(self, node: fx.Node) -> fx.Node:
        """The first node whose value is the very tensor that this one's is."""
        return self._run.same.get(node, node)

    @cached_property
    def is_chain(self) -> bool:
        """Whether modules are called one after another, each with what the one before returned."""
        calls = all(node.op == "call_module" for node in self.order)
        return calls and all(after.args == (before,) for before, after in pairwise(self.order))

    @property
    def reaches_output(self) -> bool:
        """Whether the output depends on the input."""
        pending, visited = [self.output], set[fx.Node]()
        while pending:
            node = pending.pop()
            if node.op == "placeholder":
                return True
            pending += [source for source in node.all_input_nodes if source not in visited]
            visited.update(node.all_input_nodes)
        return False

    @property
    def overwrites_input(self) -> bool:
        """Whether an operation changes a tensor of the input in place."""
        inputs = (node for node in self.traced.inputs if node is not None)
        stored = frozenset[int]().union(*(self._run.storages[node] for node in inputs))
        return any(self._run.overwrites[node] & stored for node in self.order)

    def first_overwriting(self, position: Position | None) -> fx.Node | None:
        """The first operation behind the position that changes in place what crosses there."""
        if position is None:
            return None
        stored = frozenset[int]().union(*(self._run.storages[node] for node in position.crossing))
        later = (node for place, node in self._overwriting if place >= position.index)
        return next((node for node in later if self._run.overwrites[node] & stored), None)

    @cached_property
    def _overwriting(self) -> list[tuple[int, fx.Node]]:
        return [(place, node) for place, node in enumerate(self.order) if self._run.overwrites[node]]

    def holds_tensors(self, node: fx.Node) -> bool:
        """Whether its value is a tensor, or has one inside."""
        return bool(self._run.storages[node])

    @cached_property
    def places(self) -> dict[fx.Node, int]:
        """Of every operation; of inputs -1; of the output behind the last."""
        inputs = {node: -1 for node in self.traced.graph.nodes if node.op == "placeholder"}
        return {**inputs, **{node: i for i, node in enumerate(self.order)}, self.output: len(self.order)}

    @cached_property
    def positions(self) -> dict[int, Position]:
        """Between all operations, by the number of those before; also where no cut can be."""
        by_index: dict[int, Position] = {}
        live: dict[fx.Node, int] = {}
        for node, place in self.places.items():
            last = max((self.places[user] for user in node.users), default=place)
            live = {value: until for value, until in live.items() if until > place}
            if last > place and node is not self.output:
                live[node] = last
            if 0 <= place < len(self.order) - 1:
                by_index[place + 1] = self._position(place + 1, live)
        return by_index

    def _position(self, index: int, live: dict[fx.Node, int]) -> Position:
        made_again = [node for node in live if self.tables.is_made_again(node)]
        latest = {self.same(node): node for node in live if node not in made_again}
        crossing = tuple(node for node in latest.values() if self._run.storages[node])
        sizes = itertools.chain.from_iterable(map(self.tables.sizes, made_again))
        rest = tuple(dict.fromkeys((*(node for node in live if not self._run.storages[node]), *sizes)))
        return Position(index, crossing, rest, sum(self._run.bytes[node] for node in crossing))

    def is_offered(self, position: Position) -> bool:
        """Whether tensors can be handed over there, and suffice: computed ones, and no input alone."""
        if position.index in self._inside_vmap or all(node.op == "placeholder" for node in position.crossing):
            return False
        values = [self._run.values[node] for node in position.crossing]
        if not all(isinstance(value, TensorMeta) for value in values):
            return len(values) == 1 and not position.rest and _is_tuple_of_tensors(values[0])
        return not position.rest or self._can_be_found(position)

    @cached_property
    def _inside_vmap(self) -> frozenset[int]:
        """Positions where torch.vmap is entered and not left: tensors there have one dimension less."""
        inside, depth = set[int](), 0
        for index, node in enumerate(self.order):
            name = getattr(node.target, "__name__", "")
            depth += (name == "_vmap_increment_nesting") - (name == "_vmap_decrement_nesting")
            inside |= {index + 1} if depth else set()
        return frozenset(inside)

    def _can_be_found(self, position: Position) -> bool:
        values = self.trial.values
        if not values:
            return False
        graph = fx.Graph()
        copies = {node: graph.placeholder(node.name) for node in position.crossing}
        return all(
            recover_sizes(node, position.crossing, graph, copies, values) is not None
            for node in position.rest
        )

    def tensors(self, position: Position) -> int:
        """How many cross there."""
        values = [self._run.values[node] for node in position.crossing]
        return sum(len(value) if isinstance(value, tuple) else 1 for value in values)

    def is_fed(self, node: fx.Node) -> bool:
        """Whether it holds tensors that the input leads to by way of tensors."""
        return node in self._fed and self.holds_tensors(node)

    def makes_tensors(self, node: fx.Node) -> bool:
        """Whether it is more than a question for a size, a wrapper, or a name for what is still used."""
        if isinstance(node.target, type):
            return False
        if node in self._run.same and not self._run.overwrites[node]:
            return all(len(source.users) == 1 for source in node.all_input_nodes)
        return self.holds_tensors(node) or node.op == "call_module"

    def is_work(self, node: fx.Node) -> bool:
        """Whether it computes something of the input: no view, no copy, no size."""
        run = self._run
        if node not in self._fed or not run.storages[node] or self._only_moves(node):
            return False
        if node.op == "call_module" or run.overwrites[node]:
            return True
        sources = frozenset[int]().union(*(run.storages[source] for source in node.all_input_nodes))
        return not run.storages[node] <= sources

    def calls_parameters(self, node: fx.Node) -> bool:
        """Whether it calls a module that has parameters."""
        is_call = node.op == "call_module"
        return is_call and any(True for _ in self.trial.module(str(node.target)).parameters())

    def _only_moves(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return isinstance(self.trial.module(str(node.target)), _MOVING_MODULES)
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        return name.partition(".")[0] in _MOVES


def _is_tuple_of_tensors(value: object) -> bool:
    return isinstance(value, tuple) and len(value) > 0 and all(isinstance(v, TensorMeta) for v in value)
