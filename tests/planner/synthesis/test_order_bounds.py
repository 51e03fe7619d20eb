"""Bounds of orders as their texts have them, once more with loops; and how exchanges are heated, by hand."""

from __future__ import annotations

from dataclasses import replace
from math import inf, sqrt
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pplan.planner.synthesis import exchange_loops, local_search
from pplan.planner.synthesis.exchange_loops import RANDOM_MODULUS
from pplan.planner.synthesis.local_search import CHUNK, improve_order
from pplan.planner.synthesis.order_problem import B, F, OrderProblem, W
from pplan.planner.synthesis.run_order import run_order

from .test_rule_orders import random_problem

Patch = pytest.MonkeyPatch


def problems() -> list[OrderProblem]:
    """Lines of three and four, in rooms that differ, and what follows the last action on each."""
    found = []
    for seed in range(40):
        devices = 3 + seed % 2
        own = random_problem(seed, devices, 6, room=2.0)
        random = np.random.default_rng(seed)
        rooms = tuple((random.integers(9, 60, devices) / 8).tolist())
        found.append(replace(own, room=rooms, end=tuple((random.integers(0, 9, devices) / 4).tolist())))
    return found


def most(problem: OrderProblem, part: int, besides: float, each: float) -> int:
    """Micro-batches of so many bytes that have room beside others."""
    room = problem.room[problem.device[part]]
    return max([0, *(n for n in range(1, problem.micro_batches + 1) if besides + n * each <= room)])


def test_how_many_micro_batches_have_room() -> None:
    """With all of them in flight the next B begins, or one has had its B and not its W as an F begins."""
    seen = set()
    for problem in problems():
        for part in range(problem.parts):
            own, (begins, ends) = problem.micro_batch_bytes[part], problem.parts_held[part]
            forward, backward = (problem.workspace_bytes(kind, part) for kind in (F, B))
            flying = most(problem, part, max(forward, backward + begins), own)
            if problem.split:
                less = own + min(0.0, begins + ends)
                flying = max(flying, most(problem, part, forward + max(0.0, begins + ends), less))
            assert problem.most_in_flight[part] == flying
            waiting = most(problem, part, backward + own + begins, own + begins + ends)
            assert problem.most_behind_backward[part] == min(6, 1 + waiting)
            seen |= {flying, waiting}
    assert seen >= {0, 1, 2, 3, 5}
    free = replace(problems()[1], room=(inf,) * 4)
    assert free.most_in_flight == free.most_behind_backward == (6,) * 4
    empty = replace(problems()[1], micro_batch_bytes=(0.0,) * 4, first_part=(), workspace=())
    assert empty.most_in_flight == (6,) * 4


def windows(problem: OrderProblem) -> float:
    """The lines at the head of `order_problem`, of every part's memory, every part at or behind it, and of no
    round of it and of all."""
    count, parts = problem.micro_batches, range(problem.parts)
    f, b, w = problem.forward, problem.backward, problem.weight
    less_b = [0.0 if problem.split else min(problem.credit[p], b[p]) for p in parts]
    less_w = [min(problem.credit[p], w[p]) if problem.split else 0.0 for p in parts]

    def way(part: int) -> float:
        """There and back, of the first micro-batch."""
        later = range(part, problem.parts)
        links = sum(problem.forward_wait[p] + problem.backward_wait[p + 1] for p in later[:-1])
        return sum(f[p] + b[p] - less_b[p] for p in later) + links

    lead = [sum(f[p] + problem.forward_wait[p] for p in range(part)) for part in parts]
    least = max(
        way(0),
        *(lead[p] + count * (f[p] + b[p] + w[p]) - less_b[p] - less_w[p] + problem.end[p] for p in parts),
    )
    for part in parts:
        k = problem.most_in_flight[part]
        if k == 0:
            return inf
        for s in parts[part:]:
            own, q = problem.most_in_flight[s], problem.most_behind_backward[s]
            trail = max(w[s] - less_w[s], w[s] - less_w[s] + problem.end[s])
            way_back = 0.0
            for before in reversed(range(s)):
                way_back += problem.backward_wait[before + 1] + b[before] - less_b[before]
            first = 0.0 if s == 0 else w[0] - less_w[0]
            trail = max(trail, way_back + first)
            return_of_b = way(s) - (b[s] - less_b[s])
            for n in {0, (count - 1) // k}:
                left = count - n * k
                begin = lead[s] + n * (way(part) + w[part] - less_w[part])
                idle = max(0.0, return_of_b - min(own, left) * f[s])
                work = left * (f[s] + b[s] + w[s]) - less_b[s] - less_w[s] + problem.end[s]
                drain = left * (f[s] + b[s]) - less_b[s] + max(0.0, (left - q) * w[s] - less_w[s]) + trail
                each = f[s] if n == 0 else max(f[s], f[part] + b[part] + w[part])
                last = (left - 1) * each + way(s) + trail
                least = max(least, begin + idle + max(work, drain), begin + last)
                if left > own:
                    waits = max(0.0, return_of_b - own * f[s])
                    released = (left - own) * (b[s] + w[s]) - less_b[s] - less_w[s]
                    least = max(least, begin + waits + (left - 1) * f[s] + released + way(s) + trail)
    return least


def test_the_bound_of_round_trips() -> None:
    infinite = 0
    for problem in problems():
        assert problem.bound() == pytest.approx(windows(problem), rel=1e-12)
        infinite += problem.bound() == inf
    assert 0 < infinite < 30


def test_how_exchanges_go_on(monkeypatch: Patch) -> None:
    """Turns of 400 exchanges, at a heat that falls with the root of what is left: at first of 0.4 of the mean
    seconds of an action, or less where there is less work than 400 times the actions."""
    problem = replace(random_problem(1, 2, 3, room=9.0), end=(0.0, 0.0))
    actions, seconds = 18, sum(map(sum, (problem.forward, problem.backward, problem.weight)))
    start = tuple(tuple((kind, part) for _ in range(3) for kind in (F, B, W)) for part in range(2))
    run = run_order(problem, start)
    assert run is not None
    asked, answers = list[Any](), list[Any]()

    def anneal(_: Any, __: Any, turns: int, heat: float, bound: float, least: float, random: int) -> Any:
        asked.append((turns, heat, bound, least, random))
        return answers[len(asked) - 1]

    monkeypatch.setattr(exchange_loops, "anneal", anneal)
    for work in (100_000.0, 4 * actions * 100.0, 720.0):
        first = 0.4 * 3 * seconds / actions * min(1.0, work / (400 * actions))
        answers[:] = [(run.step, 99, True, 5), (run.step, work / 2, True, 6), (run.step, work, True, 7)]
        asked.clear()
        assert improve_order(problem, start, 2.0, work, seed=41) == (start, run.step)
        heats = [first, first * sqrt(1 - 100 / work), first * sqrt(0.5 - 101 / work)]
        assert [own[1] for own in asked] == pytest.approx(heats)
        assert [(own[0], own[3], own[4]) for own in asked] == [(CHUNK, run.step, n) for n in (42, 5, 6)]
        assert [own[2] for own in asked] == pytest.approx([2.0] * 3)
    for ending, count in (([(run.step, 9, False, 5)], 1), ([(2.0, 9, True, 5)], 1)):
        asked.clear()
        answers[:] = ending
        # What it says that it found is not in the row: the start stays.
        assert improve_order(problem, start, 2.0, 1e5) == (start, run.step)
        assert len(asked) == count
    asked.clear()
    assert improve_order(problem, start, 2.0, 1e5, lambda: True) == (start, run.step)
    assert improve_order(problem, start, run.step, 1e5) == (start, run.step)
    assert improve_order(problem, start, 2.0, 0.0) == (start, run.step)
    assert asked == []
    answers[:] = [(run.step, 1e6, True, 5)]
    improve_order(problem, start, 2.0, 1e5, seed=RANDOM_MODULUS - 1)
    assert asked[0][4] == 1


def test_what_exchanges_found_is_run_anew(monkeypatch: Patch) -> None:
    """It counts only where it is faster, and fits."""
    problem = replace(random_problem(1, 2, 3, room=9.0), end=(0.0, 0.0))
    start = tuple(tuple((kind, part) for _ in range(3) for kind in (F, B, W)) for part in range(2))
    other = tuple(tuple((kind, part) for kind in (F, B, W) for _ in range(3)) for part in range(2))
    steps, fitting = {start: 10.0, other: 9.0}, {other}
    monkeypatch.setattr(local_search, "_Network", lambda *_: Network(other))
    monkeypatch.setattr(local_search, "run_order", lambda _, lists: SimpleNamespace(step=steps[lists]))
    monkeypatch.setattr(OrderProblem, "fits", lambda _, lists: lists in fitting)
    monkeypatch.setattr(exchange_loops, "anneal", lambda *_: (8.0, 1.0, False, 3))
    assert improve_order(problem, start, 2.0, 1e5) == (other, 9.0)
    for step in (10.0, 10.0 * (1 - 1e-13), 11.0):
        steps[other] = step
        assert improve_order(problem, start, 2.0, 1e5) == (start, 10.0)
    steps[other] = 9.0
    fitting.clear()
    assert improve_order(problem, start, 2.0, 1e5) == (start, 10.0)
    fitting.add(other)
    monkeypatch.setattr(exchange_loops, "anneal", lambda *_: (10.0, 1.0, False, 3))
    assert improve_order(problem, start, 2.0, 1e5) == (start, 10.0)


class Network:
    """Whose exchanges end at this order."""

    def __init__(self, lists: Any) -> None:
        self._lists = lists

    def jobs(self, _: bool) -> Any:
        return None

    def row(self, _: bool) -> Any:
        return SimpleNamespace(best="best")

    def lists(self, own: Any) -> Any:
        assert own == "best"
        return self._lists
