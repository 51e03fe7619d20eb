"""The machine's text, and seconds of transfers and sums of gradients: by hand and against the cost models."""

from __future__ import annotations

import random

import pytest

from pplan.cost_models.collectives import all_reduce_seconds as modelled
from pplan.cost_models.communication import exposed_all_reduce_seconds
from pplan.cost_models.machines.catalogue import device_context
from pplan.cost_models.machines.presets import PRESETS
from pplan.cost_models.machines.topology_text import to_toml
from pplan.cost_models.port_sharing import Routes
from pplan.cost_models.topology import Device, Group, Level, Link, Topology
from pplan.verification.stated_machine import StatedDevice, StatedMachine, parse_machine
from pplan.verification.traffic import all_reduce_time, exposed_seconds, find_transfer_route, sum_loads

SERVERS = Topology(
    (Group(Device("A100-40GB", 2**30, 1.5), 6), Group(Device("toy", None), 10)),
    (
        Level("node", 4, Link(3e11, 5e-6)),
        Level("rack", 2, Link(2.5e10, 2e-5), devices_per_port=4),
        Level("network", None, Link(1.25e9, 1e-4), devices_per_port=2),
    ),
)


def read(topology: Topology) -> StatedMachine:
    return parse_machine(to_toml(topology), "machine")


def test_the_text_of_a_topology() -> None:
    machine = read(SERVERS)
    assert (machine.gpus, machine.gpus_per_node) == (16, 4)
    assert machine.kind(5) == StatedDevice("A100-40GB", 2**30, 1.5, None)
    assert machine.kind(6) == StatedDevice("toy", None, 1.0, None)
    for a, b in ((0, 1), (0, 5), (3, 15), (8, 4)):
        assert machine.level(a, b) == SERVERS.shared_level(a, b)
        level, link = machine.levels[machine.level(a, b)], SERVERS.link(a, b)
        assert (level.bandwidth, level.latency) == (link.bandwidth_bytes_per_second, link.latency_seconds)
        for own, other in zip(machine.ports(a, b), SERVERS.ports(a, b), strict=True):
            assert own == (other.level, int(other.direction == "in"), other.owner)


def test_contexts_are_those_of_the_presets() -> None:
    for preset in PRESETS.values():
        assert StatedDevice(preset.title, None, 1.0, None).context_bytes == preset.context_bytes.value
    for name in ("NVIDIA A100-SXM4-80GB", "Tesla T4", "NVIDIA L4", "AMD Instinct MI300X OAM", "cpu", "A100"):
        known = device_context(name)
        assert StatedDevice(name, None, 1.0, None).context_bytes == (0 if known is None else known.value)


def test_a_transfer_by_hand() -> None:
    """Two senders of node 0 to three receivers of node 1, through the one port of each."""
    own = find_transfer_route(read(SERVERS), (0, 1), (4, 5, 6))
    assert own.latency == 2e-5
    assert own.loads == pytest.approx({(1, 0, 0): 1 / 2.5e10, (1, 1, 1): 1 / 2.5e10})
    assert own.leaves_by == (1, 0, 0)


def test_transfers_against_the_cost_models() -> None:
    rng, machine, routes = random.Random(0), read(SERVERS), Routes(SERVERS)
    for _ in range(200):
        ranks = rng.sample(range(16), rng.randint(2, 9))
        cut = rng.randint(1, len(ranks) - 1)
        senders, receivers = tuple(ranks[:cut]), tuple(ranks[cut:])
        own = find_transfer_route(machine, senders, receivers)
        assert (own.latency, own.pace) == pytest.approx(routes.route(senders, receivers), rel=1e-12)


def test_sums_against_the_cost_models() -> None:
    rng, machine = random.Random(1), read(SERVERS)
    for _ in range(200):
        ranks = sorted(rng.sample(range(16), rng.randint(2, 16)))
        size = rng.choice([0.0, 1e3, 1e7, 1e9])
        assert all_reduce_time(machine, ranks, size) == pytest.approx(
            float(modelled(SERVERS, ranks, size)), rel=1e-12
        )
        layers = rng.randint(1, 8)
        backward = [rng.random() * 1e-3 for _ in range(layers)]
        gradients = [rng.choice([0.0, 1e4, 3e6, 9e7]) for _ in range(layers)]
        assert exposed_seconds(machine, ranks, backward, gradients) == pytest.approx(
            exposed_all_reduce_seconds(backward, gradients, SERVERS, ranks), rel=1e-9, abs=1e-15
        )


def test_what_a_sum_must_send_by_hand() -> None:
    """16 devices: 2 racks of 2 nodes of 4. In a node each sends 2 x 3/4 of the bytes; each node 2 x 1/2 by
    its one port to its rack's other; each rack 2 x 1/2 by four ports of two devices."""
    loads = sum_loads(read(SERVERS), list(range(16)), 1e9)
    assert loads[0, 0, 7] == loads[0, 1, 7] == pytest.approx(1.5e9 / 3e11)
    assert loads[1, 0, 3] == pytest.approx(1e9 / 2.5e10)
    assert loads[2, 0, 4] == pytest.approx(1e9 / 4 / 1.25e9)
    assert len(loads) == 2 * (16 + 4 + 8)
    assert sum_loads(read(SERVERS), [3], 1e9) == {}
    least = all_reduce_time(read(SERVERS), list(range(16)), 1e9)
    assert max(loads.values()) <= least
