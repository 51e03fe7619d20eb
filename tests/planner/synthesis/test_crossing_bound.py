"""The bound by sequences of micro-batches that cross, against every order and against the best ones known."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np
import pytest

from pplan.planner.synthesis import action_bound as by_actions
from pplan.planner.synthesis import crossing_bound
from pplan.planner.synthesis.action_bound import action_bound
from pplan.planner.synthesis.insert_orders import insert_orders
from pplan.planner.synthesis.local_search import improve_order
from pplan.planner.synthesis.order_problem import OrderProblem

from .test_orders import TOLERANCE, best_of_all, equal_stages, random_problem, step_of, uneven

SHAPES = (("1f1b", 2, 6), ("1f1b", 3, 4), ("zb-h1", 2, 3))


def tight_problem(seed: int) -> OrderProblem:
    """Of stages with room for two micro-batches, or for others, of which several follow one another."""
    random = np.random.default_rng(seed)
    base, devices, count = SHAPES[seed % len(SHAPES)]
    problem, _, _ = random_problem(base, devices, count, seed)
    room = (2.0,) * devices if seed % 3 else tuple(map(float, random.integers(1, 3, devices)))
    problem = replace(problem, room=room)
    if seed % 4 == 0:
        problem = replace(problem, credit=tuple(4 * own for own in problem.credit))
    if seed % 7 == 0:
        problem = uneven(problem, seed, float(random.uniform(2, 3)))
    return problem


def without_crossing(problem: OrderProblem, monkeypatch: pytest.MonkeyPatch) -> float:
    """The bound by every action alone."""
    with monkeypatch.context() as patch:
        patch.setattr(by_actions, "crossing_bound", lambda *own: own[3])
        return action_bound(problem)


def test_no_order_is_below(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all orders, also where states are made one, or there is no time to go on; and what is left to the
    best is less than without."""
    left = list[tuple[float, float]]()
    for seed in range(24):
        problem = tight_problem(seed)
        least, bound = best_of_all(problem), action_bound(problem)
        assert bound <= least * (1 + TOLERANCE), seed
        if least == inf:
            continue
        assert bound * (1 - TOLERANCE) <= action_bound(problem, least) <= least * (1 + TOLERANCE)
        alone = without_crossing(problem, monkeypatch)
        left.append((least / bound - 1, least / alone - 1))
        for limit, value in (("MOST_STATES", 1), ("MOST_STEPS", 9)):
            with monkeypatch.context() as patch:
                patch.setattr(crossing_bound, limit, value)
                assert alone * (1 - TOLERANCE) <= action_bound(problem) <= least * (1 + TOLERANCE), seed
    crossing, alone = np.mean(left, axis=0)
    assert crossing < 0.7 * alone


@pytest.mark.parametrize(("stages", "count", "room", "rise"), [(4, 12, 3, 0.06), (4, 16, 2, 0.05)])
def test_orders_are_proven_that_round_trips_leave_open(
    stages: int, count: int, room: int, rise: float
) -> None:
    """Equal stages in less than 1F1B's memory: the best order of a rule, which exchanges do not mend."""
    problem = equal_stages(stages, count, float(room))
    best = min(insert_orders(problem), key=lambda lists: step_of(problem, lists))
    lists, step = improve_order(problem, best, 0.0, 20_000)
    assert problem.fits(lists)
    bound = action_bound(problem)
    assert bound > (1 + rise) * problem.bound()
    assert bound == pytest.approx(step, rel=1e-3)
    assert bound <= step * (1 + TOLERANCE)
    assert action_bound(problem, step) <= step * (1 + TOLERANCE)


def test_sixteen_stages_in_half_of_the_memory_of_1f1b() -> None:
    """A rule's order is 3.8 % from what round trips alone prove, and 1.1 % from this."""
    problem = equal_stages(16, 64, 8.0)
    step = min(step_of(problem, lists) for lists in insert_orders(problem))
    assert step > 1.03 * problem.bound()
    assert step < 1.012 * action_bound(problem)
