"""The robust choice against every plan of small problems, on the same draws; and what a plan file says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate, combinations, product

import numpy as np
import pytest

from pplan.cost_models.errors import UsageError
from pplan.cost_models.topology import Group
from pplan.planner.candidate import Proposal, ScoredPlan
from pplan.planner.joint_search import find_best_plan
from pplan.planner.objectives.frontier import build_frontier
from pplan.planner.objectives.objective import Objective
from pplan.planner.objectives.solve_objective import solve_objective
from pplan.planner.plan_file import Plan, ProfileReference
from pplan.planner.plan_options import PlanOptions
from pplan.planner.problem import Problem
from pplan.planner.robust import (
    DEVICE_SAMPLES,
    DrawnSteps,
    Draws,
    RobustPlan,
    StepSampler,
    estimate_interval,
    make_draws,
    most_robust,
    variations,
)
from pplan.planner.scoring import fastest
from pplan.planner.search.pipelines import build_pipelines
from pplan.planner.stage_table import Floats

MakeProblem = Callable[..., Problem]
PROFILE = ProfileReference(file="toy.profile.json", sha256="0" * 64)


def every_proposal(problem: Problem) -> Iterator[Proposal]:
    """All cuts, numbers of replicas, on the devices from rank 0 on, and settings."""
    cuts = [int(i) + 1 for i in np.flatnonzero(problem.chain.cut_after)]
    gpus, layers = problem.gpus, len(problem.chain)
    for stages in range(1, min(gpus, len(cuts) + 1) + 1):
        for chosen, counts in product(
            combinations(cuts, stages - 1), product(range(1, gpus + 1), repeat=stages)
        ):
            if sum(counts) <= gpus:
                starts = (0, *accumulate(counts))
                devices = tuple(tuple(range(s, s + c)) for s, c in zip(starts[:-1], counts, strict=True))
                for config in problem.configs:
                    yield Proposal(config, (*chosen, layers), devices)


def high(steps: Floats) -> float:
    return DrawnSteps.of(steps).high_seconds


def best_of_all(
    problem: Problem, draws: Draws | None = None, seconds: Callable[[Floats], float] = high
) -> tuple[Proposal, float]:
    """The plan with the best 90th percentile, or other figure of its steps, and that."""
    resampled, best = StepSampler(problem.space, draws or make_draws(len(problem.chain))), None
    for proposal in every_proposal(problem):
        plan = fastest(problem.space, [proposal]) if problem.allows(proposal) else None
        if plan is not None:
            own = seconds(resampled.step_seconds(plan))
            if best is None or own < best[1]:
                best = proposal, own
    assert best is not None
    return best


def chosen_of(problem: Problem) -> RobustPlan:
    return most_robust(problem, find_best_plan(problem))


@pytest.fixture
def uncertain(make_problem: MakeProblem, every_cut: Callable[[Problem], Problem]) -> Problem:
    """Four layers on two devices, next to no traffic: 3.0 + 1.0 | 2.0 + 2.1 seconds is the best split, but
    the first layer may as well take twice as long: alone on its stage it does less harm."""
    problem = every_cut(make_problem(0, 4, 2, uncertainty=None, spread=0.0, micro_batches=4, schedule="1f1b"))
    chain, own = problem.chain, np.array([[3.0], [1.0], [2.0], [2.1]])
    seconds = own @ np.ones((1, len(chain.sizes)))
    chain = replace(
        chain,
        forward_seconds=seconds / 3,
        backward_seconds=2 * seconds / 3,
        output_bytes=np.ones_like(seconds),
        trainable_bytes=1e9 * np.ones(4),
        parameter_bytes=1e9 * np.ones(4),
        spread=np.array([[1.5], [0.0], [0.0], [0.0]]) @ np.ones((1, len(chain.sizes))),
    )
    return replace(problem, chain=chain)


def test_an_uncertain_layer_is_given_room(uncertain: Problem) -> None:
    nominal = find_best_plan(uncertain).best
    assert nominal is not None
    assert nominal.proposal.ends == (2, 4)
    chosen = chosen_of(uncertain)
    assert chosen.plan.proposal.ends == (1, 4)
    assert not chosen.is_fastest
    proposal, high = best_of_all(uncertain)
    assert chosen.plan.proposal == proposal
    assert chosen.steps.high_seconds == high
    assert chosen.steps.high_seconds < chosen.fastest_steps.high_seconds * 0.95
    assert chosen.plan.step_seconds > nominal.step_seconds


@pytest.mark.slow
def test_against_every_plan(make_problem: MakeProblem) -> None:
    """It is no exact search, and yet of these it finds the best each time."""
    others = 0
    for seed in range(6):
        problem = make_problem(seed, 5, 3, spread=2.0, mini_batch=4)
        chosen, (_, high) = chosen_of(problem), best_of_all(problem)
        assert chosen.steps.high_seconds == pytest.approx(high, rel=1e-9), seed
        assert chosen.steps.high_seconds <= chosen.fastest_steps.high_seconds
        interval = estimate_interval(problem.space, chosen.plan)
        assert interval is not None
        assert interval.high_seconds == chosen.steps.high_seconds
        others += not chosen.is_fastest
    assert others >= 2


def exact_mean(problem: Problem, plan: ScoredPlan) -> tuple[float, float]:
    """Of the step over every set of slow devices by its probability, and the standard deviation: each set is
    a machine of its own, whose slow devices have less speed."""
    assert problem.options.slow_devices is not None
    share, times = problem.options.slow_devices
    steps, weights = [], []
    for slow in product((False, True), repeat=problem.gpus):
        kinds = [problem.topology.device(rank) for rank in range(problem.gpus)]
        groups = tuple(
            Group(replace(kind, name=f"{kind.name} {own}", speed=kind.speed / (times if own else 1)), 1)
            for kind, own in zip(kinds, slow, strict=True)
        )
        machine = replace(problem, topology=replace(problem.topology, groups=groups))
        pipelines = build_pipelines(machine.space, [plan.proposal], [plan.recompute])
        steps.append(float(pipelines.step_seconds()[0]))
        weights.append(np.prod([share if own else 1 - share for own in slow]))
    mean = float(np.average(steps, weights=weights))
    return mean, float(np.sqrt(np.average((np.array(steps) - mean) ** 2, weights=weights)))


@pytest.mark.slow
def test_slow_devices_against_every_plan_and_every_set(make_problem: MakeProblem) -> None:
    """Of all plans none has a shorter mean over the draws, which lies where that of every set of slow devices
    lies, as far as so many draws tell; and by that, too, no plan is better by more than the draws' error."""
    for seed in range(4):
        slow = ((0.3, 3.0), (0.1, 4.0))[seed % 2]
        options = {"mini_batch": 4, "slow_devices": slow, "schedule": "1f1b"}
        problem = make_problem(seed, 5, 3, spread=0.0, uncertainty=None, mixed=seed % 3 == 2, **options)
        problem = replace(problem, chain=replace(problem.chain, spread=None))
        chosen = chosen_of(problem)
        draws = make_draws(5, DEVICE_SAMPLES, 3, slow)
        _, least = best_of_all(problem, draws, lambda steps: float(np.mean(steps)))
        # Of unlike devices a stage may have any, of which the plans on them in rank order are some.
        assert chosen.steps.mean_seconds <= least * (1 + 1e-9), seed
        mean, deviation = exact_mean(problem, chosen.plan)
        assert abs(chosen.steps.mean_seconds - mean) < 4 * deviation / DEVICE_SAMPLES**0.5
        nominal, _ = exact_mean(problem, find_best_plan(problem).best or chosen.plan)
        assert mean < nominal * 1.005


@pytest.mark.parametrize("seed", range(4))
def test_without_spread_it_is_the_fastest(make_problem: MakeProblem, seed: int) -> None:
    problem = make_problem(seed, 6, 3, spread=0.0, uncertainty=0.0)
    answer = find_best_plan(problem)
    chosen = most_robust(problem, answer)
    assert chosen.plan == answer.best
    assert chosen.is_fastest
    assert chosen.steps.high_seconds == pytest.approx(chosen.plan.step_seconds, rel=1e-12)
    assert chosen.compared > 1


def test_variations_keep_to_the_wishes(make_problem: MakeProblem) -> None:
    problem = make_problem(1, 6, 4, keep_together=("layer[0-2]",))
    config = problem.configs[0]
    found = set(variations(problem, Proposal(config, (4, 6), ((0, 1), (2, 3)))))
    cuts = {int(i) + 1 for i in np.flatnonzero(problem.space.chain.cut_after)}
    assert {end for plan in found for end in plan.ends} <= cuts | {6}
    assert {plan.replicas for plan in found if len(plan.ends) == 2} == {
        (2, 2),
        (1, 3),
        (3, 1),
        (1, 2),
        (2, 1),
    }
    assert {plan.replicas for plan in found if len(plan.ends) == 1} == {(4,)}
    assert Proposal(config, (4, 6), ((0,), (1, 2, 3))) in found
    elsewhere = Proposal(config, (4, 6), ((0, 2), (1, 3)))
    assert {plan.devices for plan in variations(problem, elsewhere)} <= {elsewhere.devices}


def solved(problem: Problem, objective: Objective | None = None) -> Plan:
    return solve_objective(objective or Objective(), problem, model="toy", profile=PROFILE)


def test_the_plan_says_what_was_chosen(uncertain: Problem) -> None:
    problem = replace(uncertain, options=replace(uncertain.options, robust=True))
    plan, nominal = solved(problem), solved(uncertain)
    assert plan.balance == [1, 3]
    assert nominal.balance == [2, 2]
    assert plan.options.robust
    assert plan.options.robust
    assert plan.objective is not None
    assert plan.objective.name == "robust"
    assert plan.objective.value == plan.prediction.high_seconds
    assert nominal.prediction.high_seconds is not None
    assert plan.objective.value < nominal.prediction.high_seconds
    assert plan.prediction.step_seconds > nominal.prediction.step_seconds
    assert plan.prediction.lower_bound_seconds == nominal.prediction.lower_bound_seconds
    assert nominal.prediction.exact
    assert not plan.prediction.exact
    note = next(note for note in plan.notes if note.startswith("compared at the 90th percentile"))
    compared = most_robust(uncertain, find_best_plan(uncertain)).compared
    assert f"{compared} plans" in note
    assert solved(problem) == plan
    assert Plan.parse(plan.to_json(), "x") == plan


def test_where_the_fastest_is_the_most_robust_it_stays(make_problem: MakeProblem) -> None:
    problem = make_problem(2, 5, 2, spread=0.0)
    plan = solved(replace(problem, options=replace(problem.options, robust=True)))
    nominal = solved(problem)
    assert plan.balance == nominal.balance
    assert plan.prediction == nominal.prediction
    assert any("the fastest plan is also the best of these" in note for note in plan.notes)


def test_refused_where_it_says_nothing(make_problem: MakeProblem) -> None:
    problem = make_problem(2, 5, 2)
    requested = replace(problem, options=replace(problem.options, robust=True))
    unknown = replace(requested, chain=replace(problem.chain, spread=None))
    with pytest.raises(UsageError, match="has no spread of the layers' seconds"):
        solved(unknown)
    with pytest.raises(UsageError, match="`robust` with objective='memory'"):
        solved(requested, Objective("memory"))
    with pytest.raises(UsageError, match="`robust` with `frontier`"):
        build_frontier(requested, model="toy", profile=PROFILE)
    with pytest.raises(UsageError, match="`robust` with planner='gpipe'"):
        PlanOptions(planner="gpipe", robust=True)
    with pytest.raises(UsageError, match="`slow_devices` with planner='gpipe'"):
        PlanOptions(planner="gpipe", slow_devices=(0.1, 2.0))
