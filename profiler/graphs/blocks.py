"""The blocks that a model repeats, found in its graph, and the few layers around them.

A block is an entry of an nn.ModuleList, nn.Sequential or nn.ModuleDict that has parts of its own. Entries
are blocks where they run in a row, each on what the one before returned: experts, which all take the same,
are none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from torch import fx, nn

from .flow import Flow, Position
from .graph import is_inside, module_around

_HOLDERS = (nn.ModuleList, nn.ModuleDict)
_LISTS = (*_HOLDERS, nn.Sequential)
DOMINATES = 0.5
"""A part of the model's FLOPs that one layer is not to have, where there are modules inside to tell apart."""


_OF_A_STAGE = 0.4
"""The same of a layer that is a stage of blocks, where these are known."""


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


def _outermost(path: str, paths: frozenset[str]) -> str | None:
    parts = path.split(".")
    names = (".".join(parts[: length + 1]) for length in range(len(parts)))
    return next((name for name in names if name in paths), None)


def _has_parts(module: nn.Module) -> bool:
    return any(True for _ in module.children()) and any(True for _ in module.parameters())


def _common(paths: Sequence[Sequence[str]]) -> list[str]:
    shortest: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shortest.append(parts[0])
    return shortest
