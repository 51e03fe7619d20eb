"""Exchanges of actions: every single move and whole searches against plain second implementations."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache
from itertools import pairwise, product
from math import inf, sqrt
from random import Random

import numpy as np
import pytest

from pplan.cost_models.program_order import NONE
from pplan.cost_models.timeline import simulate
from pplan.planner.synthesis import exchanges as module
from pplan.planner.synthesis.exchanges import _Exchanges, improve_order
from pplan.planner.synthesis.orders import Lists, OrderProblem, fill_orders

from .test_fill_orders import random_problem
from .test_orders import random_problem as random_costs
from .test_orders import uneven

SMALL = 1 / 64
"""Seconds are eighths, or thirds of them for transfers that wait for each other."""


@cache
def exchanges() -> list[_Exchanges]:
    """Orders on lines and on a V, in tight room and in wide."""
    made = []
    for seed in range(7):
        chunks, devices = (2 if seed == 3 else 1), (3 if seed == 5 else 2)
        problem = random_problem(seed, devices, 3, room=(2.5, 3.0, 9.0)[seed % 3], chunks=chunks)
        problem = replace(
            problem, costs=replace(problem.costs, optimizer=np.array([0.5, 3.0, 0.0])[:devices])
        )
        starts = [lists for lists in fill_orders(problem) if problem.fits(lists)]
        made += [_Exchanges(problem, lists, Random(seed)) for lists in starts[:1]]
    return made


def neighbours(row: _Exchanges, order: Sequence[int]) -> tuple[dict[int, int], dict[int, int]]:
    """The previous and the following action of each on its device."""
    previous, following = (dict.fromkeys(order, NONE) for _ in range(2))
    for first, last in pairwise(order):
        if row.device[first] == row.device[last]:
            previous[last], following[first] = first, last
    return previous, following


def times(row: _Exchanges, order: Sequence[int]) -> tuple[list[float], list[float]] | None:
    """Starts and tails, repeated until nothing changes; None if actions wait for each other."""
    previous, following = neighbours(row, order)
    every, seconds, wait, senders, receivers = (
        range(len(order)),
        row.seconds,
        row.wait,
        row.sender,
        row.receiver,
    )
    start, tail = [0.0] * len(order), [0.0] * len(order)
    for _ in range(len(order) + 1):
        last = start, tail
        start = [
            max(
                0.0,
                start[previous[a]] + seconds[previous[a]] if previous[a] != NONE else 0.0,
                start[senders[a]] + seconds[senders[a]] + wait[a] if senders[a] != NONE else 0.0,
            )
            for a in every
        ]
        tail = [
            max(
                row.device_end[row.device[a]]
                if following[a] == NONE
                else seconds[following[a]] + tail[following[a]],
                0.0 if (to := receivers[a]) == NONE else wait[to] + seconds[to] + tail[to],
            )
            for a in every
        ]
        if (start, tail) == last:
            return start, tail
    return None


def step_of_row(row: _Exchanges, order: Sequence[int]) -> float:
    """Seconds of an order; infinite in a deadlock."""
    timed = times(row, order)
    if timed is None:
        return inf
    return max(timed[0][a] + row.seconds[a] + row.device_end[row.device[a]] for a in order)


def levels(row: _Exchanges, order: Sequence[int]) -> tuple[list[float], bool]:
    """Bytes held after each place, and whether every device has room."""
    held, fits, found = [0.0] * len(row.room), True, list[float]()
    for action in order:
        device = row.device[action]
        held[device] += row.begins[action]
        fits = fits and held[device] + row.workspace[action] <= row.room[device]
        held[device] += row.ends[action]
        found.append(held[device])
    return found, fits


def moved(order: Sequence[int], origin: int, target: int) -> list[int]:
    changed = list(order)
    changed.insert(target, changed.pop(origin))
    return changed


def allowed(row: _Exchanges, order: Sequence[int], origin: int, target: int) -> bool:
    """Whether actions of a kind and part stay in order, each after what it needs, and within the room."""
    changed = moved(order, origin, target)
    place = {action: number for number, action in enumerate(changed)}
    same = [a for a in changed if row.code[a] == row.code[order[origin]]]
    needs = all(row.needs[a] == NONE or place[row.needs[a]] < place[a] for a in order)
    return same == sorted(same) and needs and levels(row, changed)[1]


def check(row: _Exchanges, order: Sequence[int]) -> None:
    """All lists are those of this order."""
    timed = times(row, order)
    assert timed is not None
    every = range(len(order))
    assert row.order == list(order)
    assert [row.place[action] for action in order] == list(every)
    previous, following = neighbours(row, order)
    assert row.previous == [previous[a] for a in every]
    assert row.following == [following[a] for a in every]
    assert row.start == timed[0]
    assert row.end == [start + seconds for start, seconds in zip(timed[0], row.seconds, strict=True)]
    assert row.tail == timed[1]
    assert row.level == pytest.approx(levels(row, order)[0])
    assert sorted(row.clock) == list(every)
    assert [row.rank[action] for action in row.clock] == list(every)
    for a in order:
        for earlier in (previous[a], row.sender[a]):
            assert earlier == NONE or row.rank[earlier] < row.rank[a]


def moves(row: _Exchanges, reach: int) -> list[tuple[int, int]]:
    """All moves of an action on its device."""
    found = []
    for begin, end in pairwise(row.first):
        for origin in range(begin, end):
            near = range(max(begin, origin - reach), min(end, origin + reach + 1))
            found += [(origin, target) for target in near if target != origin]
    return found


def test_each_move_is_what_a_new_run_would_give() -> None:
    """Which moves are possible, their step, and all lists after them; a lower limit takes them back."""
    taken = endless = refused = 0
    for row in exchanges():
        check(row, row.order)
        for origin, target in moves(row, 2):
            may = row.may_move(origin, target)
            assert may == allowed(row, row.order, origin, target)
            refused += not may
            if not may:
                continue
            order = moved(row.order, origin, target)
            step = step_of_row(row, order)
            endless += step == inf
            for limit in (step + 1.0, step, step - SMALL) if step < inf else (1e6,):
                new = deepcopy(row)
                found, _ = new.change(origin, target, limit)
                if step <= limit:
                    assert found == step
                    check(new, order)
                    taken += 1
                else:
                    assert found > limit
                    check(new, row.order)
                    assert new.clock == row.clock
    assert (taken, endless, refused) > (100, 5, 100), (taken, endless, refused)


def blocked(row: _Exchanges, order: Sequence[int]) -> list[int]:
    """The actions of a critical path that follow another on their device without a pause, last first."""
    timed = times(row, order)
    assert timed is not None
    start, step = timed[0], step_of_row(row, order)
    before, following = neighbours(row, order)
    lasts = [a for a in order if following[a] == NONE]
    (*_, action) = [a for a in lasts if start[a] + row.seconds[a] + row.device_end[row.device[a]] == step]
    path = []
    while action != NONE:
        sender, previous = row.sender[action], before[action]
        if sender != NONE and start[sender] + row.seconds[sender] + row.wait[action] == start[action]:
            action = sender
        elif previous != NONE and start[previous] + row.seconds[previous] == start[action]:
            path.append(action)
            action = previous
        else:
            action = NONE
    return path


def test_the_critical_path() -> None:
    for row in exchanges():
        assert row.find_path() == blocked(row, row.order)


def exchanged(
    row: _Exchanges, turns: int, heat: float, bound: float, random: Random
) -> tuple[float, list[int], bool]:
    """The least step, its order, and whether moves are left, by a plain loop."""
    order, fruitless = list(row.order), 0
    step = least = step_of_row(row, order)
    best, path = order, blocked(row, order)
    while turns and least > bound and path and fruitless < module.MOST_FRUITLESS:
        origin = order.index(path[int(random.random() * len(path))])
        begin, end = (row.first[row.device[order[origin]] + more] for more in (0, 1))
        reach = 1 if random.random() < 0.5 else 1 + int(random.random() * 6)
        target = max(origin - reach, begin)
        if random.random() < 0.5:
            origin -= 1
            target = min(origin + reach, end - 1)
        if not allowed(row, order, origin, target):
            fruitless += 1
            continue
        fruitless, turns = 0, turns - 1
        limit = step + heat * random.expovariate(1.0)
        changed = moved(order, origin, target)
        if step_of_row(row, changed) <= limit:
            order, step = changed, step_of_row(row, changed)
            path = blocked(row, order)
            if step < least:
                least, best = step, order
    return least, best, bool(path) and fruitless < module.MOST_FRUITLESS


@pytest.mark.parametrize(("heat", "fruitless"), [(0.0, 250), (0.5, 60), (2.0, 25)])
def test_exchanges_one_after_another(heat: float, fruitless: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best order, ended by the turns, the bound, or because no move is possible."""
    monkeypatch.setattr(module, "MOST_FRUITLESS", fruitless)
    better = 0
    for seed, row in enumerate(exchanges()):
        if seed == 3:
            continue  # on a V some moves within the limit are taken back, see `exchanges`
        for turns, bound in ((60, 0.0), (40, row.step - 1.0)):
            new = deepcopy(row)
            new.random.seed(7 + seed)
            work = new.anneal(turns, heat, bound)
            least, best, goes_on = exchanged(row, turns, heat, bound, Random(7 + seed))
            assert (new.least, new.best, work > 0) == (least, best, goes_on)
            better += least < row.step
    assert better > 0


@cache
def problems() -> list[tuple[OrderProblem, Lists]]:
    """Lines, a V and a loop, also with slow links, and an order that fits."""
    cases = []
    for seed, base in product(range(4), ("1f1b", "zb-h1", "zb-v", "interleaved")):
        problem = random_costs(base, 3, 6, seed, room=2.0 + seed % 2)
        if seed % 2 and base != "interleaved":
            problem = uneven(problem, seed, 8.0)
        if seed == 3:
            busy = 3 * np.asarray(problem.costs.forward_occupancy)
            slow = replace(problem.costs, forward_occupancy=busy, backward_occupancy=busy)
            problem = replace(problem, costs=slow)
        starts = [lists for lists in fill_orders(problem) if problem.fits(lists)]
        if starts:
            cases.append((problem, max(starts, key=problem.step)))
    return cases


def test_the_result_fits_runs_and_is_no_slower() -> None:
    faster = 0
    for problem, start in problems():
        lists, step = improve_order(problem, start, problem.bound(), 6_000)
        assert problem.fits(lists)
        assert step == problem.step(lists) <= problem.step(start)
        faster += step < problem.step(start)
        assert improve_order(problem, start, problem.bound(), 6_000) == (lists, step)
    assert faster > 10


def test_the_graph_has_the_times_of_the_simulator() -> None:
    """Where no transfer waits for another, and no gradients are summed beside the actions."""
    for problem, start in problems():
        free = {
            name: 0.0 * getattr(problem.costs, name) for name in ("forward_occupancy", "backward_occupancy")
        }
        own = replace(problem, costs=replace(problem.costs, **free, all_reduce=None))
        row = _Exchanges(own, start, Random(0))
        timeline = simulate(own.arrange(start), own.costs)
        assert row.step == pytest.approx(timeline.step_seconds)
        ends = [span.end for spans in timeline.spans_by_stage for span in spans]
        assert row.end == pytest.approx(ends)
        assert row.best_lists() == start


def test_heat_falls_with_the_work_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins with 0.4 of the mean seconds of an action, or less if there is little work."""
    problem, actions = random_problem(1, 2, 3, room=9.0), 18
    start = problem.one_at_a_time(3)
    seconds = sum(simulate(problem.program, problem.costs).busy_seconds)
    asked, answers = list[tuple[int, float, float]](), list[int]()

    def anneal(_: _Exchanges, turns: int, heat: float, bound: float) -> int:
        asked.append((turns, heat, bound))
        return answers[len(asked) - 1]

    monkeypatch.setattr(_Exchanges, "anneal", anneal)
    step = problem.step(start)
    for work in (100_000, 4 * actions * 100, 720):
        first = 0.4 * seconds / actions * min(1.0, work / (400 * actions))
        answers[:] = [100, work // 2 - 100, work]
        asked.clear()
        assert improve_order(problem, start, 2.0, work) == (start, step)
        heats = [first, first * sqrt(1 - 100 / work), first * sqrt(0.5)]
        assert [heat for _, heat, _ in asked] == pytest.approx(heats)
        assert {turns for turns, *_ in asked} == {module.CHUNK}
    answers[:] = [0]  # no move is possible
    asked.clear()
    assert improve_order(problem, start, 2.0, 1e5) == (start, step)
    assert len(asked) == 1
    assert improve_order(problem, start, 2.0, 1e5, lambda: True) == (start, step)
    assert improve_order(problem, start, step, 1e5) == (start, step)
    assert len(asked) == 1
