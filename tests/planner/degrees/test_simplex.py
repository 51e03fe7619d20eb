"""Linear programmes against all of their corners."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from pplan.planner.degrees.simplex import Array, LinearSolution, SimplexTable


def maximize(objective: Array, matrix: Array, limits: Array) -> LinearSolution:
    table = SimplexTable(limits)
    table.add(objective, matrix)
    return table.solve()


def best_corner(objective: Array, matrix: Array, limits: Array) -> float:
    """Of all points in which as many limits hold exactly as there are variables."""
    rows = np.concatenate([matrix, -np.eye(len(objective))])
    ends = np.append(limits, np.zeros(len(objective)))
    best = -np.inf
    for some in combinations(range(len(rows)), len(objective)):
        own = rows[list(some)]
        if abs(np.linalg.det(own)) > 1e-9:
            point = np.linalg.solve(own, ends[list(some)])
            if (rows @ point <= ends + 1e-9).all():
                best = max(best, float(objective @ point))
    return best


@pytest.mark.parametrize("seed", range(20))
def test_against_all_corners(seed: int) -> None:
    """Some limits are 0, where the method's exchanges may gain nothing."""
    random = np.random.default_rng(seed)
    variables, rows = random.integers(1, 5, size=2)
    matrix = random.integers(0, 4, size=(rows + 1, variables)).astype(float)
    matrix[-1] = 1.0
    limits = np.append(random.integers(0, 3, size=rows), 5).astype(float)
    objective = random.integers(-2, 5, size=variables).astype(float)
    solution = maximize(objective, matrix, limits)
    assert solution.ray is None
    assert (solution.values >= 0).all()
    assert (matrix @ solution.values <= limits + 1e-6).all()
    assert objective @ solution.values == pytest.approx(best_corner(objective, matrix, limits), abs=1e-5)
    # What the limits are worth together is the same (strong duality), and no variable would gain.
    assert solution.prices @ limits == pytest.approx(objective @ solution.values, abs=1e-5)
    assert (solution.prices @ matrix >= objective - 1e-6).all()


def test_without_a_largest_value() -> None:
    """Along the ray all limits hold and the objective grows."""
    matrix, limits = np.array([[1.0, -1.0], [-1.0, 0.5]]), np.array([1.0, 2.0])
    solution = maximize(np.array([1.0, 1.0]), matrix, limits)
    assert solution.ray is not None
    assert solution.ray.sum() > 0
    assert (matrix @ (solution.values + 100 * solution.ray) <= limits + 1e-4).all()


def test_what_costs_nothing_is_no_ray() -> None:
    """A variable that no limit holds, and that the objective does not count."""
    solution = maximize(np.array([1.0, 0.0]), np.array([[1.0, 0.0]]), np.array([2.0]))
    assert solution.ray is None
    assert solution.values[0] == pytest.approx(2.0, abs=1e-6)
