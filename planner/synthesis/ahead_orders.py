"""Orders by how many forwards a stage runs ahead of each backward, where memory holds less than one a stage.

Where the next stage runs as many forwards ahead as this one, a micro-batch waits for a whole round trip
between the two; so 1F1B and ZB-H1 run one more a stage, and the first of p stages holds p micro-batches. With
room for K < p a stage must run less than one more than the next, on average: some micro-batches one, others
none, and in turns, so that none waits twice. Of an `AheadRule` the forward of micro-batch j is number x(j) =
j, or more at once in groups, and before its backward a stage makes all up to

    x(j) + slope * distance + fraction(j / period + phase)       distance: 1 at the first stage, 0 at the last

Weight gradients are put where a device waits (`fill_weights`). Which rule is the fastest is tried: a few, and
then, as long as there is time, others near the best ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, replace
from itertools import product
from math import inf
from random import Random

from .fill_weights import WeightFiller
from .order_problem import Lists, OrderProblem
from .run_order import run_order

SHARES = (0.9, 0.3, 0.0, 0.6, 1.0)
"""Of the seconds of a weight gradient: how far off an arrival must be for one to be made before it."""
GROUPS = ((1, 1.0), (2, 0.8), (4, 0.9))
"""Forwards of a group, and how far apart they are beside 1."""
SLOPES = (1.0, 0.96)
"""Beside the steepest."""
PERIODS = (0.93, 0.33)
"""Beside the number of stages less one."""
POOL = 12
"""Rules that others are made of."""
NEAR = 1e-9
"""Share by which steps differ that are taken for the same."""
FRESH = 0.15
"""Of the rules tried, those that are made of none."""


@dataclass(frozen=True)
class AheadRule:
    """`slope`: micro-batches that the first stage runs ahead beyond the last; `group` forwards, so far
    `apart` from each other; `period` (0: none), `phase` and `offset` in micro-batches; of `fill_weights`
    `share` and `most_behind`."""

    slope: float
    group: int = 1
    apart: float = 1.0
    period: float = 0.0
    phase: float = 0.0
    offset: float = 0.0
    share: float = SHARES[0]
    most_behind: int = 1_000_000


def ahead_orders(problem: OrderProblem) -> Iterator[Lists]:
    """The orders of a few rules, of parts on devices of their own, with the backward in two parts, where
    memory holds less than a micro-batch a stage."""
    orders = set()
    for rule in _first_rules(problem):
        lists = order_by_rule(problem, rule)
        if lists is not None and lists not in orders:
            orders.add(lists)
            yield lists


def search_ahead(
    problem: OrderProblem, bound: float, is_over: Callable[[], bool], seed: int = 0, *, fast: bool = False
) -> tuple[Lists | None, float]:
    """The fastest order of the rules tried, those of `ahead_orders` first, and its step: None and infinite
    where none fits; ends at the `bound`. `fast`: with numba, which changes nothing but the time."""
    most = steepest_slope(problem)
    best, least = None, inf
    pool: list[tuple[float, AheadRule]] = []
    random, first = Random(seed), iter(_first_rules(problem))
    orders = None if most is None else _RuleOrders(problem, fast=fast)
    while most is not None and orders is not None and least > bound * (1 + 1e-9) and not is_over():
        rule = next(first, None) or _next_rule(random, pool, most)
        step = orders.step(rule)
        if step == inf or any(abs(step - own) <= NEAR * step for own, _ in pool):
            continue
        pool = sorted([*pool, (step, rule)], key=lambda own: own[0])[:POOL]
        # Where transfers of a link wait for each other the order takes longer than that.
        lists = orders.lists() if step < least else None
        run = None if lists is None else run_order(problem, lists)
        if run is not None and run.step < least:
            best, least = lists, run.step
    return best, least


def steepest_slope(problem: OrderProblem) -> float | None:
    """Micro-batches that the first stage may run ahead beyond the last, in every stage's memory; None where
    such orders are not made."""
    if not problem.is_line or not problem.split or problem.parts == 1:
        return None
    rooms = zip(problem.most_in_flight, _distances(problem), strict=True)
    most = min(((count - 1) / distance for count, distance in rooms if distance), default=inf)
    return most if 0 <= most < problem.parts - 1 else None


def order_by_rule(problem: OrderProblem, rule: AheadRule) -> Lists | None:
    """None where there is no room, or the stages wait for each other for ever."""
    orders = _RuleOrders(problem)
    return None if orders.step(rule) == inf else orders.lists()


def _distances(problem: OrderProblem) -> list[float]:
    """By part, of a micro-batch's way to the loss and back, as a share of the first part's."""
    ways = [problem.way_seconds(part) for part in range(problem.parts)]
    return [(way - ways[-1]) / (ways[0] - ways[-1]) if ways[0] > ways[-1] else 0.0 for way in ways]


class _RuleOrders:
    """Makes the order of one rule after another."""

    def __init__(self, problem: OrderProblem, *, fast: bool = False) -> None:
        self.problem, self.filler = problem, WeightFiller(problem, fast=fast)
        self.distances = self.filler.column(_distances(problem))
        self.forwards = self.filler.column([0] * problem.micro_batches)

    def step(self, rule: AheadRule) -> float:
        """Of a rule's order, with links that carry any number at a time; infinite where there is none."""
        count, filler = self.problem.micro_batches, self.filler
        begins = [j // rule.group * rule.group + j % rule.group * rule.apart for j in range(count)]
        numbers = float(rule.slope), float(rule.period), float(rule.phase), float(rule.offset)
        own = filler.column(begins), numbers, self.forwards, filler.turns
        filler.make_turns(count, self.distances, *own)
        return filler.fill(float(rule.share), rule.most_behind)

    def lists(self) -> Lists | None:
        """The last one's, if it fits."""
        lists = self.filler.lists()
        return lists if self.problem.fits(lists) else None


def _first_rules(problem: OrderProblem) -> list[AheadRule]:
    """Those that are tried in any case."""
    most, last = steepest_slope(problem), problem.parts - 1
    if most is None:
        return []
    periods = dict.fromkeys((0, *(-max(2, round(share * last)) for share in PERIODS)))
    return [
        AheadRule(steep * most, group, apart, period)
        for steep, (group, apart), period in product(SLOPES, GROUPS, periods)
    ]


def _next_rule(random: Random, pool: list[tuple[float, AheadRule]], most: float) -> AheadRule:
    """Another rule, mostly near one of the best."""
    fresh = len(pool) < POOL or random.random() < FRESH
    return _random_rule(random, most) if fresh else _near(random, random.choice(pool)[1], most)


def _random_rule(random: Random, most: float) -> AheadRule:
    period = random.choice((0.0, 1.0, -1.0)) * random.uniform(1.5, 1.6 * most + 2)
    group = random.choice((1, 1, 2, 3, 4))
    apart = 1.0 if group == 1 else random.uniform(0.3, 1.0)
    slope, offset = most * random.uniform(0.75, 1.1), random.uniform(0.0, 0.5)
    behind = random.choice((1_000_000, 1_000_000, 3, 1, 0))
    return AheadRule(slope, group, apart, period, random.random(), offset, random.choice(SHARES), behind)


def _near(random: Random, rule: AheadRule, most: float) -> AheadRule:
    """With one to three numbers of another rule, and a little steeper or longer."""
    values, others = list(astuple(rule)), astuple(_random_rule(random, most))
    for place in random.sample(range(len(values)), random.choice((1, 1, 2, 3))):
        values[place] = others[place]
    changed = AheadRule(*values)
    return replace(
        changed,
        slope=changed.slope * (1 + random.choice((0.0, random.gauss(0.0, 0.02)))),
        period=changed.period * (1 + random.choice((0.0, 0.0, random.gauss(0.0, 0.05)))),
    )
