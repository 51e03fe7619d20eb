"""Local search on an order: exchanges of actions on the critical path, accepted by simulated annealing.

A shorter step needs another order of two actions that follow one another without a pause on a device of the
critical path (van Laarhoven et al., "Job shop scheduling by simulated annealing", Operations Research 1992).
A longer step is accepted too, with a probability that falls with its length and with the work done: where
memory is tight, nearly every good order lies beyond worse ones.

When an action moves on its device, only later actions are timed again. The move is taken back as soon as the
end of an action and its tail (the seconds that follow it) exceed the limit. Tails are exact except for
actions whose path runs through those that the move crosses; some moves within the limit are therefore
rejected (Balas and Vazacopoulos, "Guided local search with shifting bottleneck for job shop scheduling",
Management Science 1998).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from math import inf
from random import Random

import numpy as np

from ...cost_models.program_order import NONE, resolve_order
from ...cost_models.step_costs import lower_costs
from .orders import ROUNDING, Lists, OrderProblem

HEAT = 0.4
"""First mean seconds by which an accepted step may be longer, in mean seconds of an action.

They fall with the square root of the remaining work.
"""
WORK_OF_HEAT = 400.0
"""Work per action below which the heat is reduced."""
CHUNK = 400
"""Exchanges at the same heat."""
REACH = 6
"""Most actions that one move crosses. Half of the moves cross one."""
MOST_FRUITLESS = 2_000
"""Impossible moves in a row after which the search ends."""


def improve_order(
    problem: OrderProblem,
    start: Lists,
    bound: float,
    work: float,
    is_over: Callable[[], bool] = lambda: False,
    seed: int = 0,
) -> tuple[Lists, float]:
    """Search for a faster order.

    Args:
        problem: Costs and memory.
        start: An order that fits and runs.
        bound: Step at which the search ends.
        work: Number of actions that may be timed.
        is_over: Function that returns whether the time is over.
        seed: Seed of the random numbers.

    Returns:
        The fastest order found, which fits, and its step.
    """
    exchanges = _Exchanges(problem, start, Random(seed))
    first, heat, left = exchanges.least, exchanges.heat(work), work
    while left > 0 and exchanges.least > bound * (1 + 1e-9) and not is_over():
        spent = exchanges.anneal(CHUNK, heat * (left / work) ** 0.5, bound * (1 + 1e-9))
        if not spent:
            break
        left -= spent
    # Only the simulator times transfers that wait for each other.
    step, lists = problem.step(start), exchanges.best_lists()
    improved = problem.step(lists) if exchanges.least < first else step
    return (lists, improved) if improved < step * (1 - 1e-12) and problem.fits(lists) else (start, step)


class _Exchanges:
    """An order as a graph of actions that is timed after every move.

    Actions are numbered device after device. Lists by action: `device`; `code` (kind and part); `needs`, the
    preceding action of the same micro-batch and part; `seconds`; `sender` and `receiver`, with `wait` seconds
    until the sender's result has arrived; `begins`, `ends` and `workspace` bytes; `place` in `order`;
    `previous` and `following` on its device; `start`, `end`, and `tail`, the seconds that follow its end;
    `rank` in `clock`, which lists the actions by start. `level`, by place: bytes held after it.
    """

    device: list[int]

    def __init__(self, problem: OrderProblem, lists: Lists, random: Random) -> None:
        self.random, self.steps = random, [step for row in lists for step in row]
        order = resolve_order(problem.arrange(lists))
        values = lower_costs(order, problem.costs)
        by_device = np.argsort(order.device, kind="stable")
        kind, part, micro_batch = (
            column[by_device] for column in (order.kind, order.place, order.micro_batch)
        )
        number = np.full((4, problem.micro_batches, problem.parts + 1), NONE)
        number[kind, micro_batch, part] = np.arange(len(kind))
        needs = number[kind - 1, micro_batch, part]  # NONE for an F, from the last row
        is_turn = (kind == 1) & (part == problem.parts - 1)
        sender = np.where(is_turn, needs, number[kind, micro_batch, part + np.array([-1, 1, 0])[kind]])
        sender[kind == 2] = NONE
        receiver = np.full(len(kind) + 1, NONE)
        receiver[sender] = np.arange(len(kind))
        arrives = (values.occupancy + values.latency)[values.cut][by_device]
        columns = (order.device[by_device], kind * problem.parts + part, needs, sender, receiver[:-1])
        self.device, self.code, self.needs, self.sender, self.receiver = (
            column.tolist() for column in columns
        )
        self.wait = np.where(sender == NONE, 0.0, arrives[sender]).tolist()
        self.seconds: list[float] = values.duration[by_device].tolist()
        bytes = [problem.bytes[kind][part] for kind, part in self.steps]
        self.begins, self.ends, self.workspace = map(list, zip(*bytes, strict=True))
        self.room, self.device_end = [room * ROUNDING for room in problem.room], problem.end
        self.first = [0, *accumulate(map(len, lists))]
        self._time_all(np.argsort(by_device).tolist())
        self.step = self.least = self._step_seconds()
        self.best = list(self.order)

    def heat(self, work: float) -> float:
        """Return the seconds of the first heat, see `HEAT`."""
        count = len(self.steps)
        return HEAT * sum(self.seconds) / count * min(1.0, work / (WORK_OF_HEAT * count))

    def _time_all(self, clock: list[int]) -> None:
        """Time all actions. `clock` lists each action after those that it waits for."""
        count, device = len(self.device), self.device
        self.order, self.place, self.clock = list(range(count)), list(range(count)), clock
        self.previous = [i - 1 if i and device[i - 1] == device[i] else NONE for i in range(count)]
        self.following = [
            i + 1 if i + 1 < count and device[i + 1] == device[i] else NONE for i in range(count)
        ]
        self.start, self.end, self.tail = [0.0] * count, list(self.seconds), [0.0] * count
        self.old_start, self.rank, self.level = [0.0] * count, [0] * count, [0.0] * count
        self._set_clock(0, clock)
        self._time(0, 0, count - 1, inf)
        self._sort_clock(0, count)
        self._follow(0, count - 1)
        for action in range(count):
            level = self.level[action - 1] if self.previous[action] != NONE else 0.0
            self.level[action] = level + self.begins[action] + self.ends[action]

    def best_lists(self) -> Lists:
        """Return the fastest order found."""
        steps = [self.steps[action] for action in self.best]
        return tuple(tuple(steps[start:end]) for start, end in pairwise(self.first))

    def anneal(self, turns: int, heat: float, bound: float) -> int:
        """Try exchanges at one heat.

        Args:
            turns: Number of possible moves to try.
            heat: Mean seconds by which an accepted step may be longer.
            bound: Step at which the search ends.

        Returns:
            The number of actions that were timed; 0 if nothing is left to try.
        """
        random, place, first = self.random.random, self.place, self.first
        work, fruitless, path = 0, 0, self.find_path()
        while turns and self.least > bound and path and fruitless < MOST_FRUITLESS:
            action = path[int(random() * len(path))]
            reach = 1 if random() < 0.5 else 1 + int(random() * REACH)
            origin, device = place[action], self.device[action]
            target = max(origin - reach, first[device])
            if random() < 0.5:
                origin -= 1
                target = min(origin + reach, first[device + 1] - 1)
            work += 1
            if not self.may_move(origin, target):
                fruitless += 1
                continue
            fruitless, turns = 0, turns - 1
            limit = self.step + heat * self.random.expovariate(1.0)
            step, timed = self.change(origin, target, limit)
            work += timed
            if step <= limit:
                self.step, path = step, self.find_path()
                if step < self.least:
                    self.least, self.best = step, list(self.order)
        return work if path and fruitless < MOST_FRUITLESS else 0

    def _step_seconds(self) -> float:
        """Return the seconds until every device is done."""
        order, end = self.order, self.end
        lasts = (order[first - 1] for first in self.first[1:])
        return max(end[last] + extra for last, extra in zip(lasts, self.device_end, strict=True))

    def find_path(self) -> list[int]:
        """Return the actions of a critical path that follow another without a pause, last first."""
        senders, wait, start, end, previous = self.sender, self.wait, self.start, self.end, self.previous
        lasts = (self.order[first - 1] for first in self.first[1:])
        ends = ((end[last] + extra, last) for last, extra in zip(lasts, self.device_end, strict=True))
        action, path = max(ends)[1], list[int]()
        while action != NONE:
            sender, earlier = senders[action], previous[action]
            if sender != NONE and end[sender] + wait[action] == start[action]:
                action = sender
            elif earlier != NONE and end[earlier] == start[action]:
                path.append(action)
                action = earlier
            else:
                break
        return path

    def may_move(self, origin: int, target: int) -> bool:
        """Return whether an action may move to another place of its device.

        It must not cross actions of its kind and part, those it needs or those that need it, and the device
        must have room.
        """
        order, code, needs, begins, ends = self.order, self.code, self.needs, self.begins, self.ends
        action, stride = order[origin], 1 if target > origin else -1
        for place in range(origin + stride, target + stride, stride):
            crossed = order[place]
            if code[crossed] == code[action]:
                return False
            if (needs[crossed] == action) if stride > 0 else (needs[action] == crossed):
                return False
        device, begin = self.device[action], min(origin, target)
        level = self.level[begin - 1] if begin > self.first[device] else 0.0
        room = self.room[device]
        for place in range(begin, max(origin, target) + 1):
            arriving = order[place + stride] if place != target else action
            level += begins[arriving]
            if level + self.workspace[arriving] > room:
                return False
            level += ends[arriving]
        return True

    def change(self, origin: int, target: int, limit: float) -> tuple[float, int]:
        """Move an action if the step stays within a limit.

        Args:
            origin: Place of the action.
            target: New place.
            limit: Longest step that is accepted.

        Returns:
            The step, infinite if the move was taken back, and the number of actions that were timed.
        """
        begin, end = min(origin, target), max(origin, target)
        first, last = self.rank[self.order[begin]], self.rank[self.order[end]]
        segment = self.clock[first : last + 1]
        changed = self._sort_segment(segment, origin, target)
        if changed is None:
            return inf, last - first
        self._set_clock(first, changed)
        self._move(origin, target)
        until, is_over = self._time(first, begin, end, limit)
        step = inf if is_over else self._step_seconds()
        if step <= limit:
            self._sort_clock(first, until)
            return step, until - first + self._follow(begin, end)
        for i in range(first, until):
            action = self.clock[i]
            self.start[action] = self.old_start[i]
            self.end[action] = self.old_start[i] + self.seconds[action]
        self._move(target, origin)
        self._set_clock(first, segment)
        return inf, until - first

    def _set_clock(self, first: int, actions: list[int]) -> None:
        self.clock[first : first + len(actions)] = actions
        for rank, action in enumerate(actions, first):
            self.rank[action] = rank

    def _sort_segment(self, segment: list[int], origin: int, target: int) -> list[int] | None:
        """Return a part of the clock, sorted for a move within it.

        None if an action would wait for itself.

        Actions that wait for delayed ones go after the rest (Pearce and Kelly, "A dynamic topological sort
        algorithm for directed acyclic graphs", Journal of Experimental Algorithmics 2006).
        """
        place, previous, senders = self.place, self.previous, self.sender
        action = self.order[origin]
        delayed = {action} if target > origin else set(self.order[target:origin])
        early, late = list[int](), list[int]()
        for moved in segment:
            earlier = previous[moved]
            if senders[moved] in delayed:
                # An action that becomes earlier must not wait for one that becomes later.
                if moved == action if target < origin else origin < place[moved] <= target:
                    return None
                delayed.add(moved)
            elif earlier in delayed and earlier != action and moved != action:
                delayed.add(moved)
            (late if moved in delayed else early).append(moved)
        return early + late

    def _move(self, origin: int, target: int) -> None:
        """Move an action from its place on its device to another one."""
        order, place, previous, following, level = (
            self.order, self.place, self.previous, self.following, self.level,
        )  # fmt: skip
        device = self.device[order[origin]]
        order.insert(target, order.pop(origin))
        first, last = self.first[device], self.first[device + 1] - 1
        begin = min(origin, target)
        bytes_now = level[begin - 1] if begin > first else 0.0
        for i in range(begin, max(origin, target) + 1):
            action = order[i]
            bytes_now = bytes_now + self.begins[action] + self.ends[action]
            place[action], level[i] = i, bytes_now
            previous[action] = order[i - 1] if i > first else NONE
            following[action] = order[i + 1] if i < last else NONE
            if i > first:
                following[order[i - 1]] = action
            if i < last:
                previous[order[i + 1]] = action

    def _time(self, first: int, begin: int, end: int, limit: float) -> tuple[int, bool]:
        """Time the actions from a rank on, as far as they change.

        Args:
            first: Rank of the first action.
            begin: First place of the device between which an action moved.
            end: Last place.
            limit: Longest step that is accepted.

        Returns:
            The rank at which timing ended, and whether the step exceeds the limit.
        """
        order, place, rank, clock, old_start = self.order, self.place, self.rank, self.clock, self.old_start
        starts, ends, tails, previous = self.start, self.end, self.tail, self.previous
        senders, receivers, wait, seconds = self.sender, self.receiver, self.wait, self.seconds
        until = max(rank[action] for action in order[begin : end + 1])
        if self.following[order[end]] != NONE:
            until = max(until, rank[self.following[order[end]]])
        i = first
        while i <= until:
            action = clock[i]
            start, earlier, sender = 0.0, previous[action], senders[action]
            if earlier != NONE:
                start = ends[earlier]
            if sender != NONE and ends[sender] + wait[action] > start:
                start = ends[sender] + wait[action]
            old_start[i] = starts[action]
            i += 1
            if start == starts[action]:
                continue
            starts[action], ends[action] = start, start + seconds[action]
            if ends[action] + tails[action] > limit and not begin <= place[action] <= end:
                return i, True
            for later in (self.following[action], receivers[action]):
                if later != NONE and rank[later] > until:
                    until = rank[later]
        return i, False

    def _sort_clock(self, first: int, until: int) -> None:
        """Sort a range of the clock by start. Actions with equal starts keep their order."""
        self._set_clock(first, sorted(self.clock[first:until], key=self.start.__getitem__))

    def _follow(self, begin: int, end: int) -> int:
        """Update the tails of actions between two places and of earlier ones, as far as they change.

        Returns:
            The number of actions that were visited.
        """
        order, rank, clock, tails, following = self.order, self.rank, self.clock, self.tail, self.following
        receivers, wait, seconds = self.receiver, self.wait, self.seconds
        if begin > self.first[self.device[order[begin]]]:
            begin -= 1
        ranks = [rank[action] for action in order[begin : end + 1]]
        top, until = max(ranks), min(ranks)
        i = top
        while i >= until:
            action = clock[i]
            i -= 1
            later, receiver = following[action], receivers[action]
            tail = self.device_end[self.device[action]]
            if later != NONE:
                tail = seconds[later] + tails[later]
            if receiver != NONE and wait[receiver] + seconds[receiver] + tails[receiver] > tail:
                tail = wait[receiver] + seconds[receiver] + tails[receiver]
            if tail == tails[action]:
                continue
            tails[action] = tail
            for earlier in (self.previous[action], self.sender[action]):
                if earlier != NONE and rank[earlier] < until:
                    until = rank[earlier]
        return top - i
