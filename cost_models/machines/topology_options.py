"""The topology that options, a file or a machine's name, and the profiled device describe together.

And whether seconds that were measured on the profiled device may be used to plan for the devices of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from ..errors import UsageError
from ..hardware import UNKNOWN_DEVICE, Device, Group, Level, Link
from ..topology import NODE, Topology, check_devices
from .catalogue import (
    Machine,
    device_preset,
    find_machine,
    find_preset,
    is_gpu,
    match_device,
    unknown_machine,
)
from .presets import PRESETS, Preset, PresetLink
from .topology_file import Kind, TopologyFile, load_topology

UNNAMED = "device"
"""The name of devices of which neither the profile nor the user says what they are."""


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

    @property
    def is_known(self) -> bool:
        """Whether the profile tells its device; an imported one does not."""
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
    """The topology that the options, else the file, else the profiled device describe, part by part.

    `file` is a TOML file, by its path or as read, or the name of a machine. Without `gpu` the devices are
    like the profiled one, with its memory (none for a CPU) and the links of the usual server of its preset.
    Where the profiled device has no preset, the links are those of a T4 server (CPU) or of an L4 server (PCIe
    4.0, any other GPU), and their name says so. `bandwidth` (bytes per second) and `latency` (seconds) hold
    one figure, inside a node, or two, inside and between; with more levels, those of the two innermost. `gpu`
    replaces the file's devices with their memory.

    Raises UsageError for an option and FileError for a file.
    """
    if gpus < 1:
        raise UsageError(f"gpus={gpus}: must be at least 1", "Give the number of GPUs you have.")
    check_devices(gpus)
    read = (
        TopologyFile() if file is None else file if isinstance(file, TopologyFile) else named_topology(file)
    )
    kinds, preset, remark = _kinds(gpu, read, profiled)
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
    """A machine, where that is a machine's name, else the file of that name. Raises UsageError, FileError."""
    machine = find_machine(str(name))
    if machine is not None:
        return machine_topology(machine)
    if not (name.suffix == ".toml" or len(name.parts) > 1 or os.path.exists(name)):  # noqa: PTH110  never raises
        raise unknown_machine(str(name), called)
    return load_topology(name)


def machine_topology(machine: Machine) -> TopologyFile:
    """What a file would say of one machine, and of the network between such machines."""
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


def _kinds(
    gpu: str | None, read: TopologyFile, profiled: ProfiledDevice
) -> tuple[Sequence[Kind], Preset, str]:
    """The devices, the preset whose usual server has the links, and a remark on these."""
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
    """The node and the network of a GPU's usual server."""
    node = preset.gpus_per_node
    return (
        Level(NODE, int(node.value), _link(preset.inside, remark), size_source=node.source),
        Level("network", None, _link(preset.between, remark)),
    )


def _with_bandwidth(
    levels: Sequence[Level], values: Sequence[float] | None, source: str
) -> tuple[Level, ...]:
    """With the given bandwidths; such a link has no name, since its kind is not known."""
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
    """With so many devices in a node, and ports that still belong to devices of one node."""
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
    """The topology of a file or of a machine's name by itself, on its own number of devices or on `gpus`.

    What a file leaves to the profiled device is that of a GPU without preset. Raises UsageError, FileError.
    """
    read = named_topology(name, "topology")
    number = gpus if gpus is not None else read.gpus
    unknown = ProfiledDevice("cuda", "the profiled GPU", None)
    return make_topology(gpus=1 if number is None else number, file=name, profiled=unknown)


PROCESSOR = "cpu"
"""The only value of `seconds_of`: a processor's seconds are meant to stand for those of a GPU."""


def check_seconds_source(word: str | None, profiled: ProfiledDevice) -> None:
    """Raises UsageError for a word that is not known, or says another device than the profile."""
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
    """Raises UsageError where GPUs are to be planned with a processor's seconds and `seconds_of` does not
    say that this is meant; a kind with a stated speed, or a profile of its own, says what its seconds are."""
    check_seconds_source(word, profiled)
    if word is None:
        for kind in gpus_as_profiled(topology):
            check_seconds_on_kind(profiled, kind)


def check_seconds_on_kind(profiled: ProfiledDevice, kind: Device) -> None:
    """Raises UsageError where the kind is a GPU and its seconds were measured on a processor."""
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
    """The kinds of GPUs that are taken to be just as fast as the profiled device."""
    return (kind for kind in topology.kinds if is_gpu(kind.name) and kind.speed == 1 and not kind.profile)
