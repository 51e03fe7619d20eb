"""Part of a graph as a module of its own, bound to a model or to any copy of it."""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from ...cost_models.errors import ModelError
from .cutting import Part
from .flow import Flow, Position
from .graph import find_attribute, graph_module, is_inside
from .graph_run import GraphRun
from .output_shapes import Shapes, shapes_in
from .remodule import attribute
from .size_recovery import recover_sizes

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
        common = _common(calls)
        if (self.granularity == "module" or self.part.elsewhere) and self._is_elsewhere(common):
            # Not what only follows it, such as a pool.
            weighty = list(filter(self._has_parameters, calls))
            own = _common(weighty)
            return (own if not self._is_elsewhere(own) else weighty[0]) if weighty else common
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


def _common(paths: Sequence[str]) -> str:
    """The module that all of them are in, or are."""
    same = itertools.takewhile(
        lambda parts: len(set(parts)) == 1, zip(*(path.split(".") for path in paths), strict=False)
    )
    return ".".join(parts[0] for parts in same)
