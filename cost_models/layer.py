"""The measured chain: seconds and bytes of every layer by micro-batch size, interpolated between sizes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, floor

import numpy as np
import numpy.typing as npt

from .errors import UsageError

Vector = npt.NDArray[np.float64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class TiedWeight:
    """A weight that the `layers` use (their numbers, ascending; two at least). Its bytes count as the first
    one's in a chain. `trainable_bytes`: 0 of a weight that is frozen."""

    name: str
    bytes: float
    trainable_bytes: float
    layers: tuple[int, ...]

    def is_used(self, first: int, end: int) -> bool:
        """Whether a layer from `first` to before `end` uses it."""
        return any(first <= layer < end for layer in self.layers)


@dataclass(frozen=True)
class SharedBuffer:
    """A buffer that the `layers` (ascending; two at least) read and none writes. Each stage with a user has
    one; its bytes count as the first user's in a chain."""

    name: str
    bytes: float
    layers: tuple[int, ...]


MEASURED = (
    "forward_seconds",
    "backward_seconds",
    "output_bytes",
    "saved_bytes",
    "saved_input_bytes",
    "workspace_bytes",
    "forward_host_seconds",
    "backward_host_seconds",
)


_PARTS = ("backward_input_seconds", "backward_weight_seconds")
_OPTIONAL = (*_PARTS, "pending_gradient_bytes", "loss_saved_bytes")
_OF_THE_DEVICE = ("forward_seconds", "backward_seconds", *_PARTS)
_OF_THE_HOST = ("forward_host_seconds", "backward_host_seconds")
"""The same for any number of samples: launching a kernel takes as long for a small one."""


PARTS_LIMIT = 1.3
"""Ratio of a backward in two parts to a whole one, above which pplan warns."""


def parts_warning(size: float, ratio: float) -> list[str]:
    """Warning about schedules that split the backward, for layers of which both parts take `ratio` times the
    whole backward."""
    if ratio <= PARTS_LIMIT:
        return []
    return [
        f"micro-batch size {size:g}: a backward in two parts takes {ratio:.2f} times as long as a whole one; "
        "zero-bubble schedules pay for it: compare them with 1f1b, or use a larger micro-batch"
    ]


@dataclass(frozen=True)
class LayerCosts:
    """Every layer of a chain at one micro-batch size: vectors of one entry a layer, seconds and bytes.

    `trainable_bytes` are those of the parameters that get gradients; those of `tied` weights count with their
    first user. `input_bytes` is what the first layer is fed. `spread` and `uncertainty` as of `Chain`, None
    where they are not known. `outside` says in words where the size lies outside the measured ones, or the
    costs were scaled from the only one (empty: neither).
    """

    size: float
    input_bytes: float
    parameter_bytes: Vector
    trainable_bytes: Vector
    buffer_bytes: Vector
    forward_seconds: Vector
    backward_seconds: Vector
    output_bytes: Vector
    saved_bytes: Vector
    saved_input_bytes: Vector
    workspace_bytes: Vector
    forward_host_seconds: Vector
    backward_host_seconds: Vector
    backward_input_seconds: Vector | None = None
    backward_weight_seconds: Vector | None = None
    accumulation_seconds: Vector | None = None
    spread: Vector | None = None
    uncertainty: float | None = None
    outside: str = ""
    tied: tuple[TiedWeight, ...] = ()
    largest_parameters: Vector | None = None
    """As of `Chain`."""
    shared_buffers: tuple[SharedBuffer, ...] = ()
    pending_gradient_bytes: Vector | None = None
    loss_saved_bytes: Vector | None = None
    """As of `Chain`."""

    @property
    def pending_bytes(self) -> Vector:
        """(layers,): gradients that the first part of a backward leaves for the second. Where they were not
        counted, the larger of what a layer saves and what it hands on: a gradient that a weight waits for is
        as large as what was computed with that weight, which the next operation mostly saves."""
        if self.pending_gradient_bytes is not None:
            return self.pending_gradient_bytes
        return np.maximum(self.saved_bytes, self.output_bytes)

    @property
    def loss_bytes(self) -> float:
        """Of what the last layer saves, the loss' own."""
        return 0.0 if self.loss_saved_bytes is None else float(self.loss_saved_bytes[-1])

    @property
    def offloaded_bytes(self) -> Vector:
        """(layers,): what goes to the host where saved tensors do: all but what the loss saves."""
        if self.loss_saved_bytes is None:
            return self.saved_bytes
        return np.maximum(self.saved_bytes - self.loss_saved_bytes, 0.0)

    @property
    def largest_bytes(self) -> Vector:
        """(layers,): bytes of each layer's largest trainable parameter; where that is not known, of all."""
        return self.trainable_bytes if self.largest_parameters is None else self.largest_parameters

    @property
    def accumulation(self) -> Vector:
        """(layers,): of the backward seconds those that the first micro-batch of a step does not take."""
        return self.backward_seconds - self.mean_backward(1.0)

    def mean_backward(self, first_share: float) -> Vector:
        """(layers,): backward seconds, on average over micro-batches of which such a share is the first of a
        step; 1: of the first. It adds to no gradients."""
        if self.accumulation_seconds is None:
            return self.backward_seconds
        return np.maximum(self.backward_seconds - first_share * self.accumulation_seconds, 0.0)


@dataclass(frozen=True, eq=False)
class Chain:
    """The layers of a model, measured at `sizes` samples a micro-batch (ascending).

    The measured arrays have shape (layers, sizes); `cut_after` shape (layers,), false where a stage may not
    end (and for the last layer).
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    parameter_bytes: Vector
    trainable_bytes: Vector
    buffer_bytes: Vector
    cut_after: npt.NDArray[np.bool_]
    input_bytes_per_sample: float
    forward_seconds: Vector
    backward_seconds: Vector
    output_bytes: Vector
    saved_bytes: Vector
    saved_input_bytes: Vector
    workspace_bytes: Vector
    forward_host_seconds: Vector
    backward_host_seconds: Vector
    backward_input_seconds: Vector | None = None
    backward_weight_seconds: Vector | None = None
    """Backward in two parts, as zero-bubble schedules run it; None: not measured."""
    accumulation_seconds: Vector | None = None
    """Of the backward, shape (layers,): to add gradients to those that are there, which the first
    micro-batch of a step does not (`zero_grad()` sets them to None); as long at any size. None: not known."""
    scales_with_samples: bool = False
    """With one size: whether costs at any other are had from it, in proportion to the samples."""
    uncertainty: Vector | None = None
    """Share by which the layers' seconds miss the whole model's, shape (sizes,); None: not known."""
    spread: Vector | None = None
    """Interquartile range of a layer's forward + backward over the median, shape (layers, sizes); None: not
    known."""
    whole_spread: Vector | None = None
    """The same of the whole model, shape (sizes,): noise from pass to pass that all layers share."""
    tied: tuple[TiedWeight, ...] = ()
    """Weights that several layers use, where cuts between these are allowed."""
    largest_parameters: Vector | None = None
    """Bytes of each layer's largest trainable parameter, shape (layers,); None: not known."""
    shared_buffers: tuple[SharedBuffer, ...] = ()
    """Buffers likewise, which each stage with a user has."""
    pending_gradient_bytes: Vector | None = None
    """Gradients that the first part of a backward leaves for the second, each storage once, with the last
    layer that needs it, shape (layers, sizes); None: not counted."""
    batch_norms: tuple[str, ...] = ()
    least_size: int = 0
    """Samples that a replica must get of a micro-batch; the options may ask for more than 1."""
    """Names of layers that normalise each micro-batch by itself."""
    loss_saved_bytes: Vector | None = None
    """Of what the last layer saves, the loss' own, shape (layers, sizes), 0 of the others; None: no loss."""
    refused: Mapping[int, str] = field(default_factory=dict)
    """Sizes that the model does not take, or of which it makes something else, and why."""

    def __len__(self) -> int:
        return len(self.names)

    @property
    def max_stages(self) -> int:
        """Stages when every allowed cut is made."""
        return int(self.cut_after.sum()) + 1

    def name_range(self, first: int, end: int) -> str:
        """The name of the one layer from `first` to before `end`, or those of the first and the last."""
        return self.names[first] if end - first == 1 else f"{self.names[first]} to {self.names[end - 1]}"

    def reaches(self, size: float, *, past_largest: bool = False) -> bool:
        """Whether costs at `size` can be had, past the largest measured size only with `past_largest`.

        Sizes below the smallest are extrapolated from the two smallest; with one measured size there is
        nothing to draw a line through, and only that size can be had: any, where costs scale with samples.
        A refused size is never had, nor a share between two sizes of which one is, nor fewer samples than
        `least_size`.
        """
        return size >= self.least_size and self._is_costed(size, past_largest=past_largest)

    def _is_costed(self, size: float, *, past_largest: bool) -> bool:
        if self._refusal(size):
            return False
        if len(self.sizes) == 1:
            return self.scales_with_samples or size == self.sizes[0]
        return past_largest or size <= self.sizes[-1]

    def _refusal(self, size: float) -> str:
        return next((self.refused[own] for own in (floor(size), ceil(size)) if own in self.refused), "")

    def at(self, size: float, *, past_largest: bool = False) -> LayerCosts:
        """Costs of every layer for micro-batches of `size` samples (a replica's share may be a fraction).

        Between two measured sizes: the straight line between them, or, for seconds that grow faster than the
        samples, the power of the size through both, which is lower. Below the smallest: the line through the
        two smallest, but at least the smallest's share by samples. Past the largest: the line through the two
        largest, and only with `past_largest`. With `scales_with_samples`: the one size's, in proportion.

        Raises UsageError where the size cannot be had.
        """
        if size <= 0:
            raise UsageError(f"micro-batch size {size:g}: must be above 0", "Use at least one sample.")
        if refusal := self._refusal(size):
            raise UsageError(
                f"micro-batch size {size:g} is no size for this model: {refusal}",
                "Use larger micro-batches, or fewer replicas.",
            )
        if not self._is_costed(size, past_largest=past_largest):
            measured = ", ".join(str(s) for s in self.sizes)
            raise UsageError(
                f"micro-batch size {size:g} lies outside the measured sizes ({measured})",
                f"Measure it: pplan profile MODEL micro_batch_sizes='{measured.replace(' ', '')},{size:g}'",
            )
        names = [*MEASURED, *(name for name in _OPTIONAL if getattr(self, name) is not None)]
        values = {name: self._value(name, size) for name in names}
        return LayerCosts(
            size=size,
            input_bytes=self.input_bytes_per_sample * size,
            parameter_bytes=self.parameter_bytes,
            trainable_bytes=self.trainable_bytes,
            buffer_bytes=self.buffer_bytes,
            accumulation_seconds=self.accumulation_seconds,
            spread=self.spread_at(size),
            uncertainty=self.uncertainty_at(size),
            outside=self._outside(size),
            tied=self.tied,
            largest_parameters=self.largest_parameters,
            shared_buffers=self.shared_buffers,
            **values,
        )

    def without_tied_cuts(self) -> Chain:
        """The same with no cut between the users of one weight."""
        if not self.tied:
            return self
        cut_after = self.cut_after.copy()
        for weight in self.tied:
            cut_after[weight.layers[0] : weight.layers[-1]] = False
        return replace(self, cut_after=cut_after, tied=())

    def uncertainty_at(self, size: float) -> float | None:
        """Share by which seconds at `size` may be off: the larger of both measured sizes it lies between."""
        return self._larger(self.uncertainty, size)

    def whole_spread_at(self, size: float) -> float | None:
        """Spread of the whole model at `size`: the larger of both measured sizes it lies between."""
        return self._larger(self.whole_spread, size)

    def _larger(self, by_size: Vector | None, size: float) -> float | None:
        if by_size is None:
            return None
        right = min(int(np.searchsorted(self.sizes, size)), len(self.sizes) - 1)
        exact = self.sizes[right] == size
        return float(by_size[right if exact else max(right - 1, 0) : right + 1].max())

    def spread_at(self, size: float) -> Vector | None:
        """(layers,): the spread at `size`, on the line between the two sizes it lies between; outside the
        measured sizes that of the nearest."""
        if self.spread is None or len(self.sizes) == 1:
            return None if self.spread is None else self.spread[:, 0]
        right = int(np.clip(np.searchsorted(self.sizes, size), 1, len(self.sizes) - 1))
        low, high = self.sizes[right - 1], self.sizes[right]
        share = float(np.clip((size - low) / (high - low), 0.0, 1.0))
        return self.spread[:, right - 1] * (1 - share) + self.spread[:, right] * share

    def _outside(self, size: float) -> str:
        if self._is_scaled(size):
            one = self.sizes[0]
            return f"micro-batch size {size:g}: scaled with the samples from the one measured, {one}"
        if size > self.sizes[-1]:
            return f"micro-batch size {size:g} is past the largest measured ({self.sizes[-1]}): extrapolated"
        if size < self.sizes[0]:
            return f"micro-batch size {size:g} is below the smallest measured ({self.sizes[0]}): extrapolated"
        return ""

    def _is_scaled(self, size: float) -> bool:
        return len(self.sizes) == 1 and self.scales_with_samples and size != self.sizes[0]

    def _value(self, name: str, size: float) -> Vector:
        table: Vector = getattr(self, name)
        if not self._is_scaled(size):
            return self._interpolate(table, size, is_power=name in _OF_THE_DEVICE)
        return table[:, 0] if name in _OF_THE_HOST else table[:, 0] * (size / self.sizes[0])

    def _interpolate(self, table: Vector, size: float, *, is_power: bool) -> Vector:
        if size in self.sizes:
            return table[:, self.sizes.index(int(size))]
        right = int(np.clip(np.searchsorted(self.sizes, size), 1, len(self.sizes) - 1))
        low, high = self.sizes[right - 1], self.sizes[right]
        share = (size - low) / (high - low)
        line = table[:, right - 1] * (1 - share) + table[:, right] * share
        if share < 0:
            return np.maximum(line, table[:, 0] * (size / low))
        if share > 1:
            return np.maximum(line, table[:, right])
        return (
            _power_curve(table[:, right - 1], table[:, right], size / low, high / low, line)
            if is_power
            else line
        )


def _power_curve(low: Vector, high: Vector, size: float, larger: float, line: Vector) -> Vector:
    """Seconds in proportion to a power of the size between 1 and 2, where that leads from `low` to `high`;
    else the line: below 1 there is a fixed part, above 2 one of both is hardly more than noise.

    `size` and `larger` are in parts of the smaller size. Caches that larger batches outgrow bend the seconds
    upwards; benchmarks/left_out_sizes.py holds both curves against sizes that were measured and left out.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        exponent = (np.log(high) - np.log(low)) / np.log(larger)
    grows = (exponent > 1) & (exponent <= 2)
    return np.where(grows, low * size ** np.where(grows, exponent, 1.0), line)


def list_cut_points(chain: Chain) -> tuple[int, ...]:
    """First layers of the blocks that no cut may part, ascending, with len(chain) at the end."""
    return (0, *(int(i) + 1 for i in np.flatnonzero(chain.cut_after[:-1])), len(chain))


def align_profiles(chain: Chain, profiles: Mapping[str, Chain]) -> dict[str, Chain]:
    """The profiles, with the cuts of the chain."""
    for name, own in profiles.items():
        if own.names != chain.names:
            raise UsageError(
                f"{name}: has other layers than the plan's profile",
                "Profile the same model on that kind of device.",
            )
    return {name: replace(own, cut_after=chain.cut_after) for name, own in profiles.items()}


def copy_bytes(shared: Iterable[tuple[float, Sequence[int]]], cut_points: Sequence[int]) -> Floats:
    """(n, n): bytes of the copies in the layers from cut point i to before cut point j, of tensors with these
    bytes and users."""
    points = np.array(cut_points)
    copies = np.zeros((len(points),) * 2)
    for bytes, layers in shared:
        copies += bytes * (has_user(layers, points) & (points > layers[0])[:, None])
    return copies


def has_user(layers: Sequence[int], points: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """(n, n): whether one of the layers is from point i to before point j."""
    users = np.array([*layers, np.iinfo(np.int64).max])
    following = users[np.searchsorted(users[:-1], points)]
    has: npt.NDArray[np.bool_] = following[:, None] < points[None, :]
    return has
