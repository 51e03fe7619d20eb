"""Candidates: configurations, proposals and scored plans, the one description of a plan inside the search."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import pairwise, product
from math import inf
from typing import TYPE_CHECKING, Final, Literal

from ..cost_models.errors import UsageError
from ..cost_models.quantities import format_batch
from ..cost_models.runtime import OFFLOAD, Runtime

if TYPE_CHECKING:
    from ..cost_models.memory import Recompute

MOST_MICRO_BATCHES = 2**14
"""Of a step. Every one of them is simulated on every stage."""
SEARCHED = ("1f1b", "gpipe")
"""The schedules that are searched exactly, and that `auto` stands for where no runtime is named."""
ANY_SCHEDULE = "any"
"""The word for every published schedule that is synchronous and trains one model."""
INTERLEAVED = "interleaved"
"""The planner of interleaved pipelines, and its schedule."""
SYNTHESIZED = "synthesized"
"""The word for those and an order that is made for the plan; that schedule's name has its hash behind it."""

FIRST_LAYERS: Final = "first_layers"
"""The word for stages that run their first layers again, each as few as it must."""
UNPROPOSED: tuple[Literal["first_layers", "offload"], ...] = (FIRST_LAYERS, OFFLOAD)
"""The words for ways to recompute that are searched of 1F1B and GPipe where they are asked for, and that no
bound but the search's own knows, nor a named planner."""
LIMITED_RECOMPUTE: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(UNPROPOSED, SEARCHED),
    "except_last": ("gpipe",),
}
"""By word, the schedules that are searched with a way to recompute that not all schedules have."""
SEVERAL_PARTS = ("interleaved", "looped-bfs")
"""Schedules of any number of virtual stages."""
VIRTUAL_STAGES = (2, 3, 4)
"""Of theirs, those that are planned with."""

Mode = Literal["by_stage", "first_layers", "offload", "never", "always", "except_last"]
"""What recomputes: all stages in one way; or each as it must, the whole of it, or its first layers, as few as
there may be, or the whole of it or none, where it offloads instead: no stage that fits without does any."""
MODES: tuple[Mode, ...] = ("by_stage", "first_layers", "offload", "never", "except_last", "always")
_MUST = {
    "by_stage": "where it must",
    "first_layers": "first layers where it must",
    "offload": "or offload where it must",
}


@dataclass(frozen=True)
class PipelineConfig:
    """Schedule, recomputation and micro-batches of a pipeline; `virtual_stages` of each device."""

    schedule: str
    recompute: Mode
    micro_batches: int
    micro_batch_size: int
    virtual_stages: int = 1

    @property
    def mini_batch(self) -> int:
        """Samples of a step."""
        return self.micro_batches * self.micro_batch_size

    def __str__(self) -> str:
        chunks = f", {self.virtual_stages} virtual stages" if self.virtual_stages > 1 else ""
        mode = _MUST.get(self.recompute) or self.recompute.replace("_", " ")
        batch = format_batch(self.micro_batches, self.micro_batch_size)
        return f"{batch}, {self.schedule}{chunks}, recompute {mode}"


def pipeline_configs(
    mini_batch: int, schedules: Sequence[str], modes: Sequence[Mode], sizes: Sequence[int]
) -> list[PipelineConfig]:
    """Every configuration for these micro-batch sizes, the preferred among equals first: schedules and modes
    in their order, few micro-batches before many.

    `except_last` is torchgpipe's: only GPipe runs the last micro-batch's backward first, and with one
    micro-batch it is `never`.
    """
    return [
        PipelineConfig(schedule, mode, mini_batch // size, size)
        for schedule in schedules
        for mode in modes
        for size in sorted(sizes, reverse=True)
        if mode != "except_last" or (schedule == "gpipe" and mini_batch > size)
    ]


def abbreviate(values: Sequence[int]) -> str:
    """The values in words, the first twelve and the last of many."""
    text = ", ".join(str(value) for value in values[:12])
    return text if len(values) <= 12 else f"{text}, … {values[-1]}"


def make_config_error(schedule: str, recompute: str, runtime: Runtime | None) -> UsageError:
    """Where a request leaves no configuration."""
    request = f"schedule={schedule!r}, recompute={recompute!r}"
    if runtime is None or (recompute in runtime.recompute and recompute == "except_last"):
        return UsageError(
            f"{request} with 1 micro-batch: there is no such plan",
            "Leave `recompute` at auto, or cut the global batch into two micro-batches or more.",
        )
    modes = ", ".join(sorted(mode.replace("_", "-") for mode in runtime.recompute))
    return UsageError(
        f"runtime={runtime.name!r} does not run {request}",
        f"{runtime.name} runs {', '.join(sorted(runtime.schedules))} with recompute {modes}.",
    )


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
