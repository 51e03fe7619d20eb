"""A traced graph in the order it runs: what crosses each place, its tables, its output and its shapes."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from torch import Tag, Tensor, fx, nn

from .graph import GraphRun, TensorMeta, TracedGraph, check_value, recover_sizes
from .layer import OutputForm, Shapes
from .torch_private import CONVERSION, OpOverload, name_leaves, tree_leaves
from .trial import Trial


def shapes_in(value: Any) -> Shapes:
    """Shapes of the tensors that a trial run described."""
    return tuple(leaf.shape for leaf in tree_leaves(value) if isinstance(leaf, TensorMeta))


# Tables: what a model computes of buffers and sizes alone, as rotary embeddings, for many layers.
#
# They need not cross a cut. In the order in which a graph's operations run, what depends on no input comes
# next
# to its first user. What is cheap to compute is computed again behind the cut: exactly the same, as nothing
# that it comes from is trained, random or changed.

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


# A traced graph in the order it runs: what crosses each place in it, and where it can be cut.

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

    def bytes(self, node: fx.Node) -> int:
        """Return those of the tensors in its value."""
        return self._run.bytes[node]

    def is_fed(self, node: fx.Node) -> bool:
        """Whether it holds tensors that the input leads to by way of tensors."""
        return node in self._fed and self.holds_tensors(node)

    @cached_property
    def _only_checked(self) -> set[fx.Node]:
        """Operations for the sake of a `check_value` alone."""
        checked = {node for node in self.order if node.target is check_value}
        for node in reversed(self.order):
            if node.users and checked.issuperset(node.users):
                checked.add(node)
        return checked

    def makes_tensors(self, node: fx.Node) -> bool:
        """Whether it is more than a question for a size, a wrapper, or a name for what is still used."""
        if isinstance(node.target, type) or node in self._only_checked:
            return False
        if node in self._run.same and not self._run.overwrites[node]:
            return all(len(source.users) == 1 for source in node.all_input_nodes)
        return self.holds_tensors(node) or node.op == "call_module"

    def is_work(self, node: fx.Node) -> bool:
        """Whether it computes something of the input: no view, no copy, no size."""
        run = self._run
        if node not in self._fed or not run.storages[node] or self._only_moves(node):
            return False
        if node in self._only_checked:
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


# The tensors that a model returns: their names, and whether dimension 0 holds the samples.


def output_forms(flow: Flow) -> tuple[OutputForm, ...]:
    """The tensors of the model's output, in order.

    Dimension 0 holds the samples where its size changes with their number. Of a model that takes only one
    batch size, dimension 0 is taken for the samples.
    """
    finish, values = flow.traced.finish, flow.trial.values
    first = flow.trial.first.output
    other: Any = fx.map_arg(flow.output.args[0], lambda node: values[node][1]) if values else None
    pairs = [
        dict(_named_tensors(output if finish is None else finish(output)))
        for output in (first, other)
        if output is not None
    ]
    return tuple(
        _form(name, tensor, pairs[-1].get(name, tensor) if values else None)
        for name, tensor in pairs[0].items()
    )


def _form(name: str, tensor: TensorMeta | Tensor, other: TensorMeta | Tensor | None) -> OutputForm:
    has_samples = bool(tensor.shape) and (other is None or tensor.shape[:1] != other.shape[:1])
    dtype = str(tensor.dtype).removeprefix("torch.")
    return OutputForm(name, tuple(tensor.shape[has_samples:]), dtype, has_samples)


def _named_tensors(value: Any) -> Iterator[tuple[str, TensorMeta | Tensor]]:
    """The tensors in the output of a trial run, which describes all but those in dataclasses."""
    for name, leaf in name_leaves(value)[0]:
        if isinstance(leaf, TensorMeta | Tensor):
            yield name, leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for field in dataclasses.fields(leaf):
                for inner, tensor in _named_tensors(getattr(leaf, field.name)):
                    yield f"{name}.{field.name}{inner}", tensor
