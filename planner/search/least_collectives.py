"""Least seconds of an all-reduce over any r devices of a topology.

r devices must use a level, or one further out, if they are more than one of its members holds. Each algorithm
of `cost_models.collectives` is counted with the fewest steps and the smallest share of the bytes that r
devices leave it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache, reduce
from itertools import accumulate, product
from math import ceil, log2, prod
from operator import mul

import numpy as np

from ...cost_models.topology import Link, Topology
from ..stage_table import Floats

MOST_SHAPES = 4_096
"""Most ways to spread devices over the inner levels that are enumerated."""


def all_reduce_pace(topology: Topology, replicas: int) -> float:
    """Return the least seconds per byte of an all-reduce between any `replicas` devices.

    A replica sends 2 (r - 1) / r of its bytes, at best over the fastest link. A member of a level holds at
    most c devices, so for r > c some replicas send between members: with any algorithm of `collectives`, the
    devices that share a port (d of them) send 2 (1 - c / r) of a share d / c.
    """
    if replicas == 1:
        return 0.0
    levels, inner = topology.levels_in_use, 1
    paces = [2 * (replicas - 1) / replicas / max(level.link.bandwidth_bytes_per_second for level in levels)]
    for index, level in enumerate(levels[:-1]):
        inner *= level.size or 1
        outer = levels[index + 1 :]
        if replicas > inner:
            port_share = min(further.devices_per_port for further in outer) / inner
            fastest = max(further.link.bandwidth_bytes_per_second for further in outer)
            paces.append(2 * (1 - inner / replicas) * port_share / fastest)
    return max(paces)


def least_all_reduce_seconds(
    topology: Topology, replicas: int, bytes: Floats, per_node: int | None = None
) -> Floats:
    """Return seconds that no `all_reduce_seconds` of `replicas` or more devices undercuts.

    It grows with `replicas` and does not grow with `per_node`. Half of it is no more than the best
    reduce-scatter or all-gather takes.

    Args:
        topology: Devices and links.
        replicas: Least number of devices that take part.
        bytes: Bytes per device, of any shape.
        per_node: Most devices that take part in one node. None for no limit.

    Returns:
        Seconds, of the shape of `bytes`.
    """
    if replicas == 1:
        return np.zeros_like(bytes)
    sizes = [level.size or 1 for level in topology.levels_in_use[:-1]]
    if sizes and per_node is not None:
        sizes[0] = min(sizes[0], per_node)
    member_devices = list(accumulate(sizes, mul, initial=1))
    ring = _least_pass(
        topology, replicas, bytes, 2 * (replicas - 1) / replicas, 2 * (replicas - 1), member_devices
    )
    tree = _least_pass(topology, replicas, bytes, 2.0, 2 * ceil(log2(replicas)), member_devices)
    latencies = (bytes > 0).astype(np.float64)
    spread = _hierarchical(topology, replicas, tuple(sizes))
    lines = [pace * bytes + latency * latencies for pace, latency in spread]
    least: Floats = reduce(np.minimum, [ring, tree, *lines])
    return least


def fastest_transfer(topology: Topology) -> tuple[float, float]:
    """Return the bytes per second and the latency that no transfer of a replica to another stage beats.

    The replica sends over a port of each level at once, as to receivers on its own node and on others.
    """
    links = [level.link for level in topology.levels_in_use]
    return sum(link.bandwidth_bytes_per_second for link in links), min(link.latency_seconds for link in links)


def _least_pass(
    topology: Topology, replicas: int, bytes: Floats, share: float, steps: int, member_devices: Sequence[int]
) -> Floats:
    """Return the seconds of one pass over the slowest level that must be used.

    A pass takes `steps` latencies and sends a `share` of the bytes. `member_devices` says, by level, how many
    devices a member holds at most.
    """
    links = [level.link for level in topology.levels_in_use]
    sent, latencies = share * bytes, steps * (bytes > 0)

    def seconds(link: Link) -> Floats:
        seconds_of_link: Floats = sent / link.bandwidth_bytes_per_second + latencies * link.latency_seconds
        return seconds_of_link

    must = [index for index, devices in enumerate(member_devices) if replicas > devices]
    least: Floats = reduce(
        np.maximum, [reduce(np.minimum, [seconds(link) for link in links[index:]]) for index in must]
    )
    return least


@lru_cache(maxsize=1024)
def _hierarchical(
    topology: Topology, replicas: int, sizes: tuple[int, ...]
) -> tuple[tuple[float, float], ...]:
    """Return seconds per byte and latency of rings level by level, for each spread of the devices.

    A ring runs in every group at once. A spread says how many members of each inner level take part, at most
    `sizes`. Pairs that another pair undercuts in both figures are left out.
    """
    if prod(sizes) > MOST_SHAPES:
        return ((all_reduce_pace(topology, replicas), 0.0),)
    lines = sorted(_line(topology, replicas, shape) for shape in product(*(range(1, n + 1) for n in sizes)))
    lowest = list(accumulate((latency for _, latency in lines), min))
    return tuple(line for i, line in enumerate(lines) if i == 0 or line[1] < lowest[i - 1])


def _line(topology: Topology, replicas: int, shape: tuple[int, ...]) -> tuple[float, float]:
    """Return seconds per byte and latency of a hierarchical ring.

    A fraction of a group of the outermost level is counted as a fraction, so that more devices never take
    less. `shape` says, by inner level, how many members of a group take part.
    """
    members = (*shape, max(1.0, replicas / prod(shape)))
    pace = latency = 0.0
    devices_inside, remainder = 1, 1.0
    for level, count, devices in zip(
        topology.levels_in_use, members, _devices_of_members(topology), strict=True
    ):
        link, ports = level.link, devices // level.devices_per_port
        at_once = ceil(devices_inside / ports)
        pace += 2 * at_once * remainder * (count - 1) / count / link.bandwidth_bytes_per_second
        latency += 2 * (count - 1) * link.latency_seconds
        devices_inside, remainder = devices_inside * int(count), remainder / count
    return pace, latency


def _devices_of_members(topology: Topology) -> Iterator[int]:
    """Return the devices of one member by level."""
    return accumulate((level.size or 1 for level in topology.levels_in_use[:-1]), mul, initial=1)
