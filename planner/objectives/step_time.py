"""The shortest step: what `find` searches; and, where it is wished, the shortest in nearly all cases."""

from __future__ import annotations

from ...cost_models.quantities import counted, format_seconds
from ..joint_search import find
from ..plan_file import Aim
from ..problem import Problem
from ..robust.choice import Robust, check_known, most_robust
from .objective_result import ObjectiveResult, of_fastest


def step_time(problem: Problem) -> ObjectiveResult:
    """The fastest plan; with `PlanOptions.robust`, of those near it the one with the best 90th percentile.

    Raises UsageError where the profile does not tell how the layers' seconds vary.
    """
    if problem.wishes.robust:
        check_known(problem)
    answer = find(problem)
    if not problem.wishes.robust or answer.best is None:
        return ObjectiveResult(answer.found, answer)
    chosen = most_robust(problem, answer)
    aim = Aim(
        name="robust",
        value=chosen.high_seconds,
        unit="seconds",
        lower_bound=0.0,
        exact=False,
        detail="the 90th percentile of the step, as the layers' seconds vary",
    )
    note = _note(chosen, answer.best.step_seconds)
    return ObjectiveResult(of_fastest(problem, answer.found, chosen.plan), answer, aim, (note,))


def _note(chosen: Robust, fastest_seconds: float) -> str:
    """How many were compared, and what the fastest has to say for itself."""
    compared = f"compared at the 90th percentile of their step: {counted(chosen.compared, 'plan')}"
    high = format_seconds(chosen.fastest_high_seconds)
    if chosen.is_fastest:
        return f"{compared}; the fastest plan is the best there, too, with {high}"
    own = format_seconds(chosen.high_seconds)
    fastest = format_seconds(fastest_seconds)
    return f"{compared}; this one has {own}, the one that the search for the fastest found ({fastest}) {high}"
