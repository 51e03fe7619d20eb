"""Beginnings of pipelines with degrees by stage: which are followed, and what is left out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pplan.planner.degrees import stage_degree_search
from pplan.planner.degrees.stage_degree_search import MOST_STEPS, _Beginning, _Search

Patch = pytest.MonkeyPatch
NO_LIMIT = float("inf")


def search(best: float = 100.0) -> Any:
    return _Search("shape", "topology", "options", best)  # type: ignore[arg-type]


def noted(log: list[Any], entry: Any, answer: Any) -> Any:
    """The answer of a function that notes what it was asked."""
    log.append(entry)
    return answer


def test_beginnings_are_followed() -> None:
    """Of each size and number of stages so many; what is left out bounds the rest; until it is of no use."""
    own = search()
    bounds = SimpleNamespace(roots={2: 10.0, 3: 30.0, 4: 100.0}, tables="tables")
    own.add(bounds, [2, 3, 4])
    assert (own.pipelines, own.bound_seconds) == (3, 10.0)
    asked = list[Any]()
    answers = {2: 20.0, 3: 25.0, 4: 0.0}
    own._follow = lambda _, count, width: noted(asked, (count, width), answers[count])
    own.run(5)
    assert asked == [(2, 5), (3, 5)]
    assert own.open == [(20.0, 2, bounds), (30.0, 3, bounds)]
    assert own.bound_seconds == 20.0
    own.best_seconds = 30.0
    own.run(7)
    assert asked[2:] == [(2, 7)]
    assert own.open == [(20.0, 2, bounds)]
    own.steps = MOST_STEPS
    own.run(9)
    assert len(asked) == 3
    assert own.open == [(20.0, 2, bounds)]
    own.steps, answers[2] = MOST_STEPS - 1, 30.0
    own.run(9)
    assert (own.open, own.bound_seconds) == ([], 30.0)


def test_the_widest_that_are_kept() -> None:
    """Stage after stage the beginnings of the least bounds; of what is left out the first counts."""
    own = search()
    tree: dict[Any, list[tuple[float, Any]]] = {
        (): [(3.0, "a"), (1.0, "b"), (2.0, "c")],
        ("b",): [(6.0, "d"), (4.0, "e")],
        ("c",): [(5.0, "f"), (99.0, "g"), (120.0, "h")],
        ("a",): [(3.0, "i")],
    }
    asked, finished = list[Any](), list[Any]()

    def longer(_: Any, each: _Beginning, after: int, most: int) -> Any:
        asked.append((each.stages, after, most))
        return [_Beginning(bound, (*each.stages, name)) for bound, name in tree[each.stages]]

    own._longer = longer
    own._finish = lambda tables, each: finished.append((tables, each.stages))
    bounds = SimpleNamespace(tables="tables")
    assert own._follow(bounds, 2, 2) == 3.0
    assert asked == [((), 1, 3), (("b",), 0, 3), (("c",), 0, 3)]
    assert finished == [("tables", ("b", "e")), ("tables", ("c", "f"))]
    finished.clear()
    own.best_seconds = 5.0
    assert own._follow(bounds, 2, 3) == 6.0
    assert finished == [("tables", ("a", "i")), ("tables", ("b", "e"))]
    assert own._follow(bounds, 2, 9) == NO_LIMIT


def test_a_pipeline_that_is_done(monkeypatch: Patch) -> None:
    """What it takes, no less than its bound; the first of equal ones stays."""
    own, asked = search(20.0), list[Any]()
    monkeypatch.setattr(
        stage_degree_search,
        "pipeline_seconds",
        lambda seconds, cuts, many: asked.append((seconds, cuts, many)) or 12.0,  # type: ignore[func-returns-value]
    )
    stages = tuple(
        SimpleNamespace(enter=n, seconds=10 * n, update=float(u)) for n, u in ((0, 2), (1, 5), (2, 3))
    )
    tables = SimpleNamespace(micro_batches=4)
    own._finish(tables, _Beginning(1.0, stages))  # type: ignore[arg-type]
    assert asked == [([0, 10, 20], [1, 2], 4)]
    assert (own.best_seconds, own.best) == (17.0, (tables, stages))
    own._finish(tables, _Beginning(18.0, stages[:1]))  # type: ignore[arg-type]
    assert own.best == (tables, stages)
    own.best_seconds, own.best = 19.0, None
    own._finish(tables, _Beginning(18.0, stages))  # type: ignore[arg-type]
    assert (own.best_seconds, own.best) == (18.0, (tables, stages))
    own._finish(tables, _Beginning(18.0, stages[:2]))  # type: ignore[arg-type]
    assert own.best == (tables, stages)
