"""The tables of `pplan machine`: the machines; or the devices, levels, times and sources of one topology."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from itertools import accumulate
from typing import Any

from rich.console import Console

from ..cost_models.collectives import EXAMPLE_BYTES, AllReduceTime, list_all_reduce_times, list_transfer_times
from ..cost_models.machines import MACHINES, PRESETS, Machine, PresetLink
from ..cost_models.quantities import format_bytes, format_rate, format_seconds, ranges
from ..cost_models.topology import Device, Level, Topology
from .table import Column, line, number, print_table, text, word


def print_machines(console: Console) -> None:
    """Prints the machines that `--topology` knows."""
    line(console, "Machines for --topology and pplan machine show", style="bold")
    columns: list[Column[Machine]] = [
        word("name", lambda machine: machine.name),
        text("machine", lambda machine: machine.title, drop=1),
        word("GPUs", lambda machine: f"{machine.gpus.value:g} x {PRESETS[machine.gpu].title}"),
        text("inside", lambda machine: _link_text(machine.inside), drop=3),
        text("between", _nodes_text, drop=2),
    ]
    print_table(console, columns, list(MACHINES.values()))


def _link_text(link: PresetLink) -> str:
    return f"{link.name} {format_rate(link.bandwidth.value)}"


def _nodes_text(machine: Machine) -> str:
    gpus_per_adapter = machine.gpus_per_adapter.value
    return _link_text(machine.between) + ("" if gpus_per_adapter == 1 else f" for {_gpus(gpus_per_adapter)}")


def _gpus(gpus_per_adapter: float) -> str:
    """The number of GPUs that share a network adapter, as text."""
    return "each GPU" if gpus_per_adapter == 1 else f"{gpus_per_adapter:g} GPUs"


def machines_json() -> str:
    """The machines as JSON, with the source of each figure."""
    return _json_value([asdict(machine) for machine in MACHINES.values()])


def print_topology(topology: Topology, title: str, console: Console) -> None:
    """Prints a topology's devices, levels, times of transfers and all-reduces, and its figures' sources."""
    line(console, title, style="bold")
    line(console, topology.describe())
    _print_devices(topology, console)
    _print_levels(topology, console)
    _print_transfers(topology, console)
    reduced = list_all_reduce_times(topology)
    if reduced:
        _print_all_reduces(reduced, console)
    console.print()
    for source in _sources(topology):
        line(console, source)


def _print_devices(topology: Topology, console: Console) -> None:
    starts = accumulate((number for _, number in topology.groups), initial=0)
    rows = [
        (device, range(start, start + count))
        for (device, count), start in zip(topology.groups, starts, strict=False)
    ]
    columns: list[Column[tuple[Device, range]]] = [
        word("ranks", lambda row: row[1], ranges),
        text("device", lambda row: row[0].name),
        number("memory", lambda row: row[0].memory_bytes, format_bytes, none="no limit"),
        number("speed", lambda row: None if row[0].profile else f"{row[0].speed:g}", drop=1),
        text(
            "profile",
            lambda row: row[0].profile,
            drop=2,
            none="",
            visible=any(device.profile for device in topology.kinds),
        ),
    ]
    print_table(console, columns, rows, title="Devices")


def _print_levels(topology: Topology, console: Console) -> None:
    columns: list[Column[tuple[Level, int | None]]] = [
        word("level", lambda row: row[0].name),
        number("GPUs", lambda row: row[1], none="any"),
        text("link", lambda row: row[0].link.name or None, drop=1),
        number("bandwidth", lambda row: row[0].link.bandwidth_bytes_per_second, format_rate),
        number("latency", lambda row: format_seconds(row[0].link.latency_seconds, short=True)),
        word("a port for", lambda row: _gpus(row[0].devices_per_port), drop=2),
    ]
    title = "Levels, from the inside; bandwidth is one direction of a port"
    print_table(console, columns, list(_levels(topology)), title=title)


def _levels(topology: Topology) -> Iterator[tuple[Level, int | None]]:
    """Every level with the GPUs that it holds, None: any number."""
    holds: int | None = 1
    for level in topology.levels:
        holds = None if level.size is None or holds is None else holds * level.size
        yield level, holds


def _print_transfers(topology: Topology, console: Console) -> None:
    seconds = {(time.level, time.bytes): time.seconds for time in list_transfer_times(topology)}

    def of(size: int) -> Column[Level]:
        return number(_size(size), lambda level: seconds[level.name, size], format_seconds)

    names: Column[Level] = word("joined by", lambda level: level.name)
    columns = [names, *map(of, EXAMPLE_BYTES)]
    print_table(console, columns, topology.levels, title="Transfers between two GPUs")


def _print_all_reduces(reduced: list[AllReduceTime], console: Console) -> None:
    def by(way: str) -> Column[AllReduceTime]:
        return number(way, lambda time: _star_best(time, way))

    columns: list[Column[AllReduceTime]] = [
        text("over", lambda entry: entry.over),
        number("of", lambda entry: entry.bytes, _size),
        *map(by, dict.fromkeys(way for entry in reduced for way in entry.seconds)),
    ]
    print_table(console, columns, reduced, title="All-reduces; the best has a *")


def _star_best(time: AllReduceTime, way: str) -> str:
    if way not in time.seconds:
        return "-  "
    return f"{format_seconds(time.seconds[way])} {'*' if way == time.best else ' '}"


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
    return _json_value(
        {
            "title": title,
            "gpus": topology.gpus,
            "gpus_per_node": topology.gpus_per_node,
            "devices": [{**asdict(device), "number": number} for device, number in topology.groups],
            "levels": [_level_record(level) for level in topology.levels],
            "transfers": [asdict(time) for time in list_transfer_times(topology)],
            "all_reduces": [asdict(time) for time in list_all_reduce_times(topology)],
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


def _json_value(content: Any) -> str:
    return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
