"""What the devices of a problem may hold."""

from __future__ import annotations

from math import inf

from ..cost_models.quantities import format_bytes
from .problem import Problem


def list_limits(problem: Problem) -> list[float]:
    """Bytes that devices may hold, each once, ascending; inf of those whose memory is not known."""
    topology, offset, limits = problem.topology, 0, set[float]()
    for group in topology.groups:
        limits.add(problem.space.limit([offset]))
        offset += group.number
    return sorted(limits)


def smallest_limit(problem: Problem) -> int:
    return int(list_limits(problem)[0])


def room(problem: Problem) -> str:
    """What devices have, in words."""
    least, *more = map(format_bytes, (limit for limit in list_limits(problem) if limit < inf))
    return f"{least} to {more[-1]} a device" if more else f"{least} a device"
