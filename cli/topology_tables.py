"""The tables of `pplan topology`: the machines; or the devices, levels, times and sources of one topology."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from itertools import accumulate
from typing import Any

from rich.console import Console
from rich.table import Table

from ..cost_models.hardware import Level
from ..cost_models.machines.catalogue import MACHINES, Machine
from ..cost_models.machines.presets import PRESETS
from ..cost_models.machines.transfer_times import SIZES, AllReduceTime, all_reduces, transfers
from ..cost_models.quantities import format_bytes, format_rate, format_seconds
from ..cost_models.topology import Topology
from .number_format import ranges
from .table_style import figure, line, table, text, titled, word


def print_machines(console: Console) -> None:
    """Prints the machines that `--topology` knows."""
    line(console, "Machines for --topology and pplan topology show", style="bold")
    columns = [
        word("name"),
        text("machine", leaves=1),
        word("GPUs"),
        text("inside", leaves=3),
        text("between", leaves=2),
    ]
    console.print(
        table(console, columns, [_machine_row(machine) for machine in MACHINES.values()]), crop=False
    )


def _machine_row(machine: Machine) -> list[str]:
    shared = int(machine.gpus_per_adapter.value)
    note = "" if shared == 1 else f" for {shared} GPUs"
    return [
        machine.name,
        machine.title,
        f"{machine.gpus.value:g} x {PRESETS[machine.gpu].title}",
        f"{machine.inside.name} {format_rate(machine.inside.bandwidth.value)}",
        f"{machine.between.name} {format_rate(machine.between.bandwidth.value)}{note}",
    ]


def machines_json() -> str:
    """The machines as JSON, with the source of each figure."""
    return _written([asdict(machine) for machine in MACHINES.values()])


def print_topology(topology: Topology, title: str, console: Console) -> None:
    """Prints a topology's devices, levels, times of transfers and all-reduces, and its figures' sources."""
    line(console, title, style="bold")
    line(console, topology.describe())
    titled(console, "Devices", _devices(topology, console))
    titled(
        console, "Levels, from the inside; bandwidth is one direction of a port", _levels(topology, console)
    )
    titled(console, "Transfers between two GPUs", _transfers(topology, console))
    reduced = all_reduces(topology)
    if reduced:
        titled(console, "All-reduces; the best has a *", _all_reduces(reduced, console))
    console.print()
    for source in _sources(topology):
        line(console, source)


def _devices(topology: Topology, console: Console) -> Table:
    columns = [word("ranks"), text("device"), figure("memory"), figure("speed", leaves=1)]
    if any(device.profile for device in topology.kinds):
        columns.append(text("profile", leaves=2))
    starts = accumulate((number for _, number in topology.groups), initial=0)
    rows = [
        [
            ranges(range(start, start + number)),
            device.name,
            "no limit" if device.memory_bytes is None else format_bytes(device.memory_bytes),
            "-" if device.profile else f"{device.speed:g}",
            device.profile or "",
        ][: len(columns)]
        for (device, number), start in zip(topology.groups, starts, strict=False)
    ]
    return table(console, columns, rows)


def _levels(topology: Topology, console: Console) -> Table:
    columns = [
        word("level"),
        figure("GPUs"),
        text("link", leaves=1),
        figure("bandwidth"),
        figure("latency"),
        word("a port for", leaves=2),
    ]
    return table(console, columns, list(_level_rows(topology)))


def _level_rows(topology: Topology) -> Iterator[list[str]]:
    holds: int | None = 1
    for level in topology.levels:
        holds = None if level.size is None or holds is None else holds * level.size
        yield [
            level.name,
            "any" if holds is None else str(holds),
            level.link.name or "-",
            format_rate(level.link.bandwidth_bytes_per_second),
            format_seconds(level.link.latency_seconds, short=True),
            "each GPU" if level.devices_per_port == 1 else f"{level.devices_per_port} GPUs",
        ]


def _transfers(topology: Topology, console: Console) -> Table:
    times = {(made.level, made.bytes): format_seconds(made.seconds) for made in transfers(topology)}
    rows = [[level.name, *(times[level.name, size] for size in SIZES)] for level in topology.levels]
    return table(console, [word("joined by"), *(figure(_size(size)) for size in SIZES)], rows)


def _all_reduces(reduced: list[AllReduceTime], console: Console) -> Table:
    ways = list(dict.fromkeys(way for made in reduced for way in made.seconds))
    rows = [[made.over, _size(made.bytes), *(_starred(made, way) for way in ways)] for made in reduced]
    return table(console, [text("over"), figure("of"), *(figure(way) for way in ways)], rows)


def _starred(made: AllReduceTime, way: str) -> str:
    if way not in made.seconds:
        return "-  "
    return f"{format_seconds(made.seconds[way])} {'*' if way == made.best else ' '}"


def _size(size: int) -> str:
    return {10**6: "1 MB", 10**9: "1 GB"}[size]


def _sources(topology: Topology) -> Iterator[str]:
    """A line for each figure that says where it is from."""
    for device in topology.kinds:
        if device.memory_source:
            yield f"Memory of {device.name}: {device.memory_source}"
    for level in topology.levels:
        for what, source in _level_sources(level).items():
            if source:
                yield f"{what.capitalize()} of {level.name}: {source}"


def _level_sources(level: Level) -> dict[str, str]:
    return {
        "size": level.size_source,
        "bandwidth": level.link.bandwidth_source,
        "latency": level.link.latency_source,
        "ports": level.port_source,
    }


def topology_json(topology: Topology, title: str) -> str:
    """What `print_topology` prints, as JSON: bytes, seconds, bytes per second (null: unlimited)."""
    return _written(
        {
            "title": title,
            "gpus": topology.gpus,
            "gpus_per_node": topology.gpus_per_node,
            "devices": [{**asdict(device), "number": number} for device, number in topology.groups],
            "levels": [_level_record(level) for level in topology.levels],
            "transfers": [asdict(made) for made in transfers(topology)],
            "all_reduces": [asdict(made) for made in all_reduces(topology)],
        }
    )


def _level_record(level: Level) -> dict[str, Any]:
    rate = level.link.bandwidth_bytes_per_second
    return {
        "name": level.name,
        "size": level.size,
        "link": level.link.name,
        "bandwidth_bytes_per_second": None if math.isinf(rate) else rate,
        "latency_seconds": level.link.latency_seconds,
        "devices_per_port": level.devices_per_port,
        "sources": _level_sources(level),
    }


def _written(content: Any) -> str:
    return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
