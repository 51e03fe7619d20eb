"""Weights that several layers use, as the embedding and the head of a language model do.

A stage that has a user of such a weight holds it, with its gradient and its optimizer state. Where users lie
on several stages, each of these has a copy, and all copies are trained alike: after the last backward of the
last of these stages, and after each stage's own all-reduce, the weight's gradients are added up by one
all-reduce over all devices that hold it, of every replica. (Megatron-LM's embedding group, DeepSpeed's tied
layers.) Weights are added up one after another, in the order of their first users. What the replicas of a
stage add up among themselves holds the weight where the stage has its first user, copies not: theirs is part
of the sum over all. Under ZeRO-1 every replica spreads copies like any weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from .collectives import all_reduce_seconds
from .optimizers import Precision
from .topology import Topology

Floats = npt.NDArray[np.float64]
Ranks = tuple[int, ...]


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

    def is_copied(self, first: int, end: int) -> bool:
        """Whether one does, and an earlier layer as well."""
        return self.layers[0] < first and self.is_used(first, end)


@dataclass(frozen=True)
class SharedBuffer:
    """A buffer that the `layers` (ascending; two at least) read and none writes. Each stage with a user has
    one; its bytes count as the first user's in a chain."""

    name: str
    bytes: float
    layers: tuple[int, ...]

    def is_copied(self, first: int, end: int) -> bool:
        """Whether a layer from `first` to before `end` uses it, and an earlier one as well."""
        return self.layers[0] < first and any(first <= layer < end for layer in self.layers)


@dataclass(frozen=True)
class TiedSum:
    """The sum of a weight's gradients over all `ranks` that hold it, on the `stages` of a program; `parts`:
    of the layers, those with a user. Seconds by itself."""

    name: str
    parts: tuple[int, ...]
    stages: tuple[int, ...]
    ranks: Ranks
    bytes: float
    seconds: float


Seconds = Callable[[Ranks, float], float]
"""Of an all-reduce over these ranks, of so many bytes held by each."""


def reduction_seconds(topology: Topology) -> Seconds:
    """Of any sum on a topology."""
    return lambda ranks, bytes: float(all_reduce_seconds(topology, ranks, bytes))


def tied_sums(
    tied: Sequence[TiedWeight],
    ends: Sequence[int],
    ranks: Sequence[Sequence[int]],
    stages: Sequence[Sequence[int]],
    precision: Precision,
    seconds: Seconds,
) -> Iterator[TiedSum]:
    """Of the parts of the layers that end before `ends`: by part, all `ranks` that hold it and the `stages`
    (devices of a program) that compute it."""
    bounds = list(pairwise((0, *ends)))
    for weight in tied:
        parts = tuple(part for part, (first, end) in enumerate(bounds) if weight.is_used(first, end))
        holders = tuple(sorted({rank for part in parts for rank in ranks[part]}))
        if len(parts) > 1 and len(holders) > 1 and weight.trainable_bytes:
            bytes = weight.trainable_bytes * (precision.gradient / precision.weight)
            places = tuple(sorted({stage for part in parts for stage in stages[part]}))
            yield TiedSum(weight.name, parts, places, holders, bytes, seconds(holders, bytes))


def ends_after_sums(ends: Floats, sums: Sequence[TiedSum]) -> Floats:
    """(stages, ...): when each stage is done, whose own gradients are ready at `ends`."""
    if not sums:
        return ends
    after = ends.copy()
    for own in sums:
        stages = list(own.stages)
        after[stages] = after[stages].max(axis=0) + own.seconds
    return after


def copy_bytes(tied: Sequence[TiedWeight], cut_points: Sequence[int], *, trainable: bool = False) -> Floats:
    """(n, n): bytes of the copies in the layers from cut point i to before cut point j; those of `trainable`
    weights alone."""
    points = np.array(cut_points)
    copies = np.zeros((len(points),) * 2)
    for weight in tied:
        bytes = weight.trainable_bytes if trainable else weight.bytes
        copies += bytes * (_has_user(weight.layers, points) & (points > weight.layers[0])[:, None])
    return copies


def buffer_copy_bytes(buffers: Sequence[SharedBuffer], cut_points: Sequence[int]) -> Floats:
    """(n, n): as `copied_bytes`, of buffers."""
    points = np.array(cut_points)
    copies = np.zeros((len(points),) * 2)
    for buffer in buffers:
        copies += buffer.bytes * (_has_user(buffer.layers, points) & (points > buffer.layers[0])[:, None])
    return copies


def least_seconds_after(
    tied: Sequence[TiedWeight],
    cut_points: Sequence[int],
    topology: Topology,
    precision: Precision,
    replicas: int,
) -> Floats | float:
    """(n, n): seconds that the sums of a stage's weights take at the least, where its layers from cut point i
    to before cut point j have some of their users and not all. Every sum is over its `replicas` and another
    stage's device: each sends 2 (r - 1) / r of the bytes, over the fastest link at best."""
    points, total = np.array(cut_points), np.zeros((len(cut_points),) * 2)
    if not any(weight.trainable_bytes for weight in tied) or topology.gpus < 2:
        return 0.0
    fastest = max(level.link.bandwidth_bytes_per_second for level in topology.levels_in_use)
    share = 2 * replicas / (replicas + 1) * (precision.gradient / precision.weight)
    for weight in tied:
        has_all = (points <= weight.layers[0])[:, None] & (points > weight.layers[-1])[None, :]
        seconds = share * weight.trainable_bytes / fastest
        total += seconds * (_has_user(weight.layers, points) & ~has_all)
    return total


def _has_user(layers: Sequence[int], points: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """(n, n): whether one of the layers is from point i to before point j."""
    users = np.array([*layers, np.iinfo(np.int64).max])
    following = users[np.searchsorted(users[:-1], points)]
    has: npt.NDArray[np.bool_] = following[:, None] < points[None, :]
    return has
