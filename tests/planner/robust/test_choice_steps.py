"""The steps to the robust choice, with plans whose drawn steps are written down here; how draws are taken."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pplan.planner import robust
from pplan.planner.candidate import PipelineConfig, Proposal, ScoredPlan
from pplan.planner.plan_file import TIE
from pplan.planner.robust import (
    CLIMBED,
    MOST_BESTS,
    NEAR,
    ROUNDS,
    DrawnSteps,
    Draws,
    StepSampler,
    _affordable,
    _bests,
    _Comparison,
    _Searches,
)
from pplan.planner.search.budget import WORK_A_SECOND, SearchBudget

Patch = pytest.MonkeyPatch
CONFIG = PipelineConfig("1f1b", "never", 4, 2)


def plan(seconds: float, *ends: int, config: PipelineConfig = CONFIG) -> ScoredPlan:
    own = ends or (round(seconds * 16), 99)
    return ScoredPlan(
        Proposal(config, own, tuple((n,) for n in range(len(own)))), ("never",) * len(own), seconds
    )


class Contest:
    """A comparison whose plans have percentiles and means that stand here, by their ends."""

    def __init__(self, monkeypatch: Patch, *, slow: bool = False) -> None:
        self.steps = dict[Any, DrawnSteps]()
        self.scored = list[Any]()
        self.problem: Any = SimpleNamespace(
            space="space",
            budget=SearchBudget(),
            allows=lambda own: own.ends[0] != 77,
            options=SimpleNamespace(time_limit=8.0),
        )

        def sample(_: Any, own: ScoredPlan) -> Any:
            self.scored.append(own)
            return own

        monkeypatch.setattr(StepSampler, "step_seconds", sample)
        monkeypatch.setattr(
            DrawnSteps, "of", lambda own: self.steps.get(own.proposal.ends, DrawnSteps(9.0, 9.0))
        )
        steps: Any = self.problem
        draws = Draws(np.zeros((2, 1)), np.zeros(2), np.zeros((2, 1), dtype=bool) if slow else None)
        self.own = _Comparison(steps, plan(4.0, 5, 8), draws)

    def enter(self, own: ScoredPlan, mean: float, high: float) -> ScoredPlan:
        self.steps[own.proposal.ends] = DrawnSteps(mean, high)
        self.own.enter([own])
        return own


def test_plans_near_the_fastest_are_compared(monkeypatch: Patch) -> None:
    """Up to a fifth longer, each once, if the problem allows it; with slow devices up to the best mean."""
    contest = Contest(monkeypatch)
    assert contest.own.longest == 4.0 * (1 + NEAR) == pytest.approx(4.8)
    fastest, near = contest.own.fastest, plan(4.0 * (1 + NEAR), 6, 8)
    contest.own.enter([fastest, near, plan(4.81, 7, 8), plan(4.1, 77, 8), near])
    assert contest.scored == [fastest, near]
    assert list(contest.own.scores) == [fastest.proposal, near.proposal]
    slow = Contest(monkeypatch, slow=True)
    assert slow.own.longest == pytest.approx(4.8)
    slow.enter(slow.own.fastest, 6.0, 1.0)
    slow.enter(plan(5.5, 6, 8), 5.75, 9.0)
    assert slow.own.longest == 5.75
    slow.own.enter([plan(5.75, 4, 8), plan(5.76, 3, 8)])
    assert len(slow.own.scores) == 3


@pytest.mark.parametrize("slow", [False, True])
def test_the_best_is_chosen(slow: bool, monkeypatch: Patch) -> None:
    """By its percentile, with slow devices by its mean; of equal ones the fastest of all."""

    def chosen(steps: float) -> Any:
        contest = Contest(monkeypatch, slow=slow)
        contest.enter(contest.own.fastest, *((5.0, 1.0) if slow else (1.0, 5.0)))
        contest.enter(plan(3.5, 6, 8), *((steps, 9.0) if slow else (9.0, steps)))
        contest.enter(plan(3.25, 4, 8), *((steps, 9.0) if slow else (9.0, steps)))
        return contest.own.choose_best()

    for steps, better in (
        (4.0, True),
        (5.0 * (1 - TIE / 2), False),
        (5.0 * (1 - 2 * TIE), True),
        (5.0, False),
        (6.0, False),
    ):
        own = chosen(steps)
        assert own.is_fastest != better
        assert own.plan == (plan(3.25, 4, 8) if better else plan(4.0, 5, 8)), steps
        assert own.compared == 3
        assert own.fastest_steps == (DrawnSteps(5.0, 1.0) if slow else DrawnSteps(1.0, 5.0))
        assert own.steps == (
            own.fastest_steps if not better else DrawnSteps(steps, 9.0) if slow else DrawnSteps(9.0, steps)
        )


def test_the_best_are_varied_until_none_is_better(monkeypatch: Patch) -> None:
    """Four at a time, none twice; every variation is looked at once, and up to twelve rounds are made."""
    contest = Contest(monkeypatch)
    for number in range(6):
        contest.enter(plan(4.0 + number / 16, 10 + number, 99), 9.0, 5.0 + number)
    contest.steps[5, 8] = DrawnSteps(9.0, 20.0)
    contest.own.enter([contest.own.fastest])
    varied, looked = list[int](), list[Any]()

    def variations(_: Any, own: Proposal) -> Any:
        varied.append(own.ends[0])
        changed = replace(own, ends=(own.ends[0] + 10, 99))
        return [changed, changed] if own.ends[0] < 30 else []

    def score(space: Any, own: Any, limit: float) -> Any:
        assert (space, limit) == ("space", contest.own.longest)
        looked.append(own[0].ends[0])
        return None if own[0].ends[0] == 21 else ScoredPlan(own[0], ("never",) * 2, 4.5)

    monkeypatch.setattr(robust, "variations", variations)
    monkeypatch.setattr(robust, "fastest", score)
    contest.steps |= {(20, 99): DrawnSteps(9.0, 4.0), (30, 99): DrawnSteps(9.0, 30.0)}
    contest.own.climb()
    # First 10 to 13, then 20, which leads then; its variation, and the others', are no better.
    assert varied[:4] == [10, 11, 12, 13]
    assert varied[4:] == [20]
    assert looked == [20, 21, 22, 23, 30]
    assert CLIMBED == 4
    contest.problem.budget = SearchBudget(seconds=0.0)
    contest.own._varied.clear()
    varied.clear()
    contest.own.climb()
    assert varied == []
    contest.problem.budget = SearchBudget()
    monkeypatch.setattr(DrawnSteps, "of", lambda own: DrawnSteps(9.0, -float(own.proposal.ends[0])))

    def further(_: Any, own: Proposal) -> list[Proposal]:
        varied.append(own.ends[0])
        return [replace(own, ends=(own.ends[0] + 100, 999))]

    monkeypatch.setattr(robust, "variations", further)
    contest.own.climb()
    assert max(varied) == 100 * (ROUNDS - 1) + max(own for own in varied if own < 100)


def test_the_best_of_each_configuration(monkeypatch: Patch) -> None:
    """With the work of all searches shared; the fastest of all first, no more than are varied in time."""
    other = replace(CONFIG, micro_batch_size=4)
    families = [SimpleNamespace(config=own, name=n) for n, own in enumerate((CONFIG, other, CONFIG))]
    problem: Any = SimpleNamespace(
        space="space", families=families, options=SimpleNamespace(time_limit=8.0), stage_counts=range(1, 5)
    )
    asked = list[Any]()

    class Own:
        def __init__(self, *given: Any) -> None:
            asked.append(given[1:])

        def by_stages(self, alike: Any) -> Any:
            asked.append([own.name for own in alike])
            return [plan(5.0 - len(alike)), plan(6.0)]

    monkeypatch.setattr(robust, "_Searches", Own)
    large = False
    monkeypatch.setattr(robust, "is_large", lambda *_: large)
    assert [own.step_seconds for own in _bests(problem, 7.0)] == [3.0, 4.0, 6.0, 6.0]
    assert asked == [(7.0, 8.0 * WORK_A_SECOND / (2 * 4)), [0, 2], [1]]
    monkeypatch.setattr(robust, "MOST_BESTS", 3)
    assert MOST_BESTS > 3
    assert [own.step_seconds for own in _bests(problem, 7.0)] == [3.0, 4.0, 6.0]
    large = True
    assert _bests(problem, 7.0) == []
    large, problem.families, problem.stage_counts = False, [], []
    asked.clear()
    assert _bests(problem, 7.0) == []
    assert asked == [(7.0, 8.0 * WORK_A_SECOND)]


def test_plans_of_other_numbers_of_stages(monkeypatch: Patch) -> None:
    """All of them where the problem is small, else one more or less."""
    problem: Any = SimpleNamespace(space="space", stage_counts=range(1, 6))
    found: dict[Any, Any] = {
        (1, 2, 3, 4, 5): plan(3.0, 2, 4, 8),
        (2,): plan(4.0, 4, 8),
        (5,): plan(6.0, 1, 2, 3, 4, 8),
    }
    asked = list[Any]()

    def search(*given: Any, work: float, limit: float) -> Any:
        assert (given[0], given[1], work, limit) == ("space", "families", 5.0, 9.0)
        asked.append(tuple(given[2]))
        return SimpleNamespace(best=found.get(asked[-1]))

    monkeypatch.setattr(robust, "search", search)
    small = True
    monkeypatch.setattr(robust, "is_small_problem", lambda _: small)
    searches: Any = _Searches(problem, 9.0, 5.0)
    assert [own.step_seconds for own in searches.by_stages("families")] == [3.0, 4.0, 6.0]
    assert asked == [(1, 2, 3, 4, 5), (1,), (2,), (4,), (5,)]
    small = False
    asked.clear()
    assert [own.step_seconds for own in searches.by_stages("families")] == [3.0, 4.0]
    assert asked == [(1, 2, 3, 4, 5), (2,), (4,)]
    found.clear()
    assert list(searches.by_stages("families")) == []


def test_as_many_draws_as_there_is_time_for(monkeypatch: Patch) -> None:
    """All where they go side by side; else so many that 200,000 actions are simulated, and forty at least."""
    side = False
    monkeypatch.setattr(robust, "runs_side_by_side", lambda *_: side)
    for actions, draws, expected in (
        (1000, 500, 200),
        (1000, 150, 150),
        (4000, 500, 50),
        (8000, 500, 40),
        (8000, 30, 30),
    ):
        program = SimpleNamespace(actions=[[0] * (actions // 2)] * 2)
        assembly: Any = SimpleNamespace(program=program, costs=lambda: None)
        side = False
        assert _affordable(assembly, draws) == expected
        side = True
        assert _affordable(assembly, draws) == draws


def test_parts_of_the_draws_are_simulated(monkeypatch: Patch) -> None:
    """As many at a time as there is memory for, one at least, and all of them."""
    asked = list[int]()
    sampler: Any = object.__new__(StepSampler)
    assembly: Any = SimpleNamespace(program=SimpleNamespace(actions=[[0] * 6, [0] * 4]))
    costs = np.arange(7.0)

    def simulate(_: Any, part: Any) -> Any:
        asked.append(len(part))
        return part

    monkeypatch.setattr(robust, "_part", lambda own, first, end: own[first:end])
    monkeypatch.setattr(robust, "step_seconds", simulate)
    sampler.costs, sampler.draws = lambda _: costs, costs
    for entries, expected in ((1000, [7]), (70, [7]), (69, [6, 1]), (30, [3, 3, 1]), (5, [1] * 7)):
        monkeypatch.setattr(robust, "ENTRIES", entries)
        asked.clear()
        assert sampler.steps(assembly).tolist() == costs.tolist()
        assert asked == expected
