"""The options that describe the machine, which several verbs have, and what `make_topology` takes of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypedDict

from ..cost_models.machines.machine_options import MachineOptions
from .option_parameters import parameter
from .options import by_level

Gpus = Annotated[int | None, parameter(MachineOptions, "gpus")]
GpusPerNode = Annotated[int | None, parameter(MachineOptions, "gpus_per_node")]
Gpu = Annotated[str | None, parameter(MachineOptions, "gpu")]
Memory = Annotated[str | None, parameter(MachineOptions, "memory_bytes")]
Bandwidth = Annotated[str | None, parameter(MachineOptions, "bandwidth")]
Latency = Annotated[str | None, parameter(MachineOptions, "latency")]
TopologyFile = Annotated[Path | None, parameter(MachineOptions, "topology")]


class MachineArguments(TypedDict):
    """Arguments of `make_topology` and `pplan.solve`, by their names; None where an option is not given."""

    gpus_per_node: int | None
    gpu: str | None
    memory_bytes: int | None
    bandwidth: tuple[float, ...] | None
    latency: tuple[float, ...] | None


@dataclass(frozen=True)
class TypedMachine:
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
