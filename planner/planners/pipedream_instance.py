"""The input and output of PipeDream's dynamic programme: levels of bandwidth, costs, and nested stages.

Narayanan et al., "PipeDream", SOSP 2019, section 3.1; the recurrence is at the head of pipedream_programme.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    pass


Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


class Tier(NamedTuple):
    """A level of bandwidth: so many components, joined by links of so many bytes per second."""

    machines: int
    bandwidth: float


@dataclass(frozen=True)
class Recurrence:
    """What a stage and a cut cost.

    `stage(seconds, weight_bytes, machines, bandwidth)`: of a stage on so many components, by the seconds of
    one of them; at least their part of these. `cut(bytes, machines, bandwidth)`: of what crosses the cut
    before a stage on so many.
    """

    stage: Callable[[Floats, Floats, int, float], Floats]
    cut: Callable[[Floats, int, float], Floats]


def _paper_stage(seconds: Floats, weights: Floats, machines: int, bandwidth: float) -> Floats:
    shared: Floats = np.maximum(seconds, 2 * (machines - 1) * weights / bandwidth) / machines
    return shared


def _paper_cut(crossing: Floats, machines: int, bandwidth: float) -> Floats:  # noqa: ARG001 - as of others
    return 2 * crossing / bandwidth


PAPER = Recurrence(_paper_stage, _paper_cut)


@dataclass(frozen=True)
class NestedStage:
    """A stage of one level: cut points `start` to `end` on `replicas` components, in each of them the stages
    `inner` of the level inside (none on the innermost)."""

    start: int
    end: int
    replicas: int
    inner: tuple[NestedStage, ...] = ()

    def flat(self, copies: int = 1) -> Iterator[tuple[int, int, int]]:
        """(start, end, devices) of the stages of devices in it, where there are so many copies of it."""
        if not self.inner:
            yield self.start, self.end, copies * self.replicas
        for part in self.inner:
            yield from part.flat(copies * self.replicas)


@dataclass(frozen=True, eq=False)
class Instance:
    """What is to be planned, over n + 1 cut points; see `StageTable` for cut points and matrices.

    seconds, weights: (n + 1, n + 1), of one global batch on one device (inf where no stage may be), and bytes
    whose gradients replicas exchange. crossing: (n + 1,) bytes of a global batch. tiers: from the innermost
    level. `fits(replicas, behind)`: the stages, (n + 1, n + 1), that so many devices can hold with so many
    stages behind; more behind never makes a stage fit. None: all. `most_replicas` of a stage of devices;
    None: any number.
    """

    seconds: Floats
    weights: Floats
    crossing: Floats
    tiers: tuple[Tier, ...]
    recurrence: Recurrence = PAPER
    fits: Callable[[int, int], Bools] | None = None
    most_replicas: int | None = None
    use_all: bool = False
    check: Callable[[], None] = lambda: None
    """Called now and then; what it raises ends the planning."""

    @property
    def last(self) -> int:
        """The place after the last layer."""
        return len(self.crossing) - 1

    @property
    def running(self) -> Floats:
        """(n + 1,): seconds of the layers before each place."""
        last = self.last
        blocks = self.seconds[np.arange(last), np.arange(1, last + 1)]
        return np.concatenate([[0.0], np.cumsum(np.where(np.isfinite(blocks), blocks, 0.0))])

    def thinned(self, points: npt.NDArray[np.int64]) -> Instance:
        """The same with these cut points alone."""
        own, among = self.fits, np.ix_(points, points)
        return replace(
            self,
            seconds=self.seconds[among],
            weights=self.weights[among],
            crossing=self.crossing[points],
            fits=None if own is None else lambda replicas, behind: own(replicas, behind)[among],
        )


class Bottleneck(NamedTuple):
    """The shortest bottleneck, and the stages of the outermost level."""

    seconds: float
    parts: tuple[NestedStage, ...]


def _published_stage(seconds: Floats, weights: Floats, machines: int, bandwidth: float) -> Floats:
    return (seconds + 4 * (machines - 1) * weights / (bandwidth * machines)) / machines


def _published_cut(crossing: Floats, machines: int, bandwidth: float) -> Floats:
    return 2 * crossing / (bandwidth * machines)


PUBLISHED = Recurrence(_published_stage, _published_cut)
