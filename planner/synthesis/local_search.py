"""A better order from a good one: actions of the critical path exchanged, as in job-shop scheduling.

A step that is shorter needs another order of two actions that follow one another, without a pause, on a
device of the critical path (van Laarhoven et al., "Job shop scheduling by simulated annealing", Operations
Research 1992). A change that makes the step no longer than it was some changes ago is kept (late acceptance:
Burke and Bykov, European Journal of Operational Research 2017).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from random import Random

from .order_problem import F, Lists, OrderProblem, Step
from .run_order import OrderRun, run_order

HISTORY = 40
"""Changes ago, to whose step a change is compared."""
MOST_FRUITLESS = 2000
"""Changes in a row that do not fit, after which none is sought."""
REACH = 6
"""Actions that one is moved across, at the most."""
TIE_WEIGHT = 1e-4
"""What the sum of the devices' ends counts beside the step: of equal steps the one with less waiting is
kept."""


def improve_order(
    problem: OrderProblem, start: Lists, bound: float, is_over: Callable[[], bool], seed: int = 0
) -> tuple[Lists, float]:
    """The best order found from `start`, which fits and runs, and its step; ends at the `bound`."""
    random = Random(seed)
    run = run_order(problem, start)
    assert run is not None, "the start can be run"
    now, cost = start, _cost(run)
    best, least = start, run.step
    history = [cost] * HISTORY
    turn = fruitless = 0
    path = run.critical_path(problem)
    while least > bound * (1 + 1e-9) and not is_over():
        turn += 1
        changed = _change(problem, now, run, path, random)
        if changed is None:
            fruitless += 1
            if fruitless > MOST_FRUITLESS:
                break
            continue
        fruitless = 0
        changed_run = run_order(problem, changed, 1.5 * least)
        if changed_run is None:
            continue
        own = _cost(changed_run)
        if own <= cost or own <= history[turn % HISTORY]:
            now, cost, run = changed, own, changed_run
            path = run.critical_path(problem)
            if run.step < least * (1 - 1e-12):
                best, least = now, run.step
        history[turn % HISTORY] = cost
    return best, least


def _cost(run: OrderRun) -> float:
    return run.step + TIE_WEIGHT * sum(run.device_ends) / len(run.device_ends)


def _change(
    problem: OrderProblem, lists: Lists, run: OrderRun, path: list[int], random: Random
) -> Lists | None:
    """An action of the critical path moved before the one it follows without a pause, or some further; None
    where that does not fit or breaks the order of a part."""
    followers = [i for i, action in enumerate(path) if _waits_for_its_device(run, action)]
    if not followers:
        return None
    action = path[random.choice(followers)]
    device = max(d for d in range(len(lists)) if run.first[d] <= action)
    own, at = list(lists[device]), action - run.first[device]
    if random.random() < 0.5:
        # The one before goes behind this one, or further.
        to = at - 1 + random.randint(1, REACH)
        own.insert(to, own.pop(at - 1))
    else:
        to = max(0, at - random.randint(1, REACH))
        own.insert(to, own.pop(at))
    if tuple(own) == lists[device]:
        return None
    if not _keeps_order(own) or not problem.fits_device(device, own):
        return None
    return (*lists[:device], tuple(own), *lists[device + 1 :])


def _waits_for_its_device(run: OrderRun, action: int) -> bool:
    return run.waited_for[action] == action - 1 and run.end[action - 1] == run.start[action]


def _keeps_order(own: Sequence[Step]) -> bool:
    """Whether no B stands before its F, and no W before its B."""
    done: Counter[Step] = Counter()
    for kind, part in own:
        done[kind, part] += 1
        if kind != F and done[kind, part] > done[kind - 1, part]:
            return False
    return True
