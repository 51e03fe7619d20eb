"""Pareto frontier of step time against peak memory, and its file (`NAME.frontier.json`).

It uses the epsilon-constraint method. The fastest plan comes first, then repeatedly the fastest one that
needs less memory than the last, until nothing fits (Haimes, Lasdon and Wismer, "On a bicriterion formulation
of the problems of integrated system identification and system optimization", IEEE Transactions on Systems,
Man and Cybernetics 1, 1971).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil
from typing import Annotated, ClassVar

from pydantic import Field

from ...cost_models.document import Document, MadeBy, Record, StepSeconds, TotalBytes
from ...cost_models.errors import UsageError
from ..build_plan import list_machine_warnings, list_search_warnings, plan_without_comparison
from ..candidate import ScoredPlan
from ..infeasible import no_plan_fits
from ..joint_search import BEST, find_best_plan
from ..plan_file import TIE, Plan, ProfileReference
from ..plan_simulation import list_prediction_limits
from ..problem import Problem
from ..scoring import assemble
from ..search.branch_and_bound import SearchResult
from .objective_result import peak_bytes, search_again, with_memory_limit


class Point(Record):
    """A plan of the frontier.

    Attributes:
        step_seconds: Seconds of its step.
        memory_bytes: Bytes of the fullest device, rounded up so that the plan fits into them.
        exact: Whether it is proven that no faster plan needs at most this memory.
        plan: The plan.
    """

    step_seconds: StepSeconds
    memory_bytes: TotalBytes
    exact: bool
    plan: Plan


class Frontier(Document):
    """Frontier of step time against memory, fastest plan first.

    Attributes:
        model: Name of the model.
        points: The plans.
        complete: Whether the last point is the smallest plan that exists, as far as the searches were exact.
        memory_step: Least share by which the memory of a point lies below that of the previous one.
    """

    kind: ClassVar[str] = "frontier"

    model: str
    points: Annotated[list[Point], Field(min_length=1)]
    complete: bool
    memory_step: Annotated[float, Field(ge=0, lt=1)]
    warnings: list[str] = []
    """Reasons why the figures of any point may be wrong."""
    made_by: MadeBy = MadeBy()


POINTS = 24
MEMORY_STEP = 0.02
SEEDS = 4
"""Number of last plans with which the next search starts. Under a lower limit they may recompute more."""


def build_frontier(
    problem: Problem,
    *,
    model: str,
    profile: ProfileReference,
    points: int = POINTS,
    memory_step: float = MEMORY_STEP,
    warnings: Sequence[str] = (),
) -> Frontier:
    """Compute the frontier.

    Args:
        problem: What is asked.
        model: Name of the model.
        profile: The profile from which the plans are made.
        points: Most plans.
        memory_step: Least share by which the memory of each plan lies below the last one's. With 0 it is one
            byte, so that no plan is left out.
        warnings: Warnings to put first.

    Raises:
        UsageError: `points` or `memory_step` is out of range, or a robust plan is asked for.
        InfeasibleError: Nothing fits.
    """
    if points < 1:
        raise UsageError(f"points={points}: must be at least 1", "Give a count of 1 or more.")
    if not 0 <= memory_step < 1:
        raise UsageError(f"memory_step={memory_step:g}: must be from 0 to below 1", "Use for example 0.02.")
    if problem.options.robust:
        raise UsageError(
            f"`{problem.options.robust_field}` with `frontier`: a frontier compares steps of the medians",
            "Omit one of the two.",
        )
    optima, complete, problem = list[tuple[ScoredPlan, SearchResult]](), False, problem.with_time_limit()
    for result in _stepping_down(problem, memory_step):
        if result.best is None:
            complete = problem.options.planner == BEST and result.exact
            break
        while optima and result.best.step_seconds <= optima[-1][0].step_seconds * (1 + TIE):
            optima.pop()
        if len(optima) == points:
            break
        optima.append((result.best, result))
    if not optima:
        raise no_plan_fits(problem)
    all_points = [_point(problem, *optimum, model, profile) for optimum in optima]
    texts = [
        *warnings,
        *list_machine_warnings(problem),
        *list_search_warnings(problem, exact=complete and all(point.exact for point in all_points)),
        *(text for point in all_points for text in point.plan.warnings),
    ]
    return Frontier(
        model=model,
        points=all_points,
        complete=complete,
        memory_step=memory_step,
        warnings=list(dict.fromkeys(texts)),
    )


def _stepping_down(problem: Problem, memory_step: float) -> Iterator[SearchResult]:
    """Yield the fastest plans under decreasing memory limits, until nothing fits."""
    result, seeds = find_best_plan(problem).result, []
    yield result
    while result.best is not None:
        peak = peak_bytes(problem.space, result.best)
        seeds.append(result.best)
        limit = min(peak - 1, peak * (1 - memory_step))
        if limit <= 0:
            return
        result = search_again(with_memory_limit(problem, limit), seeds[-SEEDS:])
        yield result


def _point(
    problem: Problem, best: ScoredPlan, result: SearchResult, model: str, profile: ProfileReference
) -> Point:
    """Return the frontier point of a plan."""
    plan = plan_without_comparison(problem, best, result, model=model, profile=profile)
    outside = list_prediction_limits(assemble(problem.space, best.proposal, best.recompute))
    return Point(
        step_seconds=best.step_seconds,
        memory_bytes=ceil(peak_bytes(problem.space, best)),
        exact=result.exact,
        plan=plan.model_copy(update={"warnings": list(outside)}),
    )
