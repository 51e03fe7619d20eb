"""The lower bound on orders against a plain second implementation."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np
import pytest

from pplan.planner.synthesis.orders import B, F, OrderProblem

from .test_fill_orders import random_problem

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
            assert problem.most_without_weight[part] == min(6, 1 + waiting)
            seen |= {flying, waiting}
    assert seen >= {0, 1, 2, 3, 5}
    free = replace(problems()[1], room=(inf,) * 4)
    assert free.most_in_flight == free.most_without_weight == (6,) * 4
    empty = replace(problems()[1], micro_batch_bytes=(0.0,) * 4, first_part=(), workspace=())
    assert empty.most_in_flight == (6,) * 4


def windows(problem: OrderProblem) -> float:
    """The lines at the head of `orders`, of every part's memory, every part at or behind it, and of no
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
            own, q = problem.most_in_flight[s], problem.most_without_weight[s]
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
