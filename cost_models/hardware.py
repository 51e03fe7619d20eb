"""What a topology is made of: devices, links, and the levels of groups that links join."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from .errors import UsageError
from .quantities import (
    LEAST_RATE,
    LEAST_SPEED,
    MOST_BYTES,
    MOST_MEMBERS,
    MOST_RATE,
    MOST_SECONDS,
    MOST_SPEED,
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
