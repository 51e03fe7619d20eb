"""Devices and links by level: inside a node and between nodes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from .errors import UsageError
from .presets import PRESETS, Preset, PresetLink, find_preset, match_device
from .quantities import format_bytes, format_rate, format_seconds
from .topology_file import TopologyFile, load_topology

__all__ = ["Device", "Link", "ProfiledDevice", "Topology", "TopologyFile", "load_topology", "make_topology"]

Amount = TypeVar("Amount", float, npt.NDArray[np.float64])


@dataclass(frozen=True)
class Device:
    """A device; `memory_bytes` is what a stage may use, None for no limit."""

    name: str
    memory_bytes: int | None

    def __post_init__(self) -> None:
        if self.memory_bytes is not None and self.memory_bytes < 1:
            raise UsageError(
                f"--memory {self.memory_bytes}: must be at least one byte", "Give a size such as 16GiB."
            )


@dataclass(frozen=True)
class Link:
    """One direction between two devices; the other direction is as fast at the same time.

    A bandwidth of infinity stands for transfers that take only the latency.
    """

    bandwidth_bytes_per_second: float
    latency_seconds: float
    name: str = ""

    def __post_init__(self) -> None:
        if not self.bandwidth_bytes_per_second > 0:
            raise UsageError(
                f"--bandwidth {self.bandwidth_bytes_per_second}: must be above 0 bytes per second",
                "Give a bandwidth such as 25GB/s, or inf for transfers that take no time.",
            )
        if not 0 <= self.latency_seconds < math.inf:
            raise UsageError(
                f"--latency {self.latency_seconds}: must be a duration from 0", "Give a latency such as 5us."
            )

    def seconds(self, bytes: Amount) -> Amount:
        """Seconds from the start of a transfer of that many bytes until all of it has arrived."""
        return self.latency_seconds + bytes / self.bandwidth_bytes_per_second

    def occupancy_seconds(self, bytes: Amount) -> Amount:
        """Seconds for which the transfer keeps the next one waiting: without the latency."""
        return bytes / self.bandwidth_bytes_per_second

    def describe(self) -> str:
        """As `NVLink 3 300 GB/s, 5 µs`."""
        rate = format_rate(self.bandwidth_bytes_per_second)
        return f"{self.name} {rate}, {format_seconds(self.latency_seconds, short=True)}".lstrip()


@dataclass(frozen=True)
class Topology:
    """`gpus` devices of one kind, numbered from 0, `gpus_per_node` to a node (the last may have fewer)."""

    device: Device
    gpus: int
    gpus_per_node: int
    inside: Link
    between: Link

    def __post_init__(self) -> None:
        for option, count in (("--gpus", self.gpus), ("--gpus-per-node", self.gpus_per_node)):
            if count < 1:
                raise UsageError(f"{option} {count}: must be at least 1", "Give the number of GPUs you have.")

    def crosses(self, a: int, b: int) -> bool:
        """Whether devices `a` and `b` are on different nodes."""
        return a // self.gpus_per_node != b // self.gpus_per_node

    def link(self, a: int, b: int) -> Link:
        """The link from device `a` to device `b`."""
        return self.between if self.crosses(a, b) else self.inside

    def slowest(self, devices: Sequence[int]) -> Link:
        """The slowest level that a ring over these devices uses: least bandwidth, then most latency."""
        by_node = Counter(device // self.gpus_per_node for device in devices)
        levels = [self.between] if len(by_node) > 1 else []
        if not levels or max(by_node.values()) > 1:
            levels.append(self.inside)
        return min(levels, key=lambda link: (link.bandwidth_bytes_per_second, -link.latency_seconds))

    def describe(self) -> str:
        """One line in words: devices, their memory, devices a node, links."""
        limit = self.device.memory_bytes
        memory = "no memory limit" if limit is None else format_bytes(limit)
        start = f"{self.gpus} x {self.device.name} ({memory})"
        if self.gpus == 1:
            return start
        if self.gpus <= self.gpus_per_node:
            return f"{start} in one node; {self.inside.describe()}"
        inside = f"{self.inside.describe()} inside; " if self.gpus_per_node > 1 else ""
        return f"{start}, {self.gpus_per_node} a node; {inside}{self.between.describe()} between"


@dataclass(frozen=True)
class ProfiledDevice:
    """What a profile was measured on: `cpu` or `cuda`, the name the driver gives it, its memory."""

    device: str
    name: str
    memory_bytes: int | None

    @property
    def is_cpu(self) -> bool:
        """Whether it is a processor, without memory of its own to fill and without links."""
        return self.device.split(":")[0] == "cpu"


def make_topology(
    *,
    gpus: int,
    gpu: str | None = None,
    memory_bytes: int | None = None,
    bandwidth: Sequence[float] | None = None,
    latency: Sequence[float] | None = None,
    gpus_per_node: int | None = None,
    file: Path | None = None,
    profiled: ProfiledDevice,
) -> Topology:
    """The topology that the options, else the file, else the profiled device describe, part by part.

    Without `gpu` the devices are like the profiled one, with its memory (none for a CPU) and the links of the
    usual server of its preset. Where the profiled device has no preset, the links are those of a T4 server
    (CPU) or of an L4 server (PCIe 4.0, any other GPU), and their name says so. `bandwidth` (bytes per second)
    and `latency` (seconds) hold one figure, inside a node, or two, inside and between. `gpu` replaces the
    file's device with its memory.

    Raises UsageError for an option and FileError for a file.
    """
    read = TopologyFile() if file is None else load_topology(file)
    device, server = _device_and_server(gpu, read, profiled)
    if memory_bytes is not None:
        device = Device(device.name, memory_bytes)
    inside, between = server.inside, server.between
    for rates in (read.bandwidth, bandwidth):
        inside, between = _with_bandwidth(inside, between, rates)
    for waits in (read.latency, latency):
        inside, between = _with_latency(inside, between, waits)
    per_node = gpus_per_node if gpus_per_node is not None else read.gpus_per_node
    return Topology(device, gpus, server.gpus_per_node if per_node is None else per_node, inside, between)


@dataclass(frozen=True)
class _Server:
    gpus_per_node: int
    inside: Link
    between: Link


def _device_and_server(
    gpu: str | None, read: TopologyFile, profiled: ProfiledDevice
) -> tuple[Device, _Server]:
    name = gpu if gpu is not None else read.gpu
    memory_in_file = read.memory_bytes if gpu is None else None
    if name is not None:
        preset = find_preset(name)
        device = Device(preset.title, memory_in_file or int(preset.memory_bytes.value))
        return device, _server(preset)
    like = None if profiled.is_cpu else match_device(profiled.name)
    memory = None if profiled.is_cpu else profiled.memory_bytes
    if memory is None and like is not None:
        memory = int(like.memory_bytes.value)
    device = Device(profiled.name or profiled.device.upper(), memory_in_file or memory)
    if like is not None:
        return device, _server(like)
    if profiled.is_cpu:
        return device, _server(PRESETS["t4"], " (as in a T4 server)")
    return device, _server(PRESETS["l4"], " (as in an L4 server)")


def _server(preset: Preset, remark: str = "") -> _Server:
    def link(source: PresetLink) -> Link:
        return Link(source.bandwidth.value, source.latency.value, source.name + remark)

    return _Server(int(preset.gpus_per_node.value), link(preset.inside), link(preset.between))


def _with_bandwidth(inside: Link, between: Link, given: Sequence[float] | None) -> tuple[Link, Link]:
    """The links with the given bandwidths; such a link has no name, since its kind is not known."""
    links = [inside, between]
    for level, rate in enumerate(_levels("--bandwidth", given)):
        links[level] = Link(rate, links[level].latency_seconds)
    return links[0], links[1]


def _with_latency(inside: Link, between: Link, given: Sequence[float] | None) -> tuple[Link, Link]:
    links = [inside, between]
    for level, wait in enumerate(_levels("--latency", given)):
        links[level] = Link(links[level].bandwidth_bytes_per_second, wait, links[level].name)
    return links[0], links[1]


def _levels(option: str, given: Sequence[float] | None) -> Sequence[float]:
    if given is None:
        return ()
    if not 1 <= len(given) <= 2:
        raise UsageError(
            f"{option}: {len(given)} values, there are two levels",
            "Give one value, inside a node, or two separated by a comma: inside a node, between nodes.",
        )
    return given
