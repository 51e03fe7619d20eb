"""The profile: the measured layers of a model, as a file (`NAME.profile.json`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from ..cost_models.document import (
    Bytes,
    DeviceCount,
    Dimension,
    Document,
    JsonObject,
    LayerBound,
    LayerName,
    MadeBy,
    Record,
    Samples,
    Seconds,
    Seed,
)
from ..cost_models.errors import UsageError
from ..cost_models.layer import Chain, SharedBuffer, TiedWeight
from ..cost_models.machines import is_gpu, same_device
from ..cost_models.memory import workspace_before_loss
from ..cost_models.quantities import MOST_LAYERS, either, format_count, html_table
from ..cost_models.runtime import other_layers_warning
from ..cost_models.text_files import sha256
from ..cost_models.topology import Topology
from ..cost_models.topology_file import UNNAMED, ProfiledDevice, gpus_as_profiled
from .gpu_state import GpuRecord

if TYPE_CHECKING:
    from ..cost_models.figures import CostRow, Drawing

# The records in a profile's file: layers and their costs, the whole model, the loss, shared tensors.

SHORTEST_PASS = 1e-12
"""Seconds. No machine runs a model faster: such a profile was not measured, and gives no rates."""
Spread = Annotated[float, Field(ge=0, le=1e9)]
ClosingRatio = Annotated[float, Field(gt=0, le=1e9)]
PartRatio = Annotated[float, Field(ge=0, le=1e9)]
BELIEVED = (0.5, 2.0)
"""Closing ratios by which layers' seconds are corrected: of others, the measurement is broken."""


class LayerMeasurement(Record):
    """One layer at one micro-batch size. Seconds are medians.

    `saved_bytes` counts each storage once, with the first layer that saves it; `saved_input_bytes` is what
    of the layer's input an earlier layer already counted and this layer or any later one needs: what a stage
    that starts here keeps besides.
    On CUDA the seconds lie between device events, and the `_host_` seconds are those to launch.
    `workspace_bytes` is the peak while the layer runs above what is kept: weights, gradients, input, and what
    this layer and those before it saved; the larger of forward's and backward's.
    """

    micro_batch_size: Samples
    forward_seconds: Seconds
    backward_seconds: Seconds
    output_bytes: Bytes
    saved_bytes: Bytes
    saved_input_bytes: Bytes = 0
    workspace_bytes: Bytes = 0
    spread: Spread | None = None
    """Interquartile range of forward + backward over their median; None: not timed twice."""
    forward_host_seconds: Seconds | None = None
    backward_host_seconds: Seconds | None = None
    backward_input_seconds: Seconds | None = None
    """Seconds of the gradient of the layer's input alone; None: not measured apart."""
    backward_weight_seconds: Seconds | None = None
    """Seconds of the gradients of the layer's weights alone, from what the pass before kept."""
    pending_gradient_bytes: Bytes | None = None
    """Of the gradients that the first part of a backward leaves for the second, each storage once, with the
    last layer that needs it; None: not counted, and taken for the larger of saved and output bytes."""
    forward_workspace_bytes: Bytes | None = None
    backward_workspace_bytes: Bytes | None = None


class ProfiledLayer(Record):
    """A layer of the chain; `cut_after` says whether a stage may end with it, `cut_reason` why not.

    `accumulation_seconds`: of every backward at any size but the first of a step, to add the gradients to
    those that are there. None: not known, the first is taken to be like the others.
    """

    name: LayerName
    kind: str = ""
    parameter_bytes: Bytes
    trainable_bytes: Bytes | None = None
    """Bytes of the parameters that need a gradient; None: all."""
    largest_parameter_bytes: Bytes | None = None
    """Bytes of the largest trainable parameter; None: not known."""
    buffer_bytes: Bytes = 0
    cut_after: bool = True
    cut_reason: str | None = None
    accumulation_seconds: Seconds | None = None
    crossing: LayerBound | None = None
    """How many tensors cross the cut after it."""
    costs: Annotated[list[LayerMeasurement], Field(min_length=1)]

    @property
    def form(self) -> tuple[str, bool, list[int]]:
        """What is the same of the layer whatever it costs: its name, whether a stage may end with it, its
        sizes."""
        return self.name, self.cut_after, [cost.micro_batch_size for cost in self.costs]


def check_seconds(layers: Sequence[ProfiledLayer]) -> None:
    """Raises ValueError where all layers together take no time."""
    for position, first in enumerate(layers[0].costs):
        costs = [layer.costs[position] for layer in layers]
        seconds = sum(cost.forward_seconds + cost.backward_seconds for cost in costs)
        if seconds < SHORTEST_PASS:
            raise ValueError(
                f"all layers together take {seconds:g} s at micro-batch size {first.micro_batch_size}, "
                f"it must be at least {SHORTEST_PASS:g} s"
            )


class SharedLayers(Record):
    """The layers as so many devices share them: seconds and bytes are those of one."""

    tensor_parallel: Annotated[DeviceCount, Field(ge=2)]
    layers: Annotated[list[ProfiledLayer], Field(min_length=1, max_length=MOST_LAYERS)]


def check_shared_layers(
    whole: Sequence[ProfiledLayer], tensor_parallel: int, shared: Sequence[SharedLayers]
) -> None:
    """Raises ValueError where layers of more devices are others than the `whole` ones, which so many share,
    or have other micro-batch sizes or cuts."""
    last = tensor_parallel
    for own in shared:
        where = f"shared_layers of {own.tensor_parallel} devices"
        if own.tensor_parallel <= last:
            raise ValueError(f"{where}: they stand behind those of {last}; more devices must follow fewer")
        last = own.tensor_parallel
        if [layer.form for layer in own.layers] != [layer.form for layer in whole]:
            raise ValueError(f"{where}: must be the same layers, with the same cuts and micro-batch sizes")


class WholeMeasurement(Record):
    """The untouched model's own forward and backward at one micro-batch size.

    `closing_ratio` is the sum of the layers' medians over the whole's, forward and backward together.
    Without launches of their own (`forward_host_seconds`), as on a CPU, layers are planned with their seconds
    over it, so that they add up to the whole; with them, a whole that takes longer waited for its host, which
    the cost models count apart. Forward and backward share the ratio: that of one direction varies more.
    """

    micro_batch_size: Samples
    forward_seconds: Seconds
    backward_seconds: Seconds
    closing_ratio: ClosingRatio
    forward_closing_ratio: PartRatio | None = None
    backward_closing_ratio: PartRatio | None = None
    backward_parts_ratio: PartRatio | None = None
    """Input and weight gradients of all layers, measured apart, over the untouched model's backward."""
    first_backward_seconds: Seconds | None = None
    """Where there are no gradients to add to, as for the first micro-batch of a step after `zero_grad()`."""
    spread: Spread | None = None
    """Spread of its passes, as of a layer. None if it was timed once."""
    rounds: Samples | None = None
    peak_bytes: Bytes | None = None
    """Most bytes allocated in a step of the untouched model, gradients existing, without an optimizer."""
    reserved_bytes: Bytes | None = None
    """Most that CUDA's caching allocator had taken of the device meanwhile; None for other devices."""
    predicted_peak_bytes: Bytes | None = None
    """The same peak, predicted from the layers' bytes."""


def scales_to_whole(
    costs: Sequence[LayerMeasurement], wholes: Sequence[WholeMeasurement]
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """What the layers' seconds are multiplied with, at every size of a layer's `costs`, so that forward and
    backward together add up to the whole model's; 1 where launches were measured, or no whole, and by a ratio
    outside of `BELIEVED`."""
    least, most = BELIEVED
    ratios = {whole.micro_batch_size: whole.closing_ratio for whole in wholes}
    own = [
        ratios.get(cost.micro_batch_size, 1.0) if cost.forward_host_seconds is None else 1.0 for cost in costs
    ]
    return np.array([1 / ratio if least <= ratio <= most else 1.0 for ratio in own])


def describe_scales(scales: np.ndarray[tuple[int], np.dtype[np.float64]]) -> list[str]:
    """The range of the factors, where one is not 1."""
    least, most = (f"{factor:.3f}" for factor in (scales.min(), scales.max()))
    if least == most == "1.000":
        return []
    return [
        f"the layers' seconds are taken {least if least == most else f'{least} to {most}'} times as long as "
        "measured, so that they add up to the whole model's"
    ]


class MeasuredLoss(Record):
    """The loss on the model's output, which the last stage computes; `costs` as those of a layer.

    Its workspace is what it needs above all that the layers and it save. The layers' own, and the peaks of
    the whole, are counted without it: backward starts from a gradient that is drawn.
    """

    name: str
    costs: Annotated[list[LayerMeasurement], Field(min_length=1)]

    def saved_rows(self, layers: int) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
        """(layers, sizes): what it saves, with the last layer."""
        rows = np.zeros((layers, len(self.costs)))
        rows[-1] = [cost.saved_bytes for cost in self.costs]
        return rows

    def workspace_with(self, last: ProfiledLayer) -> list[int]:
        """The last layer's workspace with the loss behind it; its own where the loss' is not known."""
        return [
            int(workspace_before_loss(own.workspace_bytes, behind.saved_bytes, behind.workspace_bytes))
            if behind.forward_workspace_bytes is not None
            else own.workspace_bytes
            for own, behind in zip(last.costs, self.costs, strict=True)
        ]


class Tied(Record):
    """A parameter or buffer that several layers use.

    `bytes`: of a parameter that may stand on several stages, each with a copy; the first of the `layers`
    counts it as its own. None: its users belong on one stage, as in profiles of earlier versions.
    """

    tensor: str
    layers: list[str]
    bytes: Bytes | None = None
    trainable: bool = True
    dtype: str = ""

    def check_users(self, order: Mapping[str, int], layers: Sequence[ProfiledLayer]) -> None:
        """Raises ValueError for layers that there are not, once each and in their `order`."""
        unknown = [name for name in self.layers if name not in order]
        if unknown:
            raise ValueError(f"tied {self.tensor!r}: no layer is named {unknown[0]!r}")
        if self.bytes is None:
            return
        users = [order[name] for name in self.layers]
        if len(users) < 2 or users != sorted(set(users)):
            raise ValueError(f"tied {self.tensor!r}: give two layers or more, each once and in their order")
        first = layers[users[0]]
        if self.bytes > first.parameter_bytes:
            raise ValueError(
                f"tied {self.tensor!r}: its {self.bytes} bytes are more than the parameters of its first "
                f"layer, {first.name!r} ({first.parameter_bytes})"
            )


class ReadOnlyBuffer(Record):
    """A buffer that several layers read and none writes: every stage with one of these `layers` has a copy of
    its `bytes`, which the first of them counts as its own."""

    tensor: str
    layers: Annotated[list[str], Field(min_length=2)]
    bytes: Bytes

    def check_users(self, order: Mapping[str, int], layers: Sequence[ProfiledLayer]) -> None:
        """Raises ValueError for layers that there are not, once each and in their `order`."""
        unknown = [name for name in self.layers if name not in order]
        if unknown:
            raise ValueError(f"shared buffer {self.tensor!r}: no layer is named {unknown[0]!r}")
        users = [order[name] for name in self.layers]
        first = layers[users[0]]
        if users != sorted(set(users)) or self.bytes > first.buffer_bytes:
            raise ValueError(
                f"shared buffer {self.tensor!r}: give its layers once each, in their order, and no more "
                f"bytes than the buffers of the first, {first.name!r}, have ({first.buffer_bytes})"
            )


class InputTensor(Record):
    """A tensor that the model takes: shape of one sample, without the batch, and dtype."""

    shape: list[Dimension]
    dtype: str


class OutputTensor(InputTensor):
    """A tensor that the model returns. `shape` is that of one sample, or the whole where it holds none."""

    name: str
    """Its place in the output, as in Python: `['loss']`; empty where it is the output."""
    has_samples: bool
    """Return whether dimension 0 holds the samples."""

    def __str__(self) -> str:
        """Its name with its shape, for messages."""
        shape = f"of shape {tuple(self.shape)} for any number of samples" if self.shape else "a scalar"
        return f"output{self.name}, {shape}"


class Unmeasured(Record):
    """A micro-batch size that was asked for and has no figures."""

    micro_batch_size: Samples
    reason: Literal["does not fit", "budget", "interrupted", "refused"]
    """`refused`: the model does not take it, or layers hand on other shapes: no plan may use it."""
    detail: str = ""


# The profile: the measured layers of a model, as a file (`NAME.profile.json`).

_OF_THE_LOSS = (
    *("forward_seconds", "backward_seconds", "forward_host_seconds", "backward_host_seconds"),
    "backward_input_seconds",
    "saved_bytes",
)
"""What the loss adds to the last layer."""
_SCALED = ("forward_seconds", "backward_seconds", "backward_input_seconds", "backward_weight_seconds")
MOST_SHOWN = 200
"""Layers in a notebook."""


class Profile(Document):
    """All measured layers of a model. Keys beyond those of this class may stand in the file."""

    kind: ClassVar[str] = "profile"
    keeps_command: ClassVar[bool] = True

    model: str
    device: str = "cpu"
    """cpu, cuda or meta; `unknown` where the file that it was imported from does not say."""
    device_name: str = ""
    device_memory_bytes: Bytes | None = None
    """Memory of the device; None for a CPU."""
    dtype: str = "float32"
    estimated: bool = False
    input_shape: list[Dimension] | None = None
    """Shape of one sample of the first input, without the batch."""
    inputs: list[InputTensor] = []
    """All tensors that the model takes."""
    outputs: list[OutputTensor] = []
    """All tensors that the model returns; empty where they are not known."""
    input_bytes_per_sample: Bytes = 0
    classes: Dimension | None = None
    settings: JsonObject = {}
    """What its factory or configuration was given, as far as JSON can say it; "..." for a text."""
    input_like: str | None = None
    """The user's function that made the example input."""
    seed: Seed | None = None
    threads: Samples | None = None
    tensor_parallel: DeviceCount = 1  # devices that share every layer; seconds and bytes are one's
    scales_with_samples: bool = False
    """Imported, with one micro-batch size: the costs at any other are taken in proportion to the samples."""
    granularity: str = "block"
    """block, fine or module:PATTERN: which cuts make the layers."""
    compiled: bool = False
    channels_last: bool = False
    amp: Literal["bf16", "fp16"] | None = None
    tf32: bool = False
    cudnn_benchmark: bool = False
    gpu: GpuRecord | None = None
    """What the GPU said of itself; None for other devices, and where the driver does not tell."""
    layers: Annotated[list[ProfiledLayer], Field(min_length=1, max_length=MOST_LAYERS)]
    shared_layers: list[SharedLayers] = []
    """The same as more devices share each, where a table gave them: solve chooses how many."""
    edges: list[tuple[str, str]] = []
    whole: list[WholeMeasurement] = []
    loss: MeasuredLoss | None = None
    tied: list[Tied] = []
    shared_buffers: list[ReadOnlyBuffer] = []
    unmeasured: list[Unmeasured] = []
    notes: list[str] = []
    """What a reader should know: a closing ratio past 5 %, a size that did not fit, a busy machine."""
    made_by: MadeBy = MadeBy()

    def __repr__(self) -> str:
        sizes = ", ".join(map(str, self.micro_batch_sizes))
        on = self.device_name or self.device
        return f"<Profile of {self.model} on {on}: {format_count(len(self.layers), 'layer')}, sizes {sizes}>"

    def _repr_html_(self) -> str:
        """Of a notebook: the layers at the largest size."""
        rows = [row.cells for row in self._cost_rows()[:MOST_SHOWN]]
        return html_table(repr(self)[1:-1], ("layer", "forward", "backward", "parameters"), rows)

    def plot(self, **style: Any) -> Drawing:
        """Draw the seconds of every layer at the largest micro-batch size, and its parameters.

        Args:
            style: Fields of `FigureOptions`: `title`, `size`, `font`, `font_size`, `greyscale`.

        Returns:
            The figure. A notebook shows it; `save("layers.pdf")` writes it as PDF, PNG or SVG.

        Raises:
            MachineError: matplotlib is not installed.
            UsageError: An option is wrong.
        """
        from ..cost_models.figures import draw_costs, figure_options  # most commands draw nothing

        times = f"Time at micro-batch size {self.micro_batch_sizes[-1]}: forward + backward"
        return draw_costs(repr(self)[1:-1], times, "Parameters", self._cost_rows(), figure_options(style))

    def _cost_rows(self) -> list[CostRow]:
        from ..cost_models.figures import CostRow

        return [
            CostRow(layer.name, cost.forward_seconds, cost.backward_seconds, layer.parameter_bytes)
            for layer, cost in ((layer, layer.costs[-1]) for layer in self.layers)
        ]

    @model_validator(mode="after")
    def _check_layers(self) -> Self:
        sizes = self.micro_batch_sizes
        names: set[str] = set()
        for layer in self.layers:
            if layer.name in names:
                raise ValueError(f"two layers are named {layer.name!r}")
            names.add(layer.name)
            own = [cost.micro_batch_size for cost in layer.costs]
            if own != sizes:
                raise ValueError(
                    f"layer {layer.name!r} has costs at the micro-batch sizes {own}, "
                    f"the first layer at {sizes}; they must be the same, ascending and without repeats"
                )
        return self

    @model_validator(mode="after")
    def _check_shared_layers(self) -> Self:
        check_shared_layers(self.layers, self.tensor_parallel, self.shared_layers)
        if self.shared_layers and (self.tied or self.shared_buffers or self.loss or self.whole):
            raise ValueError("shared_layers: a profile with tied, shared_buffers, loss or whole has none")
        return self

    @model_validator(mode="after")
    def _check_users(self) -> Self:
        order = {layer.name: index for index, layer in enumerate(self.layers)}
        for weight in self.tied:
            weight.check_users(order, self.layers)
        for buffer in self.shared_buffers:
            buffer.check_users(order, self.layers)
        return self

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        if self.scales_with_samples and len(self.micro_batch_sizes) > 1:
            raise ValueError(
                f"scales_with_samples is for one micro-batch size, the layers have {self.micro_batch_sizes}"
            )
        own = [] if self.loss is None else [cost.micro_batch_size for cost in self.loss.costs]
        if own and own != self.micro_batch_sizes:
            raise ValueError(
                f"the loss has costs at the micro-batch sizes {own}, the layers at {self.micro_batch_sizes}; "
                "they must be the same, ascending and without repeats"
            )
        return self

    @model_validator(mode="after")
    def _check_seconds(self) -> Self:
        if not self.structure_only:
            for layers in (self.layers, *(own.layers for own in self.shared_layers)):
                check_seconds(layers)
        return self

    @property
    def micro_batch_sizes(self) -> list[int]:
        """The measured sizes, ascending."""
        return sorted({cost.micro_batch_size for cost in self.layers[0].costs})

    @property
    def degrees(self) -> list[int]:
        """The numbers of devices that may share every layer, ascending."""
        return [self.tensor_parallel, *(own.tensor_parallel for own in self.shared_layers)]

    def at_degree(self, tensor_parallel: int) -> Profile:
        """The profile of layers that so many devices share, and of no others. Raises UsageError."""
        layers = {own.tensor_parallel: own.layers for own in self.shared_layers}
        layers[self.tensor_parallel] = self.layers
        if tensor_parallel not in layers:
            raise UsageError(
                f"tp={tensor_parallel}: the profile of {self.model} is of layers that {either(self.degrees)} "
                "devices share",
                "Use one of these, or import a table with such columns.",
            )
        own = {"layers": layers[tensor_parallel], "tensor_parallel": tensor_parallel, "shared_layers": []}
        return self.model_copy(update=own) if self.shared_layers else self

    @property
    def structure_only(self) -> bool:
        """Whether it was made on the meta device: layers and bytes are exact, and there are no seconds."""
        return self.device == "meta"

    @property
    def has_parts(self) -> bool:
        """Whether the backward was measured in two parts, at every size."""
        return self._all_have("backward_input_seconds", "backward_weight_seconds")

    @property
    def has_pending(self) -> bool:
        """Whether it was counted what a backward's first part leaves for its second, at every size."""
        return self._all_have("pending_gradient_bytes")

    def _all_have(self, *names: str) -> bool:
        costs = [cost for layer in self.layers for cost in layer.costs]
        return all(getattr(cost, name) is not None for cost in costs for name in names)

    @property
    def layers_sha256(self) -> str:
        """SHA-256 of the layer names, one a line: whether a plan is for these layers."""
        return sha256("\n".join(layer.name for layer in self.layers))

    def remarks(self) -> list[str]:
        """What somebody should know who plans with these seconds, whatever the machine."""
        remarks = describe_scales(scales_to_whole(self.layers[0].costs, self.whole))
        if not self.estimated and self._spread() is None:
            remarks.append("the profile does not tell how the layers' seconds vary: steps have no interval")
        return remarks

    def chain(self) -> Chain:
        """The layers as the cost models take them: scaled to add up to the whole model
        (`scales_to_whole`), where launches were not measured; the last one's hold the loss.

        Raises UsageError for a profile without seconds.
        """
        if self.structure_only:
            raise UsageError(
                f"the profile of {self.model} was made on the meta device and has no seconds",
                f"Profile {self.model} with device='cpu', or 'cuda' where there is one.",
            )

        scales = scales_to_whole(self.layers[0].costs, self.whole)
        workspace = [[cost.workspace_bytes for cost in layer.costs] for layer in self.layers]
        if self.loss is not None:
            workspace[-1] = self.loss.workspace_with(self.layers[-1])

        def table(key: str) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
            values = np.array(
                [[getattr(cost, key) or 0.0 for cost in layer.costs] for layer in self.layers],
                dtype=np.float64,
            )
            if key in _SCALED:
                values *= scales
            if self.loss is not None and key in _OF_THE_LOSS:
                own = "backward_seconds" if key == "backward_input_seconds" else key
                values[-1] += [getattr(cost, own) or 0.0 for cost in self.loss.costs]
            return values

        return Chain(
            names=tuple(layer.name for layer in self.layers),
            sizes=tuple(self.micro_batch_sizes),
            parameter_bytes=np.array([layer.parameter_bytes for layer in self.layers], dtype=np.float64),
            trainable_bytes=np.array(
                [
                    layer.parameter_bytes if layer.trainable_bytes is None else layer.trainable_bytes
                    for layer in self.layers
                ],
                dtype=np.float64,
            ),
            buffer_bytes=np.array([layer.buffer_bytes for layer in self.layers], dtype=np.float64),
            cut_after=np.array([layer.cut_after for layer in self.layers[:-1]] + [False], dtype=bool),
            input_bytes_per_sample=float(self.input_bytes_per_sample),
            forward_seconds=table("forward_seconds"),
            backward_seconds=table("backward_seconds"),
            output_bytes=table("output_bytes"),
            saved_bytes=table("saved_bytes"),
            saved_input_bytes=table("saved_input_bytes"),
            workspace_bytes=np.array(workspace, dtype=np.float64),
            forward_host_seconds=table("forward_host_seconds"),
            backward_host_seconds=table("backward_host_seconds"),
            backward_input_seconds=table("backward_input_seconds") if self.has_parts else None,
            backward_weight_seconds=table("backward_weight_seconds") if self.has_parts else None,
            accumulation_seconds=np.array([layer.accumulation_seconds or 0.0 for layer in self.layers]),
            batch_norms=self.batch_norms,
            scales_with_samples=self.scales_with_samples,
            uncertainty=self._uncertainty(),
            spread=self._spread(),
            whole_spread=self._whole_spread(),
            tied=self._tied(),
            largest_parameters=self._largest_parameters(),
            shared_buffers=self._shared_buffers(),
            pending_gradient_bytes=table("pending_gradient_bytes") if self.has_pending else None,
            loss_saved_bytes=None if self.loss is None else self.loss.saved_rows(len(self.layers)),
            refused={own.micro_batch_size: own.detail for own in self.unmeasured if own.reason == "refused"},
        )

    def _shared_buffers(self) -> tuple[SharedBuffer, ...]:
        order = {layer.name: index for index, layer in enumerate(self.layers)}
        return tuple(
            SharedBuffer(own.tensor, float(own.bytes), tuple(order[name] for name in own.layers))
            for own in self.shared_buffers
        )

    def _largest_parameters(self) -> np.ndarray[tuple[int], np.dtype[np.float64]] | None:
        """None where one is not known."""
        largest = [layer.largest_parameter_bytes for layer in self.layers]
        return None if None in largest else np.array(largest, dtype=np.float64)

    def _tied(self) -> tuple[TiedWeight, ...]:
        """In the order of their first users."""
        order = {layer.name: index for index, layer in enumerate(self.layers)}
        weights = [
            TiedWeight(
                name=own.tensor,
                bytes=float(own.bytes),
                trainable_bytes=float(own.bytes) if own.trainable else 0.0,
                layers=tuple(order[name] for name in own.layers),
            )
            for own in self.tied
            if own.bytes is not None
        ]
        return tuple(sorted(weights, key=lambda own: own.layers[0]))

    @property
    def batch_norms(self) -> tuple[str, ...]:
        """Names of layers that normalise each micro-batch by itself."""
        return tuple(layer.name for layer in self.layers if layer.kind.startswith("BatchNorm"))

    def _spread(self) -> np.ndarray[tuple[int, int], np.dtype[np.float64]] | None:
        """Of every layer at every size; None where nothing was timed twice: an estimate, say, or an import.

        A layer that was timed once at a size varies there as at the size where it varies most. The loss is
        taken to vary with the last layer, by the seconds of both.
        """
        rows = [layer.costs for layer in self.layers] + ([] if self.loss is None else [self.loss.costs])
        ranges = np.array([[cost.spread for cost in costs] for costs in rows], dtype=np.float64)
        widest = np.fmax.reduce(ranges, axis=1, keepdims=True, initial=0.0)
        # Profiles of earlier versions hold 0 where nothing was timed twice.
        if self.estimated or not widest.any():
            return None
        spreads = np.where(np.isnan(ranges), widest, ranges)
        if self.loss is not None:
            both = [[cost.forward_seconds + cost.backward_seconds for cost in costs] for costs in rows[-2:]]
            whole = np.maximum(np.sum(both, axis=0), SHORTEST_PASS)
            spreads[-2] = (spreads[-2:] * both).sum(axis=0) / whole
        return spreads[: len(self.layers)]

    def _whole_spread(self) -> np.ndarray[tuple[int], np.dtype[np.float64]] | None:
        """The spread of the whole model at every size; None where it was timed once."""
        spreads = {whole.micro_batch_size: whole.spread for whole in self.whole}
        values = [own for size in self.micro_batch_sizes if (own := spreads.get(size)) is not None]
        is_complete = len(values) == len(self.micro_batch_sizes)
        return np.array(values, dtype=np.float64) if is_complete else None

    def _uncertainty(self) -> np.ndarray[tuple[int], np.dtype[np.float64]] | None:
        """How far the closing ratio is from 1 at every size; None where one has none."""
        ratios = {whole.micro_batch_size: whole.closing_ratio for whole in self.whole}
        if not all(size in ratios for size in self.micro_batch_sizes):
            return None
        return np.array([abs(ratios[size] - 1) for size in self.micro_batch_sizes], dtype=np.float64)


class Interrupted(KeyboardInterrupt):
    """Holds the profile of what was measured until then."""

    def __init__(self, profile: Profile) -> None:
        super().__init__("interrupted")
        self.profile = profile


CLOSES = 0.05
"""Share by which the layers' seconds may miss the whole model's, and its passes vary, without a word."""

MISSES = 0.1
"""Share from which on such a profile is not kept for later: measuring again may do better."""
WAITED = "the device waited for the host"
"""How a note begins, behind its micro-batch size, of a device that had nothing to do."""
STAMPS_SECONDS = 1e-3
"""What reading the clock between layers may add to a pass of a model, however small that is."""


def profiled_device(profile: Profile) -> ProfiledDevice:
    """What the profile was measured on."""
    return ProfiledDevice(profile.device, profile.device_name, profile.device_memory_bytes)


def list_warnings(profile: Profile, topology: Topology, runtime: str | None) -> list[str]:
    """Warnings about planning this machine, or a runtime, with these seconds, the gravest first."""
    own = _closing_warnings(profile)
    other_layers = other_layers_warning(runtime, profile.device)
    return [
        *([other_layers] if other_layers else []),
        *_of_the_device(profile, topology),
        *(note for note in profile.notes if note in own),
        *_of_the_spread(profile),
        *_of_an_interruption(profile),
        *_of_groups(profile),
    ]


def list_notes(profile: Profile) -> list[str]:
    """What else the profile says."""
    own = _closing_warnings(profile)
    return [*profile.remarks(), *(note for note in profile.notes if note not in own)]


def misses_whole(profile: Profile) -> bool:
    """Return whether the layers do not add up to the whole model at some micro-batch size."""
    return any(
        abs(whole.closing_ratio - 1)
        > max(MISSES, STAMPS_SECONDS / (whole.forward_seconds + whole.backward_seconds))
        for whole in profile.whole
    )


def _closing_warnings(profile: Profile) -> set[str]:
    """All that may be among its notes."""
    measured: tuple[list[str], ...] = ([], profile.notes)
    return {text for own in measured for whole in profile.whole for text in closing_warning(whole, own)}


def closing_warning(whole: WholeMeasurement, notes: Sequence[str]) -> list[str]:
    """The warning that the layers do not add up to the whole model; `notes`: of the measurement, which say
    where a device waited for its host."""
    if abs(whole.closing_ratio - 1) <= CLOSES:
        return []
    size = f"micro-batch size {whole.micro_batch_size}"
    if any(note.startswith(f"{size}: {WAITED}") for note in notes):
        advice = "a larger micro-batch keeps the device busy, a quiet machine changes little"
    elif whole.spread is None:
        advice = "one pass was measured, and a larger budget tells more"
    elif whole.spread > CLOSES:
        advice = "measure again on a quiet machine"
    else:
        advice = f"repeated passes agree within {CLOSES:.0%}, so that a quiet machine changes little"
    return [
        f"{size}: the layers add up to {whole.closing_ratio:.3f} of the whole model's time, more than "
        f"{CLOSES:.0%} off; {advice}"
    ]


def _of_the_device(profile: Profile, topology: Topology) -> Iterator[str]:
    measured = profiled_device(profile)
    name = measured.name or measured.device
    kinds = [kind.name for kind in topology.kinds if kind.speed == 1 and not kind.profile]
    if measured.is_cpu:
        yield _of_a_processor(name, topology)
    elif not measured.is_known:
        if kinds:
            yield (
                "the profile does not say which device its seconds are of: they are taken to be those of "
                + ("the devices of the plan" if kinds == [UNNAMED] else " and ".join(kinds))
            )
    elif others := [kind for kind in kinds if measured.name and not same_device(kind, measured.name)]:
        yield f"the layers' seconds are those of {name}: for {' and '.join(others)}, profile the model on one"
    if profile.estimated:
        yield "the profile is an estimate, not a measurement"


def _of_a_processor(name: str, topology: Topology) -> str:
    gpus = [kind.name for kind in gpus_as_profiled(topology)]
    if gpus:
        return (
            f"the seconds are those of a processor, {name}, and not of {' and '.join(gpus)}: "
            "seconds_of='cpu' says that this is meant"
        )
    if any(is_gpu(kind.name) for kind in topology.kinds):
        return f"the seconds of the GPUs are made of those of a processor, {name}, by the stated speeds"
    return (
        f"the layers' seconds are those of this processor, {name}, and the devices are taken to be such "
        "processors: for GPUs profile on one, or estimate with device='analytic:h100'"
    )


def _of_the_spread(profile: Profile) -> Iterator[str]:
    wide = [(whole, whole.spread) for whole in profile.whole if whole.spread and whole.spread > CLOSES]
    if wide:
        sizes = ", ".join(str(whole.micro_batch_size) for whole, _ in wide)
        most = max(spread for _, spread in wide)
        yield f"micro-batch size {sizes}: the measured passes vary by up to {most:.0%}; the machine was busy"


def _of_groups(profile: Profile) -> Iterator[str]:
    if profile.tensor_parallel > 1:
        yield (
            f"each device of this plan is a group of {profile.tensor_parallel} neighbours that share every "
            "layer, as they were measured"
        )


def _of_an_interruption(profile: Profile) -> Iterator[str]:
    missing = [left.micro_batch_size for left in profile.unmeasured if left.reason == "interrupted"]
    if missing:
        sizes = ", ".join(map(str, missing))
        yield f"the profile was interrupted: micro-batch size {sizes} was not measured"
