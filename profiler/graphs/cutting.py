"""Where a graph can be cut, what crosses there, and which of these cuts a granularity makes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from torch import fx, nn

from ..torch_internals import CONVERSION
from .granularity import Granularity
from .graph import TracedGraph
from .node_order import fed_by_inputs, operations
from .size_recovery import TensorSeen, recover_sizes
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
    handed: tuple[fx.Node, ...]
    """Those that are, or hold, tensors: the same tensor once."""
    rest: tuple[fx.Node, ...]
    """Sizes, devices and the like, which are found again and not handed on."""
    bytes: int
    """Of the tensors, each once."""


@dataclass(frozen=True, eq=False)
class Part:
    """Operations between two cuts."""

    nodes: tuple[fx.Node, ...]
    before: Position | None
    """None: the model's input is handed in."""
    after: Position | None
    """None: the model's output is handed on."""
    module: str | None = None
    """The module whose call this is, where the granularity names it."""
    asked_again: frozenset[fx.Node] = frozenset()
    """Its sizes and the like that layers behind a cut use."""
    elsewhere: frozenset[str] = frozenset()
    """The modules that the granularity names and that are not in this part."""


class Flow:
    """A traced graph in the order it runs, with what a trial run showed of its values."""

    def __init__(self, traced: TracedGraph, trial: Trial) -> None:
        self.traced, self.trial = traced, trial
        self._run = trial.first
        self.order = operations(traced.graph, trial.first)
        self.output = next(node for node in reversed(traced.graph.nodes) if node.op == "output")
        self._fed = fed_by_inputs(traced.graph, trial.first)

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
        pending, known = [self.output], set[fx.Node]()
        while pending:
            node = pending.pop()
            if node.op == "placeholder":
                return True
            pending += [source for source in node.all_input_nodes if source not in known]
            known.update(node.all_input_nodes)
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
        stored = frozenset[int]().union(*(self._run.storages[node] for node in position.handed))
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
        found: dict[int, Position] = {}
        live: dict[fx.Node, int] = {}
        for node, place in self.places.items():
            last = max((self.places[user] for user in node.users), default=place)
            live = {value: until for value, until in live.items() if until > place}
            if last > place and node is not self.output:
                live[node] = last
            if 0 <= place < len(self.order) - 1:
                found[place + 1] = self._position(place + 1, live)
        return found

    def _position(self, index: int, live: dict[fx.Node, int]) -> Position:
        latest = {self.same(node): node for node in live}
        handed = tuple(node for node in latest.values() if self._run.storages[node])
        rest = tuple(node for node in live if not self._run.storages[node])
        return Position(index, handed, rest, sum(self._run.bytes[node] for node in handed))

    def is_offered(self, position: Position) -> bool:
        """Whether tensors can be handed over there, and suffice: computed ones, and no input alone."""
        if position.index in self._inside_vmap or all(node.op == "placeholder" for node in position.handed):
            return False
        values = [self._run.values[node] for node in position.handed]
        if not all(isinstance(value, TensorSeen) for value in values):
            return len(values) == 1 and not position.rest and _is_tuple_of_tensors(values[0])
        return not position.rest or self._can_be_found(position)

    @cached_property
    def _inside_vmap(self) -> frozenset[int]:
        """Positions where torch.vmap is entered and not left: tensors there have one dimension less."""
        found, depth = set[int](), 0
        for index, node in enumerate(self.order):
            name = getattr(node.target, "__name__", "")
            depth += (name == "_vmap_increment_nesting") - (name == "_vmap_decrement_nesting")
            found |= {index + 1} if depth else set()
        return frozenset(found)

    def _can_be_found(self, position: Position) -> bool:
        values = self.trial.values
        if not values:
            return False
        graph = fx.Graph()
        copies = {node: graph.placeholder(node.name) for node in position.handed}
        return all(
            recover_sizes(node, position.handed, graph, copies, values) is not None for node in position.rest
        )

    def tensors(self, position: Position) -> int:
        """How many cross there."""
        values = [self._run.values[node] for node in position.handed]
        return sum(len(value) if isinstance(value, tuple) else 1 for value in values)

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
        given = frozenset[int]().union(*(run.storages[source] for source in node.all_input_nodes))
        return not run.storages[node] <= given

    def _only_moves(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return isinstance(self.trial.module(str(node.target)), _MOVING_MODULES)
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        return name.partition(".")[0] in _MOVES


def parts(flow: Flow, granularity: Granularity) -> list[Part]:
    """The operations of `flow` between the cuts that `granularity` makes, in order.

    Where modules are called one after another, as in an nn.Sequential, they are layers whatever they hand on.
    """
    if granularity.kind == "module":
        return _split(flow, *_around_modules(flow, granularity))
    blocks = _single(flow, any_number=flow.is_chain)
    return _split(flow, blocks if granularity.kind == "block" else _after_work(flow, blocks))


def _single(flow: Flow, *, any_number: bool = False) -> list[Position]:
    """Where one tensor crosses, and something was made since the last such place.

    Sizes are found again behind it only for the sake of work: not to cut a view from a view.
    """
    makers = [flow.makes_tensors(node) for node in flow.order]
    work = [flow.is_work(node) for node in flow.order]
    found: list[Position] = []
    last = 0
    for index, position in flow.positions.items():
        before = work[last:index] if position.rest else makers[last:index]
        if not any(before) or not any(makers[index:]):
            continue
        if (any_number or flow.tensors(position) == 1) and flow.is_offered(position):
            found.append(position)
            last = index
    return found


def _after_work(flow: Flow, blocks: Sequence[Position]) -> list[Position]:
    """`blocks`, and one place between any two operations that do work: where the fewest bytes cross."""
    work = [index for index, node in enumerate(flow.order) if flow.is_work(node)]
    found = {position.index: position for position in blocks}
    for first, second in pairwise(work):
        if not any(index in found for index in range(first + 1, second + 1)):
            best = _cheapest(flow, first + 1, second)
            if best is not None:
                found[best.index] = best
    return [found[index] for index in sorted(found)]


def _cheapest(flow: Flow, first: int, last: int) -> Position | None:
    """The place from `first` to `last` that the fewest bytes cross, the earliest of several."""
    between = [flow.positions[index] for index in range(first, last + 1) if index in flow.positions]
    # Whether it can be offered is asked last: finding sizes again takes time.
    offered = filter(flow.is_offered, sorted(between, key=lambda position: position.bytes))
    return next(offered, None)


@dataclass(frozen=True)
class _Call:
    """Of a module that the granularity names: the operations from `first` up to `end`."""

    path: str
    first: int
    end: int


def _around_modules(flow: Flow, granularity: Granularity) -> tuple[list[Position], list[_Call]]:
    """Cuts before and after each call. What lies between two and does no work goes with the second."""
    calls = list(_calls(flow, granularity))
    work = [index for index, node in enumerate(flow.order) if flow.is_work(node)]
    found: list[Position | None] = []
    ends = [0, *(call.end for call in calls)]
    starts = [*(call.first for call in calls), len(flow.order)]
    for number, (end, start) in enumerate(zip(ends, starts, strict=True)):
        between = [index for index in work if end <= index < start]
        if number > 0 and (between or number < len(calls)):
            found.append(_cheapest(flow, end, between[0] if between else start))
        if between and number < len(calls):
            found.append(_cheapest(flow, between[-1] + 1, start))
    return [position for position in found if position is not None], calls


def _calls(flow: Flow, granularity: Granularity) -> Iterator[_Call]:
    open_key: tuple[str, str] | None = None
    first = end = 0
    for index, node in enumerate(flow.order):
        path, _, _ = flow.traced.paths.get(node, "").partition("@")
        module = granularity.outermost(path) if path else None
        if module is None:
            continue
        key = (module, _call_key(node, module) or (open_key[1] if open_key else ""))
        if key != open_key:
            if open_key is not None:
                yield _Call(open_key[0], first, end)
            open_key, first = key, index
        end = index + 1
    if open_key is not None:
        yield _Call(open_key[0], first, end)


def _call_key(node: fx.Node, module: str) -> str | None:
    """What tells one call of the module from another."""
    stack = node.meta.get("nn_module_stack", {})
    return next((key for key, (path, _) in stack.items() if path == module), None)


def _split(flow: Flow, cuts: Sequence[Position], calls: Sequence[_Call] = ()) -> list[Part]:
    ends: list[Position | None] = [None, *cuts, None]
    rest = frozenset(node for cut in cuts for node in cut.rest)
    found: list[Part] = []
    for before, after in pairwise(ends):
        first = before.index if before else 0
        end = after.index if after else len(flow.order)
        within = [call.path for call in calls if call.first >= first and call.end <= end]
        module = within[0] if len(within) == 1 else None
        elsewhere = frozenset(call.path for call in calls).difference(within)
        nodes = tuple(flow.order[first:end])
        found.append(Part(nodes, before, after, module, rest.intersection(nodes), elsewhere))
    return found


def _is_tuple_of_tensors(value: object) -> bool:
    return isinstance(value, tuple) and len(value) > 0 and all(isinstance(v, TensorSeen) for v in value)
