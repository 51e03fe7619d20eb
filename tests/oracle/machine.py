"""The machine in a plan, and what transfers and sums of gradients need of its links and ports.

A cut's tensor goes from the replicas of one stage to those of the next: each sender has an equal run of the
samples, and so needs each receiver, so that a part of it goes from sender a to receiver b for every overlap
of their runs. Each part loads the port that it leaves by and the one that it arrives by with its share over
the link's bandwidth; the port with the largest load sets the pace.
"""

from __future__ import annotations

import re
import tomllib
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, inf, log2
from typing import NamedTuple

KINDS: tuple[tuple[str, int, float | None], ...] = (
    (r"V100-(16|32)GB|(NVIDIA )?(Tesla )?V100-SXM(2-16|[23]-32)GB", 512, 900e9),
    (r"A100-40GB|(NVIDIA )?A100-SXM4-40GB", 512, 1555e9),
    (r"A100-80GB|(NVIDIA )?A100-SXM4-80GB", 512, 2039e9),
    (r"H100|NVIDIA H100 80GB HBM3", 576, 3.35e12),
    (r"H200|NVIDIA H200", 576, 4.8e12),
    (r"B200|NVIDIA B200", 512, 8e12),
    (r"(NVIDIA )?L4", 426, 300e9),
    (r"A10G|NVIDIA A10G", 512, None),
    (r"T4|(NVIDIA )?(Tesla )?T4", 512, 300e9),
    (r"RTX 3090|(NVIDIA )?GeForce RTX 3090", 512, 936e9),
    (r"RTX 4090|(NVIDIA )?GeForce RTX 4090", 426, 1008e9),
    (r"MI300X|AMD Instinct MI300X( VF| OAM)?", 512, 5.3e12),
)
"""By a pattern for a device's name: the MiB that a process's context takes of it, and the bytes per second of
its memory."""
BUCKETS = (1 * 2**20, 25 * 2**20)
"""Bytes of the first bucket of gradients, and of each further: DistributedDataParallel's defaults."""

Port = tuple[int, int, int]
"""A level, 0 for out and 1 for in, and the number of the port there."""


class Device(NamedTuple):
    """A kind of devices: their seconds are the profile's over `speed`, or those of their own `profile`."""

    name: str
    memory_bytes: int | None
    speed: float
    profile: str | None

    @property
    def known(self) -> tuple[int, float | None]:
        """The bytes of a process's context, and the bytes per second of its memory."""
        found = (row[1:] for row in KINDS if re.fullmatch(row[0], self.name.strip(), re.IGNORECASE))
        context, bandwidth = next(found, (0, None))
        return context * 2**20, bandwidth


class Level(NamedTuple):
    """`inner`: devices of one member of a group; `outer`: of a group, infinite for the outermost level."""

    name: str
    inner: int
    outer: float
    bandwidth: float
    latency: float
    devices_per_port: int


@dataclass(frozen=True)
class Machine:
    """Devices by rank, and the levels from the innermost to the outermost. `gpus_per_node`: of a group of the
    level named `node`, else of the innermost level."""

    kinds: list[Device]
    ends: list[int]
    """By kind, the rank after its last."""
    levels: list[Level]
    gpus_per_node: int

    @property
    def gpus(self) -> int:
        """How many devices."""
        return self.ends[-1]

    def kind(self, rank: int) -> Device:
        """The kind of a device."""
        return self.kinds[bisect_right(self.ends, rank)]

    def level(self, a: int, b: int) -> int:
        """The innermost level whose groups hold both."""
        return next(i for i, level in enumerate(self.levels) if a // level.outer == b // level.outer)

    def ports(self, a: int, b: int) -> tuple[Port, Port]:
        """The port that a transfer leaves `a` by, and the one that it reaches `b` by."""
        index = self.level(a, b)
        each = self.levels[index].devices_per_port
        return (index, 0, a // each), (index, 1, b // each)

    def members(self, ranks: list[int], index: int) -> set[int]:
        """The numbers of members that hold some of the devices, over the groups of a level."""
        level = self.levels[index]
        members = {(rank // level.outer, rank // level.inner) for rank in ranks}
        return set(Counter(group for group, _ in members).values())


def read_machine(text: str) -> Machine:
    """The machine of a topology file of [[device]] and [[level]] tables, as plans hold it."""
    content = tomllib.loads(text)
    kinds = [
        Device(
            own["name"],
            round(_number(own["memory"], _BYTES)) if "memory" in own else None,
            own.get("speed", 1.0),
            own.get("profile"),
        )
        for own in content["device"]
    ]
    sizes = [level.get("size") for level in content["level"]]
    inner = list(accumulate((size or 1 for size in sizes), lambda a, b: a * b, initial=1))
    ends = list(accumulate(own["count"] for own in content["device"]))
    levels = [
        Level(
            own["name"],
            inner[index],
            inner[index + 1] if index + 1 < len(sizes) else inf,
            _number(own["bandwidth"].removesuffix("/s"), _BYTES),
            _number(own.get("latency", "0s"), _PER_SECOND, per=True),
            own.get("devices_per_port", 1),
        )
        for index, own in enumerate(content["level"])
    ]
    node = next((index for index, level in enumerate(levels) if level.name == "node"), 0)
    return Machine(kinds, ends, levels, ends[-1] if sizes[node] is None else inner[node + 1])


_BYTES = {"B": 1.0, "GB": 1e9, "": 1.0}
_PER_SECOND = {"us": 1e6, "s": 1.0}


def _number(text: str, units: dict[str, float], *, per: bool = False) -> float:
    number, unit = re.fullmatch(r"(inf|[\d.]+(?:e[+-]?\d+)?)([A-Za-z]*)", text).groups()  # type: ignore[union-attr]
    return float(number) / units[unit] if per else float(number) * units[unit]


class Transfer(NamedTuple):
    """Its latency; by port the seconds a byte of the whole tensor; the port of the most that it leaves by."""

    latency: float
    loads: dict[Port, float]
    leaves_by: Port


def find_transfer(machine: Machine, senders: tuple[int, ...], receivers: tuple[int, ...]) -> Transfer:
    """From the replicas of one stage to those of another."""
    latency, loads = 0.0, dict[Port, float]()
    whole, start = len(senders) * len(receivers), 0
    while start < whole:
        a, b = start // len(receivers), start // len(senders)
        end = min((a + 1) * len(receivers), (b + 1) * len(senders))
        level = machine.levels[machine.level(senders[a], receivers[b])]
        latency = max(latency, level.latency)
        for port in machine.ports(senders[a], receivers[b]):
            loads[port] = loads.get(port, 0.0) + (end - start) / whole / level.bandwidth
        start = end
    return Transfer(latency, loads, min((-load, port) for port, load in loads.items() if port[1] == 0)[1])


def all_reduce_seconds(machine: Machine, ranks: list[int], size: float) -> float:
    """Seconds of the fastest of a ring, two trees and a hierarchy of rings.

    Ring: 2 (n - 1) steps of size / n. Trees: up and down with 2 ceil(log2 n) latencies, the size twice. Both
    at the pace of the slowest level in use. Hierarchy, where every group holds as many: a ring in each group
    from the inside out, each with the 1/n that the one before left, sharing the ports.
    """
    if len(ranks) < 2 or size <= 0:
        return 0.0
    depth = ceil(log2(len(ranks)))
    tree = max(2 * size / level.bandwidth + 2 * depth * level.latency for level in _used(machine, ranks))
    return min(2 * half_reduce_seconds(machine, ranks, size), tree)


def half_reduce_seconds(machine: Machine, ranks: list[int], size: float) -> float:
    """Seconds of a reduce-scatter or an all-gather: the faster of ring and hierarchy."""
    n = len(ranks)
    if n < 2 or size <= 0:
        return 0.0
    ring = max(
        (n - 1) / n * size / level.bandwidth + (n - 1) * level.latency for level in _used(machine, ranks)
    )
    members = [machine.members(ranks, index) for index in range(len(machine.levels))]
    if any(len(numbers) > 1 for numbers in members):
        return ring
    total, share = 0.0, 1.0
    for level, (k,) in zip(machine.levels, members, strict=True):
        if k > 1:
            at_once = max(Counter(rank // level.devices_per_port for rank in ranks).values())
            total += at_once * share * (k - 1) / k * size / level.bandwidth + (k - 1) * level.latency
        share /= k
    return min(ring, total)


def _used(machine: Machine, ranks: list[int]) -> list[Level]:
    """The levels that join some of the devices."""
    return [level for i, level in enumerate(machine.levels) if max(machine.members(ranks, i)) > 1]


def exposed_seconds(
    machine: Machine, ranks: list[int], backward: list[float], gradients: list[float]
) -> float:
    """Seconds from the end of a backward until its gradients are summed over the replicas, bucket by bucket
    while it runs; by layer, in the order of the forward. A bucket is complete with its last gradient."""
    now = end = bucket = last = 0.0
    size = BUCKETS[0]
    for seconds, gradient in zip(reversed(backward), reversed(gradients), strict=True):
        now += seconds
        bucket += gradient
        last = now if gradient > 0 else last
        if bucket >= size:
            end = max(end, last) + all_reduce_seconds(machine, ranks, bucket)
            bucket, size = 0.0, BUCKETS[1]
    if bucket > 0:
        end = max(end, last) + all_reduce_seconds(machine, ranks, bucket)
    return max(0.0, end - now)


def sum_loads(machine: Machine, ranks: list[int], size: float) -> dict[Port, float]:
    """By port, the seconds that any all-reduce of so many bytes must send (and receive) through it: a member
    of k that hold some devices sends 2 (k - 1) / k of the bytes, in equal parts from its devices."""
    loads: dict[Port, float] = {}
    for index, level in enumerate(machine.levels):
        of_member = Counter(rank // level.inner for rank in ranks)
        group = {member: member * level.inner // level.outer for member in of_member}
        members = Counter(group.values())
        for port, count in Counter(rank // level.devices_per_port for rank in ranks).items():
            member = port * level.devices_per_port // level.inner
            k = members[group[member]]
            if k > 1:
                share = 2 * (k - 1) / k * count / of_member[member]
                for direction in (0, 1):
                    loads[index, direction, port] = share * size / level.bandwidth
    return loads


AllReduce = tuple[float, int, list[int], float]
"""A sum of gradients: when it is ready, its part of the layers, its devices, and its seconds alone."""


def run_all_reduces(
    free: list[float], requests: list[AllReduce], shared: dict[int, dict[Port, float]]
) -> list[float]:
    """When each device is done, each being `free` for the first. A device takes part in one all-reduce at a
    time, in the order in which they are ready; those that go through one port (`shared`: seconds by part and
    port) wait there for each other."""
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
