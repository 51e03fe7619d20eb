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
    """A field that says where a figure is from; it makes no difference between two things."""
    source: str = field(default="", compare=False, repr=False)
    return source


UNKNOWN_DEVICE = "unknown"
"""The device of a profile whose costs were imported, whatever they were measured with."""


@dataclass(frozen=True)
class Device:
    """A kind of device; `memory_bytes` is what a stage may use, None for no limit.

    `speed` is relative to the profiled device: 2.0 computes in half of the profile's seconds. A kind that was
    profiled itself has the name of that file as its `profile` instead.
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
        """What a layer's profiled seconds are multiplied by on this device."""
        return 1 / self.speed


class Group(NamedTuple):
    """So many devices of a kind, with consecutive ranks."""

    device: Device
    number: int


@dataclass(frozen=True)
class Link:
    """One direction between two devices; the other direction is as fast at the same time.

    A bandwidth of infinity stands for transfers that take only the latency.
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
        """Seconds from the start of a transfer of that many bytes until all of it has arrived."""
        return self.latency_seconds + bytes / self.bandwidth_bytes_per_second

    def describe(self) -> str:
        """As `NVLink 3 300 GB/s, 5 µs`."""
        rate = format_rate(self.bandwidth_bytes_per_second)
        return f"{self.name} {rate}, {format_seconds(self.latency_seconds, short=True)}".lstrip()


@dataclass(frozen=True)
class Level:
    """Groups of `size` members, each of them a group of the level inside it (a device, innermost).

    `link` joins any two devices of a group that no level inside joins, through a port of each that sends and
    receives at its bandwidth. A port belongs to one device, or to `devices_per_port` neighbours, as a network
    adapter that a whole server has. The outermost level may have any number of members: size None.
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
    """A place through which transfers leave (`out`) or enter (`in`) the `owner`-th port of a level."""

    level: int
    direction: str
    owner: int

    @property
    def leaves(self) -> bool:
        """Whether transfers leave by it."""
        return self.direction == "out"


NODE = "node"
"""The level of this name is what one process reaches; without one it is the innermost."""


def check_devices(count: int, called: str = "") -> None:
    """Raises UsageError for more devices than are planned for. The count is `called` as a file does; else by
    the field `gpus`."""
    if count > MOST_DEVICES:
        what = f"{called} {count}" if called else f"gpus={count}"
        raise UsageError(
            f"{what}: at most {MOST_DEVICES} devices are planned for",
            f"Give up to {MOST_DEVICES}: larger clusters run copies of a plan for fewer.",
        )


@dataclass(frozen=True)
class Topology:
    """Devices with the ranks 0 to `gpus` - 1, run by run of a kind, and the levels that join them.

    Levels stand from the innermost to the outermost. Ranks fill groups in order; the last may have fewer.
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
        """By level, the devices of one of its members."""
        return tuple(accumulate((level.size or 1 for level in self.levels[:-1]), mul, initial=1))

    @cached_property
    def _starts(self) -> list[int]:
        """The first rank of every run, and the rank after the last."""
        return list(accumulate((number for _, number in self.groups), initial=0))

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """By level but the outermost, the devices of one of its groups."""
        return self._inner[1:]

    @property
    def gpus(self) -> int:
        """How many devices there are."""
        return self._starts[-1]

    @property
    def capacity(self) -> int | None:
        """How many devices the levels hold; None for any number."""
        outer = self.levels[-1].size
        return None if outer is None else self._inner[-1] * outer

    @cached_property
    def kinds(self) -> tuple[Device, ...]:
        """The different kinds of devices, in the order of their first ranks."""
        return tuple(dict.fromkeys(device for device, _ in self.groups))

    @cached_property
    def gpus_per_node(self) -> int:
        """How many devices one machine has: those of the level called `node`, else of the innermost."""
        index = next((i for i, level in enumerate(self.levels) if level.name == NODE), 0)
        size = self.levels[index].size
        return self.gpus if size is None else self._inner[index] * size

    def device(self, rank: int) -> Device:
        """The device with that rank. Raises UsageError where there is none."""
        self._check(rank)
        return self.groups[bisect_right(self._starts, rank) - 1].device

    def kind_numbers(self, ranks: Sequence[int]) -> npt.NDArray[np.int64]:
        """By device, the number of its kind among `kinds`. Raises UsageError where there is none."""
        own = np.asarray(ranks, dtype=np.int64)
        if own.size:
            self._check(int(own.min()), int(own.max()))
        numbers = np.array([self.kinds.index(device) for device, _ in self.groups])
        of_each: npt.NDArray[np.int64] = numbers[np.searchsorted(self._starts, own, side="right") - 1]
        return of_each

    def count_kinds(self, ranks: Sequence[int]) -> dict[Device, int]:
        """The different kinds of these devices, in the order of their first ones, and how many of each."""
        numbers, first, counts = np.unique(self.kind_numbers(ranks), return_index=True, return_counts=True)
        return {self.kinds[numbers[at]]: int(counts[at]) for at in np.argsort(first)}

    def shared_level(self, a: int, b: int) -> int:
        """The index of the innermost level with a group that holds both devices. Raises UsageError."""
        self._check(a, b)
        for index, inner in enumerate(self._inner[1:]):
            if a // inner == b // inner:
                return index
        return len(self.levels) - 1

    def link(self, a: int, b: int) -> Link:
        """The link from device `a` to device `b`. Raises UsageError."""
        return self.levels[self.shared_level(a, b)].link

    def ports(self, a: int, b: int) -> tuple[Port, Port]:
        """What a transfer from `a` to `b` occupies: transfers with a port in common share its bandwidth."""
        index = self.shared_level(a, b)
        each = self.levels[index].devices_per_port
        return Port(index, "out", a // each), Port(index, "in", b // each)

    def members(self, devices: Iterable[int]) -> list[frozenset[int]]:
        """By level: how many members of a group hold some of these devices, over the groups that hold any.

        {1} where the level joins none of them; one number where they are spread evenly. Raises UsageError.
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
        """By pair of devices, as `shared_level`."""
        levels = np.full(len(a), len(self.levels) - 1)
        for index, inner in reversed(list(enumerate(self._inner[1:]))):
            levels[a // inner == b // inner] = index
        return levels

    def places_in(
        self, index: int, ranks: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """By rank, the group of that level that it is in, and the member of the group."""
        inner, outer = self._inner[index], (*self._inner[1:], None)[index]
        return np.zeros_like(ranks) if outer is None else ranks // outer, ranks // inner

    def with_gpus(self, gpus: int) -> Topology:
        """The same with the first `gpus` devices; with more of them where there is one kind only.

        Raises UsageError where several kinds, or the levels, hold fewer.
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
        """A device for every `size` neighbours that share layers: their links are those of one of them, and a
        port that several of them share serves each with its part.

        Raises UsageError where the devices, or those of a node, are no multiple.
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
        """One line in words: devices, their memory, devices a node, links."""
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
        """Up to the first that joins all devices: no traffic goes over those further out."""
        return self.levels[: 1 + next(i for i, reach in enumerate(self._reach) if reach >= self.gpus)]

    @property
    def _reach(self) -> tuple[int, ...]:
        """By level, the devices of one of its groups; all of them at an outermost level of any size."""
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
    """`gpus` devices of one kind, `gpus_per_node` to a node (the last may have fewer). Raises UsageError."""
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
