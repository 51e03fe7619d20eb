"""A bound on orders by the earliest start of every action, and the least that follows its end.

Before the j-th F of a part come the j - 1 others, and every B and W but those of the K micro-batches that
memory lets be in flight; before the j-th B as many F's, the other B's, and every W but those of the q
micro-batches that may wait for theirs; before the j-th W as many F's and B's. All of these run on one device,
none earlier than it can: the action starts no earlier than they can be done. It also waits for the part that
sends to it, and for the release that makes room; a part whose memory holds few holds back those behind it. So
earliest starts follow from each other until none rises; in the same way, from the last micro-batch back, what
follows each action at the least. Of each device the actions between both then take what one machine takes
that may interrupt them (J. R. Jackson, "Scheduling a production line to minimize maximum tardiness", UCLA,
1955).

`OrderProblem.bound` chains round trips of one part's memory; this sees all parts' at once, those that differ,
too. It takes a thousand times as long.
"""

from __future__ import annotations

from heapq import heappop, heappush, heapreplace
from math import inf

import numpy as np
import numpy.typing as npt

from .crossing_bound import crossing_bound
from .order_problem import KINDS, B, F, OrderProblem, W

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
ThreeCounts = tuple[Counts, Counts, Counts]
"""Of F's, B's and W's."""
MOST_WORK = 2e6
"""Pairs of micro-batches, times parts and round trips: 0.5 s or so."""
NEAR = 1e-12
"""Share by which sums of times rise when they still do."""


def action_bound(problem: OrderProblem, limit: float = inf, seconds: float = inf) -> float:
    """Seconds that no order is below, no less than `OrderProblem.bound`: that, of several parts a device and
    where it would take long. `limit`: a step that an order has; no more is worked out; `seconds`: about
    as many for crossings."""
    least = problem.bound()
    if not problem.is_line or least == inf:
        return least
    count = problem.micro_batches
    if count**3 * problem.parts / min(problem.most_in_flight) > MOST_WORK:
        return least
    times = _ActionTimes(problem)
    heads, tails = times.heads(), times.tails()
    for part in range(problem.parts):
        jobs = [
            (float(head), float(tail), problem.duration(kind, part, number == 0))
            for kind in range(len(KINDS))
            for number, (head, tail) in enumerate(zip(heads[part, kind], tails[part, kind], strict=True))
        ]
        least = max(least, _one_machine(jobs))
    return crossing_bound(problem, heads, tails, least, limit, seconds)


class _ActionTimes:
    """Arrays (parts, kinds, micro-batches). Where B is whole a W takes no time and follows it."""

    def __init__(self, problem: OrderProblem) -> None:
        self.problem = problem
        parts, self.count = range(problem.parts), problem.micro_batches
        kinds = range(len(KINDS))
        self.usual = np.array([[problem.duration(kind, part, False) for kind in kinds] for part in parts])
        self.seconds = np.array([[problem.duration(kind, part, True) for kind in kinds] for part in parts])
        """Of an action of any micro-batch at the least: of the first."""
        self.credit = (self.usual - self.seconds).sum(axis=1)
        self.most, self.behind = problem.most_in_flight, problem.most_behind_backward
        # The B of a micro-batch on a part comes before its W on every part before.
        self.passed = [min(self.most[: part + 1]) for part in parts]

    def heads(self) -> Floats:
        """Seconds from the beginning to the start of each action, at the least."""
        parts, problem = self.problem.parts, self.problem
        times, total = np.zeros((parts, len(KINDS), self.count)), -1.0
        while times.sum() > total + NEAR * abs(total):
            total = float(times.sum())
            for part in range(parts):
                own, seconds, counts = times[part], self.seconds[part], self._before(part)
                if part:
                    sent = times[part - 1, F] + self.seconds[part - 1, F] + problem.forward_wait[part - 1]
                    own[F] = np.maximum(own[F], sent)
                self._raise(own, part, F, _later(own[W] + seconds[W], self.most[part]), counts[F])
            for part in reversed(range(parts)):
                own, seconds, counts = times[part], self.seconds[part], self._before(part)
                if part + 1 < parts:
                    sent = times[part + 1, B] + self.seconds[part + 1, B] + problem.backward_wait[part + 1]
                    own[B] = np.maximum(own[B], sent)
                own[B] = np.maximum(own[B], own[F] + seconds[F])
                self._raise(own, part, B, _later(own[W] + seconds[W], self.behind[part]), counts[B])
                self._raise(own, part, W, own[B] + seconds[B], counts[W])
        return times

    def tails(self) -> Floats:
        """Seconds from the end of each action to the end of the step, at the least; worked out with the last
        micro-batch first."""
        parts, problem = self.problem.parts, self.problem
        times, total = np.zeros((parts, len(KINDS), self.count)), -1.0
        times += np.array(problem.end)[list(problem.device)][:, None, None]
        while times.sum() > total + NEAR * abs(total):
            total = float(times.sum())
            for part in range(parts):
                own, seconds, counts = times[part], self.seconds[part], self._behind(part)
                own[W] = np.maximum(own[W], _later(own[F] + seconds[F], self.most[part]))
                self._raise(own, part, W, _later(own[B] + seconds[B], self.behind[part]), counts[W])
                if part:
                    sent = times[part - 1, B] + self.seconds[part - 1, B] + problem.backward_wait[part]
                    own[B] = np.maximum(own[B], sent)
                self._raise(own, part, B, own[W] + seconds[W], counts[B])
            for part in reversed(range(parts)):
                own, seconds, counts = times[part], self.seconds[part], self._behind(part)
                if part + 1 < parts:
                    sent = times[part + 1, F] + self.seconds[part + 1, F] + problem.forward_wait[part]
                    own[F] = np.maximum(own[F], sent)
                self._raise(own, part, F, own[B] + seconds[B], counts[F])
        return times[:, :, ::-1]

    def _before(self, part: int) -> tuple[ThreeCounts, ...]:
        """By kind and micro-batch: how many first F's, B's and W's of the part come before its action."""
        number, passed, released, waiting = self._numbers(part)
        both = number + 1
        return (number, passed, released), (both, number, waiting), (both, both, number)

    def _behind(self, part: int) -> tuple[ThreeCounts, ...]:
        """By kind, from the last micro-batch back: how many last F's, B's and W's come after its action."""
        number, passed, released, waiting = self._numbers(part)
        both = number + 1
        return (number, both, both), (passed, number, both), (released, waiting, number)

    def _numbers(self, part: int) -> tuple[Counts, Counts, Counts, Counts]:
        """Of each micro-batch: its number; the B's, and the W's, that the memory has end before its F; the
        W's before its B."""
        number = np.arange(self.count)
        passed, released, waiting = (
            np.maximum(number - most + 1, 0)
            for most in (self.passed[part], self.most[part], self.behind[part])
        )
        return number, passed, released, np.maximum(waiting, released)

    def _raise(self, own: Floats, part: int, kind: int, least: Floats, counts: ThreeCounts) -> None:
        """The times of a kind to what they are at the least: that, one after another, and after the actions
        that are counted."""
        done = self._done(own, part, counts)
        ramp = self.seconds[part, kind] * np.arange(self.count)
        values = np.maximum(np.maximum(own[kind], least), done)
        own[kind] = np.maximum.accumulate(values - ramp) + ramp

    def _done(self, own: Floats, part: int, counts: ThreeCounts) -> Floats:
        """By micro-batch, when the first actions of each kind, so many, can be done on one device: for any of
        them, its time and the seconds of all that are no earlier."""
        best = np.full(self.count, -inf)
        for kind, first in enumerate(own):
            total = np.zeros((self.count, self.count))
            for other, times in enumerate(own):
                earlier = np.searchsorted(times, first, side="left")
                total += self.usual[part, other] * np.maximum(counts[other][:, None] - earlier[None, :], 0)
            done = np.where(np.arange(self.count) < counts[kind][:, None], first[None, :] + total, -inf)
            best = np.maximum(best, done.max(axis=1) - self.credit[part])
        return best


def _later(values: Floats, places: int) -> Floats:
    """Each so many micro-batches later."""
    moved = np.full(len(values), -inf)
    if places < len(values):
        moved[places:] = values[: len(values) - places]
    return moved


def _one_machine(jobs: list[tuple[float, float, float]]) -> float:
    """Seconds of jobs with a head, a tail and seconds each on one machine that may interrupt them, at the
    least: of those that have come, it always runs the one with the longest tail."""
    jobs = sorted(jobs)
    waiting: list[tuple[float, float]] = []
    now, least, place = 0.0, 0.0, 0
    while place < len(jobs) or waiting:
        if not waiting:
            now = max(now, jobs[place][0])
        while place < len(jobs) and jobs[place][0] <= now:
            heappush(waiting, (-jobs[place][1], jobs[place][2]))
            place += 1
        tail, left = waiting[0]
        until = jobs[place][0] if place < len(jobs) else inf
        if now + left <= until:
            now += left
            heappop(waiting)
            least = max(least, now - tail)
        else:
            heapreplace(waiting, (tail, left - (until - now)))
            now = until
    return least
