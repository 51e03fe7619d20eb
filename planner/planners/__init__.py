"""Named planners: what known tools and papers would do, proposed for scoring."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from importlib import import_module

from ...cost_models.errors import UsageError
from .base import Planner

_FILES = {
    "one-gpu": "rules",
    "data-parallel": "rules",
    "even": "rules",
    "parameters": "deepspeed_partition",
    "deepspeed-type": "deepspeed_partition",
    "torchgpipe-time": "torchgpipe_balance",
    "torchgpipe-size": "torchgpipe_balance",
    "gpipe": "rules",
    "megatron": "rules",
    "interleaved": "rules",
    "pipedream": "pipedream_planner",
    "pipedream-published": "pipedream_planner",
    "dapple": "dapple_planner",
    "alpa": "alpa",
    "pipedream-2bw": "equal_replicas",
    "autopipe": "critical_stages",
    "bapipe": "equal_replicas",
    "spp": "bottleneck_planners",
    "piper": "bottleneck_planners",
    "asteroid": "asteroid",
    "galvatron": "equal_replicas",
    "torch-partition": "critical_stages",
}
BASELINES = ("one-gpu", "data-parallel", "even")
"""Plans from which every search starts, and with which every answer is compared."""


class _Planners(Mapping[str, Planner]):
    """Planners by name. Each is imported when it is used."""

    def __getitem__(self, name: str) -> Planner:
        module = import_module(f".{_FILES[name]}", __name__)
        planners: tuple[Planner, ...] = module.PLANNERS
        return next(planner for planner in planners if planner.name == name)

    def __iter__(self) -> Iterator[str]:
        return iter(_FILES)

    def __len__(self) -> int:
        return len(_FILES)


PLANNERS = _Planners()


def find_planner(name: str) -> Planner:
    """Return a planner; `deepspeed-type:REGEX` counts the layers that match.

    Raises:
        UsageError: There is no planner of that name. The error names the closest one and all others.
    """
    kind, colon, pattern = name.partition(":")
    if kind == "deepspeed-type" and colon:
        from .deepspeed_partition import deepspeed_type

        return deepspeed_type(pattern)
    if name in PLANNERS:
        return PLANNERS[name]
    near = difflib.get_close_matches(name, PLANNERS, n=1)
    guess = f"Did you mean {near[0]}? " if near else ""
    raise UsageError(f"planner {name!r} is unknown", f"{guess}There are: best, {', '.join(PLANNERS)}.")


__all__ = ["BASELINES", "PLANNERS", "find_planner"]
