"""The objectives besides the step: what is said of the memory, and of the cost, against all plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf

from pplan.cost_models.errors import UsageError
from pplan.planner.objectives.objective import price_by_kind
from pplan.planner.plan_file import Plan
from pplan.planner.problem import Problem

from .enumeration import Enumeration
from .results import Result

TOLERANCE = 1e-8


def least_memory(problem: Problem, plan: Plan, slack: float, fastest: float, result: Result) -> None:
    """No plan that is nearly as fast holds less than the bound, nor, where it is exact, than the answer."""
    aim = plan.objective
    if aim is None:
        return
    every = Enumeration(problem, Enumeration(problem, ()).rules.schedules)
    target = max(aim.lower_bound, aim.value if aim.exact else 0.0)
    below, least = fastest * (1 + slack) * (1 - TOLERANCE), inf
    text = ""
    for found in every.below(below, target * (1 - TOLERANCE)):
        if found.peak_bytes < least:
            least, text = found.peak_bytes, str(found)
    result.plans += every.plans
    result.simulated += every.simulated
    low = least < aim.lower_bound * (1 - TOLERANCE)
    result.check(
        "objective's bound", f"no plan holds less than {aim.lower_bound:.9g}; {text}" if low else None
    )
    if aim.exact:
        less = least <= (aim.value - 1) * (1 - TOLERANCE)  # whole bytes
        result.check("objective exact", f"least memory {aim.value:.9g}, exact; {text}" if less else None)


def least_cost(problem: Problem, plan: Plan, prices: Mapping[str, float], result: Result) -> None:
    """No plan on the first so many devices costs less than the bound, nor, where exact, than the answer; with
    several kinds of devices the bound is on plans on any of them."""
    aim = plan.objective
    if aim is None:
        return
    own = price_by_kind(prices, problem.topology)
    hourly = [own[problem.topology.device(rank).name] for rank in range(problem.gpus)]
    target = max(aim.lower_bound, aim.value if aim.exact else 0.0) * (1 - TOLERANCE)
    least, text = inf, ""
    for count in range(1, problem.gpus + 1):
        if problem.options.use_all and count < problem.gpus:
            continue
        options = replace(problem.options, mini_batch=problem.mini_batch)
        try:
            fewer = replace(problem, topology=problem.topology.with_gpus(count), options=options)
        except UsageError:
            continue
        every = Enumeration(fewer, Enumeration(fewer, ()).rules.schedules)
        per_second = 1 / 3600 / problem.mini_batch
        limit = target / (min(hourly[:count]) * per_second)
        for found in every.below(limit):
            used = {rank for ranks in found.proposal.devices for rank in ranks}
            if len(problem.topology.kinds) == 1 and used != set(range(len(used))):
                continue
            cost = sum(hourly[rank] for rank in used) * found.step_seconds * per_second
            if cost < min(least, target):
                least, text = cost, f"{cost:.9g} $/sample: {found}"
        result.plans += every.plans
        result.simulated += every.simulated
    low = least < aim.lower_bound * (1 - TOLERANCE)
    result.check(
        "objective's bound", f"no plan costs less than {aim.lower_bound:.9g}; {text}" if low else None
    )
    if aim.exact:
        less = least < aim.value * (1 - TOLERANCE)
        result.check("objective exact", f"least cost {aim.value:.9g}, exact; {text}" if less else None)
