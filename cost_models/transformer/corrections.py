"""Corrections of a transformer's kernel sums by what was measured of whole layers.

    seconds of a layer = sum of its kernels x (measured seconds of a whole layer / sum of its kernels)

The ratio is that of the nearest measured layer of the same kind: of the same training code where there is
one, then of the nearest degrees of parallelism. A layer that was measured itself comes out as measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from .layer_work import LayerWork
from .parallel_degrees import ParallelDegrees

LayerKind = Literal["dense", "experts", "head"]


@dataclass(frozen=True)
class LayerCorrection:
    """Ratios of one measured layer: its seconds over the sum of its kernels.

    Attributes:
        kind: Block without experts, block with experts, or head with the loss.
        implementation: Training code that was measured.
        degrees: Tensor, context and expert parallelism that it was measured with.
        work: Kernels that its seconds were compared with.
        forward: Ratio of the forward.
        backward: Ratio of the backward.
        both: Ratio of both together.
        spread: Quartile distance of the measured seconds over their median.
    """

    kind: LayerKind
    implementation: str
    degrees: tuple[int, int, int]
    work: LayerWork
    forward: float
    backward: float
    both: float
    spread: float = 0.0

    def measures(self, work: LayerWork) -> bool:
        """Return whether a layer with these kernels was itself measured."""
        return (self.work.forward, self.work.backward) == (work.forward, work.backward)


def shared_by(degrees: ParallelDegrees) -> tuple[int, int, int]:
    """Return tensor, context and expert parallelism, which change what a device computes of a layer."""
    return degrees.tensor, degrees.context, degrees.expert


@dataclass(frozen=True)
class Corrections:
    """Measured layers, and the ratio of a measured optimizer step to its passes over memory."""

    layers: tuple[LayerCorrection, ...] = ()
    update: float | None = None

    def of(self, kind: LayerKind, degrees: ParallelDegrees, implementation: str) -> LayerCorrection | None:
        """Return the nearest measured layer of a kind; None where none was measured."""
        own = [layer for layer in self.layers if layer.kind == kind]
        sharing = shared_by(degrees)
        return min(own, key=lambda each: _distance(each, sharing, implementation), default=None)

    def error(self, layer: LayerCorrection) -> float:
        """Return how far a layer's ratio leads astray for other layers of its kind.

        It is the largest error of measured layers of the kind under this ratio. If the layer is the only one
        of its kind, it is the ratio's own distance from 1.
        """
        others = [each.both for each in self.layers if each.kind == layer.kind and each is not layer]
        return max(abs(layer.both / other - 1) for other in others or [1.0])


def _distance(
    layer: LayerCorrection, sharing: tuple[int, int, int], implementation: str
) -> tuple[bool, float]:
    pairs = zip(layer.degrees, sharing, strict=True)
    return layer.implementation != implementation, sum(abs(math.log(one / other)) for one, other in pairs)
