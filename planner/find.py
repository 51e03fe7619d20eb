"""The best plan of a problem: what the named planners propose, and the joint search that starts from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import inf

from ..cost_models.errors import UsageError
from .candidate import Candidate, Planner, Proposal
from .other_schedules import transplanted, work_bound
from .plan_file import TIE
from .planners import PLANNERS, planner_named, refusal
from .problem import Problem
from .scoring import fastest
from .search.branch_and_bound import Found, search
from .search.budget import WORK_A_SECOND, OutOfTime
from .search.large import is_large, search_large
from .search.space import Space
from .setting import SEARCHED

SEARCH_SHARE = 0.6
"""Of the work that the time limit stands for, what the search may do; the rest is for what is not counted."""
BEST, INTERLEAVED = "best", "interleaved"
COSTLY = ("pipedream", "pipedream-published", "dapple", "alpa", "interleaved")
"""Planners that search themselves: where the problem is not small, they are asked only where the joint search
proves less."""
SEARCHING = ("pipedream", "pipedream-published", "dapple", "alpa")
"""Those of them whose plans are of the schedules that the joint search knows."""
SIMPLE = ("one-gpu", "data-parallel", "even")
"""Planners that are asked whatever the time."""
OUT_OF_TIME = "the time limit was reached before it made a plan"
PLANNER_SHARE = 0.2
"""Of the time that is left, what the proposals of one planner may take."""
SMALL = 1_000
"""Devices times blocks between cuts."""


@dataclass(frozen=True)
class Answer:
    """The best plan and what was proven; `by_planner`: what each named planner came to, or why to nothing."""

    found: Found
    by_planner: Mapping[str, Candidate | str]

    @property
    def best(self) -> Candidate | None:
        """The plan, where one fits."""
        return self.found.best


def find(problem: Problem, planners: Iterable[str] = tuple(PLANNERS)) -> Answer:
    """The best plan of the problem, or of the planner that it names, and the bound on all plans.

    No plan of `planners` is faster. Raises UsageError for an unknown planner.
    """
    named = problem.wishes.planner
    if named != BEST:
        plan = planned_by(planner_named(named), problem)
        # The bound is that of the same space as for the best plan, to which the interleaved ones belong.
        own = {named: plan, INTERLEAVED: planned_by(planner_named(INTERLEAVED), problem)}
        found = joint_search(problem, _plans(own))
        return Answer(_of_planner(plan if isinstance(plan, Candidate) else None, found), {named: plan})
    quick = is_small(problem)
    large = is_large(problem.space, problem.families)
    first = [name for name in planners if quick or (name in SIMPLE if large else name not in COSTLY)]
    by_planner = {name: planned_by(planner_named(name), problem) for name in first}
    found = joint_search(problem, _plans(by_planner))
    # Of an exact answer it is proven that no plan of a schedule that was searched is faster.
    others = [name for name in planners if name not in first and not (found.exact and name in SEARCHING)]
    if others:
        by_planner |= {name: planned_by(planner_named(name), problem) for name in others}
        found = _with(found, _plans(by_planner))
    if not found.exact:
        found = _with(found, _on_fewer(problem))
    return Answer(found, by_planner)


def _on_fewer(problem: Problem) -> list[Candidate]:
    """The best plan on the largest power of two of devices below all of them: more devices may not make the
    answer worse, also where it is not proven."""
    if problem.gpus == 1 or problem.wishes.use_all or is_large(problem.space, problem.families):
        return []
    if problem.budget.spent:
        return []
    gpus = 1 << ((problem.gpus - 1).bit_length() - 1)
    wishes = replace(problem.wishes, mini_batch=problem.mini_batch)
    try:
        fewer = replace(problem, topology=problem.topology.with_gpus(gpus), wishes=wishes)
    except UsageError:
        return []  # so few cannot have what is wished
    best = find(fewer).best
    if best is None or not problem.allows(best.proposal):
        return []
    again = fastest(problem.space, [best.proposal])
    return [] if again is None else [again]


def is_small(problem: Problem) -> bool:
    """Whether there is time to ask every planner, and to solve again for every runtime."""
    return problem.gpus * problem.space.chain.max_stages <= SMALL


def _plans(by_planner: Mapping[str, Candidate | str]) -> list[Candidate]:
    return [plan for plan in by_planner.values() if isinstance(plan, Candidate)]


def _with(found: Found, plans: Iterable[Candidate]) -> Found:
    """The answer, unless one of the plans is faster: then that, with the bound that is known."""
    best = min(plans, key=lambda plan: plan.step_seconds, default=None)
    if best is None or (found.best is not None and found.best.step_seconds <= best.step_seconds):
        return found
    bound = min(found.bound_seconds, best.step_seconds)
    return replace(found, best=best, bound_seconds=bound, exact=bound >= best.step_seconds * (1 - TIE))


def _of_planner(plan: Candidate | None, found: Found) -> Found:
    """A named planner's plan with the bound on all plans."""
    bound = min(found.bound_seconds, inf if plan is None else plan.step_seconds)
    exact = plan is not None and bound >= plan.step_seconds * (1 - TIE)
    return replace(found, best=plan, bound_seconds=bound, exact=exact)


def planned_by(planner: Planner, problem: Problem) -> Candidate | str:
    """The planner's best plan under the problem's costs and limits, or why there is none. Where the time is
    over only the simple ones still make one, so that there is a plan."""
    if problem.budget.over and planner.name not in SIMPLE:
        return OUT_OF_TIME
    budget = problem.budget.part(share=PLANNER_SHARE)
    proposals = list[Proposal]()
    try:
        for proposal in planner.propose(problem):
            if problem.allows(proposal):
                proposals.append(proposal)
            if proposals:
                budget.check()
    except OutOfTime:
        if not proposals:
            return OUT_OF_TIME
    if not proposals:
        return refusal(planner, problem)
    return fastest(problem.space, proposals, budget=budget) or _unfit(problem.space)


def _unfit(space: Space) -> str:
    if space.runtime is not None and space.runtime.trains_every_stage:
        return "does not fit, or a stage has nothing to train, which the runtime asks of every stage"
    return "does not fit"


def joint_search(problem: Problem, seeds: Iterable[Candidate] = ()) -> Found:
    """The joint search from these plans; of schedules that it does not search, plans that are made of its
    own, with a bound on all of them."""
    seeds = list(seeds)
    found = searched(problem, seeds)
    others = [name for name in problem.schedules if name not in SEARCHED]
    more = [plan for plan in seeds if plan.setting.schedule not in SEARCHED]
    made = fastest(problem.space, transplanted(problem, others, found.best)) if others else None
    # Beside schedules that are searched only the proposed plans of others belong to the space.
    alone = others and not problem.families
    bound = work_bound(problem) if alone else found.bound_seconds
    plans = [plan for plan in (found.best, made, *more) if plan is not None]
    best = min(plans, key=lambda plan: plan.step_seconds, default=None)
    step = inf if best is None else best.step_seconds
    proven = min(bound, step)
    return Found(best, proven, min(proven, found.root_bound_seconds), proven >= step * (1 - TIE))


def searched(
    problem: Problem, seeds: Iterable[Candidate] = (), work: float | None = None, *, whole: bool = True
) -> Found:
    """The search of the schedules that it knows, from these plans; `work`: else as long as was wished. Not of
    the `whole` space: of plans near good ones, as of a problem that is too large."""
    work = SEARCH_SHARE * problem.wishes.time_limit * WORK_A_SECOND if work is None else work
    own = [plan for plan in seeds if plan.setting.schedule in SEARCHED]
    large = is_large(problem.space, problem.families) or not whole
    if not large:
        return search(problem.space, problem.families, problem.stage_counts, own, work)
    return search_large(
        problem.space, problem.families, problem.stage_counts, own, work, deeper=problem.may_be_deeper
    )
