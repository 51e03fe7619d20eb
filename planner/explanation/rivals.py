"""What the second-best plan costs: the best that has other cuts, replicas or devices, and the best with
another number of stages.

A plan with as many stages and other cuts leaves out one of the plan's own cuts: the search is run again with
each of them forbidden. Other replicas and devices of the same stages are scored one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from ...cost_models.document import Record
from ..candidate import Candidate, Proposal, replicated
from ..plan_file import TIE
from ..problem import Problem
from ..scoring import fastest
from ..search.placements import Placement
from ..search.space import with_cuts
from ..setting import SEARCHED
from .again import SECONDS, searched
from .outline import Outline, outline_of
from .question import Question

MOST_CUTS = 8
"""Cuts that are forbidden in turn, those next to the busiest stage first."""
MOST_SHAPES = 128
"""Choices of devices for the same stages that are scored, those nearest to the plan's own first."""
LISTED = 4000
"""Choices of devices that are looked at for an order of the devices."""

Shape = tuple[tuple[int, ...], ...]
"""By stage, the ranks of its replicas."""


class Rival(Record):
    """The best other plan that was found. `proven`: no other of the searched space is faster. `plan` is None
    where none fits."""

    differs: str
    """How, in words."""
    plan: Outline | None
    slower: float | None
    """Its step over the plan's, less 1: negative where it is faster."""
    proven: bool


@dataclass(frozen=True)
class Rivals:
    """The best plan of each kind, and all that were found."""

    second_best: Rival
    other_stages: Rival
    plans: tuple[Candidate, ...]


@dataclass(frozen=True)
class _Best:
    plan: Candidate | None
    proven: bool


def rivals_of(question: Question, seeds: Sequence[Candidate], busiest: int) -> Rivals:
    """The second-best plans. `busiest`: the stage whose cuts matter most."""
    stages = _other_stage_counts(question, seeds)
    cuts = [_without_cut(question, seeds, end) for end in _cuts(question.present.proposal, busiest)]
    shapes = _other_devices(question)
    every = len(cuts) == len(question.present.proposal.ends) - 1
    found = [stages, *cuts, shapes]
    second = _Best(_fastest(best.plan for best in found), every and all(best.proven for best in found))
    plans = tuple(best.plan for best in found if best.plan is not None)
    return Rivals(
        _rival(question, second, "cuts, replicas or devices"),
        _rival(question, stages, "number of stages"),
        plans,
    )


def _rival(question: Question, best: _Best, differs: str) -> Rival:
    plan, own = best.plan, question.present.step_seconds
    return Rival(
        differs=differs,
        plan=None if plan is None else outline_of(plan),
        slower=None if plan is None else plan.step_seconds / own - 1,
        proven=best.proven,
    )


def _fastest(plans: Iterable[Candidate | None]) -> Candidate | None:
    known = [plan for plan in plans if plan is not None]
    return min(known, key=lambda plan: plan.step_seconds, default=None)


def _counts(proposal: Proposal) -> int:
    return len(proposal.ends) // proposal.setting.virtual_stages


def _other_stage_counts(question: Question, seeds: Sequence[Candidate]) -> _Best:
    problem, own = question.problem, _counts(question.present.proposal)
    counts = [count for count in problem.stage_counts if count != own]
    others = [seed.proposal for seed in seeds if _counts(seed.proposal) != own]
    return _searched(problem, counts, others)


def _searched(problem: Problem, counts: Sequence[int], seeds: Sequence[Proposal]) -> _Best:
    """The best plan of so many stages; seeds of schedules that are not searched count, too."""
    straight = [seed for seed in seeds if seed.setting.schedule in SEARCHED]
    found = searched(problem.space, problem.families, counts, straight, SECONDS / 4)
    other = fastest(problem.space, [seed for seed in seeds if seed.setting.schedule not in SEARCHED])
    return _Best(_fastest([found.best, other]), found.exact and _all_searched(problem))


def _all_searched(problem: Problem) -> bool:
    """Whether no plan is outside what is searched."""
    return problem.every_replica_count and all(name in SEARCHED for name in problem.schedules)


def _cuts(proposal: Proposal, busiest: int) -> list[int]:
    """Layers before each cut that is to be forbidden."""
    if proposal.setting.virtual_stages > 1:
        return []
    cuts = sorted(range(len(proposal.ends) - 1), key=lambda cut: abs(cut + 0.5 - busiest))
    return [proposal.ends[cut] for cut in sorted(cuts[:MOST_CUTS])]


def _without_cut(question: Question, seeds: Sequence[Candidate], end: int) -> _Best:
    """The best plan of as many stages without a cut before layer `end`."""
    problem, present = question.problem, question.present
    own, stages = problem.space, len(present.proposal.ends)
    if end - 1 in own.limits.must_cut:
        return _Best(None, proven=True)
    others = [
        seed.proposal for seed in seeds if len(seed.proposal.ends) == stages and end not in seed.proposal.ends
    ]
    moved = list(_moved(problem, present.proposal, end))
    if present.setting.schedule not in SEARCHED:
        return _Best(fastest(own, [*others, *moved]), proven=False)
    cut_after = own.chain.cut_after.copy()
    cut_after[end - 1] = False
    space = with_cuts(own, cut_after)
    if stages > space.chain.max_stages:
        return _Best(None, proven=True)
    found = searched(space, problem.families, [stages], [*others, *moved], SECONDS / 8)
    return _Best(found.best, found.exact and _all_searched(problem))


def _moved(problem: Problem, proposal: Proposal, end: int) -> Iterator[Proposal]:
    """The plan with one cut at the next place before or after."""
    places = list(problem.space.table(problem.chain.sizes[0]).places)
    at, index = places.index(end), proposal.ends.index(end)
    for step in (-1, 1):
        moved = places[at + step]
        ends = (*proposal.ends[:index], moved, *proposal.ends[index + 1 :])
        if all(a < b for a, b in zip((0, *ends), ends, strict=False)):
            changed = replace(proposal, ends=ends)
            if problem.allows(changed):
                yield changed


def _other_devices(question: Question) -> _Best:
    """The best with the plan's cuts and other replicas, or devices that make a difference."""
    problem, present = question.problem, question.present
    if present.setting.virtual_stages > 1 or present.setting.schedule not in SEARCHED:
        return _Best(None, proven=False)
    shapes, every = _shapes(problem, present.proposal)
    chosen = [devices for devices in shapes if _differs(question, devices)]
    proposals = [
        proposal
        for devices in chosen
        for setting in problem.settings
        if problem.allows(proposal := Proposal(setting, present.proposal.ends, devices))
    ]
    return _Best(fastest(problem.space, proposals), every)


def _differs(question: Question, devices: Shape) -> bool:
    """Whether these devices make another plan: more or fewer, or joined in another way, which shows in the
    step of the same setting."""
    present = question.present
    if tuple(map(len, devices)) != present.proposal.replicas:
        return True
    if devices == present.proposal.devices:
        return False
    same = fastest(question.problem.space, [replace(present.proposal, devices=devices)])
    return same is None or abs(same.step_seconds - present.step_seconds) > TIE * present.step_seconds


def _shapes(problem: Problem, proposal: Proposal) -> tuple[list[Shape], bool]:
    """Choices of devices for as many stages, those nearest to the plan's replicas first, and whether these
    are all."""
    size = max(setting.micro_batch_size for setting in problem.settings)
    families = {(id(family.placement), family.replicas): family for family in problem.families}
    known, every = dict.fromkeys(_neighbours(problem, proposal)), True
    for family in families.values():
        allowed = [count for count in family.replicas if count <= size]
        runs = list(islice(_runs(family.placement, len(proposal.ends), allowed, 0), LISTED + 1))
        every = every and len(runs) <= LISTED
        known |= dict.fromkeys(runs)
    own = proposal.replicas
    nearest = sorted(known, key=lambda shape: sum(abs(len(a) - b) for a, b in zip(shape, own, strict=True)))
    return nearest[:MOST_SHAPES], every and len(nearest) <= MOST_SHAPES


def _neighbours(problem: Problem, proposal: Proposal) -> Iterator[Shape]:
    """A device more or less on one stage, or moved from one to another."""
    own = proposal.replicas
    for giver in (None, *range(len(own))):
        for taker in (None, *range(len(own))):
            counts = [r + (stage == taker) - (stage == giver) for stage, r in enumerate(own)]
            if giver != taker and min(counts) > 0 and sum(counts) <= problem.reached:
                yield replicated(proposal.setting, proposal.ends, counts).devices


def _runs(placement: Placement, stages: int, allowed: Sequence[int], position: int) -> Iterator[Shape]:
    """Runs of the devices in an order, one for each stage."""
    if stages == 0:
        yield ()
        return
    for begin in placement.starts[position]:
        for count in allowed:
            if begin + count + stages - 1 <= len(placement.ranks):
                own = placement.ranks[begin : begin + count]
                for others in _runs(placement, stages - 1, allowed, begin + count):
                    yield (own, *others)
