"""Rules that run ahead, as their text has them, and the search of them: which are tried, and what is kept."""

from __future__ import annotations

from itertools import accumulate
from math import inf
from typing import Any

import pytest

from pplan.planner.synthesis import ahead_orders
from pplan.planner.synthesis.ahead_orders import (
    AheadRule,
    _first_rules,
    _RuleOrders,
    order_by_rule,
    search_ahead,
    steepest_slope,
)
from pplan.planner.synthesis.order_problem import B, F, OrderProblem
from pplan.planner.synthesis.run_order import run_order

from .test_rule_orders import random_problem

RULES = (
    AheadRule(1.5, period=2.0),
    AheadRule(0.5, 2, 0.8, -2.0, 0.4, 0.25, 0.3),
    AheadRule(1.0, 3, 0.5, 0.0, 0.9, 0.5, 0.0, 1),
    AheadRule(2.0, 1, 1.0, 3.0, 0.5, 0.0, 1.0, 0),
)


def problems() -> list[OrderProblem]:
    """Of three stages with a backward in two parts, in little room."""
    own = [random_problem(seed, 4, 6, room=3.0) for seed in (1, 2, 4, 5)]
    assert all(problem.split for problem in own)
    return own


def distances(problem: OrderProblem) -> list[float]:
    """What a micro-batch has on its way to the loss and back before it is at the last part, as a share."""
    ways = []
    for part in range(problem.parts):
        later = range(part, problem.parts)
        ways.append(sum(problem.forward[own] + problem.backward[own] for own in later))
        ways[-1] += sum(problem.forward_wait[own] + problem.backward_wait[own + 1] for own in later[:-1])
    return [(way - ways[-1]) / (ways[0] - ways[-1]) for way in ways]


def turns(problem: OrderProblem, rule: AheadRule) -> list[list[int]]:
    """Before a backward all forwards that begin no later than the rule says, of each backward no fewer than
    of the one before it and than the next stage."""
    count = problem.micro_batches
    begins = [j - j % rule.group + j % rule.group * rule.apart for j in range(count)]
    behind, rows = [0] * count, list[list[int]]()
    for distance in reversed(distances(problem)):
        fraction = [(j / rule.period + rule.phase) % 1 if rule.period else 0.0 for j in range(count)]
        limits = [begins[j] + rule.slope * distance + fraction[j] + rule.offset for j in range(count)]
        before = [sum(own <= limit + 1e-9 for own in begins) for limit in accumulate(limits, max)]
        behind = [max(j + 1, before[j], behind[j]) for j in range(count)]
        row, made = list[int](), 0
        for most in behind:
            row += [F] * (most - made) + [B]
            made = max(made, most)
        rows.insert(0, row)
    return rows


def test_how_far_stages_run_ahead() -> None:
    """With the numbers of one rule after another, the room left out."""
    differ = set()
    for problem in problems():
        assert ahead_orders._distances(problem) == pytest.approx(distances(problem))
        orders = _RuleOrders(problem)
        for rule in RULES:
            numbers = float(rule.slope), float(rule.period), float(rule.phase), float(rule.offset)
            begins = [j - j % rule.group + j % rule.group * rule.apart for j in range(6)]
            orders.filler.make_turns(
                6, orders.distances, begins, numbers, orders.forwards, orders.filler.turns
            )
            own = orders.filler.turns
            rows = [own[12 * part : 12 * part + 12] for part in range(4)]
            assert rows == turns(problem, rule)
            differ.add(str(rows))
    assert len(differ) > 6


def test_one_rule_after_another_is_each_alone() -> None:
    """Nothing of the orders before is left in the next, whether they fit or not."""
    steps = []
    for problem in problems():
        orders = _RuleOrders(problem)
        for rule in (*RULES, *reversed(RULES)):
            step = orders.step(rule)
            steps.append(step)
            assert step == _RuleOrders(problem).step(rule)
            alone = order_by_rule(problem, rule)
            assert alone == (None if step == inf else orders.lists())
            run = None if alone is None else run_order(problem, alone)
            assert run is None or run.step == step
    assert inf in steps
    assert len(set(steps)) > 6


@pytest.mark.parametrize("seed", [0, 3])
def test_the_search_keeps_the_fastest_of_what_it_tries(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there is time for, the first ones always; it ends at once at the bound."""
    tried = list[AheadRule]()
    step = _RuleOrders.step

    def noted(self: Any, rule: AheadRule) -> float:
        tried.append(rule)
        return step(self, rule)

    monkeypatch.setattr(_RuleOrders, "step", noted)
    for problem in problems()[:2]:
        tried.clear()
        left = iter([False] * 30)
        lists, least = search_ahead(problem, 0.0, lambda: next(left, True), seed)  # noqa: B023
        assert len(tried) == 30
        first, every = _first_rules(problem), list(tried)
        assert every[: len(first)] == first
        orders = [order_by_rule(problem, rule) for rule in every]
        runs = [run_order(problem, own) for own in orders if own is not None]
        steps = [run.step for run in runs if run is not None]
        assert least == min(steps, default=inf)
        assert (lists in orders) == (least < inf)
        if least < inf:
            tried.clear()
            assert search_ahead(problem, least, lambda: len(tried) > 50, seed) == (lists, least)
            assert len(tried) == 1 + next(n for n, own in enumerate(every) if _step(problem, own) == least)


def _step(problem: OrderProblem, rule: AheadRule) -> float:
    lists = order_by_rule(problem, rule)
    run = None if lists is None else run_order(problem, lists)
    return inf if run is None else run.step


def test_where_no_rule_is_tried() -> None:
    """Of one stage, a backward that is whole, or room for a micro-batch a stage and more."""
    wide, whole = random_problem(1, 4, 6, room=99.0), random_problem(3, 4, 6, room=3.0)
    for problem in (
        wide,
        whole,
        random_problem(1, 1, 6, room=3.0),
        random_problem(1, 2, 6, room=3.0, chunks=2),
    ):
        assert steepest_slope(problem) is None
        assert search_ahead(problem, 0.0, lambda: False) == (None, inf)
        assert list(ahead_orders.ahead_orders(problem)) == []
    for problem in problems():
        rooms = zip(problem.most_in_flight, distances(problem), strict=True)
        most = min((room - 1) / distance for room, distance in rooms if distance)
        assert steepest_slope(problem) == pytest.approx(most)
