"""The steps from a problem to its answer, each with searches and planners whose plans are written down here:
who is asked, in which order, with how much time, and what is then said of the answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from pplan.cost_models.errors import DefectError
from pplan.cost_models.layer import Chain
from pplan.cost_models.topology import Topology
from pplan.planner import joint_search
from pplan.planner.candidate import PipelineConfig, Proposal, ScoredPlan
from pplan.planner.joint_search import (
    FOR_SEARCHED,
    OUT_OF_TIME,
    SEARCH_SHARE,
    _faster_of,
    _with_one_count,
    find_best_plan,
    is_small_problem,
    plan_with,
    problem_for_planner,
    run_search,
    with_bound,
    without_plan,
)
from pplan.planner.planners import BASELINES
from pplan.planner.planners.base import Planner
from pplan.planner.problem import Problem
from pplan.planner.search.branch_and_bound import SearchResult
from pplan.planner.search.budget import WORK_A_SECOND, SearchBudget

MakeChain = Callable[..., Chain]
MakeTopology = Callable[..., Topology]
MakeProblem = Callable[..., Problem]
Patch = pytest.MonkeyPatch

UNIVERSAL = "pplan.planner.universal_bound.universal_bound"


def plan(
    seconds: float, schedule: str = "1f1b", devices: Sequence[Sequence[int]] = ((0,), (1,))
) -> ScoredPlan:
    config = PipelineConfig(schedule, "by_stage", 4, 2)
    ends = tuple(range(6 - len(devices) + 1, 7))
    return ScoredPlan(Proposal(config, ends, tuple(map(tuple, devices))), ("never",) * len(ends), seconds)


def result(best: ScoredPlan | None, bound: float, root: float = 0.5, **more: Any) -> SearchResult:
    return SearchResult(best, bound, root, exact=more.pop("exact", False), **more)


def noted(log: list[Any], entry: Any, answer: Any) -> Any:
    """The answer of a function that notes what it was asked."""
    log.append(entry)
    return answer


def test_the_faster_of_an_answer_and_others(make_problem: MakeProblem, monkeypatch: Patch) -> None:
    """Of equal ones the answer; of another it is said what holds for that."""
    monkeypatch.setattr(joint_search, "with_bound", lambda _, best, own: ("bounded", best, own))
    problem, own = make_problem(), result(plan(2.0), 1.0)
    assert _faster_of(problem, own, []) is own
    assert _faster_of(problem, own, [plan(3.0), plan(2.0, "gpipe")]) is own
    fast = plan(1.5)
    better: Any = _faster_of(problem, own, [plan(1.9), fast, plan(3.0)])
    assert better == ("bounded", fast, own)
    none = result(None, inf)
    better = _faster_of(problem, none, [fast, plan(1.9)])
    assert better == ("bounded", fast, none)


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


def test_problems_that_are_small(make_problem: MakeProblem, monkeypatch: Patch) -> None:
    """Devices times blocks between cuts: 4 x 6."""
    for most, small in ((24, True), (23, False)):
        monkeypatch.setattr(joint_search, "SMALL", most)
        assert is_small_problem(make_problem(4)) == small


def test_interleaved_pipelines_are_for_their_own_planner(make_problem: MakeProblem) -> None:
    problem = make_problem(robust=True)
    assert problem_for_planner("dapple", problem) is problem
    options = problem_for_planner("interleaved", problem).options
    assert (options.planner, options.robust, options.slow_devices) == ("interleaved", False, None)


def named(name: str, *proposals: Proposal) -> Planner:
    """A planner of these proposals."""
    return Planner(name, lambda _: proposals)


class TestPlanWith:
    """The plan of one planner, or why there is none."""

    def test_the_fastest_of_what_is_allowed(self, make_problem: MakeProblem, monkeypatch: Patch) -> None:
        problem = make_problem(max_stages=1)
        inside, outside = plan(1.0, devices=((0,),)), plan(1.0)
        seen = list[Any]()
        monkeypatch.setattr(joint_search, "fastest", lambda _, own, **more: noted(seen, (own, more), inside))
        assert plan_with(named("x", outside.proposal, inside.proposal), problem, required=False) is inside
        ((proposals, more),) = seen
        assert proposals == [inside.proposal]
        assert more["required"] is False
        monkeypatch.setattr(joint_search, "fastest", lambda *_, **__: None)
        assert plan_with(named("x", inside.proposal), problem) == "does not fit"
        assert plan_with(named("x", outside.proposal), problem) == (
            f"{joint_search.NOT_ALLOWED}: 2 stages are more than max_stages=1"
        )

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

    def test_steps_have_time_of_their_own(self, make_problem: MakeProblem, monkeypatch: Patch) -> None:
        """Where the proposals took all of theirs, more of them make no worse plan."""
        now = [0.0]
        problem = replace(make_problem(), budget=SearchBudget(inf, 10.0, lambda: now[0]))
        left = list[float]()

        def slow(_: Problem) -> Iterator[Proposal]:
            now[0] += 4.0
            yield plan(1.0).proposal

        def score(*_: Any, budget: SearchBudget, **__: Any) -> ScoredPlan:
            left.append(budget.seconds_left)
            return plan(1.0)

        monkeypatch.setattr(joint_search, "fastest", score)
        plan_with(Planner("x", slow), problem)
        assert left == pytest.approx([0.2 * 6.0])

    def test_no_time_to_score(self, make_problem: MakeProblem, monkeypatch: Patch) -> None:
        now = [0.0]
        problem = replace(make_problem(), budget=SearchBudget(inf, 10.0, lambda: now[0]))

        def score(*_: Any, **__: Any) -> None:
            now[0] = 5.0

        monkeypatch.setattr(joint_search, "fastest", score)
        assert plan_with(named("x", plan(1.0).proposal), problem, required=False) == OUT_OF_TIME
        now[0] = 0.0
        assert plan_with(named("x", plan(1.0).proposal), problem) == "does not fit"


class TestWithBound:
    """What holds for a plan, of a search that found another."""

    @pytest.mark.parametrize(
        ("bound", "universal", "searched", "expected"),
        [
            (1.0, False, True, (1.0, False, False)),  # the search's own
            (2.0, False, True, (2.0, True, False)),  # which proves it
            (2.0 * (1 - 1e-15), False, True, (2.0, True, False)),
            (1.9, False, False, (1.5, False, True)),  # of a plan from outside the one on all plans
            (1.9, True, True, (1.5, False, True)),
        ],
    )
    def test_of_the_searched_schedules(
        self,
        bound: float,
        universal: bool,
        searched: bool,
        expected: tuple[float, bool, bool],
        make_problem: MakeProblem,
        monkeypatch: Patch,
    ) -> None:
        monkeypatch.setattr(joint_search, "is_searched", lambda *_: searched)
        monkeypatch.setattr(UNIVERSAL, lambda *own: 1.5 if own[2] == 2.0 else 0.0)
        own = with_bound(make_problem(), plan(2.0), result(plan(3.0), bound, 0.7, universal=universal))
        assert (own.bound_seconds, own.exact, own.universal) == expected
        assert own.root_bound_seconds == 0.7
        assert own.best == plan(2.0)
        low = with_bound(make_problem(), plan(2.0), result(plan(3.0), bound, 1.95, universal=universal))
        assert low.root_bound_seconds == min(1.95, bound if searched and not universal else 1.5)

    def test_a_plan_below_its_bound_is_a_defect(self, make_problem: MakeProblem, monkeypatch: Patch) -> None:
        monkeypatch.setattr(joint_search, "is_searched", lambda *_: True)
        with pytest.raises(DefectError, match=r"a plan of 2.0 s is below its bound of 2.1 s"):
            with_bound(make_problem(), plan(2.0), result(plan(3.0), 2.1))

    def test_no_plan(self, make_problem: MakeProblem) -> None:
        """Proven where the search was, and none may be."""
        problem = make_problem()
        assert with_bound(problem, None, result(None, inf, exact=True)).exact
        assert not with_bound(problem, None, result(None, inf)).exact
        own = with_bound(problem, None, result(plan(3.0), 1.0, exact=True))
        assert (own.exact, own.best) == (False, None)

    def test_of_other_schedules(self, make_problem: MakeProblem, monkeypatch: Patch) -> None:
        """The least of the search's bound and that on the others' plans: the universal one where their cuts
        were not searched."""
        asked = list[Any]()

        def universal(_: Problem, names: Sequence[str], step: float = inf) -> float:
            asked.append((tuple(names), step))
            return 1.2

        monkeypatch.setattr(joint_search, "is_searched", lambda *_: True)
        monkeypatch.setattr(UNIVERSAL, universal)
        problem = make_problem(schedule="zb-h1")
        own = with_bound(problem, plan(2.0, "zb-h1"), result(None, inf, 1.0))
        assert (own.bound_seconds, own.universal) == (1.2, True)
        assert asked == [((), 2.0), (("zb-h1",), 2.0)]
        both = make_problem(schedule="any")
        asked.clear()
        own = with_bound(both, plan(2.0, "zb-h1"), result(None, 1.8, other_bound=1.7))
        assert (own.bound_seconds, own.universal, asked) == (1.7, False, [])
        own = with_bound(both, plan(2.0, "gpipe"), result(None, 1.6, other_bound=1.7))
        assert (own.bound_seconds, own.universal, asked) == (1.6, False, [])
        own = with_bound(both, plan(2.0, "gpipe"), result(None, 1.6))
        assert (own.bound_seconds, asked) == (1.2, [(both.heuristic_schedules, 2.0)])

    def test_nothing_fits(self, make_problem: MakeProblem, monkeypatch: Patch) -> None:
        """The bound of all plans that were allowed: proven where it is infinite."""
        monkeypatch.setattr(UNIVERSAL, lambda _, names, *__: 1.2 if names else inf)
        own = without_plan(make_problem(), result(None, inf))
        assert (own.best, own.bound_seconds, own.exact, own.universal) == (None, inf, True, False)
        own = without_plan(make_problem(), result(plan(1.0), 1.0, universal=True))
        assert (own.best, own.bound_seconds, own.exact, own.universal) == (None, 1.2, False, True)
        own = without_plan(make_problem(schedule="zb-h1"), result(None, inf))
        assert (own.bound_seconds, own.exact, own.universal) == (1.2, False, True)
        own = without_plan(make_problem(schedule="any"), result(None, inf, other_bound=3.0))
        assert (own.bound_seconds, own.exact, own.universal) == (3.0, False, False)


def test_how_the_search_is_run(make_problem: MakeProblem, monkeypatch: Patch) -> None:
    """With plans of its own schedules, for its share of the time where others are searched after it."""
    calls = list[Any]()
    monkeypatch.setattr(joint_search, "search", lambda *own, deeper: noted(calls, (*own, deeper), 1))
    problem = replace(make_problem(4), budget=SearchBudget(inf, 10.0, lambda: 0.0))
    seeds = [plan(1.0), plan(1.0, "zb-h1"), plan(2.0, "gpipe")]
    assert run_search(problem, seeds) == 1  # type: ignore[comparison-overlap]
    space, families, counts, own, work, deeper = calls.pop()
    assert (space, families, counts) == (problem.space, problem.families, problem.stage_counts)
    assert own == [seeds[0], seeds[2]]
    assert work == SEARCH_SHARE * problem.options.time_limit * WORK_A_SECOND
    assert deeper == problem.may_be_deeper
    run_search(problem, work=7.0)
    assert calls.pop()[-2] == 7.0
    many = replace(make_problem(4, schedule="any"), budget=SearchBudget(inf, 10.0, lambda: 0.0))
    run_search(many)
    assert calls.pop()[0].budget.seconds_left == FOR_SEARCHED * 10.0


@pytest.mark.parametrize("exact", [True, False])
def test_who_is_asked(exact: bool, make_problem: MakeProblem, monkeypatch: Patch) -> None:
    """The baselines before the search, which starts from them; the known planners that are named after it."""
    log, steps = list[Any](), {"one-gpu": 6.0, "even": 5.0, "dapple": 3.5}

    def ask(name: str, _: Problem, *, required: bool = True) -> Any:
        log.append((name, required))
        return plan(steps[name]) if name in steps else "why"

    def search(_: Problem, seeds: Sequence[ScoredPlan]) -> SearchResult:
        log.append(("search", [own.step_seconds for own in seeds]))
        return result(plan(4.0), 4.0 if exact else 3.0, exact=exact)

    monkeypatch.setattr(joint_search, "find_planner", lambda name: name)
    monkeypatch.setattr(joint_search, "plan_with", ask)
    monkeypatch.setattr(joint_search, "joint_search", search)
    monkeypatch.setattr(joint_search, "with_bound", lambda _, best, own: replace(own, best=best))
    answer = find_best_plan(make_problem(), ["even", "dapple", "alpa"])
    before = [(name, True) for name in BASELINES]
    assert log == [*before, ("search", [6.0, 5.0]), ("dapple", False), ("alpa", False)]
    assert list(answer.by_planner) == ["even", "dapple", "alpa"]
    assert answer.best == plan(3.5)
    log.clear()
    answer = find_best_plan(make_problem())
    assert log[3:] == [("search", [6.0, 5.0])]
    assert (set(answer.by_planner), answer.best) == (set(BASELINES), plan(4.0))
