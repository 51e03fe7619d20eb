"""Plans with the highest throughput, synchronous and asynchronous.

If gradients may be an update or more late, PipeDream, PipeDream-2BW and XPipe leave no bubble. They are
searched exactly (`steady_search`), from two stages on, with every micro-batch size with known costs and the
same orders of devices and replicas as the other plans. Their weight versions count in the memory. WPipe is
searched too (`shape_search`) if there are few cut points, with equal replicas of every stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product
from math import inf
from typing import Literal

import numpy as np

from ...cost_models.errors import DefectError, UsageError
from ...cost_models.schedules import find_schedule
from ..asynchronous import (
    ASYNCHRONOUS,
    PIPEDREAM,
    PREDICTING,
    TWO_VERSIONS,
    WPIPE,
    XPIPE,
    asynchronous_notes,
    steady_seconds,
)
from ..candidate import Mode, PipelineConfig, Proposal, ScoredPlan
from ..cut_search.part_tables import PipelineShape
from ..cut_search.shape_search import Record, ShapeSearch, search_shapes
from ..joint_search import BEST, find_best_plan
from ..plan_file import TIE
from ..planners.pipedream_planner import PAPER, PipeDreamStages, Recurrence
from ..planners.replica_groups import thin_cuts
from ..problem import Problem
from ..search.branch_and_bound import SearchResult
from ..search.budget import WORK_A_SECOND, OutOfTime
from ..search.least_exchange import LeastExchanges
from ..search.space import Space
from ..smallest_plan import nothing_fits
from ..universal_bound import work_bound
from .objective_result import ObjectiveResult
from .steady_search import SteadySearch

CUTS_A_SECOND = 3.3e6
"""Cuts of the two parts of a device that can be searched in a second."""
MOST_PLACES = 26
"""Most cut points of chains for which WPipe is searched."""
SHARE = 0.45
"""Share of the time limit's work for WPipe."""
ENDLESS = 2**62
"""Micro-batches of a run that does not end."""
COARSE = (24, 48)
"""Numbers of blocks of layers that are searched first. Their plans let the search of all cuts prune."""


def throughput(problem: Problem) -> ObjectiveResult:
    """Find the plan with the most samples per second: the best synchronous or asynchronous one."""
    answer = find_best_plan(problem)
    step = inf if answer.best is None else answer.best.step_seconds
    refusal = asynchronous_refusal(problem)
    if refusal:
        return ObjectiveResult(answer.result, answer, notes=(refusal,))
    if answer.best is None and nothing_fits(problem, ASYNCHRONOUS):
        return ObjectiveResult(answer.result, answer)
    best, bound = fastest_asynchronous(problem, step)
    result = _join_bounds(answer.result, best, bound)
    if best is None:
        return ObjectiveResult(result, answer, notes=("no asynchronous pipeline is faster",))
    return ObjectiveResult(result, answer, notes=tuple(asynchronous_notes(best)))


def asynchronous_refusal(problem: Problem) -> str:
    """Return why asynchronous schedules are left out; empty if they are not."""
    options, runtime = problem.options, problem.runtime
    if options.planner not in (BEST, PIPEDREAM):
        return f"the planner {options.planner} proposes no asynchronous plans"
    if options.zero:
        return (
            f"asynchronous schedules were not searched: ZeRO-{options.zero} gathers the weights once per step"
        )
    if options.schedule != "auto":
        return f"asynchronous schedules were not searched: schedule={options.schedule!r} was given"
    if runtime is not None and not runtime.schedules & set(ASYNCHRONOUS):
        return f"{runtime.name} runs no asynchronous schedule"
    if not _modes(problem):
        return "no asynchronous schedule recomputes all but the last micro-batch"
    return ""


def asynchronous_names(problem: Problem) -> list[str]:
    """Return the asynchronous schedules that are searched."""
    names = [PIPEDREAM, TWO_VERSIONS]
    names += [XPIPE] if problem.options.optimizer in PREDICTING else []
    return names + ([WPIPE] if wpipe_shapes(problem) else [])


def _join_bounds(result: SearchResult, best: ScoredPlan | None, bound: float) -> SearchResult:
    """Return the result for synchronous and asynchronous plans together, with the smaller bound."""
    plan = result.best if best is None else best
    step = inf if plan is None else plan.step_seconds
    proven = min(result.bound_seconds, bound)
    if proven > step * (1 + 10 * TIE):
        raise DefectError(f"a plan of {step!r} s a global batch is below its bound of {proven!r} s")
    exact = proven >= step * (1 - 10 * TIE)
    root = min(result.root_bound_seconds, proven)
    return SearchResult(plan, step if exact else proven, root, exact, result.universal)


def fastest_asynchronous(problem: Problem, limit: float) -> tuple[ScoredPlan | None, float]:
    """Find the asynchronous pipeline with the fewest seconds per global batch.

    Coarse cut points are searched first. Their plan is the limit for the search of all cuts, which often
    needs one trial to find that nothing is faster.

    Args:
        problem: What is asked.
        limit: Seconds that the plan must be below.

    Returns:
        The plan, or None if none is below `limit`, and a lower bound on all asynchronous plans.
    """
    # Stages update their weights at different times, so users of one weight stay on one stage.
    problem = replace(problem, chain=problem.chain.without_tied_cuts())
    best: ScoredPlan | None = None
    if problem.options.planner == PIPEDREAM:
        plans = [plan for plan in _by_planner(problem) if plan.step_seconds < limit]
        return min(plans, key=lambda plan: plan.step_seconds, default=None), work_bound(problem)
    bound = inf if problem.every_replica_count and not problem.space.is_long else work_bound(problem)
    try:
        for search, is_whole in _searches(problem):
            faster, proven = search.fastest(limit)
            bound = min(bound, proven) if is_whole else bound
            if faster is not None:
                step = steady_seconds(problem.space, faster.proposal, faster.recompute)
                if step < limit:
                    best, limit = replace(faster, step_seconds=step), step
        low, work = work_bound(problem), SHARE * problem.options.time_limit * WORK_A_SECOND
        record = Record(problem, problem.budget.part(work), LeastExchanges(problem.space), limit)
        shapes = (ShapeSearch(record, shape, low) for shape in wpipe_shapes(problem))
        bound = min(bound, search_shapes(record, shapes)[1])
        if record.best is not None and record.best.step_seconds < limit:
            best = record.best
    except OutOfTime:
        bound = min(bound, work_bound(problem))
    return best, bound


def _searches(problem: Problem) -> Iterator[tuple[SteadySearch, bool]]:
    """Yield the searches by configuration and order of the devices, each with whether it covers all plans."""
    configs = asynchronous_configs(problem)
    for space, counts, is_whole in _spaces(problem):
        for config in configs:
            for placement in problem.placements:
                yield (
                    SteadySearch(
                        space, config, placement, counts, problem.stage_counts, on_all=problem.options.use_all
                    ),
                    is_whole,
                )


def wpipe_shapes(problem: Problem) -> list[PipelineShape]:
    """Return WPipe on the first devices of every order, by stages and replicas; empty for too many cuts."""
    places = len(problem.space.table(problem.space.chain.sizes[0]).cut_points)
    runtime, batch, shapes = problem.runtime, problem.mini_batch, list[PipelineShape]()
    unknown = runtime is not None and WPIPE not in runtime.schedules
    if problem.options.planner != BEST or problem.space.is_long or places > MOST_PLACES or unknown:
        return []
    combinations = product(_modes(problem), problem.sizes, problem.placements, problem.stage_counts[1:])
    for mode, size, placement, stages in combinations:
        if 2 * stages >= places or batch // size % stages:
            continue
        program = find_schedule(WPIPE).program(stages, 4 * stages, 2)
        for replicas in _replica_counts(problem):
            if _fits_devices(problem, size, stages, replicas):
                ranks = np.array(placement.ranks[: stages * replicas]).reshape(stages, replicas)
                config = PipelineConfig(WPIPE, mode, batch // size, size, 2)
                shapes.append(PipelineShape(config, program, tuple(map(tuple, ranks.tolist()))))
    cuts = sum(len(shape.ranks) for shape in shapes) * places**4
    return shapes if cuts <= CUTS_A_SECOND * problem.options.time_limit else []


def _fits_devices(problem: Problem, size: int, stages: int, replicas: int) -> bool:
    used, usable = stages * replicas, problem.usable_gpus
    enough = used == usable if problem.options.use_all else used <= usable
    return enough and replicas <= size and problem.space.fits_someone(size, replicas)


def _replica_counts(problem: Problem) -> tuple[int, ...]:
    """Return the numbers of replicas that a stage may have."""
    if problem.families:
        return tuple(sorted({count for family in problem.families for count in family.replicas}))
    return tuple(range(1, problem.usable_gpus + 1))


def _spaces(problem: Problem) -> Iterator[tuple[Space, tuple[int, ...], bool]]:
    """Yield cut points and numbers of replicas to search, coarse ones first, and whether these are all."""
    space, all_counts = problem.space, _replica_counts(problem)
    powers = tuple(count for count in all_counts if count & (count - 1) == 0)
    for blocks in COARSE:
        if space.table(space.chain.sizes[0]).blocks > blocks:
            yield thin_cuts(space, blocks), powers, False
    if not space.is_long:
        yield space, all_counts, problem.every_replica_count


def asynchronous_configs(problem: Problem) -> list[PipelineConfig]:
    """Return the asynchronous schedules with their micro-batches.

    A micro-batch of PipeDream is the whole global batch. PipeDream-2BW has at least as many micro-batches as
    stages. XPipe has fewer, because with more of them 2BW is as fast and holds one version less. XPipe needs
    an optimizer with moments from which it predicts weights.
    """
    batch = problem.mini_batch
    configs = [
        PipelineConfig(TWO_VERSIONS, mode, batch // size, size)
        for mode in _modes(problem)
        for size in problem.sizes
        if batch // size > 1
    ]
    pipedream = [
        PipelineConfig(PIPEDREAM, mode, 1, batch) for mode in _modes(problem) if batch in problem.sizes
    ]
    xpipe = [
        PipelineConfig(XPIPE, mode, batch // size, size)
        for mode in _modes(problem)
        for size in problem.sizes
        if batch // size < problem.stage_counts[-1] and problem.options.optimizer in PREDICTING
    ]
    return pipedream + configs + xpipe


def _modes(problem: Problem) -> tuple[Mode, ...]:
    return tuple(mode for mode in problem.modes("1f1b") if mode != "except_last")


def _by_planner(problem: Problem) -> Iterator[ScoredPlan]:
    """Yield the plans of PipeDream's dynamic programme with their simulated seconds."""
    for config in asynchronous_configs(problem):
        recompute: Literal["never", "always"] = "always" if config.recompute == "always" else "never"
        with suppress(UsageError, OutOfTime):
            plan = plan_asynchronous(
                problem.space,
                config.micro_batch_size,
                schedule=config.schedule,
                recompute=recompute,
                use_all=problem.options.use_all,
            )
            if plan is not None and _allows(problem, config, plan.ends):
                proposal = Proposal(config, plan.ends, plan.devices)
                modes = (recompute,) * len(plan.ends)
                yield ScoredPlan(proposal, modes, steady_seconds(problem.space, proposal, modes))


def plan_asynchronous(
    space: Space,
    mini_batch: int,
    *,
    recurrence: Recurrence = PAPER,
    schedule: str = "pipedream",
    recompute: Literal["never", "always"] = "never",
    use_all: bool = False,
) -> Proposal | None:
    """Return the asynchronous pipeline with the highest throughput, by a recurrence of PipeDream.

    Each global batch updates the weights. Stage i of p keeps the weight versions and activations of the
    asynchronous schedule (PipeDream: p - i of both). The result is exact for the recurrence and the memory
    limits, up to `WORK`.

    Args:
        space: Costs and limits.
        mini_batch: Samples of a global batch.
        recurrence: Which of PipeDream's recurrences to use.
        schedule: Name of the schedule.
        recompute: Recomputation of all stages.
        use_all: Whether every device must be used. Otherwise fewer are used if more are not faster.

    Returns:
        The pipeline with its seconds per batch by the recurrence; None if none fits.
    """
    gpus = space.topology.gpus
    if not any(space.fits_someone(mini_batch, replicas) for replicas in range(1, gpus + 1)):
        return None
    config = PipelineConfig(schedule, recompute, ENDLESS, mini_batch)
    return PipeDreamStages(space, config, recurrence, use_all).proposal()


def _allows(problem: Problem, config: PipelineConfig, ends: tuple[int, ...]) -> bool:
    bounds = list(zip((0, *ends), ends, strict=False))
    enough = config.schedule != TWO_VERSIONS or len(ends) <= config.micro_batches
    return 2 <= len(ends) <= problem.stage_counts[-1] and enough and problem.space.limits.allow(bounds)
