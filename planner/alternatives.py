"""What a plan is compared with: simpler baselines, and the best plans for runtimes that cannot run it.

All have the same costs and limits as the plan.
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
WORTH, DOUBLINGS = 0.05, 4
"""Share of the step that larger micro-batches than the profile holds must save, and how often they double."""


def find_alternatives(problem: Problem, answer: JointSearchResult) -> list[PlanRow]:
    """The best plan for the runtimes of each kind; and, where the schedule was left open, the best
    interleaved one, which is not searched. None where the plan was asked of a named planner,
    or the problem is too large to solve it again for each."""
    if problem.options.planner != "best" or is_large(problem.space, problem.families):
        return []
    with watching_best(None):
        return [*_runtime_alternatives(problem, answer), *_interleaved_alternatives(problem, answer)]


def _runtime_alternatives(problem: Problem, answer: JointSearchResult) -> Iterator[PlanRow]:
    """The best plan for the runtimes of each kind. Each search starts from the plans found before it."""
    plans = [plan for plan in (answer.best, *answer.by_planner.values()) if isinstance(plan, ScoredPlan)]
    for names in _kinds(problem):
        plan, alternative = _for_runtimes(problem, answer, names, plans)
        plans += [] if plan is None else [plan]
        if alternative is not None:
            yield alternative


def _for_runtimes(
    problem: Problem, answer: JointSearchResult, names: list[str], starts: Sequence[ScoredPlan]
) -> tuple[ScoredPlan | None, PlanRow | None]:
    """The best plan of runtimes that allow the same plans, as it was found and on devices in rank order."""
    own = _for_runtime(problem, names[0], _schedule(problem, RUNTIMES[names[0]]))
    if own is None or not own.families:
        return None, None
    # Of an answer for another runtime it is proven that it is the best that one runs, as that one runs it.
    # Fused steps need less memory: then further plans may fit.
    same_runtime = problem.options.runtime in (None, names[0]) and own.precision == problem.precision
    answers = same_runtime and _answers(own, answer)
    result = answer.result if answers else run_search(own, _starts(own, starts), WORK)
    plan = None if result.best is None else _in_rank_order(own, result.best)
    if plan is None:
        return result.best, None
    exact = result.exact and plan == result.best
    reason = CUT_SHORT if own.budget.over and not result.exact else ""
    return result.best, _alternative(own, plan, names, exact=exact, reason=reason)


def _starts(problem: Problem, plans: Sequence[ScoredPlan]) -> list[ScoredPlan]:
    """The fastest of some plans, as the problem's runtime runs them; and its baselines, if that plan leaves
    devices idle."""
    proposals = [
        replace(plan.proposal, config=replace(plan.config, recompute=mode), devices=_in_order(plan))
        for plan in sorted(plans, key=lambda plan: plan.step_seconds)
        for mode in problem.modes(plan.config.schedule)
        if plan.config.virtual_stages == 1 and plan.config.schedule in SEARCHED
    ]
    best = fastest(problem.space, [one for one in proposals if problem.allows(one)])
    if best is not None and best.proposal.device_count == problem.usable_gpus:
        return [best]
    starts = [best, *(plan_with(find_planner(name), problem) for name in BASELINES)]
    return [plan for plan in starts if isinstance(plan, ScoredPlan)]


def _in_rank_order(problem: Problem, best: ScoredPlan) -> ScoredPlan | None:
    """The plan on the devices from rank 0 on, as a runtime gives them to its stages: one that was found with
    devices left free between its stages takes another time there, and may not fit."""
    devices = _in_order(best)
    if best.config.virtual_stages > 1 or best.proposal.devices == devices:
        return best
    return fastest(problem.space, [replace(best.proposal, devices=devices)])


def _schedule(problem: Problem, runtime: Runtime) -> str:
    """Of several that are searched, auto; of one, that one: the others are not proven."""
    if problem.options.schedule != "auto":
        return problem.options.schedule
    names = [name for name in SEARCHED if name in runtime.schedules]
    return names[0] if len(names) == 1 else "auto"


def _interleaved_alternatives(problem: Problem, answer: JointSearchResult) -> Iterator[PlanRow]:
    """The plan of the planner of that name, where the schedule was left open and it fits: no answer, as it is
    not searched. Runtimes that hold the same for it are together."""
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
        own = _for_runtime(problem, names[0], INTERLEAVED)
        own_plan = None if own is None else fastest(own.space, [plan.proposal])
        if own is None or own_plan is None or own_plan.recompute != plan.recompute:
            continue
        reason = f"a heuristic's proposal: schedule={ANY_SCHEDULE!r} searches such, too"
        yield _alternative(own, own_plan, names, exact=False, reason=reason)


def _for_runtime(problem: Problem, name: str, schedule: str) -> Problem | None:
    """The problem for a runtime; None where its options leave nothing that it runs."""
    try:
        options = replace(
            problem.options,
            runtime=name,
            schedule=schedule,
            precision=problem.precision.name,
            gradient_dtype=problem.precision.gradient_dtype,
        )
        own = replace(problem, options=options)
        own.space  # noqa: B018  raises where the options cut between layers that it keeps together
    except UsageError:
        return None
    return own


def _keeps_weights(runtime: Runtime, problem: Problem, plan: ScoredPlan) -> bool:
    """Whether the runtime trains the weights that the plan's stages share."""
    last = len(plan.proposal.ends) - 1
    return all(runtime.shares_weight(weight.stages, last) for weight in shared_weights(problem.space, plan))


def _recomputes(runtime: Runtime, plan: ScoredPlan) -> bool:
    """Whether the runtime recomputes as the plan's stages do."""
    return runtime.recomputes(plan.recompute, recompute_kinds(plan.recompute))


def _answers(own: Problem, answer: JointSearchResult) -> bool:
    """Whether the best plan of all is proven to be the best that the runtime runs, too."""
    best, runtime = answer.best, own.runtime
    if best is None or runtime is None or not answer.result.exact or runtime.one_process:
        return False
    if best.config.schedule not in SEARCHED:
        return False  # it is none of those that are searched for the runtime
    if not _recomputes(runtime, best) or not own.allows(best.proposal):
        return False
    if runtime.receives_ahead and fastest(own.space, [best.proposal]) != best:
        return False  # its buffers do not fit, or not without recomputation
    in_order = best.proposal.devices == _in_order(best)
    cut_points = list(own.space.table(own.chain.sizes[0]).cut_points)
    if not set(cut_points).issuperset(best.proposal.ends):
        return False  # it keeps the users of a weight together
    stages = [(cut_points.index(first), cut_points.index(end)) for first, end in best.proposal.bounds]
    return in_order and all(own.space.usable[stage] for stage in stages)


def _in_order(best: ScoredPlan) -> tuple[tuple[int, ...], ...]:
    ranks = iter(range(best.proposal.device_count))
    return tuple(tuple(next(ranks) for _ in own) for own in best.proposal.devices)


def _kinds(problem: Problem) -> list[list[str]]:
    """Names of the runtimes that train with the problem's weights and states, those of which the same plans
    are searched together."""
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
    memory = [stage.memory_bytes for stage in plan_stages(problem.space, plan)]
    return plan_row(plan, runtimes=runtimes, memory_bytes=memory, exact=exact, reason=reason)


FREE = ("one-gpu", "data-parallel")
"""Baselines that ignore the options: they may use any micro-batches and any runtime."""


def score_baselines(problem: Problem, answer: JointSearchResult) -> dict[str, ScoredPlan | str]:
    """One GPU, data parallelism, and the best plan of each named planner, or why it has none."""
    if problem.budget.over:
        results = {name: answer.by_planner.get(name, OUT_OF_TIME) for name in FREE}
    else:
        free = accumulating(problem)
        results = {name: plan_with(find_planner(name), free) for name in FREE}
    return results | {name: plan for name, plan in answer.by_planner.items() if name not in FREE}


def accumulating(problem: Problem) -> Problem:
    """What one GPU, or each of many, may do by accumulating gradients, whatever the options; where the
    profile reaches no other micro-batch size, with the requested one."""
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
    """A baseline as a plan's file has it."""
    if isinstance(plan, str):
        return Baseline(name=name, step_seconds=None, reason=plan)
    return Baseline(name=name, step_seconds=plan.step_seconds, detail=_in_words(plan))


def _in_words(plan: ScoredPlan) -> str:
    """Its stages and their replicas, where it has several, and how it runs."""
    replicas, run = plan.proposal.replicas, run_in_words(plan)
    stages = format_count(len(replicas) // plan.config.virtual_stages, "stage")
    if max(replicas) > 1:
        return f"{stages}, replicas {'-'.join(map(str, replicas[:16]))}; {run}"
    return f"{stages}; {run}" if len(replicas) > 1 else run


def larger_micro_batches(problem: Problem, best: ScoredPlan) -> list[str]:
    """A sentence on the same stages with larger micro-batches than the profile holds, which the search leaves
    out: where they would be faster and fit, by the straight line through the two largest sizes."""
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
    plan = fastest(space, [replace(best.proposal, config=own) for own in larger], limit, required=False)
    if plan is None:
        return []
    step = plan.step_seconds
    return [
        f"the profile holds micro-batches of at most {format_count(sizes[-1], 'sample')}: with "
        f"{divide_batch(plan.config.micro_batch_size, replicas)}, extrapolated, these stages would take "
        f"{format_seconds(step)} a step, {best.step_seconds / step:.3g} x faster; `micro_batch_sizes` of "
        "pplan profile adds such sizes"
    ]
