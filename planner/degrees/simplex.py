"""Linear programmes of a few hundred variables: the simplex method on a table without the basis' columns.

Dantzig, "Linear Programming and Extensions", 1963, chapter 5. A solution is as exact as floating point has
it, and perhaps not the best: who needs a proof works its value out again.
"""

from __future__ import annotations

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


def maximize(objective: Array, matrix: Array, limits: Array) -> LinearSolution:
    """Where `objective @ x` is largest with `matrix @ x <= limits` and x >= 0.

    Shapes: (variables,), (limits, variables), (limits,), of which none is negative: x = 0 is allowed.

    >>> solution = maximize(np.array([3.0, 2.0]), np.array([[1.0, 1.0], [1.0, 0.0]]), np.array([4.0, 1.0]))
    >>> solution.values.round(6), solution.prices.round(6)
    (array([1., 3.]), array([2., 1.]))
    """
    rows, columns = matrix.shape
    table = np.zeros((rows + 1, columns + 1))
    table[:-1, :-1], table[-1, :-1] = matrix, -objective
    table[:-1, -1] = limits + _PERTURBATION * (1 + np.arange(rows) * _GOLDEN % 1)
    # The variables and, behind them, what is left of each limit: outside the basis they are 0.
    outside, inside = np.arange(columns), columns + np.arange(rows)
    ray = None
    for _ in range(_EXCHANGES * rows):
        enters = int(table[-1, :-1].argmin())
        column = table[:-1, enters]
        if table[-1, enters] >= -_TOLERANCE:
            break
        ratios = np.divide(table[:-1, -1], column, out=np.full(rows, np.inf), where=column > _TOLERANCE)
        leaves = int(ratios.argmin())
        if not np.isfinite(ratios[leaves]):
            ray = _by_number(np.append(inside, outside[enters]), np.append(-column, 1.0), columns)
            break
        _exchange(table, leaves, enters)
        outside[enters], inside[leaves] = inside[leaves], outside[enters]
    values = _by_number(inside, table[:-1, -1], columns)
    return LinearSolution(values, _by_number(outside - columns, table[-1, :-1], rows), ray)


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
