"""Orders made micro-batch by micro-batch: each is put, with its whole way there and back, between what the
devices do already.

Where a device holds fewer micro-batches than a round trip would let it start, what counts is how fast one
comes back: an order that lets each wait only before its first F, and on no device on its way, keeps room busy
for no longer than it must. So the start of each micro-batch is tried at a few times, and the one is taken
after which it is back early, after a short way. Weight gradients are put into gaps, at the latest when their
room is needed. That jobs are put one by one, as a whole, into the gaps of a schedule is insertion as of job
shops and of no-wait flow shops (Werner and Winkler, Discrete Applied Mathematics 1995).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product

from .order_problem import B, F, Lists, OrderProblem, Step, W

STARTS = ((1.0, 4), (0.25, 12))
"""How far apart, in forwards of the first part, starts are tried, and how many of them."""
WAY_WEIGHTS = (3.0, 0.0)
"""What the seconds of the way count beside the time of return."""
NEAR = 1e-9
"""Seconds by which actions may overlap, of sums that differ by rounding."""


def insert_orders(problem: OrderProblem) -> Iterator[Lists]:
    """The orders of a few rules, of parts on devices of their own; none of others."""
    if not problem.is_line:
        return
    lags = (
        tuple(problem.devices - part for part in range(problem.parts)),
        (problem.micro_batches,) * problem.parts,
        (0,) * problem.parts,
    )
    orders = set()
    for lag, (apart, count), way_weight in product(lags if problem.split else lags[:1], STARTS, WAY_WEIGHTS):
        inserter = _Inserter(problem, lag, apart, count, way_weight)
        lists = inserter.lists() if min(inserter.windows) > 0 else None
        if lists is not None and lists not in orders:
            orders.add(lists)
            yield lists


@dataclass
class _Timeline:
    """What a device does: starts, ends and steps, in order."""

    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    def gap(self, ready: float, seconds: float) -> float:
        """The earliest start from `ready` on."""
        starts, ends = self.starts, self.ends
        index, start = bisect_right(ends, ready + NEAR), ready
        while index < len(starts) and starts[index] - start < seconds - NEAR:
            start = max(start, ends[index])
            index += 1
        return start

    def insert(self, start: float, seconds: float, step: Step) -> None:
        """An action into a gap."""
        index = bisect_right(self.starts, start + NEAR)
        self.starts.insert(index, start)
        self.ends.insert(index, start + seconds)
        self.steps.insert(index, step)


class _Inserter:
    """The devices as they fill. `windows`: by part, the micro-batches that may be in flight while at most
    `lags` of them wait for their W."""

    def __init__(
        self, problem: OrderProblem, lags: tuple[int, ...], apart: float, count: int, way_weight: float
    ) -> None:
        self.problem, self.count, self.way_weight = problem, count, way_weight
        self.apart = apart * problem.forward[0]
        parts = range(problem.parts)
        self.lags = [self._lag(part, lags[part]) for part in parts]
        self.windows = [self._window(part, self.lags[part]) for part in parts]
        self.timelines = [_Timeline() for _ in parts]
        self.ends: list[list[list[float]]] = [[[] for _ in parts] for _ in (F, B, W)]
        """By kind and part, of the micro-batches so far."""

    def _window(self, part: int, lag: int) -> int:
        """Micro-batches for which the part's device has room in any order in which at most `lag` wait for
        their W as a B begins."""
        problem = self.problem
        own, (begins, ends) = problem.micro_batch_bytes[part], problem.parts_held[part]
        adds = max(0.0, begins + ends)
        forward, backward = (problem.workspace_bytes(kind, part) for kind in (F, B))
        passing = max(adds + max(forward, backward), begins + backward)
        room = problem.room[problem.device[part]] * (1 + 1e-12) - passing - lag * adds
        if own <= 0 or room == float("inf"):
            return problem.micro_batches
        return max(0, min(problem.micro_batches, int(room / own)))

    def _lag(self, part: int, most: int) -> int:
        """As many as rule and room allow: no more than may be in flight."""
        lag = most if self.problem.split else 0
        while lag and self._window(part, lag) <= lag:
            lag -= 1
        return lag

    def lists(self) -> Lists:
        """What the devices do."""
        problem = self.problem
        for number in range(problem.micro_batches):
            self._insert(number)
        for part in range(problem.parts):
            self._put_weights(part, problem.micro_batches - 1)
        return tuple(tuple(own.steps) for own in self.timelines)

    def _insert(self, number: int) -> None:
        """The F's and B's of a micro-batch, where it comes back best."""
        problem, starts = self.problem, [(0.0, 0.0)] * self.problem.parts
        for part in range(problem.parts):
            starts[part] = self._may_start(part, number)
        best: tuple[float, float] | None = None
        way, begin = list[tuple[Step, float, float]](), starts[0][0]
        for _ in range(self.count):
            steps = list(self._way(number, begin, starts))
            first, end = steps[0][1], steps[-1][1] + steps[-1][2]
            key = round(end + self.way_weight * (end - first), 9), -first
            if best is None or key < best:
                best, way = key, steps
            begin = max(begin, first) + self.apart
        for (kind, part), start, seconds in way:
            self._insert_step((kind, part), start, seconds)

    def _may_start(self, part: int, number: int) -> tuple[float, float]:
        """When there is room for the F of a micro-batch on a part, and for its B."""
        problem, window, lag = self.problem, self.windows[part], self.lags[part]
        forward = self.ends[F][part][-1] if number else 0.0
        backward = self.ends[B][part][-1] if number else 0.0
        if number >= window:
            self._put_weights(part, number - window)
            forward = max(forward, self.ends[problem.release][part][number - window])
        if problem.split and number > lag:
            self._put_weights(part, number - lag - 1)
            backward = max(backward, self.ends[W][part][number - lag - 1])
        return forward, backward

    def _way(
        self, number: int, begin: float, starts: list[tuple[float, float]]
    ) -> Iterator[tuple[Step, float, float]]:
        """Steps with start and seconds, in the order in which the micro-batch meets them."""
        problem, now = self.problem, begin
        for part in range(problem.parts):
            seconds = problem.duration(F, part, number == 0)
            start = self.timelines[part].gap(max(now, starts[part][0]), seconds)
            yield (F, part), start, seconds
            now = start + seconds + problem.forward_wait[part]
        for part in reversed(range(problem.parts)):
            seconds = problem.duration(B, part, number == 0)
            start = self.timelines[part].gap(max(now, starts[part][1]), seconds)
            yield (B, part), start, seconds
            now = start + seconds + problem.backward_wait[part]

    def _put_weights(self, part: int, last: int) -> None:
        """The W's of a part up to a micro-batch's, each in the first gap behind its B."""
        done, backwards = self.ends[W][part], self.ends[B][part]
        while self.problem.split and len(done) <= last:
            number = len(done)
            seconds = self.problem.duration(W, part, number == 0)
            ready = max(backwards[number], done[-1] if done else 0.0)
            self._insert_step((W, part), self.timelines[part].gap(ready, seconds), seconds)

    def _insert_step(self, step: Step, start: float, seconds: float) -> None:
        kind, part = step
        self.timelines[part].insert(start, seconds, step)
        self.ends[kind][part].append(start + seconds)
