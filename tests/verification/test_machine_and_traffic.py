"""The oracle's machine, transfers and sums of gradients against the cost models, on random devices."""

from __future__ import annotations

import random

import pytest

from pplan.cost_models.collectives import Routes, exposed_all_reduce_seconds
from pplan.cost_models.collectives import all_reduce_seconds as modelled
from pplan.cost_models.machines import PRESETS, device_context
from pplan.cost_models.topology import Device, Group, Level, Link, Topology
from pplan.cost_models.topology_file import to_toml
from tests.oracle import machine as oracle

SERVERS = Topology(
    (Group(Device("A100-40GB", 2**30, 1.5), 6), Group(Device("toy", None), 10)),
    (
        Level("node", 4, Link(3e11, 5e-6)),
        Level("rack", 2, Link(2.5e10, 2e-5), devices_per_port=4),
        Level("network", None, Link(1.25e9, 1e-4), devices_per_port=2),
    ),
)


def read(topology: Topology) -> oracle.Machine:
    return oracle.read_machine(to_toml(topology))


def test_the_text_of_a_topology() -> None:
    machine = read(SERVERS)
    assert (machine.gpus, machine.gpus_per_node) == (16, 4)
    assert machine.kind(5) == oracle.Device("A100-40GB", 2**30, 1.5, None)
    assert machine.kind(6) == oracle.Device("toy", None, 1.0, None)
    for a, b in ((0, 1), (0, 5), (3, 15), (8, 4)):
        level, link = machine.levels[machine.level(a, b)], SERVERS.link(a, b)
        assert (level.bandwidth, level.latency) == (link.bandwidth_bytes_per_second, link.latency_seconds)
        for port, modelled_port in zip(machine.ports(a, b), SERVERS.ports(a, b), strict=True):
            expected = modelled_port.level, int(modelled_port.direction == "in"), modelled_port.owner
            assert port == expected


def test_contexts_are_those_of_the_presets() -> None:
    for preset in PRESETS.values():
        assert oracle.Device(preset.title, None, 1.0, None).known[0] == preset.context_bytes.value
    for name in ("NVIDIA A100-SXM4-80GB", "Tesla T4", "NVIDIA L4", "AMD Instinct MI300X OAM", "cpu", "A100"):
        known = device_context(name)
        assert oracle.Device(name, None, 1.0, None).known[0] == (0 if known is None else known.value)


def test_transfers_against_the_cost_models() -> None:
    rng, machine, routes = random.Random(0), read(SERVERS), Routes(SERVERS)
    for _ in range(200):
        ranks = rng.sample(range(16), rng.randint(2, 9))
        cut = rng.randint(1, len(ranks) - 1)
        senders, receivers = tuple(ranks[:cut]), tuple(ranks[cut:])
        own = oracle.find_transfer(machine, senders, receivers)
        assert (own.latency, max(own.loads.values())) == pytest.approx(
            routes.route(senders, receivers), rel=1e-12
        )


def test_sums_against_the_cost_models() -> None:
    rng, machine = random.Random(1), read(SERVERS)
    for _ in range(200):
        ranks = sorted(rng.sample(range(16), rng.randint(2, 16)))
        size = rng.choice([0.0, 1e3, 1e7, 1e9])
        assert oracle.all_reduce_seconds(machine, ranks, size) == pytest.approx(
            float(modelled(SERVERS, ranks, size)), rel=1e-12
        )
        layers = rng.randint(1, 8)
        backward = [rng.random() * 1e-3 for _ in range(layers)]
        gradients = [rng.choice([0.0, 1e4, 3e6, 9e7]) for _ in range(layers)]
        assert oracle.exposed_seconds(machine, ranks, backward, gradients) == pytest.approx(
            exposed_all_reduce_seconds(backward, gradients, SERVERS, ranks), rel=1e-9, abs=1e-15
        )
