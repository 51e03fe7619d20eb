"""A better order from a good one: actions of the critical path exchanged, as in job-shop scheduling.

A step that is shorter needs another order of two actions that follow one another, without a pause, on a
device of the critical path (van Laarhoven et al., "Job shop scheduling by simulated annealing", Operations
Research 1992). A change that makes the step no longer than it was some changes ago is kept (late acceptance:
Burke and Bykov, European Journal of Operational Research 2017).
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from .order_problem import Lists, OrderProblem, Step, W
from .run_order import OrderRun, run_order

MEMORY = 40
"""Changes ago."""
MOST_VAIN = 2000
"""Changes in a row that do not fit, after which none is sought."""
REACH = 6
"""Actions that one is moved across, at the most."""
ALONE = 1e-4
"""What the sum of the devices' ends counts beside the step: of equal steps the one with less waiting is
kept."""


def improve_order(
    problem: OrderProblem, start: Lists, bound: float, is_over: Callable[[], bool], seed: int = 0
) -> tuple[Lists, float]:
    """The best order found from `start`, which fits and runs, and its step; ends at the `bound`."""
    random = Random(seed)
    clock = run_order(problem, start)
    assert clock is not None, "the start can be run"
    now, cost = start, _cost(clock)
    best, least = start, clock.step
    history = [cost] * MEMORY
    turn = vain = 0
    path = clock.critical_path(problem)
    while least > bound * (1 + 1e-9) and not is_over():
        turn += 1
        changed = _change(problem, now, clock, path, random)
        if changed is None:
            vain += 1
            if vain > MOST_VAIN:
                break
            continue
        vain = 0
        clock_of_it = run_order(problem, changed, 1.5 * least)
        if clock_of_it is None:
            continue
        own = _cost(clock_of_it)
        if own <= cost or own <= history[turn % MEMORY]:
            now, cost, clock = changed, own, clock_of_it
            path = clock.critical_path(problem)
            if clock.step < least * (1 - 1e-12):
                best, least = now, clock.step
        history[turn % MEMORY] = cost
    return best, least


def _cost(clock: OrderRun) -> float:
    return clock.step + ALONE * sum(clock.device_ends) / len(clock.device_ends)


def _change(
    problem: OrderProblem, lists: Lists, clock: OrderRun, path: list[int], random: Random
) -> Lists | None:
    """An action of the critical path moved before the one it follows without a pause, or some further; None
    where that does not fit or breaks the order of a part."""
    followers = [i for i, action in enumerate(path) if _waits_for_its_device(clock, action)]
    if not followers:
        return None
    action = path[random.choice(followers)]
    device = max(d for d in range(len(lists)) if clock.first[d] <= action)
    own, at = list(lists[device]), action - clock.first[device]
    if random.random() < 0.5:
        # The one before goes behind this one, or further.
        to = min(len(own) - 1, at - 1 + random.randint(1, REACH))
        own.insert(to, own.pop(at - 1))
        low, high = at - 1, to
    else:
        to = max(0, at - random.randint(1, REACH))
        own.insert(to, own.pop(at))
        low, high = to, at
    if tuple(own[low : high + 1]) == lists[device][low : high + 1] or not _is_possible(problem, own, device):
        return None
    return (*lists[:device], tuple(own), *lists[device + 1 :])


def _waits_for_its_device(clock: OrderRun, action: int) -> bool:
    return clock.waited_for[action] == action - 1 and clock.end[action - 1] == clock.start[action]


def _is_possible(problem: OrderProblem, own: list[Step], device: int) -> bool:
    """Whether no B stands before its F, no W before its B, and it fits."""
    level, room = 0.0, problem.room[device] * (1 + 1e-12)
    parts = problem.own_parts[device]
    counts = {part: [0, 0, 0] for part in parts}
    release = W if problem.split else W - 1
    for kind, part in own:
        done = counts[part]
        done[kind] += 1
        if kind and done[kind] > done[kind - 1]:
            return False
        if kind == 0:
            level += problem.micro_batch_bytes[part]
            if level > room:
                return False
        elif kind == release:
            level -= problem.micro_batch_bytes[part]
    return True
