"""The named planners: what known tools and papers would do, proposed for scoring."""

from __future__ import annotations

import difflib

from ...cost_models.errors import UsageError
from . import (
    alpa,
    asteroid,
    bottleneck_planners,
    dapple_planner,
    deepspeed_partition,
    equal_replicas,
    galvatron,
    megatron,
    pipedream_planner,
    rules,
    torch_partition,
    torchgpipe_balance,
)
from .base import Planner

_ALWAYS: tuple[Planner, ...] = (
    rules.ONE_GPU,
    rules.DATA_PARALLEL,
    rules.EVEN,
    deepspeed_partition.PARAMETERS,
    deepspeed_partition.TYPE,
    torchgpipe_balance.BY_TIME,
    torchgpipe_balance.BY_SIZE,
    rules.GPIPE,
    megatron.MEGATRON,
    megatron.INTERLEAVED,
    pipedream_planner.PIPEDREAM,
    pipedream_planner.PIPEDREAM_PUBLISHED,
    dapple_planner.DAPPLE,
    alpa.ALPA,
)
_FURTHER: tuple[Planner, ...] = (
    equal_replicas.WIDTH_AND_DEPTH,
    equal_replicas.AUTOPIPE,
    equal_replicas.BAPIPE,
    bottleneck_planners.SPP,
    bottleneck_planners.PIPER,
    asteroid.ASTEROID,
    galvatron.GALVATRON,
    torch_partition.TORCH_PARTITION,
)

PLANNERS: dict[str, Planner] = {planner.name: planner for planner in (*_ALWAYS, *_FURTHER)}
ALWAYS = tuple(planner.name for planner in _ALWAYS)
"""Those that every search asks; the others are asked by name, and where planners are compared."""


def find_planner(name: str) -> Planner:
    """The planner of that name; `deepspeed-type:REGEX` counts the layers that match.

    Raises UsageError, with the nearest name and all there are.
    """
    kind, colon, pattern = name.partition(":")
    if kind == deepspeed_partition.KIND and colon:
        return deepspeed_partition.DeepSpeedType(pattern)
    if name in PLANNERS:
        return PLANNERS[name]
    near = difflib.get_close_matches(name, PLANNERS, n=1)
    guess = f"Did you mean {near[0]}? " if near else ""
    raise UsageError(f"planner {name!r} is unknown", f"{guess}There are: best, {', '.join(PLANNERS)}.")


__all__ = ["ALWAYS", "PLANNERS", "find_planner"]
