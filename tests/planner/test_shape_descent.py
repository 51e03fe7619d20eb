"""Steps from plans to faster ones: what they may be, and that they end at plans that are what they say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, pairwise, product

import pytest

from pplan.cost_models.layer import Chain
from pplan.cost_models.topology import Topology
from pplan.planner.candidate import ScoredPlan, replicated_pipeline
from pplan.planner.plan_options import PlanOptions
from pplan.planner.problem import Problem
from pplan.planner.scoring import fastest
from pplan.planner.search.budget import SearchBudget
from pplan.planner.shape_descent import descend, far_shapes

MakeChain = Callable[..., Chain]
MakeTopology = Callable[..., Topology]


def test_shapes_a_step_away() -> None:
    """By hand, of two stages on three of four devices."""
    points = (0, 2, 4, 6, 8)
    assert set(far_shapes(points, (4, 8), (1, 2), 4)) == {
        *[((2, 8), (1, 2)), ((6, 8), (1, 2))],
        *[((4, 8), counts) for counts in ((2, 2), (1, 3), (1, 1), (2, 1))],
        *[((8,), (3,)), ((8,), (2,))],
        *[((2, 4, 8), (1, 1, 2))],
        *[((4, 6, 8), counts) for counts in ((1, 1, 1), (1, 2, 1), (1, 1, 2))],
    }


def test_every_shape_may_be() -> None:
    """Of all shapes of five places to cut on up to seven devices."""
    points = (0, 1, 2, 4, 7, 9)
    for stages in (1, 2, 3, 5):
        for inner in combinations(points[1:-1], stages - 1):
            for counts in product((1, 2, 4), repeat=stages):
                if sum(counts) > 7:
                    continue
                shapes = list(far_shapes(points, (*inner, 9), counts, 7))
                assert ((*inner, 9), counts) not in shapes
                for ends, replicas in shapes:
                    assert len(ends) == len(replicas)
                    assert ends[-1] == 9
                    assert set(ends) <= set(points[1:])
                    assert all(first < second for first, second in pairwise(ends))
                    assert min(replicas) >= 1
                    assert sum(replicas) <= 7


@pytest.mark.parametrize("seed", range(6))
def test_steps_lead_to_plans_that_are_faster_fit_and_are_not_below_the_best_of_all(
    seed: int, make_chain: MakeChain, make_topology: MakeTopology
) -> None:
    """From a plan of one stage. Against every shape and configuration on the devices in order."""
    chain = make_chain(seed, 5, cuts=1.1, traffic=[0.02, 0.3][seed % 2])
    topology = make_topology(4, memory=[None, 1800][seed // 3], per_node=[2, 4][seed % 2])
    problem = Problem(chain, topology, PlanOptions(mini_batch=8))
    space, layers = problem.space, len(chain)
    configs = [config for config in problem.configs if config.schedule in ("1f1b", "gpipe")]
    every = [
        replicated_pipeline(config, (*inner, layers), counts)
        for config in configs
        for stages in range(1, 5)
        for inner in combinations(range(1, layers), stages - 1)
        for counts in product(range(1, 5), repeat=stages)
        if sum(counts) <= 4
    ]
    every = [proposal for proposal in every if problem.allows(proposal)]
    least = fastest(space, every)
    slow = [plan for proposal in every[:40] if (plan := fastest(space, [proposal])) is not None]
    assert least is not None
    start = max(slow, key=lambda plan: plan.step_seconds)
    found = descend(problem, [start])
    assert found
    for plan in found:
        assert least.step_seconds <= plan.step_seconds < start.step_seconds
        assert problem.allows(plan.proposal)
        alone = fastest(space, [plan.proposal])
        assert alone is not None
        assert alone.recompute == plan.recompute
        assert alone.step_seconds == pytest.approx(plan.step_seconds, rel=1e-12)
    again = descend(problem, found)
    assert not again  # nothing near is faster


def test_no_step_without_work_or_from_another_schedule(
    make_chain: MakeChain, make_topology: MakeTopology
) -> None:
    problem = Problem(
        make_chain(1, 5), make_topology(4, memory=None), PlanOptions(mini_batch=8, schedule="any")
    )
    own = [config for config in problem.configs if config.schedule == "1f1b"]
    plan = fastest(problem.space, [replicated_pipeline(config, (5,), (1,)) for config in own])
    assert plan is not None
    assert descend(replace(problem, budget=SearchBudget(0.0)), [plan]) == []
    other = replace(plan, proposal=replace(plan.proposal, config=replace(plan.config, schedule="zb-h1")))
    assert isinstance(other, ScoredPlan)
    assert descend(problem, [other]) == []
