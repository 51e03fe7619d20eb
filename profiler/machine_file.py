"""The file of a measured machine: what `pplan machine measure` writes and `solve` reads as its `machine`.

It holds seconds of collectives, kernels, passes over memory, whole layers and an optimizer step, of one
model's sizes, each as it was measured. What costs are made of them is worked out when the file is read, so
that a later pplan corrects its own sums. Needs no torch.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from ..cost_models.document import DeviceCount, Document, LayerName, MadeBy, Record, Samples
from ..cost_models.errors import FileError
from ..cost_models.machines import MEMORY_SHARE, ROOFLINES, device_preset
from ..cost_models.quantities import MOST_SECONDS
from ..cost_models.topology import Topology
from ..cost_models.topology_file import ProfiledDevice, TopologyFile, make_topology, parse_topology
from ..cost_models.transformer.block_kernels import block_work, head_work
from ..cost_models.transformer.corrections import Corrections, LayerCorrection, LayerKind, shared_by
from ..cost_models.transformer.implementations import IMPLEMENTATIONS
from ..cost_models.transformer.kernel_table import TERA, CollectiveName, KernelTable
from ..cost_models.transformer.kernel_table_file import read_kernel_rows, row_rate
from ..cost_models.transformer.layer_work import Tokens
from ..cost_models.transformer.parallel_degrees import ParallelDegrees
from ..cost_models.transformer.rank_costs import (
    CollectiveCurve,
    DeviceLimits,
    GroupLinks,
    MeasuredGroupLinks,
    Overheads,
    RankCosts,
    TopologyLinks,
)
from ..cost_models.transformer.transformer_shape import MOST_BLOCKS, TransformerShape
from ..cost_models.transformer.weight_update import update_passes
from .measured_links import MeasuredLinks, fit_link

_MOST_SIZE = 2**40
MeasuredSeconds = Annotated[float, Field(gt=0, le=MOST_SECONDS)]
Spread = Annotated[float, Field(ge=0, le=1e3)]


def _check_sizes(shape: TransformerShape) -> TransformerShape:
    """Refuse sizes that no transformer has."""
    own, experts = shape.attention, shape.experts
    least = {
        "hidden": shape.hidden,
        "vocabulary": shape.vocabulary,
        "feed_forward": shape.feed_forward,
        "attention.heads": own.heads,
        "attention.key_value_heads": own.key_value_heads,
        "attention.head_width": own.head_width,
        "attention.value_width": own.value_width,
    }
    if experts is not None:
        least |= {f"experts.{name}": getattr(experts, name) for name in ("number", "per_token", "width")}
    for name, value in least.items():
        if not 1 <= value <= _MOST_SIZE:
            raise ValueError(f"{name} is {value}, must be from 1 to {_MOST_SIZE}")
    rest = (own.latent_queries, own.latent_keys, own.rotary_width, experts.shared_width if experts else 0)
    if not all(0 <= value <= _MOST_SIZE for value in rest):
        raise ValueError(f"a size is not from 0 to {_MOST_SIZE}: {rest}")
    if not 1 <= shape.blocks <= MOST_BLOCKS or (any(shape.routed) and experts is None):
        raise ValueError(f"routed has {shape.blocks} blocks, and experts is {experts}")
    return shape


ModelSizes = Annotated[TransformerShape, AfterValidator(_check_sizes)]


class Measured(Record):
    """Something that was measured."""

    def key(self) -> str:
        """Text that tells it from all else that is measured of a machine."""
        values = self.model_dump(exclude=_RESULTS)
        return f"{type(self).__name__} {values}"


LINKS = "links"
"""Key of the measured links."""
_RESULTS = {"seconds", "forward_seconds", "backward_seconds", "spread"}


class CollectiveTimes(Measured):
    """Median seconds of a collective by size, in every group of `devices` ranks that lie `stride` apart.

    `bytes` are those of `cost_models.transformer.kernel_table.Collective`; ring: a transfer to the next rank.
    """

    name: CollectiveName
    devices: Annotated[int, Field(ge=2, le=2**20)]
    stride: DeviceCount
    bytes: Annotated[list[Annotated[int, Field(ge=1, le=2**50)]], Field(min_length=1, max_length=1000)]
    seconds: list[MeasuredSeconds]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.bytes) != len(self.seconds):
            raise ValueError(f"bytes has {len(self.bytes)} values and seconds {len(self.seconds)}")
        if sorted(set(self.bytes)) != self.bytes:
            raise ValueError(f"bytes is {self.bytes}: must rise")
        return self


class KernelTime(Measured):
    """Median seconds of a kernel, with the words of a table of kernels (`kernels.csv`)."""

    operation: LayerName
    shape: LayerName
    seconds: MeasuredSeconds

    @property
    def row(self) -> dict[str | None, str | None]:
        """Columns as a table of kernels has them."""
        return {"operation": self.operation, "shape": self.shape, "seconds": repr(self.seconds)}


class PassTime(Measured):
    """Median seconds of a pass over the device's memory that reads and writes so many bytes."""

    bytes: Annotated[int, Field(ge=1, le=2**50)]
    seconds: MeasuredSeconds


class LayerTime(Measured):
    """Median seconds of a whole layer on one of the devices that share it, for one micro-batch."""

    layer: LayerKind
    implementation: str = "transformers"
    tensor: DeviceCount = 1
    context: DeviceCount = 1
    expert: DeviceCount = 1
    forward_seconds: MeasuredSeconds
    backward_seconds: MeasuredSeconds
    spread: Spread = 0.0

    @property
    def degrees(self) -> ParallelDegrees:
        """Degrees that share the layer; experts are shared by replicas."""
        return ParallelDegrees(
            self.tensor, self.context, self.expert, data=self.expert, exchange="all-gather"
        )


class UpdateTime(Measured):
    """Median seconds of an optimizer step (Adam, mixed precision) over so many parameters of one device."""

    parameters: Annotated[int, Field(ge=1, le=2**50)]
    seconds: MeasuredSeconds


class MachineFile(Document):
    """What was measured of a machine, in bfloat16, for layers of one model's sizes.

    A part that is missing was not measured yet: `pplan machine measure` goes on with it.
    """

    kind: ClassVar[str] = "machine"

    device: Literal["cpu", "cuda"]
    device_name: LayerName
    memory_bytes: Annotated[int, Field(ge=1, le=2**50)] | None = None
    devices: DeviceCount
    dtype: Literal["bfloat16"] = "bfloat16"
    model_sizes: ModelSizes
    sequence: Samples
    micro_batch_size: Samples
    links: MeasuredLinks | None = None
    collectives: list[CollectiveTimes] = []
    kernels: list[KernelTime] = []
    passes: list[PassTime] = []
    whole_layers: list[LayerTime] = []
    update: UpdateTime | None = None
    made_by: MadeBy = MadeBy()

    @model_validator(mode="after")
    def _check(self) -> Self:
        for number, layer in enumerate(self.whole_layers):
            where = f"whole_layers.{number}"
            if layer.implementation not in IMPLEMENTATIONS:
                names = ", ".join(IMPLEMENTATIONS)
                raise ValueError(
                    f"{where}.implementation is {layer.implementation!r}, must be one of {names}"
                )
            if layer.layer == "experts" and self.model_sizes.experts is None:
                raise ValueError(f"{where}.layer is 'experts', and model_sizes.experts is null")
            if problem := layer.degrees.problem_with(self.model_sizes, self.sequence):
                raise ValueError(f"{where}: {problem}")
        if self.links is not None and len(self.links.members) != self.devices:
            raise ValueError(
                f"links.members has {len(self.links.members)} entries, devices is {self.devices}"
            )
        return self

    def same_measurement(self, other: MachineFile) -> bool:
        """Return whether both are of the same devices and sizes, so that one can go on with the other."""
        header = {"device", "device_name", "devices", "model_sizes", "sequence", "micro_batch_size"}
        return self.model_dump(include=header) == other.model_dump(include=header)

    def keys(self) -> set[str]:
        """Return the keys of all that was measured."""
        parts = (*self.collectives, *self.kernels, *self.passes, *self.whole_layers)
        own = {part.key() for part in parts}
        return own | ({self.update.key()} if self.update else set()) | ({LINKS} if self.links else set())

    def with_links(self, links: MeasuredLinks) -> Self:
        """Return the same with measured links."""
        return self.model_copy(update={"links": links})

    def with_part(self, part: Measured) -> Self:
        """Return the same with one more measured part."""
        if isinstance(part, UpdateTime):
            return self.model_copy(update={"update": part})
        lists = {
            CollectiveTimes: "collectives",
            KernelTime: "kernels",
            PassTime: "passes",
            LayerTime: "whole_layers",
        }
        name = lists[type(part)]
        return self.model_copy(update={name: [*getattr(self, name), part]})

    def missing_parts(self) -> list[str]:
        """Return the names of parts without any measurement that costs are made of."""
        names = ["kernels", "passes", "whole_layers", "update", *(["links"] if self.devices > 1 else [])]
        return [name for name in names if not getattr(self, name)]

    def topology_file(self, path: Path) -> TopologyFile:
        """Return the measured links as a topology file says them."""
        return TopologyFile() if self.links is None else parse_topology(self.links.to_toml(), path)

    def profiled_device(self) -> ProfiledDevice:
        """Return the device that was measured."""
        return ProfiledDevice(self.device, self.device_name, self.memory_bytes)

    def rank_costs(self, topology: Topology, path: Path, *, has_own_links: bool) -> RankCosts:
        """Make the costs of a device among others.

        Args:
            topology: Devices and links that the plan is for.
            path: The file, for errors.
            has_own_links: Whether these are the measured links; else measured collectives do not count.

        Raises:
            FileError: What is needed was not measured, or a kernel's row is wrong.
        """
        limits, gap = self._limits(path)
        curves = {
            (own.name, own.devices, own.stride): CollectiveCurve(tuple(own.bytes), tuple(own.seconds))
            for own in self.collectives
        }
        own_topology = self._own_topology(path)
        costs = RankCosts(
            limits,
            MeasuredGroupLinks(own_topology, curves),
            self._table(limits.flops, path),
            Overheads(gap=gap),
        )
        corrections = self._corrections(costs)
        links: GroupLinks = MeasuredGroupLinks(topology, curves) if has_own_links else TopologyLinks(topology)
        return replace(costs, links=links, corrections=corrections)

    def _own_topology(self, path: Path) -> Topology:
        return make_topology(
            gpus=self.devices, file=self.topology_file(path), profiled=self.profiled_device()
        )

    def _table(self, peak: float, path: Path) -> KernelTable | None:
        rows = (
            (f"{path}: kernels.{number}", {**own.row, "peak_tflops": f"{peak / TERA:.12g}"})
            for number, own in enumerate(self.kernels)
        )
        return read_kernel_rows(rows, str(path)) if self.kernels else None

    def _limits(self, path: Path) -> tuple[DeviceLimits, float]:
        """Limits of the device, and seconds from a pass over memory to the next kernel."""
        preset = device_preset(self.device_name)
        roofline = None if preset is None else ROOFLINES.get(preset.name)
        stated = roofline.peaks.get("bfloat16") if roofline is not None else None
        if stated is not None:
            flops = stated.value
        elif self.kernels:
            flops = max(
                row_rate(own.row, f"{path}: kernels.{number}") for number, own in enumerate(self.kernels)
            )
        else:
            raise self._lacks("kernels is empty", path)
        measures_memory = len({own.bytes for own in self.passes}) > 1
        if measures_memory:
            fit = fit_link([own.bytes for own in self.passes], [own.seconds for own in self.passes])
            bandwidth, share, gap = fit.bandwidth_bytes_per_second, 1.0, fit.latency_seconds
        elif roofline is not None:
            bandwidth, share, gap = roofline.bandwidth.value, MEMORY_SHARE, Overheads().gap
        else:
            raise self._lacks("passes of one size" if self.passes else "passes is empty", path)
        stated_flops = None if stated is None else stated.value
        limits = DeviceLimits(
            flops,
            bandwidth,
            memory_share=share,
            stated_flops=stated_flops,
            measures_memory=measures_memory,
        )
        return limits, gap

    def _lacks(self, what: str, path: Path) -> FileError:
        return FileError(
            f"{path}: {what}, and nothing else is known of {self.device_name}",
            "Run `pplan machine measure` with that file again: it goes on where it stopped.",
        )

    def _corrections(self, costs: RankCosts) -> Corrections:
        layers = tuple(self._correction(layer, costs) for layer in self.whole_layers)
        if self.update is None:
            return Corrections(layers)
        count = float(self.update.parameters)
        passes = sum(map(costs.memory_seconds, update_passes(count, count, ParallelDegrees(), costs)))
        return Corrections(layers, self.update.seconds / passes)

    def _correction(self, layer: LayerTime, costs: RankCosts) -> LayerCorrection:
        shape, degrees = self.model_sizes, layer.degrees
        tokens = Tokens(self.sequence, self.micro_batch_size)
        code = IMPLEMENTATIONS[layer.implementation]
        if layer.layer == "head":
            work = head_work(shape, degrees, tokens, code)
        else:
            work = block_work(shape, layer.layer == "experts", degrees, tokens, code)
        plain = replace(costs, implementation=code).seconds(work, degrees)
        return LayerCorrection(
            layer.layer,
            layer.implementation,
            shared_by(degrees),
            work,
            layer.forward_seconds / plain.forward,
            layer.backward_seconds / plain.backward,
            (layer.forward_seconds + layer.backward_seconds) / plain.both,
            layer.spread,
        )
