"""From an imported graph of operations to a chain of layers, cut where the granularity says."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

from ...cost_models.errors import FileError
from ..profile_records import LayerMeasurement, ProfiledLayer
from .pipedream_graph import Graph, Node

_NUMBERED = re.compile(r"(.*?)(\d{1,18})")
_PLAIN = re.compile(r"[\w./\[\]:+-]+")
_KINDS = 2
"""So many kinds of operations are named for a layer of several."""


@dataclass(frozen=True)
class GraphLayers:
    """The layers of a graph, and the nodes called Input that feed them."""

    layers: list[ProfiledLayer]
    edges: list[tuple[str, str]]
    inputs: list[Node]

    @property
    def input_bytes(self) -> int:
        """Bytes of a micro-batch of the model's input."""
        return sum(node.output_bytes for node in self.inputs)


@dataclass(frozen=True)
class _Crossing:
    """What crosses the cut behind each operation: bytes and tensors, each tensor counted once."""

    bytes: list[int]
    tensors: list[int]


def cut_into_layers(graph: Graph, file: str, granularity: str, micro_batch_size: int) -> GraphLayers:
    """The operations in a topological order: `fine`, each is a layer; `block`, a layer is what lies between
    places that one tensor crosses.

    Raises FileError where the graph has a cycle, or nothing but inputs.
    """
    order = _ordered(graph, file)
    fed = {target for _, target in graph.edges}
    inputs = [node for node in order if node.is_called_input and node.name not in fed]
    work = [node for node in order if node not in inputs]
    if not work:
        raise FileError(f"{file}: has inputs and no operation", "Name the graph of a whole model.")
    crossing = _crossing(work, inputs, graph.edges)
    cuts = [i for i, count in enumerate(crossing.tensors[:-1]) if granularity == "fine" or count <= 1]
    runs = list(pairwise([0, *(cut + 1 for cut in cuts), len(work)]))
    names = _names(work)
    layer_names = [_run_name([names[node.name] for node in work[first:end]]) for first, end in runs]
    received = [sum(node.output_bytes for node in inputs), *(crossing.bytes[end - 1] for _, end in runs[:-1])]
    layers = [
        _layer(name, work[first:end], received_bytes, crossing, end - 1, micro_batch_size)
        for name, (first, end), received_bytes in zip(layer_names, runs, received, strict=True)
    ]
    owner = {node.name: layer_names[i] for i, (first, end) in enumerate(runs) for node in work[first:end]}
    pairs = ((owner.get(source), owner.get(target)) for source, target in _by_source(graph.edges, work))
    edges = [(source, target) for source, target in pairs if source and target and source != target]
    return GraphLayers(layers, list(dict.fromkeys(edges)), inputs)


def _ordered(graph: Graph, file: str) -> list[Node]:
    """The nodes in a topological order: by the numbers in their IDs (the order in which the model ran), or
    where they have none by their lines. Raises FileError at a cycle."""
    numbered = {name: _NUMBERED.fullmatch(name) for name in graph.nodes}
    ranks = {name: int(match[2]) for name, match in numbered.items() if match}
    if len(ranks) < len(numbered) or len({match[1] for match in numbered.values() if match}) > 1:
        ranks = {name: node.line for name, node in graph.nodes.items()}
    import networkx as nx  # here: only graphs need it, and it takes 0.15 s

    edges = nx.DiGraph()
    edges.add_nodes_from(graph.nodes)
    edges.add_edges_from(graph.edges)
    try:
        order = list(nx.lexicographical_topological_sort(edges, key=ranks.__getitem__))
    except nx.NetworkXUnfeasible:
        cycle = [source for source, _ in nx.find_cycle(edges)]
        path = " -- ".join([*cycle[:8], *(["..."] if len(cycle) > 8 else []), cycle[0]])
        raise FileError(
            f"{file}: the edges form a cycle: {path}", "Mend the file: a graph feeds forward."
        ) from None
    return [graph.nodes[name] for name in order]


def _crossing(work: Sequence[Node], inputs: Sequence[Node], edges: Iterable[tuple[str, str]]) -> _Crossing:
    """An operation's tensors cross the cuts up to its last consumer; those of an input, from the start on."""
    place = {node.name: index for index, node in enumerate(work)}
    last: dict[str, int] = {}
    for source, target in edges:
        last[source] = max(last.get(source, 0), place[target])
    sizes, tensors = [0] * (len(work) + 1), [0] * (len(work) + 1)
    for node in chain(inputs, work):
        start, end = place.get(node.name, 0), last.get(node.name)
        if end is not None:
            for changes, amount in ((sizes, node.output_bytes), (tensors, len(node.tensors))):
                changes[start] += amount
                changes[end] -= amount
    return _Crossing(list(accumulate(sizes[:-1])), list(accumulate(tensors[:-1])))


def _layer(
    name: str, nodes: Sequence[Node], received: int, crossing: _Crossing, cut: int, size: int
) -> ProfiledLayer:
    """`nodes` as one layer in front of the cut behind operation `cut`. Each saves what it makes, so that a
    stage that starts here keeps what it receives besides."""
    is_last = cut == len(crossing.bytes) - 1
    return ProfiledLayer(
        name=name,
        kind=_kind(nodes),
        parameter_bytes=sum(node.parameter_bytes for node in nodes),
        crossing=crossing.tensors[cut],
        costs=[
            LayerMeasurement(
                micro_batch_size=size,
                forward_seconds=sum(node.forward_seconds for node in nodes),
                backward_seconds=sum(node.backward_seconds for node in nodes),
                output_bytes=nodes[-1].output_bytes if is_last else crossing.bytes[cut],
                saved_bytes=sum(node.output_bytes for node in nodes),
                saved_input_bytes=received,
            )
        ],
    )


def _names(work: Sequence[Node]) -> Mapping[str, str]:
    """Names of operations: their descriptions, where these are words and all different; else their IDs."""
    words = {node.description for node in work}
    are_distinct = len(words) == len(work) and all(_PLAIN.fullmatch(word) for word in words)
    return {node.name: node.description if are_distinct else node.name for node in work}


def _run_name(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]}..{names[-1]}"


def _kind(nodes: Sequence[Node]) -> str:
    """`Conv2d` of `Conv2d(3, 64, ...)` or `Conv2d_1_1`; of a layer of many, their number."""
    matches = (re.match(r"\w+", node.description) for node in nodes)
    kinds = list(dict.fromkeys(re.sub(r"(_\d+)+$", "", match[0]) for match in matches if match))
    return " + ".join(kinds) if len(kinds) <= _KINDS else f"{len(nodes)} operations"


def _by_source(edges: Iterable[tuple[str, str]], work: Sequence[Node]) -> list[tuple[str, str]]:
    """The edges in the order of the operations, whatever that of the file."""
    place = {node.name: index for index, node in enumerate(work)}
    inner = [edge for edge in edges if edge[0] in place]
    return sorted(inner, key=lambda edge: (place[edge[0]], place[edge[1]]))
