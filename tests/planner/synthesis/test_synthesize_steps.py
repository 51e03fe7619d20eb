"""Steps of `synthesize` on stubs: which shapes get an order, which are improved, and the answer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest

from pplan.cost_models.errors import UsageError
from pplan.planner.candidate import PipelineConfig, Proposal, ScoredPlan
from pplan.planner.search.budget import SearchBudget
from pplan.planner.synthesis import synthesize as module
from pplan.planner.synthesis.synthesize import IMPROVE_SHARE, MOST_IMPROVED, RATE

Patch = pytest.MonkeyPatch
steps: Any = module
"""The functions, which take stubs here."""


def proposal(
    *ends: int, schedule: str = "zb-h1", recompute: str = "never", micro_batches: int = 4
) -> Proposal:
    config = PipelineConfig(schedule, recompute, micro_batches, 1)  # type: ignore[arg-type]
    return Proposal(config, ends, tuple((stage,) for stage in range(len(ends))))


def plan(seconds: float, own: Proposal | None = None) -> ScoredPlan:
    return ScoredPlan(own or proposal(3, 6), ("never", "never"), seconds)


@dataclass(frozen=True)
class Program:
    """Of thirty actions."""

    actions: tuple[tuple[int, ...], ...] = ((1,) * 10,) * 3


@dataclass(frozen=True)
class Numbers:
    """Orders that fit a candidate."""

    fitting: frozenset[str] = frozenset()
    micro_batches: int = 4
    program: Program = Program()

    def step(self, order: str) -> float:
        raise NotImplementedError

    def fits(self, lists: Any) -> bool:
        return lists in self.fitting

    def has_order(self) -> bool:
        return "none" not in self.fitting

    def one_at_a_time(self, count: int) -> str:
        assert count == self.micro_batches
        return "one"


@dataclass(frozen=True)
class Candidate:
    """In place of an `OrderCandidate`; orders are words."""

    name: str
    bound: float = 0.0
    lists: Any = None
    step: float = inf
    problem: Any = Numbers()
    proposal: Any = None
    recompute: Any = "modes"


def make_problem(
    *, limit: float = 6.0, seconds: float = inf, now: list[float] | None = None, **more: Any
) -> Any:
    clock = (lambda: now[0]) if now is not None else (lambda: 0.0)
    own = {
        "options": SimpleNamespace(time_limit=limit),
        "budget": SearchBudget(inf, seconds, clock),
        "space": "space",
    }
    return SimpleNamespace(**own, **{"schedules": ("zb-h1", "1f1b", "zb-v", "interleaved"), **more})


def test_the_fastest_candidates_are_improved(monkeypatch: Patch) -> None:
    """They share half of the time; candidates whose bound is too high are left out, and each plan has to be
    faster than the previous ones."""
    log = list[Any]()
    filled = [
        Candidate("slow", 1.0, "o", 9.0),
        Candidate("bounded", 5.0, "o", 6.0),
        Candidate("first", 1.0, "o", 5.5),
        Candidate("second", 1.0, "o", 5.75),
    ]
    faster = {"first": 4.5, "second": 4.0}

    def improve(own: Any, work: float, _: Any) -> Any:
        log.append((own.name, work))
        return replace(own, step=faster.get(own.name, own.step))

    monkeypatch.setattr(module, "_fill_all", lambda *_: filled)
    monkeypatch.setattr(module, "_improve", improve)
    monkeypatch.setattr(module, "_score", lambda _, own: plan(own.step))
    problem = make_problem(limit=6.0)
    work = RATE * IMPROVE_SHARE * 6.0 / MOST_IMPROVED
    assert steps.synthesize(problem, plan(5.0)) == [plan(4.5), plan(4.0)]
    assert log == [("first", work), ("second", work)]
    faster["second"] = 4.6
    assert steps.synthesize(problem, plan(5.0)) == [plan(4.5)]
    monkeypatch.setattr(module, "_score", lambda *_: None)
    assert steps.synthesize(problem, plan(5.0)) == []
    # Without a plan that fits, one after another until there is one.
    log.clear()
    monkeypatch.setattr(module, "_score", lambda _, own: plan(own.step) if own.name == "slow" else None)
    assert steps.synthesize(problem, None) == [plan(9.0)]
    assert log == [(name, work) for name in ("first", "second", "bounded", "slow")]
    monkeypatch.setattr(module, "_fill_all", lambda *_: filled[2:3])
    log.clear()
    steps.synthesize(problem, plan(5.0))
    assert log == [("first", MOST_IMPROVED * work)]


def test_which_orders_are_looked_for(monkeypatch: Patch) -> None:
    """Of several devices, not too many actions, that may be run and whose bound leaves one faster; each
    proposal once."""
    bad, refused = proposal(1, 6), proposal(2, 6)
    monkeypatch.setattr(module, "possible", lambda _, own: own != bad)

    def choices(_: Any, own: Proposal) -> Iterable[Candidate]:
        if own == refused:
            raise UsageError("it does not run", "")
        return [
            Candidate("a", 4.0, proposal=own),
            Candidate("b", 5.0),
            Candidate("c", 1.0, problem=Numbers(frozenset({"none"}))),
        ]

    monkeypatch.setattr(module, "recompute_choices", choices)
    every = [
        proposal(6),
        bad,
        refused,
        proposal(3, 6),
        proposal(3, 6),
        proposal(4, 6, recompute="except_last"),
    ]
    own = list(steps._candidates(make_problem(), every, 5.0))
    assert [(each.name, each.proposal) for each in own] == [("a", proposal(3, 6))]
    assert [each.name for each in steps._candidates(make_problem(), every, 5.1)] == ["a", "b"]
    monkeypatch.setattr(module, "MOST_ACTIONS", 3 * 2 * 4)
    assert len(list(steps._candidates(make_problem(), every, 5.0))) == 1
    monkeypatch.setattr(module, "MOST_ACTIONS", 3 * 2 * 4 - 1)
    assert list(steps._candidates(make_problem(), every, 5.0)) == []
    monkeypatch.undo()
    monkeypatch.setattr(module, "possible", lambda *_: True)
    monkeypatch.setattr(module, "recompute_choices", choices)
    folded = replace(proposal(3, 6), config=replace(proposal(6).config, virtual_stages=2))
    assert list(steps._candidates(make_problem(), [folded], 5.0)) == []  # one device
    late = make_problem(seconds=0.0)
    assert list(steps._candidates(late, every, 5.0)) == []
    assert len(list(steps._candidates(late, [proposal(3, 6)], inf))) == 2
