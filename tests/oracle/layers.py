"""The layers of a profile, what they take at any micro-batch size, and the bytes of a part of them.

Between two measured sizes the straight line between them holds; for a layer's seconds that grow by more than
the samples, and by no more than their square, the power of the size through both. Below the smallest: the
line through the two smallest, but at least the smallest's share by samples; past the largest: the line
through the two largest, but at least the largest's figure. A profile of one size holds for that size alone,
or, where it says `scales_with_samples`, for any in proportion (seconds of the host stay as they are).

Where no launches of the first layer were measured, the seconds at a size are first divided by what the layers
came to of the whole model, unless that is below a half or above two.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]
Content = dict[str, Any]

SECONDS = ("forward_seconds", "backward_seconds")
HOST = ("forward_host_seconds", "backward_host_seconds")
PARTS = ("backward_input_seconds", "backward_weight_seconds")
BYTES = ("output_bytes", "saved_bytes", "saved_input_bytes", "workspace_bytes")
PENDING = "pending_gradient_bytes"
WITH_LOSS = (*SECONDS, *HOST, "backward_input_seconds", "saved_bytes")
"""What the loss adds to the last layer: its own figures, and its whole backward to the input's gradient."""
WEIGHT_SHARE = 0.5
"""Share of the weights' gradient in a backward that was measured whole, where a layer trains any."""


class SharedTensor(NamedTuple):
    """A weight or buffer that several layers use (their numbers), and that may be on several stages."""

    name: str
    bytes: float
    trains: bool
    users: list[int]

    def is_used(self, first: int, end: int) -> bool:
        """True if a user is among the layers `first` to `end` - 1."""
        return any(first <= user < end for user in self.users)

    def is_copied(self, first: int, end: int) -> bool:
        """True if one is, and an earlier layer is a user, too."""
        return self.users[0] < first and self.is_used(first, end)


@dataclass(frozen=True, eq=False)
class Layers:
    """The layers at every measured size: `figures` by name, each of shape (layers, sizes). `adding`: of a
    backward, seconds to add to gradients that are there; the first of a step finds none."""

    names: list[str]
    sizes: list[int]
    cut_after: list[bool]
    parameters: Vector
    trainable: Vector
    buffers: Vector
    largest: Vector
    """Bytes of each layer's largest trainable parameter; of all where that is not known."""
    adding: Vector
    input_bytes_per_sample: float
    figures: dict[str, Vector]
    closing: dict[int, float]
    shared: list[SharedTensor]
    shared_buffers: list[SharedTensor]
    costs_by_size: dict[int, dict[str, Vector]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.names)

    def at(self, size: int) -> dict[str, Vector]:
        """Every figure of all layers at a micro-batch size of one device."""
        if size not in self.costs_by_size:
            self.costs_by_size[size] = self._compute_costs(size)
        return self.costs_by_size[size]

    def uncertainty(self, size: int) -> float | None:
        """How far the closing ratio of the sizes around this one is from 1, at most."""
        if not set(self.sizes) <= set(self.closing):
            return None
        right = min(bisect_left(self.sizes, size), len(self.sizes) - 1)
        left = right if self.sizes[right] == size else max(right - 1, 0)
        return max(abs(self.closing[near] - 1) for near in self.sizes[left : right + 1])

    def _compute_costs(self, size: int) -> dict[str, Vector]:
        costs = {name: self._at(name, values, size) for name, values in self.figures.items()}
        trains = np.where(self.trainable > 0, WEIGHT_SHARE, 0.0)
        costs.setdefault("backward_input_seconds", costs["backward_seconds"] * (1 - trains))
        costs.setdefault("backward_weight_seconds", costs["backward_seconds"] * trains)
        for name in ("backward_seconds", "backward_weight_seconds"):
            costs[f"first_{name}"] = np.maximum(costs[name] - self.adding, 0.0)
        costs.setdefault(PENDING, np.maximum(costs["saved_bytes"], costs["output_bytes"]))
        costs.setdefault("loss_bytes", np.zeros(len(self)))
        return costs

    def _at(self, name: str, values: Vector, size: int) -> Vector:
        if size in self.sizes:
            return values[:, self.sizes.index(size)]
        if len(self.sizes) == 1:
            return values[:, 0] * (1 if name in HOST else size / self.sizes[0])
        right = min(max(bisect_left(self.sizes, size), 1), len(self.sizes) - 1)
        low, high = self.sizes[right - 1 : right + 1]
        left_values, right_values = values[:, right - 1], values[:, right]
        line = left_values + (right_values - left_values) * ((size - low) / (high - low))
        if size < low:
            return np.maximum(line, left_values * (size / low))
        if size > high:
            return np.maximum(line, right_values)
        if name in (*SECONDS, *PARTS):
            for layer, (one, two) in enumerate(zip(left_values, right_values, strict=True)):
                if 0 < one * (high / low) < two <= one * (high / low) ** 2:
                    line[layer] = one * (two / one) ** math.log(size / low, high / low)
        return line


def read_layers(profile: Content) -> Layers:
    """The layers of a profile; the last one's figures hold the loss'."""
    layers = profile["layers"]
    names, costs = [layer["name"] for layer in layers], [layer["costs"] for layer in layers]
    every = [cost for row in costs for cost in row]
    optional = [
        name
        for names_together in (PARTS, (PENDING,))
        for name in names_together
        if all(cost.get(other) is not None for cost in every for other in names_together)
    ]
    figures = {
        name: np.array([[float(cost.get(name) or 0) for cost in row] for row in costs])
        for name in (*SECONDS, *HOST, *BYTES, *optional)
    }
    closing = {row["micro_batch_size"]: row["closing_ratio"] for row in profile.get("whole", [])}
    for column, cost in enumerate(costs[0]):
        measured = cost.get("forward_host_seconds") is not None
        ratio = 1.0 if measured else closing.get(cost["micro_batch_size"], 1.0)
        for name in {*SECONDS, *PARTS} & set(figures):
            figures[name][:, column] /= ratio if 0.5 <= ratio <= 2 else 1.0
    if profile.get("loss"):
        _add_loss(figures, profile["loss"]["costs"])
    parameters = _column(layers, "parameter_bytes")
    trained = [layer.get("trainable_bytes") for layer in layers]
    trainable = np.where([own is None for own in trained], parameters, _column(layers, "trainable_bytes"))
    largest = all(layer.get("largest_parameter_bytes") is not None for layer in layers)
    return Layers(
        names=names,
        sizes=[cost["micro_batch_size"] for cost in costs[0]],
        cut_after=[*(layer.get("cut_after", True) for layer in layers[:-1]), False],
        parameters=parameters,
        trainable=trainable,
        buffers=_column(layers, "buffer_bytes"),
        largest=_column(layers, "largest_parameter_bytes") if largest else trainable,
        adding=_column(layers, "accumulation_seconds"),
        input_bytes_per_sample=float(profile.get("input_bytes_per_sample", 0)),
        figures=figures,
        closing=closing,
        shared=_shared(profile.get("tied", []), names),
        shared_buffers=_shared(profile.get("shared_buffers", []), names),
    )


def _shared(rows: Sequence[Content], names: list[str]) -> list[SharedTensor]:
    """By first user; those without bytes have all their users on one stage."""
    tensors = [
        SharedTensor(
            row["tensor"],
            float(row["bytes"]),
            row.get("trainable", True),
            sorted(map(names.index, row["layers"])),
        )
        for row in rows
        if row.get("bytes") is not None
    ]
    return sorted(tensors, key=lambda tensor: tensor.users[0])


def _column(layers: Sequence[Content], key: str) -> Vector:
    return np.array([layer.get(key) or 0 for layer in layers], dtype=np.float64)


def _add_loss(figures: dict[str, Vector], loss: Sequence[Content]) -> None:
    """The last layer computes the loss, too; `loss_bytes` are what that saves. Nothing of the loss is held
    while the layer itself runs: of its workspace counts what exceeds the loss' saved bytes, or what the loss
    needs above them."""
    figures["loss_bytes"] = np.zeros_like(figures["saved_bytes"])
    for column, cost in enumerate(loss):
        figures["loss_bytes"][-1, column] = cost["saved_bytes"]
        if cost.get("forward_workspace_bytes") is not None:
            needed = figures["workspace_bytes"][-1, column] - cost["saved_bytes"]
            figures["workspace_bytes"][-1, column] = max(needed, cost.get("workspace_bytes") or 0, 0.0)
        for name in set(WITH_LOSS) & set(figures):
            key = "backward_seconds" if name == "backward_input_seconds" else name
            figures[name][-1, column] += cost.get(key) or 0.0


@dataclass(frozen=True)
class PartBytes:
    """Bytes of a part of the layers at a replica's micro-batch size.

    `waiting`: what a micro-batch in flight holds; `input`: what it holds instead where it recomputes. Where
    it recomputes its first layers, or offloads, it holds `besides` always, and `waiting` at work. `copied`:
    trainable bytes of weights whose first user is in an earlier part. `neighbours`: the parameters of two
    layers in a row at most, which ZeRO has whole at a time. Where backwards are in two parts: `output` stays
    to the end, `pending` are the gradients that B leaves for W, `dropped` is what B frees, and
    `layer_workspace` the most that one layer needs.
    """

    parameters: float
    trainable: float
    buffers: float
    waiting: float
    input: float
    received: float
    sent: float
    workspace: float
    neighbours: float
    copied: float
    largest: float
    output: float
    pending: float
    dropped: float
    layer_workspace: float
    saved_input: float
    besides: float = 0.0
    offloads: bool = False

    def with_buffers(self, micro_batches: int) -> PartBytes:
        """In PyTorch's pipelining, with whole backwards: every micro-batch of a step has a buffer for what
        comes in, where inputs in flight lie, and one for the gradient of what goes out; what goes out of
        those in flight, and the gradient of what came in, are there besides, and one gradient more."""
        output = self.output if self.received or self.sent else 0.0
        again = max(self.received - self.saved_input, 0.0) + output
        return replace(
            self,
            waiting=self.waiting + (0.0 if self.offloads else again),
            input=self.input + output,
            received=self.received * (micro_batches + 1),
            sent=self.sent * micro_batches,
        )


def part_bytes(layers: Layers, first: int, end: int, size: int, mode: str = "never") -> PartBytes:
    """Bytes of the layers `first` to `end` - 1, which recompute `mode`."""
    costs, rows = layers.at(size), slice(first, end)
    saved, workspace = costs["saved_bytes"][rows], costs["workspace_bytes"][rows]
    received = float(costs["output_bytes"][first - 1]) if first else 0.0
    saved_before, parameters = saved.cumsum(), layers.parameters[rows]
    copies = [weight for weight in layers.shared if weight.is_copied(first, end)]
    copied = [weight.bytes for weight in copies if weight.trains]
    buffers = sum(tensor.bytes for tensor in layers.shared_buffers if tensor.is_copied(first, end))
    output = float(costs["output_bytes"][end - 1])
    part = PartBytes(
        parameters=float(parameters.sum()) + sum(weight.bytes for weight in copies),
        trainable=float(layers.trainable[rows].sum()) + sum(copied),
        buffers=float(layers.buffers[rows].sum()) + buffers,
        waiting=float(saved.sum() + costs["saved_input_bytes"][first]),
        saved_input=float(costs["saved_input_bytes"][first]),
        input=received if first else layers.input_bytes_per_sample * size,
        received=received,
        sent=output if end < len(layers) else 0.0,
        workspace=max(float((saved_before + workspace).max() - saved_before[-1]), 0.0),
        neighbours=max(float((parameters[1:] + parameters[:-1]).max(initial=0.0)), float(parameters[0])),
        copied=sum(copied),
        largest=max([float(layers.largest[rows].max()), *copied]),
        output=output,
        pending=float(costs[PENDING][rows].sum()) if first > 0 else 0.0,
        dropped=output + float(costs["loss_bytes"][-1]) if first > 0 and end == len(layers) else 0.0,
        layer_workspace=float(workspace.max()),
    )
    if mode == "offload":
        return _on_host(layers, part, first, end, size)
    return _run_first_again(layers, part, first, end, size, mode) if mode.startswith("first_") else part


def count_again(mode: str, layers: int) -> int:
    """How many layers of a part run again."""
    if mode.startswith("first_"):
        return int(mode.removeprefix("first_"))
    return 0 if mode in ("never", "offload") else layers


def _run_first_again(
    layers: Layers, part: PartBytes, first: int, end: int, size: int, mode: str
) -> PartBytes:
    """The bytes of the part that runs some first layers again: in flight it holds its input and what the
    others save; at work all that while the others are, then what the first save instead of them."""
    middle = first + count_again(mode, end - first)
    first_part, rest = (part_bytes(layers, *bounds, size) for bounds in ((first, middle), (middle, end)))
    more = max(first_part.waiting - rest.waiting, 0.0)
    needed = max(rest.workspace, first_part.waiting - rest.waiting + first_part.workspace, 0.0)
    return replace(part, waiting=more, besides=rest.waiting, workspace=needed - more)


def offloaded(layers: Layers, first: int, end: int, size: int) -> Vector:
    """By layer from `first` to `end` - 1, what it saves that waits on the host: not what the loss saves."""
    costs = layers.at(size)
    return np.maximum(costs["saved_bytes"] - costs["loss_bytes"], 0.0)[first:end]


def _on_host(layers: Layers, part: PartBytes, first: int, end: int, size: int) -> PartBytes:
    """The bytes of the part that offloads. In flight it holds its input, and what the loss behind it saved;
    at work besides what is largest of one of its layers: what that is handed, where it is not the first, and
    saves, and works with."""
    costs = layers.at(size)
    at_work = offloaded(layers, first, end, size)
    at_work[1:] += costs["output_bytes"][first : end - 1]
    room = float((at_work + costs["workspace_bytes"][first:end]).max() - at_work.max())
    loss = float(costs["loss_bytes"][first:end].sum())
    return replace(part, waiting=float(at_work.max()), besides=loss, workspace=room, offloads=True)
