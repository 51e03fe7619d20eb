"""Best cuts of one shape: a local search, and an enumeration of all cuts if a bound leaves few.

The local search starts from cuts that share the work evenly. It moves one cut to the next place, or two cuts
together, which keeps the sum of a device's parts or the length of a part. The enumeration places part after
part. It continues while no path of `cut_bound` shows that the placed parts, with the least that can follow,
take as long as the best plan. The remaining cuts are simulated and scored like any plan.

An asynchronous pipeline has its own paths (`endless_paths`), and its steady state as step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from math import inf

import numpy as np

from ...cost_models.schedules import find_schedule
from ...cost_models.timeline import step_seconds
from ..asynchronous import score_endless
from ..balance import balance
from ..candidate import Proposal, ScoredPlan
from ..plan_file import TIE
from ..problem import Problem
from ..scoring import fastest
from ..search.budget import SearchBudget
from ..search.least_exchange import LeastExchanges
from ..stage_table import Floats
from .cut_bound import device_paths, endless_paths, launch_paths, path_table, remaining_seconds
from .part_tables import Cuts, Mask, PartTables, PipelineShape, make_part_tables

TAPERS = ((1.0, 1.0), (0.7, 1.3), (1.3, 0.7), (0.5, 1.5))
"""Shares of the work of a device's first and last part, relative to an even one."""
MOST_SCORED = 6
"""Most cuts that are scored in one round of the local search."""
MOST_PAIRS = 160
"""Most pairs of moves in one round."""
MOST_ROUNDS = 40
"""Most rounds of the local search from one start."""
FAR = 1.2
"""Multiple of the best step above which the local search skips a shape."""
STARTS = 2
"""Number of cuts from which the local search starts."""
MOST_TABLES = 4_000_000
"""Most entries of the tables of paths."""
MOST_UNFINISHED = 1_000_000
"""Most partial cuts that an enumeration extends."""
SCORE_WORK = 3_000_000
"""Counted work of scoring a plan, in addition to its simulation."""
CHUNK = 2_000
"""Partial cuts that are extended together as arrays."""


@dataclass
class Record:
    """State that the searches of all shapes share: the problem, its budget, and the best plan so far."""

    problem: Problem
    budget: SearchBudget
    exchanges: LeastExchanges
    limit: float
    best: ScoredPlan | None = None

    def score(self, proposal: Proposal) -> ScoredPlan | None:
        """Score a plan that fits, and keep it if it is faster than the best one."""
        space = self.problem.space
        if not find_schedule(proposal.config.schedule).synchronous:
            plan = score_endless(space, proposal)
        else:
            plan = fastest(space, [proposal]) if self.problem.allows(proposal) else None
        if plan is not None and (self.best is None or plan.step_seconds < self.best.step_seconds):
            self.best = plan
            self.limit = min(self.limit, plan.step_seconds)
        return plan

    def is_open(self, seconds: float) -> bool:
        """Return whether a plan of `seconds` is worth searching."""
        return seconds < self.limit * (1 - TIE) and not self.budget.spent


@dataclass
class ShapeSearch:
    """Search of one shape.

    Attributes:
        record: State that all shapes share.
        shape: The shape.
        bound: Lower bound in seconds on its plans that are not scored, unless they are slower than the best
            known plan.
        best: Best plan of the shape.
    """

    record: Record
    shape: PipelineShape
    bound: float
    best: ScoredPlan | None = None
    _scored: dict[tuple[int, ...], float] = field(default_factory=dict)

    @property
    def step(self) -> float:
        """Seconds of the best plan so far; inf if none exists."""
        return inf if self.best is None else self.best.step_seconds

    @cached_property
    def _tables(self) -> PartTables:
        return make_part_tables(self.record.problem.space, self.shape, self.record.exchanges)

    @cached_property
    def _least(self) -> PartTables:
        """Tables from which the bound is computed."""
        if not self.shape.stands_for_all:
            return self._tables
        return make_part_tables(self.record.problem.space, self.shape, self.record.exchanges, anywhere=True)

    @property
    def _actions(self) -> int:
        return sum(map(len, self.shape.program.actions))

    def begin(self) -> None:
        """Bound the shape and score its first cuts."""
        self.record.budget.spend(10_000_000 + 75.0 * self._least.usable.size)
        reachable = np.arange(self._least.usable.shape[1]) == 0
        for usable in self._least.usable:
            reachable = usable[reachable].any(axis=0)
        if not reachable[-1]:  # no cuts fit
            self.bound = inf
            return
        self.bound = max(self.bound, float(self._remaining[0, 0, 0]))
        if self.bound < self.record.limit * (1 - TIE):
            self._score(self._simulate(self._starts())[0])

    def descend(self) -> None:
        """Improve the best cuts while moving one or two of them gains."""
        for start in sorted(self._scored, key=lambda cuts: self._scored[cuts])[:STARTS]:
            current, step = start, self._scored[start]
            for _ in range(MOST_ROUNDS):
                if self.record.budget.spent:
                    return
                rows, steps = self._simulate(_neighbours(np.array(current), self._tables.usable))
                self._score(rows[steps < step])
                candidates = (cuts for cuts in map(tuple, rows.tolist()) if cuts in self._scored)
                better = min(candidates, key=lambda cuts: self._scored[cuts], default=current)
                if self._scored[better] >= step * (1 - TIE):
                    break
                current, step = better, self._scored[better]

    def exhaust(self) -> None:
        """Score all cuts that may be faster than the best plan, and bound the rest."""
        budget, bound = self.record.budget, inf
        stack = [(np.zeros((1, 1), dtype=np.int64), np.zeros((1, len(self._paths))))]
        extended = 0
        while stack:
            rows, so_far_of_rows = stack.pop()
            if rows.shape[1] > self._least.parts:
                bound = min(bound, self._finish(rows))
                continue
            extended += len(rows)
            budget.spend(5.0 * len(rows) * self._paths[0].shape[1] * len(self._paths) + 50_000)
            if extended > MOST_UNFINISHED or budget.spent:
                for left, so_far in [(rows, so_far_of_rows), *stack]:
                    remaining = self._remaining[:, left.shape[1] - 1, left[:, -1]].T
                    bound = min(bound, float((so_far + remaining).max(axis=1).min(initial=inf)))
                break
            stack += self._extend(rows, so_far_of_rows)
        self.bound = max(self.bound, bound)

    @cached_property
    def _paths(self) -> Floats:
        """(paths, parts, n + 1, n + 1) seconds: a mean of the devices' paths, and undominated paths."""
        tables, program = self._least, self.shape.program
        wholes = [tables.seconds["forward"][slot][0, -1] for slot in program.parts_by_slot if not slot.chunk]
        paces = 1 / np.maximum(wholes, 1e-300)
        if self.shape.is_endless:
            counts = endless_paths(program, self.shape.config.micro_batches)
        else:
            paces = np.repeat(paces, 2)
            counts = [*device_paths(program), *launch_paths(program, tables.hosts)]
        paths = [np.zeros(tables.usable.shape)]
        for index, path in enumerate(counts):
            table = path_table(tables, path)
            if index < len(paces):
                paths[0] += paces[index] / paces.sum() * table
            if len(paths) * table.size < MOST_TABLES and not any(
                np.all(table <= other) for other in paths[1:]
            ):
                paths.append(table)
        return np.array(paths)

    @cached_property
    def _remaining(self) -> Floats:
        return np.array([remaining_seconds(path) for path in self._paths])

    def _extend(self, rows: Cuts, before: Floats) -> Iterator[tuple[Cuts, Floats]]:
        """Yield every next part that may meet the limit, lowest bounds last."""
        part = rows.shape[1] - 1
        spent = before[:, None, :] + np.moveaxis(self._paths[:, part], 0, -1)[rows[:, -1]]
        bounds = (spent + self._remaining[:, part + 1].T[None]).max(axis=2)
        row, place = np.nonzero(bounds < self.record.limit * (1 - TIE))
        order = np.argsort(-bounds[row, place], kind="stable")
        row, place = row[order], place[order]
        for first in range(0, len(row), CHUNK):
            at = slice(first, first + CHUNK)
            yield np.column_stack([rows[row[at]], place[at]]), spent[row[at], place[at]]

    def _finish(self, rows: Cuts) -> float:
        """Score complete cuts that may be faster than the best plan, and return a bound on the rest."""
        rows, steps = self._simulate(rows, self._least)
        if self.shape.stands_for_all:
            placed, placed_steps = self._simulate(rows)
            self._score(placed[placed_steps < self.record.limit])
            return float(steps.min(initial=inf))
        for row, step in zip(rows, steps.tolist(), strict=True):
            if step >= self.record.limit * (1 - TIE):
                break
            if self.record.budget.spent:
                return float(step)
            self._score(row[None])
        return inf

    def _starts(self) -> Cuts:
        """Return balanced cuts, and cuts that give each device work by its pace in tapered parts."""
        seconds, program = self._tables.seconds, self.shape.program
        pipe, size = program.pipes[0], program.chunks
        names = ("forward", "backward", "weight")
        work = [np.diagonal(np.sum([seconds[name][slot] for name in names], axis=0), 1) for slot in pipe]
        blocks = np.append(0.0, np.cumsum(work[0]))
        rates = blocks[-1] / np.maximum([part_work.sum() for part_work in work], 1e-300)
        parts = np.array([slot.chunk for slot in pipe])
        rows = [(0, *np.cumsum(balance(np.diff(blocks), len(pipe))).tolist())]
        for first, last in TAPERS[: 1 if size == 1 else None]:
            shares = rates * (first + (last - first) * parts / max(size - 1, 1))
            targets = np.cumsum(shares)[:-1] / shares.sum() * blocks[-1]
            inner = np.searchsorted(blocks, targets - np.diff(blocks).mean() / 2)
            rows.append(_spread([0, *inner.tolist(), len(blocks) - 1]))
        distinct = np.array(list(dict.fromkeys(rows)), dtype=np.int64)
        return distinct[_are_usable(distinct, self._tables.usable)]

    def _simulate(self, rows: Cuts, tables: PartTables | None = None) -> tuple[Cuts, Floats]:
        """Sort cuts by their simulated steps, and return both."""
        if not len(rows):
            return rows, np.zeros(0)
        self.record.budget.simulate(len(rows), self._actions)
        if self.shape.is_endless:
            steps = (
                self._paths[:, np.arange(rows.shape[1] - 1), rows[:, :-1], rows[:, 1:]]
                .sum(axis=2)
                .max(axis=0)
            )
        else:
            steps = step_seconds(self.shape.program, (tables or self._tables).costs(rows))
        order = np.argsort(steps, kind="stable")
        return rows[order], steps[order]

    def _score(self, rows: Cuts) -> None:
        """Score the first few cuts that were not scored yet."""
        problem, budget = self.record.problem, self.record.budget
        cut_points = problem.space.table(problem.chain.sizes[0]).cut_points
        for key in map(tuple, rows[:MOST_SCORED].tolist()):
            if key in self._scored:
                continue
            proposal = self.shape.proposal(cut_points, key)
            budget.simulate(1, 4 * self._actions)
            budget.spend(SCORE_WORK)
            plan = self.record.score(proposal)
            self._scored[key] = inf if plan is None else plan.step_seconds
            if plan is not None and plan.step_seconds < self.step:
                self.best = plan


def search_shapes(record: Record, shapes: Iterable[ShapeSearch]) -> tuple[list[ShapeSearch], float]:
    """Search the cuts of some shapes.

    Args:
        record: State that all shapes share.
        shapes: The searches.

    Returns:
        The searches, and a bound in seconds on all plans that are not scored.
    """
    searches = sorted(shapes, key=lambda search: search.bound)
    for search in searches:
        if search.best is None and record.is_open(search.bound):
            search.begin()
    for search in sorted(searches, key=lambda search: search.step):
        if record.is_open(search.bound) and search.step < FAR * record.limit:
            search.descend()
    for search in sorted(searches, key=lambda search: search.bound):
        if record.is_open(search.bound):
            search.exhaust()
    left = (search.bound for search in searches if search.bound < record.limit * (1 - TIE))
    return searches, min([*left, record.limit])


def _neighbours(cuts: Cuts, usable: Mask) -> Cuts:
    """Return (candidates, parts + 1) allowed cuts with one or two of them moved to the next place."""
    single = [(part, move) for part in range(1, len(usable)) for move in (-1, 1)]
    pairs = [pair for pair in combinations(single, 2) if pair[0][0] != pair[1][0]]
    near = sorted(pairs, key=lambda pair: pair[1][0] - pair[0][0])[:MOST_PAIRS]
    rows = np.repeat(cuts[None], len(single) + len(near), axis=0)
    for row, moves in zip(rows, [*((move,) for move in single), *near], strict=True):
        for part, move in moves:
            row[part] += move
    result: Cuts = rows[_are_usable(rows, usable)]
    return result


def _are_usable(rows: Cuts, usable: Mask) -> Mask:
    fits: Mask = np.all(np.diff(rows, axis=1) > 0, axis=1)
    inside = np.clip(rows, 0, usable.shape[1] - 1)
    for part, mask in enumerate(usable):
        fits &= mask[inside[:, part], inside[:, part + 1]]
    return fits


def _spread(cuts: Sequence[int]) -> tuple[int, ...]:
    """Move each cut so that it comes after the previous one and leaves a place for each later one."""
    row, last = list(cuts), len(cuts) - 1
    for index in range(1, last):
        row[index] = min(max(row[index], row[index - 1] + 1), row[last] - (last - index))
    return tuple(row)
