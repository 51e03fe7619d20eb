"""Feasible plans near the pipelines that attain the bound: whole replicas on the available devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from math import inf

import numpy as np

from ...cost_models.topology import Device
from ..candidate import Proposal, ScoredPlan, tell_best
from ..plan_file import TIE
from .budget import SearchBudget
from .family import Family, RoughStage, bounded_counts, distinct_families, may_have, quick_bound
from .linear_groups import linear_group
from .placements import Placement
from .reach_bound import ReachBound
from .space import Space, divide_batch, narrow_space

FAR = 1.1
"""Plans with bounds above this multiple of the best step are not simulated."""
MOST_STAGES, MOST_TRIED = 512, 60
"""Most stages of a pipeline with equal replicas, and most of these pipelines that are built."""
FOR_EQUAL = 0.4
"""Share of the work and the time for pipelines with equal replicas."""
SCORING = 2e3
"""Counted work per device of a plan, mainly for the ports that it shares."""


class Incumbent:
    """Best plan so far of a search. Calling it with a pipeline scores plans near it and returns `within`.

    Args:
        space: Costs and limits.
        families: Configurations on orders of the devices.
        counts: Numbers of stages.
        budget: Budget of the search.
        limit: Seconds that a plan must be faster than.
        deeper: Whether plans with more stages are allowed, too.
        any_order: Whether stages may take devices out of the placements' orders.
    """

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
        """Plans that fit, in the order in which they were simulated."""
        self._proposals = set[Proposal]()

    @property
    def step(self) -> float:
        """Seconds of the best plan; the limit if none exists."""
        return self._limit if self.best is None else self.best.step_seconds

    def take(self, plan: ScoredPlan | None) -> None:
        """Keep the plan if it is faster than the best one."""
        if plan is not None and plan.step_seconds < self.step:
            self.best = plan
            tell_best(plan)

    def __call__(self, family: Family, pipeline: Sequence[RoughStage]) -> float:
        """Score plans near a pipeline of a family and return `within`."""
        for proposal in round_pipeline(
            self.space, family, pipeline, self.families, any_order=self._any_order
        ):
            if proposal not in self._proposals:
                self._proposals.add(proposal)
                self.budget.spend(SCORING * len(family.placement.ranks))
                self.score(proposal)
        return self.within

    @property
    def within(self) -> float:
        """Seconds slightly above the step, so that plans as fast as the best one lie below."""
        return self.step * (1 + 2 * TIE)

    def allows(self, stages: int) -> bool:
        """Return whether plans may have this number of stages."""
        return may_have(stages, self.counts, deeper=self._deeper)

    def score(self, proposal: Proposal) -> None:
        """Simulate a plan if it is allowed and fits."""
        stages = len(proposal.ends)
        if not self.allows(stages) or not self.space.limits.allow(proposal.bounds):
            return
        narrow = narrow_space(self.space, proposal.ends) if self.space.is_long else self.space
        self.budget.check()
        group = linear_group(narrow, [proposal])
        if group is None or group.bounds[0] >= self.step * FAR:
            return
        # Shared ports only make a step longer, and are expensive to find for many devices.
        step = float(group.pipelines.without_sharing().step_seconds()[0])
        self.budget.simulate(1, 2 * stages * proposal.config.micro_batches)
        if step < self.step:
            step = float(group.pipelines.step_seconds()[0])
        plan = ScoredPlan(*group.rows[0], step)
        self.scored.append(plan)
        self.take(plan)


def score_equal(incumbent: Incumbent) -> None:
    """Score the shortest pipelines whose stages have equal replicas, for each family and number of replicas.

    Those with the shortest estimates come first. With several kinds of devices, stages take the fastest last,
    the fastest first, or any.
    """
    budget = incumbent.budget.part(FOR_EQUAL * incumbent.budget.remaining, share=FOR_EQUAL)
    space, trials = incumbent.space.within(budget), list[tuple[float, int, Family]]()
    for family in distinct_families(incumbent.families):
        config, by_kind = family.config, space.topology.count_kinds(family.placement.ranks)
        for count in _usable_counts(space, family):
            stages = min(sum(devices // count for devices in by_kind.values()), space.chain.max_stages)
            if not 1 < stages <= MOST_STAGES:
                continue
            work = space.least_work(divide_batch(config.micro_batch_size, count), first_share=0.0)
            estimate = float(work.sum()) / stages * (config.micro_batches + stages - 1)
            trials.append((estimate, len(trials), replace(family, replicas=(count,), any_count=False)))
    for estimate, _, family in sorted(trials, key=lambda trial: trial[:2])[:MOST_TRIED]:
        if estimate >= incumbent.step or budget.spent:
            return
        reach = ReachBound(space, family)
        low, (count,) = quick_bound(space, family), family.replicas
        devices_by_kind = [[kind] * int(devices // count) for kind, devices in enumerate(reach.devices)]
        fastest_last = list(chain.from_iterable(devices_by_kind[place] for place in np.argsort(-reach.speed)))
        orders = [fastest_last, fastest_last[::-1], []] if len(devices_by_kind) > 1 else [[]]
        for kinds in orders:
            high = min(incumbent.within, 8 * estimate)
            pipeline = reach.shortest_pipeline(low, high, incumbent.allows, kinds)
            if pipeline:
                incumbent(family, pipeline)


@dataclass
class _Stage:
    """A stage on devices of one kind; `work` is the seconds of a micro-batch on one device."""

    end: int
    kind: int
    replicas: int
    work: float


def round_pipeline(
    space: Space,
    family: Family,
    pipeline: Sequence[RoughStage],
    families: Iterable[Family],
    *,
    any_order: bool,
) -> Iterator[Proposal]:
    """Yield feasible plans near a pipeline.

    Replicas are removed until there are enough devices, and added while that helps. Stages take consecutive
    devices of each order.

    Args:
        space: Costs and limits.
        family: Family of the pipeline.
        pipeline: Stages on kinds of devices.
        families: All families, whose orders of the devices are tried.
        any_order: Whether to try the kinds of devices that the stages have, and replicas in whole nodes.
    """
    stages, ranks = [_Stage(*stage) for stage in pipeline], family.placement.ranks
    ends = [stage.end for stage in stages]
    if any(end <= start for start, end in zip([0, *ends], ends, strict=False)):
        return
    counts, kinds = list(_usable_counts(space, family)), space.topology.count_kinds(ranks)
    for kind, devices in enumerate(kinds.values()):
        if not _fit_replicas([stage for stage in stages if stage.kind == kind], counts, devices):
            return
    if family.on_all and sum(stage.replicas for stage in stages) < len(ranks):
        return
    orders = list(
        dict.fromkeys(candidate.placement for candidate in families if candidate.config == family.config)
    )
    whole_nodes = _whole_nodes(stages, space.topology.gpus_per_node, list(kinds.values()))
    for rounded in [stages, whole_nodes] if any_order and family.any_count else [stages]:
        for order in orders:
            assignments = _assignments(space, order, tuple(kinds), rounded, any_order=any_order)
            for placed in dict.fromkeys(assignments):
                yield Proposal(family.config, tuple(ends), placed)


def _whole_nodes(stages: Sequence[_Stage], node: int, devices: Sequence[int]) -> list[_Stage]:
    """Return the stages with replicas rounded to whole nodes if they have more than one node.

    Collectives between parts of nodes take longer. No kind gets more than its number of devices.
    """
    spare = list(devices)
    for stage in stages:
        spare[stage.kind] -= stage.replicas
    rounded = list[_Stage]()
    for stage in stages:
        more = -stage.replicas % node if stage.replicas > node else 0
        more = more if more <= spare[stage.kind] else more - node
        spare[stage.kind] -= more
        rounded.append(replace(stage, replicas=stage.replicas + more))
    return rounded


def _fit_replicas(stages: Sequence[_Stage], counts: Sequence[int], devices: int) -> bool:
    """Change the replicas of the stages on one kind of device; return whether the devices suffice."""
    spare = devices - sum(stage.replicas for stage in stages)
    fewer = {count: max((number for number in counts if number < count), default=0) for count in counts}
    while spare < 0:
        shrinkable = [stage for stage in stages if fewer.get(stage.replicas)]
        if not shrinkable:
            return False
        stage = min(shrinkable, key=lambda number: number.work / fewer[number.replicas])
        spare, stage.replicas = spare + stage.replicas - fewer[stage.replicas], fewer[stage.replicas]
    while stages:
        stage = max(stages, key=lambda number: number.work / number.replicas)
        more = next((count for count in counts if count > stage.replicas), inf)
        if more - stage.replicas > spare:
            break
        spare, stage.replicas = spare - int(more) + stage.replicas, int(more)
    return True


def _usable_counts(space: Space, family: Family) -> Iterator[int]:
    """Yield the allowed numbers of replicas; of those with the same share of a micro-batch the fewest."""
    size, last_size = family.config.micro_batch_size, -1
    for count in bounded_counts(family):
        if count <= size and divide_batch(size, count) != last_size and space.fits_someone(size, count):
            last_size = divide_batch(size, count)
            yield count


def _assignments(
    space: Space, order: Placement, kinds: Sequence[Device], stages: Sequence[_Stage], *, any_order: bool
) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield the devices of the stages: the next ones in an order.

    With `any_order`, and unless a runtime fixes the ranks, also the next ones of each stage's kind.
    """
    ends = accumulate((stage.replicas for stage in stages), initial=0)
    yield tuple(order.ranks[first:end] for first, end in pairwise(ends))
    if any_order and space.runtime is None and len(kinds) > 1:
        numbers, ranks = space.topology.kind_numbers(order.ranks), np.array(order.ranks)
        free = [iter(ranks[numbers == space.topology.kinds.index(kind)].tolist()) for kind in kinds]
        yield tuple(tuple(next(free[stage.kind]) for _ in range(stage.replicas)) for stage in stages)
