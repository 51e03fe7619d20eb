"""Linear programmes of a few hundred variables: the simplex method on a table without the basis' columns.

Dantzig, "Linear Programming and Extensions", 1963, chapter 5. A solution is as exact as floating point has
it, and perhaps not the best: who needs a proof works its value out again.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

_TOLERANCE = 1e-10
_PERTURBATION = 1e-7
"""Of the limits, so that an exchange seldom gains nothing; of each another one."""
_GOLDEN = 0.6180339887498949
_EXCHANGES = 20
"""For each limit, at most."""


@dataclass(frozen=True)
class LinearSolution:
    """`values` of the variables, `prices` of the limits, and, where the objective has no largest value, a
    `ray`: a direction in which it grows for ever."""

    values: Array
    prices: Array
    ray: Array | None


class SimplexTable:
    """Where `objective @ x` is largest with `matrix @ x <= limits` and x >= 0; it goes on from its last
    solution when the objective changes, or when variables are added: that solution stays allowed.

    Shapes: (variables,), (limits, variables), (limits,), of which none is negative: x = 0 is allowed.

    >>> table = SimplexTable(np.array([4.0, 1.0]))
    >>> table.add(np.array([3.0, 2.0]), np.array([[1.0, 1.0], [1.0, 0.0]]))
    >>> solution = table.solve()
    >>> solution.values.round(6), solution.prices.round(6)
    (array([1., 3.]), array([2., 1.]))
    """

    def __init__(self, limits: Array) -> None:
        self.rows = len(limits)
        self._table = np.zeros((self.rows + 1, 1))
        self._limits = limits
        self._table[:-1, 0] = limits + _PERTURBATION * (1 + np.arange(self.rows) * _GOLDEN % 1)
        self._objective = np.zeros(0)
        # What is left of each limit and, behind them, the variables: outside the basis they are 0.
        self._inside, self._outside = np.arange(self.rows), np.zeros(0, dtype=np.int64)

    @property
    def variables(self) -> int:
        """Their number."""
        return len(self._objective)

    def copy(self) -> SimplexTable:
        """One that goes on by itself."""
        other = copy(self)
        other._table = self._table.copy()
        other._inside, other._outside = self._inside.copy(), self._outside.copy()
        return other

    def add(self, objective: Array, matrix: Array) -> None:
        """Further variables, behind those that there are; shapes (variables,), (limits, variables)."""
        prices = _by_number(self._outside, self._table[-1, :-1], self.rows)
        columns = np.concatenate([self._solved(matrix), (prices @ matrix - objective)[None]])
        self._table = np.concatenate([self._table[:, :-1], columns, self._table[:, -1:]], axis=1)
        numbers = self.rows + len(self._objective) + np.arange(len(objective))
        self._outside = np.append(self._outside, numbers)
        self._objective = np.append(self._objective, objective)

    def _solved(self, sides: Array) -> Array:
        """What the variables in the basis are where all others are 0 and the limits are these, (limits, ...),
        instead."""
        left = np.flatnonzero(self._outside < self.rows)
        solved = self._table[:-1, left] @ sides[self._outside[left]]
        places = np.flatnonzero(self._inside < self.rows)
        solved[places] += sides[self._inside[places]]
        return np.asarray(solved)

    def change(self, objective: Array) -> None:
        """Another objective of all variables."""
        more = np.append(np.zeros(self.rows), objective - self._objective)
        self._table[-1, :-1] -= more[self._outside]
        self._table[-1] += more[self._inside] @ self._table[:-1]
        self._objective = objective

    def solve(self, enough: float = float("inf")) -> LinearSolution:
        """The best solution, or one whose objective is `enough`."""
        table, variables = self._table, len(self._objective)
        ray = None
        for _ in range(_EXCHANGES * self.rows):
            enters = int(table[-1, :-1].argmin())
            column = table[:-1, enters]
            if table[-1, enters] >= -_TOLERANCE or table[-1, -1] >= enough:
                break
            ratios = np.divide(
                table[:-1, -1], column, out=np.full(self.rows, np.inf), where=column > _TOLERANCE
            )
            leaves = int(ratios.argmin())
            if not np.isfinite(ratios[leaves]):
                numbers = np.append(self._inside, self._outside[enters]) - self.rows
                ray = _by_number(numbers, np.append(-column, 1.0), variables)
                break
            _exchange(table, leaves, enters)
            self._outside[enters], self._inside[leaves] = self._inside[leaves], self._outside[enters]
        values = _by_number(self._inside - self.rows, self._solved(self._limits), variables)
        return LinearSolution(values, _by_number(self._outside, table[-1, :-1], self.rows), ray)


def _exchange(table: Array, leaves: int, enters: int) -> None:
    """One variable into the basis, another out of it."""
    pivot, column = table[leaves, enters], table[:, enters].copy()
    row = table[leaves] / pivot
    row[enters] = 1 / pivot
    column[leaves] = 0.0
    table[:, enters] = 0.0
    table -= np.multiply.outer(column, row)
    table[leaves] = row


def _by_number(numbers: npt.NDArray[np.int64], values: Array, count: int) -> Array:
    """The values of those numbered 0 up to `count`; what is not listed is 0."""
    every = np.zeros(count)
    own = (numbers >= 0) & (numbers < count)
    every[numbers[own]] = values[own]
    return every
