"""What transfers between stages and the sums of gradients need of links and ports.

A cut's tensor goes from the replicas of one stage to those of the next: each sender has an equal run of the
samples, and so needs each receiver, so that a part of it goes from sender a to receiver b for every overlap
of their runs. Each part loads the port that it leaves by and the one that it arrives by with its share over
the link's bandwidth; the port with the largest load sets the pace.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import ceil, log2
from typing import NamedTuple

from .stated_machine import Port, StatedLevel, StatedMachine

BUCKETS = (1 * 2**20, 25 * 2**20)
"""Bytes of the first bucket of gradients, and of each further: DistributedDataParallel's defaults."""


@dataclass(frozen=True)
class TransferRoute:
    """Of a transfer: its latency, by port the seconds a byte of the whole tensor, and the port by which it
    leaves that is loaded most (of equals the first)."""

    latency: float
    loads: dict[Port, float]
    leaves_by: Port

    @property
    def pace(self) -> float:
        """Seconds a byte on the slowest port."""
        return max(self.loads.values())


def find_transfer_route(
    machine: StatedMachine, senders: tuple[int, ...], receivers: tuple[int, ...]
) -> TransferRoute:
    """From the replicas of one stage to those of another."""
    latency, loads = 0.0, dict[Port, float]()
    whole, done = len(senders) * len(receivers), 0
    while done < whole:
        a, b = done // len(receivers), done // len(senders)
        until = min((a + 1) * len(receivers), (b + 1) * len(senders))
        level = machine.levels[machine.level(senders[a], receivers[b])]
        latency = max(latency, level.latency)
        for port in machine.ports(senders[a], receivers[b]):
            loads[port] = loads.get(port, 0.0) + (until - done) / whole / level.bandwidth
        done = until
    out = {port: load for port, load in loads.items() if port[1] == 0}
    return TransferRoute(latency, loads, min(out, key=lambda port: (-out[port], port)))


def all_reduce_time(machine: StatedMachine, ranks: list[int], size: float) -> float:
    """Of the ring, the two trees and the hierarchy of rings the fastest; 0 for one device or no bytes.

    Ring: 2 (n - 1) steps of size / n. Trees: up and down with 2 ceil(log2 n) latencies, the size twice. Both
    at the pace of the slowest level in use. Hierarchy, where every group holds as many: a ring in each group
    from the inside out, each with the 1/n that the one before left, sharing the ports.
    """
    if len(ranks) < 2 or size <= 0:
        return 0.0
    depth, used = ceil(log2(len(ranks))), _used(machine, ranks)
    tree = max(2 * size / own.bandwidth + 2 * depth * own.latency for own in used)
    return min(2 * half_reduce_seconds(machine, ranks, size), tree)


def half_reduce_seconds(machine: StatedMachine, ranks: list[int], size: float) -> float:
    """Of a reduce-scatter, or of an all-gather: the way there of the faster of ring and hierarchy."""
    n = len(ranks)
    if n < 2 or size <= 0:
        return 0.0
    ring = max((n - 1) / n * size / own.bandwidth + (n - 1) * own.latency for own in _used(machine, ranks))
    members = [_members(machine, ranks, index) for index in range(len(machine.levels))]
    if any(len(own) > 1 for own in members):
        return ring
    total, left = 0.0, 1.0
    for level, (k,) in zip(machine.levels, members, strict=True):
        if k > 1:
            at_once = max(Counter(rank // level.devices_per_port for rank in ranks).values())
            total += at_once * left * (k - 1) / k * size / level.bandwidth + (k - 1) * level.latency
        left /= k
    return min(ring, total)


def _used(machine: StatedMachine, ranks: list[int]) -> list[StatedLevel]:
    """The levels that join some of the devices."""
    return [level for i, level in enumerate(machine.levels) if max(_members(machine, ranks, i)) > 1]


def _members(machine: StatedMachine, ranks: list[int], index: int) -> set[int]:
    """Of each group of a level that holds some of the devices, how many of its members do."""
    level = machine.levels[index]
    outermost = index == len(machine.levels) - 1
    members = {(0 if outermost else level.group(rank), rank // level.inner) for rank in ranks}
    return set(Counter(group for group, _ in members).values())


def exposed_seconds(
    machine: StatedMachine, ranks: list[int], backward: list[float], gradients: list[float]
) -> float:
    """Seconds from the end of a backward until its gradients are summed over the replicas, bucket by bucket
    while it runs; by layer, in the order of the forward. A bucket is complete with its last gradient."""
    now = done = bucket = 0.0
    size, last = BUCKETS[0], 0.0
    for seconds, own in zip(reversed(backward), reversed(gradients), strict=True):
        now += seconds
        bucket += own
        last = now if own > 0 else last
        if bucket >= size:
            done = max(done, last) + all_reduce_time(machine, ranks, bucket)
            bucket, size = 0.0, BUCKETS[1]
    if bucket > 0:
        done = max(done, last) + all_reduce_time(machine, ranks, bucket)
    return max(0.0, done - now)


def sum_loads(machine: StatedMachine, ranks: list[int], size: float) -> dict[Port, float]:
    """By port, the seconds that any all-reduce of so many bytes must send (and receive) through it: a member
    of k that hold some devices sends 2 (k - 1) / k of the bytes, in equal parts from its devices."""
    loads: dict[Port, float] = {}
    for index, level in enumerate(machine.levels):
        outermost = index == len(machine.levels) - 1
        of_member = Counter(rank // level.inner for rank in ranks)
        group = {member: 0 if outermost else level.group(member * level.inner) for member in of_member}
        members = Counter(group.values())
        behind = Counter(rank // level.devices_per_port for rank in ranks)
        for port, count in behind.items():
            member = port * level.devices_per_port // level.inner
            k = members[group[member]]
            if k > 1:
                share = 2 * (k - 1) / k * count / of_member[member]
                for direction in (0, 1):
                    loads[index, direction, port] = share * size / level.bandwidth
    return loads


def shared_loads(
    machine: StatedMachine, ranks: list[list[int]], sizes: list[float]
) -> dict[int, dict[Port, float]]:
    """By all-reduce, the `sum_loads` of ports that other all-reduces go through, too."""
    loads = [sum_loads(machine, *own) for own in zip(ranks, sizes, strict=True)]
    uses = Counter(port for own in loads for port, load in own.items() if load)
    return {
        index: {port: load for port, load in own.items() if uses[port] > 1} for index, own in enumerate(loads)
    }


class AllReduce(NamedTuple):
    """A sum of the gradients of a `part` on the devices `members`, of so many seconds by itself."""

    ready: float
    part: int
    members: list[int]
    seconds: float


def run_all_reduces(
    free: list[float], requests: list[AllReduce], shared: dict[int, dict[Port, float]]
) -> list[float]:
    """When each device is done, of which each is `free` for the first. A device takes part in one all-reduce
    at a time, in the order in which they are ready; those that go through one port (`shared`: seconds by part
    and port) wait there for each other."""
    ends, busy = list(free), [0.0] * len(free)
    port_free: dict[Port, float] = {}
    for begin, part, members, seconds in sorted(requests):
        alone = end = max(begin, *(busy[device] for device in members)) + seconds
        for port, load in shared.get(part, {}).items():
            port_free[port] = max(alone - load, port_free.get(port, 0.0)) + load
            end = max(end, port_free[port])
        for device in members:
            busy[device] = end
            ends[device] = max(ends[device], end)
    return ends
