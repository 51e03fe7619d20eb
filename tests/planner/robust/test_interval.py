"""The interval of a step: percentiles straight from the layers, nothing without spread, the steady state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from pplan.cost_models.memory import Recompute
from pplan.planner import robust
from pplan.planner.asynchronous import assemble_endless, steady_seconds, steady_steps
from pplan.planner.candidate import PipelineConfig, Proposal, ScoredPlan
from pplan.planner.problem import Problem
from pplan.planner.robust import (
    FEWEST,
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
INTERLEAVED = Proposal(
    PipelineConfig("interleaved", "by_stage", 4, 2, 2), (1, 2, 3, 6), ((0, 1), (2,), (0, 1), (2,))
)


def test_of_one_device_straight_from_the_layers(make_problem: MakeProblem) -> None:
    problem = make_problem(1, 6, 1)
    plan = fastest(problem.space, [ALONE])
    assert plan is not None
    costs, draws = problem.chain.at(2), make_draws(6)
    assert costs.spread is not None
    # sigma from the quartiles of exp(sigma z), which lie 2 sinh(0.6745 sigma) apart
    sigma = np.arcsinh(costs.spread / 2) / 0.6744897501960817
    layers = (costs.forward_seconds + costs.backward_seconds) * np.exp(sigma * draws.layers)
    steps = 4 * layers.sum(axis=1) * 1.02**draws.common
    found = estimate_interval(problem.space, plan)
    assert found is not None
    assert found.low_seconds == pytest.approx(np.percentile(steps, 10))
    assert found.high_seconds == pytest.approx(np.percentile(steps, 90))
    assert found.low_seconds < plan.step_seconds < found.high_seconds


def test_without_spread_it_is_the_step(make_problem: MakeProblem, every_cut: Freed) -> None:
    problem = every_cut(make_problem(1, 6, 3, spread=0.0, uncertainty=0.0))
    proposal = Proposal(PipelineConfig("1f1b", "by_stage", 4, 2), (3, 6), ((0, 1), (2,)))
    plan = fastest(problem.space, [proposal])
    assert plan is not None
    found = estimate_interval(problem.space, plan)
    assert found is not None
    assert (found.low_seconds, found.high_seconds) == (plan.step_seconds, plan.step_seconds)


def test_none_where_the_spread_is_not_known(make_problem: MakeProblem) -> None:
    problem = make_problem(1, 6, 1)
    problem = replace(problem, chain=replace(problem.chain, spread=None))
    plan = fastest(problem.space, [ALONE])
    assert plan is not None
    assert estimate_interval(problem.space, plan) is None


def test_of_many_stages_alike_the_slowest_counts(make_problem: MakeProblem, every_cut: Freed) -> None:
    """With every stage alike, even the low end lies above the step by the medians."""
    problem = every_cut(make_problem(1, 8, 8, uncertainty=None, spread=0.0, mini_batch=64))
    alike = np.ones_like(problem.chain.forward_seconds)
    chain = replace(
        problem.chain,
        forward_seconds=alike,
        backward_seconds=2 * alike,
        output_bytes=alike,
        spread=0.2 * alike,
    )
    problem = replace(problem, chain=chain)
    ends, devices = tuple(range(1, 9)), tuple((rank,) for rank in range(8))
    plan = fastest(problem.space, [Proposal(PipelineConfig("1f1b", "by_stage", 64, 1), ends, devices)])
    assert plan is not None
    found = estimate_interval(problem.space, plan)
    assert found is not None
    assert plan.step_seconds < found.low_seconds < found.high_seconds


def test_fewer_draws_where_they_go_one_by_one(
    make_problem: MakeProblem, every_cut: Freed, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = every_cut(make_problem(3, 6, 3, schedule="interleaved"))
    plan = fastest(problem.space, [INTERLEAVED])
    assert plan is not None
    steps = StepSampler(problem.space, make_draws(6)).step_seconds(plan)
    assert estimate_interval(problem.space, plan) == DrawnSteps.of(steps)
    monkeypatch.setattr(robust, "ONE_BY_ONE", 1)
    assert estimate_interval(problem.space, plan) == DrawnSteps.of(steps[:FEWEST])


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
