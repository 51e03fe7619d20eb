"""The layers of a model in the mode that it is not in, where its code reads `self.training`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from ..cost_models.errors import ModelError
from .comparison import ModelCheck
from .cutting import Granularity, GraphSegment, cheapest_cut, parts, parts_between, same_segment
from .flow import Flow, Position
from .graph import TracedGraph, is_inside
from .layer import ModeVariants
from .layer_sequential import register_once
from .tracing import trace_model
from .trial import Trial
from .user_model import ModelInput, copy_modules, fixed_seed

MODES = {True: "training", False: "evaluation"}


class _CannotAlignError(Exception):
    """The layers of the one mode have no counterparts in the other."""


@dataclass(frozen=True, eq=False)
class ModeTracer:
    """Traces a model in the modes that it is not in.

    `segments`, `flow`: of the trace in its own. `verify_seconds`: as of `build_chain`; None: not compared.
    """

    model: nn.Module
    example: ModelInput
    name: str
    granularity: Granularity
    segments: Sequence[GraphSegment]
    flow: Flow
    layer_names: Sequence[str]
    verify_seconds: float | None

    def variants(self) -> ModeVariants | None:
        """The layers in the other modes; None where no code in the graph reads a mode that they change."""
        reads = self.flow.traced.fixed_modes
        modules: dict[bool, tuple[nn.Module | None, ...]] = {}
        refusals: dict[bool, str] = {}
        for mode, word in MODES.items() if reads else ():
            switched = copy_modules(self.model, self.name).train(mode)
            before, after = dict(self.model.named_modules()), dict(switched.named_modules())
            if all(before[path].training == after[path].training for path in self.flow.traced.modes):
                continue
            try:
                segments = self._segments(switched)
            except (ModelError, _CannotAlignError) as error:
                what = error.what if isinstance(error, ModelError) else str(error)
                path, line = next(iter(reads.items()))
                refusals[mode] = (
                    f"the layers of {self.name} have no {word} mode: {what}. "
                    f"{path or self.name} reads its mode at {line}"
                )
                continue
            if any(segment is not None for segment in segments):
                modules[mode] = tuple(
                    None if segment is None else segment.bind(self.model) for segment in segments
                )
        if not modules and not refusals:
            return None
        return ModeVariants(modules, refusals, self._places(reads))

    def _places(self, reads: Mapping[str, str]) -> tuple[bool, ...]:
        """Mark each layer with code that reads the mode, or all traced layers if none shows it."""
        traced = [segment.path is None for segment in self.segments]
        reading = [
            is_traced and any(is_inside(path, reads) or "" in reads for path in self._paths(segment))
            for is_traced, segment in zip(traced, self.segments, strict=True)
        ]
        return tuple(next(filter(any, (reading, traced)), [True] * len(traced)))

    def _paths(self, segment: GraphSegment) -> list[str]:
        paths = self.flow.traced.paths
        return [paths.get(node, "").partition("@")[0] for node in segment.part.nodes]

    def _segments(self, switched: nn.Module) -> list[Any]:
        """For each layer the segment of the other mode; None where it is the same."""

        def cut(traced: TracedGraph, trial: Trial) -> list[Any]:
            return self._matched(Flow(traced, trial), switched)

        with fixed_seed(0):
            for tool in (self.flow.traced.tool, None):
                try:
                    return trace_model(switched, self.example, self.name, self.granularity, cut, tool)
                except ModelError:
                    if tool is None:
                        raise
        raise AssertionError

    def _matched(self, flow: Flow, switched: nn.Module) -> list[Any]:
        kind = self.granularity.kind
        plain = [GraphSegment(flow, part, kind) for part in parts(flow, self.granularity)]
        if len(plain) == len(self.segments) and all(map(same_segment, self.segments, plain)):
            return [None] * len(plain)
        aligned: list[GraphSegment | PassOn] = [*plain]
        if [segment.name for segment in plain] != [segment.name for segment in self.segments]:
            bounds = _Alignment(self.segments, flow).bounds()
            pieces = parts_between(flow, bounds)
            aligned = [PassOn() if part is None else GraphSegment(flow, part, kind) for part in pieces]
        self._compare(aligned, flow, switched)
        return [
            None if isinstance(own, GraphSegment) and same_segment(first, own) else own
            for first, own in zip(self.segments, aligned, strict=True)
        ]

    def _compare(self, segments: Sequence[Any], flow: Flow, switched: nn.Module) -> None:
        if self.verify_seconds is None:
            return

        def bind(copy: nn.Module) -> nn.Sequential:
            modules = [segment.bind(copy) for segment in segments]
            return nn.Sequential(*register_once(modules, on_clone=flow.overwrites_input))

        check = ModelCheck(switched, self.example, self.name, self.verify_seconds)
        check.compare(bind, self.layer_names, flow.traced.tool)


class PassOn:
    """A segment without operations: its layer does nothing in this mode."""

    def bind(self, model: nn.Module) -> nn.Module:
        """A module that returns what it is given."""
        module = nn.Identity()
        module.training = model.training
        return module


class _Alignment:
    """Places in a graph of one mode that correspond to the cuts between the segments of another."""

    def __init__(self, segments: Sequence[GraphSegment], flow: Flow) -> None:
        self._count, self._flow = len(segments), flow
        self._owners: dict[str, list[int]] = {}
        for index, segment in enumerate(segments):
            paths = segment.flow.traced.paths
            for name in dict.fromkeys(key for node in segment.part.nodes for key in _names_used(node, paths)):
                self._owners.setdefault(name, []).append(index)

    def bounds(self) -> list[Position | int]:
        """For each cut a position, or the number of operations where it lies at an end of the graph."""
        layers = self._layers()
        end = len(layers)
        bounds: list[Position | int] = []
        before = 0
        for cut in range(self._count - 1):
            first = 1 + max((i for i, own in enumerate(layers) if own is not None and own <= cut), default=-1)
            last = min((i for i, own in enumerate(layers) if own is not None and own > cut), default=end)
            position = cheapest_cut(self._flow, max(first, before), last)
            if position is not None:
                bounds.append(position)
                before = position.index
            elif last == end or max(first, before) == 0:
                before = end if last == end else 0
                bounds.append(before)
            else:
                node = self._flow.order[first - 1]
                raise _CannotAlignError(
                    f"it cannot be cut behind {self._flow.traced.paths.get(node) or node.name}"
                )
        return bounds

    def _layers(self) -> list[int | None]:
        """For each operation the layer that it belongs to; None for one that tells nothing.

        Parameters and buffers decide; what only one layer calls tells more where it fits between.
        """
        layers = list(self._by_tensors())
        nexts: list[int] = []
        for layer in reversed(layers):
            nexts.append(
                min(nexts[-1] if nexts else self._count - 1, self._count if layer is None else layer)
            )
        current = 0
        for index, (node, most) in enumerate(zip(self._flow.order, reversed(nexts), strict=True)):
            if layers[index] is None:
                single = [self._owners.get(name, []) for name in self._names(node)]
                fitting = [own[0] for own in single if len(own) == 1 and current <= own[0] <= most]
                layers[index] = min(fitting, default=None)
            current = max(current, layers[index] or 0)
        return layers

    def _by_tensors(self) -> Iterator[int | None]:
        current = 0
        for node in self._flow.order:
            owners = [self._owners.get(name, []) for name in self._names(node) if self._has_tensors(name)]
            later = [next((layer for layer in own if layer >= current), -1) for own in owners if own]
            if -1 in later:
                raise _CannotAlignError(f"{node.target} runs after modules that it ran before")
            current = max([current, *later])
            yield current if later else None

    def _names(self, node: fx.Node) -> list[str]:
        return _names_used(node, self._flow.traced.paths)

    def _has_tensors(self, name: str) -> bool:
        if name.startswith(_FUNCTION):
            return False
        value: object = self._flow.trial.module(name)
        if isinstance(value, nn.Module):
            return any(True for _ in (*value.parameters(), *value.buffers()))
        return isinstance(value, Tensor)


_FUNCTION = "function "


def _names_used(node: fx.Node, paths: Mapping[fx.Node, str]) -> list[str]:
    """Names of the module or function that it calls, and of the parameters and buffers that it reads."""
    names = [str(source.target) for source in node.all_input_nodes if source.op == "get_attr"]
    if node.op == "call_module":
        return [*names, str(node.target)]
    path = paths.get(node, "").partition("@")[0]
    return [*names, f"{_FUNCTION}{path} {getattr(node.target, '__name__', node.target)}"]
