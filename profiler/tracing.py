"""torch.fx: the graph of a module, parted where one value alone leads on from what was computed before."""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import networkx as nx
from torch import fx, nn

from ..cost_models.errors import ModelError
from .copies import copied
from .graph_module import graph_module
from .out_of_memory import is_out_of_memory
from .user_code import at_user_line, first_line

_AS_SEQUENTIAL = "Make it an nn.Sequential of its layers: then nothing needs to be traced."


@dataclass(frozen=True, eq=False)
class GraphSegment:
    """Nodes of a traced graph that only `fed_by` leads into, in their order; they return `result`."""

    nodes: tuple[fx.Node, ...]
    fed_by: fx.Node
    result: Any
    constants: nn.Module
    """Holds the tensors that the trace itself made, which the model lacks."""

    @property
    def path(self) -> str | None:
        """Where the model keeps the module, when the segment is nothing but one call of it."""
        node = self.nodes[0]
        alone = len(self.nodes) == 1 and node.op == "call_module" and self.result is node
        return str(node.target) if alone and node.args == (self.fed_by,) and not node.kwargs else None

    @property
    def is_composite(self) -> bool:
        return len(self.nodes) > 1

    @property
    def name(self) -> str:
        """The module's path; of several modules what their paths begin with; else the last node's name."""
        return self._common_path or self.nodes[-1].name

    def kind(self, model: nn.Module) -> str:
        """Class of the module that the name stands for, or name of the function."""
        if self._common_path:
            return type(model.get_submodule(self._common_path)).__name__
        target = self.nodes[-1].target
        return target if isinstance(target, str) else getattr(target, "__name__", str(target))

    def bind(self, model: nn.Module) -> nn.Module:
        """A module that runs the segment with the modules and parameters of `model` itself."""
        if self.path is not None:
            return model.get_submodule(self.path)
        graph = fx.Graph()
        copies = {self.fed_by: graph.placeholder("input")}
        for node in self.nodes:
            for source in node.all_input_nodes:
                if source.op == "get_attr" and source not in copies:
                    copies[source] = graph.node_copy(source)
            copies[node] = graph.node_copy(node, copies.__getitem__)
        for source in _nodes_in(self.result):
            if source.op == "get_attr" and source not in copies:
                copies[source] = graph.node_copy(source)
        graph.output(fx.node.map_arg(self.result, copies.__getitem__))
        return graph_module(graph, model, self.constants)

    def followed_by(self, other: GraphSegment) -> GraphSegment:
        """Both as one."""
        return GraphSegment(self.nodes + other.nodes, self.fed_by, other.result, self.constants)

    @property
    def _common_path(self) -> str:
        paths = [str(node.target).split(".") for node in self.nodes if node.op == "call_module"]
        same = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
        return ".".join(parts[0] for parts in same)


def traced_segments(model: nn.Module, name: str) -> list[GraphSegment]:
    """Parts `model` at every value that all paths from its input to its output go through.

    Those values are the dominators of the output in the graph of values; cuts that some other value would
    cross all the same (one that the input does not lead to) are given up. A copy is called, with stand-ins
    for tensors, of which it may keep some.

    Raises ModelError where the model cannot be traced, takes several inputs, or computes nothing.
    """
    copy = copied(model, name)
    graph, source = _trace(copy, name)
    constants = _constants(graph, copy, model)
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    flow = nx.DiGraph()
    flow.add_nodes_from(node for node in graph.nodes if node.op not in ("get_attr", "placeholder"))
    flow.add_edges_from((a, b) for a, b in _edges(graph) if a.op != "get_attr")
    if source not in flow or not nx.has_path(flow, source, output):
        raise ModelError(
            f"{name}: its output does not depend on its input", "Return what is computed from the input."
        )
    cuts = _dominators(flow, source, output)
    places = _places(flow, source, cuts)
    kept = [cut for cut in cuts if cut not in _crossed(flow, source, cuts, places)]
    return list(_parts(_places(flow, source, kept), source, kept, output, constants))


class _Tracer(fx.Tracer):
    # A buffer must stay a reference to the model's own, not become a constant of the copy that is traced.
    proxy_buffer_attributes = True


def _trace(model: nn.Module, name: str) -> tuple[fx.Graph, fx.Node]:
    """The graph, and the placeholder of its only input; other arguments of forward keep their defaults."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph = _Tracer().trace(model, concrete_args=_defaults(model, name))
    except Exception as error:
        if isinstance(error, ModelError) or is_out_of_memory(error):
            raise
        raise ModelError(
            f"{name} cannot be traced by torch.fx: {first_line(error)}{at_user_line(error)}", _AS_SEQUENTIAL
        ) from error
    source, *others = [node for node in graph.nodes if node.op == "placeholder"] or [None]
    if source is None:
        raise ModelError(f"{name}: its forward takes no input", "Give forward one tensor.")
    _erase(graph, others)
    return graph, source


def _defaults(model: nn.Module, name: str) -> dict[str, Any] | None:
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = list(inspect.signature(model.forward).parameters.values())
    if parameters and parameters[0].kind not in plain:
        raise ModelError(
            f"{name}: forward takes {_in_signature(parameters[0])}: name its one tensor",
            "Wrap the model in a module whose forward takes one tensor, as in forward(self, x).",
        )
    others = [
        parameter
        for index, parameter in enumerate(parameters)
        if parameter.kind in (*plain, inspect.Parameter.KEYWORD_ONLY) and index > 0
    ]
    needed = [parameter.name for parameter in others if parameter.default is inspect.Parameter.empty]
    if needed:
        raise ModelError(
            f"{name}: forward needs more than one input: {parameters[0].name}, {', '.join(needed)}",
            "Wrap the model in a module whose forward takes one tensor.",
        )
    return {parameter.name: parameter.default for parameter in others} or None


def _in_signature(parameter: inspect.Parameter) -> str:
    marks: dict[Any, str] = {
        inspect.Parameter.VAR_POSITIONAL: "*",
        inspect.Parameter.VAR_KEYWORD: "**",
        inspect.Parameter.KEYWORD_ONLY: "*, ",
    }
    return f"{marks.get(parameter.kind, '')}{parameter.name}"


def _constants(graph: fx.Graph, traced: nn.Module, model: nn.Module) -> nn.Module:
    """What the graph reads and `model` lacks, without the weights of the traced copy."""
    found = nn.Module()
    for node in graph.nodes:
        top = str(node.target).partition(".")[0]
        if node.op in ("get_attr", "call_module") and not hasattr(model, top):
            setattr(found, top, getattr(traced, top))
    return found


def _erase(graph: fx.Graph, placeholders: Iterable[fx.Node]) -> None:
    """Takes away the other arguments and what fx added to check that they keep their values."""
    doomed = set(placeholders)
    for node in graph.nodes:
        if doomed.intersection(node.all_input_nodes):
            doomed.add(node)
    for node in reversed(list(graph.nodes)):
        if node in doomed and not node.users:
            graph.erase_node(node)


def _edges(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node]]:
    for node in graph.nodes:
        for source in node.all_input_nodes:
            yield source, node


def _nodes_in(argument: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg(argument, found.append)
    return found


def _dominators(flow: nx.DiGraph, source: fx.Node, output: fx.Node) -> list[fx.Node]:
    """Between source and output, in order, without them."""
    above = nx.immediate_dominators(flow, source)
    found = []
    node = above[output]
    while node is not source:
        found.append(node)
        node = above[node]
    return found[::-1]


def _places(flow: nx.DiGraph, source: fx.Node, cuts: list[fx.Node]) -> dict[fx.Node, int]:
    """For every node the number of cuts before it; what the input does not lead to goes with its users."""
    order = list(nx.lexicographical_topological_sort(flow, key=_order(flow)))
    passing = {source, *cuts}
    places = {source: -1}
    for node in order:
        before = [places[p] + (p in passing) for p in flow.predecessors(node) if p in places]
        if node is not source and before:
            places[node] = max(before)
    for node in reversed(order):
        if node not in places:
            places[node] = min((places[user] for user in flow.successors(node)), default=0)
    return {node: places[node] for node in order}


def _order(flow: nx.DiGraph) -> Any:
    graph = next(iter(flow)).graph
    return {node: index for index, node in enumerate(graph.nodes)}.__getitem__


def _crossed(
    flow: nx.DiGraph, source: fx.Node, cuts: list[fx.Node], places: dict[fx.Node, int]
) -> set[fx.Node]:
    """Cuts that a value other than their own crosses."""
    passing = {source, *cuts}
    found: set[fx.Node] = set()
    for a, b in flow.edges:
        first = places[a] + (a in passing)
        found.update(cuts[first : places[b]])
    return found


def _parts(
    places: dict[fx.Node, int], source: fx.Node, cuts: list[fx.Node], output: fx.Node, constants: nn.Module
) -> Iterator[GraphSegment]:
    results: list[Any] = [*cuts, output.args[0]]
    if cuts and results[-1] is cuts[-1]:
        results.pop()
    parts: list[list[fx.Node]] = [[] for _ in results]
    for node, place in places.items():
        if node not in (source, output):
            parts[min(place, len(parts) - 1)].append(node)
    if len(parts) > 1 and not parts[-1]:
        # The output only wraps the last value, in a tuple for instance.
        parts.pop()
        results[-2:] = results[-1:]
    for index, (nodes, result) in enumerate(zip(parts, results, strict=True)):
        if nodes:
            yield GraphSegment(tuple(nodes), cuts[index - 1] if index else source, result, constants)
