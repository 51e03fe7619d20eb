"""The search of one shape's cuts against all of them: paths and steps are random numbers."""

from __future__ import annotations

from itertools import combinations
from math import inf
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pplan.planner.cut_search import shape_search as module
from pplan.planner.cut_search.shape_search import (
    KICKS,
    MOST_ROUNDS,
    MOST_SCORED,
    STARTS,
    ShapeSearch,
    _are_usable,
    _CutEnumeration,
)
from pplan.planner.plan_records import TIE
from pplan.planner.search.budget import SearchBudget

Patch = pytest.MonkeyPatch
PARTS, PLACES = 4, 8
Cuts = tuple[int, ...]
EVERY: list[Cuts] = [(0, *own, PLACES - 1) for own in combinations(range(1, PLACES - 1), PARTS - 1)]


class Paths:
    """Seconds of each part on three paths, eighths; those of cuts are of the longest, and a little more."""

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.usable = np.triu(random.random((PARTS, PLACES, PLACES)) < 0.9, 1)
        own = random.integers(1, 40, (3, PARTS, PLACES, PLACES)) / 8
        self.seconds = np.where(self.usable, own, inf)
        self.places, self.parts = PLACES, PARTS
        more = random.integers(0, 8, len(EVERY)) / 8
        self.steps = {
            cuts: max(self.paths(cuts)) + own for cuts, own in zip(EVERY, more.tolist(), strict=True)
        }

    def paths(self, cuts: Cuts) -> list[float]:
        return [
            float(sum(own[part, cuts[part], cuts[part + 1]] for part in range(PARTS))) for own in self.seconds
        ]

    def costs(self, rows: Any) -> list[float]:
        return [self.steps[tuple(row)] for row in np.asarray(rows).tolist()]


def enumeration(tables: Paths, work: float, limit: float, bound: float, monkeypatch: Patch) -> Any:
    """Of the paths in turn, the first for the best mixture; scores lower the limit."""
    monkeypatch.setattr(module, "mixture_tables", lambda own, path: own.seconds[path])
    monkeypatch.setattr(module, "step_seconds", lambda _, costs: np.array(costs))
    scored = list[Cuts]()

    def score(rows: Any, steps: Any, limit: float) -> tuple[float, float]:
        scored.extend(map(tuple, np.asarray(rows).tolist()))
        return min(limit, float(steps.min(initial=inf))), inf

    shape = SimpleNamespace(program=SimpleNamespace(actions=[[1, 2]]))
    search = SimpleNamespace(budget=SearchBudget(work), bound=bound, shape=shape, score_cuts=score)
    game = SimpleNamespace(best_mixture=2, paths=[0, 1, 2])
    own = _CutEnumeration(search, game, tables, limit)  # type: ignore[arg-type]
    return own, scored


@pytest.mark.parametrize("seed", range(8))
def test_all_cuts_that_may_be_faster_are_scored(seed: int, monkeypatch: Patch) -> None:
    tables = Paths(seed)
    best = min(tables.steps.values())
    own, scored = enumeration(tables, inf, 2 * best, 0.0, monkeypatch)
    assert own.run() == (inf, best)
    assert len(scored) == len(set(scored)) < len(EVERY)
    assert all(cuts in scored for cuts in EVERY if max(tables.paths(cuts)) < best)
    fixed, scored = enumeration(tables, inf, 1.3 * best, 0.0, monkeypatch)
    fixed.search.score_cuts = lambda rows, *_: scored.extend(map(tuple, rows.tolist())) or (1.3 * best, inf)
    assert fixed.run() == (inf, 1.3 * best)
    assert sorted(scored) == [cuts for cuts in EVERY if max(tables.paths(cuts)) < 1.3 * best * (1 - TIE)]
    bounded, _ = enumeration(tables, inf, 2 * best, 0.5, monkeypatch)
    bounded.search.score_cuts = lambda _, steps, limit: (limit, float(steps.min()))
    assert bounded.run() == (best, 2 * best)


@pytest.mark.parametrize("seed", range(3))
def test_what_is_left_is_bounded(seed: int, monkeypatch: Patch) -> None:
    """Wherever the work ends: by the beginnings that are not gone on from."""
    tables = Paths(seed)
    best, bounds = min(tables.steps.values()), []
    root = max(min(tables.paths(cuts)[path] for cuts in EVERY) for path in range(3))
    for work in np.geomspace(3e4, 3e7, 40):
        own, scored = enumeration(tables, float(work), inf, 0.25, monkeypatch)
        bound, limit = own.run()
        left = [cuts for cuts in EVERY if cuts not in scored]
        assert bound <= min((tables.steps[cuts] for cuts in left), default=inf) or bound >= limit
        assert bound >= root
        assert limit == min((tables.steps[cuts] for cuts in scored), default=inf)
        bounds.append(bound)
        stronger, _ = enumeration(tables, float(work), inf, 1e3, monkeypatch)
        assert stronger.run()[0] == max(1e3, bound)
    assert bounds[0] == root
    assert bounds[-1] == inf
    assert len(set(bounds)) > 1 + (seed == 1)
    monkeypatch.setattr(module, "MOST_UNFINISHED", 1)
    few, scored = enumeration(tables, inf, inf, 0.25, monkeypatch)
    assert root <= few.run()[0] <= best
    assert scored == []


def make_search(tables: Paths, monkeypatch: Patch, budget: SearchBudget | None = None) -> Any:
    """Plans take what is simulated, but some that are not allowed, and some that do not fit."""

    def score(_: Any, proposals: Any) -> Any:
        (cuts,) = proposals
        number = EVERY.index(cuts)
        return None if number % 7 == 3 else SimpleNamespace(step_seconds=tables.steps[cuts], cuts=cuts)

    monkeypatch.setattr(module, "fastest", score)
    monkeypatch.setattr(module, "step_seconds", lambda _, costs: np.array(costs))
    shape: Any = SimpleNamespace(
        program=SimpleNamespace(actions=[[1, 2]]), proposal=lambda _, cuts: tuple(cuts)
    )
    space: Any = SimpleNamespace(
        table=lambda _: SimpleNamespace(cut_points=()), chain=SimpleNamespace(sizes=[1])
    )
    allows: Any = lambda cuts: EVERY.index(cuts) % 11 != 5  # noqa: E731
    search: Any = ShapeSearch(space, shape, 0.0, True, allows, budget or SearchBudget(), None)  # type: ignore[arg-type]
    search._made_tables = tables, tables
    return search


class Again:
    """The same search, once more: what each cuts scored, and the best."""

    def __init__(self, tables: Paths) -> None:
        self.tables, self.scored = tables, dict[Cuts, float]()

    def score(self, rows: list[Cuts]) -> None:
        for cuts in rows[:MOST_SCORED]:
            number = EVERY.index(cuts)
            fits = number % 7 != 3 and number % 11 != 5
            self.scored.setdefault(cuts, self.tables.steps[cuts] if fits else inf)

    def usable(self, cuts: Cuts) -> bool:
        return all(self.tables.usable[part, cuts[part], cuts[part + 1]] for part in range(PARTS))

    def neighbours(self, cuts: Cuts) -> list[Cuts]:
        """One cut moved by a place, then two, those that are near each other first."""
        singles = [(part, move) for part in range(1, PARTS) for move in (-1, 1)]
        pairs = [own for own in combinations(singles, 2) if own[0][0] < own[1][0]]
        rows = []
        for moves in [*((own,) for own in singles), *sorted(pairs, key=lambda own: own[1][0] - own[0][0])]:
            row = list(cuts)
            for part, move in moves:
                row[part] += move
            if tuple(row) in EVERY and self.usable(tuple(row)):
                rows.append(tuple(row))
        return rows

    def descend(self, start: Cuts) -> None:
        self.score([start])
        now = start
        for _ in range(MOST_ROUNDS):
            seconds = self.scored[now]
            faster = [own for own in self.neighbours(now) if self.tables.steps[own] < seconds]
            faster.sort(key=self.tables.steps.__getitem__)
            self.score(faster)
            known = [(self.scored.get(own, inf), number) for number, own in enumerate(faster)]
            least, number = min(known, default=(inf, 0))
            if least >= seconds * (1 - TIE):
                break
            now = faster[number]

    def best(self) -> list[Cuts]:
        return [cuts for _, cuts in sorted((seconds, cuts) for cuts, seconds in self.scored.items())]

    def search(self) -> None:
        for start in self.best()[:STARTS]:
            self.descend(start)
        random = np.random.default_rng(0)
        for _ in range(KICKS):
            rows = np.array([self.best()[0]] * 64)
            rows[:, 1:-1] += random.integers(-1, 2, (64, PARTS - 1))
            own = [row for row in map(tuple, rows.tolist()) if row in EVERY and self.usable(row)]
            if own:
                self.descend(min(own, key=self.tables.steps.__getitem__))


@pytest.mark.parametrize("seed", range(12))
def test_cuts_move_as_long_as_it_gains(seed: int, monkeypatch: Patch) -> None:
    """To the fastest of those near by that were scored; then from cuts that are changed at random."""
    tables = Paths(seed)
    usable = [cuts for cuts in EVERY if tables.steps[cuts] < inf]
    starts = usable[:: max(1, len(usable) // 3)]
    for limit in (inf, 12.0):
        search, again = make_search(tables, monkeypatch), Again(tables)
        now = limit
        for start in starts:
            again.descend(start)
            now = search._descend(list(start), now)
            assert search._scored == again.scored
            assert now == min(limit, *again.scored.values())
            assert search.step == min(again.scored.values())
        again.search()
        assert search._search_locally(now) == min(limit, *again.scored.values())
        assert search._scored == again.scored
    over = make_search(tables, monkeypatch, SearchBudget(0.0))
    over._descend(list(starts[0]), inf)
    over._search_locally(inf)
    assert len(over._scored) == 1
    assert make_search(tables, monkeypatch)._search_locally(7.0) == 7.0


def test_which_cuts_may_be() -> None:
    for seed in range(4):
        tables = Paths(seed)
        rows = np.array([*EVERY, (0, 2, 2, 4, 7), (0, 4, 3, 5, 7), (0, 1, 2, 7, 7), (0, 1, 2, 8, 7)])
        expected = [tables.steps.get(tuple(row), inf) < inf for row in rows.tolist()]
        assert _are_usable(rows, tables).tolist() == expected  # type: ignore[arg-type]
