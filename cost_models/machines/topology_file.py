"""The topology as a TOML file, in the words of the command line's options, or level by level.

    gpu = "a100-40gb"                   # or: memory = "40GiB", or both
    gpus = 16
    gpus_per_node = 8
    bandwidth = ["300GB/s", "25GB/s"]   # inside a node, between nodes
    latency = ["5us", "20us"]

Every key may be left out; the options of the command line go before the file. In place of `gpu` and `memory`
there may be kinds of devices, in the order of their ranks; in place of the last three keys levels, from the
innermost to the outermost:

    [[device]]
    gpu = "a100-40gb"       # or name and memory
    count = 8
    [[device]]
    gpu = "t4"
    count = 8
    speed = 0.2             # relative to the profiled device; or: profile = "t4.profile.json"

    [[level]]
    name = "node"
    size = 8                # members of the level inside it: devices, innermost
    link = "NVLink 3"
    bandwidth = "300GB/s"   # one direction of each port
    latency = "5us"
    [[level]]
    name = "network"        # the outermost may have any size
    bandwidth = "12.5GB/s"
    latency = "20us"
    shared = true           # one port for a whole member; or: devices_per_port = 2
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import FileError, UsageError
from ..hardware import Device, Group, Level, Link
from ..quantities import parse_bytes, parse_rate, parse_seconds
from ..text_files import parse_toml, read_text
from ..topology import Topology, check_devices
from .catalogue import find_preset

Count = Annotated[int, Field(ge=1)]
PerLevel = Annotated[list[str], Field(min_length=1, max_length=2)]


class _StrictKeys(BaseModel):
    """What may stand in a table of the file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)


class _DeviceKeys(_StrictKeys):
    """A [[device]]."""

    gpu: str | None = None
    name: str | None = None
    memory: str | None = None
    count: Count | None = None
    speed: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    profile: str | None = None


class _LevelKeys(_StrictKeys):
    """A [[level]]."""

    name: Annotated[str, Field(min_length=1)]
    size: Count | None = None
    link: str = ""
    bandwidth: str
    latency: str = "0"
    shared: bool = False
    devices_per_port: Count | None = None


class _FileKeys(_StrictKeys):
    """The file."""

    gpu: str | None = None
    memory: str | None = None
    gpus: Count | None = None
    gpus_per_node: Count | None = None
    bandwidth: PerLevel | None = None
    latency: PerLevel | None = None
    device: Annotated[list[_DeviceKeys], Field(min_length=1)] | None = None
    level: Annotated[list[_LevelKeys], Field(min_length=1)] | None = None


@dataclass(frozen=True)
class Kind:
    """Devices of a kind with consecutive ranks; the `count` of the only kind may be left out.

    `gpu` is the preset it is of, if one was named: its usual server has the links.
    """

    device: Device
    count: int | None
    gpu: str | None = None


@dataclass(frozen=True)
class TopologyFile:
    """A topology file as read: None for what it leaves out.

    Bandwidths are bytes per second, latencies seconds: inside a node and, where there is a second, between.
    """

    gpu: str | None = None
    memory_bytes: int | None = None
    gpus: int | None = None
    gpus_per_node: int | None = None
    bandwidth: tuple[float, ...] | None = None
    latency: tuple[float, ...] | None = None
    kinds: tuple[Kind, ...] | None = None
    levels: tuple[Level, ...] | None = None
    origin: str = ""
    """Where its figures are from, for those that say nothing themselves."""


def load_topology(path: Path) -> TopologyFile:
    """Reads and validates the file.

    Raises FileError: missing, not TOML, a key that is not known (with the nearest that is), a value that is
    not allowed, two keys that say the same.
    """
    return parse_topology(read_text(path, "topology"), path)


def parse_topology(text: str, path: Path) -> TopologyFile:
    """As `load_topology`, from the text of a file; `path` names it in errors. Raises FileError."""
    keys = _read_keys(text, path)
    try:
        _check_pairs(keys)
        kinds = None if keys.device is None else _kinds(keys.device, keys.gpus, str(path))
        gpus = keys.gpus if kinds is None else _total(kinds, keys.gpus)
        check_devices(gpus or 1, "gpus")
        return TopologyFile(
            gpu=None if keys.gpu is None else find_preset(keys.gpu, "gpu").name,
            memory_bytes=None if keys.memory is None else parse_bytes(keys.memory, "memory"),
            gpus=gpus,
            gpus_per_node=keys.gpus_per_node,
            bandwidth=None
            if keys.bandwidth is None
            else tuple(parse_rate(x, "bandwidth") for x in keys.bandwidth),
            latency=None
            if keys.latency is None
            else tuple(parse_seconds(x, "latency") for x in keys.latency),
            kinds=kinds,
            levels=None if keys.level is None else _levels(keys.level, gpus, str(path)),
            origin=str(path),
        )
    except UsageError as error:
        raise FileError(f"{path}: {error.what}", error.hint) from error


def _check_pairs(keys: _FileKeys) -> None:
    """Raises UsageError where a table and a key say the same."""
    for table, replaced in (
        ("device", ("gpu", "memory")),
        ("level", ("gpus_per_node", "bandwidth", "latency")),
    ):
        both = [key for key in replaced if getattr(keys, key) is not None]
        if getattr(keys, table) is not None and both:
            raise UsageError(
                f"{both[0]}: stands beside [[{table}]]", f"Move it into the [[{table}]], or take that away."
            )


def _kinds(tables: Sequence[_DeviceKeys], gpus: int | None, origin: str) -> tuple[Kind, ...]:
    kinds = []
    for number, keys in enumerate(tables, start=1):
        where = f"device {number}"
        count = keys.count if keys.count is not None or len(tables) > 1 else gpus
        if count is None and len(tables) > 1:
            raise UsageError(
                f"{where}: has no count", "Give count = 8, say: how many there are of each kind."
            )
        kinds.append(Kind(_device(keys, where, origin), count, keys.gpu))
    return tuple(kinds)


def _device(keys: _DeviceKeys, where: str, origin: str) -> Device:
    preset = None if keys.gpu is None else find_preset(keys.gpu, f"{where}: gpu")
    memory, source = None, ""
    if keys.memory is not None:
        memory, source = parse_bytes(keys.memory, f"{where}: memory"), origin
    elif preset is not None:
        memory, source = int(preset.memory_bytes.value), preset.memory_bytes.source
    name = keys.name if keys.name is not None else None if preset is None else preset.title
    if name is None:
        raise UsageError(f"{where}: has neither gpu nor name", 'Give gpu = "t4", or name = "My GPU".')
    try:
        return Device(name, memory, keys.speed, keys.profile, source)
    except UsageError as error:
        raise UsageError(f"{where}: {error.what}", error.hint) from error


def _total(kinds: Sequence[Kind], gpus: int | None) -> int | None:
    """The number of devices. Raises UsageError where `gpus` is another."""
    if any(kind.count is None for kind in kinds):
        return None
    total = sum(kind.count or 0 for kind in kinds)
    if gpus is not None and gpus != total:
        raise UsageError(
            f"gpus {gpus}: the counts of the devices make {total}", f"Give gpus = {total}, or none."
        )
    return total


def _levels(tables: Sequence[_LevelKeys], gpus: int | None, origin: str) -> tuple[Level, ...]:
    """The levels. Raises UsageError where they do not fit each other, or do not hold the devices."""
    levels: list[Level] = []
    inner: int | None = 1
    for number, keys in enumerate(tables, start=1):
        where = f"level {number} ({keys.name})"
        link = Link(
            parse_rate(keys.bandwidth, f"{where}: bandwidth"),
            parse_seconds(keys.latency, f"{where}: latency"),
            keys.link,
            origin,
            origin,
        )
        levels.append(Level(keys.name, keys.size, link, _devices_per_port(keys, inner, where), origin))
        inner = None if inner is None or keys.size is None else inner * keys.size
    Topology((Group(Device("device", None), gpus or 1),), tuple(levels))
    return tuple(levels)


def _devices_per_port(keys: _LevelKeys, inner: int | None, where: str) -> int:
    if not keys.shared:
        return keys.devices_per_port or 1
    if keys.devices_per_port is not None:
        raise UsageError(f"{where}: has both shared and devices_per_port", "Give one of them.")
    if inner == 1:
        raise UsageError(
            f"{where}: shared, but its members are single devices",
            "What a whole server shares stands in the level around it.",
        )
    return inner or 1


def _read_keys(text: str, path: Path) -> _FileKeys:
    try:
        content = parse_toml(text)
    except ValueError as error:
        raise FileError(f"{path}: not a TOML file: {error}", _EXAMPLE) from error
    # One level may be given without the brackets.
    levels = {key: [content[key]] for key in ("bandwidth", "latency") if isinstance(content.get(key), str)}
    try:
        return _FileKeys.model_validate(content | levels)
    except ValidationError as error:
        raise _refusal(path, content, error) from error


_EXAMPLE = 'Write lines such as: gpu = "a100-40gb", or bandwidth = ["300GB/s", "25GB/s"].'
_TABLES: dict[str, tuple[type[_StrictKeys], str]] = {
    "device": (_DeviceKeys, 'Write lines such as: [[device]], gpu = "a100-40gb", count = 8, speed = 1.0.'),
    "level": (_LevelKeys, 'Write lines such as: [[level]], name = "node", size = 8, bandwidth = "300GB/s".'),
}


def _refusal(path: Path, content: dict[str, Any], error: ValidationError) -> FileError:
    first = error.errors()[0]
    loc = first["loc"]
    keys, example = _TABLES.get(str(loc[0]), (_FileKeys, _EXAMPLE))
    if len(loc) > 2:  # the key of a table: ("level", 0, "size")
        where, key, value = f"{loc[0]} {int(loc[1]) + 1}: ", str(loc[2]), first["input"]
    else:
        where, key, keys = "", str(loc[0]), _FileKeys
        value = content.get(key)
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(key, keys.model_fields, n=1)
        guess = f"Did you mean {near[0]}? " if near else ""
        return FileError(
            f"{path}: {where}unknown key {key!r}", f"{guess}Keys: {', '.join(keys.model_fields)}."
        )
    if first["type"] == "missing":
        return FileError(f"{path}: {where}has no {key}", example)
    return FileError(f"{path}: {where}{key}: {first['msg']}, the value is {value!r}", example)
