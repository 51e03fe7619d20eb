"""The layers of a profile file, and what they take at any micro-batch size.

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
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ..cost_models.errors import UsageError
from .documents import LARGEST, MOST_SECONDS, Table

Vector = npt.NDArray[np.float64]

SECONDS = ("forward_seconds", "backward_seconds")
HOST = ("forward_host_seconds", "backward_host_seconds")
FORWARD = ("forward_seconds", "forward_host_seconds")
PARTS = ("backward_input_seconds", "backward_weight_seconds")
BYTES = ("output_bytes", "saved_bytes", "saved_input_bytes", "workspace_bytes")
PENDING = "pending_gradient_bytes"
WITH_LOSS = (*SECONDS, *HOST, "backward_input_seconds", "saved_bytes")
"""What the loss adds to the last layer: its own figures, and its whole backward to the input's gradient."""
WEIGHT_SHARE = 0.5
"""Of a backward that was not measured in two parts: the gradient of the weights, where a layer trains any."""
LARGEST_SIZE = 2**24


@dataclass(frozen=True)
class SharedTensor:
    """A weight or buffer that several layers use (their numbers), and that may be on several stages."""

    name: str
    bytes: float
    trains: bool
    users: tuple[int, ...]

    def is_used(self, first: int, end: int) -> bool:
        """Whether a user is among the layers `first` to `end` - 1."""
        return any(user in range(first, end) for user in self.users)


@dataclass(frozen=True, eq=False)
class Layers:
    """The layers at every measured size: `figures` by name, each of shape (layers, sizes). A part of the
    backward that was not measured is missing. `adding`: of a backward, seconds to add to gradients that are
    there; the first of a step finds none."""

    where: str
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    cut_after: tuple[bool, ...]
    parameters: Vector
    trainable: Vector
    buffers: Vector
    adding: Vector
    input_bytes_per_sample: float
    figures: dict[str, Vector]
    scales: bool
    closing: dict[int, float]
    shared: tuple[SharedTensor, ...] = ()
    largest: Vector | None = None
    """Bytes of each layer's largest trainable parameter; None: not known."""
    shared_buffers: tuple[SharedTensor, ...] = ()
    refused: frozenset[int] = frozenset()
    """Sizes that the model does not take."""

    def __len__(self) -> int:
        return len(self.names)

    def reaches(self, size: int) -> bool:
        """Whether costs at that size can be had at all."""
        return size not in self.refused and self._has_costs(size)

    def _has_costs(self, size: int) -> bool:
        return len(self.sizes) > 1 or self.scales or size == self.sizes[0]

    def at(self, size: int) -> dict[str, Vector]:
        """Every figure of all layers at a micro-batch size of one device. Raises UsageError."""
        if size in self.refused:
            raise UsageError(
                f"{self.where}: the model does not take micro-batch size {size}",
                "Make a plan with larger micro-batches.",
            )
        if not self._has_costs(size):
            raise UsageError(
                f"{self.where}: has no costs at micro-batch size {size}, only at {self.sizes[0]}",
                "Profile more sizes, or check the plan's micro-batch size and replicas.",
            )
        if size not in self._costs_by_size:
            self._costs_by_size[size] = self._compute_costs(size)
        return self._costs_by_size[size]

    def uncertainty(self, size: int) -> float | None:
        """How far the closing ratio of the sizes around this one is from 1, at most."""
        if not all(own in self.closing for own in self.sizes):
            return None
        right = min(bisect_left(self.sizes, size), len(self.sizes) - 1)
        around = {right} if self.sizes[right] == size else {max(right - 1, 0), right}
        return max(abs(self.closing[self.sizes[index]] - 1) for index in around)

    @cached_property
    def _costs_by_size(self) -> dict[int, dict[str, Vector]]:
        return {}

    def _compute_costs(self, size: int) -> dict[str, Vector]:
        costs = {name: self._at(name, values, size) for name, values in self.figures.items()}
        trains = np.where(self.trainable > 0, WEIGHT_SHARE, 0.0)
        costs.setdefault("backward_input_seconds", costs["backward_seconds"] * (1 - trains))
        costs.setdefault("backward_weight_seconds", costs["backward_seconds"] * trains)
        adding = np.minimum(self.adding, costs["backward_seconds"])
        costs["first_backward_seconds"] = costs["backward_seconds"] - adding
        weight = costs["backward_weight_seconds"]
        costs["first_backward_weight_seconds"] = weight - np.minimum(adding, weight)
        costs.setdefault(PENDING, np.maximum(costs["saved_bytes"], costs["output_bytes"]))
        costs.setdefault("loss_bytes", np.zeros(len(self)))
        return costs

    def _at(self, name: str, values: Vector, size: int) -> Vector:
        if size in self.sizes:
            return values[:, self.sizes.index(size)]
        if len(self.sizes) == 1:
            return values[:, 0] if name in HOST else values[:, 0] * size / self.sizes[0]
        right = min(max(bisect_left(self.sizes, size), 1), len(self.sizes) - 1)
        low, high = self.sizes[right - 1], self.sizes[right]
        left_values, right_values = values[:, right - 1], values[:, right]
        line = left_values + (right_values - left_values) * ((size - low) / (high - low))
        if size < self.sizes[0]:
            return np.maximum(line, left_values * (size / low))
        if size > self.sizes[-1]:
            return np.maximum(line, right_values)
        if name in (*SECONDS, *PARTS):
            for layer, (one, other) in enumerate(zip(left_values, right_values, strict=True)):
                if 0 < one * (high / low) < other <= one * (high / low) ** 2:
                    line[layer] = one * (other / one) ** math.log(size / low, high / low)
        return line


def read_layers(table: Table) -> Layers:
    """The layers of a profile file; the last one's figures hold the loss'. Raises FileError."""
    if table.text("device", "cpu") == "meta":
        raise table.refusal("device", "meta", "a device that has seconds")
    own = table.tables("layers", least=1)
    names = tuple(layer.text("name") for layer in own)
    if len(set(names)) < len(names):
        raise table.refusal("layers", list(names), "layers of different names")
    sizes = _sizes(own[0])
    measured = [_costs(layer, sizes) for layer in own]
    optional = [
        name for name in PARTS if all(cost.has(part) for row in measured for cost in row for part in PARTS)
    ]
    figures = {
        name: np.array([[_figure(cost, name) for cost in row] for row in measured])
        for name in (*SECONDS, *HOST, *BYTES, *optional)
    }
    closing = {
        whole.count("micro_batch_size", least=1): whole.number("closing_ratio", most=MOST_SECONDS)
        for whole in table.tables("whole")
    }
    for column, cost in enumerate(measured[0]):
        ratio = 1.0 if cost.has("forward_host_seconds") else closing.get(sizes[column], 1.0)
        for name in (*SECONDS, *optional):
            figures[name][:, column] /= ratio if 0.5 <= ratio <= 2 else 1.0
    if all(cost.has(PENDING) for row in measured for cost in row):
        figures[PENDING] = np.array([[_figure(cost, PENDING) for cost in row] for row in measured])
    if table.has("loss"):
        _add_loss(figures, _costs(table.table("loss"), sizes))
    parameters = _column(own, "parameter_bytes", None)
    trains = [
        layer.count("trainable_bytes") if layer.has("trainable_bytes") else layer.count("parameter_bytes")
        for layer in own
    ]
    return Layers(
        where=table.where,
        names=names,
        sizes=sizes,
        cut_after=(*(layer.flag("cut_after", True) for layer in own[:-1]), False),
        parameters=parameters,
        trainable=np.array(trains, dtype=np.float64),
        buffers=_column(own, "buffer_bytes", 0),
        adding=np.array([layer.number("accumulation_seconds", 0.0, most=MOST_SECONDS) for layer in own]),
        input_bytes_per_sample=float(table.count("input_bytes_per_sample", 0)),
        figures=figures,
        scales=table.flag("scales_with_samples", False),
        closing=closing,
        shared=_shared(table, names, "tied"),
        shared_buffers=_shared(table, names, "shared_buffers"),
        refused=frozenset(
            size.count("micro_batch_size", least=1)
            for size in table.tables("unmeasured")
            if size.text("reason") == "refused"
        ),
        largest=(
            _column(own, "largest_parameter_bytes", None)
            if all(layer.has("largest_parameter_bytes") for layer in own)
            else None
        ),
    )


def _shared(table: Table, names: tuple[str, ...], key: str) -> tuple[SharedTensor, ...]:
    """By first user; those without bytes have all their users on one stage."""
    tensors = []
    for own in table.tables(key):
        if not own.has("bytes"):
            continue
        users = own.texts("layers")
        if len(users) < 2 or not set(users).issubset(names):
            raise own.refusal("layers", users, "two layers of the profile or more")
        numbers = tuple(sorted(names.index(user) for user in users))
        tensors.append(
            SharedTensor(own.text("tensor"), float(own.count("bytes")), own.flag("trainable", True), numbers)
        )
    return tuple(sorted(tensors, key=lambda own: own.users[0]))


def _column(own: list[Table], key: str, default: int | None) -> Vector:
    return np.array([layer.count(key, default) for layer in own], dtype=np.float64)


def _sizes(layer: Table) -> tuple[int, ...]:
    costs = layer.tables("costs", least=1)
    sizes = tuple(cost.count("micro_batch_size", least=1, most=LARGEST_SIZE) for cost in costs)
    if list(sizes) != sorted(set(sizes)):
        raise layer.refusal("costs", list(sizes), "of ascending micro-batch sizes")
    return sizes


def _costs(layer: Table, sizes: tuple[int, ...]) -> list[Table]:
    if _sizes(layer) != sizes:
        raise layer.refusal("costs", [], f"at the micro-batch sizes of the first layer, {list(sizes)[:8]}")
    return layer.tables("costs")


def _figure(cost: Table, name: str) -> float:
    if name in (*BYTES, PENDING):
        needed = name in ("output_bytes", "saved_bytes")
        return float(cost.count(name, None if needed else 0, most=LARGEST))
    return cost.number(name, None if name in SECONDS else 0.0, most=MOST_SECONDS)


def _add_loss(figures: dict[str, Any], loss: list[Table]) -> None:
    """The last layer computes the loss, too; `loss_bytes` are what that saves. Nothing of the loss is held
    while the layer itself runs: of its workspace counts what exceeds the loss' saved bytes, or what the loss
    needs above them."""
    figures["loss_bytes"] = np.zeros_like(figures["saved_bytes"])
    for column, cost in enumerate(loss):
        figures["loss_bytes"][-1, column] = _figure(cost, "saved_bytes")
        if cost.has("forward_workspace_bytes"):
            own = figures["workspace_bytes"][-1, column] - _figure(cost, "saved_bytes")
            figures["workspace_bytes"][-1, column] = max(own, _figure(cost, "workspace_bytes"), 0.0)
        for name in WITH_LOSS:
            if name in figures:
                key = "backward_seconds" if name == "backward_input_seconds" else name
                figures[name][-1, column] += _figure(cost, key)
