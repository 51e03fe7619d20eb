"""Which devices, replicas, batches and neighbours are looked at, against golden files and lists by hand.

What is left out of a search is seen by no test of its answer, where another plan is as good. `make golden`
rewrites the files: read the diff.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import pytest

from pplan.cost_models.errors import PplanError
from pplan.cost_models.layer import Chain
from pplan.cost_models.topology import Device, Group, Level, Link, Topology
from pplan.planner.batch_sizes import BatchSizes
from pplan.planner.candidate import near_shapes
from pplan.planner.explanation.resolve import bandwidth_range, with_bandwidth
from pplan.planner.other_placements import _all_assignments, _orders
from pplan.planner.search.device_classes import DeviceClasses, group_sizes, is_uniform
from pplan.planner.search.device_sets import list_shapes, may_search_any
from pplan.planner.search.placements import list_placements, list_replica_counts

MakeChain = Callable[..., Chain]
Golden = Callable[[str, str], None]
AsText = Callable[[object], str]
FAST, SLOW = Device("fast", None), Device("slow", None, speed=0.5)


def machine(groups: tuple[tuple[Device, int], ...], *sizes: int | None, port: int = 1) -> Topology:
    """Levels of these sizes, each slower than the one inside it."""
    levels = [
        Level(f"level {number}", size, Link(100.0 / 4**number, 0.1 * number), port if number else 1)
        for number, size in enumerate(sizes)
    ]
    return Topology(tuple(Group(*own) for own in groups), tuple(levels))


MACHINES = {
    "one node": machine(((FAST, 3),), None),
    "two nodes": machine(((FAST, 4),), 2, None),
    "two and a half nodes": machine(((FAST, 5),), 2, None),
    "shared ports": machine(((FAST, 4),), 4, None, port=2),
    "racks": machine(((FAST, 8),), 2, 2, None),
    "two kinds": machine(((FAST, 2), (SLOW, 2)), None),
    "two kinds in nodes": machine(((FAST, 3), (SLOW, 3)), 2, None),
    "kinds in turn": machine(((FAST, 1), (SLOW, 1), (FAST, 1), (SLOW, 1), (FAST, 1)), None),
    "many": machine(((FAST, 20),), 4, None),
    "ten in two nodes": machine(((FAST, 10),), 5, None),
    "ten of two kinds": machine(((FAST, 5), (SLOW, 5)), 5, None),
}


@pytest.mark.parametrize("name", MACHINES)
def test_devices(name: str, golden: Golden, as_text: AsText) -> None:
    topology = MACHINES[name]
    classes = DeviceClasses(topology, (1, 2, 3))
    content: dict[str, object] = {
        "orders": [[own.name, own.ranks, own.next_group, own.starts] for own in list_placements(topology)],
        "other orders": _orders(topology),
        "groups": [group_sizes(topology), is_uniform(topology)],
        "classes": [classes.ranks, classes.links, classes.most_steps, classes.most_orders],
        "any": [may_search_any(topology, (1, 2), blocks) for blocks in (1, 8, 40)],
        "counts": list_replica_counts(topology.gpus),
        "bandwidths": [bandwidth_range(topology, 8.0, between_nodes=own) for own in (False, True)],
        "faster": with_bandwidth(topology, 2.0, between_nodes=True).describe(),
    }
    if topology.gpus <= 6:
        states, begins, afters, sets = classes.steps
        content |= {
            "states": states,
            "steps": list(zip(begins, afters, sets, strict=True)),
            "sets": classes.vectors,
            "assignments": _all_assignments(topology, (1, 2)),
            "first assignments": _all_assignments(topology, (1, 1, 1), most=4),
            "shapes": list(islice(list_shapes(topology, 2, (1, 2)), 200)),
            "replicas": [classes.orders(own) for own in ((0, 1), tuple(range(3)))],
        }
    golden(f"planner/devices/{name.replace(' ', '_')}.txt", as_text(content))


@pytest.mark.parametrize("name", ["chain", "one size", "scales"])
def test_batches(name: str, make_chain: MakeChain, golden: Golden, as_text: AsText) -> None:
    """The global batch that is chosen, its micro-batches, and what is refused."""
    chain = make_chain(1, 4, sizes=(2, 4, 8) if name == "chain" else (3,))
    rows = {}
    for gpus, shared, mini, micro, samples in (
        *((gpus, gpus, None, None, samples) for gpus in (1, 2, 3, 7, 64) for samples in (1, 5, 32)),
        *((4, replicas, mini, None, 32) for replicas in (1, 4) for mini in (1, 2, 6, 7, 36, 97, 2**20)),
        *((4, 4, mini, micro, 32) for mini in (None, 24, 25) for micro in (1, 5, 8, 24)),
        (2, 1, None, 3, 32),
        (5, 1, None, None, 32),
    ):
        batches = BatchSizes(chain, gpus, shared, mini, micro, samples)
        try:
            row: object = [batches.global_batch, batches.micro_batch_sizes]
        except PplanError as error:
            row = str(error).replace("\n", " | ")
        rows[f"{gpus} {shared} {mini} {micro} {samples}"] = row
    golden(f"planner/devices/batches_of_{name.replace(' ', '_')}.txt", as_text(rows))


def test_neighbours_of_a_plan() -> None:
    """By hand: a cut moved, stages joined; a device more, less or from stage to stage; a stage parted."""
    points = (0, 2, 4, 6, 8)
    assert list(near_shapes(points, (4, 8), (1, 2), 4)) == [
        ((2, 8), (1, 2)),
        ((6, 8), (1, 2)),
        ((8,), (3,)),
        ((4, 8), (2, 2)),
        ((4, 8), (1, 3)),
        ((4, 8), (1, 1)),
        ((4, 8), (2, 1)),
        ((4, 6, 8), (1, 1, 1)),
    ]
    assert list(near_shapes(points, (4, 8), (1, 2), 3))[3:] == [
        ((4, 8), (1, 1)),
        ((4, 8), (2, 1)),
        ((4, 6, 8), (1, 1, 1)),
    ]
    assert list(near_shapes(points, (2, 4, 6, 8), (3, 1, 1, 1), 6))[:5] == [
        ((4, 6, 8), (4, 1, 1)),
        ((2, 6, 8), (3, 2, 1)),
        ((2, 4, 8), (3, 1, 2)),
        ((2, 4, 6, 8), (2, 1, 1, 1)),
        ((2, 4, 6, 8), (2, 2, 1, 1)),
    ]
    assert list(near_shapes(points, (8,), (5,), 5)) == [((8,), (4,)), ((4, 8), (2, 3))]
    assert list(near_shapes((0, 8), (8,), (2,), 2)) == [((8,), (1,))]
