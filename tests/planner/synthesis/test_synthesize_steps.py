"""Steps of `synthesize` on stubs: which shapes get an order, which are improved, and the answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest

from pplan.cost_models.errors import UsageError
from pplan.planner.candidate import PipelineConfig, Proposal, ScoredPlan
from pplan.planner.search.budget import SearchBudget
from pplan.planner.synthesis import synthesize as module
from pplan.planner.synthesis.synthesize import IMPROVE_SHARE, MOST_IMPROVED, MOST_OF_BASE, MOST_SHAPES, RATE

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


class Filling:
    """Candidates on searched cuts, on other shapes, all cuts and the smallest, and which have orders."""

    def __init__(self, monkeypatch: Patch, *orders: str) -> None:
        self.filled, self.required, self.orders = list[str](), set[bool](), orders
        self.now = [0.0]
        self.problem = make_problem(seconds=9.0, now=self.now)
        self.few = list[str]()
        self.bounds = {"s1": 3.0, "s2": 1.0, "s3": 2.0, "l": 9.0}
        monkeypatch.setattr(module, "_with_base", lambda *_: ["c1", "c2"])
        monkeypatch.setattr(module, "_shapes", lambda *_: ["s1", "s2", "s3"])
        monkeypatch.setattr(module, "_smallest_shape", lambda _: ["l"])
        monkeypatch.setattr(module, "every_proposal", lambda *_: self.few)
        monkeypatch.setattr(module, "islice", lambda own, most: own if most == 60 else None)
        monkeypatch.setattr(module, "_candidates", self.candidates)
        monkeypatch.setattr(module, "_fill", self.fill)

    def candidates(self, _: Any, names: Any, limit: float) -> Iterator[Candidate]:
        del limit
        for name in names:
            self.now[0] += 1.0
            yield Candidate(name, self.bounds.get(name, 0.0), proposal=name)

    def fill(self, own: Candidate, budget: SearchBudget, *, required: bool) -> Candidate:
        self.filled.append(own.name)
        self.required.add(required)
        assert budget.seconds_left < 0.5 * self.problem.budget.seconds_left + 1e-9
        return replace(own, lists="o") if own.name in self.orders else own


def test_shapes_are_filled_by_their_bounds(monkeypatch: Patch) -> None:
    """Behind the searched cuts, with all cuts where these are few."""
    own = Filling(monkeypatch, "c2", "s1", "s3")
    own.few, own.bounds["f1"] = ["f1"], 2.5
    filled = steps._fill_all(own.problem, plan(5.0), [], 5.0)
    assert [each.name for each in filled] == ["c2", "s3", "s1"]
    assert own.filled == ["c1", "c2", "s2", "s3", "f1", "s1"]
    assert own.required == {False}


def test_so_many_shapes_are_filled(monkeypatch: Patch) -> None:
    monkeypatch.setattr(module, "MOST_SHAPES", 3)
    assert MOST_SHAPES > 3
    own = Filling(monkeypatch)
    assert steps._fill_all(own.problem, plan(5.0), [], 5.0) == []
    assert own.filled == ["c1", "c2", "s2"]
    # Where no plan is known, until one has an order, the smallest shape at last.
    own = Filling(monkeypatch, "l")
    assert [each.name for each in steps._fill_all(own.problem, None, [], inf)] == ["l"]
    assert own.filled == ["c1", "c2", "s2", "s3", "s1", "l"]
    assert own.required == {True}
    own = Filling(monkeypatch, "s2")
    assert [each.name for each in steps._fill_all(own.problem, None, [], inf)] == ["s2"]


def test_no_time_to_fill(monkeypatch: Patch) -> None:
    """What was made by then is not filled where there is a plan."""
    own = Filling(monkeypatch, "c1", "s1")
    own.now[0] = 8.0
    assert steps._fill_all(own.problem, plan(5.0), [], 5.0) == []
    own = Filling(monkeypatch, "c2")
    own.now[0] = 8.0
    assert [each.name for each in steps._fill_all(own.problem, None, [], inf)] == ["c2"]
    assert own.filled == ["c1", "c2"]


def test_candidates_are_made_in_time() -> None:
    now = [0.0]
    problem = make_problem(seconds=2.5, now=now)

    def make() -> Iterator[Any]:
        for number in range(5):
            now[0] += 1.0
            yield number

    every = make()
    assert steps._in_time(problem, every) == [0, 1, 2]
    assert steps._in_time(problem, every) == [3]
    assert steps._in_time(problem, iter(())) == []


def test_plans_of_the_same_places() -> None:
    """By base, as many as are allowed, the first ones."""
    plans = [plan(1.0, proposal(3, 6, schedule=name)) for name in ("zb-h2", "gpipe", "zb-v", "dualpipe-v")]
    names = [own.config.schedule for own in steps._with_base(make_problem(), plans)]
    assert names == ["zb-h1", "1f1b", "zb-v", "zb-v"]
    assert [own.config.schedule for own in steps._with_base(make_problem(schedules=("1f1b",)), plans)] == [
        "1f1b"
    ]
    many = [plan(1.0, proposal(own, 9)) for own in range(1, MOST_OF_BASE + 3)]
    own = list(steps._with_base(make_problem(), many))
    assert [each.ends[0] for each in own] == [n for n in range(1, MOST_OF_BASE + 1) for _ in "12"]


def test_shapes_of_good_plans(monkeypatch: Patch) -> None:
    """Near the best one, where it has one part a device."""
    monkeypatch.setattr(module, "propose_other_schedules", lambda *own: own[1:])
    problem = make_problem(schedules=("zb-v", "gpipe", "zb-h1"))
    best = plan(5.0)
    assert steps._shapes(problem, best) == (["zb-h1", "zb-v"], best)
    assert steps._shapes(problem, None) == (["zb-h1", "zb-v"], None)
    folded = replace(best, proposal=replace(best.proposal, config=replace(best.config, virtual_stages=2)))
    assert steps._shapes(problem, folded) == (["zb-h1", "zb-v"], None)
    asked = list[Any]()
    smallest = SimpleNamespace(proposal=proposal(6))

    def find(_: Any, *, in_flight: float) -> Any:
        asked.append(in_flight)
        return smallest

    monkeypatch.setattr(module, "find_smallest_plan", find)
    own = make_problem(allows=lambda own: own == proposal(6))
    assert list(steps._smallest_shape(own)) == [proposal(6)]
    assert asked == [1]
    smallest.proposal = proposal(3, 6)
    assert list(steps._smallest_shape(own)) == []
    monkeypatch.setattr(module, "find_smallest_plan", lambda *_, **__: None)
    assert list(steps._smallest_shape(own)) == []


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


class Orders:
    """Orders by rule, their seconds, and which are tried."""

    def __init__(self, monkeypatch: Patch, **steps: float) -> None:
        self.steps, self.tried = steps, list[str]()
        monkeypatch.setattr(module, "fill_orders", lambda _: ["slow", "fast"])
        monkeypatch.setattr(Numbers, "step", self.run)
        self.budget = SearchBudget()

    def run(self, order: str) -> float:
        self.tried.append(order)
        return self.steps.get(order, inf)

    def candidate(self, *fitting: str, **more: Any) -> Any:
        return Candidate("x", problem=Numbers(frozenset(fitting)), **more)


EVERY = ("slow", "fast", "one")


def test_the_best_order_by_rule(monkeypatch: Patch) -> None:
    own = Orders(monkeypatch, slow=4.0, fast=3.0, one=9.0)
    filled = steps._fill(own.candidate(*EVERY), own.budget, required=False)
    assert (filled.lists, filled.step, own.tried) == ("fast", 3.0, list(EVERY))
    assert steps._fill(own.candidate("slow", "one"), own.budget, required=False).lists == "slow"
    assert steps._fill(own.candidate(), own.budget, required=True).lists is None
    own.tried.clear()
    filled = steps._fill(own.candidate(*EVERY, bound=4.0), own.budget, required=False)
    assert (filled.lists, own.tried) == ("slow", ["slow"])  # no order is faster
    monkeypatch.setattr(module, "MOST_FILLED", 29)
    assert steps._fill(own.candidate(*EVERY), own.budget, required=False).lists == "one"
    monkeypatch.setattr(module, "MOST_FILLED", 30)
    assert steps._fill(own.candidate(*EVERY), own.budget, required=False).lists == "fast"


@pytest.mark.parametrize(("required", "lists"), [(False, None), (True, "fast")])
def test_no_time_for_further_rules(required: bool, lists: str | None, monkeypatch: Patch) -> None:
    """If an order is required, rules are tried until one fits."""
    own = Orders(monkeypatch, slow=4.0, fast=3.0)
    filled = steps._fill(own.candidate("fast", "one"), SearchBudget(seconds=0.0), required=required)
    assert filled.lists == lists
