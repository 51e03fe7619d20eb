"""Sizes of the global batch and the micro-batches, from the options or from what the profile measured."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import isqrt

from ..cost_models.errors import UsageError
from ..cost_models.layer import Chain
from ..cost_models.quantities import format_count
from .candidate import MOST_MICRO_BATCHES, abbreviate

SAMPLES_PER_DEVICE = 32
"""Samples per device of the default global batch, whatever sizes the profiling machine measured."""
MOST_DEFAULTS = 512
"""Most global batches near the default that are tried."""


@dataclass(frozen=True)
class BatchSizes:
    """Global batch and micro-batch sizes of a problem.

    Attributes:
        chain: Costs of the layers.
        gpus: Number of devices.
        max_replicas: Most devices that may share a micro-batch.
        mini_batch: Requested global batch. None for the default.
        micro_batches: Requested number of micro-batches. None for any.
        samples_per_device: Samples per device of the default global batch.
    """

    chain: Chain
    gpus: int
    max_replicas: int
    mini_batch: int | None
    micro_batches: int | None
    samples_per_device: int = SAMPLES_PER_DEVICE

    @cached_property
    def global_batch(self) -> int:
        """Samples of a step, as requested or by default.

        The default is the possible number closest to `samples_per_device` on every device. A number is
        possible if micro-batches with known costs make it.
        """
        if self.mini_batch is not None:
            return self.mini_batch
        samples, unit = self.samples_per_device * self.gpus, self._unit
        counts = range(1, 2 * samples // unit + 2)
        nearest = sorted(counts, key=lambda count: (abs(count * unit - samples), count))
        batches = (count * unit for count in nearest[:MOST_DEFAULTS])
        return next((batch for batch in batches if self._reaches(batch)), samples)

    @cached_property
    def micro_batch_sizes(self) -> list[int]:
        """Micro-batch sizes to search: divisors of the global batch for which some replica's share has costs.

        Raises:
            UsageError: There is none.
        """
        batch, measured = self.global_batch, self.chain.sizes
        if self.micro_batches is not None:
            return [self._requested_size(self.micro_batches)]
        sizes = self._reachable_sizes(batch)
        if not sizes and batch < self.chain.least_size:
            raise UsageError(
                f"min_micro_batch={self.chain.least_size}: the global batch has "
                f"{format_count(batch, 'sample')}",
                "Use a larger mini_batch, or a smaller min_micro_batch.",
            )
        if not sizes:
            raise UsageError(
                f"mini_batch={batch}: no measured micro-batch size divides it into at most "
                f"{MOST_MICRO_BATCHES} micro-batches (measured sizes: {abbreviate(measured)})",
                f"Use a multiple of {measured[-1]}, or measure more sizes with pplan profile.",
            )
        return sizes

    @property
    def _unit(self) -> int:
        """Number that divides the default global batch.

        It is the requested micro-batches; else, with one measured size, the samples of all sharing devices;
        else the devices.
        """
        alone = len(self.chain.sizes) == 1 and not self.chain.scales_with_samples
        return self.micro_batches or (self.chain.sizes[0] * self.max_replicas if alone else self.gpus)

    def _reaches(self, batch: int) -> bool:
        """Return whether the profile has costs for micro-batches that make this global batch."""
        if self.micro_batches is None:
            return bool(self._reachable_sizes(batch))
        return self._reaches_share(batch // self.micro_batches, self.gpus, past_largest=True)

    def _reaches_share(self, size: int, most: int, *, past_largest: bool = False) -> bool:
        """Return whether some number of replicas up to `most` has shares with known costs."""
        shares = {-(-size // count) for count in range(1, min(size, most) + 1)}
        return any(self.chain.reaches(share, past_largest=past_largest) for share in shares)

    def _reachable_sizes(self, batch: int) -> list[int]:
        smallest = -(-batch // MOST_MICRO_BATCHES)
        return [
            size
            for size in divisors(batch)
            if smallest <= size and self._reaches_share(size, self.max_replicas)
        ]

    def _requested_size(self, micro_batches: int) -> int:
        batch = self.global_batch
        size = size_of_parts(batch, micro_batches, f"micro_batches={micro_batches}")
        if not self._reaches_share(size, self.gpus, past_largest=True):
            raise UsageError(*unmeasured_size(self.chain, batch, micro_batches))
        return size


def unmeasured_size(chain: Chain, batch: int, micro_batches: int) -> tuple[str, str]:
    """Describe a number of micro-batches whose size was not measured, and what to do.

    Args:
        chain: The layers, which have no costs at this micro-batch size.
        batch: Samples of a step.
        micro_batches: Number of micro-batches, a divisor of `batch`.

    Returns:
        The size that is needed with the sizes that were measured, and two ways out.
    """
    size, measured = batch // micro_batches, chain.sizes
    if size < chain.least_size:
        return (
            f"{format_count(micro_batches, 'micro-batch')} of {format_count(size, 'sample')}: "
            f"less than min_micro_batch={chain.least_size} on each replica",
            f"Use micro_batches={max(batch // chain.least_size, 1)} or fewer, or a smaller min_micro_batch.",
        )
    counts = [
        batch // size_ for size_ in measured if batch % size_ == 0 and batch // size_ <= MOST_MICRO_BATCHES
    ]
    needs = f"{format_count(micro_batches, 'micro-batch')} of {format_count(size, 'sample')} need size {size}"
    instead = f"use micro_batches={counts[0]}" if counts else f"use a mini_batch that {measured[0]} divides"
    if refusal := chain.refused.get(size):
        return f"{needs}, which is no size for this model: {refusal}", f"{instead[0].upper()}{instead[1:]}."
    sizes = f"size{'s' if len(measured) > 1 else ''} {abbreviate(measured)}"
    wider = tuple(sorted({*measured, size}))
    return (
        f"{needs}, but the profile measured only {sizes}",
        f"Profile with micro_batch_sizes={wider!r} or {instead}.",
    )


def size_of_parts(batch: int, micro_batches: int, label: str) -> int:
    """Return the samples of each of equal micro-batches. Raises UsageError, which begins with `label`."""
    if batch % micro_batches:
        fitting = [count for count in range(1, min(batch, MOST_MICRO_BATCHES) + 1) if batch % count == 0]
        raise UsageError(
            f"{label}: does not divide the global batch of {batch}",
            f"Use a divisor of {batch}: {abbreviate(fitting)}.",
        )
    return batch // micro_batches


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, ascending.

    All divisors with a quotient of at most `MOST_MICRO_BATCHES` are included, and possibly others.
    """
    most = min(isqrt(number), MOST_MICRO_BATCHES)
    small = [count for count in range(1, most + 1) if number % count == 0]
    return sorted({*small, *(number // count for count in small)})
