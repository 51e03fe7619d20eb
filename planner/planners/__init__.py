"""The named planners, a file each: what known tools and papers would do, proposed for scoring."""

from __future__ import annotations

import difflib

from ...cost_models.errors import UsageError
from . import (
    alpa,
    dapple,
    data_parallel,
    deepspeed_type,
    even,
    gpipe,
    interleaved,
    megatron,
    one_gpu,
    parameters,
    pipedream,
    pipedream_published,
    torchgpipe_size,
    torchgpipe_time,
)
from .base import Planner

_ALL: tuple[Planner, ...] = (
    one_gpu.PLANNER,
    data_parallel.PLANNER,
    even.PLANNER,
    parameters.PLANNER,
    deepspeed_type.PLANNER,
    torchgpipe_time.PLANNER,
    torchgpipe_size.PLANNER,
    gpipe.PLANNER,
    megatron.PLANNER,
    interleaved.PLANNER,
    pipedream.PLANNER,
    pipedream_published.PLANNER,
    dapple.PLANNER,
    alpa.PLANNER,
)

PLANNERS: dict[str, Planner] = {planner.name: planner for planner in _ALL}


def planner_named(name: str) -> Planner:
    """The planner of that name; `deepspeed-type:REGEX` counts the layers that match.

    Raises UsageError, with the nearest name and all there are.
    """
    kind, colon, pattern = name.partition(":")
    if kind == deepspeed_type.KIND and colon:
        return deepspeed_type.DeepSpeedType(pattern)
    if name in PLANNERS:
        return PLANNERS[name]
    near = difflib.get_close_matches(name, PLANNERS, n=1)
    guess = f"Did you mean {near[0]}? " if near else ""
    raise UsageError(f"planner {name!r} is unknown", f"{guess}There are: best, {', '.join(PLANNERS)}.")


__all__ = ["PLANNERS", "planner_named"]
