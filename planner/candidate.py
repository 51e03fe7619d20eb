"""Plans before and after they are simulated: proposals and scored plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import pairwise, product
from math import inf

from ..cost_models.memory import Recompute
from .pipeline_config import PipelineConfig

Shape = tuple[tuple[int, ...], tuple[int, ...]]
"""Ends and replicas of the stages."""


@dataclass(frozen=True)
class Proposal:
    """Where the layers of a pipeline are, and with which schedule and micro-batches it runs.

    `ends`: by stage, the number of layers before its end (the last is the number of layers of the chain).
    `devices`: by stage, the ranks of its replicas, which share every micro-batch. Where a device has several
    virtual stages, both are by part of the layers, in the order in which a micro-batch passes them, and the
    devices repeat.
    """

    config: PipelineConfig
    ends: tuple[int, ...]
    devices: tuple[tuple[int, ...], ...]
    estimate_seconds: float | None = field(default=None, compare=False)
    """Of the step, as the planner that proposes it counts; None where it counts none."""

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """By stage, its first layer and the layer after its last."""
        return list(pairwise((0, *self.ends)))

    @property
    def replicas(self) -> tuple[int, ...]:
        """By stage, how many devices share it."""
        return tuple(len(own) for own in self.devices)

    @property
    def device_count(self) -> int:
        """How many devices it uses."""
        return len({device for own in self.devices for device in own})


@dataclass(frozen=True)
class ScoredPlan:
    """A proposal that fits, with what each stage recomputes, and its simulated step."""

    proposal: Proposal
    recompute: tuple[Recompute, ...]
    step_seconds: float

    @property
    def config(self) -> PipelineConfig:
        """Schedule and micro-batches."""
        return self.proposal.config


def linear_pipeline(config: PipelineConfig, ends: Sequence[int], first_device: int = 0) -> Proposal:
    """A pipeline of one device a stage, stage s on device `first_device` + s."""
    devices = tuple((first_device + stage,) for stage in range(len(ends)))
    return Proposal(config, tuple(int(end) for end in ends), devices)


def replicated_pipeline(
    config: PipelineConfig,
    ends: Sequence[int],
    replicas: Sequence[int],
    estimate_seconds: float | None = None,
) -> Proposal:
    """A pipeline whose stages have so many replicas, on the devices from rank 0 on."""
    devices, first = [], 0
    for count in replicas:
        devices.append(tuple(range(first, first + count)))
        first += count
    return Proposal(config, tuple(int(end) for end in ends), tuple(devices), estimate_seconds)


def near_shapes(
    cut_points: Sequence[int], ends: tuple[int, ...], replicas: tuple[int, ...], devices: int
) -> Iterator[Shape]:
    """A cut or a device moved, a device more, of at most so many, or less, two stages joined, one parted.
    `cut_points`: with 0 and the last layer's."""
    at = [0, *(cut_points.index(end) for end in ends)]
    stages = range(len(ends))
    for cut in stages[:-1]:
        for moved in (at[cut + 1] - 1, at[cut + 1] + 1):
            if at[cut] < moved < at[cut + 2]:
                yield (*ends[:cut], cut_points[moved], *ends[cut + 1 :]), replicas
        both = replicas[cut] + replicas[cut + 1]
        yield (*ends[:cut], *ends[cut + 1 :]), (*replicas[:cut], both, *replicas[cut + 2 :])
    for giver, taker in product((None, *stages), repeat=2):
        counts = tuple(r + (stage == taker) - (stage == giver) for stage, r in enumerate(replicas))
        if giver != taker and min(counts) > 0 and sum(counts) <= devices:
            yield ends, counts
    for stage, count in enumerate(replicas):
        middle = (at[stage] + at[stage + 1]) // 2
        if count > 1 and at[stage] < middle < at[stage + 1]:
            parts = (count // 2, count - count // 2)
            yield (
                (*ends[:stage], cut_points[middle], *ends[stage:]),
                (*replicas[:stage], *parts, *replicas[stage + 1 :]),
            )


_WATCHER: ContextVar[Callable[[float], None] | None] = ContextVar("watcher", default=None)


@contextmanager
def watching_best(tell: Callable[[float], None] | None) -> Iterator[None]:
    """Call `tell` with the step seconds of each plan that is faster than all earlier ones.

    Args:
        tell: The function to call; None for a search that answers another question than the user's.
    """
    best = inf

    def tell_faster(seconds: float) -> None:
        nonlocal best
        if tell is not None and seconds < best:
            best = seconds
            tell(seconds)

    token = _WATCHER.set(tell_faster)
    try:
        yield
    finally:
        _WATCHER.reset(token)


def tell_best(plan: ScoredPlan) -> None:
    """Report the best plan so far to the innermost `watching_best`."""
    if (tell := _WATCHER.get()) is not None:
        tell(plan.step_seconds)
