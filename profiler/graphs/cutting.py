"""Granularities: how finely a model is cut, and at which of the places where its graph can be cut."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Literal, Self

from torch import fx

from ...cost_models.errors import ModelError, UsageError
from .blocks import BlockCalls, Call, find_calls
from .flow import Flow, Position

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
    if granularity.kind == "fine":
        by_index = {position.index: position for position in (*single, *cuts)}
        return _split(flow, _after_work(flow, [by_index[index] for index in sorted(by_index)]))
    return _split(flow, cuts, calls)


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


def _after_work(flow: Flow, blocks: Sequence[Position]) -> list[Position]:
    """`blocks`, and one place between any two operations that do work: where the fewest bytes cross."""
    work = [index for index, node in enumerate(flow.order) if flow.is_work(node)]
    by_index = {position.index: position for position in blocks}
    for first, second in pairwise(work):
        if not any(index in by_index for index in range(first + 1, second + 1)):
            best = cheapest_cut(flow, first + 1, second)
            if best is not None:
                by_index[best.index] = best
    return [by_index[index] for index in sorted(by_index)]


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


def _split(flow: Flow, cuts: Sequence[Position], calls: Sequence[Call] = ()) -> list[Part]:
    ends: list[Position | None] = [None, *cuts, None]
    rest = frozenset(node for cut in cuts for node in cut.rest)
    parts: list[Part] = []
    for before, after in pairwise(ends):
        first = before.index if before else 0
        end = after.index if after else len(flow.order)
        within = [call.path for call in calls if call.first >= first and call.end <= end]
        module = within[0] if len(within) == 1 else None
        elsewhere = frozenset(call.path for call in calls).difference(within)
        nodes = tuple(flow.order[first:end])
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
        parts = path.split(".")
        names = (".".join(parts[: length + 1]) for length in range(len(parts)))
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
