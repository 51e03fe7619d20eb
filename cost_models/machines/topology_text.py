"""A topology as a TOML file that reads back as the same, with where each figure is from in comments."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

from ..hardware import Device, Level
from ..quantities import parse_rate, parse_seconds
from ..topology import Topology


def to_toml(topology: Topology, title: str = "") -> str:
    """The text of a topology file; its first comment is the title."""
    lines = [f"# {_one_line(title)}"] if title else []
    for device, number in topology.groups:
        lines += ["", "[[device]]", *_device(device, number)]
    for level in topology.levels:
        lines += ["", "[[level]]", *_level(level)]
    return "\n".join(lines).lstrip("\n") + "\n"


def _device(device: Device, number: int) -> Iterator[str]:
    yield f"name = {_quoted(device.name)}"
    if device.memory_bytes is not None:
        yield f'memory = "{device.memory_bytes}B"{_comment(device.memory_source)}'
    yield f"count = {number}"
    if device.speed != 1:
        yield f"speed = {float(device.speed)!r}"
    if device.profile is not None:
        yield f"profile = {_quoted(device.profile)}"


def _level(level: Level) -> Iterator[str]:
    link = level.link
    yield f"name = {_quoted(level.name)}"
    if level.size is not None:
        yield f"size = {level.size}{_comment(level.size_source)}"
    if link.name:
        yield f"link = {_quoted(link.name)}"
    yield f'bandwidth = "{_rate(link.bandwidth_bytes_per_second)}"{_comment(link.bandwidth_source)}'
    yield f'latency = "{_duration(link.latency_seconds)}"{_comment(link.latency_source)}'
    if level.devices_per_port != 1:
        yield f"devices_per_port = {level.devices_per_port}{_comment(level.port_source)}"


def _rate(value: float) -> str:
    """In GB/s where that is exact, else in bytes."""
    if math.isinf(value):
        return "inf"
    short = f"{value / 1e9:.12g}GB/s"
    return short if parse_rate(short) == value else f"{float(value)!r}B/s"


def _duration(value: float) -> str:
    """In microseconds where that is exact, else in seconds."""
    short = f"{value * 1e6:.12g}us"
    return short if parse_seconds(short) == value else f"{float(value)!r}s"


def _quoted(text: str) -> str:
    # JSON escapes all that TOML forbids in a string but the delete character.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _comment(source: str) -> str:
    return f"  # {_one_line(source)}" if source else ""


def _one_line(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in " ".join(text.split()))
