"""Orders by rule: micro-batches put one by one, worked out once more, and which rules are tried, by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest

from pplan.planner.synthesis import ahead_orders as module
from pplan.planner.synthesis import fill_orders as fill_module
from pplan.planner.synthesis.ahead_orders import AheadRule, _near, _next_rule, _random_rule
from pplan.planner.synthesis.fill_orders import Rule, fill_orders
from pplan.planner.synthesis.insert_orders import _Inserter, insert_orders
from pplan.planner.synthesis.order_problem import B, F, OrderProblem, Step, W

from .test_rule_orders import random_problem


def one_by_one(
    problem: OrderProblem, lag: Sequence[int], apart: float, count: int, way_weight: float
) -> list[list[Step]] | None:
    """Each micro-batch with its whole way, at the best of a few starts; with windows and lags as they are."""
    known = _Inserter(problem, tuple(lag), apart, count, way_weight)
    if min(known.windows) <= 0:
        return None
    parts, busy = range(problem.parts), list[list[tuple[float, float, int]]]()
    busy += [[] for _ in parts]
    ends: dict[tuple[int, int, int], float] = {}

    def seconds(kind: int, part: int, n: int) -> float:
        return problem.duration(kind, part, n == 0)

    def earliest(part: int, ready: float, long: float) -> float:
        starts = [ready, *(end for _, end, _ in busy[part] if end > ready)]
        return min(
            start for start in starts if all(start + long <= a or start >= b for a, b, _ in busy[part])
        )

    def put(kind: int, part: int, n: int, start: float) -> None:
        ends[kind, part, n] = start + seconds(kind, part, n)
        busy[part].append((start, ends[kind, part, n], kind))

    def put_weights(part: int, last: int) -> None:
        for n in range(last + 1) if problem.split else ():
            if (W, part, n) not in ends:
                ready = max(ends[B, part, n], ends.get((W, part, n - 1), 0.0))
                put(W, part, n, earliest(part, ready, seconds(W, part, n)))

    for n in range(problem.micro_batches):
        may = {(kind, part): ends.get((kind, part, n - 1), 0.0) for kind in (F, B) for part in parts}
        for part in parts:
            if (freed := n - known.windows[part]) >= 0:
                put_weights(part, freed)
                may[F, part] = max(may[F, part], ends[problem.release, part, freed])
            if problem.split and (late := n - known.lags[part] - 1) >= 0:
                put_weights(part, late)
                may[B, part] = max(may[B, part], ends[W, part, late])
        begin, tried = may[F, 0], list[Any]()
        for _ in range(count):
            now, way = begin, list[tuple[int, int, float]]()
            for kind, part in [*((F, part) for part in parts), *((B, part) for part in reversed(parts))]:
                start = earliest(part, max(now, may[kind, part]), seconds(kind, part, n))
                way.append((kind, part, start))
                wait = problem.forward_wait if kind == F else problem.backward_wait
                now = start + seconds(kind, part, n) + wait[part]
            first, back = way[0][2], way[-1][2] + seconds(B, 0, n)
            tried.append((back + way_weight * (back - first), -first, way))
            begin = max(begin, first) + apart * problem.forward[0]
        for kind, part, start in min(tried, key=lambda own: own[:2])[2]:
            put(kind, part, n, start)
    for part in parts:
        put_weights(part, problem.micro_batches - 1)
    return [[(kind, part) for _, _, kind in sorted(busy[part])] for part in parts]


def own_problems() -> list[OrderProblem]:
    """Lines of three, in too little room, in little, and in any."""
    rooms = (2.0, 3.0, 4.5, 1.0, 3.0, 2.0, 2.5, 5.0, inf, 4.0)
    return [replace(random_problem(seed, 3, 5, room=3.0), room=(own,) * 3) for seed, own in enumerate(rooms)]


def test_micro_batches_are_put_one_by_one() -> None:
    """Of all rules, with lags as deep as the pipeline, of all micro-batches and of none; each order once."""
    orders = none = 0
    for problem in own_problems():
        lags = [(3, 2, 1), (5, 5, 5), (0, 0, 0)] if problem.split else [(3, 2, 1)]
        expected = list[Any]()
        for lag, (apart, count), weight in product(lags, ((1.0, 4), (0.25, 12)), (3.0, 0.0)):
            rows = one_by_one(problem, lag, apart, count, weight)
            own = None if rows is None else tuple(map(tuple, rows))
            none += own is None
            if own is not None and own not in expected:
                expected.append(own)
        assert list(insert_orders(problem)) == expected
        orders += len(expected)
    assert orders > 20
    assert none > 3
    assert list(insert_orders(random_problem(1, 2, 4, room=9.0, chunks=2))) == []


@pytest.mark.parametrize("chunks", [1, 2])
def test_how_far_devices_run_ahead_and_fill(chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As 1F1B, as ZB-H2, half as much more than 1F1B, and without an end; forwards first or backwards. Of
    orders that are the same the first."""
    depths = {
        1: ((3, 2, 1), (5, 3, 1), (4, 3, 1), (4, 4, 4)),
        2: ((6, 4, 2), (10, 6, 2), (8, 6, 2), (8, 8, 8)),
    }
    rules, alike = list[Rule](), {0.3: "none", 0.9: "0.6"}

    def filler(_: OrderProblem, rule: Rule) -> Any:
        rules.append(rule)
        order = f"{alike.get(rule.share, rule.share)} {rule.ahead} {rule.forward_first}"
        return SimpleNamespace(lists=lambda: None if "none" in order else order)

    monkeypatch.setattr(fill_module, "_Filler", filler)
    orders: list[Any] = list(fill_orders(random_problem(1, 3, 4, room=9.0, chunks=chunks)))
    every = list(product((0.0, 0.3, 0.6, 0.9, 1.0), depths[chunks], (False, True)))
    assert rules == [Rule(*own) for own in every]
    assert orders == [f"{own[0]} {own[1]} {own[2]}" for own in every if own[0] not in alike]


def test_the_rules_that_are_tried_first() -> None:
    """Of five stages with room for three micro-batches, two beyond the last: as steep as can be and a little
    less; alone, in pairs and in fours; in turns of none, of 0.93 and of a third of the stages before."""
    problem = random_problem(1, 5, 6, room=1.0)
    problem = replace(problem, first_part=(), workspace=(), micro_batch_bytes=(1.0,) * 5, room=(3.0,) * 5)
    assert module.steepest_slope(problem) == 2.0
    expected = [
        AheadRule(slope, group, apart, period)
        for slope, (group, apart), period in product((2.0, 1.92), ((1, 1.0), (2, 0.8), (4, 0.9)), (0, -4, -2))
    ]
    assert module._first_rules(problem) == expected
    assert AheadRule(2.0) == AheadRule(2.0, 1, 1.0, 0.0, 0.0, 0.0, 0.9, 1_000_000)


@dataclass
class Scripted:
    """In place of random numbers: of a choice the one of this place, of a range its `end` (0 low, 1 high)."""

    place: int = 0
    end: int = 0
    share: float = 0.25
    places: tuple[int, ...] = ()
    deviations: float = 0.0

    def choice(self, options: Sequence[Any]) -> Any:
        return options[self.place % len(options)]

    def uniform(self, low: float, high: float) -> float:
        return (low, high)[self.end]

    def random(self) -> float:
        return self.share

    def sample(self, every: range, count: int) -> list[int]:
        assert every == range(8)
        return list(self.places[:count])

    def gauss(self, mean: float, deviation: float) -> float:
        return mean + self.deviations * deviation


ALL = 1_000_000


@pytest.mark.parametrize(
    ("place", "end", "rule"),
    [
        (0, 0, AheadRule(1.5, 1, 1.0, 0.0, 0.25, 0.0, 0.9, ALL)),
        (1, 0, AheadRule(1.5, 1, 1.0, 1.5, 0.25, 0.0, 0.3, ALL)),
        (1, 1, AheadRule(2.2, 1, 1.0, 5.2, 0.25, 0.5, 0.3, ALL)),
        (2, 0, AheadRule(1.5, 2, 0.3, -1.5, 0.25, 0.0, 0.0, 3)),
        (3, 1, AheadRule(2.2, 3, 1.0, 0.0, 0.25, 0.5, 0.6, 1)),
        (4, 1, AheadRule(2.2, 4, 1.0, 5.2, 0.25, 0.5, 1.0, 0)),
    ],
)
def test_a_rule_of_random_numbers(place: int, end: int, rule: AheadRule) -> None:
    """Slopes of 0.75 to 1.1 of 2, periods of 1.5 to 1.6 x 2 + 2 either way or none, and so on."""
    random: Any = Scripted(place, end)
    own = _random_rule(random, 2.0)
    assert own.slope == pytest.approx(rule.slope)
    assert own.period == pytest.approx(rule.period)
    assert replace(own, slope=0.0, period=0.0) == replace(rule, slope=0.0, period=0.0)


def test_a_rule_near_another() -> None:
    """One to three numbers of a random one; the slope or the period a few hundredths off, or neither."""
    rule = AheadRule(1.9, 3, 0.7, 3.0, 0.5, 0.125, 0.6, 2)
    fresh = AheadRule(1.5, 2, 0.3, -1.5, 0.25, 0.0, 0.0, 3)
    random: Any = Scripted(2, places=(1, 7, 4, 0), deviations=1.5)
    # The third of (1, 1, 2, 3) numbers: two; the third of two or three factors: none, and 1.5 x 0.05.
    own = _near(random, rule, 2.0)
    assert own.period == pytest.approx(3.0 * 1.075)
    assert replace(own, period=3.0) == replace(rule, group=fresh.group, most_behind=fresh.most_behind)
    random = Scripted(0, places=(3, 7), deviations=9.0)
    assert _near(random, rule, 2.0) == replace(rule, period=0.0)
    random = Scripted(3, places=(2, 5, 6, 7), deviations=0.5)
    own = _near(random, rule, 2.0)
    assert own.slope == pytest.approx(1.9 * 1.01)
    assert replace(own, slope=1.9) == replace(rule, apart=0.3, offset=0.0, share=0.6)


def test_most_rules_are_made_of_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once there are twelve of them: of a hundred about 15 are not."""
    monkeypatch.setattr(module, "_random_rule", lambda *_: "fresh")
    monkeypatch.setattr(module, "_near", lambda _, rule, most: (rule, most))
    pool: Any = [(float(n), f"rule {n}") for n in range(12)]
    for number, share, expected in (
        (11, 0.9, "fresh"),
        (12, 0.9, ("rule 5", 2.0)),
        (12, 0.15, ("rule 5", 2.0)),
        (12, 0.149, "fresh"),
    ):
        random: Any = Scripted(5, share=share)
        found: Any = _next_rule(random, pool[:number], 2.0)
        assert found == expected
