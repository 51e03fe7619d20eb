"""The least memory, and the frontier of time against memory, against every plan of small spaces."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

import pplan
from pplan.cost_models.errors import FileError, InfeasibleError, UsageError
from pplan.planner.candidate import Proposal
from pplan.planner.joint_search import find_best_plan
from pplan.planner.objectives.frontier import Frontier, build_frontier
from pplan.planner.objectives.least_memory import least_memory
from pplan.planner.objectives.objective import Objective
from pplan.planner.objectives.objective_result import peak_bytes, with_memory_limit
from pplan.planner.objectives.solve_objective import solve_objective
from pplan.planner.plan_file import Plan, ProfileReference
from pplan.planner.problem import Problem
from pplan.profiler.profile_file import Profile

MakeProblem = Callable[..., Problem]
EveryPlan = Callable[[Problem], list[tuple[Proposal, float, float]]]
PROFILE = ProfileReference(file="toy.profile.json", sha256="0" * 64)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))])
def test_least_memory_of_all_plans_that_are_fast_enough(
    seed: int, make_problem: MakeProblem, every_plan: EveryPlan
) -> None:
    problem = make_problem(seed, 3 + seed % 2, 3, memory=[None, 900][seed % 2])
    every = every_plan(problem)
    assert every
    fastest = min(step for _, step, _ in every)
    for slack in (0.0, 0.1, 0.5):
        outcome, within = least_memory(problem, slack), fastest * (1 + slack) * (1 + 1e-9)
        least = min(in_flight for _, step, in_flight in every if step <= within)
        assert outcome.best is not None
        assert outcome.aim is not None
        assert outcome.best.step_seconds <= within
        assert peak_bytes(problem.space, outcome.best) == pytest.approx(least, abs=1.5)
        assert outcome.aim.value == pytest.approx(least, abs=1.5)
        assert outcome.aim.exact
        assert least - 2.5 <= outcome.aim.lower_bound <= least + 1.5
        assert outcome.result.bound_seconds <= fastest * (1 + 1e-9)


def pareto(every: list[tuple[Proposal, float, float]]) -> list[tuple[float, float]]:
    """Step and memory of the plans of which none is as good in both and better in one."""
    kept: list[tuple[float, float]] = []
    for _, step, in_flight in sorted(every, key=lambda row: (row[1] * (1 - 1e-12), row[2])):
        if not kept or in_flight < kept[-1][1] - 1.5:
            if kept and step <= kept[-1][0] * (1 + 1e-9):
                kept.pop()
            kept.append((step, in_flight))
    return kept


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 4))])
def test_the_frontier_is_that_of_all_plans(
    seed: int, make_problem: MakeProblem, every_plan: EveryPlan
) -> None:
    problem = make_problem(seed, 3 + seed % 2, 3)
    wanted = pareto(every_plan(problem))
    made = build_frontier(problem, model="toy", profile=PROFILE, points=1000, memory_step=0.0)
    assert [point.step_seconds for point in made.points] == pytest.approx([step for step, _ in wanted])
    assert [point.memory_bytes for point in made.points] == pytest.approx(
        [in_flight for _, in_flight in wanted], abs=2
    )
    assert all(point.exact for point in made.points)
    assert made.complete
    for point in made.points:
        assert point.plan.prediction.step_seconds == point.step_seconds
        assert max(stage.memory_bytes for stage in point.plan.stages) == pytest.approx(
            point.memory_bytes, abs=8
        )
        again = find_best_plan(with_memory_limit(problem, point.memory_bytes)).best
        assert again is not None, "what a point needs is less than its plan needs"
        assert again.step_seconds == pytest.approx(point.step_seconds)


def test_few_points_are_the_first_of_many(make_problem: MakeProblem) -> None:
    problem = make_problem(3, 4, 3)
    many = build_frontier(problem, model="toy", profile=PROFILE, memory_step=0.0, points=1000)
    few = build_frontier(problem, model="toy", profile=PROFILE, memory_step=0.0, points=2)
    assert len(many.points) > 2
    assert few.points == many.points[:2]
    assert not few.complete


def test_memory_steps_are_kept(make_problem: MakeProblem) -> None:
    made = build_frontier(make_problem(3, 4, 3), model="toy", profile=PROFILE, memory_step=0.2)
    in_flight = [point.memory_bytes for point in made.points]
    assert len(in_flight) > 1
    assert all(after <= before * 0.8 + 1 for before, after in pairwise(in_flight))


def test_a_frontier_is_read_back_and_is_no_plan(make_problem: MakeProblem, tmp_path: Path) -> None:
    made = build_frontier(make_problem(3, 4, 3), model="toy", profile=PROFILE)
    made.save(tmp_path / "toy.frontier.json", force=False)
    assert Frontier.load(tmp_path / "toy.frontier.json") == made
    with pytest.raises(FileError, match="this is a frontier, a plan is needed here"):
        Plan.load(tmp_path / "toy.frontier.json")


def test_the_plan_says_what_it_is_the_best_of(make_problem: MakeProblem) -> None:
    problem = make_problem(3, 4, 3)
    plan = solve_objective(Objective("memory", 0.5), problem, model="toy", profile=PROFILE)
    fastest = solve_objective(Objective(), problem, model="toy", profile=PROFILE)
    assert fastest.objective is None
    assert plan.objective is not None
    assert plan.objective.name == "memory"
    assert plan.objective.value < max(stage.memory_bytes for stage in fastest.stages) - 1
    assert plan.baselines == fastest.baselines
    assert plan.prediction.lower_bound_seconds == fastest.prediction.step_seconds
    assert not plan.prediction.exact
    assert any("50 % more time" in note for note in plan.notes)


@pytest.mark.parametrize(("saved", "least"), [((7, 20), 12), ((0, 0), 0)])
def test_the_least_memory_is_whole_bytes(saved: tuple[int, int], least: int) -> None:
    """Of two samples, 7 + 13 / 3 bytes are saved, and a twentieth is kept free."""
    costs = [
        {"micro_batch_size": size, "forward_seconds": 1.0 * size, "backward_seconds": 2.0 * size}
        | {"output_bytes": 0, "saved_bytes": amount}
        for size, amount in zip((1, 4), saved, strict=True)
    ]
    layer = {"name": "a", "kind": "Linear", "parameter_bytes": 0, "costs": costs}
    profile = Profile.model_validate({"model": "toy", "device": "cuda:0", "layers": [layer]})
    plan = pplan.solve(profile, gpus=1, mini_batch=2, micro_batches=1, memory_bytes=10**6, objective="memory")
    assert plan.objective is not None
    assert plan.objective.exact
    assert plan.objective.value == plan.stages[0].memory_bytes == least


def test_nothing_that_fits_is_an_error(make_problem: MakeProblem) -> None:
    problem = make_problem(0, 3, 2, memory=10)
    with pytest.raises(InfeasibleError):
        build_frontier(problem, model="toy", profile=PROFILE)
    with pytest.raises(InfeasibleError):
        solve_objective(Objective("memory"), problem, model="toy", profile=PROFILE)


@pytest.mark.parametrize(("points", "step"), [(0, 0.02), (3, 1.0), (3, -0.1)])
def test_numbers_that_cannot_be(points: int, step: float, make_problem: MakeProblem) -> None:
    with pytest.raises(UsageError):
        build_frontier(make_problem(0, 3, 2), model="toy", profile=PROFILE, points=points, memory_step=step)
