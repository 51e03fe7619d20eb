"""Seconds of collectives over any devices, by the fastest algorithm for the topology and the size.

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
- all-to-all: pairwise exchange (Thakur, Rabenseifner and Gropp, Optimization of collective communication
  operations in MPICH, International Journal of High Performance Computing Applications 19(1), 2005).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from functools import reduce
from itertools import pairwise
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from .hardware import Amount, Link
from .topology import FEW_RANKS, Topology

Algorithm: TypeAlias = Literal["ring", "tree", "hierarchical"]


def all_reduce_seconds(topology: Topology, devices: Iterable[int], bytes: Amount) -> Amount:
    """Seconds until every device has the sum of `bytes` held by each, by the fastest algorithm for each size.

    0 for one device or no bytes.
    """
    return reduce(_smaller, all_reduce_seconds_by_algorithm(topology, devices, bytes).values())


def all_reduce_seconds_by_algorithm(
    topology: Topology, devices: Iterable[int], bytes: Amount
) -> dict[Algorithm, Amount]:
    """Seconds of an all-reduce by each algorithm that these devices can use, the simplest first.

    For n devices: `ring` takes 2 (n - 1) steps of bytes / n; `tree` 2 ceil(log2 n) latencies and sends bytes
    twice; `hierarchical` takes, at every level from the inside, a reduce-scatter of the remaining part, and
    the all-gathers back. It needs devices that are spread evenly (`is_even`).
    """
    ranks = sorted(set(devices))
    halves = _half_seconds(topology, ranks, bytes)
    tree = _tree(topology, ranks, bytes) if len(ranks) > 1 else bytes * 0.0
    seconds: dict[Algorithm, Amount] = {"ring": 2 * halves["ring"], "tree": tree}
    return seconds | {name: 2 * half for name, half in halves.items() if name != "ring"}


def reduce_scatter_seconds(topology: Topology, devices: Iterable[int], bytes: Amount) -> Amount:
    """Seconds until each of n devices has the sum of its n-th part of `bytes`, held whole by each before.

    Half of an all-reduce by the faster of ring and hierarchy.
    """
    return reduce(_smaller, _half_seconds(topology, sorted(set(devices)), bytes).values())


def all_gather_seconds(topology: Topology, devices: Iterable[int], bytes: Amount) -> Amount:
    """Seconds until every device has all of `bytes`, of which each of n held an n-th part.

    It has the steps of a reduce-scatter in reverse, and takes as long.
    """
    return reduce_scatter_seconds(topology, devices, bytes)


def all_to_all_seconds(topology: Topology, devices: Iterable[int], bytes: Amount) -> Amount:
    """Seconds until each of n devices has received an n-th part of the `bytes` of every other device.

    A device sends every other one its part, one after another, over the innermost level that joins them.
    Levels work side by side; devices that share a port share its bandwidth. No part can be combined with
    another, so unlike an all-gather nothing is saved between nodes.
    """
    ranks = np.array(sorted(set(devices)), dtype=np.int64)
    levels = [
        _pass(level.link, load / len(ranks), bytes, steps)
        for level, (load, steps) in zip(topology.levels, _peers(topology, ranks), strict=True)
    ]
    return reduce(_larger, levels)


def ring_step_seconds(topology: Topology, devices: Iterable[int], bytes: Amount) -> Amount:
    """Seconds until each device, in order, has received `bytes` from the one before it, all at once.

    One step of a ring: the slowest link sets the pace. 0 for one device or no bytes.
    """
    ranks = sorted(set(devices))
    links = _ring_links(topology, ranks)
    return reduce(_larger, [_pass(link, 1.0, bytes, 1) for link in links], bytes * 0.0)


def all_reduce_loads(topology: Topology, devices: Iterable[int]) -> dict[tuple[int, int], float]:
    """By port (level and owner, leaving and entering alike): for how many seconds of each byte of an
    all-reduce it is taken at the least, whatever the algorithm.

    Where k members of a group take part, the sum of their parts has to leave and to enter each of them:
    2 (k - 1) / k of the bytes (Patarasuk and Yuan 2009, theorem 1), over all ports that its devices have.
    """
    ranks = np.array(sorted(set(devices)), dtype=np.int64)
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


def is_concave(topology: Topology) -> bool:
    """Return whether the seconds of reductions and gathers are concave in the bytes, above none.

    True if of any two levels one has both the higher latency and the lower bandwidth. One link is then the
    slowest of a ring or a tree for all sizes. The seconds of each algorithm are a line, and those of the
    fastest the minimum of lines.
    """
    links = [level.link for level in topology.levels_in_use]
    links.sort(key=lambda link: (link.latency_seconds, -link.bandwidth_bytes_per_second))
    return all(a.bandwidth_bytes_per_second >= b.bandwidth_bytes_per_second for a, b in pairwise(links))


def link_signature(topology: Topology, devices: Iterable[int]) -> tuple[object, ...]:
    """What the seconds of collectives depend on: the same for runs of devices that are joined alike."""
    ranks = sorted(set(devices))
    if len(ranks) == 1:
        return (1,)
    at_once = tuple(_at_once(ranks, level.devices_per_port) for level in topology.levels)
    return (len(ranks), tuple(topology.members(ranks)), at_once)


def _half_seconds(topology: Topology, ranks: list[int], bytes: Amount) -> dict[Algorithm, Amount]:
    """Seconds of a reduce-scatter, or an all-gather, by each algorithm that these devices can use."""
    if len(ranks) < 2:
        return {"ring": bytes * 0.0}
    seconds: dict[Algorithm, Amount] = {"ring": _ring(topology, ranks, bytes)}
    if is_even(topology, ranks):
        seconds["hierarchical"] = _hierarchical(topology, ranks, bytes)
    return seconds


def _peers(topology: Topology, ranks: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """By level: the most pairs that one port joins, and the most other devices that one device reaches."""
    counts, inside = [], np.ones_like(ranks)
    for index, level in enumerate(topology.levels):
        groups, _ = topology.places_in(index, ranks)
        _, group, size = np.unique(groups, return_inverse=True, return_counts=True)
        totals = size[group.reshape(-1)]
        _, port = np.unique(ranks // level.devices_per_port, return_inverse=True)
        beyond = totals - inside
        counts.append((int(np.bincount(port.reshape(-1), weights=beyond).max()), int(beyond.max())))
        inside = totals
    return counts


def _smaller(one: Amount, other: Amount) -> Amount:
    minimum: Amount = np.minimum(one, other)
    return minimum


def _larger(one: Amount, other: Amount) -> Amount:
    maximum: Amount = np.maximum(one, other)
    return maximum


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
