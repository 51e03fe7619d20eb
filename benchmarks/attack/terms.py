"""The bounds that the search works with, each held against the plans that it is about.

What an answer says hides most of them: a bound that is too high leaves out plans, and a planner may know one
as fast. Of machines where any devices, or one order of them, are searched, so that the plans of a family are
those of its settings.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from math import inf
from unittest.mock import patch

import numpy as np

from pplan.cost_models.timeline import step_seconds
from pplan.planner.candidate import UNPROPOSED
from pplan.planner.problem import Problem
from pplan.planner.scoring import assemble, busiest_seconds
from pplan.planner.search import branch_and_bound
from pplan.planner.search.bound import CompletionBound, MemoryBound, StageRange
from pplan.planner.search.branch_and_bound import is_large
from pplan.planner.search.device_sets import make_ranges
from pplan.planner.search.family import Family, quick_bound
from pplan.planner.search.fill_bound import fill_bound
from pplan.planner.search.linear_groups import WHOLE_BOUNDS
from pplan.planner.search.partial import PartialPlans, empty_plans, extend_plans, join_plans
from pplan.planner.search.pipelines import build_pipelines
from pplan.planner.search.placements import ANY
from pplan.planner.search.reach_bound import ReachBound
from pplan.planner.search.stage_choices import StageChoices, list_stage_choices
from pplan.planner.search.stage_recompute import choose_modes
from pplan.planner.search.subproblem import BOUNDS, Subproblem, expansions

from .enumeration import Enumeration, Scored
from .results import Result

TOLERANCE = 1e-8


FEW_WORK = 1e6
"""Of a search that is stopped."""
FEW = 3
"""Devices up to which all plans on any of them are enumerated for the bound on all families."""
BOUND_WORK = 2e8
"""Work for the bound on all families, see `SearchBudget`."""
MOST_FAMILIES = 6
"""Families of a problem, drawn at random, whose unfinished plans are looked at."""
DRAWN = 24
"""Unfinished plans of a number of stages that are kept, at random, when a stage is added."""


def memory_bound(problem: Problem, result: Result) -> None:
    """The bound on all families, and those for long chains, of few devices: on all pipelines of the families,
    on any devices."""
    runtime = problem.runtime
    plain = runtime is None or (runtime.replicas == "none" and not runtime.one_process)
    if problem.gpus > FEW or not problem.families or not plain:
        return
    step = _far(problem)
    said = _bound_below(problem, step)[1]
    own = dict.fromkeys(problem.families)
    parted = min(fill_bound(problem.space, family, step) for family in own)
    reached = min(_reach(problem, family, step) for family in own)
    schedules = list(dict.fromkeys(family.config.schedule for family in problem.families))
    every = Enumeration(problem, schedules, scope="any")
    best = every.best(max(said, parted, reached) * (1 - TOLERANCE))
    result.plans += every.plans
    result.simulated += every.simulated
    for name, least in (("memory bound", said), ("parted layers", parted), ("furthest ends", reached)):
        low = best is not None and best.step_seconds < least * (1 - TOLERANCE)
        result.check(name, f"{least:.9g} s; {best}" if low else None)


def _reach(problem: Problem, family: Family, high: float) -> float:
    """A step that has no room for a pipeline of a family, nearly the longest."""
    reach, low = ReachBound(problem.space, family), 0.0
    for _ in range(30):
        step = (low + high) / 2
        is_short = reach.fewest_devices(step, problem.stage_counts.__contains__) > reach.capacity
        low, high = (step, high) if is_short else (low, step)
    return low


def _far(problem: Problem) -> float:
    """Seconds that hardly a plan takes: ten times all layers on one device."""
    seconds = (problem.chain.forward_seconds, problem.chain.backward_seconds)
    return 10 * sum(float(own.sum()) for own in seconds)


def _bound_below(problem: Problem, limit: float, *, every_range: bool = False) -> tuple[MemoryBound, float]:
    """The bound on all families, and what it says of the plans below `limit`."""
    counts, budget = list(problem.stage_counts), problem.space.budget.part(BOUND_WORK)
    bound = MemoryBound(problem.space, problem.families, counts, False, budget, every_range=every_range)
    return bound, bound.least(limit)


def unfinished(problem: Problem, result: Result) -> None:
    """The bounds on unfinished plans: of plans drawn at random, the bound of every prefix."""
    if is_large(problem.space, problem.families) or problem.options.recompute in UNPROPOSED:
        return
    limit, rng = _far(problem), np.random.default_rng(result.seed)
    bound, _ = _bound_below(problem, limit, every_range=True)
    for index in rng.permutation(len(problem.families))[:MOST_FAMILIES].tolist():
        family = problem.families[index]
        ranges = make_ranges(problem.space, family.placement, family.replicas, family.on_all)
        own = Subproblem(problem.space, family, problem.stage_counts, ranges, problem.space.budget, bound)
        options = list_stage_choices(problem.space, family.config, ranges, inf)
        for stages in problem.stage_counts if options.groups else ():
            if stages <= options.most_stages:
                open_ranges = bound.left(family)
                if open_ranges is not None:
                    open_ranges = [one for one in open_ranges if one.least(stages) < limit]
                _drawn(own, options, stages, open_ranges, limit, rng, result)


def _drawn(
    own: Subproblem,
    options: StageChoices,
    stages: int,
    ranges: Sequence[StageRange] | None,
    limit: float,
    rng: np.random.Generator,
    result: Result,
) -> None:
    """Draws plans of so many stages of a family, stage by stage, and notes the highest bound of each.
    `ranges` that may hold one; None: all may."""
    round_trips = BOUNDS[own.family.config.schedule](options, inf)
    completion = CompletionBound(ranges, stages) if ranges and stages > 1 else None
    state = round_trips.start() | ({} if completion is None else completion.start())
    first = round_trips.root(stages)
    if ranges is not None and stages > 1:
        first = max(first, inf if completion is None else completion.root)
    plans = empty_plans(state | {"highest": np.array([min(first, limit)])})
    for remaining in range(stages, 0, -1):
        parts = list[PartialPlans]()
        for stage in expansions(options, plans, remaining):
            known = {name: values[stage.parent] for name, values in plans.state.items()}
            seconds, now = round_trips.extend(known, stage)
            if completion is not None:
                sums, more = completion.extend(known, stage)
                seconds, now = np.maximum(seconds, sums), now | more
            highest = np.maximum(known["highest"], np.minimum(seconds, limit))
            done = (stage.end == options.last_place) & options.may_be_done[stage.end_position]
            rows = np.flatnonzero(done if remaining == 1 else np.ones(len(seconds), dtype=np.bool_))
            if len(rows):
                parts.append(extend_plans(plans, stage, now | {"highest": highest}, rows))
        if not parts:
            return
        plans = join_plans(parts)
        chosen = np.sort(rng.permutation(len(plans))[:DRAWN])
        plans = join_plans([plans], chosen)
    for row in range(len(plans)):
        plan, said = own._candidate(options, plans, row, inf), float(plans.state["highest"][row])
        if choose_modes(own.space, plan.proposal) is None:
            continue
        made = assemble(own.space, plan.proposal, plan.recompute)
        step = float(step_seconds(made.program, made.costs())[0])
        high = said > min(step, limit) * (1 + TOLERANCE)
        result.check("unfinished plans", f"{said:.9g} s; {step:.9g} s: {plan}" if high else None)


STOPS = (
    {"FOR_BOUND": 0.9, "FOR_REST": 1.0},
    {"FOR_BOUND": 0.0, "FOR_REST": 1.0},
    {"FOR_BOUND": 0.1, "FOR_REST": 0.0, "MOST_UNFINISHED": 20},
)
"""Settings of a search that spends its work on the bound on all families, or none of it, or drops plans."""


def stopped(problem: Problem, result: Result) -> None:
    """What is proven by a search that ends early, against the best plan of one that proves that it is."""
    if not problem.families or is_large(problem.space, problem.families):
        return
    whole = branch_and_bound.search(problem.space, problem.families, problem.stage_counts)
    if not whole.exact:
        return
    for settings in STOPS:
        with ExitStack() as changed:
            for name, value in settings.items():
                changed.enter_context(patch.object(branch_and_bound, name, value))
            own = branch_and_bound.search(
                problem.space, problem.families, problem.stage_counts, work=FEW_WORK
            )
        high = own.bound_seconds > whole.bound_seconds * (1 + TOLERANCE)
        said = f"{settings}: {own.bound_seconds:.9g} s of {whole.bound_seconds:.9g} s"
        result.check("stopped", said if high else None)


def check(problem: Problem, result: Result) -> None:
    """Of every family, before anything is searched: the quick bound, and that of each number of stages; and
    of the fastest plan below a little more than that, the bounds of whole plans."""
    if len(problem.placements) > 1 and not problem.any_devices:
        return
    for family in problem.families:
        if problem.any_devices and family.placement.name != ANY:
            continue
        ranges = make_ranges(problem.space, family.placement, family.replicas, family.on_all)
        options = list_stage_choices(problem.space, family.config, ranges, inf)
        quick = quick_bound(problem.space, family)
        bound = BOUNDS[family.config.schedule](options, inf)
        for stages in problem.stage_counts:
            possible = options.groups and stages <= options.most_stages
            root = bound.root(stages) if possible else inf
            _held(problem, family, stages, max(root, quick), result)


def _held(problem: Problem, family: Family, stages: int, said: float, result: Result) -> None:
    config = family.config
    every = Enumeration(
        problem, [config.schedule], stages=[stages], sizes=[config.micro_batch_size], mode=config.recompute
    )
    best = every.best(2 * said)
    result.plans += every.plans
    result.simulated += every.simulated
    low = best is not None and best.step_seconds < said * (1 - TOLERANCE)
    result.check("before searching", f"{config}, {stages} stages: {said:.9g} s; {best}" if low else None)
    if best is not None:
        # Which of the backwards runs nothing again shows in the setting.
        _whole(problem, replace(best, proposal=replace(best.proposal, config=config)), result)


def _whole(problem: Problem, plan: Scored, result: Result) -> None:
    """The bounds of whole plans, on one that was simulated."""
    pipelines = build_pipelines(problem.space, [plan.proposal], [plan.recompute])
    whole = float(np.max(WHOLE_BOUNDS[plan.proposal.config.schedule](pipelines)))
    said = max(whole, busiest_seconds(problem.space, plan.proposal))
    high = said > plan.step_seconds * (1 + TOLERANCE)
    result.check("of whole plans", f"{said:.9g} s; {plan}" if high else None)
