"""Ports that several stages go through."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from pplan.cost_models import collectives
from pplan.cost_models.collectives import (
    AllReduceBytes,
    Hop,
    Routes,
    TopologyPorts,
    all_reduce_ends,
    all_reduce_loads,
    all_reduce_seconds_by_algorithm,
    end_on_ports,
)
from pplan.cost_models.topology import Device, Group, Level, Link, Port, Topology

GPU = Device("gpu", None)


def nodes(gpus: int, per_node: int, per_port: int = 1) -> Topology:
    """20 B/s inside a node, 5 B/s through each of its ports."""
    inside, between = Link(20.0, 0.0), Link(5.0, 0.0)
    levels = (Level("node", per_node, inside), Level("network", None, between, per_port))
    return Topology((Group(GPU, gpus),), levels)


def test_a_device_sends_both_ways_through_its_port() -> None:
    ranks = [(0,), (1,), (2,)]
    made = TopologyPorts(nodes(3, 4)).sharing(ranks, [Hop(1, 0, 4.0), Hop(1, 2, 6.0), Hop(0, 1, 6.0)], [])
    assert made.links[1, 0] == made.links[1, 2] != made.links[0, 1]
    assert made.links[0, 2] == -1
    assert made.port_seconds == 10.0


def test_stages_of_a_node_send_through_its_card_or_inside() -> None:
    ranks = [(0,), (1,), (4,)]
    own, shared = (TopologyPorts(nodes(8, 4, port)) for port in (1, 4))
    hops = [Hop(0, 2, 1.0), Hop(1, 2, 2.0), Hop(1, 0, 5.0)]
    alone, together = own.sharing(ranks, hops, []), shared.sharing(ranks, hops, [])
    assert alone.links[0, 2] != alone.links[1, 2]
    assert together.links[0, 2] == together.links[1, 2] != together.links[1, 0]
    # Both arrive at device 4, whose port they take together where it has one of its own.
    assert alone.port_seconds == together.port_seconds == 5.0
    assert TopologyPorts(nodes(8, 4, 4)).sharing(ranks, hops[:2], []).port_seconds == 3.0


def test_a_transfer_waits_for_the_port_that_it_takes_longest() -> None:
    """Of devices 2 to 4, three parts each: 4 is in the second node with its receivers."""
    routes = Routes(nodes(8, 4, 4))
    senders, receivers = (2, 3, 4), (5, 6, 7)
    assert routes.loads(senders, receivers) == pytest.approx(
        {
            Port(1, "out", 0): 2 / 3 / 5,
            Port(1, "in", 1): 2 / 3 / 5,
            Port(0, "out", 4): 1 / 3 / 20,
            Port(0, "in", 7): 1 / 3 / 20,
        }
    )
    assert routes.exit_port(senders, receivers) == Port(1, "out", 0)


@pytest.mark.parametrize("seed", range(8))
def test_routes_of_few_devices_are_those_of_many(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(seed)
    topology = nodes(12, *rng.choice([(1, 1), (2, 1), (3, 3), (4, 2), (6, 3), (4, 1)]).tolist())
    ranks, cut = tuple(rng.permutation(12).tolist()), int(rng.integers(1, 8))
    stages = ranks[:cut], ranks[cut : cut + int(rng.integers(1, 5))]
    few = Routes(topology)
    answers = few.route(*stages), few.loads(*stages)
    monkeypatch.setattr(collectives, "FEW_RANKS", 0)
    many = Routes(topology)
    assert answers[0] == pytest.approx(many.route(*stages), rel=1e-12)
    assert answers[1] == pytest.approx(many.loads(*stages), rel=1e-12)


def test_what_an_all_reduce_sends_through_each_port() -> None:
    """Four devices of two nodes: each node's sum leaves it once, through one card or half by half."""
    assert all_reduce_loads(nodes(8, 4, 4), [0, 1, 4, 5]) == pytest.approx(
        dict.fromkeys([(0, 0), (0, 1), (0, 4), (0, 5)], 1 / 20) | dict.fromkeys([(1, 0), (1, 1)], 1 / 5)
    )
    assert all_reduce_loads(nodes(8, 4), [0, 1, 4, 5]) == pytest.approx(
        dict.fromkeys([(0, 0), (0, 1), (0, 4), (0, 5)], 1 / 20)
        | dict.fromkeys([(1, 0), (1, 1), (1, 4), (1, 5)], 1 / 10)
    )
    assert all_reduce_loads(nodes(8, 4), [3]) == {}


@pytest.mark.parametrize("seed", range(60))
def test_no_algorithm_is_faster_than_the_most_loaded_port(seed: int) -> None:
    rng = np.random.default_rng(seed)
    per_node = int(rng.choice([2, 4, 6]))
    port = int(rng.choice([count for count in (1, 2, 3, 6, 4) if per_node % count == 0]))
    racks = int(rng.integers(1, 4))
    levels = (
        Level("node", per_node, Link(20.0, 0.1)),
        Level("rack", racks, Link(5.0, 0.2), port),
        Level("hall", None, Link(2.0, 0.3), per_node * racks),
    )
    topology = Topology((Group(GPU, 4 * per_node * racks),), levels)
    ranks = rng.choice(topology.gpus, size=int(rng.integers(2, topology.gpus + 1)), replace=False).tolist()
    most = max(all_reduce_loads(topology, ranks).values())
    for seconds in all_reduce_seconds_by_algorithm(topology, ranks, 7.0).values():
        assert seconds >= 7.0 * most * (1 - 1e-12)


def test_all_reduces_of_a_port_follow_one_another() -> None:
    """Two stages, ready at 10 and 11, of which by themselves 2 s follow; each takes the port for 3 s.

    The first has it from 9 to 12; the second, which would have had it from 10 to 13, until 15.
    """
    port = (1, 0)
    loads = {0: {port: 3.0}, 1: {port: 3.0}}
    assert all_reduce_ends([11.0, 10.0], [2.0, 2.0], loads) == [15.0, 12.0]
    assert all_reduce_ends([11.0, 10.0], [2.0, 2.0], {}) == [13.0, 12.0]
    free = {port: 9.0}
    assert end_on_ports(12.0, {port: 3.0}, free) == 12.0
    assert free == {port: 12.0}


def test_ports_that_one_all_reduce_takes_are_its_own() -> None:
    sharings = TopologyPorts(nodes(16, 4, 4))
    apart = sharings.sharing([], [], [AllReduceBytes(0, (0, 4), 10.0), AllReduceBytes(1, (8, 12), 10.0)])
    assert apart.reduce_loads == {}
    assert apart.port_seconds == 2.0
    joined = sharings.sharing(
        [], [], [AllReduceBytes(0, (0, 4), 10.0), AllReduceBytes(1, (5, 9), 20.0, times=2)]
    )
    assert joined.reduce_loads == {0: {(1, 1): 2.0}, 1: {(1, 1): 4.0}}
    assert joined.port_seconds == 10.0


def sample_by_sample(
    topology: Topology, senders: tuple[int, ...], receivers: tuple[int, ...]
) -> dict[Port, float]:
    """Seconds of each port for a byte of a whole micro-batch."""
    samples = len(senders) * len(receivers)
    taken: dict[Port, float] = {}
    for sample in range(samples):
        a, b = senders[sample * len(senders) // samples], receivers[sample * len(receivers) // samples]
        for port in topology.ports(a, b):
            each = 1 / samples / topology.link(a, b).bandwidth_bytes_per_second
            taken[port] = taken.get(port, 0.0) + each
    return taken


@pytest.mark.parametrize(("per_node", "per_port"), [(4, 1), (4, 2), (4, 4), (3, 1), (3, 3), (6, 2)])
def test_ways_that_were_seen_in_another_node(per_node: int, per_port: int) -> None:
    """The same routes are asked for all along the devices: what is remembered of a node is of its likes."""
    topology = nodes(15, per_node, per_port)
    routes = Routes(topology)
    for first in range(12):
        for senders, receivers in (
            ((first,), (first + 1,)),
            ((first, first + 1), (first + 2, first + 3)),
            ((first + 3,), (first,)),
        ):
            taken = sample_by_sample(topology, senders, receivers)
            assert routes.loads(senders, receivers) == pytest.approx(taken)
            assert routes.route(senders, receivers)[1] == pytest.approx(max(taken.values()))


@pytest.mark.parametrize("seed", range(20))
def test_the_loads_are_those_of_all_bytes(seed: int) -> None:
    """Sample by sample: sender i holds an equal run of the samples and sends each to who needs it."""
    rng = np.random.default_rng(seed)
    topology = nodes(12, 4, int(rng.choice([1, 2, 4])))
    devices = rng.permutation(12).tolist()
    senders = tuple(devices[: int(rng.integers(1, 6))])
    receivers = tuple(devices[len(senders) : len(senders) + int(rng.integers(1, 6))])
    taken = sample_by_sample(topology, senders, receivers)
    made = Routes(topology).loads(senders, receivers)
    assert made == pytest.approx(taken)
    leaving = {port: load for port, load in taken.items() if port.direction == "out"}
    own = Routes(topology).exit_port(senders, receivers)
    assert taken[own] == pytest.approx(max(leaving.values()))
    for first, second in pairwise(sorted(port for port in leaving if leaving[port] >= taken[own] - 1e-12)):
        assert own <= first < second
