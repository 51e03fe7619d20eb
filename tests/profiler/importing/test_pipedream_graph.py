"""PipeDream's graph.txt: what its lines say, and what is told about lines that say something else."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pplan.cost_models.errors import FileError
from pplan.profiler.imports import is_graph, parse_graph

GOOD = "a -- Linear -- forward_compute_time=1, backward_compute_time=2, activation_size=8, parameter_size=4"
FIGURES = GOOD.split(" -- ")[2]


def test_nodes_and_edges(residual: str) -> None:
    graph = parse_graph(residual, "graph.txt")
    assert list(graph.nodes) == [
        "node5",
        "node1",
        "node2",
        "node3",
        "node4",
        "node6",
        "node7",
        "node8",
        "node9",
    ]
    stem = graph.nodes["node2"]
    assert (stem.forward_seconds, stem.backward_seconds) == (1e-3, 2e-3)
    assert (stem.description, stem.output_bytes, stem.parameter_bytes) == ("Conv2d(3, 8)", 800, 40)
    assert graph.nodes["node6"].tensors == (160, 160)
    assert graph.nodes["node6"].output_bytes == 320
    assert len(graph.edges) == 10
    assert [name for name, node in graph.nodes.items() if node.is_called_input] == ["node1"]


def test_dashes_in_a_description_and_windows_line_ends() -> None:
    text = f"a -- x -- y -- {FIGURES} -- stage_id=3\r\nb -- Output -- {FIGURES}\r\n  a -- b\r\n"
    graph = parse_graph(text, "graph.txt")
    assert graph.nodes["a"].description == "x -- y"
    assert graph.edges == (("a", "b"),)


def test_inputs_by_their_name(node_line: Callable[..., str]) -> None:
    names = {"Input": True, "Input0": True, "Input_1": True, "Input(3, 4)": True, "InputEmbedding": False}
    text = "\n".join([GOOD, *(node_line(f"n{i}", name, 0, 0, 1) for i, name in enumerate(names)), "a -- n1"])
    nodes = parse_graph(text, "graph.txt").nodes.values()
    assert {node.description: node.is_called_input for node in nodes if node.name != "a"} == names


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("\n\nhello", "line 3: 'hello' is neither a node nor an edge"),
        ("a -- ", "line 1: 'a -- ' is neither"),
        ("-- b", "line 1: '-- b' is neither"),
        ("a -- b -- c", "line 1: 'a -- b -- c' is neither"),
        (f"a -- {FIGURES}", "line 1: 'a -- forward_compute_time=1"),
        (f"{GOOD}\n{GOOD}", "line 2: node 'a' stands on line 1 already"),
        (f"{GOOD}\na -- b", "line 2: the edge a -- b is of 'b', and there is no such node"),
        (
            GOOD.replace("=1,", "=-1,"),
            "line 1: forward_compute_time is '-1', it must be finite and at least 0",
        ),
        (GOOD.replace("=2", "=nan"), "line 1: backward_compute_time is 'nan', it must be finite"),
        (GOOD.replace("=8", "=inf"), "line 1: activation_size is 'inf', it must be finite"),
        (GOOD.replace("=8", "=[8; x]"), "line 1: activation_size is 'x', not a number"),
        (GOOD.replace("=8", "=[]"), "line 1: activation_size is '', not a number"),
        (GOOD.replace("=8", "=8MB"), "line 1: activation_size is '8MB', not a number"),
        (GOOD.replace("=8", "=1e30"), "line 1: activation_size is '1e30', it must be at least 0 and less"),
        (GOOD.replace("=1,", "=1e13,"), "line 1: forward_compute_time is '1e13', it must be at most 1e+09 s"),
        (GOOD.replace(", parameter_size=4", ""), "line 1: parameter_size is missing"),
        (GOOD.replace("=4", "=4, parameter_size=4"), "line 1: parameter_size stands twice"),
        (GOOD.replace("parameter_", "param_"), "line 1: unknown key 'param_size'"),
        (GOOD.replace("=4", "=4, oops"), "line 1: 'oops' is not KEY=VALUE"),
        ("", "the whole file: has no nodes"),
        (f"{GOOD}\n{GOOD.replace('a --', 'b --')}", "the whole file: has 2 nodes and no edge"),
    ],
)
def test_malformed_lines_are_named(text: str, what: str) -> None:
    with pytest.raises(FileError) as caught:
        parse_graph(text, "graph.txt")
    assert caught.value.what.startswith(f"graph.txt: {what}")
    assert caught.value.hint


def test_near_names_are_offered() -> None:
    with pytest.raises(FileError, match="Did you mean parameter_size"):
        parse_graph(GOOD.replace("parameter_", "param_"), "graph.txt")
    nodes = "\n".join(GOOD.replace("a --", f"node{i} --") for i in range(40))
    with pytest.raises(FileError, match=r"Did you mean node7\? There are: node0, .* and 28 more"):
        parse_graph(f"{nodes}\nnode1 -- Node7", "graph.txt")


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        (GOOD, True),
        ("\n\ta -- b\n", True),
        ("hello\n" + GOOD, True),
        ("name,forward_ms\n", False),
        ("", False),
    ],
)
def test_recognised_by_content(text: str, is_one: bool) -> None:
    assert is_graph(text) is is_one
