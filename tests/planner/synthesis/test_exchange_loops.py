"""The loops of exchanges against the run of an order, and compiled against plain."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest

from pplan.planner.synthesis import exchange_loops, local_search
from pplan.planner.synthesis.fill_orders import fill_orders
from pplan.planner.synthesis.local_search import improve_order
from pplan.planner.synthesis.order_problem import Lists, OrderProblem
from pplan.planner.synthesis.run_order import run_order

from .test_orders import equal_stages, random_problem, step_of, uneven


@cache
def problems() -> list[tuple[OrderProblem, Lists]]:
    """Of lines, a V and a loop, also where links are slow, with an order that fits."""
    cases = []
    for seed, base in product(range(4), ("1f1b", "zb-h1", "zb-v", "interleaved")):
        problem, _, _ = random_problem(base, 3, 6, seed, room=2.0 + seed % 2)
        if seed % 2 and base != "interleaved":
            problem = uneven(problem, seed, 8.0)
        if seed == 3:
            busy = tuple(3 * own for own in problem.forward_wait)
            problem = replace(problem, forward_wait=busy, forward_busy=busy)
        starts = [lists for lists in fill_orders(problem) if problem.fits(lists)]
        if starts:
            cases.append((problem, max(starts, key=lambda lists: step_of(problem, lists))))
    return cases


@pytest.mark.slow
def test_every_change_leaves_what_a_new_run_would_give(monkeypatch: pytest.MonkeyPatch) -> None:
    """After each exchange that is taken or taken back: starts, what follows, the clock, places, and bytes."""
    taken, refused = 0, 0

    def check(jobs: Any, row: Any, origin: int, target: int, limit: float) -> tuple[float, int]:
        nonlocal taken, refused
        before = list(row.own)
        step, timed = plain(jobs, row, origin, target, limit)
        refused += step > limit
        taken += step <= limit
        assert (row.own == before) == (step > limit)
        rank = {action: place for place, action in enumerate(row.clock)}
        for place, action in enumerate(row.own):
            own, following = row.before[action], row.after[action]
            sender, receiver = jobs.sender[action], jobs.receiver[action]
            assert (row.place[action], row.rank[action]) == (place, rank[action])
            ready = [0.0, *([row.end[own]] if own >= 0 else [])]
            ready += [row.end[sender] + jobs.wait[action]] if sender >= 0 else []
            assert row.start[action] == max(ready)
            assert row.end[action] == row.start[action] + jobs.seconds[action]
            left = [jobs.seconds[following] + row.tail[following]] if following >= 0 else []
            left += [] if following >= 0 else [jobs.device_end[jobs.device[action]]]
            if receiver >= 0:
                left.append(jobs.wait[receiver] + jobs.seconds[receiver] + row.tail[receiver])
            assert row.tail[action] == max(left)
            assert all(rank[other] < rank[action] for other in (own, sender) if other >= 0)
            level = row.level[place - 1] if own >= 0 else 0.0
            assert row.level[place] == pytest.approx(level + jobs.begins[action] + jobs.ends[action])
        if step <= limit:
            assert step == exchange_loops.seconds_of_step(jobs, row)
        return step, timed

    plain = exchange_loops.change
    monkeypatch.setattr(exchange_loops, "change", check)
    monkeypatch.setattr(local_search, "CHUNK", 20)
    for problem, start in problems():
        improve_order(problem, start, 0.0, 700)
    assert taken > 100
    assert refused > 100


def test_what_comes_out_fits_runs_and_is_no_slower() -> None:
    faster = 0
    for problem, start in problems():
        lists, step = improve_order(problem, start, problem.bound(), 6_000)
        assert problem.fits(lists)
        assert step == step_of(problem, lists) <= step_of(problem, start)
        faster += step < step_of(problem, start)
        again = improve_order(problem, start, problem.bound(), 6_000)
        assert again == (lists, step)
    assert faster > 10


def test_transfers_of_a_slow_link_take_turns() -> None:
    """The numbers that are exchanged by agree with the run, where a link is busier than its stage."""
    for problem, start in problems():
        run = run_order(problem, start)
        assert run is not None
        network = local_search._Network(problem, start, run)
        row = network.row(fast=False)
        assert np.allclose(row.end[: len(network.steps)], run.end) or not problem.is_line
        assert network.lists(row.own) == start


@pytest.mark.slow
def test_numba_changes_no_order() -> None:
    """Also where there is room for few: the same exchanges, to the last."""
    pytest.importorskip("numba")
    cases = [*problems(), *((equal_stages(6, 12, room), None) for room in (3.0, 5.0))]
    for problem, own in cases:
        start = own or next(iter(fill_orders(problem)))
        plain = improve_order(problem, start, problem.bound(), 50_000, seed=7)
        assert improve_order(problem, start, problem.bound(), 50_000, seed=7, fast=True) == plain
