"""Seconds of reducing gradients over the replicas, updating the weights and gathering them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..optimizers import MIXED_FLOAT32_GRADIENTS, find_optimizer
from .kernel_table import CollectiveName
from .parallel_degrees import ParallelDegrees
from .rank_costs import RankCosts, rank_group

WEIGHT, GRADIENT, STATE = 2, 4, 12

"""Bytes of a parameter: in bfloat16, its float32 gradient, and Adam's float32 master weight and two
moments."""

NUMERIC_FORMATS = "bfloat16 with float32 gradients and Adam"
"""Numeric formats of weights, gradients and optimizer state, as messages name them."""

_UPDATED = find_optimizer("adam").update_bytes(MIXED_FLOAT32_GRADIENTS) + 4

"""That the update of a parameter reads and writes; its master weight is read again to be rounded."""


class ParameterCounts(NamedTuple):
    """Of one device: dense ones, and those of its routed experts."""

    dense: float
    routed: float

    def plus(self, other: ParameterCounts) -> ParameterCounts:
        return ParameterCounts(self.dense + other.dense, self.routed + other.routed)


class Line(NamedTuple):
    """`start` + `slope` x, for x above 0."""

    start: float
    slope: float


def line_below(seconds: Callable[[float], float], least: float, most: float, *, is_concave: bool) -> Line:
    """Return a line that `seconds` is nowhere below from `least` to `most`.

    The chord of a concave function is below it. Otherwise the line through the origin is: seconds(x) / x must
    not rise with x.
    """
    if is_concave and least < most:
        first, last = seconds(least), seconds(most)
        slope = (last - first) / (most - least)
        return Line(last - slope * most, slope)
    return Line(0.0, seconds(most) / most)


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
        if size > 1 and not degrees.zero:
            total += links.collective("all_reduce", GRADIENT * count, size, stride)
        if size > 1 and degrees.zero and not degrees.reduces_each:
            total += links.collective("reduce_scatter", GRADIENT * count, size, stride)
        # In a pipeline ZeRO 2 gathers once a step; where a schedule gathers stages, the simulator has it.
        if size > 1 and (degrees.zero == 1 or (degrees.zero == 2 and degrees.pipeline > 1)):
            total += links.collective("all_gather", WEIGHT * count, size, stride)
        passes = sum(costs.memory_seconds(bytes) for bytes in update_passes(count, share, degrees, costs))
        total += passes * (costs.corrections.update or 1.0)
    return total


def update_passes(count: float, share: float, degrees: ParallelDegrees, costs: RankCosts) -> list[float]:
    """Bytes of the passes over so many parameters, of which a device updates a share: gradients are zeroed,
    looked through for what is no number and divided by the replicas (both in megatron-core's
    `start_grad_sync`, Megatron-LM's defaults; FSDP does it in its collectives), their norm is taken, they are
    scaled down to it (as long as it is above 1, where Megatron-LM clips), the weights are updated."""
    whole = [GRADIENT * count]
    if degrees.zero > 1 or costs.implementation.uses_fsdp:
        whole = [GRADIENT * share]
    elif degrees.gradient_group > 1:
        whole += [GRADIENT * count, 2 * GRADIENT * count]
    else:
        whole += [GRADIENT * count]
    return [*whole, GRADIENT * share, 2 * GRADIENT * share, _UPDATED * share]
