"""A better order from a good one: actions of the critical path exchanged, as in job-shop scheduling.

A step that is shorter needs another order of two actions that follow one another, without a pause, on a
device of the critical path (van Laarhoven et al., "Job shop scheduling by simulated annealing", Operations
Research 1992). As there, a change that makes the step longer is taken too, the more seldom the longer it
makes it and the later it comes: where memory is tight nearly every good order lies behind worse ones. Of
orders with more actions than there is time to exchange, hardly any longer step is taken.

What is spent is counted in actions that are timed (`exchange_loops`), many more where numba is installed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import accumulate
from math import inf, log
from typing import Any

import numpy as np

from . import exchange_loops
from .compiled_loops import compile_loops
from .exchange_loops import NONE, RANDOM_MODULUS, Jobs, TimedOrder
from .order_problem import F, Lists, OrderProblem, Step
from .run_order import OrderRun, run_order

HEAT = 0.4
"""The seconds that a change makes a step longer of which one in e is taken at first, in mean seconds of an
action; it falls with the square root of what is left to spend."""
WORK_OF_HEAT = 400.0
"""Work by action below which there is less heat."""
CHUNK = 400
"""Exchanges with the same heat."""
SPREAD = 1024
"""Random numbers."""


def improve_order(
    problem: OrderProblem,
    start: Lists,
    bound: float,
    work: float,
    is_over: Callable[[], bool] = lambda: False,
    seed: int = 0,
    *,
    fast: bool = False,
) -> tuple[Lists, float]:
    """The best order found from `start`, which fits and runs, and its step, after so much work; ends at the
    `bound`. `fast`: with numba, which changes nothing but the time."""
    run = run_order(problem, start)
    assert run is not None, "the start can be run"
    network = _Network(problem, start, run)
    jobs, row = network.jobs(fast), network.row(fast)
    loop = compile_loops(exchange_loops.LOOPS, 1)[0] if fast else exchange_loops.anneal
    least, random = run.step, 1 + seed % (RANDOM_MODULUS - 1)
    heat, left, goes_on = _heat(problem, start, work), work, True
    while goes_on and left > 0 and least > bound * (1 + 1e-9) and not is_over():
        now = heat * (left / work) ** 0.5
        least, spent, goes_on, random = loop(jobs, row, CHUNK, now, bound * (1 + 1e-9), least, random)
        left -= spent + 1
    lists = network.lists(row.best)
    changed = run_order(problem, lists) if least < run.step else None
    if changed is None or changed.step >= run.step * (1 - 1e-12) or not problem.fits(lists):
        return start, run.step
    return lists, changed.step


def _heat(problem: OrderProblem, lists: Lists, work: float) -> float:
    """Seconds, see `HEAT`."""
    actions = sum(map(len, lists))
    seconds = sum(map(sum, (problem.forward, problem.backward, problem.weight)))
    return HEAT * problem.micro_batches * seconds / actions * min(1.0, work / (WORK_OF_HEAT * actions))


class _Network:
    """The actions of an order by number, device after device, with what each waits for; then the transfers of
    links that may keep one waiting, as actions of devices of their own."""

    def __init__(self, problem: OrderProblem, lists: Lists, run: OrderRun) -> None:
        self.problem, self.steps = problem, [step for own in lists for step in own]
        self.device = [device for device, own in enumerate(lists) for _ in own]
        self.number, done = list[int](), Counter[Step]()
        for step in self.steps:
            self.number.append(done[step])
            done[step] += 1
        at = {
            (*step, number): i for i, (step, number) in enumerate(zip(self.steps, self.number, strict=True))
        }
        self.seconds = [problem.duration(kind, part, number == 0) for (kind, part), number in self._each()]
        self.needs = [
            NONE if kind == F else at[kind - 1, part, number] for (kind, part), number in self._each()
        ]
        self.sender, self.receiver = ([NONE] * len(self.steps) for _ in range(2))
        self.wait = [0.0] * len(self.steps)
        self.devices = len(lists)
        self._connect(at, run.end)
        self.start = run.start

    def _each(self) -> Iterator[tuple[Step, int]]:
        return zip(self.steps, self.number, strict=True)

    def _connect(self, at: dict[tuple[int, int, int], int], end: list[float]) -> None:
        """Every action with the one that it makes possible, on another device by a transfer."""
        problem, transfers = self.problem, dict[tuple[int, int], list[int]]()
        target = dict[int, tuple[int, float, float]]()
        for action, ((kind, part), number) in enumerate(self._each()):
            arrival = problem.next_arrival(kind, part, 0.0)
            if arrival is None:
                continue
            other, next_kind, wait = arrival
            busy = (problem.forward_busy, problem.backward_busy)[kind][part] if wait else 0.0
            target[action] = at[next_kind, other, number], wait, busy
            transfers.setdefault(problem.link(kind, part, other), []).append(action)
        for own in transfers.values():
            # A device ends an action before it sends again: its transfer is done where it takes no longer.
            late = max(target[action][2] for action in own) > min(self.seconds[action] for action in own)
            for action in sorted(own, key=end.__getitem__):
                self._join(action, *target[action], self.devices if late else NONE)
            self.devices += late

    def _join(self, action: int, receiver: int, wait: float, busy: float, link: int) -> None:
        sender = action
        if link != NONE:
            sender = len(self.sender)
            self.receiver[action] = sender
            self.device.append(link)
            self.seconds.append(busy)
            self.needs.append(NONE)
            self.sender.append(action)
            self.receiver.append(NONE)
            self.wait.append(0.0)
        self.receiver[sender], self.sender[receiver] = receiver, sender
        self.wait[receiver] = wait - busy if link != NONE else wait

    def jobs(self, fast: bool) -> Jobs:
        """What the loops know of the actions."""
        problem, more = self.problem, len(self.device) - len(self.steps)
        codes = [kind * problem.parts + part for kind, part in self.steps]
        links = [-1 - self.steps[self.sender[action]][0] * problem.parts - self.steps[self.sender[action]][1]
                 for action in range(len(self.steps), len(self.device))]  # fmt: skip
        levels = [problem.level_change(*step) for step in self.steps]
        nothing, counts = [0.0] * more, Counter(self.device)
        first = [0, *accumulate(counts[device] for device in range(self.devices))]
        lines = self.devices - problem.devices
        columns: list[list[Any]] = [
            self.device, codes + links, self.needs, self.seconds, self.sender, self.receiver, self.wait,
            [begins for begins, _ in levels] + nothing, [ends for _, ends in levels] + nothing,
            [problem.workspace_bytes(*step) for step in self.steps] + nothing, first,
            [room * (1 + 1e-12) for room in problem.room] + [inf] * lines, [*problem.end, *[0.0] * lines],
            [-log((number + 0.5) / SPREAD) for number in range(SPREAD)],
        ]  # fmt: skip
        return Jobs(*(np.array(column) if fast else column for column in columns))

    def row(self, fast: bool) -> TimedOrder:
        """The order, timed."""
        count = len(self.device)
        own = list(range(count))
        starts, waits = [0.0] * count, list[list[int]]()
        after = [i + 1 if i + 1 < count and self.device[i + 1] == self.device[i] else NONE for i in own]
        before = [i - 1 if i and self.device[i - 1] == self.device[i] else NONE for i in own]
        for action in own:
            waits.append([other for other in (before[action], self.sender[action]) if other != NONE])
        left, clock = [len(others) for others in waits], [i for i in own if not waits[i]]
        for action in clock:
            for other in (after[action], self.receiver[action]):
                if other != NONE:
                    arrives = starts[action] + self.seconds[action]
                    arrives += self.wait[other] if other == self.receiver[action] else 0.0
                    starts[other], left[other] = max(starts[other], arrives), left[other] - 1
                    if not left[other]:
                        clock.append(other)
        tails, device_end = [0.0] * count, [*self.problem.end, *[0.0] * self.devices]
        for action in reversed(clock):
            following, receiver = after[action], self.receiver[action]
            tail = device_end[self.device[action]] if following == NONE else 0.0
            if following != NONE:
                tail = self.seconds[following] + tails[following]
            if receiver != NONE:
                tail = max(tail, self.wait[receiver] + self.seconds[receiver] + tails[receiver])
            tails[action] = tail
        clock.sort(key=starts.__getitem__)
        rank, level, bytes_now = [0] * count, [0.0] * count, 0.0
        for place, action in enumerate(clock):
            rank[action] = place
        for action, step in enumerate(self.steps):
            bytes_now = sum(self.problem.level_change(*step)) + (bytes_now if before[action] != NONE else 0.0)
            level[action] = bytes_now
        ends = [start + seconds for start, seconds in zip(starts, self.seconds, strict=True)]
        columns: list[list[Any]] = [own, own, before, after, starts, ends, tails, clock, rank, level, starts]
        columns += [[0] * count for _ in range(4)] + [own]
        return TimedOrder(*(np.array(column) if fast else list(column) for column in columns))

    def lists(self, own: Any) -> Lists:
        """By device, what it does in an order of the actions."""
        lists: list[list[Step]] = [[] for _ in range(self.problem.devices)]
        for action in map(int, own):
            if action < len(self.steps):
                lists[self.device[action]].append(self.steps[action])
        return tuple(map(tuple, lists))
