"""Plan files from a problem and an objective.

Code for a single objective is imported when it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ...cost_models.errors import UsageError
from ...cost_models.quantities import format_count, format_seconds, percent
from ..asynchronous import WPIPE
from ..build_plan import LEAST_SAMPLES, build_plan, unique
from ..candidate import UNPROPOSED, ScoredPlan
from ..coverage import describe_order
from ..infeasible import no_plan_fits
from ..joint_search import BEST, find_best_plan, with_bound
from ..mini_batch import choose_mini_batch, smaller_defaults
from ..plan_file import Aim, Plan, ProfileReference
from ..problem import Problem
from ..scoring import fastest
from .objective import COST, MEMORY, STEP_TIME, THROUGHPUT, Objective
from .objective_result import ObjectiveResult

if TYPE_CHECKING:
    from ..robust import DrawnSteps, RobustPlan


def _additional_space(objective: Objective, problem: Problem) -> str:
    """Describe what an objective adds to the searched space.

    Asynchronous plans are searched along orders of the devices, even if the bound on the others holds for
    any.
    """
    if objective.name == COST:
        return "; each on the first devices by rank, or on those of one kind"
    if objective.name != THROUGHPUT:
        return ""
    from .throughput import asynchronous_names

    order = f", {words}" if (words := describe_order(problem)) else ""
    names = asynchronous_names(problem)
    lines = [name for name in names if name != WPIPE]
    pairs = f", and {WPIPE} on the first devices of these orders, with as many replicas of every stage"
    late = f"; and {', '.join(lines[:-1])} and {lines[-1]} of two stages or more{order}"
    return late + (pairs if WPIPE in names else "")


def optimize(objective: Objective, problem: Problem) -> ObjectiveResult:
    """Find the best plan for the objective.

    Raises:
        UsageError: The options do not combine with the objective.
    """
    if problem.options.robust and objective.name != STEP_TIME:
        raise UsageError(
            f"`{problem.options.robust_field}` with objective={objective.name!r}: it needs the step time",
            "Omit one of the two.",
        )
    if objective.name == THROUGHPUT:
        mode = problem.options.recompute
        if mode in UNPROPOSED:
            raise UsageError(
                f"recompute={mode!r} with objective={THROUGHPUT!r}: it is only searched for 1f1b and gpipe",
                "Omit one of the two.",
            )
        from .throughput import throughput

        return throughput(problem)
    if objective.name == MEMORY:
        from .least_memory import least_memory

        return least_memory(problem, objective.slack)
    if objective.name == COST:
        from .least_cost import least_cost

        return least_cost(problem, objective.prices)
    return step_time(problem)


def solve_objective(
    objective: Objective,
    problem: Problem,
    *,
    model: str,
    profile: ProfileReference,
    notes: Sequence[str] = (),
    warnings: Sequence[str] = (),
    compared: bool = True,
) -> Plan:
    """Build the best plan for the objective.

    Args:
        objective: The objective.
        problem: What is asked.
        model: Name of the model.
        profile: The profile from which the plan is made.
        notes: Notes to put first.
        warnings: Warnings to put first.
        compared: Whether to add baselines and alternatives, which takes longer.

    Raises:
        UsageError: The options do not combine with the objective.
        InfeasibleError: Nothing fits.
    """
    first = problem.with_time_limit()
    for problem in (first, *smaller_defaults(first)):
        outcome = optimize(objective, problem)
        if (best := outcome.best) is not None:
            break
    else:
        raise no_plan_fits(first)
    if problem is not first:
        samples, batch = first.samples_per_device, first.mini_batch
        smaller = f"the global batch is {problem.mini_batch}, not {batch}"
        warnings = [*warnings, f"no plan with {samples} samples a device fits: {smaller}"]
    plan = build_plan(
        problem,
        best,
        outcome.result,
        outcome.answer if compared and outcome.answer.best is not None else None,
        model=model,
        profile=profile,
        notes=notes,
        warnings=warnings,
        exact=outcome.result.exact if outcome.aim is None else outcome.aim.exact,
    )
    added_space, prediction = _additional_space(objective, problem), plan.prediction
    if objective.name == THROUGHPUT:
        from .throughput import asynchronous_refusal

        if not asynchronous_refusal(problem):
            covers = {"bound_covers": prediction.bound_covers + added_space}
            prediction = prediction.model_copy(update=covers)
    default = plan.default_mini_batch
    if compared and outcome.aim is None:
        default = choose_mini_batch(problem, try_others=True)
    return plan.model_copy(
        update={
            "prediction": prediction,
            "objective": outcome.aim,
            "searched": plan.searched + added_space,
            "notes": unique([*outcome.notes, *plan.notes]),
            "default_mini_batch": default,
        }
    )


def step_time(problem: Problem) -> ObjectiveResult:
    """Find the fastest plan, or its stages with larger micro-batches for batch norms.

    See `fill_batch_norms` for the latter. With `PlanOptions.robust`, the result is the most robust plan near
    the fastest one.

    Raises:
        UsageError: A robust plan is asked for and nothing varies.
    """
    if not problem.options.robust:
        answer = find_best_plan(problem)
        larger = None if answer.best is None else fill_batch_norms(problem, answer.best)
        if larger is None or answer.best is None:
            return ObjectiveResult(answer.result, answer)
        result = with_bound(problem, larger, answer.result)
        return ObjectiveResult(result, answer, notes=(_norm_note(answer.best, larger),))
    from ..robust import check_known, most_robust

    check_known(problem)
    answer = find_best_plan(problem)
    if answer.best is None:
        return ObjectiveResult(answer.result, answer)
    robust = most_robust(problem, answer)
    note = _note(problem, robust, answer.best.step_seconds)
    return ObjectiveResult(
        with_bound(problem, robust.plan, answer.result), answer, _robust_aim(problem, robust), (note,)
    )


NORM_COST = 0.02
"""Share by which a step may be longer, so that batch norms get `LEAST_SAMPLES`."""


def fill_batch_norms(problem: Problem, best: ScoredPlan) -> ScoredPlan | None:
    """Find larger micro-batches for a plan whose batch norms normalise few samples.

    Args:
        problem: Problem in which the search chooses the number of micro-batches.
        best: Fastest plan of the problem.

    Returns:
        The fastest plan with the same stages in which every replica gets `LEAST_SAMPLES` samples of a
        micro-batch, or else the most samples, if its step is at most `NORM_COST` longer. None if no such
        plan exists or none is needed.
    """
    config, most = best.config, max(best.proposal.replicas)
    least_samples = min(LEAST_SAMPLES, problem.mini_batch)
    options = problem.options
    is_free = options.micro_batches is None and options.min_micro_batch is None and options.planner == BEST
    if not (is_free and problem.chain.batch_norms and config.micro_batch_size // most < least_samples):
        return None
    larger = [
        replace(config, micro_batches=problem.mini_batch // size, micro_batch_size=size)
        for size in problem.sizes
        if size > config.micro_batch_size
    ]
    proposals = [replace(best.proposal, config=larger_config) for larger_config in larger]
    allowed = [proposal for proposal in proposals if problem.allows(proposal)]
    limit = best.step_seconds * (1 + NORM_COST)
    plans = [fastest(problem.space, [proposal], limit, required=False) for proposal in allowed]
    return max(
        (plan for plan in plans if plan is not None),
        key=lambda plan: (min(plan.config.micro_batch_size // most, least_samples), -plan.step_seconds),
        default=None,
    )


def _norm_note(best: ScoredPlan, larger: ScoredPlan) -> str:
    """Return a note on how much slower the plan with larger micro-batches is."""
    cost, samples = larger.step_seconds / best.step_seconds - 1, larger.config.micro_batch_size
    return (
        f"micro-batches of {samples} samples, for the batch norms: {percent(cost)} slower than the fastest "
        f"plan, with {best.config.micro_batch_size}, which min_micro_batch=1 gives"
    )


def _robust_aim(problem: Problem, robust: RobustPlan) -> Aim:
    """Return the value of a robust plan."""
    from ..robust import DEVICE_SAMPLES

    slow = problem.options.slow_devices
    return Aim(
        name="robust" if slow is None else "slow-devices",
        value=robust.steps.high_seconds if slow is None else robust.steps.mean_seconds,
        unit="seconds",
        lower_bound=0.0,
        exact=False,
        detail="the 90th percentile of the step, as the layers' seconds vary"
        if slow is None
        else f"the mean step of {DEVICE_SAMPLES:,} draws in which each device, with a probability of "
        f"{100 * slow[0]:.3g} %, takes {slow[1]:.3g} times as long",
    )


def _note(problem: Problem, robust: RobustPlan, fastest_seconds: float) -> str:
    """Return a note on the number of compared plans, and the steps of the chosen and of the fastest plan."""
    what = "at the 90th percentile of" if problem.options.slow_devices is None else "by the mean of"

    def figures(steps: DrawnSteps) -> str:
        high = format_seconds(steps.high_seconds)
        if problem.options.slow_devices is None:
            return high
        return f"{format_seconds(steps.mean_seconds)} (90th percentile {high})"

    compared = f"compared {what} their step: {format_count(robust.compared, 'plan')}"
    high = figures(robust.fastest_steps)
    if robust.is_fastest:
        return f"{compared}; the fastest plan is also the best of these, with {high}"
    robust_step, fastest = figures(robust.steps), format_seconds(fastest_seconds)
    return (
        f"{compared}; this one has {robust_step}, the one that the search for the fastest found "
        f"({fastest}) {high}"
    )
