"""The timed passes at one micro-batch size, and what they come to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import numpy as np

from .launch_lead import Vector
from .layer_stamps import LayerTimes, LossTimes
from .timing import WholeTimes

if TYPE_CHECKING:
    from .backward_parts import PartTimes

_DIRECTIONS: tuple[Literal["forward"], Literal["backward"]] = ("forward", "backward")


@dataclass
class TimedPasses:
    """All timed passes at one micro-batch size."""

    layers: list[LayerTimes] = field(default_factory=list)
    whole: list[WholeTimes] = field(default_factory=list)
    parts: list[PartTimes] = field(default_factory=list)
    """Backward in two parts; empty where it was not measured."""
    first: list[WholeTimes] = field(default_factory=list)
    """Passes of the whole where there are no gradients to add to; empty where it was not measured."""
    smaller: TimedPasses | None = field(default=None, repr=False)
    """The passes at the next smaller size (see `host_medians`)."""

    def __len__(self) -> int:
        return len(self.whole)

    def cut_to(self, rounds: int) -> None:
        """Forgets the passes of a round that was not finished."""
        for passes in (self.layers, self.whole, self.parts):
            del passes[rounds:]

    @property
    def device_share(self) -> float:
        """Of the seconds of a pass of the layers, the share in which the device computes."""
        bound = self.host_bound()
        return 1.0 if bound is None else bound[1] / bound[0]

    def medians(self, direction: Literal["forward", "backward"]) -> Vector:
        """Seconds of the layers, shape (layers,)."""
        return _median([getattr(times, direction) for times in self.layers])

    def host_medians(self, direction: Literal["forward", "backward"]) -> list[float] | list[None]:
        """The host's seconds for each layer; None where they are the device's.

        A launch takes as long whatever the micro-batch size; but a stream takes about a thousand ahead, and a
        host that launches more than that waits for the device. So where the device takes longer than the
        host, the host's seconds are at most those at the next smaller size. At the smallest they stay as
        they were seen.
        """
        rows = [getattr(times, f"{direction}_host") for times in self.layers]
        if rows[0] is None:
            return [None] * len(self.layers[0].forward)
        own = _median(rows)
        if self.smaller is None or not self._may_have_waited(direction):
            return list(map(float, own))
        return list(map(float, np.minimum(own, np.array(self.smaller.host_medians(direction)))))

    def _may_have_waited(self, direction: str) -> bool:
        """Whether the device took longer than the host."""
        rows = [
            [getattr(times, f"{direction}{kind}").sum() for kind in ("", "_host")] for times in self.layers
        ]
        device, host = _median(np.array(rows))
        return bool(device > host)

    def loss_medians(self) -> LossTimes | None:
        """Of the loss; None without one."""
        losses = [times.loss for times in self.layers if times.loss is not None]
        if not losses:
            return None
        rows = [astuple(loss) for loss in losses]
        columns = [
            None if column[0] is None else float(np.median(column)) for column in zip(*rows, strict=True)
        ]
        return self._launched_as_before(LossTimes(*columns))  # type: ignore[arg-type]

    def _launched_as_before(self, loss: LossTimes) -> LossTimes:
        """As `host_medians`."""
        before = self.smaller.loss_medians() if self.smaller is not None else None
        changed = {}
        for direction in _DIRECTIONS:
            host = getattr(loss, f"{direction}_host")
            if before is not None and host is not None and self._may_have_waited(direction):
                changed[f"{direction}_host"] = min(host, getattr(before, f"{direction}_host"))
        return replace(loss, **changed)

    def part_medians(self, part: Literal["input", "weight"]) -> list[float] | list[None]:
        """Seconds of each layer's input gradients, or weight gradients; None where they were not measured."""
        if not self.parts:
            return [None] * len(self.layers[0].forward)
        return list(map(float, _median([getattr(times, part) for times in self.parts])))

    def pending_bytes(self) -> list[int] | None:
        """By layer; None where it was not counted. Every pass counts the same."""
        counted = [times.pending_bytes for times in self.parts if times.pending_bytes is not None]
        return list(map(int, counted[0])) if counted else None

    def backward_parts_ratio(self) -> float | None:
        """Both parts of all layers over the whole model's backward; None where either was not measured."""
        _, backward = self.whole_medians()
        if not self.parts or backward <= 0:
            return None
        both = _median([times.input for times in self.parts]), _median([times.weight for times in self.parts])
        return float(both[0].sum() + both[1].sum()) / backward

    def host_bound(self) -> tuple[float, float] | None:
        """Host seconds to launch a pass of the layers, and the device's, where the host's are more."""
        host = device = 0.0
        for direction in _DIRECTIONS:
            launched = [seconds for seconds in self.host_medians(direction) if seconds is not None]
            if not launched:
                return None
            host += sum(launched)
            device += float(self.medians(direction).sum())
        return (host, device) if host > device else None

    def spreads(self) -> list[float] | list[None]:
        """Interquartile range of forward + backward over its median, by layer; None: not timed twice."""
        if len(self.layers) < 2:
            return [None] * len(self.layers[0].forward)
        return list(map(float, spread(np.array([times.forward + times.backward for times in self.layers]))))

    def whole_medians(self) -> tuple[float, float]:
        """Of forward and of backward."""
        return (
            float(np.median([times.forward for times in self.whole])),
            float(np.median([times.backward for times in self.whole])),
        )

    def first_backward(self) -> float | None:
        """Median of the whole's backward that adds to no gradients; None where it was not measured."""
        return float(np.median([times.backward for times in self.first])) if self.first else None

    def whole_spread(self) -> float | None:
        """Return the spread of the whole model's passes. None if there are fewer than two."""
        if len(self.whole) < 2:
            return None
        return float(spread(np.array([[times.forward + times.backward] for times in self.whole]))[0])

    def uncertainty(self) -> float:
        """Relative standard error of the median of a pass' seconds, of the layers' or the whole's passes.

        The larger of both. 1.2533 / sqrt(n) standard deviations (the asymptotic one of a normal's median),
        and the standard deviation from the interquartile range, which is 1.349 of it.
        """
        sums = np.array([[times.forward.sum() + times.backward.sum()] for times in self.layers])
        widest = max(float(spread(sums)[0]), self.whole_spread() or 0.0)
        return float(1.2533 * widest / 1.349 / np.sqrt(len(self)))


def link_sizes(ascending: Sequence[TimedPasses]) -> None:
    """Tells each size of the next smaller one."""
    for smaller, rounds in pairwise(ascending):
        rounds.smaller = smaller


def _median(rows: list[Vector] | Vector) -> Vector:
    return np.asarray(np.median(np.array(rows), axis=0), dtype=np.float64)


def spread(samples: Vector) -> Vector:
    """Interquartile range over the median along axis 0; 0 where the median is 0."""
    low, middle, high = np.percentile(samples, (25, 50, 75), axis=0)
    wide = np.zeros_like(middle)
    np.divide(high - low, middle, out=wide, where=middle > 0)
    return np.asarray(wide, dtype=np.float64)
