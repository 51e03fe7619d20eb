"""The best cuts of one shape: a local search from cuts that share the work evenly, and, where a bound leaves
few, all.

The local search moves a cut to the next place, or two cuts at once, which keeps the sum of a device's parts
or the length of a part; where nothing gains, it goes on from a change of several cuts. The exhaustive search
places part after part and goes on where no path of the bound, nor their best mixture, shows that what is
placed, with the least that can follow, is as long as the best plan; what is left at the end is simulated, and
scored like any plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import combinations
from math import inf

import numpy as np
import numpy.typing as npt

from ...cost_models.timeline import step_seconds
from ..balance import balance
from ..candidate import Proposal, ScoredPlan
from ..plan_records import TIE
from ..scoring import fastest
from ..search.budget import SearchBudget
from ..search.least_exchange import LeastExchanges
from ..search.space import Space
from ..stage_table import Floats
from .cut_bound import CutBound, mixture_tables, remaining_seconds
from .part_tables import Cuts, PartTables, PipelineShape, make_part_tables

QUICK_TURNS, TURNS = 2, 40
"""Of the game of a bound: at first, and where the shape is a good one."""
TAPERS = ((1.0, 1.0), (0.7, 1.3), (1.3, 0.7), (0.5, 1.5))
"""Of the first and the last part of a device, the share of the work, against an even one."""
MOST_SCORED = 6
"""Cuts that are scored in one turn of the local search."""
MOST_PAIRS = 160
"""Pairs of moves in one turn."""
MOST_ROUNDS = 40
"""Turns of the local search from one start."""
FAR = 1.2
"""Times the best step, from which on the local search leaves a shape alone."""
STARTS, KICKS = 2, 6
"""Of the local search: the best of the first cuts, and the changes of the best ones that it goes on from."""
MOST_PATHS = 20
"""That an exhaustive search looks at."""
MOST_TABLES = 4_000_000
"""Entries of their tables."""
MOST_UNFINISHED = 1_000_000
"""Beginnings that an exhaustive search extends, in all."""
SCORE_WORK = 3_000_000
"""Of scoring a plan, besides its simulation: its costs, all-reduces and ledger."""
CHUNK = 2_000
"""Beginnings that are extended side by side."""


class SearchStage(IntEnum):
    """How far a shape was looked at."""

    NEW, QUICK, IMPROVED, DONE = range(4)


@dataclass
class ShapeSearch:
    """A shape under search. `bound`: no plan of it that is not scored is below; inf: none is below the best
    plan known then. `is_alike`: the bound is of plans on its devices, or on others that are like them."""

    space: Space
    shape: PipelineShape
    bound: float
    is_alike: bool
    allows: Callable[[Proposal], bool]
    budget: SearchBudget
    exchanges: LeastExchanges
    stage: SearchStage = SearchStage.NEW
    best: ScoredPlan | None = None
    _scored: dict[tuple[int, ...], float] = field(default_factory=dict)

    @property
    def step(self) -> float:
        """Of the best plan so far; inf where there is none."""
        return inf if self.best is None else self.best.step_seconds

    def advance(self, limit: float) -> float:
        """Goes a stage further; the step of the best plan so far, or the `limit`."""
        self.stage = SearchStage(self.stage + 1)
        if self.stage == SearchStage.DONE:
            return self._exhaust(limit)
        quick = self.stage == SearchStage.QUICK
        if quick:
            limit = self._score(self._starts(), limit)
        else:
            limit = self._search_locally(limit) if self.step < FAR * limit else limit
            for cuts in self._best_cuts()[:MOST_SCORED]:
                self._game.add(cuts)
        for _ in range(QUICK_TURNS if quick else TURNS):
            self._spend_turn()
            goes_on = self._game.improve()
            self.bound = max(self.bound, self._game.bound)
            if self.bound >= limit * (1 - TIE) or not goes_on or self.budget.spent:
                break
        return limit

    @property
    def _game(self) -> CutBound:
        if self._made_game is None:
            self._made_game = CutBound(self._least_tables)
        return self._made_game

    _made_game: CutBound | None = None
    _made_tables: tuple[PartTables, PartTables] | None = None

    @property
    def _least_tables(self) -> PartTables:
        """For the bound."""
        return self._tables[0]

    @property
    def _tables(self) -> tuple[PartTables, PartTables]:
        if self._made_tables is None:
            shape = (self.space, self.shape, self.exchanges)
            own = make_part_tables(*shape)
            least = own if self.is_alike else make_part_tables(*shape, anywhere=True)
            self._made_tables = least, own
        return self._made_tables

    def _spend_turn(self) -> None:
        tables = self._least_tables
        self.budget.spend(10_000_000 + 75.0 * tables.usable.size)
        self.budget.simulate(2, self._actions)

    @property
    def _actions(self) -> int:
        return sum(len(own) for own in self.shape.program.actions)

    def _starts(self) -> list[list[int]]:
        """Cuts with a share of the work for each device as fast as it is, and parts that grow or shrink."""
        own, size = self._tables[1], self.shape.program.chunks
        pipe = self.shape.program.pipes[0]
        work = [np.diagonal(own.forward[slot] + own.backward[slot] + own.weight[slot], 1) for slot in pipe]
        blocks = np.append(0.0, np.cumsum(work[0]))
        rates = blocks[-1] / np.maximum([each.sum() for each in work], 1e-300)
        rows = dict[tuple[int, ...], None]()
        for first, last in TAPERS[: 1 if size == 1 else None]:
            parts = np.array([place.chunk for place in pipe])
            shares = rates * (first + (last - first) * parts / max(size - 1, 1))
            targets = np.cumsum(shares)[:-1] / shares.sum() * blocks[-1]
            cuts = [0, *np.searchsorted(blocks, targets - np.diff(blocks).mean() / 2), own.places - 1]
            row = _spread(cuts)
            rows.setdefault(tuple(row))
        balanced = balance(np.diff(blocks), own.parts)
        rows.setdefault((0, *np.cumsum(balanced).tolist()))
        every = np.array(list(rows), dtype=np.int64)
        usable = every[_are_usable(every, own)]
        steps = step_seconds(self.shape.program, own.costs(usable)) if len(usable) else np.zeros(0)
        return [usable[index].tolist() for index in np.argsort(steps, kind="stable").tolist()]

    def _best_cuts(self) -> list[list[int]]:
        """Those that were scored, the fastest first."""
        return [list(cuts) for step, cuts in sorted((step, cuts) for cuts, step in self._scored.items())]

    def _score(self, rows: list[list[int]], limit: float) -> float:
        """Scores the first few, each once."""
        cut_points = self.space.table(self.space.chain.sizes[0]).cut_points
        for cuts in rows[:MOST_SCORED]:
            key = tuple(cuts)
            if key in self._scored:
                continue
            self._scored[key] = inf
            proposal = self.shape.proposal(cut_points, cuts)
            self.budget.simulate(1, 4 * self._actions)
            self.budget.spend(SCORE_WORK)
            plan = fastest(self.space, [proposal]) if self.allows(proposal) else None
            if plan is not None:
                self._scored[key] = plan.step_seconds
                if self.best is None or plan.step_seconds < self.best.step_seconds:
                    self.best = plan
                limit = min(limit, plan.step_seconds)
        return limit

    def _search_locally(self, limit: float) -> float:
        random = np.random.default_rng(0)
        for start in self._best_cuts()[:STARTS]:
            limit = self._descend(start, limit)
        for _ in range(KICKS):
            best = self._best_cuts()[:1]
            if not best or self.budget.spent:
                break
            rows = np.repeat(np.array(best, dtype=np.int64), 64, axis=0)
            rows[:, 1:-1] += random.integers(-1, 2, (64, rows.shape[1] - 2))
            rows = rows[_are_usable(rows, self._tables[1])]
            if len(rows):
                self.budget.simulate(len(rows), self._actions)
                steps = step_seconds(self.shape.program, self._tables[1].costs(rows))
                limit = self._descend(rows[int(np.argmin(steps))].tolist(), limit)
        return limit

    def _descend(self, start: list[int], limit: float) -> float:
        """From these cuts, as long as a change gains."""
        own, current = self._tables[1], np.array(start, dtype=np.int64)
        limit = self._score([start], limit)
        now = self._scored[tuple(start)]
        for _ in range(MOST_ROUNDS):
            rows = _neighbours(current, own)
            if not len(rows) or self.budget.spent:
                break
            self.budget.simulate(len(rows), self._actions)
            steps = step_seconds(self.shape.program, own.costs(rows))
            order = [index for index in np.argsort(steps, kind="stable").tolist() if steps[index] < now]
            limit = self._score([rows[index].tolist() for index in order], limit)
            scored = [(self._scored.get(tuple(rows[index].tolist()), inf), index) for index in order]
            better, index = min(scored, default=(inf, 0))
            if better >= now * (1 - TIE):
                break
            now, current = better, rows[index]
        return limit

    def _exhaust(self, limit: float) -> float:
        """Looks at all cuts that may be below the limit; where these are too many, the bound stays."""
        if self._game.best_mixture is None:
            return limit
        self.bound, limit = _CutEnumeration(self, self._game, self._least_tables, limit).run()
        return limit

    def score_cuts(self, rows: Cuts, steps: Floats, limit: float) -> tuple[float, float]:
        """Scores these cuts, which take at least these seconds, where they are below the limit. The limit,
        and a bound on those for which there was no time, or which may be faster on other devices."""
        if not self.is_alike and len(rows):
            own = step_seconds(self.shape.program, self._tables[1].costs(rows))
            order = [index for index in np.argsort(own, kind="stable").tolist() if own[index] < limit]
            return self._score([rows[index].tolist() for index in order], limit), float(steps.min())
        for index in np.argsort(steps, kind="stable").tolist():
            if steps[index] >= limit * (1 - TIE):
                break
            if self.budget.spent:
                return limit, float(steps[index])
            limit = self._score([rows[index].tolist()], limit)
        return limit, inf


def _neighbours(cuts: Cuts, tables: PartTables) -> Cuts:
    """(candidates, parts + 1): cuts with one moved to the next place, or two, where they may be."""
    single = [(part, move) for part in range(1, tables.parts) for move in (-1, 1)]
    pairs = [pair for pair in combinations(single, 2) if pair[0][0] != pair[1][0]]
    near = sorted(pairs, key=lambda pair: pair[1][0] - pair[0][0])[:MOST_PAIRS]
    rows = np.repeat(cuts[None], len(single) + len(near), axis=0)
    for row, moves in zip(rows, [*((own,) for own in single), *near], strict=True):
        for part, move in moves:
            row[part] += move
    usable: Cuts = rows[_are_usable(rows, tables)]
    return usable


def _are_usable(rows: Cuts, tables: PartTables) -> npt.NDArray[np.bool_]:
    fits: npt.NDArray[np.bool_] = np.all(np.diff(rows, axis=1) > 0, axis=1)
    inside = np.clip(rows, 0, tables.places - 1)
    for part in range(tables.parts):
        fits &= tables.usable[part, inside[:, part], inside[:, part + 1]]
    return fits


def _spread(cuts: Sequence[int]) -> list[int]:
    """The cuts, each moved so far that it is behind the one before and leaves a place to each later one."""
    row, last = [int(cut) for cut in cuts], len(cuts) - 1
    for index in range(1, last):
        row[index] = min(max(row[index], row[index - 1] + 1), row[last] - (last - index))
    return row


class _CutEnumeration:
    """All cuts of a shape, beginning by beginning."""

    def __init__(self, search: ShapeSearch, game: CutBound, tables: PartTables, limit: float) -> None:
        self.search, self.tables, self.limit = search, tables, limit
        assert game.best_mixture is not None, "the bound was made"
        most = max(1, min(MOST_PATHS, MOST_TABLES // max(tables.usable.size, 1)))
        # The first ones are the devices' work and the critical paths of the best cuts.
        used = (game.best_mixture, *game.paths[: most - 1])
        self.seconds = np.array([mixture_tables(tables, path) for path in used])
        self.remaining = np.array([remaining_seconds(own) for own in self.seconds])
        self.spent, self.bound = 0, inf

    def run(self) -> tuple[float, float]:
        """The bound on what was not scored, inf where all that may be faster was, and the limit."""
        parts = self.tables.parts
        rows = np.zeros((1, 1), dtype=np.int64)
        stack = [(rows, np.zeros((1, len(self.seconds))))]
        while stack:
            rows, before = stack.pop()
            if rows.shape[1] == parts + 1:
                self._finish(rows)
                continue
            self.spent += len(rows)
            self.search.budget.spend(5.0 * len(rows) * self.tables.places * len(self.seconds) + 50_000)
            if self.spent > MOST_UNFINISHED or self.search.budget.spent:
                left = [(rows, before), *stack]
                bounds = [self._bounds(own, so_far).min() for own, so_far in left if len(own)]
                return max(self.search.bound, float(min([self.bound, *bounds]))), self.limit
            stack += self._extend(rows, before)
        return max(self.search.bound, self.bound), self.limit

    def _bounds(self, rows: Cuts, before: Floats) -> Floats:
        """(rows,): of beginnings that take so long on every path."""
        after = self.remaining[:, rows.shape[1] - 1, rows[:, -1]].T
        return np.asarray((before + after).max(axis=1))

    def _extend(self, rows: Cuts, before: Floats) -> Iterator[tuple[Cuts, Floats]]:
        """With every next part with which the limit may be met; those with the lowest bounds come last."""
        part = rows.shape[1] - 1
        own = np.moveaxis(self.seconds[:, part], 0, -1)[rows[:, -1]]  # (rows, places, paths)
        spent = before[:, None, :] + own
        bounds = (spent + self.remaining[:, part + 1].T[None]).max(axis=2)
        row, place = np.nonzero(bounds < self.limit * (1 - TIE))
        order = np.argsort(-bounds[row, place], kind="stable")
        row, place = row[order], place[order]
        for first in range(0, len(row), CHUNK):
            at = slice(first, first + CHUNK)
            longer = np.column_stack([rows[row[at]], place[at]])
            yield longer, spent[row[at], place[at]]

    def _finish(self, rows: Cuts) -> None:
        program = self.search.shape.program
        self.search.budget.simulate(len(rows), sum(len(own) for own in program.actions))
        steps = step_seconds(program, self.tables.costs(rows))
        self.limit, bound = self.search.score_cuts(rows, steps, self.limit)
        self.bound = min(self.bound, bound)
