"""Plans of other schedules next to the searched ones, with searches whose plans stand here: what the search
of their cuts begins with, and which of all is the answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest

from pplan.cost_models.layer import Chain
from pplan.cost_models.topology import Topology
from pplan.planner import joint_search, other_schedules
from pplan.planner.candidate import PipelineConfig, Proposal, ScoredPlan
from pplan.planner.cut_search.shape_search import FAR
from pplan.planner.joint_search import (
    FOR_KNOWN,
    _propose,
    _with_time_for_orders,
    find_best_plan,
)
from pplan.planner.other_schedules import MOST_NEAR
from pplan.planner.plan_file import TIE
from pplan.planner.planners.base import Planner
from pplan.planner.problem import Problem
from pplan.planner.search.branch_and_bound import SearchResult
from pplan.planner.search.budget import SearchBudget

MakeChain = Callable[..., Chain]
MakeTopology = Callable[..., Topology]
MakeProblem = Callable[..., Problem]
Patch = pytest.MonkeyPatch


def plan(seconds: float, schedule: str = "1f1b") -> ScoredPlan:
    config = PipelineConfig(schedule, "by_stage", 4, 2)
    return ScoredPlan(Proposal(config, (3, 6), ((0,), (1,))), ("never",) * 2, seconds)


def noted(log: list[Any], entry: Any, answer: Any) -> Any:
    """The answer of a function that notes what it was asked."""
    log.append(entry)
    return answer


class Searches:
    """What each search of the step is asked, and answers: `own` of the searched schedules, `shapes`
    and `parts` by rule, `cut` with cuts of their own."""

    def __init__(self, monkeypatch: Patch, **answers: float | None) -> None:
        self.answers, self.asked = answers, dict[str, Any]()
        self.result: Any = None
        monkeypatch.setattr(joint_search, "run_search", self.run)
        monkeypatch.setattr(other_schedules, "propose_other_schedules", lambda *own: ("shapes", own))
        monkeypatch.setattr(other_schedules, "propose_parts", lambda *own: ("parts", own))
        monkeypatch.setattr(other_schedules, "fastest", self.fastest)
        monkeypatch.setattr(other_schedules, "search_schedules", self.cut)
        monkeypatch.setattr(joint_search, "with_bound", lambda _, best, result: (best, result))

    def plan(self, name: str, schedule: str) -> ScoredPlan | None:
        seconds = self.answers.get(name)
        return None if seconds is None else plan(seconds, schedule)

    def run(self, _: Problem, seeds: Sequence[ScoredPlan]) -> SearchResult:
        self.asked["own"] = seeds
        return SearchResult(self.plan("own", "1f1b"), 1.0, 1.0, exact=False)

    def fastest(self, _: Any, proposals: Any, limit: float) -> ScoredPlan | None:
        name, own = proposals
        self.asked[name] = (own[1:], limit)
        return self.plan(name, "zb-h1")

    def cut(self, _: Problem, names: Sequence[str], limit: float, near: Sequence[ScoredPlan]) -> Any:
        self.asked["cut"] = (tuple(names), limit, [own.step_seconds for own in near])
        return SimpleNamespace(bound_seconds=0.5, plans=("more",), best=self.plan("cut", "zb-h1"))

    def answer(self, problem: Problem, seeds: Sequence[ScoredPlan]) -> float | None:
        answer: Any = joint_search.joint_search(problem, seeds)
        best, self.result = answer
        return None if best is None else float(best.step_seconds)


def test_what_the_search_of_cuts_starts_from(make_problem: MakeProblem, monkeypatch: Patch) -> None:
    """Plans of other schedules, the fastest first, and the shortest step of all that is known by then."""
    problem = make_problem(schedule="any")
    seeds = [plan(9.0, "zb-h1"), plan(7.0), plan(8.0, "dapple")]
    searches = Searches(monkeypatch, own=5.5, shapes=5.2, parts=5.4, cut=5.0)
    assert searches.answer(problem, seeds) == 5.0
    asked, names = searches.asked, problem.heuristic_schedules
    assert asked["own"] == seeds
    assert asked["shapes"] == ((names, plan(5.5)), FAR * 5.5)
    assert asked["parts"] == ((names,), FAR * 5.2)
    assert asked["cut"] == (names, 5.2, [5.2, 5.4, 8.0, 9.0][:MOST_NEAR])
    assert (searches.result.other_bound, searches.result.other_plans) == (0.5, ("more",))


@pytest.mark.parametrize("name", ["own", "shapes", "parts", "cut", None])
def test_the_fastest_of_all_is_the_answer(
    name: str | None, make_problem: MakeProblem, monkeypatch: Patch
) -> None:
    every = dict.fromkeys(("own", "shapes", "parts", "cut"), 4.0)
    searches = Searches(monkeypatch, **{**every, **({name: 3.0} if name else {})})
    assert searches.answer(make_problem(schedule="any"), [plan(5.0 if name else 2.0)]) == (
        3.0 if name else 2.0
    )


def test_only_one_is_there(make_problem: MakeProblem, monkeypatch: Patch) -> None:
    problem = make_problem(schedule="any")
    for name in ("own", "shapes", "parts", "cut"):
        assert Searches(monkeypatch, **{name: 4.0}).answer(problem, []) == 4.0
    assert Searches(monkeypatch).answer(problem, []) is None
    assert Searches(monkeypatch).answer(problem, [plan(4.0)]) == 4.0


@pytest.mark.parametrize(
    ("seconds", "expected"), [(4.0, 4.0), (4.0 * (1 - TIE / 2), 4.0), (4.0 * (1 - 2 * TIE), None)]
)
def test_among_equals_it_is_the_searched_one(
    seconds: float, expected: float | None, make_problem: MakeProblem, monkeypatch: Patch
) -> None:
    searches = Searches(monkeypatch, own=4.0, cut=seconds)
    assert searches.answer(make_problem(schedule="any"), []) == (expected or seconds)


def test_time_is_left_for_an_order_of_its_own(make_problem: MakeProblem) -> None:
    now = [0.0]
    budget = SearchBudget(inf, 8.0, lambda: now[0])
    problem = replace(make_problem(schedule="synthesized"), budget=budget)
    earlier = _with_time_for_orders(problem)
    assert earlier.budget.end == earlier.space.budget.end == FOR_KNOWN * 8.0
    assert problem.budget.end == problem.space.budget.end == 8.0
    plain = make_problem()
    assert _with_time_for_orders(plain) is plain


def test_first_layers_run_again_in_plans_of_whole_stages(make_problem: MakeProblem) -> None:
    """What a planner makes for recomputation by stage, of the schedules that are allowed."""
    own = plan(1.0).proposal
    never = replace(own, config=replace(own.config, recompute="except_last", schedule="gpipe"))
    other = replace(own, config=replace(own.config, schedule="zb-h1"))
    asked = list[str]()

    def propose(problem: Problem) -> Iterator[Proposal]:
        asked.append(problem.options.recompute)
        yield from (own, other, never)

    planner = Planner("x", propose)
    assert list(_propose(planner, make_problem())) == [own, other, never]
    proposals = list(_propose(planner, make_problem(recompute="first_layers")))
    assert [each.config.recompute for each in proposals] == ["first_layers", "except_last"]
    assert [each.config.schedule for each in proposals] == ["1f1b", "gpipe"]
    assert asked == ["auto", "auto"]


def test_an_order_is_made_of_the_best_plan(make_problem: MakeProblem, monkeypatch: Patch) -> None:
    problem = make_problem(schedule="synthesized")
    asked = list[Any]()
    answer = SearchResult(plan(4.0), 4.0, 4.0, exact=True, other_plans=(plan(8.0),))
    monkeypatch.setattr(joint_search, "joint_search", lambda *_, **__: answer)
    monkeypatch.setattr(joint_search, "with_bound", lambda _, best, result: replace(result, best=best))
    monkeypatch.setattr(
        "pplan.planner.synthesis.synthesize.synthesize",
        lambda *given: noted(asked, given, [plan(9.0), plan(3.0)]),
    )
    assert find_best_plan(problem, []).best == plan(3.0)
    assert asked == [(problem, plan(4.0), (plan(8.0),))]


def test_the_plan_of_a_named_planner(make_problem: MakeProblem, monkeypatch: Patch) -> None:
    """It alone is the answer, and the search is there for the bound."""
    problem, seeds = make_problem(planner="dapple"), list[Any]()
    monkeypatch.setattr(joint_search, "run_search", lambda _, own: noted(seeds, own, "searched"))
    monkeypatch.setattr(joint_search, "with_bound", lambda _, best, result: (best, result))
    for own, best in ((plan(2.0), plan(2.0)), ("it has none", None)):
        monkeypatch.setattr(joint_search, "plan_with", lambda *_, own=own: own)
        answer = find_best_plan(problem)
        assert answer.result == (best, "searched")  # type: ignore[comparison-overlap]
        assert answer.by_planner == {"dapple": own}
        assert seeds.pop() == ([] if best is None else [best])
