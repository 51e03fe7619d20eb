"""Local search: steps from good plans to better neighbours.

A step moves a cut, moves devices to a busy stage, joins two stages, splits one, or changes the number of
micro-batches. The fastest neighbour is the next plan. Problems that are too large for branch and bound get
their plans from here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise

import numpy as np

from ..candidate import PipelineConfig, Proposal, ScoredPlan, Shape
from ..plan_file import TIE
from .budget import OutOfTime, SearchBudget
from .family import Family
from .linear_groups import group_alike, linear_group
from .near_plans import Incumbent
from .space import Space, with_cuts

STARTS = 4
"""Plans from which the steps begin: the fastest of each number of stages and configuration."""
MOST_SIMULATED = 48
"""Most neighbours of a plan that are simulated, those with the lowest bounds."""
BUSY = 3
"""Number of stages that are given devices: those that compute longest."""
NEAR_CUTS = 3
"""Allowed cuts on each side to which a cut moves one by one. Further moves double in length."""
PROPOSAL_WORK = 1e5
"""Counted work to build a plan, per stage."""


def improve_plans(incumbent: Incumbent, budget: SearchBudget) -> None:
    """Improve the fastest plans that were scored, as far as the budget allows."""
    starts = dict[tuple[int, PipelineConfig], ScoredPlan]()
    for plan in sorted(incumbent.scored, key=lambda plan: plan.step_seconds):
        starts.setdefault((len(plan.proposal.ends), plan.config), plan)
    search = _Steps(incumbent, budget)
    try:
        for plan in list(starts.values())[:STARTS]:
            search.descend(plan)
    except OutOfTime:
        return


class _Steps:
    """Local search of one problem."""

    def __init__(self, incumbent: Incumbent, budget: SearchBudget) -> None:
        self.incumbent, self.budget = incumbent, budget
        self.space = incumbent.space.within(budget)
        self.counts = set(incumbent.counts)
        self.families = dict[PipelineConfig, list[Family]]()
        for family in incumbent.families:
            self.families.setdefault(family.config, []).append(family)
        self._cuts = np.flatnonzero(self.space.chain.cut_after[:-1]) + 1

    def descend(self, plan: ScoredPlan) -> None:
        """Take the fastest step repeatedly, until no neighbour is faster."""
        while not self.budget.spent:
            faster = self._faster(plan)
            if faster is None:
                return
            plan = faster
            self.incumbent.take(plan)

    def _faster(self, plan: ScoredPlan) -> ScoredPlan | None:
        """Return the fastest neighbour if it is faster than the plan."""
        proposals = list(dict.fromkeys(self._near(plan)))
        self.budget.spend(PROPOSAL_WORK * sum(len(proposal.ends) for proposal in proposals))
        space = self._space(proposals)
        groups = [group for alike in group_alike(proposals) if (group := linear_group(space, alike))]
        limit, best = plan.step_seconds * (1 - TIE), None
        trials = sorted(
            (bound, number, row)
            for number, group in enumerate(groups)
            for row, bound in enumerate(group.bounds)
            if bound < limit
        )
        for bound, number, row in trials[:MOST_SIMULATED]:
            if bound >= limit:
                break
            self.budget.check()
            group = groups[number]
            step = float(group.pipelines.select(np.array([row])).step_seconds(limit)[0])
            self.budget.simulate(1, 2 * group.pipelines.stages * group.pipelines.config.micro_batches)
            if step < limit:
                best, limit = ScoredPlan(*group.rows[row], step), step
        return best

    def _space(self, proposals: Iterable[Proposal]) -> Space:
        """Return the space; for a long chain, with only the cuts of the proposals."""
        if not self.space.is_long:
            return self.space
        cut_after = np.zeros(len(self.space.chain), dtype=np.bool_)
        for proposal in proposals:
            cut_after[np.array(proposal.ends[:-1], dtype=np.int64) - 1] = True
        return with_cuts(self.space, cut_after)

    def _near(self, plan: ScoredPlan) -> Iterator[Proposal]:
        """Yield the allowed neighbours of a plan."""
        shape = plan.proposal.ends, plan.proposal.replicas
        for family in self.families[plan.config]:
            for ends, replicas in self._shapes(plan, family):
                yield from self._placed(family, ends, replicas)
        counts = sorted({config.micro_batches for config in self.families})
        at = counts.index(plan.config.micro_batches)
        for config, families in self.families.items():
            if config.micro_batches in counts[max(at - 1, 0) : at + 2]:
                for family in families:
                    yield from self._placed(family, *shape)

    def _placed(self, family: Family, ends: Sequence[int], replicas: Sequence[int]) -> Iterator[Proposal]:
        """Yield the plan on consecutive devices in the order of a family, if it is allowed."""
        ranks, config = family.placement.ranks, family.config
        replicas = [min(count, config.micro_batch_size) for count in replicas]
        usable = family.any_count or set(replicas) <= set(family.replicas)
        if not usable or sum(replicas) > len(ranks) or len(ends) not in self.counts:
            return
        if family.on_all and sum(replicas) != len(ranks):
            return
        if not self.space.limits.allow(list(pairwise((0, *ends)))):
            return
        if not all(self.space.fits_someone(config.micro_batch_size, count) for count in set(replicas)):
            return
        bounds = pairwise(accumulate(replicas, initial=0))
        yield Proposal(config, tuple(ends), tuple(tuple(ranks[first:end]) for first, end in bounds))

    def _shapes(self, plan: ScoredPlan, family: Family) -> Iterator[Shape]:
        """Yield ends and replicas of neighbours. They may need more devices than there are."""
        ends, replicas = plan.proposal.ends, plan.proposal.replicas
        devices, cuts, stages = len(family.placement.ranks), self._cuts, range(len(ends))
        at = np.searchsorted(cuts, ends[:-1]).tolist()
        for cut, place in enumerate(at):
            for moved in self._moves(place):
                first = ends[cut - 1] if cut else 0
                if first < cuts[moved] < ends[cut + 1]:
                    yield (*ends[:cut], int(cuts[moved]), *ends[cut + 1 :]), replicas
            joined = (*ends[:cut], *ends[cut + 1 :])
            for count in {sum(replicas[cut : cut + 2]), max(replicas[cut : cut + 2])}:
                yield joined, (*replicas[:cut], count, *replicas[cut + 2 :])
        usable = sorted(range(1, devices + 1) if family.any_count else family.replicas)
        free = devices - sum(replicas)
        for taker in self._busiest(plan):
            larger = [count for count in usable if count > replicas[taker]][:2]
            for count in larger:
                more = (*replicas[:taker], count, *replicas[taker + 1 :])
                if count - replicas[taker] <= free:
                    yield ends, more
                for giver in stages:
                    left = replicas[giver] - (count - replicas[taker] - free)
                    fewer = max((number for number in usable if number <= left), default=0)
                    if giver != taker and 0 < fewer < replicas[giver]:
                        yield ends, (*more[:giver], fewer, *more[giver + 1 :])
            yield from self._parted(plan, taker, free)

    def _parted(self, plan: ScoredPlan, stage: int, free: int) -> Iterator[Shape]:
        """Yield shapes that split a stage in two, on its devices or with free ones."""
        ends, replicas = plan.proposal.ends, plan.proposal.replicas
        first, count = (ends[stage - 1] if stage else 0), replicas[stage]
        inner = self._cuts[(self._cuts > first) & (self._cuts < ends[stage])]
        shares = {(count - part, part) for part in (1, count // 4, count // 2, count - 1) if 0 < part < count}
        shares |= {(count, free), (free, count)} if free else set()
        for middle in inner[np.linspace(0, len(inner) - 1, 9).round().astype(int)] if len(inner) else ():
            for parts in sorted(shares):
                yield (
                    (*ends[:stage], int(middle), *ends[stage:]),
                    (*replicas[:stage], *parts, *replicas[stage + 1 :]),
                )

    def _moves(self, place: int) -> Iterator[int]:
        """Yield the cuts to which a cut moves."""
        step = 1
        while step <= max(NEAR_CUTS, len(self._cuts) // 16):
            yield from (moved for moved in (place - step, place + step) if 0 <= moved < len(self._cuts))
            step = step + 1 if step < NEAR_CUTS else 2 * step

    def _busiest(self, plan: ScoredPlan) -> list[int]:
        """Return the stages that compute longest with their current replicas."""
        size, work = plan.config.micro_batch_size, []
        for (first, end), mode, count in zip(
            plan.proposal.bounds, plan.recompute, plan.proposal.replicas, strict=True
        ):
            costs = self.space.table(-(-size // count)).costs
            forward = float(costs.forward_seconds[first:end].sum())
            backward = float(costs.backward_seconds[first:end].sum())
            work.append((2 if mode != "never" else 1) * forward + backward)
        return [int(stage) for stage in np.argsort(work)[::-1][:BUSY]]
