"""The time limit, with a clock that moves as it is read: no verdict depends on how fast the machine is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from pplan.cost_models.errors import UsageError
from pplan.cost_models.layer import Chain
from pplan.cost_models.quantities import MOST_DEVICES
from pplan.cost_models.topology import Device, Link, Topology, two_level_topology
from pplan.cost_models.topology_file import ProfiledDevice, make_topology
from pplan.planner.build_plan import build_plan
from pplan.planner.joint_search import find_best_plan
from pplan.planner.objectives.throughput import throughput
from pplan.planner.plan_file import ProfileReference
from pplan.planner.plan_options import PlanOptions
from pplan.planner.planners import find_planner
from pplan.planner.problem import Problem
from pplan.planner.scoring import fastest
from pplan.planner.search.budget import SearchBudget


@dataclass
class Reading:
    """A second passes with every `each`-th look at the clock."""

    each: int
    looks: int = 0

    def __call__(self) -> float:
        self.looks += 1
        return float(self.looks // self.each)


def chain_of(layers: int) -> Chain:
    """Layers that cost alike."""
    sizes = np.array([1.0, 2.0, 4.0])
    each = np.ones((layers, 1)) * sizes
    return Chain(
        names=tuple(f"l{index}" for index in range(layers)),
        sizes=(1, 2, 4),
        parameter_bytes=np.full(layers, 1e6),
        trainable_bytes=np.full(layers, 1e6),
        buffer_bytes=np.zeros(layers),
        cut_after=np.append(np.ones(layers - 1, dtype=np.bool_), False),
        input_bytes_per_sample=1e5,
        forward_seconds=1e-3 * each,
        backward_seconds=2e-3 * each,
        output_bytes=1e5 * each,
        saved_bytes=1e6 * each,
        saved_input_bytes=1e5 * each,
        workspace_bytes=0 * each,
        forward_host_seconds=0 * each,
        backward_host_seconds=0 * each,
    )


def topology_of(devices: int) -> Topology:
    """Nodes of eight."""
    return two_level_topology(Device("gpu", 2**30), devices, 8, Link(1e11, 1e-6), Link(1e10, 1e-5))


def problem_of(devices: int, clock: Reading | None = None) -> Problem:
    options = PlanOptions(mini_batch=4 * devices, time_limit=1.0)
    budget = SearchBudget() if clock is None else SearchBudget.of_seconds(1.0, clock)
    return Problem(chain_of(6), topology_of(devices), options, budget=budget)


@pytest.mark.slow
@pytest.mark.parametrize("each", [1, 3, 30, 300, 1_000])
def test_whenever_the_time_is_over_there_is_a_plan_and_a_bound_that_holds(each: int) -> None:
    whole = find_best_plan(problem_of(8)).result
    assert whole.best is not None
    assert whole.exact
    clock = Reading(each)
    problem = problem_of(8, clock)
    found = find_best_plan(problem).result
    assert found.best is not None
    assert found.bound_seconds <= whole.best.step_seconds * (1 + 1e-9)
    assert found.bound_seconds <= found.best.step_seconds


@pytest.mark.slow
def test_a_plan_for_very_many_devices_needs_no_time_at_all() -> None:
    clock = Reading(1)
    problem = problem_of(16_384, clock)
    answer = find_best_plan(problem)
    assert answer.best is not None
    assert answer.best.proposal.device_count > 1
    assert clock.looks < 400  # each look is a step of something that then ended
    plan = build_plan(
        problem, answer.best, answer.result, answer, model="m", profile=ProfileReference(file="p", sha256="")
    )
    assert any("the time limit of 1 s ended the search" in said for said in plan.warnings)
    assert plan.prediction.lower_bound_seconds <= plan.prediction.step_seconds


@pytest.mark.parametrize("planner", ["interleaved", "even"])
def test_where_a_plan_is_known_no_other_is_scored_once_the_time_is_over(planner: str) -> None:
    problem = problem_of(4)
    proposals = list(find_planner(planner).propose(problem))
    plan = fastest(problem.space, proposals)
    assert plan is not None
    for looks in (1, 2, 3):
        clock = Reading(looks)
        over = SearchBudget.of_seconds(1.0, clock)
        late = fastest(problem.space, proposals, budget=over, required=False)
        assert late is None or late.step_seconds >= plan.step_seconds
        assert clock.looks < 3 * looks + 5
        assert fastest(problem.space, proposals, budget=over, limit=plan.step_seconds) is None
        assert fastest(problem.space, proposals, budget=over) is not None
    assert fastest(problem.space, proposals, budget=over, required=False) is None


@pytest.mark.slow
def test_where_counted_work_ends_the_search_nothing_is_said_of_time_and_answers_are_the_same() -> None:
    made = [find_best_plan(problem_of(72), planners=("data-parallel",)) for _ in range(2)]
    assert made[0].result == made[1].result
    assert not problem_of(72).budget.was_interrupted


def test_more_devices_than_are_planned_for_are_refused() -> None:
    profiled = ProfiledDevice("cuda", "gpu", 2**30)
    with pytest.raises(UsageError, match=f"gpus=1000000000: at most {MOST_DEVICES} devices"):
        make_topology(gpus=10**9, profiled=profiled)
    with pytest.raises(UsageError, match=f"at most {MOST_DEVICES}"):
        topology_of(MOST_DEVICES + 1)


@pytest.mark.parametrize("each", [1, 30, 300])
def test_throughput_has_a_plan_and_a_bound_whenever_the_time_is_over(each: int) -> None:
    whole = throughput(problem_of(4))
    made = throughput(problem_of(4, Reading(each)))
    assert whole.best is not None
    assert made.best is not None
    assert made.result.bound_seconds <= whole.best.step_seconds * (1 + 1e-9)
