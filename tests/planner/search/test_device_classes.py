"""Assignments of devices that differ, against all renumberings of the machine that leave it as it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, permutations

import pytest

from pplan.cost_models.topology import Device, Group, Level, Link, Topology
from pplan.planner.search.device_classes import DeviceClasses, Shape, Symmetry, group_sizes, is_uniform
from pplan.planner.search.device_sets import list_shapes

FAST, SLOW = Device("fast", None), Device("slow", None, 0.5)


def machine(kinds: Sequence[tuple[Device, int]], per_node: int | None = None, port: int = 1) -> Topology:
    groups = tuple(Group(kind, number) for kind, number in kinds)
    inside, outside = Link(20.0, 0.0), Link(5.0, 0.1)
    if per_node is None:
        return Topology(groups, (Level("node", None, inside),))
    return Topology(groups, (Level("node", per_node, inside), Level("network", None, outside, port)))


MACHINES: dict[str, Topology] = {
    "alike": machine([(FAST, 4)]),
    "nodes": machine([(FAST, 4)], 2),
    "three nodes": machine([(FAST, 6)], 2),
    "a part of a node": machine([(FAST, 5)], 3),
    "kinds": machine([(FAST, 2), (SLOW, 3)]),
    "kinds in nodes": machine([(FAST, 2), (SLOW, 2)], 2),
    "kinds across nodes": machine([(FAST, 1), (SLOW, 3)], 2),
    "kinds in turn": machine([(FAST, 1), (SLOW, 1), (FAST, 1), (SLOW, 1)], 2),
    "ports": machine([(FAST, 4)], 4, 2),
    "ports in nodes": machine([(FAST, 6)], 4, 2),
}


def renumberings(topology: Topology) -> list[tuple[int, ...]]:
    """Of the devices, those that change no kind, no level and no port that two have in common."""
    gpus = range(topology.gpus)

    def joint(a: int, b: int) -> tuple[object, ...]:
        shared = topology.shared_level(a, b)
        ports = [level.devices_per_port for level in topology.levels]
        return shared, tuple(a // each == b // each for each in ports)

    return [
        order
        for order in permutations(gpus)
        if all(topology.device(order[rank]) == topology.device(rank) for rank in gpus)
        and all(joint(order[a], order[b]) == joint(a, b) for a, b in combinations(gpus, 2))
    ]


def assignments(gpus: int, replicas: Sequence[int], taken: tuple[int, ...] = ()) -> Iterator[Shape]:
    if not replicas:
        yield ()
        return
    for own in combinations([rank for rank in range(gpus) if rank not in taken], replicas[0]):
        for others in assignments(gpus, replicas[1:], (*taken, *own)):
            yield (own, *others)


def differing(topology: Topology, replicas: Sequence[int]) -> set[frozenset[Shape]]:
    """Assignments, those together that a renumbering makes of one another."""
    orders = renumberings(topology)
    return {
        frozenset(tuple(tuple(sorted(order[rank] for rank in own)) for own in shape) for order in orders)
        for shape in assignments(topology.gpus, replicas)
    }


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("replicas", [(1,), (2,), (1, 1), (2, 1), (1, 1, 1), (1, 2, 1), (2, 2)], ids=str)
def test_one_assignment_of_those_alike(name: str, replicas: tuple[int, ...]) -> None:
    topology = MACHINES[name]
    wanted = differing(topology, replicas)
    # The keys of symmetry tell apart what differs, and in which order a stage's replicas stand.
    symmetry, shapes = Symmetry(topology), list(assignments(topology.gpus, replicas))
    seen = [len({symmetry.key(shape) for shape in shapes if shape in alike}) for alike in wanted]
    assert sum(seen) == len({symmetry.key(shape) for shape in shapes})
    assert max(seen) == 1 or max(replicas) > 1
    if name in ("alike", "kinds"):
        assert max(seen) == 1
    # Of one class, a stage takes the first devices that are free: no more than one of each set.
    listed = [
        shape for shape in list_shapes(topology, len(replicas), (1, 2)) if tuple(map(len, shape)) == replicas
    ]
    assert all(sum(shape in alike for shape in listed) >= 1 for alike in wanted)
    assert len(listed) == len(set(listed))
    if len(replicas) <= 2 and max(replicas) == 1:
        assert len(listed) == len(wanted)


def test_groups_and_what_is_uniform() -> None:
    sizes = {name: group_sizes(topology) for name, topology in MACHINES.items()}
    assert sizes == {
        "alike": (),
        "nodes": (2,),
        "three nodes": (2,),
        "a part of a node": (3,),
        "kinds": (),
        "kinds in nodes": (2,),
        "kinds across nodes": (2,),
        "kinds in turn": (2,),
        "ports": (2,),
        "ports in nodes": (4, 2),
    }
    assert [name for name, topology in MACHINES.items() if is_uniform(topology)] == ["alike"]


def test_classes_by_hand() -> None:
    """Two fast devices and three slow: two classes, of which nothing tells the links apart."""
    kinds = DeviceClasses(MACHINES["kinds"], (1, 2))
    assert kinds.ranks == [(0, 1), (2, 3, 4)]
    assert kinds.sizes == (2, 3)
    assert kinds.links == [0, 0]
    assert kinds.most_steps == 6 * 10
    assert kinds.most_orders == 1
    assert sorted(kinds.vectors) == [(0, 1), (0, 2), (1, 0), (1, 1), (2, 0)]
    nodes = DeviceClasses(MACHINES["nodes"], (1, 2, 3, 4))
    assert nodes.ranks == [(0, 1), (2, 3)]
    assert nodes.links == [0, 1]
    assert nodes.most_orders == 24 // (2 * 2)
    turns = DeviceClasses(MACHINES["kinds in turn"], (1,))
    assert turns.ranks == [(0,), (1,), (2,), (3,)]
    assert turns.links == [0, 0, 1, 1]
    assert turns.most_orders == 6


def test_which_machines_have_groups_that_may_be_renumbered() -> None:
    alike = {name: DeviceClasses(topology, (1,))._alike for name, topology in MACHINES.items()}
    assert [name for name, own in alike.items() if own] == [
        *("nodes", "three nodes", "kinds in turn", "ports", "ports in nodes")
    ]
