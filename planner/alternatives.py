"""Comparison plans: simpler baselines, and the best plans for runtimes that cannot run the answer.

All are computed with the same costs and limits as the answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..cost_models.errors import UsageError
from ..cost_models.memory import recompute_kinds
from ..cost_models.precision import step_kernels
from ..cost_models.quantities import format_count, format_seconds
from ..cost_models.runtime import RUNTIMES, Runtime
from .candidate import ANY_SCHEDULE, INTERLEAVED, SEARCHED, ScoredPlan, watching_best
from .joint_search import OUT_OF_TIME, JointSearchResult, plan_with, problem_for_planner, run_search
from .plan_file import Baseline, PlanRow, plan_row, run_in_words
from .plan_simulation import plan_stages, shared_weights
from .planners import BASELINES, find_planner
from .problem import Problem
from .scoring import fastest
from .search.branch_and_bound import is_large
from .search.space import divide_batch

WORK = 3e8
"""Counted work of each search, see `SearchBudget`."""
CUT_SHORT = "the time limit ended its search"
"""Reason of an alternative whose search hit the time limit."""
WORTH, DOUBLINGS = 0.05, 4
"""Share of the step that larger micro-batches than the profile's must save, and most doublings to try."""


def find_alternatives(problem: Problem, answer: JointSearchResult) -> list[PlanRow]:
    """Return the best plan for each kind of runtime, and the best interleaved plan.

    The interleaved plan is listed only if the schedule was left open, because it is not searched. The list is
    empty if a named planner was asked for, or if the problem is too large to solve it once more per runtime.

    Args:
        problem: What is asked.
        answer: The best plan of the problem.
    """
    if problem.options.planner != "best" or is_large(problem.space, problem.families):
        return []
    with watching_best(None):
        return [*_runtime_alternatives(problem, answer), *_interleaved_alternatives(problem, answer)]


def _runtime_alternatives(problem: Problem, answer: JointSearchResult) -> Iterator[PlanRow]:
    """Yield the best plan for each kind of runtime. Each search starts from the plans found so far."""
    plans = [plan for plan in (answer.best, *answer.by_planner.values()) if isinstance(plan, ScoredPlan)]
    for names in _kinds(problem):
        plan, alternative = _for_runtimes(problem, answer, names, plans)
        plans += [] if plan is None else [plan]
        if alternative is not None:
            yield alternative


def _for_runtimes(
    problem: Problem, answer: JointSearchResult, names: list[str], starts: Sequence[ScoredPlan]
) -> tuple[ScoredPlan | None, PlanRow | None]:
    """Return the best plan of runtimes that allow the same plans, as searched and as a row in rank order."""
    runtime_problem = _for_runtime(problem, names[0], _schedule(problem, RUNTIMES[names[0]]))
    if runtime_problem is None or not runtime_problem.families:
        return None, None
    # The proof of the answer holds for its runtime and precision only. A fused optimizer step needs less
    # memory, so that other plans may fit.
    same_runtime = (
        problem.options.runtime in (None, names[0]) and runtime_problem.precision == problem.precision
    )
    answers = same_runtime and _answers(runtime_problem, answer)
    result = answer.result if answers else run_search(runtime_problem, _starts(runtime_problem, starts), WORK)
    plan = None if result.best is None else _in_rank_order(runtime_problem, result.best)
    if plan is None:
        return result.best, None
    exact = result.exact and plan == result.best
    reason = CUT_SHORT if runtime_problem.budget.over and not result.exact else ""
    return result.best, _alternative(runtime_problem, plan, names, exact=exact, reason=reason)


def _starts(problem: Problem, plans: Sequence[ScoredPlan]) -> list[ScoredPlan]:
    """Return plans to start the search of a runtime from.

    The fastest of `plans`, as the problem's runtime runs them; and the baselines if that plan leaves devices
    idle.
    """
    proposals = [
        replace(plan.proposal, config=replace(plan.config, recompute=mode), devices=_in_order(plan))
        for plan in sorted(plans, key=lambda plan: plan.step_seconds)
        for mode in problem.modes(plan.config.schedule)
        if plan.config.virtual_stages == 1 and plan.config.schedule in SEARCHED
    ]
    best = fastest(problem.space, [proposal for proposal in proposals if problem.allows(proposal)])
    if best is not None and best.proposal.device_count == problem.usable_gpus:
        return [best]
    starts = [best, *(plan_with(find_planner(name), problem) for name in BASELINES)]
    return [plan for plan in starts if isinstance(plan, ScoredPlan)]


def _in_rank_order(problem: Problem, best: ScoredPlan) -> ScoredPlan | None:
    """Return the plan on devices from rank 0 on, as a runtime assigns them to its stages.

    A plan that leaves devices free between its stages has another step there, and may not fit. None if it
    does not fit.
    """
    devices = _in_order(best)
    if best.config.virtual_stages > 1 or best.proposal.devices == devices:
        return best
    return fastest(problem.space, [replace(best.proposal, devices=devices)])


def _schedule(problem: Problem, runtime: Runtime) -> str:
    """Return the schedule option for a runtime: its only searched schedule, or auto if it has several.

    Schedules that are not searched have no proof.
    """
    if problem.options.schedule != "auto":
        return problem.options.schedule
    names = [name for name in SEARCHED if name in runtime.schedules]
    return names[0] if len(names) == 1 else "auto"


def _interleaved_alternatives(problem: Problem, answer: JointSearchResult) -> Iterator[PlanRow]:
    """Yield the plan of the planner `interleaved` for the runtimes that can run it.

    It is yielded if the schedule was left open and the plan fits. It is a proposal and not searched. Runtimes
    with the same memory needs share a row.
    """
    if answer.best is None or INTERLEAVED in problem.schedules or problem.budget.over:
        return
    plan = plan_with(find_planner(INTERLEAVED), problem_for_planner(INTERLEAVED, problem))
    if not isinstance(plan, ScoredPlan):
        return
    kinds: dict[tuple[bool, str], list[str]] = {}
    for name, runtime in RUNTIMES.items():
        if (
            INTERLEAVED in runtime.schedules
            and runtime.trains(problem.precision.name, problem.options.zero)
            and _recomputes(runtime, plan)
            and _keeps_weights(runtime, problem, plan)
        ):
            kinds.setdefault((runtime.receives_ahead, step_kernels(problem.device, name)), []).append(name)
    for names in kinds.values():
        runtime_problem = _for_runtime(problem, names[0], INTERLEAVED)
        runtime_plan = None if runtime_problem is None else fastest(runtime_problem.space, [plan.proposal])
        if runtime_problem is None or runtime_plan is None or runtime_plan.recompute != plan.recompute:
            continue
        reason = f"a heuristic's proposal: schedule={ANY_SCHEDULE!r} searches for better ones"
        yield _alternative(runtime_problem, runtime_plan, names, exact=False, reason=reason)


def _for_runtime(problem: Problem, name: str, schedule: str) -> Problem | None:
    """Return the problem for a runtime; None if its options leave nothing that the runtime can run."""
    try:
        options = replace(
            problem.options,
            runtime=name,
            schedule=schedule,
            precision=problem.precision.name,
            gradient_dtype=problem.precision.gradient_dtype,
        )
        runtime_problem = replace(problem, options=options)
        runtime_problem.space  # noqa: B018  raises if the options cut between layers that the runtime keeps together
    except UsageError:
        return None
    return runtime_problem


def _keeps_weights(runtime: Runtime, problem: Problem, plan: ScoredPlan) -> bool:
    """Return whether the runtime trains the weights that the plan's stages share."""
    last = len(plan.proposal.ends) - 1
    return all(runtime.shares_weight(weight.stages, last) for weight in shared_weights(problem.space, plan))


def _recomputes(runtime: Runtime, plan: ScoredPlan) -> bool:
    """Return whether the runtime recomputes as the plan's stages do."""
    return runtime.recomputes(plan.recompute, recompute_kinds(plan.recompute))


def _answers(runtime_problem: Problem, answer: JointSearchResult) -> bool:
    """Return whether the answer is proven to be the best plan of the runtime, too."""
    best, runtime = answer.best, runtime_problem.runtime
    if best is None or runtime is None or not answer.result.exact or runtime.one_process:
        return False
    if best.config.schedule not in SEARCHED:
        return False  # the search for the runtime does not cover this schedule
    if not _recomputes(runtime, best) or not runtime_problem.allows(best.proposal):
        return False
    if runtime.receives_ahead and fastest(runtime_problem.space, [best.proposal]) != best:
        return False  # its buffers do not fit, or not without recomputation
    in_order = best.proposal.devices == _in_order(best)
    cut_points = list(runtime_problem.space.table(runtime_problem.chain.sizes[0]).cut_points)
    if not set(cut_points).issuperset(best.proposal.ends):
        return False  # it keeps the users of a weight together
    stages = [(cut_points.index(first), cut_points.index(end)) for first, end in best.proposal.bounds]
    return in_order and all(runtime_problem.space.usable[stage] for stage in stages)


def _in_order(best: ScoredPlan) -> tuple[tuple[int, ...], ...]:
    """Return the devices of the stages, renumbered from rank 0 on."""
    ranks = iter(range(best.proposal.device_count))
    return tuple(tuple(next(ranks) for _ in stage_ranks) for stage_ranks in best.proposal.devices)


def _kinds(problem: Problem) -> list[list[str]]:
    """Return the names of the runtimes that train with the problem's precision and ZeRO stage.

    Runtimes in one list allow the same plans, so one search serves them all.
    """
    kinds: dict[tuple[Runtime, str], list[str]] = {}
    for name, runtime in RUNTIMES.items():
        run_search = runtime.schedules & set(SEARCHED)
        key = replace(
            runtime,
            name="",
            schedules=frozenset(run_search),
            virtual_stages=False,
            shares_layers=False,
            zero=frozenset(),
            no_zero="",
            no_tied="",
            own_optimizer=False,
        )
        trains = runtime.trains(problem.precision.name, problem.options.zero)
        if trains and run_search:
            kinds.setdefault((key, step_kernels(problem.device, name)), []).append(name)
    return list(kinds.values())


def _alternative(
    problem: Problem, plan: ScoredPlan, runtimes: list[str], *, exact: bool, reason: str = ""
) -> PlanRow:
    """Return the row of an alternative plan."""
    memory = [stage.memory_bytes for stage in plan_stages(problem.space, plan)]
    return plan_row(plan, runtimes=runtimes, memory_bytes=memory, exact=exact, reason=reason)


FREE = ("one-gpu", "data-parallel")
"""Baselines that ignore the options: they may use any micro-batches and any runtime."""


def score_baselines(problem: Problem, answer: JointSearchResult) -> dict[str, ScoredPlan | str]:
    """Return one GPU, data parallelism and the best plan of each named planner, or why none exists.

    Args:
        problem: What is asked.
        answer: The answer, with the plans of the named planners.

    Returns:
        By name, the plan or the reason.
    """
    if problem.budget.over:
        results = {name: answer.by_planner.get(name, OUT_OF_TIME) for name in FREE}
    else:
        free = accumulating(problem)
        results = {name: plan_with(find_planner(name), free) for name in FREE}
    return results | {name: plan for name, plan in answer.by_planner.items() if name not in FREE}


def accumulating(problem: Problem) -> Problem:
    """Return the problem of one GPU, or of data parallelism, that accumulates gradients as it likes.

    Options that restrict the plan are dropped. The requested number of micro-batches is kept if the profile
    allows no other.
    """
    options = problem.options
    free = replace(
        options,
        mini_batch=problem.mini_batch,
        micro_batches=None,
        schedule="1f1b",
        recompute="auto",
        runtime=None,
        precision=problem.precision.name,
        gradient_dtype=problem.precision.gradient_dtype,
        use_all=False,
        max_stages=None,
        cut_after=(),
        pins=(),
    )
    try:
        return replace(problem, options=free)
    except UsageError:
        return replace(problem, options=replace(free, micro_batches=options.micro_batches))


def baseline_row(name: str, plan: ScoredPlan | str) -> Baseline:
    """Return a baseline as a row of the plan's file."""
    if isinstance(plan, str):
        return Baseline(name=name, step_seconds=None, reason=plan)
    return Baseline(name=name, step_seconds=plan.step_seconds, detail=_in_words(plan))


def _in_words(plan: ScoredPlan) -> str:
    """Return the stages and replicas, if there are several, and how the plan runs."""
    replicas, run = plan.proposal.replicas, run_in_words(plan)
    stages = format_count(len(replicas) // plan.config.virtual_stages, "stage")
    if max(replicas) > 1:
        return f"{stages}, replicas {'-'.join(map(str, replicas[:16]))}; {run}"
    return f"{stages}; {run}" if len(replicas) > 1 else run


def larger_micro_batches(problem: Problem, best: ScoredPlan) -> list[str]:
    """Return a warning if larger micro-batches than the profile holds would be faster and fit.

    The stages stay the same. Costs are extrapolated by the straight line through the two largest sizes. The
    search never extrapolates.
    """
    sizes, config = problem.chain.sizes, best.config
    if problem.options.micro_batches is not None or len(sizes) == 1 or config.schedule not in SEARCHED:
        return []
    replicas = min(best.proposal.replicas)
    larger = [
        replace(config, micro_batches=config.micro_batches // times, micro_batch_size=size)
        for times in (2**power for power in range(1, DOUBLINGS + 1))
        if config.micro_batches % times == 0
        and divide_batch(size := config.micro_batch_size * times, replicas) > sizes[-1]
    ]
    space, limit = replace(problem.space, past_largest=True), best.step_seconds * (1 - WORTH)
    plan = fastest(
        space,
        [replace(best.proposal, config=larger_config) for larger_config in larger],
        limit,
        required=False,
    )
    if plan is None:
        return []
    step = plan.step_seconds
    return [
        f"the profile measured at most {format_count(sizes[-1], 'sample')} per micro-batch: with "
        f"{divide_batch(plan.config.micro_batch_size, replicas)} (extrapolated) these stages would take "
        f"{format_seconds(step)} a step, {best.step_seconds / step:.3g} x faster; profile with larger "
        "`micro_batch_sizes`"
    ]
