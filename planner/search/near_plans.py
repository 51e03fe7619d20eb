"""Plans near the pipelines that attain the bound: whole replicas, on the devices that there are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf

import numpy as np

from ..candidate import Proposal, ScoredPlan, tell_best
from ..plan_records import TIE
from .bound import FamilyBound, PricedStage
from .budget import SearchBudget
from .family import Family, bounded_counts, distinct_families
from .linear_groups import linear_group
from .placements import Placement
from .space import Space, divide_batch, narrow_space
from .stage_figures import StageFigures, even_cuts

FAR = 1.1
"""Plans with bounds above this many times the best step are not simulated."""
MOST_STAGES = 512
"""Largest number of stages of a pipeline with equal replicas."""
SCORING = 2e3
"""Work for each device of a plan, mostly for the ports that it shares."""


class Incumbent:
    """The best plan so far of a search. Call it with a pipeline to score plans near it and get `within`."""

    def __init__(
        self,
        space: Space,
        families: Sequence[Family],
        counts: Sequence[int],
        budget: SearchBudget,
        limit: float = inf,
        *,
        deeper: bool = False,
        any_order: bool = False,
    ) -> None:
        self.space, self.families, self.counts, self.budget = space, families, counts, budget
        self._limit, self._deeper, self._any_order = limit, deeper, any_order
        self.best: ScoredPlan | None = None
        self.scored = list[ScoredPlan]()
        """Plans that fit, as they were found."""
        self._proposals = set[Proposal]()

    @property
    def step(self) -> float:
        """Seconds of the best plan; the limit where there is none."""
        return self._limit if self.best is None else self.best.step_seconds

    def take(self, plan: ScoredPlan | None) -> None:
        """Keep the plan where it is faster."""
        if plan is not None and plan.step_seconds < self.step:
            self.best = plan
            tell_best(plan)

    def __call__(self, bound: FamilyBound, pipeline: Sequence[PricedStage]) -> float:
        for proposal in round_pipeline(self.space, bound, pipeline, self.families, any_order=self._any_order):
            if proposal not in self._proposals:
                self._proposals.add(proposal)
                self.budget.spend(SCORING * len(bound.family.placement.ranks))
                self.score(proposal)
        return self.within

    @property
    def within(self) -> float:
        """Seconds slightly above the step, so that plans as fast as the best one lie below."""
        return self.step * (1 + 2 * TIE)

    def score(self, proposal: Proposal) -> None:
        """Simulate a plan, where it fits."""
        stages = len(proposal.ends)
        is_allowed = stages in self.counts or (self._deeper and stages > max(self.counts))
        if not is_allowed or not self.space.limits.allow(proposal.bounds):
            return
        narrow = narrow_space(self.space, proposal.ends) if self.space.is_long else self.space
        self.budget.check()
        group = linear_group(narrow, [proposal])
        if group is None or group.bounds[0] >= self.step * FAR:
            return
        # Shared ports only make a step longer, and take long to find where devices are many.
        step = float(group.pipelines.without_sharing().step_seconds()[0])
        self.budget.simulate(1, 2 * stages * proposal.config.micro_batches)
        if step < self.step:
            step = float(group.pipelines.step_seconds()[0])
        plan = ScoredPlan(*group.rows[0], step)
        self.scored.append(plan)
        self.take(plan)


def equal_pipelines(space: Space, families: Iterable[Family]) -> list[Proposal]:
    """Pipelines whose stages have equal replicas and about equal work, by number of replicas; those with the
    shortest estimates first."""
    estimates = list[tuple[float, int, Proposal]]()
    allowed = np.flatnonzero(space.chain.cut_after[:-1])
    for family in distinct_families(families):
        ranks, config = family.placement.ranks, family.config
        for count in _usable_counts(space, family):
            stages = len(ranks) // count
            if not 1 < stages <= min(space.chain.max_stages, MOST_STAGES):
                continue
            if family.on_all and stages * count < len(ranks):
                continue
            work = space.least_work(divide_batch(config.micro_batch_size, count), first_share=0.0)
            ends = (*(even_cuts(work, allowed, stages) + 1).tolist(), len(space.chain))
            if len(ends) == stages:
                devices = tuple(ranks[first : first + count] for first in range(0, stages * count, count))
                longest = float(np.add.reduceat(work, (0, *ends[:-1])).max())
                estimate = longest * (config.micro_batches + stages - 1)
                estimates.append((estimate, len(estimates), Proposal(config, ends, devices)))
    return [proposal for _, _, proposal in sorted(estimates, key=lambda row: row[:2])]


@dataclass
class _Stage:
    """A stage on devices of a kind: `work`, seconds of a micro-batch on one device."""

    end: int
    kind: int
    replicas: int
    work: float


def round_pipeline(
    space: Space,
    bound: FamilyBound,
    pipeline: Sequence[PricedStage],
    families: Iterable[Family],
    *,
    any_order: bool,
) -> Iterator[Proposal]:
    """The pipeline with its replicas changed until there are devices enough, and none is left that helps, on
    consecutive devices of each order; with `any_order` also on the kinds that its stages have."""
    family, figures, stages = bound.family, bound.figures, list[_Stage]()
    for stage in pipeline:
        choice, seconds = bound.choice[stage.row], float(bound.seconds[stage.row])
        replicas, kind = int(figures.replicas[choice]), int(figures.kind[choice])
        stages.append(_Stage(figures.cut_points[stage.end], kind, replicas, seconds * replicas))
    ends = [stage.end for stage in stages]
    if any(end <= start for start, end in zip([0, *ends], ends, strict=False)):
        return
    counts = list(_usable_counts(space, family))
    for kind, devices in enumerate(figures.devices):
        if not _fit_replicas([stage for stage in stages if stage.kind == kind], counts, int(devices)):
            return
    if family.on_all and sum(stage.replicas for stage in stages) < len(family.placement.ranks):
        return
    for order in dict.fromkeys(one.placement for one in families if one.config == family.config):
        for devices in dict.fromkeys(_assignments(space, order, figures, stages, any_order=any_order)):
            yield Proposal(family.config, tuple(ends), devices)


def _fit_replicas(stages: Sequence[_Stage], counts: Sequence[int], devices: int) -> bool:
    """Change the replicas of the stages on a kind of device; return whether there are devices enough."""
    spare = devices - sum(stage.replicas for stage in stages)
    fewer = {count: max((one for one in counts if one < count), default=0) for count in counts}
    while spare < 0:
        shrinkable = [stage for stage in stages if fewer.get(stage.replicas)]
        if not shrinkable:
            return False
        stage = min(shrinkable, key=lambda one: one.work / fewer[one.replicas])
        spare, stage.replicas = spare + stage.replicas - fewer[stage.replicas], fewer[stage.replicas]
    while stages:
        stage = max(stages, key=lambda one: one.work / one.replicas)
        more = next((count for count in counts if count > stage.replicas), inf)
        if more - stage.replicas > spare:
            break
        spare, stage.replicas = spare - int(more) + stage.replicas, int(more)
    return True


def _usable_counts(space: Space, family: Family) -> Iterator[int]:
    """Numbers of replicas that may be; of those with the same share of a micro-batch the fewest."""
    size, last_size = family.config.micro_batch_size, -1
    for count in bounded_counts(family):
        if count <= size and divide_batch(size, count) != last_size and space.fits_someone(size, count):
            last_size = divide_batch(size, count)
            yield count


def _assignments(
    space: Space, order: Placement, figures: StageFigures, stages: Sequence[_Stage], *, any_order: bool
) -> Iterator[tuple[tuple[int, ...], ...]]:
    """The devices of the stages: the next ones in an order; with `any_order`, unless a runtime numbers them,
    also the next of the kind of each stage."""
    ends = accumulate((stage.replicas for stage in stages), initial=0)
    yield tuple(order.ranks[first:end] for first, end in pairwise(ends))
    if any_order and space.runtime is None and len(figures.kinds) > 1:
        numbers, ranks = space.topology.kind_numbers(order.ranks), np.array(order.ranks)
        free = [iter(ranks[numbers == space.topology.kinds.index(kind)].tolist()) for kind in figures.kinds]
        yield tuple(tuple(next(free[stage.kind]) for _ in range(stage.replicas)) for stage in stages)
