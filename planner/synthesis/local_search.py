"""A better order from a good one: actions of the critical path exchanged, as in job-shop scheduling.

A step that is shorter needs another order of two actions that follow one another, without a pause, on a
device of the critical path (van Laarhoven et al., "Job shop scheduling by simulated annealing", Operations
Research 1992). As there, a change that makes the step longer is taken too, the more seldom the longer it
makes it and the later it comes: where memory is tight nearly every good order lies behind worse ones. Of
orders with more actions than there is time to exchange, hardly any longer step is taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from math import log
from random import Random

from .order_problem import F, Lists, OrderProblem, Step
from .run_order import OrderRun, run_order

HEAT = 1.0
"""The seconds that a change makes a step longer of which one in e is taken at first, in mean seconds of an
action."""
TURNS_AN_ACTION = 4.0
"""Orders run through, by action, below which there is less heat."""
MOST_FRUITLESS = 2000
"""Changes in a row that do not fit, after which none is sought."""
FRUITLESS_SHARE = 0.1
"""Of an order that is run through, what one costs that does not fit."""
REACH = 6
"""Actions that one is moved across, at the most."""
NEIGHBOURS = 0.5
"""Share of the changes that exchange two neighbours alone."""
TIE_WEIGHT = 1e-4
"""What the sum of the devices' ends counts beside the step: of equal steps the one with less waiting is
kept."""


def improve_order(
    problem: OrderProblem,
    start: Lists,
    bound: float,
    turns: int,
    is_over: Callable[[], bool] = lambda: False,
    seed: int = 0,
) -> tuple[Lists, float]:
    """The best order found from `start`, which fits and runs, and its step, after so many orders were run
    through; ends at the `bound`."""
    random = Random(seed)
    run = run_order(problem, start)
    assert run is not None, "the start can be run"
    now, cost = start, _cost(run)
    best, least = start, run.step
    path = run.critical_path(problem)
    heat = _heat(problem, start, turns)
    turn, fruitless = 0.0, 0
    while turn < turns and least > bound * (1 + 1e-9) and not is_over():
        changed = _change(problem, now, run, path, random)
        if changed is None:
            fruitless, turn = fruitless + 1, turn + FRUITLESS_SHARE
            if fruitless > MOST_FRUITLESS:
                break
            continue
        fruitless = 0
        limit = cost - heat * (1 - turn / turns) * log(1.0 - random.random())
        turn += 1
        changed_run = run_order(problem, changed, limit)
        if changed_run is None or (own := _cost(changed_run)) > limit:
            continue
        now, cost, run = changed, own, changed_run
        path = run.critical_path(problem)
        if run.step < least * (1 - 1e-12):
            best, least = now, run.step
    return best, least


def _heat(problem: OrderProblem, lists: Lists, turns: int) -> float:
    """Seconds, see `HEAT`."""
    actions = sum(map(len, lists))
    work = sum(map(sum, (problem.forward, problem.backward, problem.weight)))
    return HEAT * problem.micro_batches * work / actions * min(1.0, turns / (TURNS_AN_ACTION * actions))


def _cost(run: OrderRun) -> float:
    return run.step + TIE_WEIGHT * sum(run.device_ends) / len(run.device_ends)


def _change(
    problem: OrderProblem, lists: Lists, run: OrderRun, path: list[int], random: Random
) -> Lists | None:
    """An action of the critical path exchanged with the one it follows without a pause, or one of them moved
    further; None where that does not fit or breaks the order of a part."""
    followers = [i for i, action in enumerate(path) if _waits_for_its_device(run, action)]
    if not followers:
        return None
    action = path[random.choice(followers)]
    device = max(d for d in range(len(lists)) if run.first[d] <= action)
    own, at = list(lists[device]), action - run.first[device]
    reach = 1 if random.random() < NEIGHBOURS else random.randint(1, REACH)
    if random.random() < 0.5:
        # The one before goes behind this one, or further.
        to = at - 1 + reach
        own.insert(to, own.pop(at - 1))
    else:
        to = max(0, at - reach)
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
