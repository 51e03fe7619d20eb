"""Problems made of another: with less time, for one planner, or with a part of its plans, where a search that
is not proven may find a better one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..cost_models.errors import UsageError
from .problem import INTERLEAVED, Problem
from .search.branch_and_bound import SearchResult
from .search.coarse import is_large

FOR_KNOWN = 0.75
"""Share of the time that known schedules may take where an order is made for the plan afterwards."""
MOST_COUNTS = 2
"""Numbers of micro-batches, each of which orders of their own are sought with by itself."""


def with_time_for_orders(problem: Problem) -> Problem:
    """The same, with the time that it leaves for an order of its own where one is asked for."""
    if not problem.makes_orders:
        return problem
    budget = problem.budget.part(share=FOR_KNOWN)
    earlier = replace(problem, budget=budget)
    vars(earlier)["space"] = problem.space.within(budget)
    return earlier


def problem_for_planner(planner: str, problem: Problem) -> Problem:
    """The problem that a planner is given: interleaved pipelines are allowed for their own planner, also
    where the options exclude them."""
    if planner != INTERLEAVED:
        return problem
    return replace(
        problem, options=replace(problem.options, planner=planner, robust=False, slow_devices=None)
    )


def on_fewer_devices(problem: Problem) -> Iterator[Problem]:
    """On the largest power of two of devices below all of them: more devices may not make the answer worse,
    also where it is not proven."""
    if problem.gpus == 1 or problem.options.use_all or is_large(problem.space, problem.families):
        return
    if problem.budget.spent:
        return
    gpus = 1 << ((problem.gpus - 1).bit_length() - 1)
    options = replace(problem.options, mini_batch=problem.mini_batch)
    try:
        yield replace(problem, topology=problem.topology.with_gpus(gpus), options=options)
    except UsageError:
        return  # so few cannot have what is requested


def with_one_count(problem: Problem, result: SearchResult) -> Iterator[Problem]:
    """With as many micro-batches as good plans have: orders of their own start from the best plan of each
    known schedule, whatever its number of them."""
    if len({own.micro_batches for own in problem.configs}) == 1:
        return
    plans = [*([] if result.best is None else [result.best]), *result.other_plans]
    for count in list(dict.fromkeys(plan.config.micro_batches for plan in plans))[:MOST_COUNTS]:
        if problem.budget.spent:
            return
        options = replace(problem.options, mini_batch=problem.mini_batch, micro_batches=count)
        yield replace(problem, options=options)
