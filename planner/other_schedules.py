"""Plans of schedules that the search does not know: shapes of other plans, and balanced parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace

from ..cost_models.errors import UsageError
from ..cost_models.schedules import find_schedule
from .balance import balance
from .candidate import Proposal, ScoredPlan, linear_pipeline, replicated_pipeline
from .cut_search.device_choices import DeviceChooser
from .cut_search.schedule_search import MOST_ACTIONS
from .pipeline_config import PipelineConfig
from .planners.base import add_counts, replicated_shapes, shared_configs, work_seconds
from .problem import Problem


def propose_other_schedules(
    problem: Problem, schedules: Iterable[str], best: ScoredPlan | None
) -> Iterator[Proposal]:
    """The shape of the best plan, of balanced ones and of the whole model on as many devices as may share it,
    under other schedules with one stage a device."""
    own = [config for config in problem.configs if config.schedule in set(schedules)]
    linear_configs = [s for s in own if find_schedule(s.schedule).default_virtual_stages == 1]
    shapes: list[Proposal] = [] if best is None else [best.proposal]
    chooser = DeviceChooser(problem)
    for config in linear_configs:
        size = config.micro_batch_size
        further = (
            replace(shape, devices=chooser.choices(shape.replicas).shapes[0])
            for shape in (*_balanced(problem, size, best), *_whole_models(problem, size))
        )
        for shape in (*shapes, *further):
            proposal = replace(shape, config=config)
            if problem.allows(proposal):
                yield proposal


def propose_parts(problem: Problem, schedules: Iterable[str]) -> Iterator[Proposal]:
    """Balanced pipelines under schedules that have several parts of the layers on each device: on one device
    each, and on as many replicas of each as make all devices. Of programs that are not too long."""
    names, chooser = set(schedules), DeviceChooser(problem)
    for config in problem.configs:
        if config.schedule in names:
            yield from filter(problem.allows, _in_parts(problem, config, chooser))


def _in_parts(problem: Problem, config: PipelineConfig, chooser: DeviceChooser) -> Iterator[Proposal]:
    space, schedule = problem.space, find_schedule(config.schedule)
    parts = schedule.default_virtual_stages
    if parts == 1 or config.virtual_stages > 1:
        return
    single = [(stages, 1) for stages in problem.stage_counts]
    for stages, replicas in (*single, *replicated_shapes(problem)):
        if space.budget.over:
            return
        actions = 3 * stages * parts * config.micro_batches
        if stages * parts > space.chain.max_stages or actions > MOST_ACTIONS:
            continue
        if not shared_configs(problem, [config], replicas):
            continue
        with suppress(UsageError):  # the schedule does not run with these numbers
            pipe = schedule.program(stages, config.micro_batches, parts).pipes[0]
            work = work_seconds(problem, config.micro_batch_size // replicas)
            ends = add_counts(balance(work, stages * parts, cut_after=space.chain.cut_after))
            ranks = chooser.choices([replicas] * stages).shapes[0]
            devices = tuple(ranks[place.device] for place in pipe)
            yield Proposal(replace(config, virtual_stages=parts), ends, devices)


def _whole_models(problem: Problem, size: int) -> Iterator[Proposal]:
    """One stage on the most devices that may share a micro-batch, evenly or not."""
    last = len(problem.chain)
    for count in sorted({max(counts) for counts in problem.replica_choices(size)} - {1}):
        yield replicated_pipeline(problem.configs[0], [last], [count])


def _balanced(problem: Problem, size: int, best: ScoredPlan | None) -> Iterator[Proposal]:
    """Of as many stages as the best plan has, of 1, 2, 4 and so on, and of the most."""
    space = problem.space
    if not space.fits_someone(size, 1):
        return
    work = work_seconds(problem, size)
    counts = problem.stage_counts
    tried_counts = {count for count in counts if count & (count - 1) == 0} | {counts[-1]}
    tried_counts |= set() if best is None else {len(best.proposal.ends)} & set(counts)
    for stages in sorted(tried_counts):
        yield linear_pipeline(
            problem.configs[0], add_counts(balance(work, stages, cut_after=space.chain.cut_after))
        )


def find_refusal(problem: Problem) -> str | None:
    """Why the schedules run with none of the numbers of devices and micro-batches that there may be: of the
    most devices; None where one runs, or may with numbers that are too large to try."""
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
