"""Latency and bandwidth from measured seconds by size. Needs no torch.

    seconds = latency + bytes / bandwidth

Small transfers show the latency and large ones, which take a thousand times as long, the bandwidth: so what
counts is the ratio of fitted and measured seconds, twice as long as much as half as long. The median seconds
of one size may still be spoilt by something else on the machine, so a first line is the one with the least
sum of deviations, which one wrong size cannot pull away. The line is then the least squares without the sizes
that are very far from it; large sizes that are slower by less (a cache is full, say) stay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from ..cost_models.errors import UsageError

Values = npt.NDArray[np.float64]

FAR_OFF = 5.0
"""A size is left out where its seconds and those of the first line differ by more than this factor."""
ROUNDS = 50
"""Of least squares, each weighted by the line before: for a measured link it settles in about ten."""


@dataclass(frozen=True)
class LinkFit:
    """`latency_seconds` and `bandwidth_bytes_per_second` of the line, and `deviation`: the largest relative
    difference between the line and a measured size, those that were left out included."""

    latency_seconds: float
    bandwidth_bytes_per_second: float
    deviation: float

    def seconds(self, size: float) -> float:
        """Seconds of a transfer of `size` bytes."""
        return self.latency_seconds + size / self.bandwidth_bytes_per_second


def fit_link(sizes: Sequence[int], seconds: Sequence[float]) -> LinkFit:
    """The line through the median `seconds` of transfers of `sizes` bytes.

    The latency is at least 0, the bandwidth above 0. Raises UsageError where there are fewer than two
    different sizes, and where a figure is not above 0. Where larger transfers take no longer, a line from 0
    comes out and `deviation` is large.
    """
    bytes, measured = np.asarray(sizes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    if len(set(sizes)) < 2:
        raise UsageError(
            f"sizes={tuple(sizes)!r}: {len(set(sizes))} sizes do not tell latency from bandwidth",
            "Give at least two different ones, as in sizes=(1024, 16777216).",
        )
    if not (np.all(bytes > 0) and np.all(measured > 0) and np.all(np.isfinite(measured))):
        raise UsageError("`sizes`: a size or its measured seconds are not above 0", "Give larger sizes.")
    first = _least_deviations(bytes, measured)
    near = np.abs(np.log(_ratios(first, bytes, measured))) <= math.log(FAR_OFF)
    latency, per_byte = first
    if len(set(bytes[near])) > 1:
        latency, per_byte = _least_squares(first, bytes[near], measured[near])
    return LinkFit(
        latency_seconds=latency,
        bandwidth_bytes_per_second=1 / per_byte,
        deviation=float(np.max(np.abs(_ratios((latency, per_byte), bytes, measured) - 1))),
    )


Line = tuple[float, float]
"""Seconds of nothing, and seconds a byte."""


def _ratios(line: Line, bytes: Values, measured: Values) -> Values:
    """Fitted over measured seconds."""
    latency, per_byte = line
    return (latency + per_byte * bytes) / measured


def _least_deviations(bytes: Values, measured: Values) -> Line:
    """The line with the least sum of deviations through two of the points, or from 0 through one."""
    lines = [(0.0, float(seconds / size)) for size, seconds in zip(bytes, measured, strict=True)]
    for i, j in combinations(range(len(bytes)), 2):
        if bytes[i] == bytes[j]:
            continue
        per_byte = float((measured[j] - measured[i]) / (bytes[j] - bytes[i]))
        latency = float(measured[i] - per_byte * bytes[i])
        if per_byte > 0 and latency >= 0:
            lines.append((latency, per_byte))
    return min(lines, key=lambda line: float(np.abs(np.log(_ratios(line, bytes, measured))).sum()))


def _least_squares(line: Line, bytes: Values, measured: Values) -> Line:
    """From the first `line`, that with the least sum of ratio + 1 / ratio - 2, which is the square of the
    difference over fitted and measured seconds."""
    for _ in range(ROUNDS):
        fitted = measured * _ratios(line, bytes, measured)
        fit = _weighted(np.sqrt(1 / (fitted * measured)), bytes, measured)
        if fit is None or np.allclose(fit, line, rtol=1e-12, atol=0):
            break
        line = fit
    return line


def _weighted(weights: Values, bytes: Values, measured: Values) -> Line | None:
    """The least squares with these weights and a latency of at least 0; None where the line would fall."""
    columns = np.stack([weights, bytes * weights], axis=1)
    scale = np.linalg.norm(columns, axis=0)  # bytes are many times seconds
    (latency, per_byte), *_ = np.linalg.lstsq(columns / scale, measured * weights, rcond=None)
    if latency < 0:
        latency, per_byte = 0.0, (columns[:, 1] @ (measured * weights)) / scale[1]
    return (float(latency / scale[0]), float(per_byte / scale[1])) if per_byte > 0 else None
