"""Good plans before the search: from what the named planners propose, by steps to the best plan near.

A step changes one cut, moves devices between two stages, joins two stages, parts one, or takes fewer or more
micro-batches; of all such plans the fastest is next. The search by branch and bound begins with the first
stages, and on many devices may need long for its first good plan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import product

import numpy as np

from ..cost_models.layer import list_cut_points
from .candidate import Proposal, ScoredPlan, Shape, near_shapes, replicated_pipeline
from .pipeline_config import SEARCHED, PipelineConfig
from .plan_records import TIE
from .problem import Problem
from .scoring import LinearGroup, group_alike, linear_group
from .search.space import Space

SHARE = 0.08
"""Of the remaining work and time, what all steps may take."""
STARTS = 4
"""Plans from which steps are taken: the fastest of unlike numbers of stages."""
MOVED = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Devices that a step takes from a stage and gives to another."""
FAR_CUTS = (-4, -2, -1, 1, 2, 4)
"""Places by which a step moves a cut."""
SIDE_BY_SIDE, MOST_SIMULATED = 32, 192
"""Plans that are simulated together, and in all before a step is given up."""
PROPOSAL_WORK = 150_000
"""Of one plan near, see `SearchBudget`."""


def descend(problem: Problem, plans: Iterable[ScoredPlan]) -> list[ScoredPlan]:
    """What steps from the fastest of these plans of 1F1B and GPipe lead to, the fastest first, as far as the
    time goes. None of a plan that no step makes faster."""
    space = problem.space.within(problem.budget.part(SHARE * problem.budget.remaining, share=SHARE))
    starts = dict[int, ScoredPlan]()
    for plan in sorted(plans, key=lambda plan: plan.step_seconds):
        if plan.config.schedule in SEARCHED:
            starts.setdefault(len(plan.proposal.ends), plan)
    ways = [_descend(problem, plan, space) for plan in list(starts.values())[:STARTS]]
    return sorted((plan for plan in ways if plan is not None), key=lambda plan: plan.step_seconds)


def _descend(problem: Problem, start: ScoredPlan, space: Space) -> ScoredPlan | None:
    """Where steps from this plan end; None where no step makes it faster."""
    best, far = start, False
    while not space.budget.spent:
        near = list(_near(problem, best, far=far))
        space.budget.spend(PROPOSAL_WORK * len(near))
        faster = _faster(space, near, best.step_seconds * (1 - TIE))
        if faster is None and far:
            break
        best, far = faster or best, faster is None
    return None if best is start else best


def _faster(space: Space, proposals: Iterable[Proposal], limit: float) -> ScoredPlan | None:
    """A plan among the proposals that takes less than the limit: of those with the lowest bounds, as many as
    are simulated together, the fastest."""
    groups = list[LinearGroup]()
    for alike in group_alike(proposals):
        if space.budget.over:
            return None
        group = linear_group(space, alike)
        groups += [] if group is None else [group]
    trials = sorted(
        (bound, number, row)
        for number, group in enumerate(groups)
        for row, bound in enumerate(group.bounds)
        if bound < limit
    )
    best: ScoredPlan | None = None
    for first in range(0, min(len(trials), MOST_SIMULATED), SIDE_BY_SIDE):
        if best is not None or space.budget.over:
            break
        together = defaultdict[int, list[int]](list)
        for _, number, row in trials[first : first + SIDE_BY_SIDE]:
            together[number].append(row)
        for number, rows in sorted(together.items()):
            pipelines = groups[number].pipelines
            steps = pipelines.select(np.array(rows)).step_seconds(limit)
            space.budget.simulate(len(rows), 2 * pipelines.stages * pipelines.config.micro_batches)
            index = int(steps.argmin())
            if steps[index] < limit:
                limit = float(steps[index])
                best = ScoredPlan(*groups[number].rows[rows[index]], limit)
    return best


def _near(problem: Problem, plan: ScoredPlan, *, far: bool) -> Iterator[Proposal]:
    """The plans a step away that the options allow."""
    own, points = plan.proposal, list_cut_points(problem.space.chain)
    steps = far_shapes if far else near_shapes
    shapes = {(own.ends, own.replicas), *steps(points, own.ends, own.replicas, problem.usable_gpus)}
    configs = _near_configs(problem, own.config) if far else [own.config]
    for config, (ends, replicas) in product(configs, sorted(shapes)):
        fewer = tuple(min(count, config.micro_batch_size) for count in replicas)
        proposal = replicated_pipeline(config, ends, fewer)
        if problem.allows(proposal):
            yield proposal


def _near_configs(problem: Problem, config: PipelineConfig) -> list[PipelineConfig]:
    """Of 1F1B and GPipe, with as many micro-batches, the next fewer and the next more."""
    own = [other for other in problem.configs if other.schedule in SEARCHED]
    counts, count = {other.micro_batches for other in own}, config.micro_batches
    fewer = max((other for other in counts if other < count), default=count)
    more = min((other for other in counts if other > count), default=count)
    return [other for other in own if other.micro_batches in (fewer, count, more)]


def far_shapes(
    cut_points: tuple[int, ...], ends: tuple[int, ...], replicas: tuple[int, ...], devices: int
) -> Iterator[Shape]:
    """A cut moved by up to four places; devices moved from a stage to another, left out or added, of at most
    so many; two stages joined, on the devices of both or of the larger; one parted at any place.
    `cut_points`: with 0 and the last layer's. Some come twice."""
    at, stages = [0, *(cut_points.index(end) for end in ends)], range(len(ends))
    free = devices - sum(replicas)
    for cut, way in product(stages[:-1], FAR_CUTS):
        if at[cut] < at[cut + 1] + way < at[cut + 2]:
            yield (*ends[:cut], cut_points[at[cut + 1] + way], *ends[cut + 1 :]), replicas
    for giver, taker in product((None, *stages), (None, *stages)):
        most = free if giver is None else replicas[giver] - 1
        for moved in MOVED if giver != taker else ():
            if moved <= most:
                counts = (
                    r + moved * ((stage == taker) - (stage == giver)) for stage, r in enumerate(replicas)
                )
                yield ends, tuple(counts)
    for cut in stages[:-1]:
        both = replicas[cut : cut + 2]
        for count in {sum(both), max(both)}:
            yield (*ends[:cut], *ends[cut + 1 :]), (*replicas[:cut], count, *replicas[cut + 2 :])
    for stage, count in enumerate(replicas):
        shares = {(count - part, part) for part in (1, count // 4, count // 2, count - 1) if 0 < part < count}
        shares |= {(count, free), (free, count), (count, 1), (1, count)} if free else set()
        for middle, parts in product(range(at[stage] + 1, at[stage + 1]), sorted(shares)):
            yield (
                (*ends[:stage], cut_points[middle], *ends[stage:]),
                (*replicas[:stage], *parts, *replicas[stage + 1 :]),
            )
