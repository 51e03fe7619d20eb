"""The step of a pipeline that is never flushed, under many draws side by side."""

from __future__ import annotations

import numpy as np

from ...cost_models.simulator.costs import Array, Costs
from ..stage_table import Floats


def steady_steps(costs: Costs, micro_batches: int) -> Floats:
    """(candidates,): seconds of a further mini-batch, of `micro_batches`, of a straight pipeline whose stage
    i of p holds p - i of them: the formula at the head of objectives/steady_search.py."""
    work = _by_stage(costs.backward) + _by_stage(costs.forward) * (1 + _by_stage(costs.recompute))
    occupancy, latency = _by_cut(costs.forward_occupancy), _by_cut(costs.forward_latency)
    way = occupancy + latency
    longest = np.max(np.broadcast_to(work, (len(work), costs.candidates or 1)), axis=0)
    for start in range(len(work)):
        seconds = work[start]
        for end in range(start + 1, len(work)):
            seconds = seconds + work[end] + 2 * way[end - 1]
            longest = np.maximum(longest, seconds / (end - start + 1))
    if len(occupancy):
        longest = np.maximum(longest, occupancy.max(axis=0))
    if costs.all_reduce is not None:
        longest = np.maximum(longest, costs.all_reduce[:, 0].max(axis=0) / micro_batches)
    made: Floats = longest * micro_batches
    return made


def _by_stage(values: Array | None) -> Array:
    """(stages, candidates) of what is the same for all micro-batches."""
    return np.zeros((1, 1)) if values is None else values[:, 0, 0]


def _by_cut(values: Array | None) -> Array:
    """(cuts, candidates) of the one pipe."""
    return np.zeros((0, 1)) if values is None else values[0]
