"""Default global batch: a number of samples per device, whatever sizes the profiling machine measured.

Image classifiers are usually trained with 32 samples per device (256 on eight GPUs). The number is rounded to
the nearest global batch that the profile's micro-batch sizes make, and halved while nothing fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..cost_models.errors import UsageError
from .candidate import ScoredPlan, watching_best
from .joint_search import BEST, is_small_problem, joint_search, plan_with
from .plan_file import DefaultMiniBatch, OtherMiniBatch
from .planners import BASELINES, find_planner
from .problem import Problem

SHORT = 0.05
"""Share of the time limit for the search of another global batch, at most `MOST_SECONDS`."""
MOST_SECONDS = 1.0


def choose_mini_batch(problem: Problem, *, try_others: bool) -> DefaultMiniBatch | None:
    """Return how the global batch was chosen; None if it was given.

    Args:
        problem: What is asked.
        try_others: Whether to solve for half and twice the batch, too, if the problem is small.
    """
    if problem.options.mini_batch is not None:
        return None
    try_others = try_others and is_small_problem(problem) and not problem.budget.spent
    alternatives = [_other(problem, batch) for batch in _neighbours(problem)] if try_others else []
    return DefaultMiniBatch(samples_per_device=problem.samples_per_device, others=alternatives)


def smaller_defaults(problem: Problem) -> Iterator[Problem]:
    """Yield the problem with half of its default global batch, a quarter and so on.

    Nothing is yielded if the global batch was given, or if the problem is large.
    """
    if problem.options.mini_batch is not None or not is_small_problem(problem):
        return
    samples, last = problem.samples_per_device // 2, problem.mini_batch
    while samples:
        smaller = replace(problem, samples_per_device=samples)
        if smaller.mini_batch < last:
            yield smaller
            last = smaller.mini_batch
        samples //= 2


def _neighbours(problem: Problem) -> Iterator[int]:
    if problem.mini_batch % 2 == 0:
        yield problem.mini_batch // 2
    yield problem.mini_batch * 2


def _other(problem: Problem, batch: int) -> OtherMiniBatch:
    """Return the best plan of a short search for another global batch."""
    options = problem.options
    seconds = min(SHORT * options.time_limit, MOST_SECONDS)
    try:
        other = replace(problem, options=replace(options, mini_batch=batch, time_limit=seconds))
        with watching_best(None):
            plan = _best(other)
    except UsageError:  # the requested micro-batches do not make it
        plan = None
    if plan is None:
        return OtherMiniBatch(mini_batch=batch)
    step = plan.step_seconds
    return OtherMiniBatch(mini_batch=batch, step_seconds=step, samples_per_second=batch / step)


def _best(problem: Problem) -> ScoredPlan | None:
    """The best plan of the quick planners and a short search, or of the planner that was requested."""
    planner = problem.options.planner
    if planner != BEST:
        plan = plan_with(find_planner(planner), problem)
        return plan if isinstance(plan, ScoredPlan) else None
    quick = [plan_with(find_planner(name), problem) for name in BASELINES]
    return joint_search(problem, [plan for plan in quick if isinstance(plan, ScoredPlan)]).best
