"""The frontier of step time against memory, held against all plans."""

from __future__ import annotations

from collections.abc import Callable

from pplan.cost_models.errors import InfeasibleError, UsageError
from pplan.planner.objectives.frontier import Frontier
from pplan.planner.plan_file import ProfileReference
from pplan.planner.problem import Problem

from .enumeration import Enumeration, Scored
from .results import Result

TOLERANCE = 1e-8
REFERENCE = ProfileReference(file="attacked.profile.json", sha256="0" * 64)


def check(problem: Problem, solver: Callable[..., Frontier], result: Result) -> None:
    """Every point, and that none is left out."""
    every = Enumeration(problem, Enumeration(problem, ()).rules.schedules)
    try:
        found = solver(problem, model="attacked", profile=REFERENCE, memory_step=0.0, points=200)
    except UsageError as error:
        result.refused = error.what
        return
    except InfeasibleError:
        known = next(every.below(), None)
        result.check("nothing fits", None if known is None else f"said that no plan fits; {known} does")
        return
    finally:
        result.plans += every.plans
        result.simulated += every.simulated
    _points(every, found, result)
    result.plans += every.plans
    result.simulated += every.simulated


def _points(every: Enumeration, found: Frontier, result: Result) -> None:
    slowest = max(point.step_seconds for point in found.points)
    plans = list(every.below(slowest * (1 + TOLERANCE)))
    for point in found.points:
        bound = point.plan.prediction.lower_bound_seconds
        fitting = [plan for plan in plans if plan.peak_bytes <= point.memory_bytes]
        _no_faster(result, "frontier's bound", fitting, bound, f"of {point.memory_bytes} bytes")
        if point.exact:
            said = point.step_seconds
            _no_faster(result, "frontier's point", fitting, said, f"exact with {point.memory_bytes} bytes")
    if found.complete and all(point.exact for point in found.points):
        smallest = min(point.memory_bytes for point in found.points)
        # By a byte, and what is rounded in the file.
        smaller = next(every.below(peak_below=smallest - 1.5), None)
        result.check(
            "frontier complete",
            None if smaller is None else f"complete, the smallest {smallest} bytes; {smaller}",
        )


def _no_faster(result: Result, check: str, plans: list[Scored], seconds: float, words: str) -> None:
    best = min(plans, key=lambda plan: plan.step_seconds, default=None)
    faster = best is not None and best.step_seconds < seconds * (1 - TOLERANCE)
    result.check(check, f"{seconds:.9g} s {words}; {best}" if faster else None)
