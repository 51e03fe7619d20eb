"""The steps from a problem to its answer, each with searches and planners whose plans are written down here:
who is asked, in which order, with how much time, and what is then said of the answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from pplan.planner import joint_search
from pplan.planner.candidate import PipelineConfig, Proposal, ScoredPlan
from pplan.planner.joint_search import (
    OUT_OF_TIME,
    _with_one_count,
    plan_with,
)
from pplan.planner.planners.base import Planner
from pplan.planner.problem import Problem
from pplan.planner.search.branch_and_bound import SearchResult
from pplan.planner.search.budget import SearchBudget

MakeProblem = Callable[..., Problem]
Patch = pytest.MonkeyPatch


def plan(
    seconds: float, schedule: str = "1f1b", devices: Sequence[Sequence[int]] = ((0,), (1,))
) -> ScoredPlan:
    config = PipelineConfig(schedule, "by_stage", 4, 2)
    ends = tuple(range(6 - len(devices) + 1, 7))
    return ScoredPlan(Proposal(config, ends, tuple(map(tuple, devices))), ("never",) * len(ends), seconds)


def result(best: ScoredPlan | None, bound: float, root: float = 0.5, **more: Any) -> SearchResult:
    return SearchResult(best, bound, root, exact=more.pop("exact", False), **more)


def test_numbers_of_micro_batches_of_good_plans(make_problem: MakeProblem) -> None:
    """Of the answer first, then of the fastest other that has another; none where one is given."""

    def of(micro_batches: int) -> ScoredPlan:
        own = plan(2.0)
        config = replace(own.config, micro_batches=micro_batches)
        return replace(own, proposal=replace(own.proposal, config=config))

    problem = make_problem(4, mini_batch=None)
    found = result(of(8), 1.0, other_plans=(of(8), of(2), of(4)))
    narrower = list(_with_one_count(problem, found))
    assert [own.options.micro_batches for own in narrower] == [8, 2]
    assert {own.options.mini_batch for own in narrower} == {problem.mini_batch}
    assert [own.options.micro_batches for own in _with_one_count(problem, replace(found, best=None))] == [
        8,
        2,
    ]
    assert list(_with_one_count(problem, result(None, 1.0))) == []
    assert list(_with_one_count(replace(problem, budget=SearchBudget(0.0)), found)) == []
    assert list(_with_one_count(narrower[0], found)) == []


def named(name: str, *proposals: Proposal) -> Planner:
    """A planner of these proposals."""
    return Planner(name, lambda _: proposals)


class TestPlanWith:
    """The plan of one planner, or why there is none."""

    def test_the_time_that_it_has(self, make_problem: MakeProblem, monkeypatch: Patch) -> None:
        """Of ten seconds that are left a fifth, or what is said; once it has a proposal, it ends there."""
        now = [0.0]
        budget = SearchBudget(inf, 10.0, lambda: now[0])
        problem = replace(make_problem(), budget=budget)
        own = plan(1.0).proposal
        counts = list[int]()

        def slow(_: Problem) -> Iterator[Proposal]:
            for number in range(100):
                now[0] += 1.0
                counts.append(number)
                yield own if number else replace(own, ends=(1, 2))

        def score(_: Any, proposals: Any, **__: Any) -> Any:
            return plan(1.0) if proposals else None

        monkeypatch.setattr(Problem, "allows", lambda _, proposal: proposal.ends[-1] == 6)
        monkeypatch.setattr(joint_search, "fastest", score)
        assert isinstance(plan_with(Planner("x", slow), problem), ScoredPlan)
        assert len(counts) == 2
        now[0] = 10.0
        assert plan_with(Planner("x", slow), problem) == OUT_OF_TIME
        assert isinstance(plan_with(named("even", own), problem), ScoredPlan)

    def test_no_time_to_score(self, make_problem: MakeProblem, monkeypatch: Patch) -> None:
        now = [0.0]
        problem = replace(make_problem(), budget=SearchBudget(inf, 10.0, lambda: now[0]))

        def score(*_: Any, **__: Any) -> None:
            now[0] = 5.0

        monkeypatch.setattr(joint_search, "fastest", score)
        assert plan_with(named("x", plan(1.0).proposal), problem, required=False) == OUT_OF_TIME
        now[0] = 0.0
        assert plan_with(named("x", plan(1.0).proposal), problem) == "does not fit"
