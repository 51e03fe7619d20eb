"""Configurations, proposals and scored plans: the description of a plan inside the search."""

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
"""Most micro-batches of a step. Every one is simulated on every stage."""
SEARCHED = ("1f1b", "gpipe")
"""Schedules that are searched exactly. `auto` stands for these if no runtime is named."""
ANY_SCHEDULE = "any"
"""Option value for every published schedule that is synchronous and trains one model."""
INTERLEAVED = "interleaved"
"""Name of the planner of interleaved pipelines, and of its schedule."""
SYNTHESIZED = "synthesized"
"""Option value for these and an order made for the plan. That schedule's name ends with its hash."""

FIRST_LAYERS: Final = "first_layers"
"""Option value for stages that recompute as few first layers as they must."""
UNPROPOSED: tuple[Literal["first_layers", "offload"], ...] = (FIRST_LAYERS, OFFLOAD)
"""Recomputation that is searched for 1F1B and GPipe only if asked for.

Only the search's own bound covers it, and no named planner proposes it.
"""
LIMITED_RECOMPUTE: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(UNPROPOSED, SEARCHED),
    "except_last": ("gpipe",),
}
"""Schedules that are searched with a recomputation mode that not all schedules have."""
SEVERAL_PARTS = ("interleaved", "looped-bfs")
"""Schedules of any number of virtual stages."""
VIRTUAL_STAGES = (2, 3, 4)
"""Numbers of virtual stages that are planned for them."""

Mode = Literal["by_stage", "first_layers", "offload", "never", "always", "except_last"]
"""Recomputation of a configuration.

- `by_stage`: each stage recomputes all layers or none, as it must.
- `first_layers`: each stage recomputes as few first layers as it must.
- `offload`: each stage recomputes all layers, offloads or does nothing, as it must.
- `never`, `always`, `except_last`: all stages do the same.
"""
MODES: tuple[Mode, ...] = ("by_stage", "first_layers", "offload", "never", "except_last", "always")
_MUST = {
    "by_stage": "where it must",
    "first_layers": "first layers where it must",
    "offload": "or offload where it must",
}


@dataclass(frozen=True)
class PipelineConfig:
    """Schedule, recomputation and micro-batches of a pipeline, with the virtual stages of each device."""

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
        """Return the configuration in words."""
        chunks = f", {self.virtual_stages} virtual stages" if self.virtual_stages > 1 else ""
        mode = _MUST.get(self.recompute) or self.recompute.replace("_", " ")
        batch = format_batch(self.micro_batches, self.micro_batch_size)
        return f"{batch}, {self.schedule}{chunks}, recompute {mode}"


def pipeline_configs(
    mini_batch: int, schedules: Sequence[str], modes: Sequence[Mode], sizes: Sequence[int]
) -> list[PipelineConfig]:
    """Return every configuration for these micro-batch sizes, preferred ones first.

    Schedules and modes keep their order, and few micro-batches come before many. `except_last` is only listed
    for GPipe, which alone runs the last micro-batch's backward first, and for several micro-batches.

    Args:
        mini_batch: Samples of a step.
        schedules: Names of schedules.
        modes: Recomputation modes.
        sizes: Micro-batch sizes.
    """
    return [
        PipelineConfig(schedule, mode, mini_batch // size, size)
        for schedule in schedules
        for mode in modes
        for size in sorted(sizes, reverse=True)
        if mode != "except_last" or (schedule == "gpipe" and mini_batch > size)
    ]


def abbreviate(values: Sequence[int]) -> str:
    """Return the values as text: the first twelve, and the last of many."""
    text = ", ".join(str(value) for value in values[:12])
    return text if len(values) <= 12 else f"{text}, … {values[-1]}"


def make_config_error(schedule: str, recompute: str, runtime: Runtime | None) -> UsageError:
    """Return the error of a request that leaves no configuration."""
    request = f"schedule={schedule!r}, recompute={recompute!r}"
    if runtime is None or (recompute in runtime.recompute and recompute == "except_last"):
        return UsageError(
            f"{request} needs 2 micro-batches or more, and the global batch makes 1",
            "Leave `recompute` at auto, or use two micro-batches or more.",
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
    """Layers of a pipeline by stage, its devices, its schedule and its micro-batches.

    With several virtual stages per device, `ends` and `devices` are by part of the layers, in the order of a
    micro-batch, and the devices repeat.

    Attributes:
        config: Schedule, recomputation and micro-batches.
        ends: By stage, the number of layers up to its end. The last is the number of layers of the chain.
        devices: By stage, the ranks of its replicas, which share every micro-batch.
    """

    config: PipelineConfig
    ends: tuple[int, ...]
    devices: tuple[tuple[int, ...], ...]
    estimate_seconds: float | None = field(default=None, compare=False)
    """Step in seconds by the estimate of the planner that proposes it. None if it has none."""

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """First layer and the layer after the last, by stage."""
        return list(pairwise((0, *self.ends)))

    @property
    def replicas(self) -> tuple[int, ...]:
        """Number of devices by stage."""
        return tuple(len(ranks) for ranks in self.devices)

    @property
    def device_count(self) -> int:
        """Number of devices."""
        return len({device for ranks in self.devices for device in ranks})


@dataclass(frozen=True)
class ScoredPlan:
    """A proposal that fits, with the recomputation of each stage and its simulated step."""

    proposal: Proposal
    recompute: tuple[Recompute, ...]
    step_seconds: float

    @property
    def config(self) -> PipelineConfig:
        """Schedule, recomputation and micro-batches."""
        return self.proposal.config


def linear_pipeline(config: PipelineConfig, ends: Sequence[int], first_device: int = 0) -> Proposal:
    """Return a pipeline of one device per stage: stage s on device `first_device` + s."""
    devices = tuple((first_device + stage,) for stage in range(len(ends)))
    return Proposal(config, tuple(int(end) for end in ends), devices)


def replicated_pipeline(
    config: PipelineConfig,
    ends: Sequence[int],
    replicas: Sequence[int],
    estimate_seconds: float | None = None,
) -> Proposal:
    """Return a pipeline with `replicas` devices by stage, on the devices from rank 0 on."""
    devices, first = [], 0
    for count in replicas:
        devices.append(tuple(range(first, first + count)))
        first += count
    return Proposal(config, tuple(int(end) for end in ends), tuple(devices), estimate_seconds)


def near_shapes(
    cut_points: Sequence[int], ends: tuple[int, ...], replicas: tuple[int, ...], devices: int
) -> Iterator[Shape]:
    """Yield neighbours of a shape.

    A cut or a device moves, a device is added or removed, two stages are joined, or one is split.

    Args:
        cut_points: Allowed cuts, with 0 and the number of layers.
        ends: By stage, the number of layers up to its end.
        replicas: By stage, the number of devices.
        devices: Most devices.
    """
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
        tell: The function to call. None for a search that answers a question other than the user's.
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
