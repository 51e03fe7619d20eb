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

`make_topology` joins options, a file or a machine's name, and the profiled device; `to_toml` writes a
topology with the source of each figure.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from .errors import FileError, UsageError
from .machines import (
    PRESETS,
    Machine,
    Preset,
    PresetLink,
    device_preset,
    find_machine,
    find_preset,
    is_gpu,
    match_device,
    unknown_machine,
)
from .quantities import parse_bytes, parse_rate, parse_seconds
from .roofline_file import read_keys, read_toml
from .text_files import read_text
from .topology import NODE, UNKNOWN_DEVICE, Device, Group, Level, Link, Topology, check_devices

Count = Annotated[int, Field(ge=1)]
PerLevel = Annotated[list[str], Field(min_length=1, max_length=2)]


class _StrictKeys(BaseModel):
    """Base of the tables of the file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)


class _DeviceKeys(_StrictKeys):
    """Keys of a [[device]] table."""

    gpu: str | None = None
    name: str | None = None
    memory: str | None = None
    count: Count | None = None
    speed: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    profile: str | None = None


class _LevelKeys(_StrictKeys):
    """Keys of a [[level]] table."""

    name: Annotated[str, Field(min_length=1)]
    size: Count | None = None
    link: str = ""
    bandwidth: str
    latency: str = "0"
    shared: bool = False
    devices_per_port: Count | None = None


class _FileKeys(_StrictKeys):
    """Keys of the file."""

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
    """Content of a topology file. Omitted values are None.

    Bandwidths are in bytes per second, latencies in seconds, inside a node and optionally between nodes.
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
    """Read and validate the text of a topology file.

    Args:
        text: Text of the file.
        path: Path for messages.

    Raises:
        FileError: See `load_topology`.
    """
    keys = _read_keys(text, path)
    try:
        _check_pairs(keys)
        kinds = None if keys.device is None else _kinds(keys.device, keys.gpus, path.name)
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
            levels=None if keys.level is None else _levels(keys.level, gpus, path.name),
            origin=path.name,
        )
    except UsageError as error:
        raise FileError(f"{path}: {error.what}", error.hint) from error


def _check_pairs(keys: _FileKeys) -> None:
    """Check that no table and key contradict each other by giving the same value.

    Raises:
        UsageError: Both are given.
    """
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
    """Return the number of devices.

    Raises:
        UsageError: `gpus` differs from it.
    """
    if any(kind.count is None for kind in kinds):
        return None
    total = sum(kind.count or 0 for kind in kinds)
    if gpus is not None and gpus != total:
        raise UsageError(
            f"gpus {gpus}: the counts of the devices make {total}", f"Give gpus = {total}, or none."
        )
    return total


def _levels(tables: Sequence[_LevelKeys], gpus: int | None, origin: str) -> tuple[Level, ...]:
    """Return the levels.

    Raises:
        UsageError: They do not fit each other, or do not hold the devices.
    """
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
    content = read_toml(text, path, _EXAMPLE)
    # One level may be given without the brackets.
    levels = {key: [content[key]] for key in ("bandwidth", "latency") if isinstance(content.get(key), str)}
    return read_keys(content | levels, path, _FileKeys, _EXAMPLE, _TABLES)


_EXAMPLE = 'Write lines such as: gpu = "a100-40gb", or bandwidth = ["300GB/s", "25GB/s"].'
_TABLES: dict[str, tuple[type[_StrictKeys], str]] = {
    "device": (_DeviceKeys, 'Write lines such as: [[device]], gpu = "a100-40gb", count = 8, speed = 1.0.'),
    "level": (_LevelKeys, 'Write lines such as: [[level]], name = "node", size = 8, bandwidth = "300GB/s".'),
}


UNNAMED = "device"
"""The name of devices of which neither the profile nor the user says what they are."""


@dataclass(frozen=True)
class ProfiledDevice:
    """Device of a profile: `cpu` or `cuda`, the driver's name, and its memory."""

    device: str
    name: str
    memory_bytes: int | None

    @property
    def is_cpu(self) -> bool:
        """True for a processor, which has neither device memory nor links."""
        return self.device.split(":")[0] == "cpu"

    @property
    def is_known(self) -> bool:
        """True if the profile names its device. An imported one does not."""
        return self.device != UNKNOWN_DEVICE


def make_topology(
    *,
    gpus: int,
    gpu: str | None = None,
    memory_bytes: int | None = None,
    bandwidth: Sequence[float] | None = None,
    latency: Sequence[float] | None = None,
    gpus_per_node: int | None = None,
    file: Path | TopologyFile | None = None,
    profiled: ProfiledDevice,
) -> Topology:
    """Return the topology that the options, else the file, else the profiled device describe, part by part.

    Without `gpu` the devices are like the profiled one, with its memory (no limit for a CPU) and the links of
    the usual server of its preset. A profiled device without preset gets the links of a T4 server (CPU) or of
    an L4 server (PCIe 4.0, any other GPU), and their name says so.

    `file` is the path or the content of a TOML file, or the name of a machine. `bandwidth` (bytes per second)
    and `latency` (seconds) hold one value, inside a node, or two, inside and between. With more levels these
    are the two innermost. `gpu` replaces the file's devices with their memory.

    Raises:
        UsageError: An option is invalid.
        FileError: The file is invalid.
    """
    if gpus < 1:
        raise UsageError(f"gpus={gpus}: must be at least 1", "Give the number of GPUs you have.")
    check_devices(gpus)
    read = (
        TopologyFile() if file is None else file if isinstance(file, TopologyFile) else named_topology(file)
    )
    kinds, preset, remark = _choose_kinds(gpu, read, profiled)
    if memory_bytes is not None:
        kinds = [replace(kind, device=_with_memory(kind.device, memory_bytes)) for kind in kinds]
    levels = _usual_levels(preset, remark) if read.levels is None else read.levels
    levels = _with_bandwidth(levels, read.bandwidth, read.origin)
    levels = _with_latency(levels, read.latency, read.origin)
    levels = _with_node(levels, read.gpus_per_node, read.origin)
    levels = _with_bandwidth(levels, bandwidth, "`bandwidth`")
    levels = _with_latency(levels, latency, "`latency`")
    levels = _with_node(levels, gpus_per_node, "`gpus_per_node`")
    if len({kind.device for kind in kinds}) == 1:
        return Topology((Group(kinds[0].device, gpus),), levels)
    groups = tuple(Group(kind.device, kind.count or 1) for kind in kinds)
    return Topology(groups, levels).with_gpus(gpus)


def named_topology(name: Path, called: str = "") -> TopologyFile:
    """Return the topology of the machine with this name, else of the file with this name.

    Raises:
        UsageError: There is neither a machine nor a file.
        FileError: The file is invalid.
    """
    machine = find_machine(str(name))
    if machine is not None:
        return machine_topology(machine)
    if not (name.suffix == ".toml" or len(name.parts) > 1 or os.path.exists(name)):  # noqa: PTH110  never raises
        raise unknown_machine(str(name), called)
    return load_topology(name)


def machine_topology(machine: Machine) -> TopologyFile:
    """Return the topology file's content for one machine and the network between such machines."""
    preset, gpus = PRESETS[machine.gpu], int(machine.gpus.value)
    memory = preset.memory_bytes
    device = Device(preset.title, int(memory.value), memory_source=memory.source)
    levels = (
        Level(NODE, gpus, _link(machine.inside), size_source=machine.gpus.source),
        Level(
            "network",
            None,
            _link(machine.between),
            int(machine.gpus_per_adapter.value),
            port_source=machine.gpus_per_adapter.source,
        ),
    )
    return TopologyFile(gpus=gpus, kinds=(Kind(device, None, preset.name),), levels=levels)


def _choose_kinds(
    gpu: str | None, read: TopologyFile, profiled: ProfiledDevice
) -> tuple[Sequence[Kind], Preset, str]:
    """Return the devices, the preset whose usual server has the links, and a remark on these."""
    if gpu is None and read.kinds is not None:
        gpu_name = next((kind.gpu for kind in read.kinds if kind.gpu is not None), None)
        preset, remark = (PRESETS["l4"], _AS_L4) if gpu_name is None else (find_preset(gpu_name), "")
        return read.kinds, preset, remark
    device, preset, remark = _device_and_server(gpu, read, profiled)
    return [Kind(device, None)], preset, remark


_AS_L4 = " (as in an L4 server)"


def _device_and_server(
    gpu: str | None, read: TopologyFile, profiled: ProfiledDevice
) -> tuple[Device, Preset, str]:
    name = gpu if gpu is not None else read.gpu
    memory_in_file = read.memory_bytes if gpu is None else None
    if name is not None:
        preset = find_preset(name)
        device = Device(
            preset.title, int(preset.memory_bytes.value), memory_source=preset.memory_bytes.source
        )
        return _with_memory(device, memory_in_file, read.origin), preset, ""
    like = None if profiled.is_cpu else match_device(profiled.name)
    memory, source = (None, "") if profiled.is_cpu else (profiled.memory_bytes, "the profile")
    if memory is None and like is not None:
        memory, source = int(like.memory_bytes.value), like.memory_bytes.source
    unnamed = profiled.device.upper() if profiled.is_known else UNNAMED
    device = Device(profiled.name or unnamed, memory, memory_source=source)
    device = _with_memory(device, memory_in_file, read.origin)
    if like is not None:
        return device, like, ""
    if profiled.is_cpu:
        return device, PRESETS["t4"], " (as in a T4 server)"
    return device, PRESETS["l4"], _AS_L4


def _with_memory(device: Device, memory_bytes: int | None, source: str = "`memory`") -> Device:
    if memory_bytes is None:
        return device
    return replace(device, memory_bytes=memory_bytes, memory_source=source)


def _link(source: PresetLink, remark: str = "") -> Link:
    bandwidth, latency = source.bandwidth, source.latency
    return Link(bandwidth.value, latency.value, source.name + remark, bandwidth.source, latency.source)


def _usual_levels(preset: Preset, remark: str) -> tuple[Level, ...]:
    """Return the node and the network of a GPU's usual server."""
    node = preset.gpus_per_node
    return (
        Level(NODE, int(node.value), _link(preset.inside, remark), size_source=node.source),
        Level("network", None, _link(preset.between, remark)),
    )


def _with_bandwidth(
    levels: Sequence[Level], values: Sequence[float] | None, source: str
) -> tuple[Level, ...]:
    """Return the levels with the given bandwidths. Such links have no name, because their kind is unknown."""
    rates = _by_level("bandwidth", values, len(levels))
    changed = [
        replace(level, link=Link(rate, level.link.latency_seconds, "", source, level.link.latency_source))
        for level, rate in zip(levels, rates, strict=False)
    ]
    return (*changed, *levels[len(changed) :])


def _with_latency(levels: Sequence[Level], values: Sequence[float] | None, source: str) -> tuple[Level, ...]:
    waits = _by_level("latency", values, len(levels))
    changed = [
        replace(level, link=replace(level.link, latency_seconds=wait, latency_source=source))
        for level, wait in zip(levels, waits, strict=False)
    ]
    return (*changed, *levels[len(changed) :])


def _by_level(field: str, values: Sequence[float] | None, levels: int) -> Sequence[float]:
    if values is None:
        return ()
    if not 1 <= len(values) <= 2:
        raise UsageError(
            f"`{field}`: {len(values)} values, there are two levels",
            "Give one value, inside a node, or two separated by a comma: inside a node, between nodes.",
        )
    if len(values) > levels:
        raise UsageError(f"`{field}`: {len(values)} values, the topology has one level", "Give one value.")
    return values


def _with_node(levels: Sequence[Level], gpus: int | None, source: str) -> tuple[Level, ...]:
    """Return the levels with `gpus` devices in a node. Ports stay within one node."""
    if gpus is None:
        return tuple(levels)
    if gpus < 1:
        raise UsageError(
            f"gpus_per_node={gpus}: must be at least 1", "Give the number of GPUs in one server."
        )
    node = next((index for index, level in enumerate(levels) if level.name == NODE), 0)
    inner = prod(level.size or 1 for level in levels[:node])
    if gpus % inner:
        raise UsageError(
            f"gpus_per_node={gpus}: a node has members of {inner} devices",
            f"Use a multiple of {inner}.",
        )
    before = inner * (levels[node].size or 1)
    resized = replace(levels[node], size=gpus // inner, size_source=source)
    # What a whole node shares is shared by the whole node of the other size.
    outer = [
        replace(level, devices_per_port=gpus) if level.devices_per_port == before else level
        for level in levels[node + 1 :]
    ]
    return (*levels[:node], resized, *outer)


def described_topology(name: Path, gpus: int | None = None) -> Topology:
    """Return the topology of a file or machine without a profile, with its number of devices or `gpus`.

    Values that a file leaves to the profiled device are those of a GPU without preset.

    Raises:
        UsageError: There is neither a machine nor a file.
        FileError: The file is invalid.
    """
    read = named_topology(name, "topology")
    number = gpus if gpus is not None else read.gpus
    unknown = ProfiledDevice("cuda", "the profiled GPU", None)
    return make_topology(gpus=1 if number is None else number, file=name, profiled=unknown)


PROCESSOR = "cpu"
"""The only value of `seconds_of`: a processor's seconds are meant to stand for those of a GPU."""


def check_seconds_source(word: str | None, profiled: ProfiledDevice) -> None:
    """Check the word that says which device the seconds are from.

    Raises:
        UsageError: The word is unknown or contradicts the profile.
    """
    if word is None:
        return
    if word != PROCESSOR:
        raise UsageError(
            f"seconds_of={word!r}: not known",
            f"Use seconds_of={PROCESSOR!r}, where a processor's seconds are to stand for a GPU's.",
        )
    if not profiled.is_cpu:
        where = profiled.name or profiled.device
        raise UsageError(
            f"seconds_of={word!r}: the profile's seconds are not those of a processor but of {where}",
            "Omit it: it is for planning GPUs with a processor's seconds.",
        )


def check_processor_seconds(profiled: ProfiledDevice, topology: Topology, word: str | None) -> None:
    """Check that GPUs are not planned with a processor's seconds by mistake.

    Kinds with a stated speed or a separate profile define their seconds.

    Raises:
        UsageError: The seconds are a processor's, and `seconds_of` does not confirm it.
    """
    check_seconds_source(word, profiled)
    if word is None:
        for kind in gpus_as_profiled(topology):
            check_seconds_on_kind(profiled, kind)


def check_seconds_on_kind(profiled: ProfiledDevice, kind: Device) -> None:
    """Check that a GPU is not planned with seconds that were measured on a processor.

    Raises:
        UsageError: It is.
    """
    if not profiled.is_cpu or not is_gpu(kind.name):
        return
    preset = device_preset(kind.name)
    figures = f"analytic:{preset.name if preset else 'FILE.toml'}"
    raise UsageError(
        f"the layers' seconds were measured on a processor, {profiled.name or 'cpu'}: they do not tell how "
        f"long the layers take on {kind.name}",
        f"Profile the model on {kind.name}, import seconds measured there (pplan import), or estimate them "
        f"(pplan profile MODEL device={figures!r}); "
        f"pplan solve seconds_of={PROCESSOR!r} plans with the processor's all the same.",
    )


def gpus_as_profiled(topology: Topology) -> Iterator[Device]:
    """Return the kinds of GPUs that are assumed to be as fast as the profiled device."""
    return (kind for kind in topology.kinds if is_gpu(kind.name) and kind.speed == 1 and not kind.profile)


def to_toml(topology: Topology, title: str = "") -> str:
    """Return the text of a topology file, with the title as its first comment."""
    lines = [f"# {_one_line(title)}"] if title else []
    for device, number in topology.groups:
        lines += ["", "[[device]]", *_device_lines(device, number)]
    for level in topology.levels:
        lines += ["", "[[level]]", *_level_lines(level)]
    return "\n".join(lines).lstrip("\n") + "\n"


def _device_lines(device: Device, number: int) -> Iterator[str]:
    yield f"name = {_quoted(device.name)}"
    if device.memory_bytes is not None:
        yield f'memory = "{device.memory_bytes}B"{_comment(device.memory_source)}'
    yield f"count = {number}"
    if device.speed != 1:
        yield f"speed = {float(device.speed)!r}"
    if device.profile is not None:
        yield f"profile = {_quoted(device.profile)}"


def _level_lines(level: Level) -> Iterator[str]:
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
    """Return a rate as text, in GB/s if that is exact, else in bytes."""
    if math.isinf(value):
        return "inf"
    short = f"{value / 1e9:.12g}GB/s"
    return short if parse_rate(short) == value else f"{float(value)!r}B/s"


def _duration(value: float) -> str:
    """Return a duration as text, in microseconds if that is exact, else in seconds."""
    short = f"{value * 1e6:.12g}us"
    return short if parse_seconds(short) == value else f"{float(value)!r}s"


def _quoted(text: str) -> str:
    # JSON escapes all that TOML forbids in a string but the delete character; no terminal is to be steered.
    return "".join(map(_escaped, json.dumps(text, ensure_ascii=False)))


def _escaped(character: str) -> str:
    if character.isprintable():
        return character
    return f"\\u{ord(character):04x}" if ord(character) < 2**16 else f"\\U{ord(character):08x}"


def _comment(source: str) -> str:
    return f"  # {_one_line(source)}" if source else ""


def _one_line(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in " ".join(text.split()))
