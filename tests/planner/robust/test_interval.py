"""The interval of a step: percentiles straight from the layers, nothing without spread, the steady state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from pplan.cost_models.memory import Recompute
from pplan.planner.asynchronous import assemble_endless, steady_seconds, steady_steps
from pplan.planner.candidate import PipelineConfig, Proposal, ScoredPlan
from pplan.planner.problem import Problem
from pplan.planner.robust import (
    DrawnSteps,
    Draws,
    StepSampler,
    estimate_interval,
    make_draws,
)
from pplan.planner.scoring import fastest

MakeProblem = Callable[..., Problem]
Freed = Callable[[Problem], Problem]
ALONE = Proposal(PipelineConfig("1f1b", "by_stage", 4, 2), (6,), ((0,),))


def test_none_where_the_spread_is_not_known(make_problem: MakeProblem) -> None:
    problem = make_problem(1, 6, 1)
    problem = replace(problem, chain=replace(problem.chain, spread=None))
    plan = fastest(problem.space, [ALONE])
    assert plan is not None
    assert estimate_interval(problem.space, plan) is None


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw"])
@pytest.mark.parametrize("seed", range(4))
def test_steady_steps_against_the_simulator(
    make_problem: MakeProblem,
    every_cut: Freed,
    as_drawn: Callable[[Problem, Draws, int], Problem],
    schedule: str,
    seed: int,
) -> None:
    """Of the medians and of drawn chains one by one, in the simulator's steady state."""
    problem = every_cut(make_problem(seed, 6, 4))
    count = 1 if schedule == "pipedream" else 4
    proposal = Proposal(
        PipelineConfig(schedule, "by_stage", count, 8 // count),
        (1, 3, 6),
        ((0,), (1, 2) if seed % 2 else (1,), (3,)),
    )
    modes: tuple[Recompute, ...] = ("always", "never", "never")
    draws = make_draws(6, 2)
    made = assemble_endless(problem.space, proposal, modes)
    steps = steady_steps(StepSampler(problem.space, draws).costs(made), count)
    alone = [
        steady_seconds(as_drawn(problem, draws, number).space, proposal, modes)
        for number in range(len(draws))
    ]
    assert steps == pytest.approx(alone, rel=1e-6)
    assert estimate_interval(problem.space, ScoredPlan(proposal, modes, 1.0), draws) == DrawnSteps.of(steps)
