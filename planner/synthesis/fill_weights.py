"""Weight gradients put where devices wait, between forwards and backwards whose order is given.

A device does the next F or B of its turns when what it needs has arrived. Until then it makes a weight
gradient, where nothing arrives within a share of what one takes; and it makes one where the next turn has no
room, or more micro-batches than are allowed wait for theirs. An F without room, with no weight gradient left
to make, lets the next B go first. So memory is used up before anything is slowed down.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf

from .order_problem import KINDS, B, F, Lists, OrderProblem, Step, W

WAIT = -1
"""Nothing can be done yet."""


def list_turns(lists: Lists) -> list[list[int]]:
    """By device, the kinds of its F's and B's in order."""
    return [[kind for kind, _ in own if kind != W] for own in lists]


def fill_weights(
    problem: OrderProblem, turns: Sequence[Sequence[int]], share: float, most_behind: int
) -> Lists | None:
    """The order of these turns, of parts on devices of their own, in which an arrival further off than
    `share` of a weight gradient's seconds lets one go first, and more than `most_behind` are never kept back;
    None where a device has no room, or they wait for each other for ever."""
    filler = _WeightFiller(problem, turns, share, most_behind)
    filler.run()
    last = problem.release
    if any(done[last] < problem.micro_batches for done in filler.done):
        return None
    return tuple(tuple(own) for own in filler.own)


class _WeightFiller:
    """The devices as the clock goes on; a device's number is its part's."""

    def __init__(
        self, problem: OrderProblem, turns: Sequence[Sequence[int]], share: float, most_behind: int
    ) -> None:
        parts = range(problem.parts)
        self.problem, self.most_behind = problem, most_behind
        self.turns = [list(own) for own in turns]
        self.patience = [share * problem.weight[part] for part in parts]
        self.room = [problem.room[problem.device[part]] * (1 + 1e-12) for part in parts]
        self.changes = [[problem.level_change(kind, part) for kind in range(len(KINDS))] for part in parts]
        self.needed = [
            [self.changes[part][kind][0] + problem.workspace_bytes(kind, part) for kind in range(len(KINDS))]
            for part in parts
        ]
        self.arrivals: list[list[list[float]]] = [[[], []] for _ in parts]
        self.arrivals[0][F] = [0.0] * problem.micro_batches
        self.done = [[0] * len(KINDS) for _ in parts]
        self.level = [0.0] * problem.parts
        self.own: list[list[Step]] = [[] for _ in parts]

    def run(self) -> None:
        """All that can be done."""
        parts = self.problem.parts
        events = [(0.0, part) for part in range(parts)]
        free, waits = [0.0] * parts, [False] * parts
        while events:
            now, part = heappop(events)
            if now < free[part]:
                continue
            kind, ready = self._choose(part, now)
            if kind == WAIT:
                waits[part] = ready == inf
                if ready < inf:
                    heappush(events, (ready, part))
                continue
            free[part] = self._start(part, kind, now)
            heappush(events, (free[part], part))
            other = part + 1 if kind == F else part - 1
            if kind != W and 0 <= other < parts and waits[other]:
                waits[other] = False
                heappush(events, (max(now, free[other]), other))

    def _choose(self, part: int, now: float) -> tuple[int, float]:
        """What is done next, or until when to wait, as far as it is known."""
        done, turns = self.done[part], self.turns[part]
        number = done[F] + done[B]
        behind = done[B] - done[W] if self.problem.split else 0
        if number == len(turns):
            return (W, now) if behind else (WAIT, inf)
        kind = turns[number]
        if behind > self.most_behind or not self._fits(part, kind):
            if behind:
                return W, now
            if kind == B or not self._let_backward_go(part, number):
                return WAIT, inf
            kind = B
        arrived = self.arrivals[part][kind]
        ready = arrived[done[kind]] if done[kind] < len(arrived) else inf
        if ready <= now:
            return kind, now
        return (W, now) if behind and ready - now >= self.patience[part] else (WAIT, ready)

    def _fits(self, part: int, kind: int) -> bool:
        """Whether there is room, and behind an F for a B when all weight gradients are made."""
        room = self.room[part]
        if self.level[part] + self.needed[part][kind] > room:
            return False
        done = self.done[part]
        bytes_before = (done[F] - done[B] + 1) * self.problem.micro_batch_bytes[part]
        return kind == B or bytes_before + self.needed[part][B] <= room

    def _let_backward_go(self, part: int, number: int) -> bool:
        """Whether the next B can go first, which it then does."""
        turns = self.turns[part]
        if self.done[part][F] <= self.done[part][B] or not self._fits(part, B):
            return False
        turns.insert(number, turns.pop(turns.index(B, number)))
        return True

    def _start(self, part: int, kind: int, now: float) -> float:
        """An action; when it ends."""
        problem, done = self.problem, self.done[part]
        end = now + problem.duration(kind, part, done[kind] == 0)
        done[kind] += 1
        self.own[part].append((kind, part))
        self.level[part] += sum(self.changes[part][kind])
        if (arrival := problem.next_arrival(kind, part, end)) is not None:
            other, action, at = arrival
            self.arrivals[other][action].append(at)
        return end
