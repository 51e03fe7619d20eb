"""The search of divisions of interleaved pipelines, box by box, with programmes whose values stand here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pplan.planner.degrees import degree_search, division_search
from pplan.planner.degrees.division_box import DivisionBox
from pplan.planner.degrees.division_search import FITTED, DivisionSearch
from pplan.planner.degrees.linear_bound import BoxSolution

Patch = pytest.MonkeyPatch
NO_LIMIT = float("inf")


def noted(log: list[Any], entry: Any, answer: Any) -> Any:
    """The answer of a function that notes what it was asked."""
    log.append(entry)
    return answer


def box(low: Sequence[int], high: Sequence[int], blocks: int = 6, devices: int = 2) -> DivisionBox:
    own = DivisionBox.of_fewest(blocks, [0] * len(low), [blocks] * len(low), devices)
    return replace(own, low=np.array(low), high=np.array(high))


def division_of(counts: tuple[int, ...], seconds: float) -> Any:
    return counts, SimpleNamespace(step_seconds=seconds)


class Divisions:
    """A search whose programmes, bytes and steps stand here."""

    def __init__(self, monkeypatch: Patch) -> None:
        self.own: Any = object.__new__(DivisionSearch)
        self.log = list[Any]()
        self.bytes, self.steps, self.bounds = dict[Any, float](), dict[Any, float](), dict[Any, float]()
        layers: Any = SimpleNamespace(
            peak_bytes=lambda counts: self.bytes.get(counts, 5.0), least_update_seconds=1.0
        )
        self.own.layers = layers
        self.own.memory_bytes, self.own.best, self.own.boxes, self.own.work = 10.0, None, 0, 0
        self.own._number, self.own._trials, self.own._closed, self.own._open = 0, set(), NO_LIMIT, []
        self.own._forwards, self.own._paths_help = 64, True
        monkeypatch.setattr(
            division_search, "interleaved_bound", lambda _, counts: self.bounds.get(counts, 0.0)
        )
        monkeypatch.setattr(
            division_search, "estimate_stages", lambda _, counts: division_of(counts, self.steps[counts])[1]
        )
        monkeypatch.setattr(
            division_search,
            "improve_division",
            lambda _, counts, memory: noted(
                self.log, ("improve", memory), division_of(counts, self.steps[counts])
            ),
        )


def test_a_division_that_is_tried(monkeypatch: Patch) -> None:
    """As a plan, where its bound, its bytes and its step allow; its path goes to the programme."""
    own = Divisions(monkeypatch)
    own.own.programme = SimpleNamespace(whole_amounts=lambda counts: counts)
    own.own._add_path = lambda amounts: own.log.append(("path", amounts))
    a, b, c, d = (1, 5), (2, 4), (3, 3), (4, 2)
    own.steps = {a: 8.0, b: 7.0, c: 6.0, d: 9.0}
    own.bounds, own.bytes = {a: 9.0}, {b: 10.1, c: 10.0}
    own.own._try(a, 9.0)
    own.own._try(b, 9.0)
    assert (own.own.best, own.log) == (None, [])
    own.own._try(d, 9.0)
    assert (own.own.best, own.log) == (None, [("path", d)])
    own.own._try(c, 9.0)
    assert own.own.best == division_of(c, 6.0)
    assert own.log[1:] == [("path", c), ("improve", 10.0)]
    own.own._try(a, 99.0)  # its bound is above the best
    own.bounds = {a: 5.0}
    own.own._paths_help = False
    own.own._try(a, 99.0)
    assert own.own.best == division_of(c, 6.0)
    own.steps[a] = 5.5
    own.own._try(a, 5.5)
    assert own.own.best == division_of(c, 6.0)
    own.own._try(a, 5.6)
    assert own.own.best == division_of(a, 5.5)
    assert len(own.log) == 4


def test_divisions_near_a_solution(monkeypatch: Patch) -> None:
    """Each once; of the first boxes with blocks moved until it fits."""
    own = Divisions(monkeypatch)
    tried = list[Any]()
    own.own._try = lambda counts, enough: tried.append((counts, enough))
    monkeypatch.setattr(division_search, "round_division", lambda _, amounts: tuple(map(round, amounts)))
    fitted: dict[Any, Any] = {(2, 4): (3, 3), (1, 5): None}
    monkeypatch.setattr(
        division_search, "fit_division", lambda _, counts, memory: fitted[counts] if memory == 10.0 else 0
    )
    own.own.boxes = FITTED
    own.own._try_near(np.array([1.9, 4.1]), 8.0)
    own.own._try_near(np.array([2.1, 3.9]), 8.0)
    own.own._try_near(np.array([1.1, 4.9]), 8.0)
    assert tried == [((3, 3), 8.0)]
    own.own.boxes = FITTED + 1
    own.own._try_near(np.array([1.1, 4.9]), 8.0)
    own.own._try_near(np.array([0.1, 5.9]), 7.0)
    assert tried == [((3, 3), 8.0), ((0, 6), 7.0)]


def test_parts_that_leave_the_solution_out() -> None:
    """By the device whose blocks are the least whole, else by the stage; of whole ones by the widest."""
    own: Any = object.__new__(DivisionSearch)
    whole = DivisionBox.of_fewest(8, [0] * 4, [8] * 4, 2)

    def parts(*amounts: float, of: DivisionBox = whole) -> list[Any]:
        rows = np.array([amounts]) / 2
        found = own._parts(of, BoxSolution(0.0, np.concatenate([rows, rows])))
        assert len(found) == 2
        return [
            (each.low.tolist(), each.high.tolist(), each.device_low.tolist(), each.device_high.tolist())
            for each in found
        ]

    few, many = parts(1.0, 2.0, 2.6, 2.1)
    assert (few[3][0], many[2][0]) == (3, 4)
    few, many = parts(1.25, 2.5, 1.75, 2.5)
    assert (few[1][1], many[0][1]) == (2, 3)
    narrow = replace(whole, low=np.array([1, 0, 0, 0]), high=np.array([1, 4, 3, 8]))
    few, many = parts(1.0, 4.0, 2.0, 1.0, of=narrow)
    assert (few[1][3], many[0][3]) == (1, 2)
    few, _ = parts(1.0, 0.0, -1.0, 8.0, of=narrow)
    assert few[1][3] == 7  # no more than one less than there may be
    fixed = replace(whole, device_low=np.array([4, 4]), device_high=np.array([4, 4]))
    few, many = parts(1.25, 2.0, 2.75, 2.4, of=fixed)
    assert (few[1][3], many[0][3]) == (2, 3)  # of devices that have so many the stages are split
    assert parts(1.00005, 2.0, 3.0, 2.0) == parts(1.0, 2.0, 3.0, 2.0)


def test_all_divisions_of_interleaved_pipelines(monkeypatch: Patch) -> None:
    """A part at a time of the pipeline with the least bound, as long as it may be faster than the best, and
    there is work left."""
    asked = list[Any]()
    bounds = {"a": [3.0, 7.0], "b": [5.0, 5.5, 5.75, 5.875]}

    class Own:
        def __init__(self, layers: Any, memory: float) -> None:
            assert memory == 100
            self.layers, self.work, self.bound_seconds = layers, 0, 0.0
            self.best: Any = None

        def advance(self, enough: float) -> None:
            asked.append((self.layers, enough))
            self.work += degree_search.MOST_WORK // 5
            self.bound_seconds = bounds[self.layers].pop(0)
            if self.layers == "b":
                self.best = ("counts", SimpleNamespace(step_seconds=6.0))

    monkeypatch.setattr(degree_search, "DivisionSearch", Own)
    plans: Any = degree_search._BestPlans(100)
    setting = SimpleNamespace(tokens=1)
    one: Any = SimpleNamespace(degrees="d", setting=setting, virtual_stages=2, recompute_blocks=None)
    known: Any = SimpleNamespace(step_seconds=8.0)
    plans.best["d", 1, True] = degree_search.DegreePlan("d", one.setting, (1,), known, None)  # type: ignore[arg-type]
    plans._keep = lambda plan: plans.best.update({("d", 1, True): plan})
    plans._bound = 50.0
    plans._interleaved = [(4.0, 1, "b", one), (2.0, 0, "a", one)]
    plans.search_divisions()
    before, behind = 8.0 * (1 - 1e-6), 6.0 * (1 - 1e-6)
    assert asked == [("a", before), ("a", before), ("b", before), ("b", behind), ("b", behind)]
    assert plans.plans[0].estimate.step_seconds == 6.0
    assert sorted(own[0] for own in plans._interleaved) == [5.75, 7.0]
    # From the bound of the others on nothing is gained.
    asked.clear()
    plans._bound = 5.75
    plans.search_divisions()
    assert asked == []
    plans._bound, bounds["b"] = 50.0, [6.0, 9.0]
    plans.search_divisions()
    assert asked == [("b", behind)]
