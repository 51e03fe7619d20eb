"""The 80 % interval of the step of a plan over draws of the layers' seconds, flushed or asynchronous."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...cost_models.simulator.costs import Array, Costs
from ...cost_models.timeline import runs_side_by_side
from ..assembly import Assembly
from ..asynchronous import assemble_endless
from ..candidate import ScoredPlan
from ..plan_options import ASYNCHRONOUS
from ..scoring import assemble
from ..search.space import Space
from ..stage_table import Floats
from .resampling import Draws, StepSampler, has_spread, make_draws

LOW, HIGH = 10, 90
"""Percentiles of the step."""
ONE_BY_ONE = 200_000
FEWEST = 40
"""Actions that are simulated where draws cannot be taken side by side, and draws at the least."""


@dataclass(frozen=True)
class Interval:
    """The percentiles `LOW` and `HIGH` of the step over the draws. Both may lie above the step of the
    medians: a pipeline is as slow as its slowest stage, and each time another one may be that."""

    low_seconds: float
    high_seconds: float


def estimate_interval(space: Space, plan: ScoredPlan, draws: Draws | None = None) -> Interval | None:
    """Of the plan's step; None where the profile does not tell the spread of its layers."""
    if not has_spread(space):
        return None
    draws = draws or make_draws(len(space.chain))
    if plan.config.schedule in ASYNCHRONOUS:
        assembly = assemble_endless(space, plan.proposal, plan.recompute)
        return percentiles(steady_steps(StepSampler(space, draws).costs(assembly), plan.config.micro_batches))
    assembly = assemble(space, plan.proposal, plan.recompute)
    own = draws.part(0, _affordable(assembly, len(draws)))
    return percentiles(StepSampler(space, own).steps(assembly))


def _affordable(assembly: Assembly, draws: int) -> int:
    """How many of the draws are simulated."""
    if runs_side_by_side(assembly.program, assembly.costs()):
        return draws
    actions = sum(len(own) for own in assembly.program.actions)
    return min(draws, max(FEWEST, ONE_BY_ONE // actions))


def percentiles(steps: Floats) -> Interval:
    """Of the steps of all draws, (samples,)."""
    low, high = np.percentile(steps, (LOW, HIGH))
    return Interval(float(low), float(high))


def steady_steps(costs: Costs, micro_batches: int) -> Floats:
    """(candidates,): seconds of a further global batch, of `micro_batches`, of a linear pipeline whose stage
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
    steps: Floats = longest * micro_batches
    return steps


def _by_stage(values: Array | None) -> Array:
    """(stages, candidates) of what is the same for all micro-batches."""
    return np.zeros((1, 1)) if values is None else values[:, 0, 0]


def _by_cut(values: Array | None) -> Array:
    """(cuts, candidates) of the one pipe."""
    return np.zeros((0, 1)) if values is None else values[0]
