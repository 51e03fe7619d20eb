r"""PipeDream's `graph.txt`, and DAPPLE's variant of it: operations with their costs, and what feeds what.

    n1 -- Input -- forward_compute_time=9, backward_compute_time=0, activation_size=64, parameter_size=0
    n2 -- Linear -- forward_compute_time=0.4, backward_compute_time=0.9, activation_size=[8.0; 8.0], ...
    \tn1 -- n2

A node is one line, and may end with ` -- stage_id=N`. Times are milliseconds, sizes bytes with the batch
included; a list stands for several tensors. The batch is not in the file. The format is that of the profiler
of "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP'19.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ...cost_models.errors import short_repr
from .file_numbers import FilePosition, near, seconds, whole_bytes

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
