"""The default global batch: a number of samples a device, whatever sizes the profiling machine reached.

32 samples a device is what image classifiers are usually trained with (256 on eight GPUs); it is rounded to
the nearest global batch that the profile's micro-batch sizes make, and halved as long as nothing fits.
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
"""Share of the time limit that another global batch is searched for, of at most `MOST_SECONDS`."""
MOST_SECONDS = 1.0


def choose_mini_batch(problem: Problem, *, try_others: bool) -> DefaultMiniBatch | None:
    """How the global batch was chosen, with `try_others` also what half and twice of it would give where the
    problem is small; None where it was given."""
    if problem.options.mini_batch is not None:
        return None
    try_others = try_others and is_small_problem(problem) and not problem.budget.spent
    others = [_other(problem, batch) for batch in _neighbours(problem)] if try_others else []
    return DefaultMiniBatch(samples_per_device=problem.samples_per_device, others=others)


def smaller_defaults(problem: Problem) -> Iterator[Problem]:
    """The problem with half of its default global batch, a quarter and so on; none where the global batch was
    given, or where the problem is so large that trying would take long."""
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
