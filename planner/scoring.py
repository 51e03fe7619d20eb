"""Simulation of proposals: the fastest that fits, or why none does."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf

import numpy as np

from ..cost_models.errors import UsageError
from ..cost_models.memory import Recompute
from ..cost_models.program import Program
from ..cost_models.quantities import format_bytes
from ..cost_models.schedules import PUBLISHED, cached_program, find_schedule
from ..cost_models.timeline import step_seconds
from .assembly import Assembly
from .candidate import SEARCHED, Proposal, ScoredPlan, abbreviate
from .search.budget import SearchBudget
from .search.linear_groups import LinearGroup, group_alike, linear_group
from .search.space import Space, divide_batch, narrow_space
from .search.stage_recompute import choose_modes, stage_modes

MOST_SCORED, MOST_TRIED = 6, 60
"""Most pipelines of a long chain that are scored per planner: those that fit, and all."""


def fastest(
    space: Space,
    proposals: Iterable[Proposal],
    limit: float = inf,
    budget: SearchBudget | None = None,
    *,
    required: bool = True,
) -> ScoredPlan | None:
    """Return the fastest of the proposals that fit and take less than `limit` seconds.

    Among equally fast ones the first wins. If the time is over, only those scored so far count.

    Args:
        space: Costs and limits.
        proposals: The proposals.
        limit: Seconds that a plan must be faster than.
        budget: Budget to use instead of the space's.
        required: Whether to score at least one proposal even if the time is over, if there is no limit yet.

    Returns:
        The plan; None if none exists.
    """
    space = space if budget is None else space.within(budget)
    unique = list(dict.fromkeys(proposals))
    optional = not required or limit < inf
    if space.is_long:
        return _score_long(space, unique, limit, optional=optional)
    trials: list[_Trial] = []
    for alike in group_alike(unique):
        if (trials or optional) and space.budget.over:
            break
        trials += _trials(space, alike, optional=optional)
    return _score_trials(space, sorted(trials, key=lambda trial: trial.bound), limit, optional=optional)


@dataclass(frozen=True)
class _Trial:
    """A proposal that may fit, with a bound on its step and a function that scores it below a limit."""

    bound: float
    tight: bool
    """True if the bound is close to the step. Only a limited number of other trials is scored."""
    score: Callable[[float], ScoredPlan | None]


def _score_trials(
    space: Space, trials: Iterable[_Trial], limit: float, *, optional: bool
) -> ScoredPlan | None:
    """Return the fastest of the trials, which are sorted by bound.

    If the time is over, only those scored so far count, at least one unless that is `optional`.
    """
    best: ScoredPlan | None = None
    loose = 0
    for trial in trials:
        if trial.bound >= limit or ((optional or best is not None) and space.budget.over):
            break
        loose += not trial.tight
        if not trial.tight and loose > MOST_TRIED:
            continue
        plan = trial.score(limit)
        if plan is not None:
            best, limit = plan, plan.step_seconds
    return best


def _trials(space: Space, proposals: Sequence[Proposal], *, optional: bool) -> Iterator[_Trial]:
    """Yield the trials of proposals of one configuration and number of parts."""
    if proposals[0].config.schedule in SEARCHED:
        yield from _linear_trials(space, proposals)
    else:
        trials = (_trial(space, proposal, optional=optional) for proposal in proposals)
        yield from (trial for trial in trials if trial is not None)


def _score_long(
    space: Space, proposals: Sequence[Proposal], limit: float, *, optional: bool
) -> ScoredPlan | None:
    """Return the fastest of pipelines of a long chain, whose stage tables are too large.

    The proposals with the least work on their busiest stage are scored one by one.
    """
    allowed = set(np.flatnonzero(space.chain.cut_after) + 1) | {len(space.chain)}
    measured = [p for p in proposals if allowed.issuperset(p.ends) and is_measured(space, p)]
    works = [busiest_seconds(space, proposal) for proposal in measured]
    best: ScoredPlan | None = None
    fitting = 0
    for index in np.argsort(works, kind="stable")[:MOST_TRIED].tolist():
        if works[index] >= limit or fitting == MOST_SCORED:
            break
        if (optional or best is not None) and space.budget.over:
            break
        narrow = narrow_space(space, measured[index].ends)
        linear = measured[index].config.schedule in SEARCHED
        fitting += not linear or choose_modes(narrow, measured[index]) is not None
        trials = _trials(narrow, [measured[index]], optional=optional)
        plan = _score_trials(space, trials, limit, optional=optional)
        if plan is not None:
            best, limit = plan, plan.step_seconds
    return best


def _linear_trials(space: Space, proposals: Sequence[Proposal]) -> Iterator[_Trial]:
    group = linear_group(space, proposals)
    if group is not None:
        for row, bound in enumerate(group.bounds):
            yield _Trial(bound, True, partial(_score_linear, group, row))


def _score_linear(group: LinearGroup, row: int, limit: float) -> ScoredPlan | None:
    step = float(group.pipelines.select(np.array([row])).step_seconds()[0])
    return ScoredPlan(*group.rows[row], step) if step < limit else None


def _trial(space: Space, proposal: Proposal, *, optional: bool) -> _Trial | None:
    """Return the trial of a pipeline of any schedule; None if its cuts or shares are not allowed."""
    if not possible(space, proposal):
        return None
    score = partial(_score_any, space, proposal, optional=optional)
    return _Trial(busiest_seconds(space, proposal), False, score)


def _score_any(space: Space, proposal: Proposal, limit: float, *, optional: bool) -> ScoredPlan | None:
    """Return the scored plan if it fits and is below the limit.

    None if the time ends and it is `optional`.
    """
    try:
        whole: list[Recompute] = ["never" for _ in proposal.ends]
        assembly = assemble(space, proposal, whole)
    except UsageError:
        return None  # the schedule does not run with these numbers
    modes = device_modes(space, assembly, proposal, optional=optional)
    if modes is None or (optional and space.budget.over):
        return None
    step = float(step_seconds(assembly.program, replace(assembly, recompute=modes).costs())[0])
    by_part = tuple(modes[place.device] for place in assembly.program.pipes[0])
    return ScoredPlan(proposal, by_part, step) if step < limit else None


def possible(space: Space, proposal: Proposal) -> bool:
    """Return whether the cuts and the samples per replica of a proposal are allowed, regardless of memory."""
    cut_points = list(space.table(space.chain.sizes[0]).cut_points)
    return is_measured(space, proposal) and all(
        first in cut_points
        and end in cut_points
        and space.usable[cut_points.index(first), cut_points.index(end)]
        for first, end in proposal.bounds
    )


def is_measured(space: Space, proposal: Proposal) -> bool:
    """Return whether the shares of all replicas have known costs."""
    size = proposal.config.micro_batch_size
    return all(count <= size and space.fits_someone(size, count) for count in set(proposal.replicas))


def make_program(proposal: Proposal) -> Program:
    """Return the actions of a proposal.

    Raises:
        UsageError: The schedule does not run with these numbers.
    """
    config, parts = proposal.config, len(proposal.ends)
    if config.schedule in SEARCHED:
        return cached_program(config.schedule, parts, config.micro_batches)
    stages, remainder = divmod(parts, config.virtual_stages)
    if remainder:
        raise UsageError(
            f"{parts} parts of the layers do not divide by {config.virtual_stages} virtual stages per device",
            "Give every device the same number of parts.",
        )
    return find_schedule(config.schedule).program(stages, config.micro_batches, config.virtual_stages)


def write_order(proposal: Proposal) -> list[str] | None:
    """Return the text lines of every action of a custom schedule; None for a published one."""
    name = proposal.config.schedule
    if name in PUBLISHED:
        return None
    from ..cost_models.schedule_text import write_program

    return write_program(name, make_program(proposal), find_schedule(name).source).splitlines()


def assemble(space: Space, proposal: Proposal, modes: Sequence[Recompute]) -> Assembly:
    """Return a proposal as input of the simulator.

    Args:
        space: Costs and limits.
        proposal: The proposal.
        modes: Recomputation by part, equal for all parts of a device.
    """
    if space.is_long:
        space = narrow_space(space, proposal.ends)
    program, cut_points = make_program(proposal), list(space.table(space.chain.sizes[0]).cut_points)
    ranks: dict[int, tuple[int, ...]] = {}
    recompute: dict[int, Recompute] = {}
    for part, place in enumerate(program.pipes[0]):
        ranks[place.device], recompute[place.device] = proposal.devices[part], modes[part]
    return Assembly(
        schedule=find_schedule(proposal.config.schedule),
        program=program,
        chain=space.chain,
        topology=space.topology,
        size=proposal.config.micro_batch_size,
        bounds=[(cut_points.index(first), cut_points.index(end)) for first, end in proposal.bounds],
        ranks=[ranks[device] for device in range(program.devices)],
        recompute=tuple(recompute[device] for device in range(program.devices)),
        optimizer=space.optimizer,
        dtype=space.dtype,
        precision=space.number_bytes,
        zero=space.zero,
        hosts=space.hosts,
        receives_ahead=space.mini_batch is not None,
        profiles=space.profiles,
        host_bandwidth=None if space.host is None else space.host.bandwidth,
    )


def device_modes(
    space: Space, assembly: Assembly, proposal: Proposal, *, optional: bool = False
) -> tuple[Recompute, ...] | None:
    """Return the cheapest recomputation by device with which it fits.

    Args:
        space: Costs and limits.
        assembly: The pipeline.
        proposal: The proposal.
        optional: Whether to stop if the time is over.

    Returns:
        Modes by device; None if a device does not fit, or if the time is over and the plan is optional.
    """
    modes = []
    for device in range(assembly.program.devices):
        if optional and space.budget.over:
            return None
        limit = space.limit(assembly.ranks[device])
        fitting = (
            mode
            for mode in stage_modes(proposal.config)
            if limit == inf or sum(assembly.ledger(device, mode).values()) <= limit
        )
        mode = next(fitting, None)
        if mode is None:
            return None
        modes.append(mode)
    return tuple(modes)


def busiest_seconds(space: Space, proposal: Proposal) -> float:
    """Return a bound on the step under any schedule: the work of the busiest device.

    If devices compute parts of each other, it is an even share of all work.
    """
    size, work = proposal.config.micro_batch_size, defaultdict[tuple[int, ...], float](float)
    copies = find_schedule(proposal.config.schedule).copies
    share = min(1.0, copies / proposal.config.micro_batches)
    work_before = {
        count: np.append(0.0, np.cumsum(space.least_work(divide_batch(size, count), first_share=share)))
        for count in set(proposal.replicas)
    }
    for (first, end), devices in zip(proposal.bounds, proposal.devices, strict=True):
        work[devices] += float(work_before[len(devices)][end] - work_before[len(devices)][first])
    busiest = max(work.values()) if copies == 1 else sum(work.values()) / len(work)
    return proposal.config.micro_batches * busiest * least_in_parts(space)


def least_in_parts(space: Space) -> float:
    """Return the least measured share of a split backward in a whole one; at most 1."""
    least = 1.0
    for chain in (space.chain, *space.profiles.values()):
        if chain.backward_input_seconds is not None and chain.backward_weight_seconds is not None:
            once = 0.0 if chain.accumulation_seconds is None else chain.accumulation_seconds[:, None]
            weight = np.maximum(chain.backward_weight_seconds - once, 0.0)
            parts, whole = chain.backward_input_seconds + weight, chain.backward_seconds - once
            positive = whole > 0
            least = min(least, float((parts[positive] / whole[positive]).min(initial=1.0)))
    return least


UNFIT = "does not fit"
MOST_ASSEMBLED = 16
"""Most proposals whose memory is counted, those with the most stages."""


def unfit_reason(space: Space, proposals: Sequence[Proposal]) -> str:
    """Describe why none of a planner's proposals is a plan.

    Args:
        space: The plans under the problem's limits.
        proposals: Proposals that the options allow, none of which is a plan.

    Returns:
        The memory of the proposal that lacks least. If none has known costs, the first failed check.
    """
    reasons, lacking = list[str](), list[tuple[float, str]]()
    deepest = sorted(dict.fromkeys(proposals), key=lambda proposal: -len(proposal.ends))
    for proposal in deepest[:MOST_ASSEMBLED]:
        if lacking and space.budget.over:
            break
        if (reason := next(list_failures(space, proposal), None)) is not None:
            reasons.append(reason)
            continue
        modes = (stage_modes(proposal.config)[-1],) * len(proposal.ends)
        try:
            assembly = assemble(space, proposal, modes)
        except UsageError as error:
            reasons.append(error.what)
            continue
        bytes_short, device, needed = most_lacking(space, assembly)
        if 0 < bytes_short < inf:
            lacking.append((bytes_short, f"{UNFIT}: {memory_text(assembly, device, needed, bytes_short)}"))
    return min(lacking)[1] if lacking else reasons[0] if reasons else UNFIT


def list_failures(space: Space, proposal: Proposal) -> Iterator[str]:
    """Yield reasons why a proposal has no costs: sizes, cuts or weights to train."""
    size, chain, runtime = proposal.config.micro_batch_size, space.chain, space.runtime
    for count in sorted(set(proposal.replicas)):
        if count > size:
            yield f"{count} replicas share micro-batches of {size}, so one has no sample"
        elif not space.fits_someone(size, count):
            share = divide_batch(size, count)
            yield f"a replica needs size {share:g}, but the profile measured {abbreviate(chain.sizes)}"
    allowed = {0, *(np.flatnonzero(chain.cut_after) + 1).tolist(), len(chain)}
    for stage, (first, end) in enumerate(proposal.bounds):
        if end not in allowed:
            yield f"stage {stage} ends after {chain.names[end - 1]}, where no cut is allowed"
        crossed = [layer for layer in space.limits.must_cut if first <= layer < end - 1]
        if crossed:
            yield f"stage {stage} does not end after {chain.names[crossed[0]]}, which `cut_after` requires"
        is_trained = chain.trainable_bytes[first:end].any()
        if runtime is not None and runtime.trains_every_stage and not is_trained:
            layers = chain.name_range(first, end)
            yield f"{runtime.name} trains every stage, and stage {stage} ({layers}) has 0 trainable bytes"


def most_lacking(space: Space, assembly: Assembly) -> tuple[float, int, float]:
    """Return the most bytes that a device lacks, the device of the pipeline, and the bytes that it needs."""
    needs = [sum(assembly.ledger(device).values()) for device in range(assembly.program.devices)]
    return max(
        (need - space.limit(assembly.ranks[device]), device, need) for device, need in enumerate(needs)
    )


def memory_text(assembly: Assembly, device: int, needed: float, bytes_short: float) -> str:
    """Return the memory that a device needs, and its limit, as text."""
    return (
        f"device {assembly.ranks[device][0]} needs {format_bytes(round(needed))} of "
        f"{format_bytes(round(needed - bytes_short))}"
    )
