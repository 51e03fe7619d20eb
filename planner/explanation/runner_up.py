"""The runner-up plans: the best that has other cuts, replicas or devices, and the best with
another number of stages.

A plan with as many stages and other cuts leaves out one of the plan's own cuts: the search is run again with
each of them forbidden. Other replicas and devices of the same stages are scored one by one. Where a stage has
time to spare, plans with other cuts are as fast: they are reported apart, and the cuts that they have instead
are forbidden, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from ...cost_models.document import Record
from ..candidate import SEARCHED, Proposal, ScoredPlan, replicated_pipeline
from ..plan_file import TIE, PlanSummary, summarize
from ..problem import Problem
from ..scoring import fastest
from ..search.device_sets import list_shapes
from ..search.family import Family
from ..search.placements import ANY, Placement
from ..search.space import with_cuts
from .explain_context import ExplainContext
from .resolve import SECONDS, search_near

MOST_CUTS = 8
"""Cuts that are forbidden in turn, those next to the busiest stage first."""
MOST_SHAPES = 128
"""Choices of devices for the same stages that are scored, those nearest to the plan's own first."""
MOST_LISTED = 4000
"""Choices of devices that are listed for each order of the devices."""

TIES = 6
"""Plans that are as fast, at the most, for each cut that is forbidden."""

Shape = tuple[tuple[int, ...], ...]
"""By stage, the ranks of its replicas."""


class RunnerUp(Record):
    """The best other plan that was found, of those that are not as fast. `proven`: no other of the searched
    space is faster. `plan` is None where none is possible, or none was found."""

    differs: str
    """How, in words."""
    plan: PlanSummary | None
    slower: float | None
    """Its step over the plan's, less 1: negative where it is faster."""
    proven: bool

    @property
    def reason(self) -> str:
        """Why there is no plan, where there is none."""
        return "none is possible" if self.proven else "none was found"


@dataclass(frozen=True)
class RunnersUp:
    """The best plan of each kind, one that is as fast (None: none was found), and all that were found."""

    second_best: RunnerUp
    other_stages: RunnerUp
    as_fast: ScoredPlan | None
    plans: tuple[ScoredPlan, ...]


@dataclass(frozen=True)
class _Best:
    """What was found, beside the `ties`: plans as fast as that in question. `proven`: of the schedules that
    are searched."""

    plan: ScoredPlan | None
    proven: bool
    ties: tuple[ScoredPlan, ...] = ()


def runners_up(context: ExplainContext, seeds: Sequence[ScoredPlan], busiest: int) -> RunnersUp:
    """The second-best plans. `busiest`: the stage whose cuts matter most."""
    stages = _other_stage_counts(context, seeds)
    cuts = [_without_cut(context, seeds, end) for end in _cuts(context.present.proposal, busiest)]
    every = len(cuts) == len(context.present.proposal.ends) - 1
    bests = [*cuts, _other_devices(context), stages]
    ties = [plan for best in bests for plan in best.ties]
    slower = [best.plan for best in bests if best.plan is not None]
    if stages.plan is not None and _as_fast(stages.plan, context.present):
        ties.append(stages.plan)
        slower.remove(stages.plan)
    searched = _all_searched(context.problem)
    proven = searched and every and not ties and all(best.proven for best in bests)
    return RunnersUp(
        _rival(context, _Best(_fastest(slower), proven), "cuts, replicas or devices"),
        _rival(context, replace(stages, proven=searched and stages.proven), "number of stages"),
        ties[0] if ties else None,
        (*slower, *ties),
    )


def _as_fast(plan: ScoredPlan, present: ScoredPlan) -> bool:
    return abs(plan.step_seconds - present.step_seconds) <= 10 * TIE * present.step_seconds


def _rival(context: ExplainContext, best: _Best, differs: str) -> RunnerUp:
    plan, own = best.plan, context.present.step_seconds
    return RunnerUp(
        differs=differs,
        plan=None if plan is None else summarize(plan),
        slower=None if plan is None else plan.step_seconds / own - 1,
        proven=best.proven,
    )


def _fastest(plans: Iterable[ScoredPlan | None]) -> ScoredPlan | None:
    fitting = [plan for plan in plans if plan is not None]
    return min(fitting, key=lambda plan: plan.step_seconds, default=None)


def _counts(proposal: Proposal) -> int:
    return len(proposal.ends) // proposal.config.virtual_stages


def _other_stage_counts(context: ExplainContext, seeds: Sequence[ScoredPlan]) -> _Best:
    problem, own = context.problem, _counts(context.present.proposal)
    counts = [count for count in problem.stage_counts if count != own]
    others = [seed.proposal for seed in seeds if _counts(seed.proposal) != own]
    return _search_counts(problem, counts, others)


def _search_counts(problem: Problem, counts: Sequence[int], seeds: Sequence[Proposal]) -> _Best:
    """The best plan of so many stages; seeds of schedules that are not searched count, too."""
    linear = [seed for seed in seeds if seed.config.schedule in SEARCHED]
    result = search_near(problem.space, problem.families, counts, linear, SECONDS / 4)
    other = fastest(problem.space, [seed for seed in seeds if seed.config.schedule not in SEARCHED])
    return _Best(_fastest([result.best, other]), result.exact)


def _all_searched(problem: Problem) -> bool:
    """Whether no plan is outside what is searched."""
    return problem.every_replica_count and all(name in SEARCHED for name in problem.schedules)


def _cuts(proposal: Proposal, busiest: int) -> list[int]:
    """Layers before each cut that is to be forbidden."""
    own = range(len(proposal.ends) - 1)
    nearest = sorted(own, key=lambda cut: abs(cut + 0.5 - busiest))[:MOST_CUTS]
    return [proposal.ends[cut] for cut in sorted(nearest)]


def _without_cut(context: ExplainContext, seeds: Sequence[ScoredPlan], end: int) -> _Best:
    """The best plan of as many stages without a cut before layer `end`, and those as fast."""
    present, must_cut = context.present, context.problem.space.limits.must_cut
    index, forbidden = present.proposal.ends.index(end), [end]
    ties: list[ScoredPlan] = []
    while len(ties) < TIES and forbidden[-1] - 1 not in must_cut:
        best = _without(context, seeds, forbidden)
        if best.plan is None or not _as_fast(best.plan, present):
            return replace(best, ties=tuple(ties))
        ties.append(best.plan)
        forbidden.append(best.plan.proposal.ends[index])
    return _Best(None, proven=not ties, ties=tuple(ties))


def _without(context: ExplainContext, seeds: Sequence[ScoredPlan], forbidden: Sequence[int]) -> _Best:
    """The best plan of as many stages without cuts before these layers, the first of which is one of the
    plan's own."""
    problem, present = context.problem, context.present
    own, parts = problem.space, len(present.proposal.ends)
    proposals = [
        *(seed.proposal for seed in seeds if len(seed.proposal.ends) == parts),
        *_move_cut(problem, present.proposal, forbidden[0]),
    ]
    others = [proposal for proposal in proposals if not set(forbidden) & set(proposal.ends)]
    if present.config.schedule not in SEARCHED:
        return _Best(fastest(own, others), proven=False)
    cut_after = own.chain.cut_after.copy()
    cut_after[np.array(forbidden) - 1] = False
    space = with_cuts(own, cut_after)
    if parts > space.chain.max_stages:
        return _Best(None, proven=True)
    result = search_near(space, problem.families, [parts], others, SECONDS / 8)
    return _Best(result.best, result.exact)


def _move_cut(problem: Problem, proposal: Proposal, end: int) -> Iterator[Proposal]:
    """The plan with one cut at the next place before or after."""
    cut_points = list(problem.space.table(problem.chain.sizes[0]).cut_points)
    at, index = cut_points.index(end), proposal.ends.index(end)
    for step in (-1, 1):
        moved = cut_points[at + step]
        ends = (*proposal.ends[:index], moved, *proposal.ends[index + 1 :])
        if all(a < b for a, b in zip((0, *ends), ends, strict=False)):
            changed = replace(proposal, ends=ends)
            if problem.allows(changed):
                yield changed


def _other_devices(context: ExplainContext) -> _Best:
    """The best with the plan's cuts and other replicas, or devices that make a difference."""
    problem, present = context.problem, context.present
    if present.config.virtual_stages > 1 or present.config.schedule not in SEARCHED:
        return _Best(None, proven=False)
    shapes, every = _shapes(problem, present.proposal)
    choices = [devices for devices in shapes if _differs(context, devices)]
    ties: list[ScoredPlan] = []
    while True:
        proposals = [
            proposal
            for devices in choices
            for config in problem.configs
            if problem.allows(proposal := Proposal(config, present.proposal.ends, devices))
        ]
        best = fastest(problem.space, proposals)
        if best is None or not _as_fast(best, present):
            return _Best(best, every, tuple(ties))
        ties.append(best)
        choices.remove(best.proposal.devices)


def _differs(context: ExplainContext, devices: Shape) -> bool:
    """Whether these devices make another plan: more or fewer, or joined in another way, which shows in the
    step of the same configuration."""
    present = context.present
    if tuple(map(len, devices)) != present.proposal.replicas:
        return True
    if devices == present.proposal.devices:
        return False
    same = fastest(context.problem.space, [replace(present.proposal, devices=devices)])
    return same is None or abs(same.step_seconds - present.step_seconds) > TIE * present.step_seconds


def _shapes(problem: Problem, proposal: Proposal) -> tuple[list[Shape], bool]:
    """Choices of devices for as many stages, those nearest to the plan's replicas first, and whether these
    are all."""
    size = max(config.micro_batch_size for config in problem.configs)
    families = {(id(family.placement), family.replicas): family for family in problem.families}
    shapes, every = dict.fromkeys(_neighbours(problem, proposal)), True
    for family in families.values():
        allowed = [count for count in family.replicas if count <= size]
        runs = list(islice(_list_shapes(problem, family, len(proposal.ends), allowed), MOST_LISTED + 1))
        every = every and len(runs) <= MOST_LISTED
        shapes |= dict.fromkeys(runs)
    own = proposal.replicas
    nearest = sorted(shapes, key=lambda shape: sum(abs(len(a) - b) for a, b in zip(shape, own, strict=True)))
    return nearest[:MOST_SHAPES], every and len(nearest) <= MOST_SHAPES


def _neighbours(problem: Problem, proposal: Proposal) -> Iterator[Shape]:
    """A device more or less on one stage, or moved from one to another."""
    own = proposal.replicas
    for giver in (None, *range(len(own))):
        for taker in (None, *range(len(own))):
            counts = [r + (stage == taker) - (stage == giver) for stage, r in enumerate(own)]
            if giver != taker and min(counts) > 0 and sum(counts) <= problem.usable_gpus:
                yield replicated_pipeline(proposal.config, proposal.ends, counts).devices


def _list_shapes(problem: Problem, family: Family, stages: int, allowed: Sequence[int]) -> Iterator[Shape]:
    """The devices for so many stages that a family has."""
    if family.placement.name == ANY:
        return list_shapes(problem.topology, stages, allowed)
    return _runs(family.placement, stages, allowed, 0)


def _runs(placement: Placement, stages: int, allowed: Sequence[int], position: int) -> Iterator[Shape]:
    """Runs of the devices in an order, one for each stage."""
    if stages == 0:
        yield ()
        return
    for begin in placement.starts_after(position):
        for count in allowed:
            if begin + count + stages - 1 <= len(placement.ranks):
                own = placement.ranks[begin : begin + count]
                for others in _runs(placement, stages - 1, allowed, begin + count):
                    yield (own, *others)
