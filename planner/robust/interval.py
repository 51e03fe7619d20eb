"""Between which seconds the step of a plan lies in 8 of 10 cases."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...cost_models.timeline import runs_side_by_side
from ..assembly import Assembly
from ..asynchronous import assemble_endless
from ..candidate import ScoredPlan
from ..plan_options import ASYNCHRONOUS
from ..scoring import assemble
from ..search.space import Space
from ..stage_table import Floats
from .draws import Draws, make_draws
from .resampled import Resampled, has_spread
from .steady import steady_steps

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
        made = assemble_endless(space, plan.proposal, plan.recompute)
        return percentiles(steady_steps(Resampled(space, draws).costs(made), plan.config.micro_batches))
    made = assemble(space, plan.proposal, plan.recompute)
    own = draws.part(0, _affordable(made, len(draws)))
    return percentiles(Resampled(space, own).steps(made))


def _affordable(made: Assembly, draws: int) -> int:
    """How many of the draws are simulated."""
    if runs_side_by_side(made.program, made.costs()):
        return draws
    actions = sum(len(own) for own in made.program.actions)
    return min(draws, max(FEWEST, ONE_BY_ONE // actions))


def percentiles(steps: Floats) -> Interval:
    """Of the steps of all draws, (samples,)."""
    low, high = np.percentile(steps, (LOW, HIGH))
    return Interval(float(low), float(high))
