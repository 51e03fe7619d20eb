"""What an all-reduce takes at the least, whichever devices take part: for all choices of r devices at once.

A level must be used, or one further out, where r devices are more than one of its members holds; and each of
the algorithms of `cost_models.collectives` is taken with the fewest steps and the smallest share of the bytes
that r devices leave it.
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
"""Ways to spread devices over the inner levels that are looked at one by one."""


def all_reduce_pace(topology: Topology, replicas: int) -> float:
    """Seconds that each byte of gradients takes at the least, whichever devices add them up.

    A replica sends 2 (r - 1) / r of its bytes, over the fastest link at best. A member of a level holds c
    devices at most, so that for r > c some send between members: by any algorithm of `collectives` the
    devices behind a port of a member send 2 (1 - c / r) of a share d / c, for d devices a port.
    """
    if replicas == 1:
        return 0.0
    levels, inner = topology.levels_in_use, 1
    paces = [2 * (replicas - 1) / replicas / max(level.link.bandwidth_bytes_per_second for level in levels)]
    for index, level in enumerate(levels[:-1]):
        inner *= level.size or 1
        outer = levels[index + 1 :]
        if replicas > inner:
            behind = min(own.devices_per_port for own in outer) / inner
            fastest = max(own.link.bandwidth_bytes_per_second for own in outer)
            paces.append(2 * (1 - inner / replicas) * behind / fastest)
    return max(paces)


def least_all_reduce_seconds(
    topology: Topology, replicas: int, bytes: Floats, per_node: int | None = None
) -> Floats:
    """No more than `all_reduce_seconds(topology, devices, bytes)` for any `replicas` devices or more.

    It grows with `replicas`, and does not with `per_node`. Half of it is no more than the best reduce-scatter
    or all-gather.
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
    """Bytes a second and latency that no replica's transfer to another stage beats: over a port of each level
    at once, as to receivers on its own node and on others."""
    links = [level.link for level in topology.levels_in_use]
    return sum(link.bandwidth_bytes_per_second for link in links), min(link.latency_seconds for link in links)


def _least_pass(
    topology: Topology, replicas: int, bytes: Floats, share: float, steps: int, member_devices: Sequence[int]
) -> Floats:
    """`steps` latencies and a `share` of the bytes at the pace of the slowest level that must be used.

    `member_devices`: by level, the most of the devices that a member has.
    """
    links = [level.link for level in topology.levels_in_use]
    sent, latencies = share * bytes, steps * (bytes > 0)

    def seconds(link: Link) -> Floats:
        own: Floats = sent / link.bandwidth_bytes_per_second + latencies * link.latency_seconds
        return own

    must = [index for index, devices in enumerate(member_devices) if replicas > devices]
    least: Floats = reduce(
        np.maximum, [reduce(np.minimum, [seconds(link) for link in links[index:]]) for index in must]
    )
    return least


@lru_cache(maxsize=1024)
def _hierarchical(
    topology: Topology, replicas: int, sizes: tuple[int, ...]
) -> tuple[tuple[float, float], ...]:
    """Seconds of each byte and latencies of a ring in every group at once, level by level, for each way to
    spread the devices over the inner levels; those that no other is below in both. `sizes`: by inner level,
    the most members of a group that take part."""
    if prod(sizes) > MOST_SHAPES:
        return ((all_reduce_pace(topology, replicas), 0.0),)
    lines = sorted(_line(topology, replicas, shape) for shape in product(*(range(1, n + 1) for n in sizes)))
    lowest = list(accumulate((latency for _, latency in lines), min))
    return tuple(line for i, line in enumerate(lines) if i == 0 or line[1] < lowest[i - 1])


def _line(topology: Topology, replicas: int, shape: tuple[int, ...]) -> tuple[float, float]:
    """`shape`: by inner level, members of a group that take part. As many groups of the outermost level as
    that takes: a fraction of one counts as it is, so that more devices never take less."""
    members = (*shape, max(1.0, replicas / prod(shape)))
    pace = latency = 0.0
    behind, remainder = 1, 1.0
    for level, count, devices in zip(
        topology.levels_in_use, members, _devices_of_members(topology), strict=True
    ):
        link, ports = level.link, devices // level.devices_per_port
        at_once = ceil(behind / ports)
        pace += 2 * at_once * remainder * (count - 1) / count / link.bandwidth_bytes_per_second
        latency += 2 * (count - 1) * link.latency_seconds
        behind, remainder = behind * int(count), remainder / count
    return pace, latency


def _devices_of_members(topology: Topology) -> Iterator[int]:
    """By level."""
    return accumulate((level.size or 1 for level in topology.levels_in_use[:-1]), mul, initial=1)
