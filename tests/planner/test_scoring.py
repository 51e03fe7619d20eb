"""Scored plans of every schedule against the plan simulated from its file, and against the tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from pplan.cost_models.layer import Chain
from pplan.cost_models.schedules import SCHEDULES, find_schedule
from pplan.cost_models.topology import Topology
from pplan.planner.build_plan import plan_without_comparison
from pplan.planner.candidate import SEARCHED, PipelineConfig, Proposal, ScoredPlan, replicated_pipeline
from pplan.planner.joint_search import find_best_plan
from pplan.planner.plan_file import Plan, ProfileReference
from pplan.planner.plan_options import ASYNCHRONOUS, PlanOptions
from pplan.planner.plan_simulation import plan_stages, simulate_plan
from pplan.planner.problem import Problem
from pplan.planner.scoring import busiest_seconds, fastest
from pplan.planner.search.branch_and_bound import SearchResult
from pplan.planner.search.space import Space
from pplan.planner.universal_bound import universal_bound

MakeChain = Callable[..., Chain]
MakeTopology = Callable[..., Topology]
REFERENCE = ProfileReference(file="toy.profile.json", sha256="0" * 64)
SYNCHRONOUS = [name for name in SCHEDULES if name not in ASYNCHRONOUS]


def planned(problem: Problem) -> Plan:
    """The best plan, read back from its file."""
    answer = find_best_plan(problem, [])
    assert answer.best is not None
    return read_back(problem, answer.best, answer.result)


def read_back(problem: Problem, best: ScoredPlan, result: SearchResult) -> Plan:
    """The plan, from its file."""
    plan = plan_without_comparison(problem, best, result, model="toy", profile=REFERENCE)
    return Plan.parse(plan.to_json(), "toy.plan.json")


def is_what_it_says(plan: Plan, chain: Chain, topology: Topology) -> None:
    """Its step, bubble and ledgers are those of the plan simulated from its file."""
    found = simulate_plan(plan, chain, topology)
    assert found.timeline.step_seconds == pytest.approx(plan.prediction.step_seconds, rel=1e-12)
    assert found.timeline.bubble == pytest.approx(plan.prediction.bubble, abs=1e-12)
    assert plan.prediction.lower_bound_seconds <= plan.prediction.step_seconds
    for device, own in enumerate(found.memory):
        assert own.terms == plan.stages[device].memory
        assert own.limit_bytes is None or own.bytes <= own.limit_bytes + len(own.terms)


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "schedule"), [(i % 2, name) for i, name in enumerate(SYNCHRONOUS)])
def test_every_schedule(seed: int, schedule: str, make_chain: MakeChain, make_topology: MakeTopology) -> None:
    """Every one makes a plan, with memory to spare and with little, where some recompute."""
    chain = make_chain(seed, 10, cuts=1.1, traffic=[0.01, 0.3][seed])
    words = set()
    for memory in (None, 2100, 1400):
        topology = make_topology(4, per_node=[4, 2][seed], latency=0.01, memory=memory)
        problem = Problem(chain, topology, PlanOptions(mini_batch=8, schedule=schedule, time_limit=2.0))
        answer = find_best_plan(problem, [])
        best = answer.best
        if best is None:
            assert memory is not None
            continue
        plan = read_back(problem, best, answer.result)
        assert plan.schedule == schedule
        assert busiest_seconds(problem.space, best.proposal) <= best.step_seconds * (1 + 1e-12)
        is_what_it_says(plan, chain, topology)
        words.add(plan.recompute)
    assert "never" in words


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 6))]
)
def test_replicas_and_stages_that_recompute(
    seed: int, make_chain: MakeChain, make_topology: MakeTopology
) -> None:
    """Any plans of the searched schedules, not only the best ones."""
    rng = np.random.default_rng(seed)
    chain = make_chain(seed, 9, cuts=1.1)
    topology = make_topology(6, per_node=3, latency=0.02, memory=1300)
    problem = Problem(chain, topology, PlanOptions(mini_batch=8))
    seen = [plan for plan in any_plans(problem, rng) if plan is not None]
    assert len(seen) > 4
    for plan in seen:
        found = SearchResult(plan, 0.1, 0.1, exact=False)
        made = plan_without_comparison(problem, plan, found, model="toy", profile=REFERENCE)
        is_what_it_says(made, chain, topology)
    assert any(max(plan.proposal.replicas) > 1 for plan in seen)
    assert any(len(set(plan.recompute)) > 1 for plan in seen) or seed % 2


def any_plans(problem: Problem, rng: np.random.Generator) -> Iterator[ScoredPlan | None]:
    for _ in range(80):
        stages = int(rng.integers(1, 5))
        ends = (*sorted(rng.choice(np.arange(1, 9), stages - 1, replace=False).tolist()), 9)
        replicas = [int(count) for count in rng.integers(1, 3, stages)]
        size = int(rng.choice([1, 2, 4]))
        schedule = str(rng.choice(SEARCHED))
        if sum(replicas) <= 6:
            config = PipelineConfig(schedule, "by_stage", 8 // size, size)
            yield fastest(problem.space, [replicated_pipeline(config, ends, replicas)])


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_ledgers_are_those_that_the_search_takes(
    optimizer: str, make_chain: MakeChain, make_topology: MakeTopology
) -> None:
    """What a planned stage needs is what its group's table says, at the micro-batches that it holds."""
    space = Space(make_chain(4, 8, cuts=1.1), make_topology(5), optimizer)
    for schedule in SEARCHED:
        config = PipelineConfig(schedule, "by_stage", 4, 4)
        proposal = Proposal(config, (2, 5, 8), ((0,), (1, 2), (3, 4)))
        plan = fastest(space, [proposal])
        assert plan is not None
        for mode in ("never", "always"):
            stages = plan_stages(space, replace(plan, recompute=(mode,) * 3))
            for index, (stage, (first, end)) in enumerate(zip(stages, proposal.bounds, strict=True)):
                group = space.replica_group(4, proposal.devices[index])
                at = group.table.cut_points.index(first), group.table.cut_points.index(end)
                in_flight = find_schedule(schedule).in_flight(index, 3, 4)
                needed = float(group.bytes(in_flight, mode)[at])
                assert stage.memory_bytes == pytest.approx(needed, abs=len(stage.memory))
                assert stage.forward_seconds == pytest.approx(float(group.forward[at]))


def test_a_wish_for_memory_is_the_limit(make_chain: MakeChain, make_topology: MakeTopology) -> None:
    """Of a device that has more, and of one that has less."""
    chain = make_chain(2, 8, cuts=1.1)
    for has, limit in ((None, 1200), (5000, 1200), (1200, 5000)):
        problem = Problem(
            chain, make_topology(3, memory=has), PlanOptions(mini_batch=4, memory_limit=float(limit))
        )
        plan = planned(problem)
        assert {stage.memory_limit_bytes for stage in plan.stages} == {1200}
        assert max(stage.memory_bytes for stage in plan.stages) <= 1200


def test_parts_of_a_backward_that_take_less_than_the_whole(
    make_chain: MakeChain, make_topology: MakeTopology
) -> None:
    """Neither bound may count the whole backward where it runs in two parts."""
    chain = make_chain(1, 6, cuts=1.1, traffic=0.0)
    half = 0.25 * chain.backward_seconds
    chain = replace(chain, backward_input_seconds=half, backward_weight_seconds=half)
    problem = Problem(chain, make_topology(2), PlanOptions(mini_batch=8, schedule="zb-h1"))
    found = find_best_plan(problem, []).result
    assert found.best is not None
    assert busiest_seconds(problem.space, found.best.proposal) <= found.best.step_seconds * (1 + 1e-12)
    assert found.bound_seconds <= found.best.step_seconds
    assert universal_bound(problem, ["zb-h1"], 2 * found.best.step_seconds) <= found.best.step_seconds
