"""The options that describe the machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from .. import arguments
from ..option_fields import Options, option
from ..option_readers import read_by_level
from ..quantities import parse_bytes, parse_rate, parse_seconds
from .catalogue import MACHINES
from .presets import PRESETS


class MachineKeywords(TypedDict, total=False):
    """The fields of `MachineOptions` but `gpus`, as a caller may give them."""

    gpus_per_node: int | None
    gpu: str | None
    memory_bytes: int | None
    bandwidth: float | Sequence[float] | None
    latency: float | Sequence[float] | None
    topology: str | Path | None


def _machine(default: Any, check: Any, form: str, help: str, **more: Any) -> Any:
    return option(default, check, help, form, panel="The machine", **more)


def _memory(name: str, value: Any) -> int | None:
    return arguments.optional_whole(name, value, example="16 * 2**30")


def _bandwidth(name: str, value: Any) -> Sequence[float] | None:
    return arguments.by_level(name, value, "(300e9, 25e9)")


def _latency(name: str, value: Any) -> Sequence[float] | None:
    return arguments.by_level(name, value, "(5e-6, 20e-6)")


@dataclass(frozen=True)
class MachineOptions(Options):
    """The devices and their links; None: as in `topology`, else as profiled. Raises UsageError.

    `bandwidth` (bytes per second) and `latency` (seconds) hold one value inside a node and, where given, a
    second between nodes; `topology` is a machine's name or a TOML file.
    """

    gpus: int | None = _machine(
        None,
        arguments.optional_whole,
        "N",
        "How many GPUs there are; default: the topology's.",
        least=1,
    )
    gpus_per_node: int | None = _machine(None, arguments.optional_whole, "N", "GPUs in one server.", least=1)
    gpu: str | None = _machine(
        None,
        arguments.optional_word,
        "NAME",
        f"Its memory and the links of its usual server: {', '.join(PRESETS)}.",
    )
    memory_bytes: int | None = _machine(
        None, _memory, "16GiB", "Memory of each GPU.", flag="memory", read=parse_bytes
    )
    bandwidth: Sequence[float] | None = _machine(
        None,
        _bandwidth,
        "300GB/s[,25GB/s]",
        "Link bandwidth, inside a server and between servers.",
        read=read_by_level(parse_rate),
    )
    latency: Sequence[float] | None = _machine(
        None,
        _latency,
        "5us[,20us]",
        "Link latency, inside a server and between servers.",
        read=read_by_level(parse_seconds),
    )
    topology: Path | None = _machine(
        None,
        arguments.optional_path,
        "NAME|FILE.toml",
        f"A machine, or devices and links in a file. Machines: {', '.join(MACHINES)}.",
    )

    @property
    def parts(self) -> dict[str, Any]:
        """What they say beside the number of devices and the topology, as `make_topology` takes it."""
        return {
            "gpus_per_node": self.gpus_per_node,
            "gpu": self.gpu,
            "memory_bytes": self.memory_bytes,
            "bandwidth": self.bandwidth,
            "latency": self.latency,
        }

    @property
    def folder(self) -> Path:
        """Where the files that the topology names are."""
        return Path() if self.topology is None else self.topology.parent
