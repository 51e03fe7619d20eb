"""A configuration: what a plan fixes besides its cuts and devices (schedule, recomputation,
micro-batches)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from ..cost_models.errors import UsageError
from ..cost_models.runtime import OFFLOAD, Runtime

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
        return f"{self.micro_batches} x {self.micro_batch_size}, {self.schedule}{chunks}, recompute {mode}"


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
