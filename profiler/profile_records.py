"""The records in a profile's file: layers and their costs, the whole model, the loss, shared tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from ..cost_models.document import (
    Bytes,
    DeviceCount,
    Dimension,
    LayerBound,
    LayerName,
    Record,
    Samples,
    Seconds,
)
from ..cost_models.memory import workspace_before_loss
from ..cost_models.quantities import MOST_LAYERS

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
