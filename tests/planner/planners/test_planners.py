"""Every planner of the registry proposes only what can be."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from pplan.cost_models.errors import UsageError
from pplan.cost_models.layer import Chain, list_cut_points
from pplan.cost_models.schedules import find_schedule
from pplan.planner.candidate import Proposal
from pplan.planner.planners import PLANNERS, find_planner
from pplan.planner.problem import Problem

MakeProblem = Callable[..., Problem]

GPT = ["wte", *(f"h.{block}" for block in range(4)), "ln_f"]
PROBLEMS: dict[str, tuple[list[int] | None, int, dict[str, object]]] = {
    "all cuts": (None, 4, {"mini_batch": 8}),
    "forbidden cuts": ([1, 3, 5], 4, {"mini_batch": 8}),
    "more devices than stages": ([2, 4], 6, {"mini_batch": 12}),
    "more devices than layers": (None, 9, {"mini_batch": 18}),
    "layers kept together": (None, 4, {"mini_batch": 8, "keep_together": ("h.*",)}),
    "no cuts": ([], 3, {"mini_batch": 6}),
    "one device": (None, 1, {"mini_batch": 4}),
    "torchgpipe": (None, 4, {"mini_batch": 8, "runtime": "torchgpipe"}),
    "deepspeed": (None, 4, {"mini_batch": 8, "runtime": "deepspeed"}),
    "micro-batches asked for": (None, 4, {"mini_batch": 16, "micro_batches": 4}),
    "schedule asked for": (None, 4, {"mini_batch": 8, "schedule": "gpipe", "recompute": "never"}),
}


@pytest.fixture(params=PROBLEMS)
def problem(
    request: pytest.FixtureRequest, make_named: Callable[..., Chain], make_problem: MakeProblem
) -> Problem:
    cuts, gpus, options = PROBLEMS[request.param]
    return make_problem(make_named(GPT, cuts=cuts), gpus, **options)


@pytest.mark.parametrize("name", PLANNERS)
def test_proposals_can_be(name: str, problem: Problem) -> None:
    proposals = list(PLANNERS[name].propose(problem))
    for proposal in proposals:
        check(proposal, problem)
    assert len(set(proposals)) == len(proposals)


def check(proposal: Proposal, problem: Problem) -> None:
    chain, config, runtime = problem.chain, proposal.config, problem.runtime
    assert all(first < end for first, end in pairwise((0, *proposal.ends)))
    assert proposal.ends[-1] == len(chain)
    assert set(proposal.ends) <= set(list_cut_points(problem.space.chain))
    assert len(proposal.devices) == len(proposal.ends)
    ranks = [rank for own in proposal.devices for rank in own]
    assert set(ranks) <= set(range(problem.topology.gpus))
    assert len(ranks) == proposal.device_count * config.virtual_stages
    assert config.mini_batch == problem.mini_batch
    assert problem.options.micro_batches in (None, config.micro_batches)
    if problem.options.schedule != "auto":
        assert config.schedule == problem.options.schedule
    if runtime is not None:
        assert config.schedule in runtime.schedules
        assert runtime.runs_replicas(proposal.replicas)
        assert not runtime.one_process or max(ranks) < problem.topology.gpus_per_node
    devices = len(proposal.ends) // config.virtual_stages
    program = find_schedule(config.schedule).program(devices, config.micro_batches, config.virtual_stages)
    assert program.slots == len(proposal.ends)


@pytest.mark.parametrize("name", sorted(PLANNERS))
def test_each_makes_a_plan_where_nothing_forbids_it(
    name: str, make_named: Callable[..., Chain], make_problem: MakeProblem
) -> None:
    assert list(PLANNERS[name].propose(make_problem(make_named(GPT), 4, mini_batch=8)))


def test_planners_are_found_by_name() -> None:
    assert len(PLANNERS) >= 10
    for name, planner in PLANNERS.items():
        assert planner.name == name
        assert find_planner(name) is planner
    with pytest.raises(UsageError, match="'megatorn' is unknown") as raised:
        find_planner("megatorn")
    assert raised.value.hint.startswith("Did you mean megatron? There are: best, one-gpu, ")
