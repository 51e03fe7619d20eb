"""Collectives by hand, against the steps that every device takes, and as they must behave."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pplan.cost_models.collectives import (
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    is_concave,
    is_even,
    reduce_scatter_seconds,
    ring_step_seconds,
)
from pplan.cost_models.collectives import all_reduce_seconds_by_algorithm as by_algorithm
from pplan.cost_models.topology import Device, Group, Level, Link, Port, Topology, two_level_topology

GPU = Device("GPU", None)
INSIDE, BETWEEN = Link(8e9, 1e-3), Link(1e9, 2e-3)
TOPOLOGY = two_level_topology(GPU, 8, 4, INSIDE, BETWEEN)


def shared(devices_per_port: int) -> Topology:
    """Two nodes of four, where that many devices share an adapter."""
    levels = (Level("node", 4, INSIDE), Level("network", None, BETWEEN, devices_per_port))
    return Topology((Group(GPU, 8),), levels)


def three_levels() -> Topology:
    """Eight devices: two a pair, two pairs a node, two nodes; 8, 4 and 1 GB/s; 1, 2 and 3 ms."""
    links = Link(8e9, 1e-3), Link(4e9, 2e-3), Link(1e9, 3e-3)
    names = "pair", "node", "network"
    return Topology((Group(GPU, 8),), tuple(Level(n, 2, link) for n, link in zip(names, links, strict=True)))


def ring_by_steps(topology: Topology, ranks: list[int], size: float) -> float:
    """Every device sends a chunk to the next one, all of them at once; the last to arrive ends a step."""
    now = 0.0
    for _ in ("reduce-scatter", "all-gather"):
        for _ in range(len(ranks) - 1):
            following = [*ranks[1:], ranks[0]]
            now += max(
                topology.link(a, b).seconds(size / len(ranks)) for a, b in zip(ranks, following, strict=True)
            )
    return now


def slow_inside() -> Topology:
    """Whose links inside a node are the slower ones."""
    return two_level_topology(GPU, 8, 4, BETWEEN, INSIDE)


@pytest.mark.parametrize(
    "topology", [TOPOLOGY, three_levels(), slow_inside()], ids=["two levels", "three levels", "slow inside"]
)
@pytest.mark.parametrize("ranks", [[0, 1], [0, 1, 2, 3], [5, 6, 7], [3, 4], [0, 2, 5], list(range(8))])
@pytest.mark.parametrize("size", [1.0, 1e6, 3e9])
def test_a_ring_by_its_steps(topology: Topology, ranks: list[int], size: float) -> None:
    ring = by_algorithm(topology, ranks, size)["ring"]
    assert ring == pytest.approx(ring_by_steps(topology, ranks, size))


def test_by_hand_inside_a_node() -> None:
    # Four devices, 8 GB at 8 GB/s. Ring: 2 x 3/4 s and six steps of 1 ms; tree: 2 s and 2 x 2 steps.
    node = [0, 1, 2, 3]
    assert by_algorithm(TOPOLOGY, node, 8e9)["ring"] == pytest.approx(1.506)
    assert by_algorithm(TOPOLOGY, node, 8e9)["tree"] == pytest.approx(2.004)
    assert by_algorithm(TOPOLOGY, node, 8e9)["hierarchical"] == pytest.approx(1.506)
    assert by_algorithm(TOPOLOGY, node, 8e9)["ring"] == pytest.approx(1.506)
    assert by_algorithm(TOPOLOGY, [0, 1, 2], 8e9)["tree"] == pytest.approx(2.004)


def test_by_hand_across_nodes() -> None:
    # Eight devices, 8 GB. Ring at 1 GB/s: 2 x 7/8 x 8 s and 14 x 2 ms. Tree: 16 s and 6 x 2 ms.
    assert by_algorithm(TOPOLOGY, range(8), 8e9)["ring"] == pytest.approx(14.028)
    assert by_algorithm(TOPOLOGY, range(8), 8e9)["tree"] == pytest.approx(16.012)
    # Hierarchical: inside 3/4 s and 3 ms each way; across 2 x 1/2 x 2 GB at 1 GB/s and 2 x 2 ms.
    assert by_algorithm(TOPOLOGY, range(8), 8e9)["hierarchical"] == pytest.approx(1.506 + 2.004)
    assert all_reduce_seconds(TOPOLOGY, range(8), 8e9) == pytest.approx(1.506 + 2.004)


def test_by_hand_over_three_levels() -> None:
    # 8 GB, each way: 1/2 x 8 GB at 8 GB/s, 1/2 x 4 GB at 4, 1/2 x 2 GB at 1, and 1 + 2 + 3 ms.
    one_way = 0.5 + 0.5 + 1.0 + 0.006
    assert by_algorithm(three_levels(), range(8), 8e9)["hierarchical"] == pytest.approx(2 * one_way)
    # Only the pair and the network: 0 and 1 with 4 and 5.
    one_way = 0.5 + 2.0 + 0.004
    some = [0, 1, 4, 5]
    assert by_algorithm(three_levels(), some, 8e9)["hierarchical"] == pytest.approx(2 * one_way)


@pytest.mark.parametrize(("devices_per_port", "across"), [(1, 2.0), (2, 4.0), (4, 8.0)])
def test_rings_that_share_a_port_share_its_bandwidth(devices_per_port: int, across: float) -> None:
    """Four rings leave a node at once, each with a quarter of the 8 GB."""
    topology = shared(devices_per_port)
    found = by_algorithm(topology, range(8), 8e9)["hierarchical"]
    assert found == pytest.approx(1.506 + across + 0.004)
    # One ring crosses a port once, whoever shares it.
    assert by_algorithm(topology, range(8), 8e9)["ring"] == pytest.approx(14.028)
    # Of each node only two neighbours, half of the bytes each.
    pairs = by_algorithm(topology, [0, 1, 4, 5], 8e9)["hierarchical"]
    assert pairs == pytest.approx(1.002 + 4.0 * min(devices_per_port, 2) + 0.004)


def by_ports(topology: Topology, ranks: list[int], size: float) -> float:
    """A hierarchical all-reduce whose every transfer is laid on the ports it uses."""
    seconds, left = 0.0, size
    groups = [[rank] for rank in ranks]
    for index, level in enumerate(topology.levels):
        merged: dict[int, list[list[int]]] = defaultdict(list)
        for group in groups:
            key = next(
                (i for i, other in enumerate(groups) if topology.shared_level(other[0], group[0]) <= index), 0
            )
            merged[key].append(group)
        n = len(next(iter(merged.values())))
        load: dict[object, float] = defaultdict(float)
        for joined in merged.values():
            for ring in zip(*joined, strict=True):
                for a, b in zip(ring, [*ring[1:], ring[0]], strict=True):
                    if a != b:
                        for port in topology.ports(a, b):
                            load[port] += (n - 1) * left / n
        if n > 1:
            busiest = max(load.values()) / level.link.bandwidth_bytes_per_second
            seconds += busiest + (n - 1) * level.link.latency_seconds
        left /= n
        groups = [[rank for group in joined for rank in group] for joined in merged.values()]
    return 2 * seconds


@pytest.mark.parametrize("topology", [TOPOLOGY, shared(2), shared(4), three_levels()])
@pytest.mark.parametrize("ranks", [[0, 1], [0, 4], [0, 1, 4, 5], [1, 3, 5, 7], [0, 2, 4, 6], list(range(8))])
def test_hierarchical_by_the_load_of_every_port(topology: Topology, ranks: list[int]) -> None:
    found = by_algorithm(topology, ranks, 4e9)["hierarchical"]
    assert found == pytest.approx(by_ports(topology, ranks, 4e9))


def test_uneven_devices_have_no_hierarchy() -> None:
    assert not is_even(TOPOLOGY, [0, 1, 4])
    assert is_even(TOPOLOGY, [0, 1, 4, 5])
    assert set(by_algorithm(TOPOLOGY, [0, 1, 4], 1e9)) == {"ring", "tree"}


def test_nothing_to_reduce_takes_no_time() -> None:
    for seconds in (all_reduce_seconds, reduce_scatter_seconds, all_to_all_seconds, ring_step_seconds):
        assert seconds(TOPOLOGY, [3], 8e9) == 0.0
        assert seconds(TOPOLOGY, [0, 1], 0.0) == 0.0
    assert set(by_algorithm(TOPOLOGY, [0, 1], 0.0).values()) == {0.0}
    two = all_reduce_seconds(TOPOLOGY, [0, 1], np.array([0.0, 8e9]))
    assert two.tolist() == pytest.approx([0.0, 1.002])


def test_endless_bandwidth_leaves_the_latencies() -> None:
    free = two_level_topology(GPU, 4, 4, Link(math.inf, 1e-3), BETWEEN)
    assert by_algorithm(free, range(4), 1e12)["ring"] == pytest.approx(6e-3)
    assert by_algorithm(free, range(4), 1e12)["tree"] == pytest.approx(4e-3)


def test_the_slowest_step_sets_the_pace_whatever_makes_it_slow() -> None:
    late = two_level_topology(GPU, 8, 4, Link(8e9, 1.0), Link(1e9, 0.0))
    assert by_algorithm(late, range(8), 8.0)["ring"] == pytest.approx(14.0)
    assert by_algorithm(late, range(8), 8e12)["ring"] == pytest.approx(14e3)


def test_halves_of_an_all_reduce() -> None:
    for ranks in ([0, 1, 2, 3], [3, 4], list(range(8)), [0, 1, 4]):
        half = reduce_scatter_seconds(TOPOLOGY, ranks, 3e9)
        assert half == all_gather_seconds(TOPOLOGY, ranks, 3e9)
        each = by_algorithm(TOPOLOGY, ranks, 3e9)
        assert 2 * half == pytest.approx(min(own for name, own in each.items() if name != "tree"))
    # Four devices, 8 GB at 8 GB/s: 3/4 s and three steps.
    assert reduce_scatter_seconds(TOPOLOGY, range(4), 8e9) == pytest.approx(0.753)
    best = reduce_scatter_seconds(TOPOLOGY, range(8), np.array([1.0, 8e9]))
    assert best.tolist() == pytest.approx([3e-3 + 2e-3, 0.753 + 1.002])


def all_to_all_by_ports(topology: Topology, ranks: list[int], size: float) -> float:
    """Every pair's part is laid on the ports it uses; a device begins with one part after another."""
    load: dict[Port, float] = defaultdict(float)
    steps: dict[tuple[int, int], int] = defaultdict(int)
    for a in ranks:
        for b in ranks:
            if a != b:
                steps[topology.shared_level(a, b), a] += 1
                for port in topology.ports(a, b):
                    load[port] += size / len(ranks)
    return max(
        max(own for port, own in load.items() if port.level == index) / level.link.bandwidth_bytes_per_second
        + max(count for (at, _), count in steps.items() if at == index) * level.link.latency_seconds
        for index, level in enumerate(topology.levels)
        if any(port.level == index for port in load)
    )


@pytest.mark.parametrize("topology", [TOPOLOGY, shared(2), shared(4), three_levels()])
@pytest.mark.parametrize("ranks", [[0, 1], [3, 4], [0, 1, 4], [1, 3, 5, 7], [0, 1, 2, 5, 6], list(range(8))])
def test_all_to_all_by_the_load_of_every_port(topology: Topology, ranks: list[int]) -> None:
    expected = all_to_all_by_ports(topology, ranks, 4e9)
    assert all_to_all_seconds(topology, ranks, 4e9) == pytest.approx(expected)


def test_an_all_to_all_saves_nothing_between_nodes() -> None:
    # Eight devices, 8 GB: each sends four parts of 1 GB to the other node, at 1 GB/s.
    assert all_to_all_seconds(TOPOLOGY, range(8), 8e9) == pytest.approx(4.008)
    assert all_gather_seconds(TOPOLOGY, range(8), 8e9) == pytest.approx(1.755)
    # Four devices share an adapter: 16 parts leave it.
    assert all_to_all_seconds(shared(4), range(8), 8e9) == pytest.approx(16.008)


def test_a_step_of_a_ring_is_a_transfer_to_the_next_device() -> None:
    assert ring_step_seconds(TOPOLOGY, range(4), 8e9) == pytest.approx(INSIDE.seconds(8e9))
    assert ring_step_seconds(TOPOLOGY, range(8), 8e9) == pytest.approx(BETWEEN.seconds(8e9))
    assert ring_step_seconds(TOPOLOGY, [0, 4], 8e9) == pytest.approx(BETWEEN.seconds(8e9))


CALM = settings(deadline=None)
"""No verdict by elapsed time."""

LINKS = st.builds(Link, st.floats(1e6, 1e12), st.floats(0, 1e-2))
RANKS = st.sets(st.integers(0, 7), min_size=2).map(sorted)
SIZES = st.just(0.0) | st.floats(1, 1e10)


@CALM
@given(LINKS, LINKS, RANKS, SIZES, st.floats(1, 10))
def test_never_faster_with_more_bytes_or_slower_with_better_links(
    inside: Link, between: Link, ranks: list[int], size: float, more: float
) -> None:
    plain = two_level_topology(GPU, 8, 4, inside, between)
    wider = Link(inside.bandwidth_bytes_per_second * more, inside.latency_seconds)
    sooner = Link(between.bandwidth_bytes_per_second * more, between.latency_seconds / more)
    better = two_level_topology(GPU, 8, 4, wider, sooner)
    larger, improved = by_algorithm(plain, ranks, size * more), by_algorithm(better, ranks, size)
    for name, seconds in by_algorithm(plain, ranks, size).items():
        assert larger[name] >= seconds * (1 - 1e-12)
        assert improved[name] <= seconds * (1 + 1e-12)
    seconds = all_to_all_seconds(plain, ranks, size)
    assert all_to_all_seconds(plain, ranks, size * more) >= seconds * (1 - 1e-12)
    assert all_to_all_seconds(better, ranks, size) <= seconds * (1 + 1e-12)


@CALM
@given(LINKS, LINKS, RANKS, SIZES)
def test_the_best_is_one_of_them_and_none_is_faster(
    inside: Link, between: Link, ranks: list[int], size: float
) -> None:
    topology = two_level_topology(GPU, 8, 4, inside, between)
    each = by_algorithm(topology, ranks, size)
    assert ("hierarchical" in each) == is_even(topology, ranks)
    assert all_reduce_seconds(topology, ranks, size) == min(each.values())
    # No algorithm sends less than 2 (n - 1) / n of the bytes through each device.
    n = len(ranks)
    widest = max(inside.bandwidth_bytes_per_second, between.bandwidth_bytes_per_second)
    assert min(each.values()) >= 2 * (n - 1) / n * size / widest * (1 - 1e-12)


@CALM
@given(LINKS, LINKS, RANKS, st.floats(1, 1e10), st.floats(1, 1e4))
def test_seconds_never_grow_faster_than_the_bytes(
    inside: Link, between: Link, ranks: list[int], size: float, more: float
) -> None:
    """Seconds of a byte never rise; with one slowest level the curve is nowhere below its chord."""
    topology = two_level_topology(GPU, 8, 4, inside, between)
    sizes = np.linspace(size, size * more, 50)
    for function in (all_reduce_seconds, reduce_scatter_seconds, all_gather_seconds):
        seconds = function(topology, ranks, sizes)
        assert (np.diff(seconds / sizes) <= 1e-12 * (seconds / sizes)[1:]).all()
        if is_concave(topology):
            chord = np.linspace(seconds[0], seconds[-1], 50)
            assert (seconds >= chord * (1 - 1e-12)).all()


def test_seconds_of_links_that_take_turns_as_the_slowest_are_not_concave() -> None:
    assert is_concave(TOPOLOGY)
    assert is_concave(slow_inside())
    assert is_concave(three_levels())
    late = two_level_topology(GPU, 8, 4, Link(8e9, 1.0), Link(1e9, 0.0))
    assert not is_concave(late)
    few, many, most = all_reduce_seconds(late, [0, 1, 4], np.array([1e9, 8e9, 15e9]))
    assert many < (few + most) / 2
