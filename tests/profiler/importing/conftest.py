"""A graph as PipeDream writes it."""

from __future__ import annotations

from collections.abc import Callable

import pytest


def node(
    name: str, description: str, forward: float, backward: float, activation: object, parameters: float = 0.0
) -> str:
    """The line of a node."""
    return (
        f"{name} -- {description} -- forward_compute_time={forward:.3f}, "
        f"backward_compute_time={backward:.3f}, activation_size={activation}, parameter_size={parameters:.3f}"
    )


@pytest.fixture
def node_line() -> Callable[..., str]:
    """`node_line(name, description, forward, backward, activation, parameters)`: milliseconds and bytes."""
    return node


@pytest.fixture
def residual() -> str:
    """Eight operations at batch 4: a stem, a block of two branches, a head with its size asked for beside.

    The nodes stand in no order; one edge stands twice; an old plan's stages are noted.
    """
    lines = [
        node("node5", "Conv2d(8, 8)", 2, 4, "640.000", 80),
        node("node1", "Input0", 9, 0, "400.000"),
        node("node2", "Conv2d(3, 8)", 1, 2, "800.000", 40) + " -- stage_id=0",
        node("node3", "Conv2d(8, 8)", 3, 6, "320.000", 160),
        "",
        node("node4", "ReLU(inplace)", 0.5, 0.5, "320.000") + " -- stage_id=1",
        node("node6", "Add", 0.25, 0.25, "[160.000; 160.000]"),
        node("node7", "__getitem__(0)", 0, 0, "160.000"),
        node("node8", "Size(0)", 0, 0, "4.000"),
        node("node9", "Linear(40, 10)", 1, 1.5, "160.000", 1640),
        "\tnode1 -- node2",
        "\tnode2 -- node3",
        "    node3 -- node4",
        "\tnode2 -- node5",
        "\tnode4 -- node6",
        "\tnode5 -- node6",
        "\tnode6 -- node7",
        "\tnode7 -- node8",
        "\tnode7 -- node9",
        "\tnode8 -- node9",
        "\tnode7 -- node9",
        "",
    ]
    return "\n".join(lines)
