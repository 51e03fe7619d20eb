"""Blocks of a graph, the places where it is cut, and the parts between as modules."""

from __future__ import annotations

import difflib
import itertools
import operator
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from typing import Any, Literal, Self

import torch
from torch import Tensor, fx, nn

from ..cost_models.errors import ModelError, UsageError
from .exported_graph import attribute
from .flow import Flow, Position, shapes_in
from .graph import GraphRun, find_attribute, graph_module, is_inside, module_around, recover_sizes
from .layer import Shapes

# The blocks that a model repeats, found in its graph, and the few layers around them.
#
# A block is an entry of an nn.ModuleList, nn.Sequential or nn.ModuleDict that has parts of its own. Entries
# are blocks where they run in a row, each on what the one before returned: experts, which all take the same,
# are none.

_HOLDERS = (nn.ModuleList, nn.ModuleDict)
_LISTS = (*_HOLDERS, nn.Sequential)
DOMINATES = 0.5
"""A part of the model's FLOPs that one layer is not to have, where there are modules inside to tell apart."""


_OF_A_STAGE = 0.4
"""The same of a layer that is a stage of blocks, where these are known."""
_OF_SEVERAL = 0.125
"""The same of a layer that holds more than one block, where it can be cut at little cost."""


@dataclass(frozen=True)
class Call:
    """The call of a module that is to be a layer: the operations from `first` up to `end`."""

    path: str
    first: int
    end: int


def find_calls(flow: Flow, outermost: Callable[[str], str | None]) -> Iterator[Call]:
    """The calls of the modules that `outermost` names for the modules inside them, in order."""
    open_key: tuple[str, str] | None = None
    first = end = 0
    for index, node in enumerate(flow.order):
        paths = (module_around(flow.traced, node), flow.traced.paths.get(node, "").partition("@")[0])
        module = next(filter(None, map(outermost, filter(None, paths))), None)
        if module is None:
            continue
        key = (module, _call_key(node, module) or (open_key[1] if open_key else ""))
        if key != open_key:
            if open_key is not None:
                yield Call(open_key[0], first, end)
            open_key, first = key, index
        end = index + 1
    if open_key is not None:
        yield Call(open_key[0], first, end)


def _call_key(node: fx.Node, module: str) -> str | None:
    """What tells one call of the module from another."""
    stack = node.meta.get("nn_module_stack", {})
    return next((key for key, (path, _) in stack.items() if path == module), None)


class BlockCalls:
    """The modules that are to be layers, of a graph with `single` places where one tensor alone crosses."""

    def __init__(self, flow: Flow, single: Sequence[Position]) -> None:
        self._flow = flow
        self._single = [position.index for position in single]

    @cached_property
    def paths(self) -> frozenset[str]:
        """Empty where the single places part all blocks from each other, and none in several of its own."""
        return self._opened(self._repeated)

    def calls(self, paths: frozenset[str]) -> list[Call]:
        """Of these modules, in order."""
        return list(find_calls(self._flow, lambda path: _outermost(path, paths)))

    @cached_property
    def _repeated(self) -> frozenset[str]:
        repeated: set[str] = set()
        for entries in self._lists("").values():
            # Of a class of which one is a block, all are: some blocks have no branch besides their parts.
            whole = {self._kind(path) for path in entries if not self._blocks_inside(path)}
            whole = {kind for kind in whole if not issubclass(kind, _LISTS)}
            stages = [path for path in entries if self._kind(path) not in whole]
            inner = set(entries).difference(stages).union(*map(self._stages, stages))
            if self._is_needed(self.calls(frozenset(inner))):
                repeated |= inner
        return frozenset(repeated)

    def _lists(self, within: str) -> dict[str, list[str]]:
        """By list: its entries, where they run in a row. The outermost lists of a module ("": the model)."""
        lists: dict[str, list[str]] = {}
        for name in self._flow.trial.module_names:
            if (within and not is_inside(name, [within])) or is_inside(name, lists):
                continue
            module = self._flow.trial.module(name)
            if isinstance(module, _LISTS):
                entries = [f"{name}.{key}" for key, child in module.named_children() if _has_parts(child)]
                calls = self.calls(frozenset(entries))
                if calls and self._runs_in_a_row(calls) and not self._is_bypassed(name, calls):
                    lists[name] = entries
        return lists

    def _stages(self, path: str) -> Iterator[str]:
        """The block itself; or, where it is a stage of blocks, these."""
        inner = self._blocks_inside(path)
        if not inner:
            yield path
        for own in inner:
            yield from self._stages(own)

    def _blocks_inside(self, path: str) -> tuple[str, ...]:
        """Blocks of which a stage is made, two of a kind at least; none in a block."""
        inner = [own for entries in self._lists(path).values() for own in entries]
        return tuple(inner) if len({self._kind(own) for own in inner}) < len(inner) else ()

    def _kind(self, path: str) -> type[nn.Module]:
        return type(self._flow.trial.module(path))

    def _is_bypassed(self, name: str, calls: Sequence[Call]) -> bool:
        """Whether the module that has the list uses behind it what was there before: it is a branch."""
        parent = name.rpartition(".")[0]
        while parent and issubclass(self._kind(parent), _HOLDERS):
            parent = parent.rpartition(".")[0]
        for around in self.calls(frozenset([parent])) if parent else ():
            own = [call for call in calls if around.first <= call.first and call.end <= around.end]
            behind = self._flow.order[own[-1].end : around.end] if own else []
            sources = {source for node in behind for source in node.all_input_nodes}
            if any(
                self._flow.is_fed(source) and self._flow.places[source] < own[0].first for source in sources
            ):
                return True
        return False

    def _runs_in_a_row(self, calls: Sequence[Call]) -> bool:
        """Whether most take what the one before returned, or something made of it."""
        follow = [self._leads(one, two) for one, two in pairwise(calls)]
        return 2 * sum(follow) >= len(follow)

    def _leads(self, one: Call, two: Call) -> bool:
        order = self._flow.order
        nodes = {node for node in order[one.first : one.end] if self._flow.is_fed(node)}
        for index in range(one.end, two.end):
            if not nodes.isdisjoint(order[index].all_input_nodes):
                nodes.add(order[index])
                if index >= two.first:
                    return True
        return False

    def _is_needed(self, calls: Sequence[Call]) -> bool:
        """Whether single places leave two of the blocks in one layer, or make several of one."""
        for one, two in pairwise(calls):
            if not any(one.end <= place <= two.first for place in self._single):
                return True
        return any(self._composites(call) > 1 for call in calls)

    def _composites(self, call: Call) -> int:
        inside = [place for place in self._single if call.first < place < call.end]
        parts = pairwise([call.first, *inside, call.end])
        return sum(sum(map(self._flow.is_work, self._flow.order[first:end])) > 1 for first, end in parts)

    def _opened(self, paths: frozenset[str]) -> frozenset[str]:
        """With what is inside the layers that hold most of the model's work."""
        for _ in range(_DEEPEST):
            heaviest = list(self._heaviest(paths))
            inside = frozenset[str]().union(*(self._modules_inside(*span, paths) for span in heaviest))
            if not inside - paths:
                break
            paths = frozenset(path for path in paths if not any(own.startswith(f"{path}.") for own in inside))
            paths |= inside
        return paths

    def _heaviest(self, paths: frozenset[str]) -> Iterator[tuple[int, int]]:
        """The layers with more than half of the work, or of the weights: from the first operation up to the
        last."""
        calls = self.calls(paths)
        inside = {place for call in calls for place in range(call.first + 1, call.end)}
        places = {place for place in self._single if place not in inside}
        places |= {place for call in calls for place in (call.first, call.end)}
        spans = pairwise(sorted({0, *places, len(self._flow.order)}))
        divisible = [(first, end) for first, end in spans if end - first > 1]
        if not divisible:
            return  # counting the work takes a pass
        for weigh in (self._flow.trial.flops, self._flow.trial.parameter_bytes):
            weights = [weigh.get(node, 0) for node in self._flow.order]
            for first, end in divisible:
                part, whole = sum(weights[first:end]), sum(weights)
                is_stage = weigh is self._flow.trial.flops and part > _OF_A_STAGE * whole
                if part > DOMINATES * whole or (is_stage and self._is_stage(first, end, paths)):
                    yield first, end

    def _is_stage(self, first: int, end: int, paths: frozenset[str]) -> bool:
        around = (module_around(self._flow.traced, node) for node in self._flow.order[first:end])
        whole = _common([path.split(".") for path in around if path])
        block = _outermost(".".join(whole), paths) if whole else None
        return block is not None and any(self._lists(block).values())

    def _modules_inside(self, first: int, end: int, paths: frozenset[str]) -> frozenset[str]:
        """The outermost modules in there with parts; of a block its own blocks alone."""
        around = (module_around(self._flow.traced, node) for node in self._flow.order[first:end])
        own = [path for path in around if path]
        whole = _common([path.split(".") for path in own])
        block = _outermost(".".join(whole), paths) if whole else None
        if block is not None:
            return frozenset(path for entries in self._lists(block).values() for path in entries)
        for depth in range(len(whole) + 1, _DEEPEST):
            heads = dict.fromkeys(self._head(path, depth) for path in own)
            modules = [path for path in heads if _has_parts(self._flow.trial.module(path))]
            if len(modules) > 1:
                return frozenset(modules)
            if not modules:
                break
        return frozenset()

    def _head(self, path: str, depth: int) -> str:
        """The module of the first `depth` names; of a list, which nobody calls, its entry."""
        parts = path.split(".")
        while depth < len(parts) and issubclass(self._kind(".".join(parts[:depth])), _HOLDERS):
            depth += 1
        return ".".join(parts[:depth])


_DEEPEST = 12
"""Levels of modules inside each other that are gone into."""


def _outer(path: str) -> list[str]:
    """The modules around it, outermost first."""
    parts = path.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]


def _outermost(path: str, paths: frozenset[str]) -> str | None:
    return next((name for name in (*_outer(path), path) if name in paths), None)


def _has_parts(module: nn.Module) -> bool:
    return any(True for _ in module.children()) and any(True for _ in module.parameters())


def _common(paths: Sequence[Sequence[str]]) -> list[str]:
    shortest: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shortest.append(parts[0])
    return shortest


# Granularities: how finely a model is cut, and at which of the places where its graph can be cut.

_MOST_NAMES = 6
"""Names that an error shows."""


@dataclass(frozen=True, eq=False)
class Part:
    """Operations between two cuts."""

    nodes: tuple[fx.Node, ...]
    before: Position | None
    """None: the model's input is handed in."""
    after: Position | None
    """None: the model's output is handed on."""
    module: str | None = None
    """The module whose call this is: one that the granularity names, or a block."""
    asked_again: frozenset[fx.Node] = frozenset()
    """Its sizes and the like that layers behind a cut use."""
    elsewhere: frozenset[str] = frozenset()
    """Such modules that are not in this part."""


def parts(flow: Flow, granularity: Granularity) -> list[Part]:
    """The operations of `flow` between the cuts that `granularity` makes, in order.

    Where modules are called one after another, as in an nn.Sequential, they are layers whatever they hand on.
    """
    if granularity.kind == "module":
        calls = list(find_calls(flow, granularity.outermost))
        return _split(flow, _around(flow, calls), calls)
    single = _single(flow, any_number=flow.is_chain)
    blocks = BlockCalls(flow, single)
    calls = blocks.calls(blocks.paths)
    cuts = _beside_blocks(flow, single, calls) if calls else single
    opened = _inside_heavy(flow, cuts)
    if granularity.kind == "fine":
        return _split(flow, _after_work(flow, _in_order([*single, *cuts, *opened])))
    return _split(flow, _in_order([*cuts, *opened]), calls, opened)


def _in_order(positions: Iterable[Position]) -> list[Position]:
    by_index = {position.index: position for position in positions}
    return [by_index[index] for index in sorted(by_index)]


def _beside_blocks(flow: Flow, single: Sequence[Position], calls: Sequence[Call]) -> list[Position]:
    """Cuts around the calls of blocks, and those of `single` that part other modules from each other."""
    by_index = {position.index: position for position in _around(flow, calls)}
    for position in single:
        if not any(call.first < position.index < call.end for call in calls):
            by_index.setdefault(position.index, position)
    cuts = [by_index[index] for index in sorted(by_index)]
    spans = list(pairwise([0, *(cut.index for cut in cuts), len(flow.order)]))
    is_block = [any(first <= call.first and call.end <= end for call in calls) for first, end in spans]
    is_named = [any(map(flow.calls_parameters, flow.order[first:end])) for first, end in spans]
    dropped: set[int] = set()
    for number, (first, end) in enumerate(spans):
        if is_block[number] or is_named[number]:
            continue
        # What only functions compute belongs to the layer before or behind it, and best to no block.
        before, behind = number > 0, number + 1 < len(spans)
        if before and not is_block[number - 1]:
            dropped.add(first)
        elif behind:
            dropped.add(end)
        elif before:
            dropped.add(first)
    return [cut for cut in cuts if cut.index not in dropped]


def _single(flow: Flow, *, any_number: bool = False) -> list[Position]:
    """Where one tensor crosses, and something was made since the last such place.

    Sizes are found again behind it only for the sake of work: not to cut a view from a view.
    """
    makers = [flow.makes_tensors(node) for node in flow.order]
    work = [flow.is_work(node) for node in flow.order]
    positions: list[Position] = []
    last = 0
    for index, position in flow.positions.items():
        before = work[last:index] if position.rest else makers[last:index]
        if not any(before) or not any(makers[index:]):
            continue
        if (any_number or flow.tensors(position) == 1) and flow.is_offered(position):
            positions.append(position)
            last = index
    return positions


def _inside_heavy(flow: Flow, cuts: Sequence[Position]) -> list[Position]:
    """Places inside the layers with too many of the FLOPs, which the fewest tensors cross there.

    Between the layers whose outputs are collected (the features of a detector, the skips of a U-Net, an input
    that is added to the output), all that were collected so far cross every place. A layer with more than
    half of the FLOPs is opened wherever that is possible. One with less, that is more than one block, only
    where the tensors hold no larger part of the bytes that the model makes than the layer has of the FLOPs.
    """
    cuts_inside: list[Position] = []
    pending = list(pairwise([0, *(cut.index for cut in cuts), len(flow.order)]))
    if all(end - first == 1 for first, end in pending):
        return cuts_inside  # counting the work takes a pass
    done = list(accumulate((flow.trial.flops.get(node, 0) for node in flow.order), initial=0))
    closed = {index for call in _calls_of_blocks(flow) for index in range(call.first + 1, call.end)}
    model_bytes = sum(flow.bytes(node) for node in flow.order if flow.is_work(node))
    while pending:
        first, end = pending.pop()
        part = (done[end] - done[first]) / max(1, done[-1])
        if part <= _OF_SEVERAL:
            continue
        inside = [flow.positions[index] for index in range(first + 1, end) if index in flow.positions]
        if part <= DOMINATES:
            inside = [own for own in inside if own.index not in closed and own.bytes <= part * model_bytes]
        # A cut saves nothing unless there is work in the layer on both sides of it.
        inside = [own for own in inside if done[first] < done[own.index] < done[end]]
        by_count = [[own for own in inside if flow.tensors(own) == n] for n in set(map(flow.tensors, inside))]
        by_count.sort(key=lambda alike: flow.tensors(alike[0]))
        best = next(filter(None, (_between_work(flow, alike, done) for alike in by_count)), None)
        if best:
            cuts_inside += best
            pending += pairwise([first, *(cut.index for cut in best), end])
    return cuts_inside


def _between_work(flow: Flow, positions: Sequence[Position], done: Sequence[int]) -> list[Position]:
    """One of the `positions` between each two operations with FLOPs, of which `done` were before a place.

    The one with the fewest bytes, the last of several, of those where nothing is overwritten if there are.
    """
    best: list[Position] = []
    for _, alike in groupby(positions, lambda position: done[position.index]):
        ranked = sorted(
            alike, key=lambda own: (flow.first_overwriting(own) is not None, own.bytes, -own.index)
        )
        # Whether it can be offered is asked last: finding sizes again takes time.
        best += itertools.islice(filter(flow.is_offered, ranked), 1)
    return best


def _calls_of_blocks(flow: Flow) -> Iterator[Call]:
    """The calls of modules with parts whose class the model has several of, none inside another."""
    modules = {path: flow.trial.module(path) for path in flow.trial.module_names}
    kinds = {
        path: type(own) for path, own in modules.items() if _has_parts(own) and not isinstance(own, _LISTS)
    }
    counts = Counter(kinds.values())
    nested = {kind for path, kind in kinds.items() if any(kinds.get(outer) is kind for outer in _outer(path))}
    blocks = frozenset(path for path, kind in kinds.items() if counts[kind] > 1 and kind not in nested)
    return find_calls(flow, lambda path: _outermost(path, blocks))


def _after_work(flow: Flow, blocks: Sequence[Position]) -> list[Position]:
    """`blocks`, and one place between any two operations that do work: where the fewest bytes cross."""
    work = [index for index, node in enumerate(flow.order) if flow.is_work(node)]
    by_index = {position.index: position for position in blocks}
    for first, second in pairwise(work):
        if not any(index in by_index for index in range(first + 1, second + 1)):
            best = cheapest_cut(flow, first + 1, second)
            if best is not None:
                by_index[best.index] = best
    return _in_order(by_index.values())


def cheapest_cut(flow: Flow, first: int, last: int) -> Position | None:
    """Return the place from `first` to `last` that the fewest bytes cross, the earliest of several."""
    between = [flow.positions[index] for index in range(first, last + 1) if index in flow.positions]
    # Whether it can be offered is asked last: finding sizes again takes time.
    offered = filter(flow.is_offered, sorted(between, key=lambda position: position.bytes))
    return next(offered, None)


def _around(flow: Flow, calls: Sequence[Call]) -> list[Position]:
    """Cuts before and after each call. What lies between two and does no work goes with the second."""
    work = [index for index, node in enumerate(flow.order) if flow.is_work(node)]
    positions: list[Position | None] = []
    ends = [0, *(call.end for call in calls)]
    starts = [*(call.first for call in calls), len(flow.order)]
    for number, (end, start) in enumerate(zip(ends, starts, strict=True)):
        between = [index for index in work if end <= index < start]
        if number > 0 and (between or number < len(calls)):
            positions.append(cheapest_cut(flow, end, between[0] if between else start))
        if between and number < len(calls):
            positions.append(cheapest_cut(flow, between[-1] + 1, start))
    return [position for position in positions if position is not None]


def _split(
    flow: Flow,
    cuts: Sequence[Position],
    calls: Sequence[Call] = (),
    opened: Collection[Position] = (),
) -> list[Part]:
    """The parts between the cuts; those beside one of the `opened` have only some parts of a module."""
    ends: list[Position | None] = [None, *cuts, None]
    rest = frozenset(node for cut in cuts for node in cut.rest)
    called = [node for node in flow.order if node.op == "call_module"]
    parts: list[Part] = []
    for before, after in pairwise(ends):
        first = before.index if before else 0
        end = after.index if after else len(flow.order)
        within = [call.path for call in calls if call.first >= first and call.end <= end]
        module = within[0] if len(within) == 1 else None
        elsewhere = frozenset(call.path for call in calls).difference(within)
        nodes = tuple(flow.order[first:end])
        if before in opened or after in opened:
            elsewhere |= frozenset(str(node.target) for node in called if node not in nodes)
        parts.append(Part(nodes, before, after, module, rest.intersection(nodes), elsewhere))
    return parts


def parts_between(flow: Flow, bounds: Sequence[Position | int]) -> list[Part | None]:
    """Return the operations between each two of `bounds`, which ascend; None where there is none.

    A bound at an end of the graph is the number of operations before it.
    """
    cuts = list(dict.fromkeys(bound for bound in bounds if isinstance(bound, Position)))
    pieces = iter(_split(flow, cuts))
    places = [0, *(bound if isinstance(bound, int) else bound.index for bound in bounds), len(flow.order)]
    return [next(pieces) if first < end else None for first, end in pairwise(places)]


@dataclass(frozen=True)
class Granularity:
    """`block`: cuts that one tensor crosses. `fine`: after every operation that computes something.
    `module`: around the calls of the modules whose dotted names match a pattern."""

    kind: Literal["block", "fine", "module"]
    patterns: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """From `block`, `fine` or `module:PATTERN[,PATTERN...]`. Raises UsageError."""
        if text == "block":
            return cls("block")
        if text == "fine":
            return cls("fine")
        kind, _, rest = text.partition(":")
        patterns = tuple(part.strip() for part in rest.split(",") if part.strip())
        if kind != "module" or not patterns:
            raise UsageError(
                f"granularity {text!r}: unknown",
                "block, fine, or module:PATTERN[,PATTERN...], as in 'module:transformer.h.*,lm_head'.",
            )
        return cls("module", patterns)

    def __str__(self) -> str:
        return f"{self.kind}:{','.join(self.patterns)}" if self.patterns else self.kind

    def outermost(self, path: str) -> str | None:
        """The outermost module around `path`, itself included, that a pattern matches."""
        names = (*_outer(path), path)
        return next((name for name in names if any(fnmatchcase(name, p) for p in self.patterns)), None)


def refuse_unmatched(patterns: Sequence[str], names: Collection[str], what: str, where: str) -> None:
    """Raises ModelError where a pattern matches none of `names`, which are `what` ("layers") of `where`."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ModelError(
                f"{where}: no {what} is named {pattern!r}{_nearest(pattern, names)}",
                f"Patterns are matched as file names are, * and ? included. There are {_some(names)}.",
            )


def _nearest(pattern: str, names: Collection[str]) -> str:
    near = difflib.get_close_matches(pattern.rstrip(".*?"), list(names), n=3)
    return f"; nearest: {', '.join(near)}" if near else ""


def _some(names: Collection[str]) -> str:
    first = list(names)[:_MOST_NAMES]
    more = f" and {len(names) - len(first)} more" if len(names) > len(first) else ""
    return (", ".join(first) or "none") + more


# Part of a graph as a module of its own, bound to a model or to any copy of it.

_FINISH = "finish"


class Finish(nn.Module):
    """Makes what the model returns of the values that its graph ends with."""

    def __init__(self, finish: Callable[[Any], Any]) -> None:
        super().__init__()
        self._finish = finish

    def forward(self, values: Any) -> Any:
        return self._finish(values)


@dataclass(frozen=True, eq=False)
class GraphSegment:
    """Operations that take one argument, the tensor or the tuple of tensors that crosses the cut before them,
    and return the same for the cut behind them, or what the model returns."""

    flow: Flow
    part: Part
    granularity: str = "block"
    """Its kind."""

    @property
    def path(self) -> str | None:
        """Where the model keeps the module, when the segment is nothing but one call of it."""
        node = self.part.nodes[0]
        alone = len(self.part.nodes) == 1 and node.op == "call_module" and self._result is node
        if not alone or node.kwargs or node.args != (self._input_form,) or self._finishes:
            return None
        return str(node.target)

    @property
    def is_composite(self) -> bool:
        """Whether it was put together from several operations."""
        return len(self.part.nodes) > 1

    @property
    def crossing(self) -> int:
        """Tensors that it hands to the next segment; none, where it is the last."""
        return 0 if self.part.after is None else self.flow.tensors(self.part.after)

    def output_shapes(self, run: GraphRun) -> Shapes:
        """Shapes of the tensors that it hands on in a run, or of the model's output."""
        after = self.part.after
        return shapes_in(run.output if after is None else [run.values[node] for node in after.crossing])

    @property
    def name(self) -> str:
        """The module that the granularity names; else what its modules have in common; else its work."""
        if self.part.module or self._common_path:
            return self.part.module or self._common_path
        node, paths = self._telling, self.flow.traced.paths
        if node.op == "call_module":
            return str(node.target)
        # A trace counts calls of a function over the whole model: the 69th `mul` may be the only one here.
        function = re.sub(r"_\d+$", "", node.name)
        return f"{paths[node]}.{function}" if paths.get(node) else function

    def kind(self, model: nn.Module) -> str:
        """Class of the module that the name stands for, or name of the function."""
        path = self.part.module or self._common_path
        if path:
            return type(find_attribute(path, model, self.flow.traced.constants)).__name__
        target = self._telling.target
        return target if isinstance(target, str) else getattr(target, "__name__", str(target))

    def bind(self, model: nn.Module) -> nn.Module:
        """A module that runs the segment with the modules and parameters of `model` itself."""
        constants = self.flow.traced.constants_of(model)
        if self.path is not None:
            module: nn.Module = find_attribute(self.path, model, constants)
            return module
        extra = nn.Module()
        if self._finishes and self.flow.traced.finish is not None:
            setattr(extra, self._finish_name(model), Finish(self.flow.traced.finish))
        return graph_module(_GraphBuilder(self).graph(self._finish_name(model)), model, constants, extra)

    def _finish_name(self, model: nn.Module) -> str:
        free = (_FINISH + "_" * length for length in itertools.count())
        return next(n for n in free if not hasattr(model, n) and not hasattr(self.flow.traced.constants, n))

    @property
    def _finishes(self) -> bool:
        return self.part.after is None and self.flow.traced.finish is not None

    @property
    def inputs(self) -> tuple[fx.Node | None, ...]:
        before = self.part.before
        return self.flow.traced.inputs if before is None else before.crossing

    @property
    def _input_form(self) -> Any:
        return self.inputs[0] if len(self.inputs) == 1 else self.inputs

    @property
    def _result(self) -> Any:
        after = self.part.after
        if after is None:
            return self.flow.output.args[0]
        return after.crossing[0] if len(after.crossing) == 1 else after.crossing

    @property
    def _common_path(self) -> str:
        calls = [str(node.target) for node in self.part.nodes if node.op == "call_module"]
        common = _common_path(calls)
        if (self.granularity == "module" or self.part.elsewhere) and self._is_elsewhere(common):
            # Not what only follows it, such as a pool.
            weighty = list(filter(self._has_parameters, calls))
            own = _common_path(weighty)
            if weighty and self._is_elsewhere(own):
                # The module around the first that is here as a whole.
                outer = _outer(weighty[0]) if self.granularity == "block" else ()
                around = (path for path in outer if not self._is_elsewhere(path))
                own = next(around, weighty[0])
            return own or common
        return common

    def _is_elsewhere(self, path: str) -> bool:
        """Whether layers of their own are parts of this module, too."""
        return not path or any(is_inside(module, [path]) for module in self.part.elsewhere)

    def _has_parameters(self, path: str) -> bool:
        return any(True for _ in self.flow.trial.module(path).parameters())

    @property
    def _telling(self) -> fx.Node:
        """The operation it is named after where it has no module: its only work, else its last tensor."""
        work = [node for node in self.part.nodes if self.flow.is_work(node)]
        tensors = [node for node in self.part.nodes if self.flow.holds_tensors(node)]
        return work[0] if len(work) == 1 else (tensors or self.part.nodes)[-1]


def same_segment(one: GraphSegment, other: GraphSegment) -> bool:
    """Return whether both run the same, of graphs of one model that were drawn in different modes."""
    if one.path is not None or other.path is not None:
        return one.path == other.path
    finishes = [segment.flow.traced.finish if segment._finishes else None for segment in (one, other)]
    if finishes[0] != finishes[1]:
        return False
    first, second = (_GraphBuilder(segment).graph(_FINISH) for segment in (one, other))
    return _same_graphs(first, second, one.flow.traced.constants, other.flow.traced.constants)


def _same_graphs(one: fx.Graph, other: fx.Graph, constants: nn.Module, other_constants: nn.Module) -> bool:
    if len(one.nodes) != len(other.nodes):
        return False
    numbers = {node: number for graph in (one, other) for number, node in enumerate(graph.nodes)}

    def with_numbers(value: Any) -> Any:
        return fx.node.map_arg(value, lambda node: ("node", numbers[node]))

    for node, own in zip(one.nodes, other.nodes, strict=True):
        if node.op != own.op or with_numbers((node.args, node.kwargs)) != with_numbers(
            (own.args, own.kwargs)
        ):
            return False
        if node.op in ("get_attr", "call_module"):
            values = [
                attribute(source, str(each.target))
                for each, source in ((node, constants), (own, other_constants))
            ]
            if values == [None, None] and node.target == own.target:
                continue
            if not _same_constant(*values):
                return False
        elif node.op != "placeholder" and node.target != own.target:
            return False
    return True


def _same_constant(one: Any, other: Any) -> bool:
    """Return whether two tensors or modules that tracing made are the same."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return not (one.is_meta or other.is_meta) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, fx.GraphModule) and isinstance(other, fx.GraphModule):
        return _same_graphs(one.graph, other.graph, one, other)
    if type(one) is not type(other) or not isinstance(one, nn.Module):
        return False
    parts, others = dict(one.named_children()), dict(other.named_children())
    plain, own = ({k: v for k, v in vars(module).items() if k[:1] != "_"} for module in (one, other))
    return (
        parts.keys() == others.keys()
        and all(_same_constant(part, others[name]) for name, part in parts.items())
        and {**plain, "training": None} == {**own, "training": None}
    )


class _GraphBuilder:
    """Draws the graph of a segment."""

    def __init__(self, segment: GraphSegment) -> None:
        self._segment, self._flow = segment, segment.flow
        self._graph = fx.Graph()
        self._copies: dict[fx.Node, fx.Node] = {}
        """Of the nodes of the segment, and of the constants that it reads."""
        self._inputs: dict[fx.Node, fx.Node] = {}
        """Of what comes in, by the first node that has the same tensor."""
        self._sizes: dict[fx.Node, fx.Node] = {}
        """Sizes and the like that were found again."""

    def graph(self, finish: str) -> fx.Graph:
        self._take_in()
        for node in self._segment.part.nodes:
            sources = {source: self._copy_of(source) for source in node.all_input_nodes}
            self._copies[node] = self._graph.node_copy(node, sources.__getitem__)
            if node in self._segment.part.asked_again:
                self._check(node)
        result = fx.node.map_arg(self._segment._result, self._copy_of)
        if self._segment._finishes:
            result = self._graph.call_module(finish, (result,))
        self._graph.output(result)
        return self._graph

    def _check(self, node: fx.Node) -> None:
        """Layers behind a cut take sizes that do not follow the batch for constants."""
        expected = fixed_sizes(self._flow.trial.values[node])
        if expected is not None:
            self._graph.call_function(check_sizes, (self._copies[node], expected))

    def _take_in(self) -> None:
        placeholder = self._graph.placeholder("input")
        several = self._segment.inputs
        for index, node in enumerate(several):
            if node is not None:
                part = (operator.getitem, (placeholder, index))
                copy = placeholder if len(several) == 1 else self._graph.call_function(*part)
                self._inputs[self._flow.same(node)] = copy

    def _copy_of(self, node: fx.Node) -> fx.Node:
        if node in self._copies:
            return self._copies[node]
        if node.op == "get_attr":
            self._copies[node] = self._graph.node_copy(node)
            return self._copies[node]
        if self._flow.same(node) in self._inputs:
            return self._inputs[self._flow.same(node)]
        if node in self._flow.tables.exact:
            self._copies[node] = self._graph.node_copy(node, self._copy_of)
            return self._copies[node]
        return self._size(node)

    def _size(self, node: fx.Node) -> fx.Node:
        before: Position | None = self._segment.part.before
        crossing = before.crossing if before is not None else ()
        copied_inputs = {source: self._inputs[self._flow.same(source)] for source in crossing}
        copies = {**copied_inputs, **self._sizes}
        recovered = recover_sizes(node, crossing, self._graph, copies, self._flow.trial.values)
        if recovered is None:
            raise RuntimeError(f"{node.name} was said to be found again, and is not")
        self._sizes[node] = recovered
        return recovered


Sizes = int | None | tuple[Any, ...]
"""A number, or several; None where any will do."""


def fixed_sizes(moments: tuple[Any, ...]) -> Sizes:
    """What a value's numbers were whenever it was seen; None for one that changed, or is no number."""
    first = moments[0]
    if isinstance(first, tuple | list):
        if any(len(moment) != len(first) for moment in moments):
            return None
        parts = tuple(fixed_sizes(parts) for parts in zip(*moments, strict=True))
        return None if all(part is None for part in parts) else parts
    same = all(type(moment) is int and moment == first for moment in moments)
    return first if same else None


def check_sizes(value: Any, expected: Sizes) -> None:
    """In a layer that has the size at hand. Raises ModelError where it is not the example's."""
    if isinstance(value, fx.Proxy):
        # torch.load traces a layer's code to have its graph.
        value.tracer.create_proxy("call_function", check_sizes, (value, expected), {})
    elif isinstance(expected, tuple):
        for part, size in zip(value, expected, strict=True):
            check_sizes(part, size)
    elif expected is not None and value != expected:
        raise ModelError(
            f"a size of the input, or made of one, is {value}; these layers were made for {expected}",
            "Only the batch may change: make the layers anew, with an example of this size.",
        )


def _common_path(paths: Sequence[str]) -> str:
    """The module that all of them are in, or are."""
    same = itertools.takewhile(
        lambda parts: len(set(parts)) == 1, zip(*(path.split(".") for path in paths), strict=False)
    )
    return ".".join(parts[0] for parts in same)
