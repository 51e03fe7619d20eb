"""The attack finds what is planted: bounds a little too high, plans called exact, errors that none fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from attack import attack, frontiers, terms
from attack.attack import Solver, attacked, quickly_solved
from attack.problems import Case, case_of
from attack.results import Result

from pplan.cost_models.collectives import least_seconds_after
from pplan.cost_models.errors import InfeasibleError
from pplan.planner.build_plan import build_problem
from pplan.planner.objectives.frontier import Frontier, build_frontier
from pplan.planner.plan_file import Plan
from pplan.planner.problem import Problem
from pplan.planner.search import bounds_1f1b
from pplan.planner.search.bound import CompletionBound, FamilyBound, MemoryBound
from pplan.planner.search.family import quick_bound
from pplan.planner.search.linear_groups import WHOLE_BOUNDS


def found(cases: list[Case], solver: Solver = quickly_solved) -> Counter[str]:
    """By check, the violations."""
    results = [attacked(case, solver) for case in cases]
    return Counter(violation.check for result in results for violation in result.violations)


def finds(check: str, cases: list[Case], solver: Solver = quickly_solved) -> bool:
    """Whether one of the cases violates it; those after the first that does are not attacked."""
    return any(found([case], solver)[check] for case in cases)


def changed(change: Callable[[Plan], Plan]) -> Solver:
    """Answers whose plan is changed."""
    return lambda case, problem: change(quickly_solved(case, problem))


def predicting(**more: Callable[[Any], float | bool]) -> Callable[[Plan], Plan]:
    """Another prediction, made of the plan's own."""

    def change(plan: Plan) -> Plan:
        own = {name: make(plan.prediction) for name, make in more.items()}
        return plan.model_copy(update={"prediction": plan.prediction.model_copy(update=own)})

    return change


def aiming(factor: float) -> Callable[[Plan], Plan]:
    """A lower bound of the objective that is so many times the value."""

    def change(plan: Plan) -> Plan:
        aim = plan.objective
        assert aim is not None
        return plan.model_copy(
            update={"objective": aim.model_copy(update={"lower_bound": factor * aim.value})}
        )

    return change


PLAIN = [case_of(seed, "plain") for seed in (0, 1, 3, 5)]
MEMORY_SEEDS = range(12)
"""Of plain problems, of which some have few devices."""


@pytest.mark.slow
def test_bounds_a_hundredth_too_high() -> None:
    too_high = predicting(lower_bound_seconds=lambda own: 1.01 * own.step_seconds)
    assert found(PLAIN) == {}
    assert found(PLAIN, changed(too_high))["bound"] == len(PLAIN)


@pytest.mark.slow
def test_plans_that_are_called_exact() -> None:
    def even(case: Case, problem: Problem) -> Plan:
        own = replace(case, options=replace(case.options, planner="even"))
        plan = quickly_solved(own, replace(problem, options=own.options))
        return predicting(exact=lambda _: True)(plan)

    assert finds("exact", [case_of(seed, "levels") for seed in range(4)], even)


def test_errors_that_nothing_fits() -> None:
    def refuses(*_: object) -> Plan:
        raise InfeasibleError("no plan fits", "Nothing would.")

    assert found(PLAIN, refuses) == {"nothing fits": len(PLAIN)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["least memory", "cost"])
def test_objectives(kind: str) -> None:
    cases = [case_of(seed, kind) for seed in range(2, 5)]
    assert finds("objective's bound", cases, changed(aiming(1.01)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stage_term", "whole_bound_1f1b"])
def test_terms_of_the_search(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = getattr(bounds_1f1b, name)
    monkeypatch.setattr(bounds_1f1b, name, lambda *args: 1.01 * own(*args))
    monkeypatch.setitem(WHOLE_BOUNDS, "1f1b", bounds_1f1b.whole_bound_1f1b)
    assert finds("before searching" if name == "stage_term" else "of whole plans", PLAIN)


def test_the_quick_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attack.terms.quick_bound", lambda *args: 1.01 * quick_bound(*args))
    assert finds("before searching", PLAIN)


def finds_term(check: Callable[[Problem, Result], None], kind: str, seeds: range) -> int:
    """Violations of a check of the search's own bounds."""
    broken = 0
    for seed in seeds:
        case, result = case_of(seed, kind), Result(seed, kind)
        problem = build_problem(case.chain, case.topology, case.options, attack.REFERENCE, case.profiles)
        check(problem, result)
        broken += len(result.violations)
    return broken


@pytest.mark.parametrize(
    ("part", "kind", "seeds"), [(0, "options", range(7, 8)), (1, "plain", range(12)), (2, "plain", range(12))]
)
def test_what_a_stage_counts_in_the_memory_bound(
    part: int, kind: str, seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the longest stage, before it, and as the longest: a twentieth more than it takes."""
    assert finds_term(terms.memory_bound, kind, seeds) == 0
    own = FamilyBound._values

    def more(self: FamilyBound, *args: Any) -> Any:
        values = list(own(self, *args))
        values[part] = values[part] + 0.05 * abs(values[part])
        return tuple(values)

    monkeypatch.setattr(FamilyBound, "_values", more)
    assert finds_term(terms.memory_bound, kind, seeds)


def test_bounds_on_unfinished_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    assert finds_term(terms.unfinished, "plain", MEMORY_SEEDS) == 0
    own = CompletionBound.extend

    def more(self: CompletionBound, *args: Any) -> Any:
        seconds, state = own(self, *args)
        return 1.01 * seconds, state

    monkeypatch.setattr(CompletionBound, "extend", more)
    assert finds_term(terms.unfinished, "plain", MEMORY_SEEDS)


def test_the_memory_bound_a_hundredth_too_high(monkeypatch: pytest.MonkeyPatch) -> None:
    least = MemoryBound.least
    monkeypatch.setattr(MemoryBound, "least", lambda own, limit: 1.01 * least(own, limit))
    assert finds_term(terms.memory_bound, "plain", MEMORY_SEEDS)


@pytest.mark.slow
def test_sums_of_tied_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds that take these sums for longer than they are."""
    cases = [case_of(seed, "tied") for seed in (12, 36, 38)]
    own = least_seconds_after
    assert found(cases) == {}
    monkeypatch.setattr("pplan.planner.search.space.least_seconds_after", lambda *args: 3 * own(*args))
    assert finds("before searching", cases)


class TestFrontier:
    """Points that are missing, or slower than they could be."""

    known: ClassVar[dict[int, Frontier]] = {}
    """By seed, as they are."""

    def result(self, change: Callable[[Frontier], Frontier]) -> set[str]:
        """The checks that fail."""
        broken: set[str] = set()
        for seed in range(4):
            case = case_of(seed, "frontier")
            problem = build_problem(case.chain, case.topology, case.options, attack.REFERENCE, case.profiles)
            result = Result(seed, "frontier")

            def build(*args: Any, own: int = seed, **more: Any) -> Frontier:
                if own not in self.known:
                    self.known[own] = build_frontier(*args, **more)
                return change(self.known[own])

            frontiers.check(problem, build, result)
            broken |= {violation.check for violation in result.violations}
        return broken

    @pytest.mark.slow
    def test_as_it_is(self) -> None:
        assert self.result(lambda frontier: frontier) == set()

    @pytest.mark.slow
    def test_the_last_is_missing(self) -> None:
        def fewer(frontier: Frontier) -> Frontier:
            return frontier.model_copy(update={"points": frontier.points[:1]})

        assert self.result(fewer) == {"frontier complete"}

    @pytest.mark.slow
    def test_slower_points(self) -> None:
        def slower(frontier: Frontier) -> Frontier:
            points = [
                point.model_copy(update={"step_seconds": 1.01 * point.step_seconds})
                for point in frontier.points
            ]
            return frontier.model_copy(update={"points": points})

        assert self.result(slower) == {"frontier's point"}
