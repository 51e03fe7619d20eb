"""Box of divisions of blocks over virtual stages, limited by fewest and most blocks of stages and devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class DivisionBox:
    """A set of divisions, as a part of a branch and bound.

    Attributes:
        blocks: Blocks of all stages together.
        low: (slots,) fewest blocks of each (virtual) stage.
        high: (slots,) most blocks of each.
        device_low: (devices,) fewest blocks of each device, which has every `devices`-th stage.
        device_high: (devices,) most blocks of each device.
    """

    blocks: int
    low: Counts
    high: Counts
    device_low: Counts
    device_high: Counts

    @classmethod
    def of_fewest(cls, blocks: int, fewest: Sequence[int], most: Sequence[int], devices: int) -> DivisionBox:
        """Return the box of all divisions with these fewest and most blocks per stage."""
        return cls(
            blocks,
            np.array(fewest),
            np.minimum(most, blocks),
            np.zeros(devices, dtype=np.int64),
            np.full(devices, blocks),
        ).tightened()

    @property
    def is_empty(self) -> bool:
        """True if no division exists."""
        return bool((self.low > self.high).any() or (self.device_low > self.device_high).any())

    @property
    def counts(self) -> tuple[int, ...] | None:
        """The division if there is only one, else None."""
        return tuple(self.low.tolist()) if (self.low == self.high).all() else None

    def tightened(self) -> DivisionBox:
        """Return the same divisions with the tightest limits that follow from the sums."""
        low, high, least, most = self.low, self.high, self.device_low, self.device_high
        devices = len(least)
        for _ in range(2):
            lows, highs = low.reshape(-1, devices), high.reshape(-1, devices)
            least = np.maximum.reduce([least, lows.sum(axis=0), self.blocks - (most.sum() - most)])
            most = np.minimum.reduce([most, highs.sum(axis=0), self.blocks - (least.sum() - least)])
            low = np.maximum(lows, least - (highs.sum(axis=0) - highs)).ravel()
            high = np.minimum(highs, most - (lows.sum(axis=0) - lows)).ravel()
        return DivisionBox(self.blocks, low, high, least, most)

    def places(self) -> tuple[Counts, Counts]:
        """Return the first and last block with which each stage may begin.

        The last entry is for the position after all stages.
        """
        below, above = (np.append(0, np.cumsum(counts)) for counts in (self.low, self.high))
        first = np.maximum(below, self.blocks - (above[-1] - above))
        last = np.minimum(above, self.blocks - (below[-1] - below))
        return first, last

    def split_device(self, device: int, most: int) -> Iterator[DivisionBox]:
        """Yield the divisions in which a device has at most `most` blocks, and the others."""
        yield self._with(device, self.device_low, self.device_high, self.device_low[device], most)
        yield self._with(device, self.device_low, self.device_high, most + 1, self.device_high[device])

    def split_slot(self, slot: int, most: int) -> Iterator[DivisionBox]:
        """Yield the divisions in which a stage has at most `most` blocks, and the others."""
        for low, high in ((self.low[slot], most), (most + 1, self.high[slot])):
            lows, highs = self.low.copy(), self.high.copy()
            lows[slot], highs[slot] = low, high
            yield DivisionBox(self.blocks, lows, highs, self.device_low, self.device_high).tightened()

    def _with(self, device: int, least: Counts, most: Counts, low: int, high: int) -> DivisionBox:
        least, most = least.copy(), most.copy()
        least[device], most[device] = low, high
        return DivisionBox(self.blocks, self.low, self.high, least, most).tightened()
