"""Seconds of reducing gradients over the replicas, updating the weights and gathering them."""

from __future__ import annotations

from typing import NamedTuple

from ..optimizers import MIXED_FLOAT32_GRADIENTS, find_optimizer
from .kernel_table import CollectiveName
from .parallel_degrees import ParallelDegrees
from .rank_costs import RankCosts, rank_group

WEIGHT, GRADIENT, STATE = 2, 4, 12

"""Bytes of a parameter: in bfloat16, its float32 gradient, and Adam's float32 master weight and two
moments."""

_UPDATED = find_optimizer("adam").update_bytes(MIXED_FLOAT32_GRADIENTS)

"""That the update of a parameter reads and writes."""


class ParameterCounts(NamedTuple):
    """Of one device: dense ones, and those of its routed experts."""

    dense: float
    routed: float

    def plus(self, other: ParameterCounts) -> ParameterCounts:
        return ParameterCounts(self.dense + other.dense, self.routed + other.routed)


def gradient_collective(
    name: CollectiveName, bytes: int, parameters: ParameterCounts, degrees: ParallelDegrees, costs: RankCosts
) -> float:
    """Of so many bytes of each parameter, among the devices that add up its gradients."""
    total = 0.0
    for count, group in ((parameters.dense, "gradients"), (parameters.routed, "expert_gradients")):
        size, stride = rank_group(group, degrees)
        if count and size > 1:
            total += costs.links.collective(name, bytes * count, size, stride)
    return total


def update_seconds(own: ParameterCounts, degrees: ParallelDegrees, costs: RankCosts) -> float:
    """Reduction, update and gathering of the weights; with ZeRO each device updates its share."""
    key = own, degrees
    if key not in costs.updates:
        costs.updates[key] = _update_seconds(own, degrees, costs)
    return costs.updates[key]


def _update_seconds(own: ParameterCounts, degrees: ParallelDegrees, costs: RankCosts) -> float:
    total = 0.0
    for count, group in ((own.dense, "gradients"), (own.routed, "expert_gradients")):
        if not count:
            continue
        size, stride = rank_group(group, degrees)
        links = costs.links
        share = count
        if degrees.zero:
            share = count / size
        if size > 1 and degrees.zero == 1:
            total += links.collective("reduce_scatter", GRADIENT * count, size, stride)
            total += links.collective("all_gather", WEIGHT * count, size, stride)
        elif size > 1 and not degrees.zero:
            total += links.collective("all_reduce", GRADIENT * count, size, stride)
        # The gradients are zeroed, their norm is taken, the weights are updated.
        zeroed = share if degrees.zero > 1 else count
        for bytes in (GRADIENT * zeroed, GRADIENT * share, _UPDATED * share):
            total += costs.memory_seconds(bytes)
    return total
