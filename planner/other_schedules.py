"""Plans of schedules that the search does not know: shapes of other plans, and a bound on them all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from math import inf

import numpy as np

from ..cost_models.errors import UsageError
from ..cost_models.schedules import schedule_named
from .balance import balance
from .candidate import Candidate, Proposal, straight
from .problem import Problem
from .scoring import least_in_parts
from .search.space import share_of
from .setting import Setting


def transplanted(problem: Problem, schedules: Iterable[str], best: Candidate | None) -> Iterator[Proposal]:
    """The shape of the best plan, and of balanced ones, under other schedules with one stage a device; and
    balanced ones with as many as a schedule is made for."""
    own = [setting for setting in problem.settings if setting.schedule in set(schedules)]
    straight_ones = [s for s in own if schedule_named(s.schedule).default_virtual_stages == 1]
    shapes: list[Proposal] = [] if best is None else [best.proposal]
    for setting in straight_ones:
        for shape in (*shapes, *_balanced(problem, setting.micro_batch_size, best)):
            proposal = replace(shape, setting=setting)
            if problem.allows(proposal):
                yield proposal
    for setting in own:
        yield from filter(problem.allows, _in_parts(problem, setting))


def _in_parts(problem: Problem, setting: Setting) -> Iterator[Proposal]:
    """Balanced pipelines with several parts of the layers on each device, where the schedule has them so."""
    space, schedule = problem.space, schedule_named(setting.schedule)
    parts = schedule.default_virtual_stages
    if parts == 1 or setting.virtual_stages > 1 or not space.fits_someone(setting.micro_batch_size, 1):
        return
    costs = space.chain.at(setting.micro_batch_size, past_largest=True)
    work = costs.forward_seconds + costs.backward_seconds
    for stages in problem.stage_counts:
        if stages * parts > space.chain.max_stages:
            return
        with suppress(UsageError):  # the schedule does not run with these numbers
            pipe = schedule.program(stages, setting.micro_batches, parts).pipes[0]
            ends = np.cumsum(balance(work, stages * parts, cut_after=space.chain.cut_after)).tolist()
            devices = tuple((place.device,) for place in pipe)
            yield Proposal(replace(setting, virtual_stages=parts), tuple(ends), devices)


def _balanced(problem: Problem, size: int, best: Candidate | None) -> Iterator[Proposal]:
    """Of as many stages as the best plan has, of 1, 2, 4 and so on, and of the most."""
    space = problem.space
    if not space.fits_someone(size, 1):
        return
    costs = space.chain.at(size, past_largest=True)
    work = costs.forward_seconds + costs.backward_seconds
    counts = problem.stage_counts
    chosen = {count for count in counts if count & (count - 1) == 0} | {counts[-1]}
    chosen |= set() if best is None else {len(best.proposal.ends)} & set(counts)
    for stages in sorted(chosen):
        ends = np.cumsum(balance(work, stages, cut_after=space.chain.cut_after)).tolist()
        yield straight(problem.settings[0], ends)


def work_bound(problem: Problem) -> float:
    """A bound on the step under any schedule: the work, as cheap as any number of replicas makes each layer,
    shared evenly over all devices."""
    space, bounds = problem.space, []
    for setting in problem.settings:
        size = setting.micro_batch_size
        counts = [n for n in range(1, min(size, problem.reached) + 1) if space.fits_someone(size, n)]
        works = [n * space.least_work(share_of(size, n), again=False) for n in counts]
        if works:
            bounds.append(setting.micro_batches * float(np.minimum.reduce(works).sum()) / problem.reached)
    # Nothing overlaps in naive model parallelism: all the work is done by one device at a time.
    at_once = problem.reached if problem.schedules == ("naive",) else 1
    return min(bounds, default=inf) * least_in_parts(space) * at_once
