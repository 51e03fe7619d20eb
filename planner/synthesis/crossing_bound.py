"""A bound on orders by three sequences of micro-batches that cross on the devices, again and again.

Where memory holds K micro-batches of a part, micro-batch j + K starts there when j is done: j, j + K, j + 2 K
and so on are one sequence of actions, each of which waits for the one before. Alone it takes a round trip
after another. But forwards go down while backwards of other sequences come up, a device runs one at a time,
and most pairs cannot pass without one of them waiting: two that just pass where the way is long meet again
where it is short, at another distance, as a weight gradient or a full memory has come between. How long two
or three sequences take at the least is worked out: action by action, of those that a device could begin
before the earliest end of any, each is tried (B. Giffler and G. L. Thompson, "Algorithms for solving
production-scheduling problems", Operations Research 1960; of two jobs S. B. Akers, "A graphical approach to
production scheduling problems", 1956). Of states with as many actions done those that are no earlier in
anything are left out; where there are too many, two neighbours become one that is as early as both in
everything. Whatever else the devices do is left out too. So no order is below. What comes before and after
each action at the least, from `action_bound`, is known of every state.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import inf
from operator import le

import numpy as np
import numpy.typing as npt

from .order_problem import B, F, OrderProblem, W

Floats = npt.NDArray[np.float64]
Counts = tuple[int, ...]
"""By sequence, actions that are done."""
State = tuple[float, ...]
"""Seconds of the step at the least; by sequence, when the next action may begin, and when the last ended."""

SEQUENCES = 3
"""More were not seen to prove more."""
MOST_STATES = 50
"""With the same actions done."""
MOST_STEPS = 250_000
"""States that are gone on from, of each part: about a second and a half."""
STEPS_A_SECOND = 150_000
MOST_PARTS = 2
"""From whose memory sequences are made: those with the longest round trip for each micro-batch."""


def crossing_bound(
    problem: OrderProblem,
    heads: Floats,
    tails: Floats,
    least: float,
    limit: float = inf,
    seconds: float = inf,
) -> float:
    """Seconds that no order is below, or `limit`, which one takes, where none is faster; no less than
    `least`. `heads` and `tails`: (parts, kinds, micro-batches), seconds before the start and after the end of
    each action at the least. In about so many `seconds`."""
    turns = {
        part: (problem.way_seconds(part) + problem.weight[part]) / most
        for part, most in enumerate(problem.most_in_flight)
        if 1 < most < problem.micro_batches
    }
    steps = min(MOST_STEPS, seconds * STEPS_A_SECOND / MOST_PARTS)
    for part in sorted(turns, key=lambda part: -turns[part])[:MOST_PARTS]:
        least = max(least, _Crossings(problem, part, heads, tails).bound(least, limit, steps))
    return least


@dataclass(frozen=True)
class _Sequence:
    """By action: its device; its seconds; those until the next one may begin; those before its start, and
    those from its start to the end of the step, at the least. Then one that is no action."""

    devices: list[int]
    seconds: list[float]
    waits: list[float]
    heads: list[float]
    rests: list[float]


class _Crossings:
    """The sequences of the first micro-batches of a part, on its device and those behind."""

    def __init__(self, problem: OrderProblem, part: int, heads: Floats, tails: Floats) -> None:
        later = range(part, problem.parts)
        steps = [*((F, own) for own in later), *((B, own) for own in reversed(later))]
        self.steps = [*steps, (W, part)] if problem.split else steps
        self.problem, self.most = problem, problem.most_in_flight[part]
        self.sequences = [self._sequence(first, heads, tails) for first in range(min(SEQUENCES, self.most))]
        self.totals = tuple(len(own.devices) - 1 for own in self.sequences)

    def _sequence(self, first: int, heads: Floats, tails: Floats) -> _Sequence:
        """Micro-batches `first`, `first` + K and so on."""
        problem = self.problem
        numbers = range(first, problem.micro_batches, self.most)
        actions = [(kind, part, number) for number in numbers for kind, part in self.steps]
        seconds = [problem.duration(kind, part, number == 0) for kind, part, number in actions]
        after = [float(tails[part, kind, number]) for kind, part, number in actions]
        return _Sequence(
            [*(part for _, part, _ in actions), -1],
            [*seconds, 0.0],
            [self._wait(kind, part) for kind, part, _ in actions],
            [*(float(heads[part, kind, number]) for kind, part, number in actions), 0.0],
            [*(own + rest for own, rest in zip(seconds, after, strict=True)), 0.0],
        )

    def _wait(self, kind: int, part: int) -> float:
        """Seconds of the transfer to the next action of the sequence."""
        if kind == F:
            return self.problem.forward_wait[part]
        return self.problem.backward_wait[part] if kind == B and part > self.steps[0][1] else 0.0

    def bound(self, least: float, limit: float, most_steps: float) -> float:
        """Seconds at the least; where there is no time to go on, as far as it is certain."""
        begins = [own.heads[0] for own in self.sequences]
        states: dict[Counts, list[State]] = {(0,) * len(begins): [(least, *begins, *(0.0 for _ in begins))]}
        best, steps = limit, 0
        while states and steps <= most_steps:
            following = defaultdict[Counts, list[State]](list)
            for counts, alike in states.items():
                for state in _leave_out_later(alike):
                    steps += 1
                    if counts == self.totals:
                        best = min(best, state[0])
                    for after, changed in self._next(counts, state):
                        if changed[0] < best:
                            following[after].append(changed)
            states = following
        return min([best, *(state[0] for alike in states.values() for state in alike)])

    def _next(self, counts: Counts, state: State) -> Iterator[tuple[Counts, State]]:
        """What may be done now, one action or another."""
        able = [own for own in range(len(counts)) if self._may_go_on(own, counts)]
        if not able:
            return
        ends = [state[1 + own] + self.sequences[own].seconds[counts[own]] for own in able]
        first, earliest = min(zip(ends, able, strict=True))
        device = self.sequences[earliest].devices[counts[earliest]]
        for own, end in zip(able, ends, strict=True):
            may = own == earliest or state[1 + own] < first
            if may and self.sequences[own].devices[counts[own]] == device:
                yield self._after(own, device, end, counts, state)

    def _may_go_on(self, own: int, counts: Counts) -> bool:
        """Whether a sequence has an action left, of which those of the micro-batches before are done."""
        done, turn = counts[own], len(self.steps)
        return done < self.totals[own] and all(
            other > (done if place < own else done - turn)
            for place, other in enumerate(counts)
            if place != own
        )

    def _after(self, own: int, device: int, end: float, counts: Counts, state: State) -> tuple[Counts, State]:
        """What is done, and when, once the next action of a sequence has ended on a device."""
        size, done = len(counts), counts[own] + 1
        sequence = self.sequences[own]
        after = (*counts[:own], done, *counts[own + 1 :])
        begins, ends = list(state[1 : 1 + size]), [*state[1 + size :]]
        ends[own] = end
        begin, following = max(end + sequence.waits[done - 1], sequence.heads[done]), sequence.devices[done]
        least = state[0]
        for place, other in enumerate(self.sequences):
            if place == own:
                continue
            if other.devices[counts[place] - 1] == following:  # -1 before the first action
                begin = max(begin, ends[place])
            if other.devices[counts[place]] == device and begins[place] < end:
                begins[place] = end
                least = max(least, end + other.rests[counts[place]])
        begins[own] = begin
        return after, (max(least, begin + sequence.rests[done]), *begins, *ends)


def _leave_out_later(states: Sequence[State]) -> list[State]:
    """Those that no other is earlier than in everything; of too many, two neighbours made one."""
    earliest = list[State]()
    for state in sorted(set(states)):
        if not any(all(map(le, other, state)) for other in earliest):
            earliest.append(state)
    while len(earliest) > MOST_STATES:
        pairs = zip_longest(earliest[::2], earliest[1::2], fillvalue=(inf,) * len(earliest[0]))
        earliest = [tuple(map(min, one, other)) for one, other in pairs]
    return earliest
