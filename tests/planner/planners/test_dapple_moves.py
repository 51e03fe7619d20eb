"""DAPPLE's placements on two machines of four devices, by hand; the groups of many devices."""

from __future__ import annotations

import pytest

from pplan.planner.planners.dapple_planner import (
    append_first,
    fresh_first,
    scatter_first,
    split_machines,
)

TWO = (4, 4)


@pytest.mark.parametrize(
    ("used", "count", "fresh", "append", "scatter"),
    [
        ((0, 0), 3, (3, 0), (3, 0), (2, 1)),
        ((0, 0), 5, (4, 1), (4, 1), (3, 2)),
        ((0, 0), 8, (4, 4), (4, 4), (4, 4)),
        ((3, 0), 1, (0, 1), (1, 0), (1, 0)),
        ((3, 0), 2, (0, 2), (1, 1), (1, 1)),
        ((2, 0), 4, (0, 4), (2, 2), (2, 2)),
        ((2, 0), 5, (1, 4), (2, 3), (2, 3)),
        ((1, 2), 3, (3, 0), (3, 0), (2, 1)),
        ((1, 3), 3, (3, 0), (3, 0), (2, 1)),
        ((4, 1), 2, (0, 2), (0, 2), (0, 2)),
    ],
)
def test_two_machines(
    used: tuple[int, int],
    count: int,
    fresh: tuple[int, int],
    append: tuple[int, int],
    scatter: tuple[int, int],
) -> None:
    assert fresh_first(TWO, used, count) == fresh
    assert append_first(TWO, used, count) == append
    assert scatter_first(TWO, used, count) == scatter


def test_scatter_stays_on_used_machines_where_they_have_enough() -> None:
    assert scatter_first((4, 4, 4), (2, 2, 0), 4) == (2, 2, 0)
    assert scatter_first((4, 4, 4), (2, 2, 0), 5) == (2, 2, 1)
    assert scatter_first((4, 4, 4), (4, 2, 0), 2) == (0, 1, 1)


def test_machines_of_few_devices() -> None:
    """Six devices, four to a node: the second has two."""
    machines = split_machines(6, 4)
    assert (machines.rooms, machines.starts, machines.each) == ((4, 2), (0, 4), 1)
    assert machines.ranks((1, 0), (2, 1)) == (1, 2, 4)
    assert machines.ranks((2, 0), (1, 2)) == (2, 4, 5)


@pytest.mark.parametrize(
    ("gpus", "per_node", "rooms", "each"),
    [
        (64, 8, (2,) * 8, 4),
        (48, 6, (2,) * 8, 3),
        (64, 1, (1,) * 16, 4),
        (20, 20, (10,), 2),
        (1024, 8, (1,) * 16, 64),
        (17, 8, (4, 4), 2),
    ],
)
def test_neighbours_stay_together_where_there_are_many(
    gpus: int, per_node: int, rooms: tuple[int, ...], each: int
) -> None:
    """At most 16 groups, each in one node or of whole ones."""
    machines = split_machines(gpus, per_node)
    assert (machines.rooms, machines.each) == (rooms, each)
    everything = machines.ranks((0,) * len(rooms), rooms)
    assert everything == tuple(range(gpus // each * each))


@pytest.mark.parametrize(
    ("gpus", "per_node", "most", "rooms", "each"),
    [
        (10, 4, 5, (2, 2, 1), 2),
        (10, 4, 10, (4, 4, 2), 1),
        (11, 4, 5, (2, 2, 1), 2),  # one device stays unused
        (16, 4, 2, (1, 1), 8),  # groups of two nodes
        (3, 4, 8, (3,), 1),
    ],
)
def test_nodes_of_groups(gpus: int, per_node: int, most: int, rooms: tuple[int, ...], each: int) -> None:
    """By node how many groups it has, of how many devices, and the first of them."""
    machines = split_machines(gpus, per_node, most)
    assert (machines.rooms, machines.each) == (rooms, each)
    assert machines.starts == tuple(sum(rooms[:node]) for node in range(len(rooms)))
