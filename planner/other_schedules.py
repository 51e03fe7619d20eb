"""Plans under schedules other than 1F1B and GPipe: shapes of good plans, balanced parts, and their cuts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice

from ..cost_models.errors import UsageError
from ..cost_models.optimizers import find_optimizer
from ..cost_models.schedules import find_schedule
from .balance import balanced_ends
from .candidate import Proposal, ScoredPlan, linear_pipeline, replicated_pipeline
from .cut_search.device_choices import DeviceChooser
from .cut_search.schedule_search import MOST_ACTIONS, ScheduleResult, search_schedules
from .cut_search.shape_search import FAR
from .planners.base import full_shapes, shared_configs, work_seconds
from .problem import Problem
from .scoring import fastest
from .search.budget import SearchBudget
from .search.space import Space
from .smallest_plan import find_smallest_plan
from .stage_table import Floats

MOST_NEAR = 4
"""Plans whose shapes are the first for which cuts are searched."""
MOST_SMALL = 6
"""Most proposals that need little memory."""


def search_other_schedules(
    problem: Problem,
    schedules: Collection[str],
    seeds: Sequence[ScoredPlan],
    best: ScoredPlan | None,
    limit: float,
) -> tuple[list[ScoredPlan], ScheduleResult]:
    """Search plans under some schedules.

    Args:
        problem: What is asked.
        schedules: Names of the schedules.
        seeds: Plans to start from.
        best: The best plan under 1F1B and GPipe.
        limit: Seconds that a plan must be faster than.

    Returns:
        The seeds under these schedules and the first plans, fastest first; and the result of the cut search.
    """
    near = [seed for seed in seeds if seed.config.schedule in schedules]
    for proposals in (
        propose_other_schedules(problem, schedules, best),
        propose_parts(problem, schedules),
    ):
        plan = fastest(problem.space, proposals, FAR * limit)
        near += [] if plan is None else [plan]
        limit = limit if plan is None else min(limit, plan.step_seconds)
    near.sort(key=lambda plan: plan.step_seconds)
    return near, search_schedules(problem, schedules, limit, near=near[:MOST_NEAR])


def propose_other_schedules(
    problem: Problem, schedules: Iterable[str], best: ScoredPlan | None
) -> Iterator[Proposal]:
    """Propose plans of schedules with one stage per device.

    Their shapes are that of the best plan, balanced ones, and the whole model on as many devices as may share
    it.

    Args:
        problem: What is asked.
        schedules: Names of the schedules.
        best: The best plan under 1F1B and GPipe. None if none exists.
    """
    names, chooser = set(schedules), DeviceChooser(problem)
    for config in problem.configs:
        if config.schedule not in names or find_schedule(config.schedule).default_virtual_stages > 1:
            continue
        simple = (
            replace(shape, devices=chooser.choices(shape.replicas).shapes[0])
            for shape in _simple_shapes(problem, config.micro_batch_size, best)
        )
        shapes = (*(() if best is None else (best.proposal,)), *simple)
        yield from filter(problem.allows, (replace(shape, config=config) for shape in shapes))


def propose_parts(
    problem: Problem, schedules: Iterable[str], *, by_memory: bool = False
) -> Iterator[Proposal]:
    """Propose balanced pipelines of schedules with several parts of the layers per device.

    Each part is on one device, or on as many replicas as use all devices. Programs that are too long are left
    out.

    Args:
        problem: What is asked.
        schedules: Names of the schedules.
        by_memory: Whether to balance bytes instead of seconds, with the most stages or with replicas on all
            devices. The smallest micro-batches come first.
    """
    names, chooser, space = set(schedules), DeviceChooser(problem), problem.space
    replicated = [shape for shape in full_shapes(problem) if shape[1] > 1]
    shapes = [*((stages, 1) for stages in problem.stage_counts), *replicated]
    configs = problem.configs
    if by_memory:
        parts = min((find_schedule(name).default_virtual_stages for name in names), default=1)
        most = min(problem.stage_counts[-1], space.chain.max_stages // parts)
        shapes = [(most, 1), *replicated]
        configs = sorted(configs, key=lambda config: config.micro_batch_size)
    for config in configs:
        schedule = find_schedule(config.schedule)
        parts = schedule.default_virtual_stages
        if config.schedule not in names or parts == 1 or config.virtual_stages > 1:
            continue
        for stages, replicas in shapes:
            if space.budget.over:
                return
            actions = 3 * stages * parts * config.micro_batches
            if stages * parts > space.chain.max_stages or actions > MOST_ACTIONS:
                continue
            if not shared_configs(problem, [config], replicas):
                continue
            with suppress(UsageError):  # the schedule does not run with these numbers
                pipe = schedule.program(stages, config.micro_batches, parts).pipes[0]
                size = config.micro_batch_size // replicas
                work = bytes_by_layer(space, size) if by_memory else work_seconds(problem, size)
                ends = balanced_ends(work, stages * parts, space.chain.cut_after)
                ranks = chooser.choices([replicas] * stages).shapes[0]
                devices = tuple(ranks[slot.device] for slot in pipe)
                proposal = Proposal(replace(config, virtual_stages=parts), ends, devices)
                if problem.allows(proposal):
                    yield proposal


def propose_small_plans(problem: Problem) -> Iterator[Proposal]:
    """Propose a few plans that need little memory, even if the time is over."""
    if (smallest := find_smallest_plan(problem)) is not None:
        yield smallest.proposal
    problem = replace(problem, budget=SearchBudget())
    yield from islice(propose_parts(problem, problem.heuristic_schedules, by_memory=True), MOST_SMALL)


def bytes_by_layer(space: Space, size: int) -> Floats:
    """Return (layers,) bytes of weights, their states and the activations that a micro-batch saves."""
    costs, precision = space.table(size).costs, space.number_bytes
    states = precision.gradient + find_optimizer(space.optimizer).bytes_per_parameter(precision)
    return costs.parameter_bytes + costs.trainable_bytes * states / precision.weight + costs.saved_bytes


def _simple_shapes(problem: Problem, size: int, best: ScoredPlan | None) -> Iterator[Proposal]:
    """Yield balanced pipelines and single replicated stages.

    The pipelines have as many stages as the best plan, 1, 2, 4 and so on, and the most. A single stage has
    the most devices that may share a micro-batch, evenly or not.
    """
    space, counts, config = problem.space, problem.stage_counts, problem.configs[0]
    if space.fits_someone(size, 1):
        work = work_seconds(problem, size)
        stages = {count for count in counts if count & (count - 1) == 0} | {counts[-1]}
        stages |= set() if best is None else {len(best.proposal.ends)} & set(counts)
        for count in sorted(stages):
            yield linear_pipeline(config, balanced_ends(work, count, space.chain.cut_after))
    for count in sorted({max(choices) for choices in problem.replica_choices(size)} - {1}):
        yield replicated_pipeline(config, [len(problem.chain)], [count])


def find_refusal(problem: Problem) -> str | None:
    """Return why the schedules run with none of the possible numbers of devices and micro-batches.

    The reason is that for the most devices. None if one runs, or may run with numbers too large to try.
    """
    why: str | None = None
    for stages in problem.stage_counts:
        for config in problem.configs:
            schedule = find_schedule(config.schedule)
            parts = schedule.default_virtual_stages
            if stages == 1 < parts or stages * parts > problem.space.chain.max_stages:
                continue
            if 3 * stages * parts * config.micro_batches > MOST_ACTIONS:
                return None
            try:
                schedule.program(stages, config.micro_batches)
            except UsageError as error:
                why = f"with {stages} stages, {error.what}"
            else:
                return None
    return why
