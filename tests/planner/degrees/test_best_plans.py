"""The steps of the search of degrees, by hand: bounds and divisions of combinations stand here."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pplan.planner.degrees import degree_search as module
from pplan.planner.degrees.degree_combinations import Combination
from pplan.planner.degrees.degree_search import MOST_PLANS, DegreePlan, _BestPlans

Patch = pytest.MonkeyPatch
NO_LIMIT = float("inf")


def one(name: str, virtual: int = 1, size: int = 1, again: int | None = None) -> Any:
    """A combination; names stand for degrees."""
    setting: Any = SimpleNamespace(tokens=size, virtual_stages=virtual, recompute_blocks=again)
    return Combination(name, setting)  # type: ignore[arg-type]


def layers(quick: float, **more: Any) -> Any:
    """`lower`: of the closer bound; `divided`: its division; `by`: divisions with bound, bytes and step."""
    known = {"quick": quick, "lower": quick, "needs": 0, "divided": (1, 1), "by": {}, "step": quick}
    own = SimpleNamespace(**(known | more))
    own.least_bytes = lambda: own.needs
    own.peak_bytes = lambda counts: own.by[counts][1]
    return own


def step(seconds: float) -> Any:
    return SimpleNamespace(step_seconds=seconds)


@pytest.fixture
def log(monkeypatch: Patch) -> list[Any]:
    """What is asked, of functions that read what stands in the layers."""
    asked = list[Any]()

    def noted(name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
        def own(*given: Any) -> Any:
            asked.append((name, *given[1:]))
            return answer(*given)

        return own

    monkeypatch.setattr(module, "lower_bound", lambda own: own.quick)
    monkeypatch.setattr(module, "least_division", lambda own, *_: (own.lower, own.divided))
    monkeypatch.setattr(module, "least_interleaved", lambda own, _: own.lower)
    monkeypatch.setattr(module, "even_division", lambda own: next(iter(own.by)))
    monkeypatch.setattr(module, "interleaved_bound", lambda own, counts: own.by[counts][0])
    monkeypatch.setattr(module, "estimate_stages", lambda own, counts: step(own.by[counts][2]))
    monkeypatch.setattr(
        module,
        "_best_division",
        lambda own, divided, each, _: DegreePlan(each.degrees, each.setting, divided, step(own.step), own),
    )
    monkeypatch.setattr(module, "fit_division", noted("fit", lambda own, counts, _: own.fitted.get(counts)))
    monkeypatch.setattr(
        module, "improve_division", noted("improve", lambda own, counts, _: (counts, step(own.by[counts][2])))
    )
    return asked


def steps(plans: _BestPlans) -> list[tuple[Any, float]]:
    return [(own.degrees, own.estimate.step_seconds) for own in plans.plans]


def test_the_best_of_each_and_the_bound_of_all(log: list[Any]) -> None:
    """What needs too much memory bounds nothing; attempts are noted until one fits."""
    plans: Any = _BestPlans(100)
    assert plans.bound == NO_LIMIT
    plans.try_combination(layers(5.0, needs=101), one("a"))
    plans.try_combination(layers(5.0, divided=None), one("b"))
    assert (plans.plans, plans.bound) == ((), NO_LIMIT)
    plans.try_combination(layers(5.0, needs=100, lower=6.0, step=8.0), one("c"))
    assert [each.degrees for _, each in plans.attempts] == ["a", "b", "c"]
    plans.try_combination(layers(7.0, lower=4.0, step=9.0), one("d"))
    assert len(plans.attempts) == 3
    assert steps(plans) == [("c", 8.0), ("d", 9.0)]
    assert plans.bound == 6.0
    plans.try_combination(layers(3.0, lower=9.0, step=1.0), one("d"))  # no better than what there is
    assert steps(plans) == [("c", 8.0), ("d", 9.0)]
    plans.try_combination(layers(9.0, lower=99.0, step=1.0), one("d"))
    assert steps(plans) == [("c", 8.0), ("d", 9.0)]
    plans.try_combination(layers(2.0, step=9.0), one("d"))
    assert plans.bound == 2.0
    plans.try_combination(layers(4.0, step=7.0), one("d", size=2))
    plans.try_combination(layers(4.0, step=7.5), one("d"))
    assert steps(plans) == [("d", 7.0), ("d", 7.5), ("c", 8.0)]
    assert log == []


def test_as_many_as_are_listed(log: list[Any]) -> None:
    """From then on what is no faster than the last of them is of no use."""
    plans: Any = _BestPlans(100)
    for number in range(MOST_PLANS):
        assert plans.worst == NO_LIMIT
        plans.try_combination(layers(1.0, step=10.0 + number), one(f"{number}"))
    assert plans.worst == 9.0 + MOST_PLANS
    plans.try_combination(layers(1.0, step=plans.worst), one("same"))
    assert len(plans.best) == MOST_PLANS
    plans.try_combination(layers(1.0, step=9.5), one("better"))
    assert steps(plans)[0] == ("better", 9.5)
    assert len(plans.plans) == MOST_PLANS
    assert plans.worst == 8.0 + MOST_PLANS
    plans.try_combination(layers(0.5, lower=plans.worst, step=1.0), one("late"))
    assert plans.bound == 1.0
    assert log == []


def test_divisions_of_virtual_stages(log: list[Any]) -> None:
    """The even one, if it fits and its bound is of use; else it is tried again, with blocks moved."""
    plans: Any = _BestPlans(100)
    plans.try_combination(layers(2.0, lower=3.0, by={(1, 3): (4.0, 100, 8.0)}), one("a", 2))
    assert steps(plans) == [("a", 8.0)]
    assert plans.best["a", 1, True].blocks == (1, 3)
    plans.try_combination(layers(7.0, by={(2, 2): (8.0, 101, 1.0)}), one("a", 2))
    assert (plans.bound, plans._unfit) == (3.0, [])
    plans.try_combination(layers(8.0, lower=9.0, by={(1, 1): (0.0, 0, 1.0)}), one("a", 2))
    assert plans.bound == 3.0
    full = {(2, 2): (5.0, 101, 1.0)}
    plans.try_combination(layers(1.5, lower=1.0, by=full), one("b", 2))
    plans.try_combination(layers(6.0, by=full), one("c", 2))
    plans.try_combination(layers(2.0, by=full), one("d", 2, again=1))
    assert [own[0] for own in plans._unfit] == [1.5, 6.0]
    assert plans.bound == 1.5
    for _, _, own, _ in plans._unfit:
        own.fitted = {(2, 2): (3, 1)}
        own.by = {(2, 2): (5.0, 101, 1.0), (3, 1): (7.0, 90, 7.5)}
    plans.fit()
    assert log == [("fit", (2, 2), 100), ("improve", (3, 1), 100)] * 2
    assert steps(plans) == [("b", 7.5), ("c", 7.5), ("a", 8.0)]
    plans._unfit[0][2].fitted = {}
    plans._unfit[1][2].by = {(2, 2): (5.0, 101, 1.0), (3, 1): (7.5, 90, 1.0)}
    log.clear()
    plans.fit()
    assert log == [("fit", (2, 2), 100)] * 2  # one that does not fit, and one of no use
    assert steps(plans) == [("b", 7.5), ("c", 7.5), ("a", 8.0)]


def test_those_that_are_listed_are_improved(log: list[Any]) -> None:
    plans: Any = _BestPlans(100)
    for number in range(MOST_PLANS + 1):
        own = layers(1.0, step=30.0 - number, by={(1, 1): (0.0, 0, 20.0 - number)})
        plans.try_combination(own, one(f"{number}"))
    plans.improve()
    assert len(log) == MOST_PLANS
    assert set(log) == {("improve", (1, 1), 100)}
    assert steps(plans) == [(f"{n}", 20.0 - n) for n in range(MOST_PLANS, 0, -1)]
