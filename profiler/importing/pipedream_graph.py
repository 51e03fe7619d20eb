"""PipeDream's `graph.txt`, DAPPLE's variant of it, and the chain of layers in it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

from ...cost_models.errors import FileError, short_repr
from ..profile_file import LayerMeasurement, ProfiledLayer
from .file_numbers import FilePosition, near, seconds, whole_bytes

# PipeDream's `graph.txt`, and DAPPLE's variant of it: operations with their costs, and what feeds what.
#
#       n1 -- Input -- forward_compute_time=9, backward_compute_time=0, activation_size=64, parameter_size=0
#       n2 -- Linear -- forward_compute_time=0.4, backward_compute_time=0.9, activation_size=[8.0; 8.0], ...
#       \tn1 -- n2
#
# A node is one line, and may end with ` -- stage_id=N`. Times are milliseconds, sizes bytes with the batch
# included; a list stands for several tensors. The batch is not in the file. The format is that of the
# profiler
# of "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP'19.

_EXPECTED = (
    "Expected is a node, ID -- DESCRIPTION -- forward_compute_time=MS, backward_compute_time=MS, "
    "activation_size=BYTES, parameter_size=BYTES, or an edge, ID -- ID."
)
_FIGURES = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_SEPARATOR = re.compile(r"(?:^|\s+)--(?:\s+|$)")
_INPUT = re.compile(r"inputs?(?![a-z])", re.IGNORECASE)


@dataclass(frozen=True)
class Node:
    """An operation at the file's micro-batch size. `tensors` holds the bytes of each tensor that it makes."""

    name: str
    description: str
    forward_seconds: float
    backward_seconds: float
    tensors: tuple[int, ...]
    parameter_bytes: int
    line: int

    @property
    def output_bytes(self) -> int:
        """Bytes of all that it makes."""
        return sum(self.tensors)

    @property
    def is_called_input(self) -> bool:
        """Input, Input0 and the like; not InputEmbedding."""
        return _INPUT.match(self.description) is not None


@dataclass(frozen=True)
class Graph:
    """The nodes by name, in the order of the file, and the edges, each once."""

    nodes: Mapping[str, Node]
    edges: tuple[tuple[str, str], ...]


def is_graph(text: str) -> bool:
    """Whether `text` looks like one: its first line has parts between dashes, or some line is a node's."""
    lines = [line for line in text.splitlines() if line.strip()]
    return any(" -- " in line for line in lines[:1]) or any("forward_compute_time=" in line for line in lines)


def parse_graph(text: str, file: str) -> Graph:
    """The graph in `text`; `file` names it in errors.

    Raises FileError: a line that is neither a node nor an edge, a figure that is missing, negative or no
    number, a node that stands twice, an edge of a node that is not there, no nodes.
    """
    nodes: dict[str, Node] = {}
    edges: dict[tuple[str, str], int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        place = FilePosition(file, f"line {number}")
        parts = _SEPARATOR.split(line.strip())
        if not all(parts):
            raise place.refusal(f"{short_repr(line)} is neither a node nor an edge", _EXPECTED)
        if len(parts) == 2 and "=" not in parts[1]:
            edges.setdefault((parts[0], parts[1]), number)
            continue
        node = _node(place, parts, line, number)
        if node.name in nodes:
            first = nodes[node.name].line
            raise place.refusal(
                f"node {node.name!r} stands on line {first} already", "Every node has an ID of its own."
            )
        nodes[node.name] = node
    _check(nodes, edges, file)
    return Graph(nodes, tuple(edges))


def _node(place: FilePosition, parts: list[str], line: str, number: int) -> Node:
    *rest, stage = parts
    # Which stage an earlier plan put it on says nothing of its costs.
    head = rest if stage.startswith("stage_id=") else parts
    if len(head) < 3 or "=" not in head[-1]:
        raise place.refusal(f"{short_repr(line)} is neither a node nor an edge", _EXPECTED)
    figures = _figures(place, head[-1])
    return Node(
        name=head[0],
        description=" -- ".join(head[1:-1]),
        forward_seconds=seconds(place, "forward_compute_time", figures["forward_compute_time"], 1e3),
        backward_seconds=seconds(place, "backward_compute_time", figures["backward_compute_time"], 1e3),
        tensors=_sizes(place, "activation_size", figures["activation_size"]),
        parameter_bytes=whole_bytes(place, "parameter_size", figures["parameter_size"]),
        line=number,
    )


def _figures(place: FilePosition, text: str) -> dict[str, str]:
    """`key=value, key=value` as a dict that has all keys of a node."""
    figures: dict[str, str] = {}
    for pair in re.split(r"\s*,\s*", text):
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals:
            raise place.refusal(f"{short_repr(pair)} is not KEY=VALUE", _EXPECTED)
        if key not in _FIGURES:
            raise place.refusal(f"unknown key {short_repr(key)}", near(key, _FIGURES))
        if key in figures:
            raise place.refusal(f"{key} stands twice", "Omit one of them.")
        figures[key] = value
    for key in _FIGURES:
        if key not in figures:
            raise place.refusal(f"{key} is missing in {short_repr(text)}", _EXPECTED)
    return figures


def _sizes(place: FilePosition, key: str, text: str) -> tuple[int, ...]:
    """`8.0`, or the sizes in `[8.0; 16.0]`."""
    is_list = text.startswith("[") and text.endswith("]")
    parts = text[1:-1].split(";") if is_list else [text]
    return tuple(whole_bytes(place, key, part.strip()) for part in parts)


def _check(nodes: Mapping[str, Node], edges: Mapping[tuple[str, str], int], file: str) -> None:
    if not nodes:
        raise FilePosition(file, "the whole file").refusal("has no nodes", _EXPECTED)
    for edge, line in edges.items():
        for end in edge:
            if end not in nodes:
                raise FilePosition(file, f"line {line}").refusal(
                    f"the edge {edge[0]} -- {edge[1]} is of {end!r}, and there is no such node",
                    near(end, nodes),
                )
    if len(nodes) > 1 and not edges:
        raise FilePosition(file, "the whole file").refusal(
            f"has {len(nodes)} nodes and no edge", "Is it whole? Edges stand behind the nodes: ID -- ID."
        )


# From an imported graph of operations to a chain of layers, cut where the granularity says.

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
