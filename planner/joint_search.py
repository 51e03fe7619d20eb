"""Search for the best plan of a problem, starting from three simple plans, with its proof.

The bound of an answer holds for every plan that the answer was allowed to be. A plan of the searched space
has the search's bound. A plan from outside, such as a planner's on devices in another order, has the
universal one. No bound is lowered to the step of a plan: a step below its bound is a defect and raises an
error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from ..cost_models.errors import DefectError
from .candidate import INTERLEAVED, SEARCHED, UNPROPOSED, Proposal, ScoredPlan, tell_best
from .coverage import is_searched, to_searched_devices
from .plan_file import TIE
from .planners import BASELINES, find_planner
from .planners.base import Planner, refusal_reason
from .problem import Problem
from .scoring import UNFIT, fastest, unfit_reason
from .search.branch_and_bound import SearchResult, search
from .search.budget import WORK_A_SECOND, OutOfTime
from .smallest_plan import fitting_plans, nothing_fits

SEARCH_SHARE = 0.8
"""Share of the time limit's work for the search. The rest is for work that is not counted."""
FOR_SEARCHED = 0.75
"""Share of the time for the exact search if other schedules are searched afterwards."""
FOR_KNOWN = 0.75
"""Share of the time for known schedules if an order is synthesized afterwards."""
MOST_COUNTS = 2
"""Numbers of micro-batches for each of which orders are synthesized alone."""
BEST = "best"
OUT_OF_TIME = "the time limit was reached before it made a plan"
NOT_ALLOWED = "the options allow none of its plans"
PLANNER_SHARE = 0.2
"""Share of the remaining time for the proposals of one planner, and then for their steps."""
SMALL = 1_000
"""Most devices times blocks between cuts of a small problem."""


@dataclass(frozen=True)
class JointSearchResult:
    """Best plan of a problem and what was proven.

    Attributes:
        result: The search's result.
        by_planner: By named planner, its best plan or why it has none.
    """

    result: SearchResult
    by_planner: Mapping[str, ScoredPlan | str]

    @property
    def best(self) -> ScoredPlan | None:
        """The best plan; None if none fits."""
        return self.result.best


def find_best_plan(problem: Problem, planners: Sequence[str] = BASELINES) -> JointSearchResult:
    """Find the best plan of the problem, or of the planner that it names, and the bound on all plans.

    Args:
        problem: What is asked.
        planners: Known planners to compare with. No plan that they propose in time under an allowed schedule
            is faster than the answer.

    Returns:
        The answer. No search runs if memory excludes every plan.

    Raises:
        UsageError: The planner is unknown.
    """
    planner = problem.options.planner
    if nothing_fits(problem):
        return JointSearchResult(SearchResult(None, inf, inf, exact=True), dict.fromkeys(planners, UNFIT))
    if planner != BEST:
        plan = plan_with(find_planner(planner), problem)
        by_name = {planner: plan}
        best = plan if isinstance(plan, ScoredPlan) else None
        return JointSearchResult(with_bound(problem, best, run_search(problem, _plans(by_name))), by_name)
    whole, problem = problem, _with_time_for_orders(problem)
    # For interleaved pipelines, the known planner's proposal is the simple plan.
    simple = (*BASELINES, INTERLEAVED) if problem.schedules == (INTERLEAVED,) else BASELINES
    by_planner = {name: plan_with(find_planner(name), problem) for name in simple}
    seeds = _allowed_plans(problem, by_planner)
    if not seeds and (smallest := _fitting_plan(problem)) is not None:
        seeds = [smallest]
    for plan in seeds:
        tell_best(plan)
    result = joint_search(problem, seeds)
    if problem.makes_orders:
        from .synthesis.synthesize import synthesize  # most problems ask for no order of their own

        result = _faster_of(problem, result, synthesize(whole, result.best, result.other_plans))
        if not result.exact:
            plans = _plans_of(whole, _with_one_count(whole, result))
            result = _faster_of(problem, result, plans)
    references = [name for name in planners if name not in by_planner]
    if references:
        by_planner |= {
            name: plan_with(
                find_planner(name), problem_for_planner(name, problem), required=result.best is None
            )
            for name in references
        }
        result = _faster_of(problem, result, _allowed_plans(problem, by_planner))
    return JointSearchResult(result, {name: by_planner[name] for name in planners})


def _fitting_plan(problem: Problem) -> ScoredPlan | None:
    """Return the fastest of a few plans that need little memory, even if the time is over."""
    proposals = [*fitting_plans(problem)]
    if problem.heuristic_schedules:
        from .other_schedules import propose_small_plans  # most problems have no other schedules

        proposals += propose_small_plans(problem)
    return fastest(problem.space, filter(problem.allows, proposals))


def _with_time_for_orders(problem: Problem) -> Problem:
    """Return the problem with less time if an order is to be synthesized afterwards."""
    if not problem.makes_orders:
        return problem
    budget = problem.budget.part(share=FOR_KNOWN)
    earlier = replace(problem, budget=budget)
    vars(earlier)["space"] = problem.space.within(budget)
    return earlier


def problem_for_planner(planner: str, problem: Problem) -> Problem:
    """Return the problem that a planner is given.

    Interleaved pipelines are allowed for their own planner, even if the options exclude them.
    """
    if planner != INTERLEAVED:
        return problem
    return replace(
        problem, options=replace(problem.options, planner=planner, robust=False, slow_devices=None)
    )


def _with_one_count(problem: Problem, result: SearchResult) -> Iterator[Problem]:
    """Yield the problem with the numbers of micro-batches that good plans have.

    Orders start from the best plan of each known schedule, whatever its number of micro-batches.
    """
    if len({config.micro_batches for config in problem.configs}) == 1:
        return
    plans = [*([] if result.best is None else [result.best]), *result.other_plans]
    for count in list(dict.fromkeys(plan.config.micro_batches for plan in plans))[:MOST_COUNTS]:
        if problem.budget.spent:
            return
        options = replace(problem.options, mini_batch=problem.mini_batch, micro_batches=count)
        yield replace(problem, options=options)


def _allowed_plans(problem: Problem, by_planner: Mapping[str, ScoredPlan | str]) -> list[ScoredPlan]:
    """Return the plans whose schedules the options allow."""
    return [plan for plan in _plans(by_planner) if plan.config.schedule in problem.allowed_schedules]


def _plans_of(problem: Problem, narrower: Iterable[Problem]) -> Iterator[ScoredPlan]:
    """Yield the best plan of each problem that allows a part of this one's plans."""
    for narrower_problem in narrower:
        best = find_best_plan(narrower_problem).best
        if best is not None and problem.allows(best.proposal):
            resolved = fastest(problem.space, [best.proposal])
            if resolved is not None:
                yield resolved


def is_small_problem(problem: Problem) -> bool:
    """Return whether there is time to solve it once more, for other global batches or numbers of stages."""
    return problem.gpus * problem.space.chain.max_stages <= SMALL


def _plans(by_planner: Mapping[str, ScoredPlan | str]) -> list[ScoredPlan]:
    return [plan for plan in by_planner.values() if isinstance(plan, ScoredPlan)]


def _faster_of(problem: Problem, result: SearchResult, plans: Iterable[ScoredPlan]) -> SearchResult:
    """Return the result, or the fastest of the plans with the bound that holds for it, if that is faster."""
    best = min(plans, key=lambda plan: plan.step_seconds, default=None)
    if best is None or (result.best is not None and result.best.step_seconds <= best.step_seconds):
        return result
    return with_bound(problem, best, result)


def plan_with(planner: Planner, problem: Problem, *, required: bool = True) -> ScoredPlan | str:
    """Score the best plan of a known planner under the problem's costs and limits.

    Args:
        planner: The planner.
        problem: What is asked. Once its time is over, only the baselines still propose a plan.
        required: Whether to score one proposal even if the time is over.

    Returns:
        The plan, or why none exists.
    """
    if problem.budget.over and planner.name not in BASELINES:
        return OUT_OF_TIME
    budget = problem.budget.part(share=PLANNER_SHARE)
    proposals, refused = list[Proposal](), list[Proposal]()
    try:
        for proposal in _propose(planner, problem):
            (proposals if problem.allows(proposal) else refused).append(proposal)
            if proposals:
                budget.check()
    except OutOfTime:
        if not proposals:
            return OUT_OF_TIME
    if not proposals:
        violation = next((next(problem.violations(refused_proposal)) for refused_proposal in refused), None)
        return refusal_reason(planner, problem) if violation is None else f"{NOT_ALLOWED}: {violation}"
    budget = problem.budget.part(share=PLANNER_SHARE)
    plan = fastest(problem.space, proposals, budget=budget, required=required)
    if plan is None and not required and budget.over:
        return OUT_OF_TIME
    return plan or unfit_reason(problem.space, proposals)


def _propose(planner: Planner, problem: Problem) -> Iterator[Proposal]:
    """Yield a planner's proposals.

    If first layers may be recomputed, or stages may offload, its usual proposals get that recomputation.
    """
    mode = problem.options.recompute
    if mode not in UNPROPOSED:
        yield from planner.propose(problem)
        return
    whole = replace(problem, options=replace(problem.options, recompute="auto"))
    vars(whole)["space"] = problem.space
    for proposal in planner.propose(whole):
        if proposal.config.schedule in problem.schedules:
            config = proposal.config
            if config.recompute != "except_last":
                proposal = replace(proposal, config=replace(config, recompute=mode))
            yield proposal


def joint_search(problem: Problem, seeds: Iterable[ScoredPlan] = ()) -> SearchResult:
    """Search from some plans, also under other schedules.

    Args:
        problem: What is asked.
        seeds: Plans to start from.

    Returns:
        The fastest plan, and the bound on all allowed plans.
    """
    seeds = [_to_searched_devices(problem, seed) for seed in seeds]
    result = run_search(problem, seeds)
    earlier = [*seeds, *([] if result.best is None else [result.best])]
    limit, other_schedules = (
        min((plan.step_seconds for plan in earlier), default=inf),
        problem.heuristic_schedules,
    )
    more = list[ScoredPlan]()
    if other_schedules:
        from .other_schedules import search_other_schedules  # most problems have no other schedules

        near, cut = search_other_schedules(problem, other_schedules, seeds, result.best, limit)
        more = [*near, *([] if cut.best is None else [cut.best])]
        result = replace(result, other_bound=cut.bound_seconds, other_plans=cut.plans)
    # Among equally fast plans, that of the searched space wins.
    best = result.best
    for plan in sorted((*seeds, *more), key=lambda plan: plan.step_seconds):
        if best is None or plan.step_seconds < best.step_seconds * (1 - TIE):
            best = plan
    return with_bound(problem, best, result)


def _to_searched_devices(problem: Problem, plan: ScoredPlan) -> ScoredPlan:
    """Return the plan on equivalent devices that the search covers, if there are some."""
    return replace(plan, proposal=to_searched_devices(problem, plan.proposal))


def with_bound(problem: Problem, best: ScoredPlan | None, result: SearchResult) -> SearchResult:
    """Return a plan as the answer, with the bound that a search result proves for it.

    Args:
        problem: What is asked.
        best: The plan. None if none exists.
        result: The search result.

    Raises:
        DefectError: The plan is below a bound that must hold for it.
    """
    if best is None:
        return replace(result, best=None, exact=result.exact and result.bound_seconds == inf)
    best = _to_searched_devices(problem, best)
    step, name = best.step_seconds, best.config.schedule
    inside = is_searched(problem, best.proposal) or (name not in SEARCHED and problem.may_run(name))
    universal = result.universal or not inside or not problem.families
    bound = _bound_of_allowed(problem, result, step, universal=universal)
    if bound > step * (1 + TIE):
        raise DefectError(
            f"a plan of {step!r} s is below its bound of {bound!r} s: {best.config}, stages end at "
            f"{best.proposal.ends}, devices {best.proposal.devices}"
        )
    exact = bound >= step * (1 - TIE)
    root = min(bound, result.root_bound_seconds)
    bound = step if exact else bound
    return replace(
        result, best=best, bound_seconds=bound, root_bound_seconds=root, exact=exact, universal=universal
    )


def without_plan(problem: Problem, result: SearchResult) -> SearchResult:
    """Return what a search without a plan that fits has proven.

    Its bound covers all allowed plans, including those under schedules that it does not search; inf if it is
    proven that none fits.
    """
    universal = result.universal or not problem.families
    bound = _bound_of_allowed(problem, result, inf, universal=universal)
    return replace(result, best=None, bound_seconds=bound, exact=bound == inf, universal=universal)


def _bound_of_allowed(problem: Problem, result: SearchResult, step: float, *, universal: bool) -> float:
    """Return the bound on plans of all allowed schedules and synthesized orders.

    It is that of the search, or the universal one for plans that the search does not cover.
    """
    bound, other_schedules = result.bound_seconds, problem.heuristic_schedules
    if not (universal or other_schedules):
        return bound
    from .universal_bound import universal_bound  # most problems do not need it

    if universal:
        searched = [name for name in problem.allowed_schedules if name not in other_schedules]
        bound = universal_bound(problem, searched, step)
    if not other_schedules:
        return bound
    if result.other_bound is None or problem.makes_orders:
        return min(bound, universal_bound(problem, other_schedules, step))
    return min(bound, result.other_bound)


def run_search(problem: Problem, seeds: Iterable[ScoredPlan] = (), work: float | None = None) -> SearchResult:
    """Search the schedules that `search` covers.

    Args:
        problem: What is asked.
        seeds: Plans to start from.
        work: Counted work, see `SearchBudget`. Defaults to a share of the time limit.
    """
    work = SEARCH_SHARE * problem.options.time_limit * WORK_A_SECOND if work is None else work
    seeds = [plan for plan in seeds if plan.config.schedule in SEARCHED]
    space = problem.space
    if problem.heuristic_schedules:
        space = space.within(problem.budget.part(share=FOR_SEARCHED))
    return search(space, problem.families, problem.stage_counts, seeds, work, deeper=problem.may_be_deeper)
