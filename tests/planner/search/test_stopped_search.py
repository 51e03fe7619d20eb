"""A search that is stopped at any moment proves no more than it may: its bound is below every plan.

`test_branch_and_bound.py` holds whole searches against brute force. Here the work is over after so many
bounds, or the time after so many looks at the clock, wherever the search then is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pplan.cost_models.layer import Chain
from pplan.cost_models.topology import Topology
from pplan.planner.cut_search.schedule_search import search_schedules
from pplan.planner.plan_file import TIE
from pplan.planner.plan_options import PlanOptions
from pplan.planner.problem import Problem
from pplan.planner.search.branch_and_bound import _BranchAndBound, search
from pplan.planner.search.budget import OutOfTime, SearchBudget
from pplan.planner.search.near_plans import Incumbent

MakeChain = Callable[..., Chain]
MakeTopology = Callable[..., Topology]
WORKS = (0, 1e5, 5e5, 1e6, 2e6, 4e6, 8e6, 2e7)


class Looks:
    """A clock by which the time is over after so many looks."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self) -> float:
        self.left -= 1
        return 0.0 if self.left >= 0 else 1e9


def stopped(problem: Problem, looks: int) -> Problem:
    return replace(problem, budget=SearchBudget(1e12, 10.0, Looks(looks)))


@pytest.fixture(params=range(3))
def problem(request: pytest.FixtureRequest, make_chain: MakeChain, make_topology: MakeTopology) -> Problem:
    seed: int = request.param
    chain = make_chain(60 + seed, 6, traffic=[0.1, 1.0, 5.0][seed], cuts=0.9)
    return Problem(chain, make_topology(3, latency=0.05), PlanOptions(mini_batch=8))


def check(problem: Problem, work: float | None = None) -> tuple[float, float]:
    """The bound and the least bound of the subproblems, which no plan is below."""
    own = search(problem.space, problem.families, problem.stage_counts, (), work)
    step = float("inf") if own.best is None else own.best.step_seconds
    assert own.root_bound_seconds <= own.bound_seconds * (1 + TIE)
    assert own.exact == (own.bound_seconds >= step * (1 - TIE))
    return own.bound_seconds, step


def test_a_bound_holds_whenever_the_work_is_done(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    best = check(problem)[0]
    weaker = 0
    for share in (0.0, 0.3, 0.9):
        monkeypatch.setattr("pplan.planner.search.branch_and_bound.FOR_BOUND", share)
        for work in WORKS:
            bound, step = check(problem, work)
            assert bound <= best * (1 + TIE)
            assert step >= best * (1 - TIE)
            weaker += bound < best * (1 - TIE)
    assert weaker > 2


def test_a_bound_holds_whenever_the_time_is_over(problem: Problem) -> None:
    best = check(problem)[0]
    weaker = 0
    for looks in (1, 2, 3, 5, 8, 12, 18, 27, 40, 60, 90, 135, 200, 300, 450, 700, 1000):
        bound, step = check(stopped(problem, looks))
        assert bound <= best * (1 + TIE)
        assert step >= best * (1 - TIE)
        weaker += bound < best * (1 - TIE)
    assert weaker > 2


def test_what_was_not_begun_is_bounded(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound on all families says more of those whose options were not listed than their quick bounds."""
    best, module = check(problem)[0], "pplan.planner.search.branch_and_bound"
    bounds = []
    for share in (0.9, 1.0):
        monkeypatch.setattr(f"{module}.FOR_REST", share)
        for spent in (0.0, 0.5, 0.99):
            monkeypatch.setattr(f"{module}.FOR_BOUND", spent)
            bound, step = check(problem, 1e8)
            assert bound <= best * (1 + TIE)
            assert step >= best * (1 - TIE)
            bounds.append(bound)
    assert max(bounds) > min(bounds)


@pytest.mark.parametrize("name", ["zb-h1", pytest.param("interleaved", marks=pytest.mark.slow)])
def test_bounds_of_other_schedules_hold_whenever_they_are_stopped(
    name: str, make_chain: MakeChain, make_topology: MakeTopology
) -> None:
    chain = make_chain(70, 8, traffic=0.3, cuts=0.9)
    options = PlanOptions(mini_batch=8, micro_batches=4, schedule=name)
    whole = Problem(chain, make_topology(2), options)
    best = search_schedules(whole, (name,)).best
    assert best is not None
    for looks in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
        own = search_schedules(stopped(whole, looks), (name,))
        assert own.bound_seconds is None or own.bound_seconds <= best.step_seconds * (1 + TIE)
        assert own.best is None or own.best.step_seconds >= own.bound_seconds * (1 - TIE)


@pytest.mark.parametrize(("roots", "left_out"), [(5.0, 3.0), (3.0, 5.0)])
@pytest.mark.parametrize("in_time", [True, False])
def test_what_was_left_out_bounds_what_was_looked_at(roots: float, left_out: float, in_time: bool) -> None:
    """One subproblem has its roots, the work ends before the other has: the lower of both is proven."""

    class Plans(SimpleNamespace):
        def __len__(self) -> int:
            return 1

    def extend(*_: object) -> None:
        raise OutOfTime

    started = Plans(bounds=np.array([roots]), remaining=1)
    looked_at = SimpleNamespace(
        quick_bound=0.0, roots={1: roots}, may_improve=lambda _: True, start=lambda *_: started, extend=extend
    )
    search = object.__new__(_BranchAndBound)
    search.work = SearchBudget(0.0)
    if not in_time:
        search.work = SimpleNamespace(remaining=0.0, spent=False)  # type: ignore[assignment]
    space: Any = None
    search.incumbent, search.counts = Incumbent(space, [], [], SearchBudget()), [1]
    whole: list[Any] = [looked_at, SimpleNamespace(roots={}, quick_bound=left_out)]
    search.whole = whole
    assert search._explore() == 3.0
