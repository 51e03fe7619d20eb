"""From a problem and an objective to a plan file."""

from __future__ import annotations

from collections.abc import Sequence

from ..candidate import Candidate
from ..infeasible import no_plan_fits
from ..plan_file import Plan, ProfileReference
from ..problem import Problem
from ..search.branch_and_bound import Found
from ..solve import bare_plan, plan_of
from .asynchronous import ASYNCHRONOUS, steady_bubble, steady_stages
from .cost import least_cost
from .memory import least_memory
from .objective import COST, MEMORY, THROUGHPUT, Objective
from .outcome import Outcome
from .step_time import step_time
from .throughput import throughput


def best_for(objective: Objective, problem: Problem) -> Outcome:
    """What the objective comes to. Raises UsageError."""
    if objective.name == THROUGHPUT:
        return throughput(problem)
    if objective.name == MEMORY:
        return least_memory(problem, objective.slack)
    if objective.name == COST:
        return least_cost(problem, objective.prices)
    return step_time(problem)


def solve_for(
    objective: Objective,
    problem: Problem,
    *,
    model: str,
    profile: ProfileReference,
    notes: Sequence[str] = (),
    compared: bool = True,
) -> Plan:
    """The best plan for the objective; `compared` with others as any plan is, which takes longer.

    Raises UsageError, and InfeasibleError where nothing fits.
    """
    outcome = best_for(objective, problem)
    if outcome.best is None:
        raise no_plan_fits(problem)
    own = plan_alone(problem, outcome.best, outcome.found, model=model, profile=profile)
    shown = own
    if compared and outcome.answer.best is not None:
        shown = plan_of(problem, outcome.answer, model=model, profile=profile, notes=notes)
        if outcome.best == outcome.answer.best and outcome.aim is None and not outcome.notes:
            return shown
    searched = problem.searched()
    if objective.name == THROUGHPUT:
        searched += f"; and {' and '.join(ASYNCHRONOUS)} of two stages or more"
    return own.model_copy(
        update={
            "objective": outcome.aim,
            "searched": searched,
            "baselines": shown.baselines,
            "alternatives": shown.alternatives,
            "notes": list(dict.fromkeys([*outcome.notes, *(shown.notes or notes)])),
        }
    )


def plan_alone(
    problem: Problem, best: Candidate, found: Found, *, model: str, profile: ProfileReference
) -> Plan:
    """A candidate as a plan, without what it is compared with; of an asynchronous one in its steady state."""
    plan = bare_plan(problem, best, found, model=model, profile=profile)
    if best.setting.schedule not in ASYNCHRONOUS:
        return plan
    bubble = plan.prediction.model_copy(update={"bubble": steady_bubble(problem.space, best)})
    return plan.model_copy(update={"stages": steady_stages(problem.space, best), "prediction": bubble})
