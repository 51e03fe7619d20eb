"""Measured layer chain: seconds and bytes of every layer by micro-batch size, interpolated between sizes."""

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
    """Weight that several layers use. In a chain its bytes count for the first of them.

    Attributes:
        name: Name of the parameter.
        bytes: Bytes of the weight.
        trainable_bytes: Bytes that get gradients. 0 for a frozen weight.
        layers: Numbers of the layers that use it, ascending, at least two.
    """

    name: str
    bytes: float
    trainable_bytes: float
    layers: tuple[int, ...]

    def is_used(self, first: int, end: int) -> bool:
        """Return whether a layer in the range [first, end) uses the weight."""
        return any(first <= layer < end for layer in self.layers)


@dataclass(frozen=True)
class SharedBuffer:
    """Buffer that several layers read and none writes. Every stage with one of them holds a copy.

    Attributes:
        name: Name of the buffer.
        bytes: Bytes of the buffer. In a chain they count for the first layer.
        layers: Numbers of the layers that read it, ascending, at least two.
    """

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
"""Seconds that do not depend on the number of samples: a kernel launch takes as long for a small kernel."""


PARTS_LIMIT = 1.3
"""Largest ratio of a backward in two parts to a whole one without a warning."""


def parts_warning(size: float, ratio: float) -> list[str]:
    """Return the warning about schedules that split the backward, or an empty list.

    Args:
        size: Micro-batch size in samples.
        ratio: Seconds of both parts / seconds of the whole backward.
    """
    if ratio <= PARTS_LIMIT:
        return []
    return [
        f"micro-batch size {size:g}: a backward in two parts takes {ratio:.2f} times as long as a whole one; "
        "zero-bubble schedules pay for it: compare them with 1f1b, or use a larger micro-batch"
    ]


@dataclass(frozen=True)
class LayerCosts:
    """Costs of every layer at one micro-batch size. Vectors have shape (layers,), in seconds or bytes.

    Attributes:
        size: Micro-batch size in samples.
        input_bytes: Bytes of the input of the first layer.
        parameter_bytes: Bytes of all parameters. `tied` weights count for their first layer.
        trainable_bytes: Bytes of the parameters that get gradients.
        accumulation_seconds: See `Chain`.
        spread: See `Chain`. None if unknown.
        uncertainty: See `Chain`. None if unknown.
        outside: Message if the size is outside the measured sizes or the costs were scaled from the only one,
            else empty.
        largest_parameters: See `Chain`.
        pending_gradient_bytes: See `Chain`.
        loss_saved_bytes: See `Chain`.
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
    shared_buffers: tuple[SharedBuffer, ...] = ()
    pending_gradient_bytes: Vector | None = None
    loss_saved_bytes: Vector | None = None

    @property
    def pending_bytes(self) -> Vector:
        """(layers,) bytes of gradients that the first part of a backward leaves for the second.

        Without a measurement this is max(saved, output). A pending gradient is as large as the result that
        was computed with its weight, and the next operation usually saves that result.
        """
        if self.pending_gradient_bytes is not None:
            return self.pending_gradient_bytes
        return np.maximum(self.saved_bytes, self.output_bytes)

    @property
    def loss_bytes(self) -> float:
        """Bytes that the loss saves, included in those of the last layer."""
        return 0.0 if self.loss_saved_bytes is None else float(self.loss_saved_bytes[-1])

    @property
    def offloaded_bytes(self) -> Vector:
        """(layers,) saved bytes that go to the host under offloading: all except those of the loss."""
        if self.loss_saved_bytes is None:
            return self.saved_bytes
        return np.maximum(self.saved_bytes - self.loss_saved_bytes, 0.0)

    @property
    def largest_bytes(self) -> Vector:
        """(layers,) bytes of each layer's largest trainable parameter.

        If unknown, of all its trainable parameters.
        """
        return self.trainable_bytes if self.largest_parameters is None else self.largest_parameters

    @property
    def accumulation(self) -> Vector:
        """(layers,) backward seconds that accumulate gradients.

        The first micro-batch of a step saves them.
        """
        return self.backward_seconds - self.mean_backward(1.0)

    def mean_backward(self, first_share: float) -> Vector:
        """Return the (layers,) mean backward seconds over the micro-batches of a step.

        Args:
            first_share: Share (0 to 1) of the micro-batches that are the first of a step and accumulate no
                gradients.
        """
        if self.accumulation_seconds is None:
            return self.backward_seconds
        return np.maximum(self.backward_seconds - first_share * self.accumulation_seconds, 0.0)


@dataclass(frozen=True, eq=False)
class Chain:
    """Layers of a model, measured at several micro-batch sizes.

    Measured arrays have shape (layers, sizes), in seconds or bytes.

    Attributes:
        names: Names of the layers.
        sizes: Measured micro-batch sizes in samples, ascending.
        cut_after: (layers,) mask, false if a stage must not end after the layer, and for the last layer.
        input_bytes_per_sample: Bytes of one sample of the model's input.
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
    """Seconds of the second part of the backward, as zero-bubble schedules run it. None if not measured."""
    accumulation_seconds: Vector | None = None
    """(layers,) backward seconds that add gradients to existing ones. None if unknown.

    The first micro-batch of a step saves them (`zero_grad()` sets gradients to None). They are equal for all
    sizes.
    """
    scales_with_samples: bool = False
    """True if costs scale with the samples from a single measured size to any other."""
    uncertainty: Vector | None = None
    """(sizes,) relative difference between the sum of the layers' seconds and the whole model's. None if
    unknown."""
    spread: Vector | None = None
    """(layers, sizes) interquartile range / median of forward + backward seconds. None if unknown."""
    whole_spread: Vector | None = None
    """(sizes,) interquartile range / median of the whole model: noise between passes that all layers
    share."""
    tied: tuple[TiedWeight, ...] = ()
    """Weights that several layers use and between which cuts are allowed."""
    largest_parameters: Vector | None = None
    """(layers,) bytes of each layer's largest trainable parameter. None if unknown."""
    shared_buffers: tuple[SharedBuffer, ...] = ()
    """Buffers that several layers read. Every stage with such a layer holds a copy."""
    pending_gradient_bytes: Vector | None = None
    """(layers, sizes) gradients that the first part of a backward leaves for the second. None if not counted.

    Every storage counts once, for the last layer that needs it.
    """
    batch_norms: tuple[str, ...] = ()
    """Names of the layers that normalise every micro-batch separately."""
    least_size: int = 0
    """Fewest samples of a micro-batch that a replica must get. The options may require more than 1."""
    loss_saved_bytes: Vector | None = None
    """(layers, sizes) bytes that the loss saves, included in those of the last layer, else 0. None without a
    loss."""
    refused: Mapping[int, str] = field(default_factory=dict)
    """Sizes that the model rejects or computes differently, with the reason."""

    def __len__(self) -> int:
        return len(self.names)

    @property
    def max_stages(self) -> int:
        """Number of stages if every allowed cut is made."""
        return int(self.cut_after.sum()) + 1

    def name_range(self, first: int, end: int) -> str:
        """Return the names of the first and the last layer in [first, end), or of its only layer."""
        return self.names[first] if end - first == 1 else f"{self.names[first]} to {self.names[end - 1]}"

    def reaches(self, size: float, *, past_largest: bool = False) -> bool:
        """Return whether costs at a micro-batch size are available.

        Sizes below the smallest are extrapolated from the two smallest. With one measured size only that size
        is available, or any if costs scale with samples. Refused sizes, fractions next to a refused size, and
        sizes below `least_size` are never available.

        Args:
            size: Micro-batch size in samples.
            past_largest: Whether sizes past the largest measured one may be extrapolated.
        """
        return size >= self.least_size and self._is_costed(size, past_largest=past_largest)

    def _is_costed(self, size: float, *, past_largest: bool) -> bool:
        if self._refusal(size):
            return False
        if len(self.sizes) == 1:
            return self.scales_with_samples or size == self.sizes[0]
        return past_largest or size <= self.sizes[-1]

    def _refusal(self, size: float) -> str:
        return next((self.refused[count] for count in (floor(size), ceil(size)) if count in self.refused), "")

    def at(self, size: float, *, past_largest: bool = False) -> LayerCosts:
        """Return the costs of every layer for micro-batches of `size` samples.

        - Between two measured sizes: the line between them. For seconds that grow faster than the samples,
          the power of the size through both, which is lower.
        - Below the smallest size: the line through the two smallest, but at least the smallest's costs scaled
          by samples.
        - Past the largest size: the line through the two largest, only with `past_largest`.
        - With `scales_with_samples`: the costs of the single size, scaled by samples.

        Args:
            size: Samples of a micro-batch on one replica. May be a fraction.
            past_largest: Whether sizes past the largest measured one may be extrapolated.

        Raises:
            UsageError: Costs at this size are not available.
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
        """Return the chain without cuts between the layers that share a weight."""
        if not self.tied:
            return self
        cut_after = self.cut_after.copy()
        for weight in self.tied:
            cut_after[weight.layers[0] : weight.layers[-1]] = False
        return replace(self, cut_after=cut_after, tied=())

    def uncertainty_at(self, size: float) -> float | None:
        """Return the relative uncertainty of seconds at `size`: the larger one of the neighbouring sizes."""
        return self._larger(self.uncertainty, size)

    def whole_spread_at(self, size: float) -> float | None:
        """Return the relative spread of the whole model at `size`: the larger of the neighbouring sizes."""
        return self._larger(self.whole_spread, size)

    def _larger(self, by_size: Vector | None, size: float) -> float | None:
        if by_size is None:
            return None
        right = min(int(np.searchsorted(self.sizes, size)), len(self.sizes) - 1)
        exact = self.sizes[right] == size
        return float(by_size[right if exact else max(right - 1, 0) : right + 1].max())

    def spread_at(self, size: float) -> Vector | None:
        """Return the (layers,) relative spread at `size`, interpolated.

        Sizes outside the measured ones get the nearest.
        """
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
    """Interpolate seconds with a power of the size, or with the line if the exponent is not in (1, 2].

    An exponent below 1 means a fixed part. Above 2 one of the two measurements is mostly noise. Caches that
    larger batches outgrow bend the seconds upwards. benchmarks/left_out_sizes.py compares both curves with
    sizes that were measured and left out.

    Args:
        low: (layers,) seconds at the smaller size.
        high: (layers,) seconds at the larger size.
        size: Requested size / smaller size.
        larger: Larger size / smaller size.
        line: (layers,) linear interpolation.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        exponent = (np.log(high) - np.log(low)) / np.log(larger)
    grows = (exponent > 1) & (exponent <= 2)
    return np.where(grows, low * size ** np.where(grows, exponent, 1.0), line)


def list_cut_points(chain: Chain) -> tuple[int, ...]:
    """Return the first layers of the blocks between allowed cuts, ascending, with len(chain) at the end."""
    return (0, *(int(i) + 1 for i in np.flatnonzero(chain.cut_after[:-1])), len(chain))


def align_profiles(chain: Chain, profiles: Mapping[str, Chain]) -> dict[str, Chain]:
    """Return the profiles with the cuts of the chain.

    Raises:
        UsageError: A profile has other layers than the chain.
    """
    for name, profile in profiles.items():
        if profile.names != chain.names:
            raise UsageError(
                f"{name}: has other layers than the plan's profile",
                "Profile the same model on that kind of device.",
            )
    return {name: replace(profile, cut_after=chain.cut_after) for name, profile in profiles.items()}


def copy_bytes(shared: Iterable[tuple[float, Sequence[int]]], cut_points: Sequence[int]) -> Floats:
    """Return the (n, n) bytes of copies of shared tensors in the layers from cut point i up to cut point j.

    Args:
        shared: Bytes and layers of each tensor.
        cut_points: (n,) first layers of blocks, see `list_cut_points`.
    """
    points = np.array(cut_points)
    copies = np.zeros((len(points),) * 2)
    for bytes, layers in shared:
        copies += bytes * (has_user(layers, points) & (points > layers[0])[:, None])
    return copies


def has_user(layers: Sequence[int], points: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Return the (n, n) mask whether one of the layers is in the range from point i up to point j."""
    users = np.array([*layers, np.iinfo(np.int64).max])
    following = users[np.searchsorted(users[:-1], points)]
    has: npt.NDArray[np.bool_] = following[:, None] < points[None, :]
    return has
