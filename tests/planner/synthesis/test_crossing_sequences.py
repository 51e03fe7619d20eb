"""The bound of sequences that cross, against every order of these sequences."""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np
import pytest

from pplan.planner.synthesis import crossing_bound as module
from pplan.planner.synthesis.action_bound import _ActionTimes
from pplan.planner.synthesis.crossing_bound import SEQUENCES, _Crossings, _leave_out_later, crossing_bound
from pplan.planner.synthesis.order_problem import B, F, OrderProblem, W

from .test_rule_orders import random_problem

Action = tuple[int, int, int]


def sequences(problem: OrderProblem, part: int) -> list[list[Action]]:
    """Of the first micro-batches that the part has room for, each followed by that which takes its room."""
    later = range(part, problem.parts)
    way = [(F, own) for own in later] + [(B, own) for own in later[::-1]] + [(W, part)] * problem.split
    most = problem.most_in_flight[part]
    return [
        [(*step, number) for number in range(first, problem.micro_batches, most) for step in way]
        for first in range(min(SEQUENCES, most))
    ]


def least_of_all(problem: OrderProblem, part: int, heads: Any, tails: Any, least: float) -> float:
    """Of every way to do one action after another: of a kind and part in the order of micro-batches, none
    before its head, each device one at a time."""
    rows = sequences(problem, part)
    best = inf

    def go_on(
        done: list[int], ready: list[float], free: dict[int, float], made: set[Action], step: float
    ) -> None:
        nonlocal best
        if step >= best:
            return
        if done == [len(row) for row in rows]:
            best = step
            return
        for index, row in enumerate(rows):
            if done[index] == len(row):
                continue
            kind, own, number = action = row[done[index]]
            earlier = [
                each for other in rows for each in other if each[:2] == action[:2] and each[2] < number
            ]
            if not made.issuperset(earlier):
                continue
            start = max(ready[index], free.get(own, 0.0), float(heads[own, kind, number]))
            end = start + problem.duration(kind, own, number == 0)
            wait = 0.0
            if kind == F:
                wait = problem.forward_wait[own]
            elif kind == B and own > part:
                wait = problem.backward_wait[own]
            go_on(
                [n + (place == index) for place, n in enumerate(done)],
                [end + wait if place == index else at for place, at in enumerate(ready)],
                free | {own: end},
                made | {action},
                max(step, end + float(tails[own, kind, number])),
            )

    go_on([0] * len(rows), [0.0] * len(rows), {}, set(), least)
    return best


def cases() -> list[tuple[OrderProblem, int]]:
    """With two or three sequences, on one device or two."""
    found = []
    for seed in range(30):
        problem = random_problem(seed, 2, 3 + seed % 2, room=(2.5, 3.0, 3.5)[seed % 3])
        for part, most in enumerate(problem.most_in_flight):
            actions = sum(map(len, sequences(problem, part)))
            if 1 < most < problem.micro_batches and actions <= 15:
                found.append((problem, part))
    return found


def test_the_least_of_all_orders() -> None:
    """With what comes before and after each action, and without; where states are made one, no more."""
    sizes, raised = set(), 0
    for problem, part in cases()[:14]:
        times = _ActionTimes(problem)
        zeros = np.zeros_like(times.heads())
        for heads, tails in ((times.heads(), times.tails()), (zeros, zeros)):
            expected = least_of_all(problem, part, heads, tails, 1.0)
            own = _Crossings(problem, part, heads, tails)
            assert own.bound(1.0, inf, 1e6) == pytest.approx(expected)
            assert own.bound(expected + 1.0, inf, 1e6) == pytest.approx(expected + 1.0)
            assert own.bound(1.0, expected, 1e6) == pytest.approx(expected)
            assert own.bound(1.0, 0.9 * expected, 1e6) == pytest.approx(0.9 * expected)
            for steps in (-1.0, 0.0, 3.0, 10.0):
                assert 1.0 <= own.bound(1.0, inf, steps) <= expected * (1 + 1e-12)
            sizes.add((len(own.sequences), problem.parts - part))
            raised += own.bound(1.0, inf, 10.0) > 1.0
    assert len(sizes) > 1
    assert raised > 5


def test_states_that_are_no_earlier_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the others each stays; of too many, neighbours are made one, as early as both."""
    for seed in range(30):
        random = np.random.default_rng(seed)
        states = [tuple(row) for row in random.integers(0, 5, (12, 3)).astype(float).tolist()]
        kept = _leave_out_later(states)
        expected = {
            own
            for own in states
            if not any(
                other != own and all(a <= b for a, b in zip(other, own, strict=True)) for other in states
            )
        }
        assert kept == sorted(expected)
        with monkeypatch.context() as patch:
            patch.setattr(module, "MOST_STATES", 2)
            few = _leave_out_later(states)
            assert len(few) <= 2
            for own in kept:
                assert any(all(a <= b for a, b in zip(one, own, strict=True)) for one in few)
            while len(kept) > 2:
                pairs = [kept[n : n + 2] for n in range(0, len(kept), 2)]
                kept = [tuple(map(min, *pair)) if len(pair) > 1 else pair[0] for pair in pairs]
            assert few == kept


def test_the_parts_whose_round_trips_are_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each micro-batch that there is room for; two of them, in their share of the time."""
    asked = list[tuple[int, float, float, float]]()

    class Noted:
        def __init__(self, _: Any, part: int, *__: Any) -> None:
            self.part = part

        def bound(self, least: float, limit: float, steps: float) -> float:
            asked.append((self.part, least, limit, steps))
            return 10.0 + self.part

    monkeypatch.setattr(module, "_Crossings", Noted)
    for seed in range(20):
        problem = random_problem(seed, 4, 6, room=3.0 + seed % 3)
        turns = {}
        for part, most in enumerate(problem.most_in_flight):
            if 1 < most < 6:
                turns[part] = (problem.way_seconds(part) + problem.weight[part]) / most
        longest = sorted(turns, key=lambda part: turns[part], reverse=True)[:2]
        for seconds, steps in ((inf, 250_000), (0.4, 0.4 * 150_000 / 2)):
            asked.clear()
            found = crossing_bound(problem, np.zeros(1), np.zeros(1), 10.5, 50.0, seconds)
            assert [part for part, *_ in asked] == longest
            least = 10.5
            for own in asked:
                assert own[1:] == (least, 50.0, steps)
                least = max(least, 10.0 + own[0])
            assert found == least
