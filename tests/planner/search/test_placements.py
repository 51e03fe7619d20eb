"""Orders of the devices, and where stages may begin in them: by hand."""

from __future__ import annotations

from collections.abc import Callable

from pplan.cost_models.topology import Device, Group, Topology
from pplan.planner.search.placements import list_placements

MakeTopology = Callable[..., Topology]
FAST, SLOW, OTHER = (Device(name, None) for name in ("fast", "slow", "other"))


def mixed(make_topology: MakeTopology, *kinds: Device) -> Topology:
    """Two devices of each of these kinds, on nodes of four."""
    return Topology(tuple(Group(kind, 2) for kind in kinds), make_topology(2 * len(kinds), per_node=4).levels)


def test_one_node_has_its_ranks_in_order(make_topology: MakeTopology) -> None:
    (only,) = list_placements(make_topology(4, per_node=8))
    assert (only.ranks, only.starts) == ((0, 1, 2, 3), ((0,), (1,), (2,), (3,), (4,)))


def test_a_stage_may_begin_with_the_next_node(make_topology: MakeTopology) -> None:
    """Of what is left of a node, but no whole node stays free between stages."""
    in_order, across = list_placements(make_topology(6, per_node=3))
    assert (in_order.name, in_order.ranks) == ("in order", (0, 1, 2, 3, 4, 5))
    assert in_order.starts == ((0,), (1, 3), (2, 3), (3,), (4,), (5,), (6,))
    assert (across.name, across.ranks) == ("across nodes", (0, 3, 1, 4, 2, 5))
    assert across.starts == ((0,), (1,), (2,), (3,), (4,), (5,), (6,))


def test_across_nodes_that_are_full_and_have_several_devices(make_topology: MakeTopology) -> None:
    """So that every order of a smaller machine begins one of a larger."""
    assert [p.ranks for p in list_placements(make_topology(5, per_node=2))][1:] == [(0, 2, 1, 3, 4)]
    assert [p.ranks for p in list_placements(make_topology(6, per_node=2))][1:] == [
        (0, 2, 1, 3, 4, 5),
        (0, 2, 4, 1, 3, 5),
    ]
    assert len(list_placements(make_topology(24, per_node=4))) == 2
    assert [p.name for p in list_placements(make_topology(3, per_node=2))] == ["in order"]
    assert [p.name for p in list_placements(make_topology(3, per_node=1))] == ["in order"]
    assert [p.ranks for p in list_placements(make_topology(4, per_node=2))] == [(0, 1, 2, 3), (0, 2, 1, 3)]


def test_kinds_stand_in_every_order(make_topology: MakeTopology) -> None:
    made = list_placements(mixed(make_topology, FAST, SLOW, OTHER))
    assert [p.ranks for p in made] == [
        (0, 1, 2, 3, 4, 5),
        (0, 1, 4, 5, 2, 3),
        (2, 3, 0, 1, 4, 5),
        (2, 3, 4, 5, 0, 1),
        (4, 5, 0, 1, 2, 3),
        (4, 5, 2, 3, 0, 1),
    ]
    # Whole kinds may stay free: the slow ones, say.
    assert made[0].starts == ((0, 2, 4), (1, 2, 4), (2, 4), (3, 4), (4,), (5,), (6,))


def test_of_many_kinds_both_directions(make_topology: MakeTopology) -> None:
    alternating = mixed(make_topology, FAST, SLOW, FAST, OTHER, SLOW)
    made = list_placements(alternating)
    assert [p.ranks for p in made] == [tuple(range(10)), (8, 9, 6, 7, 4, 5, 2, 3, 0, 1)]
