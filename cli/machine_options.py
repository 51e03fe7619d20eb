"""The options that describe the machine, which several verbs have, and what `make_topology` takes of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypedDict

import typer

from ..cost_models.machines.catalogue import MACHINES
from ..cost_models.machines.presets import PRESETS
from .options import by_level, whole_number


def _machine(name: str, metavar: str, text: str, **more: Any) -> Any:
    return typer.Option(name, metavar=metavar, help=text, rich_help_panel="The machine", **more)


Gpus = Annotated[
    int | None,
    _machine(
        "--gpus",
        "N",
        "How many GPUs there are; default: `gpus` of --topology.",
        parser=whole_number("--gpus", at_least=1),
    ),
]
GpusPerNode = Annotated[
    int | None,
    _machine(
        "--gpus-per-node", "N", "GPUs in one server.", parser=whole_number("--gpus-per-node", at_least=1)
    ),
]
Gpu = Annotated[
    str | None,
    _machine("--gpu", "NAME", f"Its memory and the links of its usual server: {', '.join(PRESETS)}."),
]
Memory = Annotated[str | None, _machine("--memory", "16GiB", "Memory of each GPU.")]
Bandwidth = Annotated[
    str | None,
    _machine("--bandwidth", "300GB/s[,25GB/s]", "Link bandwidth, inside a server and between servers."),
]
Latency = Annotated[
    str | None,
    _machine("--latency", "5us[,20us]", "Link latency, inside a server and between servers."),
]
TopologyFile = Annotated[
    Path | None,
    _machine(
        "--topology",
        "NAME|FILE.toml",
        f"A machine, or devices and links in a file. Machines: {', '.join(MACHINES)}.",
    ),
]


SecondsOf = Annotated[
    str | None,
    _machine(
        "--seconds-of",
        "cpu",
        "Plan GPUs with the seconds of a processor's profile, which is refused otherwise.",
    ),
]


class MachineArguments(TypedDict):
    """Arguments of `make_topology` and `pplan.solve`, by their names; None where an option is not given."""

    gpus_per_node: int | None
    gpu: str | None
    memory_bytes: int | None
    bandwidth: tuple[float, ...] | None
    latency: tuple[float, ...] | None


@dataclass(frozen=True)
class MachineOptions:
    """The options but --gpus, as the user typed them; None where one is not given."""

    gpus_per_node: int | None
    gpu: str | None
    memory: str | None
    bandwidth: str | None
    latency: str | None
    topology: Path | None

    @property
    def by_name(self) -> dict[str, int | str | Path | None]:
        """Their values by the options' names."""
        return {
            "--gpus-per-node": self.gpus_per_node,
            "--gpu": self.gpu,
            "--memory": self.memory,
            "--bandwidth": self.bandwidth,
            "--latency": self.latency,
            "--topology": self.topology,
        }

    @property
    def are_given(self) -> bool:
        """Whether the user gave any."""
        return any(value is not None for value in self.by_name.values())

    def arguments(self) -> MachineArguments:
        """What they say beside --topology, in bytes, bytes per second and seconds. Raises UsageError."""
        from ..cost_models.quantities import parse_bytes, parse_rate, parse_seconds

        return {
            "gpus_per_node": self.gpus_per_node,
            "gpu": self.gpu,
            "memory_bytes": None if self.memory is None else parse_bytes(self.memory, name="--memory"),
            "bandwidth": by_level(
                self.bandwidth, "--bandwidth", lambda text: parse_rate(text, name="--bandwidth")
            ),
            "latency": by_level(
                self.latency, "--latency", lambda text: parse_seconds(text, name="--latency")
            ),
        }
