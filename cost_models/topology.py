"""Devices and the links between them by level: inside a node, between nodes, or any number of levels."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from math import gcd
from operator import mul
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from .errors import UsageError
from .quantities import (
    LEAST_RATE,
    LEAST_SPEED,
    MOST_BYTES,
    MOST_DEVICES,
    MOST_MEMBERS,
    MOST_RATE,
    MOST_SECONDS,
    MOST_SPEED,
    format_bytes,
    format_rate,
    format_seconds,
)

Amount = TypeVar("Amount", float, npt.NDArray[np.float64])


def _source() -> str:
    """Return a field for the origin of a value. It is ignored in comparisons."""
    source: str = field(default="", compare=False, repr=False)
    return source


UNKNOWN_DEVICE = "unknown"
"""Device of a profile whose costs were imported, regardless of where they were measured."""


@dataclass(frozen=True)
class Device:
    """Kind of device.

    Attributes:
        name: Name of the kind.
        memory_bytes: Bytes that a stage may use. None for no limit.
        speed: Speed relative to the profiled device. 2.0 halves the profiled seconds.
        profile: Profile file of this kind, instead of a speed.
        memory_source: Origin of `memory_bytes`.
    """

    name: str
    memory_bytes: int | None
    speed: float = 1.0
    profile: str | None = None
    memory_source: str = _source()

    def __post_init__(self) -> None:
        if self.memory_bytes is not None and not 1 <= self.memory_bytes <= MOST_BYTES:
            limit = "at least one byte" if self.memory_bytes < 1 else f"at most {MOST_BYTES} bytes"
            raise UsageError(
                f"memory_bytes={self.memory_bytes}: must be {limit}", "Give a size such as 16GiB."
            )
        if not LEAST_SPEED <= self.speed <= MOST_SPEED:
            raise UsageError(
                f"speed {self.speed:g} of {self.name}: must be above 0, "
                f"from {LEAST_SPEED:g} to {MOST_SPEED:g}",
                "Give it relative to the profiled device: 2.0 is twice as fast, 0.5 half as fast.",
            )
        if self.profile is not None and self.speed != 1:
            raise UsageError(
                f"{self.name}: has both a speed ({self.speed:g}) and a profile ({self.profile})",
                "Give one of them: the profile holds the seconds of this kind already.",
            )

    @property
    def seconds_scale(self) -> float:
        """Factor from profiled seconds to seconds on this device."""
        return 1 / self.speed


class Group(NamedTuple):
    """Devices of one kind with consecutive ranks."""

    device: Device
    number: int


@dataclass(frozen=True)
class Link:
    """One direction of a connection between two devices. The other direction is as fast at the same time.

    Attributes:
        bandwidth_bytes_per_second: Bandwidth. Infinite for transfers that take only the latency.
        latency_seconds: Seconds until the first byte arrives.
        name: Name for messages, such as `NVLink 3`.
    """

    bandwidth_bytes_per_second: float
    latency_seconds: float
    name: str = ""
    bandwidth_source: str = _source()
    latency_source: str = _source()

    def __post_init__(self) -> None:
        rate = self.bandwidth_bytes_per_second
        if not (LEAST_RATE <= rate <= MOST_RATE or rate == math.inf):
            raise UsageError(
                f"bandwidth={rate}: must be above 0 bytes per second, from {LEAST_RATE:g} to {MOST_RATE:g}",
                "Give a bandwidth such as 25GB/s, or inf for transfers that take no time.",
            )
        if not 0 <= self.latency_seconds <= MOST_SECONDS:
            raise UsageError(
                f"latency={self.latency_seconds}: must be a duration from 0 to {MOST_SECONDS:g} s",
                "Give a latency such as 5us.",
            )

    def seconds(self, bytes: Amount) -> Amount:
        """Return the seconds from the start of a transfer of `bytes` until all of it has arrived."""
        return self.latency_seconds + bytes / self.bandwidth_bytes_per_second

    def describe(self) -> str:
        """Return a description such as `NVLink 3 300 GB/s, 5 µs`."""
        rate = format_rate(self.bandwidth_bytes_per_second)
        return f"{self.name} {rate}, {format_seconds(self.latency_seconds, short=True)}".lstrip()


@dataclass(frozen=True)
class Level:
    """Groups of `size` members. A member is a group of the next inner level, or a device in the innermost.

    `link` joins any two devices of a group that no inner level joins, through one port of each. A port sends
    and receives at the bandwidth of the link.

    Attributes:
        name: Name of the level, such as `node`.
        size: Members of a group. None for any number, which only the outermost level may have.
        link: Link between the members.
        devices_per_port: Neighbouring devices that share a port, such as the network adapter of a server.
    """

    name: str
    size: int | None
    link: Link
    devices_per_port: int = 1
    size_source: str = _source()
    port_source: str = _source()

    def __post_init__(self) -> None:
        for what, count in (("size", self.size), ("devices_per_port", self.devices_per_port)):
            if count is not None and not 1 <= count <= MOST_MEMBERS:
                limit = "at least 1" if count < 1 else f"at most {MOST_MEMBERS}"
                raise UsageError(
                    f"level {self.name}: {what} {count}: must be {limit}", f"Give {what} = 8, for example."
                )


class Port(NamedTuple):
    """Port of a level through which transfers leave (`out`) or enter (`in`).

    Attributes:
        level: Index of the level.
        direction: "out" or "in".
        owner: Number of the port in its level.
    """

    level: int
    direction: str
    owner: int

    @property
    def leaves(self) -> bool:
        """True if transfers leave through this port."""
        return self.direction == "out"


NODE = "node"
"""Name of the level that a single process reaches. Without such a level it is the innermost."""


def check_devices(count: int, called: str = "") -> None:
    """Check that pplan plans for this many devices.

    Args:
        count: Number of devices.
        called: Name of the count in a file. Without one the message names the field `gpus`.

    Raises:
        UsageError: There are more devices than `MOST_DEVICES`.
    """
    if count > MOST_DEVICES:
        what = f"{called} {count}" if called else f"gpus={count}"
        raise UsageError(
            f"{what}: at most {MOST_DEVICES} devices are planned for",
            f"Give up to {MOST_DEVICES}: larger clusters run copies of a plan for fewer.",
        )


@dataclass(frozen=True)
class Topology:
    """Devices with ranks 0 to `gpus` - 1, and the levels that join them.

    Ranks fill the groups of a level in order. The last group may have fewer members.

    Attributes:
        groups: Kinds of devices and their numbers, by ascending ranks.
        levels: Levels from the innermost to the outermost.

    Raises:
        UsageError: The groups and levels contradict each other.
    """

    groups: tuple[Group, ...]
    levels: tuple[Level, ...]

    def __post_init__(self) -> None:
        for device, count in self.groups:
            if count < 1:
                raise UsageError(
                    f"count {count} of {device.name}: must be at least 1", "Give count = 8, say."
                )
        check_devices(self.gpus, "devices")
        if not self.groups or not self.levels:
            raise UsageError("a topology without devices or levels", "Give at least one of each.")
        names = [level.name for level in self.levels]
        if len(set(names)) < len(names):
            twice = next(name for name, count in Counter(names).items() if count > 1)
            raise UsageError(f"level {twice}: there are two of that name", "Give every level its own name.")
        self._check_sizes()
        if self.capacity is not None and self.gpus > self.capacity:
            raise UsageError(
                f"gpus={self.gpus}: the levels hold {self.capacity} devices",
                "Use fewer, or omit the size of the outermost level: then it holds any number.",
            )

    def _check_sizes(self) -> None:
        for level in self.levels[:-1]:
            if level.size is None:
                raise UsageError(
                    f"level {level.name}: has no size and another level around it",
                    "Give its size; only the outermost level may hold any number.",
                )
        for level, inner in zip(self.levels, self._inner, strict=True):
            if inner % level.devices_per_port:
                raise UsageError(
                    f"level {level.name}: devices_per_port {level.devices_per_port} does not divide the "
                    f"{inner} {'device' if inner == 1 else 'devices'} of one of its members",
                    "Ports belong to the members of a level: use a divisor of that number.",
                )

    @cached_property
    def _inner(self) -> tuple[int, ...]:
        """Number of devices of one member, by level."""
        return tuple(accumulate((level.size or 1 for level in self.levels[:-1]), mul, initial=1))

    @cached_property
    def _starts(self) -> list[int]:
        """First rank of every group of equal devices, and the rank after the last."""
        return list(accumulate((number for _, number in self.groups), initial=0))

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Number of devices of one group, by level except the outermost."""
        return self._inner[1:]

    @property
    def gpus(self) -> int:
        """Number of devices."""
        return self._starts[-1]

    @property
    def capacity(self) -> int | None:
        """Number of devices that the levels can hold. None for any number."""
        outer = self.levels[-1].size
        return None if outer is None else self._inner[-1] * outer

    @cached_property
    def kinds(self) -> tuple[Device, ...]:
        """Distinct kinds of devices, in the order of their first ranks."""
        return tuple(dict.fromkeys(device for device, _ in self.groups))

    @cached_property
    def gpus_per_node(self) -> int:
        """Number of devices of one machine: of the level named `node`, else of the innermost level."""
        index = next((i for i, level in enumerate(self.levels) if level.name == NODE), 0)
        size = self.levels[index].size
        return self.gpus if size is None else self._inner[index] * size

    def device(self, rank: int) -> Device:
        """Return the device of a rank.

        Raises:
            UsageError: The rank does not exist.
        """
        self._check(rank)
        return self.groups[bisect_right(self._starts, rank) - 1].device

    def kind_numbers(self, ranks: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return the (ranks,) index of each device's kind in `kinds`.

        Raises:
            UsageError: A rank does not exist.
        """
        rank_numbers = np.asarray(ranks, dtype=np.int64)
        if rank_numbers.size:
            self._check(int(rank_numbers.min()), int(rank_numbers.max()))
        numbers = np.array([self.kinds.index(device) for device, _ in self.groups])
        kinds: npt.NDArray[np.int64] = numbers[np.searchsorted(self._starts, rank_numbers, side="right") - 1]
        return kinds

    def count_kinds(self, ranks: Sequence[int]) -> dict[Device, int]:
        """Return the number of devices of each kind among `ranks`, in the order of their first devices."""
        numbers, first, counts = np.unique(self.kind_numbers(ranks), return_index=True, return_counts=True)
        return {self.kinds[numbers[at]]: int(counts[at]) for at in np.argsort(first)}

    def shared_level(self, a: int, b: int) -> int:
        """Return the index of the innermost level with a group that holds both devices.

        Raises:
            UsageError: A device does not exist.
        """
        self._check(a, b)
        for index, inner in enumerate(self._inner[1:]):
            if a // inner == b // inner:
                return index
        return len(self.levels) - 1

    def link(self, a: int, b: int) -> Link:
        """Return the link from device `a` to device `b`.

        Raises:
            UsageError: A device does not exist.
        """
        return self.levels[self.shared_level(a, b)].link

    def ports(self, a: int, b: int) -> tuple[Port, Port]:
        """Return the ports that a transfer from `a` to `b` occupies.

        Transfers with a common port share its bandwidth.
        """
        index = self.shared_level(a, b)
        each = self.levels[index].devices_per_port
        return Port(index, "out", a // each), Port(index, "in", b // each)

    def members(self, devices: Iterable[int]) -> list[frozenset[int]]:
        """Return how many members of a group hold some of the devices, by level, over groups that hold any.

        The set of a level is {1} if the level joins none of the devices. It has one number if they are spread
        evenly.

        Raises:
            UsageError: A device does not exist.
        """
        ranks = np.array(sorted(set(devices)), dtype=np.int64)
        if len(ranks):
            self._check(int(ranks[0]), int(ranks[-1]))
        levels = []
        for index in range(len(self.levels)):
            groups, members = self.places_in(index, ranks)
            first = np.append(members[:1] >= 0, members[1:] != members[:-1])
            levels.append(frozenset(np.bincount(groups[first]).tolist()) - {0})
        return levels

    def shared_levels(self, a: npt.NDArray[np.int64], b: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the (pairs,) index of the innermost level that joins each pair, see `shared_level`."""
        levels = np.full(len(a), len(self.levels) - 1)
        for index, inner in reversed(list(enumerate(self._inner[1:]))):
            levels[a // inner == b // inner] = index
        return levels

    def places_in(
        self, index: int, ranks: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the (ranks,) group of each rank at level `index`, and the (ranks,) member of that group."""
        inner, outer = self._inner[index], (*self._inner[1:], None)[index]
        return np.zeros_like(ranks) if outer is None else ranks // outer, ranks // inner

    def with_gpus(self, gpus: int) -> Topology:
        """Return the topology with its first `gpus` devices, or with more if there is one kind.

        Raises:
            UsageError: The levels, or several kinds of devices, hold fewer devices.
        """
        if gpus < 1:
            raise UsageError(f"gpus={gpus}: must be at least 1", "Give the number of GPUs you have.")
        if len(self.kinds) == 1:
            return replace(self, groups=(Group(self.groups[0].device, gpus),))
        if gpus > self.gpus:
            raise UsageError(
                f"gpus={gpus}: the topology has {self.gpus} devices, of {len(self.kinds)} kinds",
                f"Use at most {self.gpus}, or add devices to the file.",
            )
        groups = [
            Group(device, min(number, gpus - start))
            for (device, number), start in zip(self.groups, self._starts, strict=False)
            if start < gpus
        ]
        return replace(self, groups=tuple(groups))

    def in_groups(self, size: int) -> Topology:
        """Return the topology with one device for every `size` neighbours that share layers.

        The links are those of one neighbour. A port that several neighbours share gives each its part of the
        bandwidth.

        Raises:
            UsageError: The devices, or those of a node, are not a multiple of `size`.
        """
        if size == 1:
            return self
        inner = self.levels[0]
        counts = [("devices", count) for _, count in self.groups] + [(inner.name, inner.size or size)]
        for what, count in counts:
            if count % size:
                raise UsageError(
                    f"{count} {what}: cannot be grouped by {size}, which share every layer of the profile",
                    f"Use a multiple of {size}.",
                )
        levels = []
        for level in self.levels:
            sharers = gcd(size, level.devices_per_port)
            bandwidth = level.link.bandwidth_bytes_per_second / sharers
            link = replace(level.link, bandwidth_bytes_per_second=bandwidth)
            levels.append(replace(level, link=link, devices_per_port=level.devices_per_port // sharers))
        levels[0] = replace(levels[0], size=None if inner.size is None else inner.size // size)
        return Topology(tuple(Group(device, count // size) for device, count in self.groups), tuple(levels))

    def describe(self) -> str:
        """Return one line with the devices, their memory, devices per node, and links."""
        start = " + ".join(_describe_group(group) for group in self.groups)
        used = self.levels_in_use
        if self.gpus == 1:
            return start
        if len(used) == 1:
            return f"{start} in one {used[0].name}; {used[0].link.describe()}"
        if [level.name for level in used[:-1]] == [NODE]:
            per_node = self.gpus_per_node
            inside = f"{used[0].link.describe()} inside; " if per_node > 1 else ""
            return f"{start}, {per_node} a node; {inside}{used[1].link.describe()} between"
        parts = [
            f"{level.link.describe()} in a {level.name} of {reach}"
            for level, reach in zip(used[:-1], self._reach, strict=False)
        ]
        return f"{start}; {'; '.join(parts)}; {used[-1].link.describe()} between"

    @cached_property
    def levels_in_use(self) -> tuple[Level, ...]:
        """Levels up to the first that joins all devices. No traffic passes through outer levels."""
        return self.levels[: 1 + next(i for i, reach in enumerate(self._reach) if reach >= self.gpus)]

    @property
    def _reach(self) -> tuple[int, ...]:
        """Number of devices of one group, by level. All devices for an outermost level of any size."""
        return (*self._inner[1:], self.capacity or self.gpus)

    def _check(self, *ranks: int) -> None:
        for rank in ranks:
            if not 0 <= rank < self.gpus:
                raise UsageError(
                    f"device {rank}: the topology has devices 0 to {self.gpus - 1}", "Name one of them."
                )


def two_level_topology(
    device: Device, gpus: int, gpus_per_node: int, inside: Link, between: Link
) -> Topology:
    """Return `gpus` devices of one kind, `gpus_per_node` to a node. The last node may have fewer.

    Raises:
        UsageError: A number is not positive.
    """
    for name, count in (("gpus", gpus), ("gpus_per_node", gpus_per_node)):
        if count < 1:
            raise UsageError(f"{name}={count}: must be at least 1", "Give the number of GPUs you have.")
    node = Level(NODE, gpus_per_node, inside)
    return Topology((Group(device, gpus),), (node, Level("network", None, between)))


def _describe_group(group: Group) -> str:
    device, number = group
    memory = "no memory limit" if device.memory_bytes is None else format_bytes(device.memory_bytes)
    speed = "" if device.speed == 1 else f", {device.speed:g} x as fast"
    return f"{number} x {device.name} ({memory}{speed})"
