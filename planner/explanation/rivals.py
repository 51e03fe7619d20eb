"""Other plans that come near: the second-best ones, and how far an input must change until one is better.

A plan with as many stages and other cuts leaves out one of the plan's own cuts: the search is run again with
each of them forbidden. Other replicas and devices of the same stages are scored one by one. Where a stage has
time to spare, plans with other cuts are as fast: they are reported apart, and the cuts that they have instead
are forbidden, too.

A sensitivity is the bandwidth, or the error of the layers' seconds, at which another plan becomes better.
The factor nearest to 1 at which a known rival beats the plan is found by steps outwards and bisection,
scoring only the plan and its rivals; then the problem is solved again there (at the end of the range where
none does) and half way. Whatever beats the plan there joins the rivals, until nothing new does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import NamedTuple

import numpy as np

from ...cost_models.document import Record
from ...cost_models.quantities import ranges
from ..candidate import SEARCHED, Proposal, ScoredPlan, near_shapes, replicated_pipeline
from ..plan_file import TIE, PlanRow, plan_row
from ..problem import Problem
from ..scoring import fastest
from ..search.budget import SearchBudget
from ..search.device_sets import list_shapes
from ..search.family import Family
from ..search.placements import ANY, Placement
from ..search.space import with_cuts
from .explain_context import (
    MANY,
    SECONDS,
    ExplainContext,
    bandwidth_range,
    list_near_families,
    resolve,
    search_near,
    with_bandwidth,
    with_slower_layers,
)

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
    plan: PlanRow | None
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


class _Others(NamedTuple):
    """Plans of a kind that were found: those as fast as the plan in question, and the best other one.
    `proven`: of the schedules that are searched."""

    plans: list[ScoredPlan]
    proven: bool


def runners_up(context: ExplainContext, seeds: Sequence[ScoredPlan], busiest: int) -> RunnersUp:
    """The second-best plans. `busiest`: the stage whose cuts matter most."""
    problem, present = context.problem, context.present
    stages = _other_stage_counts(context, seeds)
    ends = _cuts(present.proposal, busiest)
    cuts = [_without_cut(context, seeds, end) for end in ends if not context.budget.over]
    every = len(cuts) == len(present.proposal.ends) - 1
    kinds = [*cuts, _other_devices(context), stages]
    plans = [plan for kind in kinds for plan in kind.plans]
    ties = [plan for plan in plans if _as_fast(plan, present)]
    slower = [plan for plan in plans if not _as_fast(plan, present)]
    searched = problem.every_replica_count and all(name in SEARCHED for name in problem.schedules)
    proven = searched and every and not ties and all(kind.proven for kind in kinds)
    return RunnersUp(
        _rival(present, slower, "cuts, replicas or devices", proven=proven),
        _rival(present, stages.plans, "number of stages", proven=searched and stages.proven),
        ties[0] if ties else None,
        (*slower, *ties),
    )


def _as_fast(plan: ScoredPlan, present: ScoredPlan) -> bool:
    return abs(plan.step_seconds - present.step_seconds) <= 10 * TIE * present.step_seconds


def _rival(present: ScoredPlan, plans: Sequence[ScoredPlan], differs: str, *, proven: bool) -> RunnerUp:
    plan = min(plans, key=lambda plan: plan.step_seconds, default=None)
    if plan is None:
        return RunnerUp(differs=differs, plan=None, slower=None, proven=proven)
    slower = plan.step_seconds / present.step_seconds - 1
    return RunnerUp(differs=differs, plan=plan_row(plan, exact=proven), slower=slower, proven=proven)


def _other_stage_counts(context: ExplainContext, seeds: Sequence[ScoredPlan]) -> _Others:
    """The best plan with another number of stages."""
    problem, present = context.problem, context.present.proposal

    def stages(proposal: Proposal) -> int:
        return len(proposal.ends) // proposal.config.virtual_stages

    families, counts = list_near_families(problem, [present])
    counts = [count for count in counts if count != stages(present)]
    others = [seed.proposal for seed in seeds if stages(seed.proposal) != stages(present)]
    result = search_near(problem.space, families, counts, others, SECONDS / 4)
    every = problem.usable_gpus <= MANY
    return _Others([] if result.best is None else [result.best], result.exact and every)


def _cuts(proposal: Proposal, busiest: int) -> list[int]:
    """Layers before each cut that is to be forbidden."""
    own = range(len(proposal.ends) - 1)
    nearest = sorted(own, key=lambda cut: abs(cut + 0.5 - busiest))[:MOST_CUTS]
    return [proposal.ends[cut] for cut in sorted(nearest)]


def _without_cut(context: ExplainContext, seeds: Sequence[ScoredPlan], end: int) -> _Others:
    """The best plan of as many stages without a cut before layer `end`, and those as fast."""
    present, must_cut = context.present, context.problem.space.limits.must_cut
    index, forbidden, plans = present.proposal.ends.index(end), [end], list[ScoredPlan]()
    while len(plans) < TIES and not context.budget.over and forbidden[-1] - 1 not in must_cut:
        plan, proven = _without(context, seeds, forbidden)
        if plan is None:
            return _Others(plans, proven)
        plans.append(plan)
        if not _as_fast(plan, present):
            return _Others(plans, proven)
        forbidden.append(plan.proposal.ends[index])
    return _Others(plans, proven=not plans)


def _without(
    context: ExplainContext, seeds: Sequence[ScoredPlan], forbidden: Sequence[int]
) -> tuple[ScoredPlan | None, bool]:
    """The best plan of as many stages without cuts before these layers, the first of which is one of the
    plan's own; and whether there is no better one."""
    problem, present = context.problem, context.present.proposal
    space, parts = problem.space, len(present.ends)
    proposals = [seed.proposal for seed in seeds if len(seed.proposal.ends) == parts]
    proposals += filter(problem.allows, _near(problem, present, devices=0))
    others = [own for own in proposals if not set(forbidden) & set(own.ends) and len(own.ends) == parts]
    if present.config.schedule not in SEARCHED:
        return fastest(space, others), False
    cut_after = space.chain.cut_after.copy()
    cut_after[np.array(forbidden) - 1] = False
    space = with_cuts(space, cut_after)
    if parts > space.chain.max_stages:
        return None, True
    families, _ = list_near_families(problem, [present])
    result = search_near(space, families, [parts], others, SECONDS / 8)
    return result.best, result.exact and problem.usable_gpus <= MANY


def _near(problem: Problem, proposal: Proposal, devices: int) -> Iterator[Proposal]:
    """The plan with a cut moved by a place or, on at most so many devices, other replicas."""
    cut_points = problem.space.table(problem.chain.sizes[0]).cut_points
    for ends, replicas in near_shapes(cut_points, proposal.ends, proposal.replicas, devices):
        if replicas == proposal.replicas:
            yield replace(proposal, ends=ends)
        elif ends == proposal.ends:
            yield replicated_pipeline(proposal.config, ends, replicas)


def _other_devices(context: ExplainContext) -> _Others:
    """The best with the plan's cuts and other replicas, or devices that make a difference."""
    problem, present = context.problem, context.present
    if present.config.virtual_stages > 1 or present.config.schedule not in SEARCHED:
        return _Others([], proven=False)
    shapes, every = _shapes(problem, present.proposal)
    choices = [devices for devices in shapes if _differs(context, devices)]
    plans = list[ScoredPlan]()
    while not context.budget.over:
        proposals = [
            proposal
            for devices in choices
            for config in problem.configs
            if problem.allows(proposal := Proposal(config, present.proposal.ends, devices))
        ]
        best = fastest(problem.space, proposals)
        if best is None:
            return _Others(plans, every)
        plans.append(best)
        if not _as_fast(best, present):
            return _Others(plans, every)
        choices.remove(best.proposal.devices)
    return _Others(plans, proven=False)


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
    near = _near(problem, proposal, problem.usable_gpus)
    shapes, every = dict.fromkeys(own.devices for own in near if own.ends == proposal.ends), True
    for family in families.values():
        allowed = [count for count in family.replicas if count <= size]
        runs = list(islice(_list_shapes(problem, family, len(proposal.ends), allowed), MOST_LISTED + 1))
        every = every and len(runs) <= MOST_LISTED
        shapes |= dict.fromkeys(runs)
    own = proposal.replicas
    nearest = sorted(shapes, key=lambda shape: sum(abs(len(a) - b) for a, b in zip(shape, own, strict=True)))
    return nearest[:MOST_SHAPES], every and len(nearest) <= MOST_SHAPES


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


WORTH = 1e-3
"""Share of the step by which another plan must be faster to count as better."""
WIDEST_BANDWIDTH = 16.0
WIDEST_SECONDS = 4.0
"""Factors up to which, and down to one over which, bandwidth and seconds are varied; bandwidth no further
than that of a link may be."""
STEPS = 8
HALVINGS = 4
"""Steps outwards in equal ratios, and bisections of one: 2 % of a factor of 16."""
ROUNDS = 4
"""Solving again for rivals that the ends of the range did not show, at the most."""


class Crossover(Record):
    """The factor at which another plan becomes better, what the plan and that one then take, and where that
    one starts to be better: `rival`, as it stands at `factor`."""

    factor: float
    plan_seconds: float
    rival: PlanRow


class Sensitivity(Record):
    """The range of a factor of something in which no other plan is better; `below` and `above` 1. None: to
    the end of the range (`least`, `most`) no better plan was found."""

    what: str
    first_layer: int | None = None
    last_layer: int | None = None
    """Of layers' seconds: which."""
    least: float
    most: float
    below: Crossover | None
    above: Crossover | None


@dataclass(frozen=True)
class _Variation:
    """What is varied, from which factor to which, and whether all plans become faster with a larger one."""

    what: str
    ends: tuple[float, float]
    faster_above: bool
    varied: Callable[[float], Problem]


def sensitivities(
    context: ExplainContext, seeds: Sequence[ScoredPlan], busiest: int
) -> Iterator[Sensitivity]:
    """Bandwidth of all links, of those between nodes, and seconds of the heaviest stage's layers. `busiest`:
    that stage."""
    problem, present = context.problem, context.present
    assembly = context.assembly
    # Its first part where it has several.
    part = min(part for place, part in assembly.program.parts_by_slot.items() if place.device == busiest)
    first, end = present.proposal.bounds[part]
    where, ranks = f"stage {busiest}", assembly.ranks[busiest]
    if present.config.virtual_stages > 1:
        where = f"the first part of {'device' if len(ranks) == 1 else 'devices'} {ranges(ranks)}"
    layers = _Variation(
        f"seconds of the {'layer' if end - first == 1 else 'layers'} of {where}",
        (1 / WIDEST_SECONDS, WIDEST_SECONDS),
        False,
        lambda f: with_slower_layers(problem, first, end, f),
    )
    for one in _links(problem):
        if not context.budget.over:
            yield _reach(context, seeds, one)
    if not context.budget.over:
        own = _reach(context, seeds, layers)
        yield own.model_copy(update={"first_layer": first, "last_layer": end - 1})


def _links(problem: Problem) -> Iterator[_Variation]:
    """All links where there are some, and those between nodes where there are others."""
    topology, several_nodes = problem.topology, problem.gpus > problem.topology.gpus_per_node > 1
    for what, between, there_are in (
        ("of all links", False, problem.gpus > 1),
        ("between nodes", True, several_nodes),
    ):
        if there_are:
            yield _Variation(
                f"bandwidth {what}",
                bandwidth_range(topology, WIDEST_BANDWIDTH, between_nodes=between),
                True,
                lambda f, between=between: replace(  # type: ignore[misc]
                    problem, topology=with_bandwidth(topology, f, between_nodes=between)
                ),
            )


def _reach(context: ExplainContext, seeds: Sequence[ScoredPlan], variation: _Variation) -> Sensitivity:
    race = _PlanRace(context.present, variation.varied, variation.faster_above, list(seeds), context.budget)
    least, most = variation.ends
    return Sensitivity(
        what=variation.what, least=least, most=most, below=race.turn(least), above=race.turn(most)
    )


@dataclass
class _PlanRace:
    """The plan against its rivals, as something varies: all plans become faster with a larger factor
    (`faster_above`), or slower. Problems are kept, with their tables of stages."""

    present: ScoredPlan
    varied: Callable[[float], Problem]
    faster_above: bool
    rivals: list[ScoredPlan]
    budget: SearchBudget = field(default_factory=SearchBudget)
    _problems: dict[float, Problem] = field(default_factory=dict)
    _solved: set[float] = field(default_factory=set)

    def turn(self, end: float) -> Crossover | None:
        """Where between 1 and `end` the plan is first beaten; None where the range ends at 1."""
        if self._safe(end):
            return None
        turn = self._first(end)
        # Where the problem is solved again: powers of a factor.
        probes = (1,) if self._problem(1.0).usable_gpus > MANY else (1, 1 / 2)
        for _ in range(ROUNDS):
            if self.budget.over:
                break
            probed = end if turn is None else turn.factor
            is_new = [self._solve(probed**share) for share in probes]
            if not any(is_new):
                break
            turn = self._first(end)
        return turn

    def _safe(self, end: float) -> bool:
        """Whether no plan can be better between 1 and `end`. All become slower on the way, or all faster: the
        plan takes no longer than at one end, and the best no less than at the other."""
        own = self.present.step_seconds
        if (end > 1) != self.faster_above:
            there = self._scores(end)[0]
            return there is not None and there.step_seconds * (1 - WORTH) <= own
        self._solve(end)
        best = min((plan.step_seconds for plan in self._scores(end) if plan is not None), default=own)
        return own * (1 - WORTH) <= best

    def _problem(self, factor: float) -> Problem:
        if factor not in self._problems:
            self._problems[factor] = self.varied(factor)
        return self._problems[factor]

    def _solve(self, factor: float) -> bool:
        """Whether solving again, once for each factor, finds a new rival that beats the plan there."""
        if factor in self._solved:
            return False
        self._solved.add(factor)
        contestants = [self.present, *self.rivals]
        plan_there = resolve(self._problem(factor), contestants, SECONDS / 4).best
        plan, _ = self._scores(factor)
        if plan_there is None or plan is None or plan_there.proposal in [own.proposal for own in contestants]:
            return False
        self.rivals.append(plan_there)
        return plan_there.step_seconds < plan.step_seconds * (1 - WORTH)

    def _scores(self, factor: float) -> tuple[ScoredPlan | None, ScoredPlan | None]:
        """The plan and its best rival."""
        problem = self._problem(factor)
        allowed = [rival.proposal for rival in self.rivals if problem.allows(rival.proposal)]
        return fastest(problem.space, [self.present.proposal]), fastest(problem.space, allowed)

    def _beaten(self, factor: float) -> Crossover | None:
        """The rival that beats the plan."""
        plan, rival = self._scores(factor)
        if plan is None or rival is None or rival.step_seconds >= plan.step_seconds * (1 - WORTH):
            return None
        return Crossover(factor=factor, plan_seconds=plan.step_seconds, rival=plan_row(rival))

    def _first(self, end: float) -> Crossover | None:
        """The factor nearest to 1 at which a known rival beats the plan, by steps outwards in equal ratios
        and bisections of the last one."""
        inner = 1.0
        for step in range(1, STEPS + 1):
            turn = self._beaten(end ** (step / STEPS))
            if turn is not None:
                return self._bisect(inner, turn)
            inner = end ** (step / STEPS)
        return None

    def _bisect(self, inner: float, turn: Crossover) -> Crossover:
        for _ in range(HALVINGS):
            middle = (inner * turn.factor) ** 0.5
            nearer = self._beaten(middle)
            turn, inner = (turn, middle) if nearer is None else (nearer, inner)
        return turn
