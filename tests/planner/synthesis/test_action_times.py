"""When an action can start at the earliest, and what must follow it: against every order that fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product
from math import inf

import numpy as np

from pplan.planner.synthesis.action_bound import _ActionTimes
from pplan.planner.synthesis.order_problem import B, F, OrderProblem, Step, W
from pplan.planner.synthesis.run_order import run_order


def small_problem(seed: int) -> OrderProblem:
    """Two stages, two or three micro-batches, room for some of them."""
    random, split = np.random.default_rng(seed), bool(seed % 2)

    def seconds(low: float, high: float) -> tuple[float, ...]:
        return tuple(random.uniform(low, high, 2).tolist())

    return OrderProblem(
        micro_batches=2 if split else 3,
        device=(0, 1),
        forward=seconds(0.5, 1.5),
        backward=seconds(0.5, 1.5),
        weight=seconds(0.5, 1.5) if split else (0.0, 0.0),
        credit=seconds(0, 0.3) if seed % 4 < 2 else (0.0, 0.0),
        forward_wait=(float(random.uniform(0, 1)), 0.0),
        forward_busy=(0.0, 0.0),
        backward_wait=(0.0, float(random.uniform(0, 1))),
        backward_busy=(0.0, 0.0),
        end=seconds(0, 1),
        micro_batch_bytes=(1.0, 1.0),
        room=tuple(map(float, random.integers(1, 4, 2))),
        split=split,
    )


def sequences(problem: OrderProblem, part: int) -> Iterator[tuple[Step, ...]]:
    """All that a device may do that fit."""
    kinds = (F, B, W) if problem.split else (F, B)

    def extend(own: tuple[Step, ...]) -> Iterator[tuple[Step, ...]]:
        done = Counter(kind for kind, _ in own)
        if len(own) == len(kinds) * problem.micro_batches:
            yield own
        for kind in kinds:
            if done[kind] < (problem.micro_batches if kind == F else done[kind - 1]):
                yield from extend((*own, (kind, part)))

    return (own for own in extend(()) if problem.fits_device(part, own))


def test_no_action_starts_earlier_or_ends_nearer_to_the_end() -> None:
    """And most of what is said is what the best orders do."""
    equal = Counter[tuple[str, int]]()
    for seed in range(40):
        problem = small_problem(seed)
        times = _ActionTimes(problem)
        heads, tails = times.heads(), times.tails()
        first, last = np.full(heads.shape, inf), np.full(heads.shape, inf)
        for lists in product(*(list(sequences(problem, part)) for part in range(2))):
            run = run_order(problem, lists)
            if run is None:
                continue
            for part, own in enumerate(lists):
                done = Counter[int]()
                for at, (kind, _) in enumerate(own, run.first[part]):
                    place = part, kind, done[kind]
                    first[place] = min(first[place], run.start[at])
                    last[place] = min(last[place], run.step - run.end[at])
                    done[kind] += 1
        kinds = (F, B, W) if problem.split else (F, B)
        for name, said, least in (("heads", heads, first), ("tails", tails, last)):
            for place in product(range(2), kinds, range(problem.micro_batches)):
                assert said[place] <= least[place] + 1e-9, (seed, name, place)
                equal[name, place[1]] += bool(said[place] >= least[place] - 1e-9)
    of_all = {("heads", F): 194, ("heads", B): 173, ("heads", W): 79}
    of_all |= {("tails", F): 102, ("tails", B): 103, ("tails", W): 42}
    assert all(equal[own] >= count for own, count in of_all.items()), equal
