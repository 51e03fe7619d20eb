"""The steps to the highest throughput, by hand: which schedules and micro-batches are in the running, which
searches there is time for, and what is proven of two kinds of plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pplan.cost_models.errors import DefectError
from pplan.planner.candidate import PipelineConfig, Proposal, ScoredPlan
from pplan.planner.objectives import throughput as module
from pplan.planner.objectives.throughput import (
    _join_bounds,
    _replica_counts,
    _spaces,
    asynchronous_refusal,
)
from pplan.planner.problem import Problem
from pplan.planner.search.branch_and_bound import SearchResult

MakeProblem = Callable[..., Problem]
Patch = pytest.MonkeyPatch


def plan(seconds: float, schedule: str = "pipedream-2bw") -> ScoredPlan:
    proposal = Proposal(PipelineConfig(schedule, "never", 4, 1), (2, 4), ((0,), (1,)))
    return ScoredPlan(proposal, ("never", "never"), seconds)


def test_a_plan_below_its_bound_is_a_defect() -> None:
    result = SearchResult(plan(4.0, "1f1b"), 4.0, 4.0, exact=True)
    with pytest.raises(DefectError, match=r"a plan of 3.0 s a global batch is below its bound of 3.1 s"):
        _join_bounds(result, plan(3.0), 3.1)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, ""),
        ({"planner": "pipedream"}, ""),
        ({"planner": "even"}, "the planner even proposes no asynchronous plans"),
        ({"zero": 1}, "asynchronous schedules were not searched: ZeRO-1 gathers the weights once per step"),
        ({"schedule": "1f1b"}, "asynchronous schedules were not searched: schedule='1f1b' was given"),
        ({"runtime": "deepspeed"}, "deepspeed runs no asynchronous schedule"),
        ({"recompute": "always"}, ""),
    ],
)
def test_why_none_is_looked_for(options: dict[str, Any], why: str, make_problem: MakeProblem) -> None:
    assert asynchronous_refusal(make_problem(1, 4, 2, **options)) == why


def test_coarse_spaces_are_searched_first(make_problem: MakeProblem, monkeypatch: Patch) -> None:
    """Few cut points and powers of two of replicas, then all."""
    monkeypatch.setattr(module, "thin_cuts", lambda _, blocks: f"{blocks} blocks")
    problem = make_problem(1, 6, 3)
    assert _replica_counts(problem) == (1, 2, 3)
    assert list(_spaces(problem)) == [(problem.space, (1, 2, 3), True)]
    monkeypatch.setattr(module, "COARSE", (3, 4, 99))
    assert list(_spaces(problem)) == [
        ("3 blocks", (1, 2), False),
        ("4 blocks", (1, 2), False),
        (problem.space, (1, 2, 3), True),
    ]
