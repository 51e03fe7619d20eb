"""Seconds of all-reduces, reduce-scatters and all-gathers over any devices, by several algorithms.

Each sends as the algorithm's authors count it: a latency for every step, and the bytes that one device (or
one port that devices share) sends, at the pace of the slowest level in use. Adding up takes no time.

- ring: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, Journal of
  Parallel and Distributed Computing 69(2), 2009.
- tree: Sanders, Speck and Träff, Two-tree algorithms for full bandwidth broadcast, reduction and scan,
  Parallel Computing 35(12), 2009; in NCCL since 2.4 (Jeaugey, Massively scale your deep learning training
  with NCCL 2.4, https://developer.nvidia.com/blog/massively-scale-deep-learning-training-nccl-2-4/).
- hierarchical: reduce-scatter inside, all-reduce across with what that left, all-gather inside (Mikami et
  al., Massively distributed SGD: ImageNet/ResNet-50 training in a flash, arXiv:1811.05233, with two levels;
  here with as many as the topology has).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from functools import reduce
from typing import Literal, TypeAlias, get_args

import numpy as np

from .errors import UsageError
from .hardware import Amount, Link
from .topology import FEW_RANKS, Topology

Algorithm: TypeAlias = Literal["ring", "tree", "hierarchical", "best"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)


def all_reduce_seconds(
    topology: Topology, devices: Iterable[int], bytes: Amount, algorithm: Algorithm = "ring"
) -> Amount:
    """Seconds until every device has the sum of `bytes` held by each; 0 for one device or no bytes.

    For n devices: `ring` takes 2 (n - 1) steps of bytes / n; `tree` 2 ceil(log2 n) latencies and sends bytes
    twice; `hierarchical` at every level, from the inside, a reduce-scatter of the remaining part, and the
    all-gathers back; `best` is the fastest of them for each size. Raises UsageError, also where
    `hierarchical` is asked for over devices that are not spread evenly.
    """
    ways: dict[str, _Way[Amount]] = {
        "ring": _twice(_ring),
        "tree": _tree,
        "hierarchical": _twice(_hierarchical),
    }
    return _seconds(ways, topology, devices, bytes, algorithm)


def reduce_scatter_seconds(
    topology: Topology, devices: Iterable[int], bytes: Amount, algorithm: Algorithm = "ring"
) -> Amount:
    """Seconds until each of n devices has the sum of its n-th part of `bytes`, held whole by each before.

    Half of an all-reduce by `ring` or `hierarchical`; `best` is the faster. Raises UsageError.
    """
    return _seconds({"ring": _ring, "hierarchical": _hierarchical}, topology, devices, bytes, algorithm)


def all_gather_seconds(
    topology: Topology, devices: Iterable[int], bytes: Amount, algorithm: Algorithm = "ring"
) -> Amount:
    """Seconds until every device has all of `bytes`, of which each of n held an n-th part.

    The steps of a reduce-scatter backwards, and as many seconds. Raises UsageError.
    """
    return reduce_scatter_seconds(topology, devices, bytes, algorithm)


def best_algorithm(topology: Topology, devices: Iterable[int], bytes: float) -> Algorithm:
    """The fastest way to all-reduce `bytes`; of equal ones the simplest."""
    ranks = sorted(set(devices))
    ways = [
        way for way in ALGORITHMS if way != "best" and (way != "hierarchical" or is_even(topology, ranks))
    ]
    return min(ways, key=lambda way: all_reduce_seconds(topology, ranks, bytes, way))


def all_reduce_loads(topology: Topology, devices: Iterable[int]) -> dict[tuple[int, int], float]:
    """By port (level and owner, leaving and entering alike): for how many seconds of each byte of an
    all-reduce it is taken at the least, whatever the algorithm.

    Where k members of a group take part, the sum of their parts has to leave and to enter each of them:
    2 (k - 1) / k of the bytes (Patarasuk and Yuan 2009, theorem 1), over all ports that its devices have.
    """
    ranks = np.unique(np.array(list(devices), dtype=np.int64))
    loads: dict[tuple[int, int], float] = {}
    for index, level in enumerate(topology.levels):
        groups, members = topology.places_in(index, ranks)
        _, first, member, sizes = np.unique(
            members, return_index=True, return_inverse=True, return_counts=True
        )
        _, group, joined = np.unique(groups[first], return_inverse=True, return_counts=True)
        ports, first, behind = np.unique(
            ranks // level.devices_per_port, return_index=True, return_counts=True
        )
        at = member.reshape(-1)[first]
        k = joined[group.reshape(-1)[at]]
        seconds = 2 * (k - 1) / k * behind / sizes[at] / level.link.bandwidth_bytes_per_second
        loads |= {
            (index, port): own
            for port, own, count in zip(ports.tolist(), seconds.tolist(), k.tolist(), strict=True)
            if count > 1
        }
    return loads


def is_even(topology: Topology, devices: Iterable[int]) -> bool:
    """Whether every group of a level holds as many of these devices: what hierarchical algorithms need."""
    return all(len(members) == 1 for members in topology.members(devices))


def link_signature(topology: Topology, devices: Iterable[int]) -> tuple[object, ...]:
    """What the seconds of collectives depend on: the same for runs of devices that are joined alike."""
    ranks = sorted(set(devices))
    if len(ranks) == 1:
        return (1,)
    at_once = tuple(_at_once(ranks, level.devices_per_port) for level in topology.levels)
    return (len(ranks), tuple(topology.members(ranks)), at_once)


_Way: TypeAlias = Callable[[Topology, list[int], Amount], Amount]


def _seconds(
    ways: dict[str, _Way[Amount]], topology: Topology, devices: Iterable[int], bytes: Amount, algorithm: str
) -> Amount:
    ranks = sorted(set(devices))
    if algorithm not in (*ways, "best"):
        raise UsageError(f"algorithm {algorithm!r}: not known here", f"Use one of: {', '.join(ways)}, best.")
    even = algorithm not in ("hierarchical", "best") or is_even(topology, ranks)
    if algorithm == "hierarchical" and not even:
        raise UsageError(
            f"hierarchical over devices {', '.join(map(str, ranks))}: they are not spread evenly",
            "Use ring, tree or best, or as many devices of every group.",
        )
    if len(ranks) < 2:
        return bytes * 0.0
    if algorithm != "best":
        return ways[algorithm](topology, ranks, bytes)
    usable = [way(topology, ranks, bytes) for name, way in ways.items() if even or name != "hierarchical"]
    return reduce(_smaller, usable)


def _smaller(one: Amount, other: Amount) -> Amount:
    minimum: Amount = np.minimum(one, other)
    return minimum


def _larger(one: Amount, other: Amount) -> Amount:
    maximum: Amount = np.maximum(one, other)
    return maximum


def _twice(way: _Way[Amount]) -> _Way[Amount]:
    return lambda topology, ranks, bytes: 2 * way(topology, ranks, bytes)


def _pass(link: Link, share: float, bytes: Amount, steps: int) -> Amount:
    """`steps` latencies and a `share` of the bytes; nothing to send takes no time, latencies neither."""
    return share * bytes / link.bandwidth_bytes_per_second + steps * link.latency_seconds * (bytes > 0)


def _ring_links(topology: Topology, ranks: list[int]) -> list[Link]:
    """The links that a ring over the ranks in order goes over; it crosses each shared port once."""
    joined = zip(topology.levels, topology.members(ranks), strict=True)
    return [level.link for level, members in joined if max(members) > 1]


def _ring(topology: Topology, ranks: list[int], bytes: Amount) -> Amount:
    """n - 1 steps, in each of which all send bytes / n to the next; the slowest link sets the pace."""
    n = len(ranks)
    return reduce(_larger, [_pass(link, (n - 1) / n, bytes, n - 1) for link in _ring_links(topology, ranks)])


def _tree(topology: Topology, ranks: list[int], bytes: Amount) -> Amount:
    """Up and down two binary trees, each with half of the bytes, in which no device is inside of both.

    Pipelined, a device receives 2 x bytes / 2 from its children and sends as much; then down again. A group
    behind a shared port has one place in each tree.
    """
    depth = math.ceil(math.log2(len(ranks)))
    return reduce(_larger, [_pass(link, 2.0, bytes, 2 * depth) for link in _ring_links(topology, ranks)])


def _hierarchical(topology: Topology, ranks: list[int], bytes: Amount) -> Amount:
    """A ring in every group at once, from the innermost level outwards, each with what the one before left.

    Devices that share a port have rings through it at the same time, each with its part of the bandwidth.
    """
    total, remainder = bytes * 0.0, 1.0
    for level, (n,) in zip(topology.levels, topology.members(ranks), strict=True):
        if n > 1:
            at_once = _at_once(ranks, level.devices_per_port)
            total = total + _pass(level.link, at_once * remainder * (n - 1) / n, bytes, n - 1)
        remainder /= n
    return total


def _at_once(ranks: list[int], devices_per_port: int) -> int:
    """The most of these devices that one port has."""
    if len(ranks) > FEW_RANKS:
        return int(np.unique(np.array(ranks) // devices_per_port, return_counts=True)[1].max())
    return max(Counter(rank // devices_per_port for rank in ranks).values())
