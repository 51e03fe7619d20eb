"""The bounds that the search works with, each held against the plans that it is about.

What an answer says hides most of them: a bound that is too high leaves out plans, and a planner may know one
as fast. Of machines where any devices, or one order of them, are searched, so that the plans of a family are
those of its settings.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from math import inf
from unittest.mock import patch

import numpy as np

from pplan.planner.problem import Problem
from pplan.planner.scoring import WHOLE_BOUNDS, busiest_seconds
from pplan.planner.search import branch_and_bound, subproblem
from pplan.planner.search.coarse import is_large
from pplan.planner.search.device_sets import make_ranges
from pplan.planner.search.fill_bound import fill_bound
from pplan.planner.search.fluid_bound import fluid_bound
from pplan.planner.search.pipelines import build_pipelines
from pplan.planner.search.placements import ANY
from pplan.planner.search.relaxed_bound import RelaxedBound
from pplan.planner.search.stage_choices import list_stage_choices
from pplan.planner.search.subproblem import BOUNDS, Family

from .enumeration import Enumeration, Scored
from .results import Result

TOLERANCE = 1e-8


FEW_WORK = 1e6
"""Of a search that is stopped."""
FEW = 3
"""Devices up to which all plans on any of them are enumerated for the relaxed bound."""


def relaxed(problem: Problem, result: Result) -> None:
    """The bound for many devices, and those for long chains, of a few: on all pipelines of the families, on
    any devices."""
    runtime = problem.runtime
    plain = runtime is None or (runtime.replicas == "none" and not runtime.one_process)
    if problem.gpus > FEW or not problem.families or not plain:
        return
    counts = list(problem.stage_counts)
    budget = problem.space.budget.part(2e8)
    step = 10 * sum(
        float(own.sum()) for own in (problem.chain.forward_seconds, problem.chain.backward_seconds)
    )
    said = RelaxedBound(problem.space, problem.families, counts, False, budget).least(step)
    own = dict.fromkeys(problem.families)
    parted = min(max(bound(problem.space, f, step) for bound in (fluid_bound, fill_bound)) for f in own)
    schedules = list(dict.fromkeys(family.config.schedule for family in problem.families))
    every = Enumeration(problem, schedules, scope="any")
    best = every.best(max(said, parted) * (1 - TOLERANCE))
    result.plans += every.plans
    result.simulated += every.simulated
    for name, least in (("relaxed", said), ("parted layers", parted)):
        low = best is not None and best.step_seconds < least * (1 - TOLERANCE)
        result.check(name, f"{least:.9g} s; {best}" if low else None)


STOPS = (
    {"FOR_ROOTS": 0.0, "FOR_REST": 1.0, "FOR_RELAXED": 3e7},
    {"FOR_ROOTS": 0.0, "FOR_REST": 0.9, "MOST_UNFINISHED": 20},
)
"""Settings of a search that begins with few of its families, or drops what it has begun."""


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
        quick = subproblem.quick_bound(problem.space, family)
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
