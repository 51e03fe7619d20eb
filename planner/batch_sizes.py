"""The sizes of a problem's global batch and micro-batches: as the options ask, or as the profile allows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import isqrt

from ..cost_models.errors import UsageError
from ..cost_models.layer import Chain
from ..cost_models.quantities import format_count
from .candidate import MOST_MICRO_BATCHES, abbreviate

SAMPLES_PER_DEVICE = 32
"""Of a global batch that is not requested: the same whatever sizes the profiling machine reached."""
MOST_DEFAULTS = 512
"""Global batches around that which are tried."""


@dataclass(frozen=True)
class BatchSizes:
    """`mini_batch` and `micro_batches`: as requested, or None. `max_replicas`: devices that may share a
    micro-batch."""

    chain: Chain
    gpus: int
    max_replicas: int
    mini_batch: int | None
    micro_batches: int | None
    samples_per_device: int = SAMPLES_PER_DEVICE

    @cached_property
    def global_batch(self) -> int:
        """Samples of a step: those requested, or what comes nearest to `samples_per_device` on every device
        of all that micro-batches within the profile's reach make."""
        if self.mini_batch is not None:
            return self.mini_batch
        samples, unit = self.samples_per_device * self.gpus, self._unit
        counts = range(1, 2 * samples // unit + 2)
        nearest = sorted(counts, key=lambda count: (abs(count * unit - samples), count))
        batches = (count * unit for count in nearest[:MOST_DEFAULTS])
        return next((batch for batch in batches if self._reaches(batch)), samples)

    @cached_property
    def micro_batch_sizes(self) -> list[int]:
        """Those to search: divisors of the global batch of which the profile reaches some replica's share.

        Raises UsageError where there is none.
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
                f"mini_batch={batch}: no micro-batch size that the profile reaches makes it, in at most "
                f"{MOST_MICRO_BATCHES} micro-batches (measured sizes: {abbreviate(measured)})",
                f"Use a multiple of {measured[-1]}, or measure more sizes with pplan profile.",
            )
        return sizes

    @property
    def _unit(self) -> int:
        """The number that divides a global batch that was not requested: the micro-batches that are; with one
        measured size what all devices share; else the devices."""
        alone = len(self.chain.sizes) == 1 and not self.chain.scales_with_samples
        return self.micro_batches or (self.chain.sizes[0] * self.max_replicas if alone else self.gpus)

    def _reaches(self, batch: int) -> bool:
        """Whether the profile reaches micro-batches that make it."""
        if self.micro_batches is None:
            return bool(self._reachable_sizes(batch))
        return self._reaches_share(batch // self.micro_batches, self.gpus, past_largest=True)

    def _reaches_share(self, size: int, most: int, *, past_largest: bool = False) -> bool:
        """Whether the profile reaches a replica's share of a micro-batch, for some number up to `most`."""
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
        if batch % micro_batches:
            fitting = [count for count in range(1, min(batch, MOST_MICRO_BATCHES) + 1) if batch % count == 0]
            raise UsageError(
                f"micro_batches={micro_batches}: a global batch of {batch} does not divide into so many",
                f"Use a divisor of {batch}: {abbreviate(fitting)}.",
            )
        size = batch // micro_batches
        if not self._reaches_share(size, self.gpus, past_largest=True):
            raise UsageError(*unmeasured_size(self.chain, batch, micro_batches))
        return size


def unmeasured_size(chain: Chain, batch: int, micro_batches: int) -> tuple[str, str]:
    """Describe what is wrong with a number of micro-batches, and what to do.

    Args:
        chain: The layers, which cannot be costed with such micro-batches.
        batch: Samples of a step.
        micro_batches: Number of micro-batches, a divisor of `batch`.

    Returns:
        The size that is needed with the sizes that were measured, and two ways out.
    """
    size, measured = batch // micro_batches, chain.sizes
    if size < chain.least_size:
        return (
            f"{format_count(micro_batches, 'micro-batch')} of {format_count(size, 'sample')}: "
            f"min_micro_batch={chain.least_size} asks for more on each replica",
            f"Use micro_batches={max(batch // chain.least_size, 1)} or fewer, or a smaller min_micro_batch.",
        )
    counts = [batch // own for own in measured if batch % own == 0 and batch // own <= MOST_MICRO_BATCHES]
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


def divisors(number: int) -> list[int]:
    """Those that go into it at most `MOST_MICRO_BATCHES` times, and maybe others; ascending."""
    most = min(isqrt(number), MOST_MICRO_BATCHES)
    small = [count for count in range(1, most + 1) if number % count == 0]
    return sorted({*small, *(number // count for count in small)})
