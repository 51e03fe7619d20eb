"""A graph of operations as a chain: its order, its cuts, and the bytes that cross them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pplan.cost_models.errors import FileError
from pplan.profiler.imports import Graph, GraphLayers, Node, cut_into_layers, parse_graph


def made(text: str, granularity: str) -> GraphLayers:
    return cut_into_layers(parse_graph(text, "graph.txt"), "graph.txt", granularity, 4)


def test_blocks_lie_between_single_tensors(residual: str) -> None:
    """By hand: node2's output feeds both branches, Add makes two tensors of which one is used, and Size needs
    the tensor that Linear needs, too."""
    blocks = made(residual, "block")
    assert [(layer.name, layer.kind) for layer in blocks.layers] == [
        ("node2", "Conv2d"),
        ("node3..node7", "5 operations"),
        ("node8..node9", "Size + Linear"),
    ]
    costs = [layer.costs[0] for layer in blocks.layers]
    assert [cost.forward_seconds for cost in costs] == pytest.approx([1e-3, 5.75e-3, 1e-3])
    assert [cost.backward_seconds for cost in costs] == pytest.approx([2e-3, 10.75e-3, 1.5e-3])
    assert [cost.output_bytes for cost in costs] == [800, 160, 160]
    assert [cost.saved_bytes for cost in costs] == [800, 320 + 320 + 640 + 320 + 160, 164]
    assert [cost.saved_input_bytes for cost in costs] == [400, 800, 160]
    assert [layer.parameter_bytes for layer in blocks.layers] == [40, 240, 1640]
    assert [layer.crossing for layer in blocks.layers] == [1, 1, 0]
    assert blocks.edges == [("node2", "node3..node7"), ("node3..node7", "node8..node9")]
    assert blocks.input_bytes == 400


def test_fine_cuts_everywhere_and_counts_each_tensor_once(residual: str) -> None:
    fine = made(residual, "fine")
    assert [layer.name for layer in fine.layers] == [f"node{i}" for i in range(2, 10)]
    # Behind node3 the stem's output crosses, too: once, though both branches need it.
    outputs = [800, 800 + 320, 800 + 320, 320 + 640, 320, 160, 160 + 4, 160]
    assert [layer.costs[0].output_bytes for layer in fine.layers] == outputs
    assert [layer.crossing for layer in fine.layers] == [1, 2, 2, 2, 2, 1, 2, 0]
    assert [layer.costs[0].saved_input_bytes for layer in fine.layers] == [400, *outputs[:-1]]
    assert ("node2", "node5") in fine.edges
    assert len(fine.edges) == len(set(fine.edges)) == 9


def test_an_input_that_a_late_operation_needs_crosses_until_there(node_line: Callable[..., str]) -> None:
    lines = [
        node_line(f"n{i}", name, 1, 1, 10 * i) for i, name in enumerate(["Input", "A", "B", "C"], start=1)
    ]
    text = "\n".join([*lines, "n1 -- n2", "n2 -- n3", "n3 -- n4", "n1 -- n3"])
    assert [layer.costs[0].output_bytes for layer in made(text, "fine").layers] == [20 + 10, 30, 40]
    assert [layer.name for layer in made(text, "block").layers] == ["A..B", "C"]


def test_descriptions_are_names_where_they_tell_the_operations_apart(node_line: Callable[..., str]) -> None:
    """As DAPPLE writes them."""
    lines = [
        node_line("n1", "Input", 1, 0, 1),
        *(node_line(f"n{i}", f"Conv2d_1_{i}", 1, 2, 8) for i in (2, 3)),
    ]
    layers = made("\n".join([*lines, "n1 -- n2", "n2 -- n3"]), "block").layers
    assert [(layer.name, layer.kind) for layer in layers] == [
        ("Conv2d_1_2", "Conv2d"),
        ("Conv2d_1_3", "Conv2d"),
    ]


def test_without_numbers_the_order_is_that_of_the_lines(node_line: Callable[..., str]) -> None:
    lines = [node_line(name, "ReLU()", 1, 1, 1) for name in ("stem", "left", "right", "add")]
    edges = ["stem -- right", "stem -- left", "left -- add", "right -- add"]
    assert [layer.name for layer in made("\n".join([*edges, *lines]), "fine").layers] == [
        *("stem", "left", "right", "add")
    ]


def test_what_cannot_be_a_chain(node_line: Callable[..., str]) -> None:
    a, b, c = (node_line(name, "ReLU()", 1, 1, 1) for name in "abc")
    with pytest.raises(FileError, match="the edges form a cycle: ") as caught:
        made("\n".join([a, b, c, "a -- b", "b -- c", "c -- b"]), "block")
    assert "b -- c" in caught.value.what
    with pytest.raises(FileError, match="the edges form a cycle: a -- a"):
        made("\n".join([a, "a -- a"]), "block")
    with pytest.raises(FileError, match="has inputs and no operation"):
        made(node_line("a", "Input", 1, 1, 1), "block")


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    count = draw(st.integers(2, 9))
    nodes = {
        f"n{i}": Node(
            name=f"n{i}",
            description="Input()" if i < 2 and draw(st.booleans()) else "Op()",
            forward_seconds=draw(st.integers(0, 5)),
            backward_seconds=draw(st.integers(0, 5)),
            tensors=tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=2))),
            parameter_bytes=draw(st.integers(0, 5)),
            line=i + 1,
        )
        for i in range(count)
    }
    pairs = [(f"n{i}", f"n{j}") for i in range(count) for j in range(i + 1, count)]
    return Graph(nodes, tuple(draw(st.lists(st.sampled_from(pairs), min_size=1, unique=True))))


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(graphs())
def test_any_graph_against_the_definition(graph: Graph) -> None:
    """Numbered as they run, so the order is known: every cut's bytes are those of the producers before it
    that have a consumer behind it."""
    fed = {target for _, target in graph.edges}
    inputs = {name for name, node in graph.nodes.items() if node.is_called_input and name not in fed}
    work = [name for name in graph.nodes if name not in inputs]
    if not work:
        with pytest.raises(FileError, match="no operation"):
            cut_into_layers(graph, "g", "fine", 1)
        return

    def crossing(cut: int) -> list[Node]:
        behind = set(work[cut + 1 :])
        sources = {source for source, target in graph.edges if target in behind} - behind
        return [graph.nodes[name] for name in sources]

    fine = cut_into_layers(graph, "g", "fine", 1).layers
    assert [layer.name for layer in fine] == work
    for cut, layer in enumerate(fine[:-1]):
        assert layer.costs[0].output_bytes == sum(node.output_bytes for node in crossing(cut))
        assert layer.crossing == sum(len(node.tensors) for node in crossing(cut))
    blocks = cut_into_layers(graph, "g", "block", 1).layers
    ends = [work[i] for i, layer in enumerate(fine) if (layer.crossing or 0) <= 1 or i == len(work) - 1]
    assert [layer.name.split("..")[-1] for layer in blocks] == ends
    for key in ("forward_seconds", "backward_seconds", "saved_bytes"):
        total = sum(getattr(layer.costs[0], key) for layer in fine)
        assert sum(getattr(layer.costs[0], key) for layer in blocks) == total
    assert sum(layer.parameter_bytes for layer in blocks) == sum(
        graph.nodes[name].parameter_bytes for name in work
    )
