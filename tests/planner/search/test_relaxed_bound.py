"""The steps of the search for the relaxed bound, by hand: ranges whose bounds and pipelines stand here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, sqrt
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pplan.planner.search import relaxed_bound as module
from pplan.planner.search.budget import OutOfTime, SearchBudget
from pplan.planner.search.relaxed_bound import (
    FOR_FIRST,
    LOOKS,
    NARROW,
    PROPOSING,
    QUESTIONS,
    SCORING,
    RelaxedBound,
    _first_prices,
    _longest_stage,
    _move_prices,
    _StageRange,
)
from pplan.planner.search.relaxed_programme import CheapestStage

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Family:
    """With its quick bound."""

    name: str
    quick: float
    config: str
    replicas: tuple[int, ...] = (1, 2)


def family(name: str, quick: float, config: str = "") -> Any:
    return Family(name, quick, config or name)


def noted(log: list[Any], entry: Any, answer: Any) -> Any:
    """The answer of a function that notes what it was asked."""
    log.append(entry)
    return answer


def make_search(*families: Any, work: float = 1e12, score: Any = None) -> Any:
    space = SimpleNamespace(is_long=False)
    return RelaxedBound(space, families, (1, 2), False, SearchBudget(work), score)  # type: ignore[arg-type]


@pytest.fixture
def looked(monkeypatch: Patch) -> Callable[[dict[str, Callable[[Any], None]]], list[tuple[float, str]]]:
    """A function of what a look at each family does; notes the looks."""
    log = list[tuple[float, str]]()

    def patch(acts: dict[str, Callable[[Any], None]]) -> list[tuple[float, str]]:
        def look(self: Any, bound: float, range_: Any) -> None:
            log.append((bound, range_.name))
            acts.get(range_.name, lambda _: None)(self)

        monkeypatch.setattr(RelaxedBound, "_look", look)
        monkeypatch.setattr(module, "quick_bound", lambda _, own: own.quick)
        return log

    return patch


def close(value: float) -> Callable[[Any], None]:
    return lambda search: setattr(search, "_closed", min(search._closed, value))


def test_the_lowest_range_is_looked_at_first(looked: Any) -> None:
    """Each configuration once; none at the step, nor above what is known to stay."""
    log = looked({"b": close(4.5)})
    families = (family("a", 5.0), family("b", 3.0), family("again", 3.0, "b"), family("c", 4.0))
    assert make_search(*families)._least_below(10.0) == 4.5
    assert log == [(3.0, "b"), (4.0, "c")]
    log.clear()
    assert make_search(*families)._least_below(4.0) == 4.0
    assert log == [(3.0, "b")]
    search = make_search(*families)
    search._fluid[families[1]] = 7.0
    log.clear()
    assert search._least_below(20.0) == 4.5
    assert [name for _, name in log] == ["c", "a", "b"][: len(log)]
    assert log[0] == (4.0, "c")


def test_what_is_proven_when_the_work_is_done(looked: Any) -> None:
    def late(_: Any) -> None:
        raise OutOfTime

    families = family("a", 3.0), family("b", 5.0)
    log = looked({"a": late})
    assert make_search(*families)._least_below(10.0) == 3.0
    looked({})
    assert make_search(*families, work=0.0)._least_below(10.0) == 3.0
    assert make_search(*families, work=7.0)._least_below(10.0, 7.0) == 3.0
    assert make_search(*families, work=7.0)._least_below(10.0, 6.0) == 10.0
    log.clear()
    looked({"a": lambda search: (close(4.0)(search), search.budget.spend(1e13))})
    assert make_search(*families)._least_below(10.0) == 4.0
    assert log == [(3.0, "a")]


@pytest.mark.parametrize(("true", "step"), [(4.0, 9.0), (9.0, 9.0), (8.95, 9.0), (1.0, 900.0)])
def test_questions_come_nearer(true: float, step: float, monkeypatch: Patch) -> None:
    """A question is answered with its step where no plan is below, else with less: half of it here."""
    asked = list[tuple[float, float]]()
    search = make_search(work=1000.0)

    def below(own: float, left: float = 0.0) -> float:
        asked.append((own, left))
        search.step = own
        return own if own <= true else true / 2

    monkeypatch.setattr(search, "_least_below", below)
    found = search.least(step)
    assert asked[0] == (step, (1 - FOR_FIRST) * 1000.0)
    low, high = (step if step <= true else true / 2), step
    for own, left in asked[1:]:
        assert left == 0.0
        assert high > low * NARROW
        assert own == pytest.approx(sqrt(low * high))
        low, high = (max(low, own), high) if own <= true else (low, own)
    assert found == pytest.approx(low)
    assert len(asked) == 1 + QUESTIONS or high <= low * NARROW
    search = make_search(work=0.0)
    monkeypatch.setattr(search, "_least_below", below)
    asked.clear()
    search.least(step)
    assert len(asked) == 1


def make_range(low: float, high: float, *bounds: float, problem: Any = None) -> Any:
    return _StageRange(problem, "family", low, high, np.array(bounds), np.array([1.0]))  # type: ignore[arg-type]


def test_a_range_is_halved_unless_it_is_narrow(monkeypatch: Patch) -> None:
    monkeypatch.setattr(RelaxedBound, "_improve_prices", lambda _, range_: range_)
    search = make_search()
    search.step = 10.0
    search._look(1.0, make_range(2.0, 8.0, 5.0, 3.0))
    assert [(bound, own.low, own.high) for bound, _, own in search._heap] == [
        (3.0, 2.0, 4.0),
        (3.0, 4.0, 8.0),
    ]
    search._heap.clear()
    search._look(1.0, make_range(2.0, 8.0, 10.0, 12.0))
    assert (search._heap, search._closed) == ([], inf)
    search._look(1.0, make_range(2.0, 2.0 * NARROW, 6.0, 7.0))
    search._look(1.0, make_range(2.0, 2.0 * NARROW, 8.0))
    assert (search._heap, search._closed) == ([], 6.0)
    assert make_range(1.0, 2.0).bound == inf


def test_a_family_of_a_long_chain_has_further_bounds(monkeypatch: Patch) -> None:
    """Both, once, the second where the first says too little; of others neither."""
    asked = list[str]()
    bounds = {"fluid": 4.0, "fill": 6.0}
    for name in bounds:
        monkeypatch.setattr(module, f"{name}_bound", lambda *_, name=name: noted(asked, name, bounds[name]))
    monkeypatch.setattr(RelaxedBound, "_whole_range", lambda _, __, bound: [make_range(1.0, 2.0, bound)])
    for is_long, fluid, step, expected, calls in (
        (False, 4.0, 9.0, [3.0, 3.0], []),
        (True, 4.0, 9.0, [6.0, 6.0], ["fluid", "fill"]),
        (True, 7.0, 9.0, [7.0, 7.0], ["fluid", "fill"]),
        (True, 9.0, 9.0, [], ["fluid"]),
        (True, 4.0, 6.0, [], ["fluid", "fill"]),
    ):
        bounds["fluid"], own = fluid, family("a", 3.0)
        monkeypatch.setattr(module, "Family", Family)
        search = make_search(own)
        search.space = SimpleNamespace(is_long=is_long, within=lambda _: None)
        search.step = step
        asked.clear()
        search._look(3.0, own)
        search._look(3.0, own)
        assert [bound for bound, _, _ in search._heap] == expected
        assert asked == calls


def test_prices_are_moved_towards_those_of_the_weakest(monkeypatch: Patch) -> None:
    """The best bounds of all sums and looks; the prices follow the pipeline of the sum that says most."""
    sums = {"one": np.array([2.0, 5.0, -inf]), "two": np.array([3.0, 4.0, 9.0])}
    pipelines, moved = list[tuple[str, int]](), list[tuple[Any, float]]()

    def price(_: Any, __: Any, weights: str, *___: Any) -> Any:
        bounds = sums[weights] + 0.125 * (len(moved))
        return SimpleNamespace(
            bounds=bounds, pipeline=lambda n: noted(pipelines, (weights, n), [(weights, n)])
        )

    def move(_: Any, prices: Any, pipeline: Any, size: float) -> Any:
        moved.append((pipeline, size))
        return prices + 1.0

    monkeypatch.setattr(RelaxedBound, "_price_range", price)
    monkeypatch.setattr(RelaxedBound, "_propose", lambda *_: None)
    monkeypatch.setattr(module, "_move_prices", move)
    problem = SimpleNamespace(weights=("one", "two"))
    search = make_search()
    search.step = 100.0
    own = search._improve_prices(make_range(1.0, 2.0, 0.0, 0.0, 0.0, problem=problem))
    assert own.bounds.tolist() == [3.375, 5.375, 9.375]
    assert own.prices.tolist() == [1.0 + LOOKS]
    assert [size for _, size in moved] == pytest.approx([0.7**look for look in range(LOOKS)])
    assert pipelines == [("two", 3), *[("two", 1)] * (LOOKS - 1)]
    for step, looks in ((3.0, 0), (3.1, 1), (100.0, LOOKS)):
        moved.clear()
        search.step = step
        search._improve_prices(make_range(1.0, 2.0, 0.0, 0.0, 0.0, problem=problem))
        assert len(moved) == looks
    sums.update(one=np.full(3, -inf), two=np.full(3, -inf))
    moved.clear()
    search._improve_prices(make_range(1.0, 2.0, -1.0, 0.0, 0.0, problem=problem))
    assert moved == []


def test_plans_near_a_pipeline_are_scored_in_their_share(monkeypatch: Patch) -> None:
    """At once while they took little of the work; the others later, those of the lowest bounds first."""
    scored = list[str]()
    problem = SimpleNamespace(stages=SimpleNamespace(devices=np.array([2.0, 1.0])))
    monkeypatch.setattr(module, "round_stages", lambda *own: [own[3][0], "more"])

    def score(proposals: Any) -> float:
        scored.append(proposals[0])
        return 50.0 - len(scored)

    search = make_search(work=1e9, score=score)
    search._propose(make_range(1.0, 2.0, 5.0, problem=problem), ["a"])
    cost = SCORING * 3 * 3
    assert (scored, search.step, search._proposing) == (["a"], 49.0, cost)
    assert search.budget.remaining == 1e9 - cost
    search._propose(make_range(1.0, 2.0, 7.0, problem=problem), ["b"])
    search._propose(make_range(1.0, 2.0, 6.0, problem=problem), ["c"])
    assert scored == ["a"]
    search.budget.spend(cost / PROPOSING)
    search._propose(make_range(1.0, 2.0, 8.0, problem=problem), ["d"])
    assert scored == ["a", "d"]
    search.propose_rest(SearchBudget(0.0))
    assert scored == ["a", "d"]
    search.propose_rest(SearchBudget(1e9))
    assert scored == ["a", "d", "c", "b"]
    assert search.step == 46.0
    silent = make_search()
    silent._propose(make_range(1.0, 2.0, 5.0, problem=problem), ["a"])
    assert silent._later == {}


def make_stages() -> Any:
    """Of two kinds, the second twice as fast, with one cut; a choice of two of these."""
    whole = np.array(
        [[[inf, 1.0, 4.0], [inf, inf, 3.0]], [[inf, 0.5, 2.0], [inf, inf, 1.5]], [[inf] * 3] * 2]
    )
    kinds = [SimpleNamespace(speed=1.0), SimpleNamespace(speed=2.0)]
    return SimpleNamespace(
        kinds=kinds,
        kind=np.array([0, 1, 1]),
        replicas=np.array([1, 1, 2]),
        devices=np.array([3.0, 2.0]),
        forward=whole,
        backward=2 * whole,
        accumulation=np.where(np.isfinite(whole), 0.25, inf),
    )


def test_prices_at_first_and_later() -> None:
    """All devices together are worth the step, by how fast their longest stage is; then what is short of is
    dearer, twice as dear at most."""
    stages = make_stages()
    problem: Any = SimpleNamespace(stages=stages)
    assert [_longest_stage(stages, kind) for kind in (0, 1)] == [12.0, 6.0]
    prices = _first_prices(problem, 21.0)
    assert prices.tolist() == pytest.approx([3.0, 6.0])
    assert float(prices @ stages.devices) == pytest.approx(21.0)
    pipeline = [CheapestStage(0, 1, 0), CheapestStage(1, 2, 2), CheapestStage(1, 2, 1)]
    moved = _move_prices(problem, np.array([1.0, 4.0]), pipeline, 0.5)
    assert moved.tolist() == pytest.approx([1.0 * 0.5**0.5, 4.0 * 1.5**0.5])
    moved = _move_prices(problem, np.array([1.0, 4.0]), pipeline * 5, 1.0)
    assert moved.tolist() == pytest.approx([5 / 3, 8.0])
    none: Any = SimpleNamespace(**{**vars(stages), "forward": stages.forward + inf})
    assert _longest_stage(none, 0) == 1.0


@pytest.mark.parametrize(("recompute", "count"), [("never", 4.0), ("except_last", 3.5)])
def test_the_longest_stage_of_a_faster_plan(recompute: str, count: float) -> None:
    """All micro-batches but what the first does not take are within the step."""
    config = SimpleNamespace(micro_batches=4, recompute=recompute)
    search = make_search()
    problem: Any = SimpleNamespace(config=config, stages=make_stages())
    search.step = 10.0
    assert search._longest(problem) == pytest.approx(10.25 / count)
    search.step = 1000.0
    assert search._longest(problem) == 16.0
