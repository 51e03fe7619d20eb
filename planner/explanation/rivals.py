"""Runner-up plans, and how far an input must change until another plan is better.

A plan with as many stages and other cuts lacks one of the plan's cuts, so the search is repeated with each of
them forbidden. Other replicas and devices of the same stages are scored one by one. If a stage has time to
spare, plans with other cuts are as fast. They are reported separately, and their different cuts are
forbidden, too.

A sensitivity is the bandwidth, or the error of the layers' seconds, at which another plan becomes better.
Steps outwards and bisection find the factor nearest to 1 at which a known rival beats the plan, scoring only
the plan and its rivals. Then the problem is solved there (or at the end of the range if no rival wins) and
half way. Plans that beat the plan there join the rivals, until no new one is found.
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
"""Most choices of devices for the same stages that are scored, those nearest to the plan's first."""
MOST_LISTED = 4000
"""Most choices of devices that are listed for each order of the devices."""

TIES = 6
"""Most plans that are as fast, for each cut that is forbidden."""

Shape = tuple[tuple[int, ...], ...]
"""By stage, the ranks of its replicas."""


class RunnerUp(Record):
    """Best other plan that is not as fast.

    `proven`: no other plan of the searched space is faster. `plan` is None if none is possible, or none was
    found.
    """

    differs: str
    """Difference from the plan, in words."""
    plan: PlanRow | None
    slower: float | None
    """Its step over the plan's, less 1: negative where it is faster."""
    proven: bool

    @property
    def reason(self) -> str:
        """Why no plan exists."""
        return "none is possible" if self.proven else "none was found"


@dataclass(frozen=True)
class RunnersUp:
    """Best plan of each kind, one that is as fast (None if none was found), and all plans that were found."""

    second_best: RunnerUp
    other_stages: RunnerUp
    as_fast: ScoredPlan | None
    plans: tuple[ScoredPlan, ...]


class _Others(NamedTuple):
    """Plans of one kind: those as fast as the plan, and the best other one.

    `proven` holds for the schedules that are searched.
    """

    plans: list[ScoredPlan]
    proven: bool


def runners_up(context: ExplainContext, seeds: Sequence[ScoredPlan], busiest: int) -> RunnersUp:
    """Return the runner-up plans.

    Args:
        context: The plan and its problem.
        seeds: Known plans.
        busiest: Stage whose cuts matter most.
    """
    problem, present = context.problem, context.present
    stages = _other_stage_counts(context, seeds)
    ends = _cuts(present.proposal, busiest)
    cuts = [_without_cut(context, seeds, end) for end in ends if not context.budget.over]
    has_all_cuts = len(cuts) == len(present.proposal.ends) - 1
    kinds = [*cuts, _other_devices(context), stages]
    plans = [plan for kind in kinds for plan in kind.plans]
    ties = [plan for plan in plans if _as_fast(plan, present)]
    slower = [plan for plan in plans if not _as_fast(plan, present)]
    searched = problem.every_replica_count and all(name in SEARCHED for name in problem.schedules)
    proven = searched and has_all_cuts and not ties and all(kind.proven for kind in kinds)
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
    """Return the best plan with another number of stages."""
    problem, present = context.problem, context.present.proposal

    def stages(proposal: Proposal) -> int:
        return len(proposal.ends) // proposal.config.virtual_stages

    families, counts = list_near_families(problem, [present])
    counts = [count for count in counts if count != stages(present)]
    other_plans = [seed.proposal for seed in seeds if stages(seed.proposal) != stages(present)]
    result = search_near(problem.space, families, counts, other_plans, SECONDS / 4)
    complete = problem.usable_gpus <= MANY
    return _Others([] if result.best is None else [result.best], result.exact and complete)


def _cuts(proposal: Proposal, busiest: int) -> list[int]:
    """Return the cuts to forbid, as numbers of layers before them."""
    cuts = range(len(proposal.ends) - 1)
    nearest = sorted(cuts, key=lambda cut: abs(cut + 0.5 - busiest))[:MOST_CUTS]
    return [proposal.ends[cut] for cut in sorted(nearest)]


def _without_cut(context: ExplainContext, seeds: Sequence[ScoredPlan], end: int) -> _Others:
    """Return the best plans of as many stages without a cut before layer `end`."""
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
    """Return the best plan of as many stages without some cuts, and whether that is proven.

    The first of the cuts is one of the plan's.
    """
    problem, present = context.problem, context.present.proposal
    space, parts = problem.space, len(present.ends)
    proposals = [seed.proposal for seed in seeds if len(seed.proposal.ends) == parts]
    proposals += filter(problem.allows, _near(problem, present, devices=0))
    suited = [
        proposal_
        for proposal_ in proposals
        if not set(forbidden) & set(proposal_.ends) and len(proposal_.ends) == parts
    ]
    if present.config.schedule not in SEARCHED:
        return fastest(space, suited), False
    cut_after = space.chain.cut_after.copy()
    cut_after[np.array(forbidden) - 1] = False
    space = with_cuts(space, cut_after)
    if parts > space.chain.max_stages:
        return None, True
    families, _ = list_near_families(problem, [present])
    result = search_near(space, families, [parts], suited, SECONDS / 8)
    return result.best, result.exact and problem.usable_gpus <= MANY


def _near(problem: Problem, proposal: Proposal, devices: int) -> Iterator[Proposal]:
    """Yield the plan with a cut moved by one place or, on at most `devices` devices, other replicas."""
    cut_points = problem.space.table(problem.chain.sizes[0]).cut_points
    for ends, replicas in near_shapes(cut_points, proposal.ends, proposal.replicas, devices):
        if replicas == proposal.replicas:
            yield replace(proposal, ends=ends)
        elif ends == proposal.ends:
            yield replicated_pipeline(proposal.config, ends, replicas)


def _other_devices(context: ExplainContext) -> _Others:
    """Return the best plans with the plan's cuts and other replicas, or devices that make a difference."""
    problem, present = context.problem, context.present
    if present.config.virtual_stages > 1 or present.config.schedule not in SEARCHED:
        return _Others([], proven=False)
    shapes, complete = _shapes(problem, present.proposal)
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
            return _Others(plans, complete)
        plans.append(best)
        if not _as_fast(best, present):
            return _Others(plans, complete)
        choices.remove(best.proposal.devices)
    return _Others(plans, proven=False)


def _differs(context: ExplainContext, devices: Shape) -> bool:
    """Return whether these devices make another plan.

    There are more or fewer of them, or they are linked differently, which changes the step of the same
    configuration.
    """
    present = context.present
    if tuple(map(len, devices)) != present.proposal.replicas:
        return True
    if devices == present.proposal.devices:
        return False
    same = fastest(context.problem.space, [replace(present.proposal, devices=devices)])
    return same is None or abs(same.step_seconds - present.step_seconds) > TIE * present.step_seconds


def _shapes(problem: Problem, proposal: Proposal) -> tuple[list[Shape], bool]:
    """Return choices of devices for as many stages, nearest to the plan first, and whether that is all."""
    size = max(config.micro_batch_size for config in problem.configs)
    families = {(id(family.placement), family.replicas): family for family in problem.families}
    near = _near(problem, proposal, problem.usable_gpus)
    shapes, complete = (
        dict.fromkeys(replicas.devices for replicas in near if replicas.ends == proposal.ends),
        True,
    )
    for family in families.values():
        allowed = [count for count in family.replicas if count <= size]
        runs = list(islice(_list_shapes(problem, family, len(proposal.ends), allowed), MOST_LISTED + 1))
        complete = complete and len(runs) <= MOST_LISTED
        shapes |= dict.fromkeys(runs)
    replicas = proposal.replicas
    nearest = sorted(
        shapes, key=lambda shape: sum(abs(len(a) - b) for a, b in zip(shape, replicas, strict=True))
    )
    return nearest[:MOST_SHAPES], complete and len(nearest) <= MOST_SHAPES


def _list_shapes(problem: Problem, family: Family, stages: int, allowed: Sequence[int]) -> Iterator[Shape]:
    """Yield a family's devices for `stages` stages."""
    if family.placement.name == ANY:
        return list_shapes(problem.topology, stages, allowed)
    return _runs(family.placement, stages, allowed, 0)


def _runs(placement: Placement, stages: int, allowed: Sequence[int], position: int) -> Iterator[Shape]:
    """Yield runs of the devices in an order, one for each stage."""
    if stages == 0:
        yield ()
        return
    for begin in placement.starts_after(position):
        for count in allowed:
            if begin + count + stages - 1 <= len(placement.ranks):
                ranks = placement.ranks[begin : begin + count]
                for later_runs in _runs(placement, stages - 1, allowed, begin + count):
                    yield (ranks, *later_runs)


WORTH = 1e-3
"""Share of the step by which another plan must be faster to count as better."""
WIDEST_BANDWIDTH = 16.0
WIDEST_SECONDS = 4.0
"""Largest factors (and inverse of the smallest) of bandwidth and seconds, within valid link bandwidths."""
STEPS = 8
HALVINGS = 4
"""Steps outwards in equal ratios, and bisections of the last one: 2 % of a factor of 16."""
ROUNDS = 4
"""Most times that the problem is solved for rivals that the ends of the range did not show."""


class Crossover(Record):
    """Factor at which another plan becomes better, the plan's step there, and the `rival` at this factor."""

    factor: float
    plan_seconds: float
    rival: PlanRow


class Sensitivity(Record):
    """Range of a factor in which no other plan is better, from `below` to `above` 1.

    None: no better plan was found up to the end of the range (`least`, `most`).
    """

    what: str
    first_layer: int | None = None
    last_layer: int | None = None
    """Range of the layers whose seconds vary."""
    least: float
    most: float
    below: Crossover | None
    above: Crossover | None


@dataclass(frozen=True)
class _Variation:
    """A varied input: its range of factors, and whether all plans become faster with a larger factor."""

    what: str
    ends: tuple[float, float]
    faster_above: bool
    varied: Callable[[float], Problem]


def sensitivities(
    context: ExplainContext, seeds: Sequence[ScoredPlan], busiest: int
) -> Iterator[Sensitivity]:
    """Yield the sensitivities of all links, of links between nodes, and of the layers of the busiest stage.

    Args:
        context: The plan and its problem.
        seeds: Known plans.
        busiest: The busiest stage.
    """
    problem, present = context.problem, context.present
    assembly = context.assembly
    # The first part, if the stage has several.
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
    for link_variation in _links(problem):
        if not context.budget.over:
            yield _reach(context, seeds, link_variation)
    if not context.budget.over:
        layer_sensitivity = _reach(context, seeds, layers)
        yield layer_sensitivity.model_copy(update={"first_layer": first, "last_layer": end - 1})


def _links(problem: Problem) -> Iterator[_Variation]:
    """Yield the variations of all links, and of those between nodes, as far as they exist."""
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
    """The plan against its rivals as something varies.

    All plans become faster with a larger factor (`faster_above`) or slower. Problems are cached with their
    stage tables.
    """

    present: ScoredPlan
    varied: Callable[[float], Problem]
    faster_above: bool
    rivals: list[ScoredPlan]
    budget: SearchBudget = field(default_factory=SearchBudget)
    _problems: dict[float, Problem] = field(default_factory=dict)
    _solved: set[float] = field(default_factory=set)

    def turn(self, end: float) -> Crossover | None:
        """Return where between 1 and `end` the plan is first beaten; None if nowhere."""
        if self._safe(end):
            return None
        turn = self._first(end)
        # Powers of a factor at which the problem is solved.
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
        """Return whether no plan can be better between 1 and `end`.

        All plans become slower on this range, or all faster. So the plan takes no longer than at one end, and
        the best plan no less than at the other.
        """
        plan_seconds = self.present.step_seconds
        if (end > 1) != self.faster_above:
            there = self._scores(end)[0]
            return there is not None and there.step_seconds * (1 - WORTH) <= plan_seconds
        self._solve(end)
        best = min(
            (plan.step_seconds for plan in self._scores(end) if plan is not None), default=plan_seconds
        )
        return plan_seconds * (1 - WORTH) <= best

    def _problem(self, factor: float) -> Problem:
        if factor not in self._problems:
            self._problems[factor] = self.varied(factor)
        return self._problems[factor]

    def _solve(self, factor: float) -> bool:
        """Return whether solving, once per factor, finds a new rival that beats the plan there."""
        if factor in self._solved:
            return False
        self._solved.add(factor)
        contestants = [self.present, *self.rivals]
        plan_there = resolve(self._problem(factor), contestants, SECONDS / 4).best
        plan, _ = self._scores(factor)
        if (
            plan_there is None
            or plan is None
            or plan_there.proposal in [contestant.proposal for contestant in contestants]
        ):
            return False
        self.rivals.append(plan_there)
        return plan_there.step_seconds < plan.step_seconds * (1 - WORTH)

    def _scores(self, factor: float) -> tuple[ScoredPlan | None, ScoredPlan | None]:
        """Return the plan and its best rival."""
        problem = self._problem(factor)
        allowed = [rival.proposal for rival in self.rivals if problem.allows(rival.proposal)]
        return fastest(problem.space, [self.present.proposal]), fastest(problem.space, allowed)

    def _beaten(self, factor: float) -> Crossover | None:
        """Return the rival that beats the plan; None if none exists."""
        plan, rival = self._scores(factor)
        if plan is None or rival is None or rival.step_seconds >= plan.step_seconds * (1 - WORTH):
            return None
        return Crossover(factor=factor, plan_seconds=plan.step_seconds, rival=plan_row(rival))

    def _first(self, end: float) -> Crossover | None:
        """Return the factor nearest to 1 at which a known rival beats the plan.

        It is found by steps outwards in equal ratios, and bisections of the last one.
        """
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
