"""Devices by rank, links and ports by level, and a topology's description."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pplan.cost_models.errors import UsageError
from pplan.cost_models.topology import Device, Group, Level, Link, Port, Topology, two_level_topology

FAST, SLOW = Link(100e9, 1e-6, "fast"), Link(10e9, 5e-6, "slow")
GPU = Device("GPU", None)
BIG, SMALL = Device("big", 2**34), Device("small", 2**33, speed=0.5)

CALM = settings(deadline=None)
"""No verdict by elapsed time."""

NVLINK, PCIE = Link(300e9, 5e-6, "NVLink 3"), Link(31.5e9, 10e-6, "PCIe 4.0 x16")
RAIL, ETHERNET = Link(25e9, 20e-6, "InfiniBand HDR"), Link(1.25e9, 50e-6, "Ethernet")


def two_nodes_of_four(inside: Link = FAST, between: Link = SLOW) -> Topology:
    return two_level_topology(GPU, 8, 4, inside, between)


def four_levels(gpus: int = 32) -> Topology:
    """Pairs on NVLink, two pairs a node on PCIe, four nodes a rack on InfiniBand, racks on Ethernet."""
    levels = (
        Level("pair", 2, NVLINK),
        Level("node", 2, PCIE),
        Level("rack", 4, RAIL, devices_per_port=2),
        Level("hall", None, ETHERNET, devices_per_port=4),
    )
    return Topology((Group(GPU, gpus),), levels)


def test_seconds_are_latency_and_bytes_over_bandwidth() -> None:
    assert SLOW.seconds(20e9) == pytest.approx(2.000005)
    assert SLOW.seconds(np.array([0.0, 10e9])).tolist() == pytest.approx([5e-6, 1.000005])


def test_endless_bandwidth_takes_only_the_latency() -> None:
    link = Link(math.inf, 5e-6)
    assert link.seconds(1e15) == 5e-6


def test_a_link_between_nodes_is_the_one_between() -> None:
    topology = two_nodes_of_four()
    for a in range(8):
        for b in range(8):
            across = (a < 4) != (b < 4)
            assert topology.link(a, b) is (SLOW if across else FAST)


def test_a_link_is_that_of_the_innermost_level_that_holds_both() -> None:
    topology = four_levels()
    assert topology.link(0, 1) is NVLINK
    assert topology.link(1, 2) is PCIE
    assert topology.link(3, 4) is RAIL
    assert topology.link(15, 16) is ETHERNET
    assert topology.link(5, 5) is NVLINK
    for a, b in product(range(32), repeat=2):
        expected = next(k for k, n in enumerate((2, 4, 16, math.inf)) if a // n == b // n or n == math.inf)
        assert topology.shared_level(a, b) == expected


def test_a_node_is_the_level_of_that_name_else_the_innermost() -> None:
    assert four_levels().gpus_per_node == 4
    plain = Topology((Group(GPU, 8),), (Level("box", 4, FAST), Level("hall", 2, SLOW)))
    assert plain.gpus_per_node == 4
    assert plain.capacity == 8
    assert four_levels().capacity is None
    assert Topology((Group(GPU, 3),), (Level("all", None, FAST),)).gpus_per_node == 3


def test_ports_are_those_of_a_device_or_of_those_that_share_one() -> None:
    topology = four_levels()
    assert topology.ports(0, 1) == (Port(0, "out", 0), Port(0, "in", 1))
    assert topology.ports(3, 5) == (Port(2, "out", 1), Port(2, "in", 2))
    assert topology.ports(2, 20) == (Port(3, "out", 0), Port(3, "in", 5))


@pytest.mark.parametrize("rank", [-1, 8])
def test_ranks_that_are_not_there(rank: int) -> None:
    topology = two_nodes_of_four()
    for asked in (topology.device, lambda r: topology.link(0, r), lambda r: topology.members([r])):
        with pytest.raises(UsageError, match=f"device {rank}: the topology has devices 0 to 7"):
            asked(rank)


@pytest.mark.parametrize(
    ("devices", "members"),
    [
        ([2], [{1}, {1}, {1}, {1}]),
        ([0, 1], [{2}, {1}, {1}, {1}]),
        ([0, 2], [{1}, {2}, {1}, {1}]),
        ([0, 1, 2], [{1, 2}, {2}, {1}, {1}]),
        ([0, 4, 8, 12], [{1}, {1}, {4}, {1}]),
        (range(32), [{2}, {2}, {4}, {2}]),
        ([0, 1, 2, 3, 16, 17], [{2}, {1, 2}, {1}, {2}]),
    ],
)
def test_members_by_level(devices: list[int], members: list[set[int]]) -> None:
    assert four_levels().members(devices) == members


def test_several_kinds_of_devices_by_rank() -> None:
    topology = Topology((Group(BIG, 3), Group(SMALL, 2), Group(BIG, 1)), (Level("node", None, FAST),))
    assert [topology.device(rank) for rank in range(topology.gpus)] == [BIG, BIG, BIG, SMALL, SMALL, BIG]
    assert topology.kinds == (BIG, SMALL)
    assert topology.device(3).seconds_scale == 2.0
    assert topology.device(0).seconds_scale == 1.0


def test_fewer_and_more_devices() -> None:
    mixed = Topology((Group(BIG, 3), Group(SMALL, 2)), (Level("node", None, FAST),))
    assert mixed.with_gpus(4).groups == ((BIG, 3), (SMALL, 1))
    assert mixed.with_gpus(3).groups == ((BIG, 3),)
    assert mixed.with_gpus(5) == mixed
    with pytest.raises(UsageError, match="gpus=6: the topology has 5 devices, of 2 kinds"):
        mixed.with_gpus(6)
    assert two_nodes_of_four().with_gpus(20).gpus == 20
    with pytest.raises(UsageError, match="gpus=0"):
        mixed.with_gpus(0)


@CALM
@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.data())
def test_cutting_keeps_the_first_devices(numbers: list[int], data: st.DataObject) -> None:
    groups = tuple(Group((BIG, SMALL)[i % 2], number) for i, number in enumerate(numbers))
    topology = Topology(groups, (Level("node", None, FAST),))
    kept = data.draw(st.integers(1, topology.gpus))
    fewer = topology.with_gpus(kept)
    assert fewer.gpus == kept
    assert all(fewer.device(rank) == topology.device(rank) for rank in range(kept))


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan])
def test_a_link_needs_bandwidth(rate: float) -> None:
    with pytest.raises(UsageError, match="bandwidth="):
        Link(rate, 0.0)


@pytest.mark.parametrize("wait", [-1e-6, math.nan, math.inf])
def test_a_link_needs_a_finite_latency(wait: float) -> None:
    with pytest.raises(UsageError, match="latency="):
        Link(1e9, wait)


@pytest.mark.parametrize(("option", "counts"), [("gpus=", (0, 4)), ("gpus_per_node=", (4, -1))])
def test_counts_are_at_least_one(option: str, counts: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match=option):
        two_level_topology(GPU, *counts, FAST, SLOW)


def test_a_device_needs_memory_and_speed() -> None:
    with pytest.raises(UsageError, match="memory_bytes=0"):
        Device("GPU", 0)
    for speed in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(UsageError, match="speed"):
            Device("GPU", None, speed=speed)
    with pytest.raises(UsageError, match=r"both a speed \(2\) and a profile \(a.json\)"):
        Device("GPU", None, speed=2.0, profile="a.json")


@pytest.mark.parametrize(
    ("levels", "what"),
    [
        ((), "without devices or levels"),
        ((Level("node", 4, FAST), Level("node", 2, SLOW)), "level node: there are two of that name"),
        ((Level("node", None, FAST), Level("hall", 2, SLOW)), "level node: has no size"),
        ((Level("node", 2, FAST), Level("hall", 3, SLOW)), "gpus=8: the levels hold 6 devices"),
        (
            (Level("node", 4, FAST), Level("hall", None, SLOW, devices_per_port=3)),
            "level hall: devices_per_port 3 does not divide the 4 devices",
        ),
        ((Level("node", 8, FAST, devices_per_port=2),), "does not divide the 1 device of one of its members"),
    ],
)
def test_levels_that_do_not_fit(levels: tuple[Level, ...], what: str) -> None:
    with pytest.raises(UsageError) as refused:
        Topology((Group(GPU, 8),), levels)
    assert what in refused.value.what
    assert refused.value.hint


def test_a_level_needs_counts() -> None:
    with pytest.raises(UsageError, match="level node: size 0"):
        Level("node", 0, FAST)
    with pytest.raises(UsageError, match="level node: devices_per_port 0"):
        Level("node", 1, FAST, devices_per_port=0)


def test_descriptions() -> None:
    inside, between = Link(300e9, 5e-6, "NVLink 3"), Link(25e9, 20e-6, "InfiniBand HDR")
    device = Device("A100-40GB", 40 * 2**30)
    assert two_level_topology(device, 8, 4, inside, between).describe() == (
        "8 x A100-40GB (40.00 GiB), 4 a node; NVLink 3 300 GB/s, 5 µs inside; "
        "InfiniBand HDR 25 GB/s, 20 µs between"
    )
    assert two_level_topology(device, 4, 4, inside, between).describe() == (
        "4 x A100-40GB (40.00 GiB) in one node; NVLink 3 300 GB/s, 5 µs"
    )
    assert two_level_topology(device, 1, 4, inside, between).describe() == "1 x A100-40GB (40.00 GiB)"
    assert two_level_topology(device, 2, 1, inside, Link(math.inf, 0.0)).describe() == (
        "2 x A100-40GB (40.00 GiB), 1 a node; unlimited, 0 s between"
    )


def test_descriptions_of_more_levels_and_kinds() -> None:
    assert four_levels(16).describe() == (
        "16 x GPU (no memory limit); NVLink 3 300 GB/s, 5 µs in a pair of 2; "
        "PCIe 4.0 x16 31.5 GB/s, 10 µs in a node of 4; InfiniBand HDR 25 GB/s, 20 µs between"
    )
    assert four_levels(2).describe() == "2 x GPU (no memory limit) in one pair; NVLink 3 300 GB/s, 5 µs"
    mixed = Topology((Group(BIG, 3), Group(SMALL, 2)), (Level("node", None, FAST),))
    assert mixed.describe() == (
        "3 x big (16.00 GiB) + 2 x small (8.00 GiB, 0.5 x as fast) in one node; fast 100 GB/s, 1 µs"
    )


def test_levels_further_out_than_all_devices_are_not_in_use() -> None:
    links = [Link(300e9, 0.0), Link(25e9, 0.0)]
    levels = (Level("node", 4, links[0]), Level("network", None, links[1]))
    for gpus, number in ((1, 1), (4, 1), (5, 2), (8, 2)):
        assert Topology((Group(Device("a", None), gpus),), levels).levels_in_use == levels[:number]
