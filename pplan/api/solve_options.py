"""Options of `solve` that make several plans: a frontier, or a sweep."""

from __future__ import annotations

from typing import Literal

from ..cost_models import arguments
from ..cost_models.arguments import Options, option, options_class


@options_class
class FrontierOptions(Options):
    """`points`: at most so many plans, each with less memory than the one before by the share `memory_step`
    at least (0: none is left out)."""

    points: int = option(
        24,
        arguments.whole,
        "Of `frontier`: at most so many plans, 2 % of memory apart.",
        "N",
        least=1,
        panel="The objective",
    )
    memory_step: float = option(0.02, arguments.number)


@options_class
class SweepOptions(Options):
    """`jobs`: how many points run side by side (None: as many as there are cores). `backend`: processes of
    this machine, or a cluster of Dask (at DASK_SCHEDULER_ADDRESS) or Ray."""

    backend: Literal["processes", "dask", "ray"] | str = option(
        "processes",
        arguments.word,
        "Of `sweep`: where it runs, on this machine or a cluster.",
        "processes|dask|ray",
        panel="Many problems",
    )
    jobs: int | None = option(
        None,
        arguments.optional_whole,
        "Of `sweep`: how many run at once; default: one per core.",
        "N",
        least=1,
        panel="Many problems",
    )
