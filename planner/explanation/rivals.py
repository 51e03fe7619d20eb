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

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np

from ...cost_models.document import Record
from ...cost_models.quantities import ranges
from ..candidate import SEARCHED, Proposal, ScoredPlan, replicated_pipeline
from ..plan_file import TIE, PlanRow, plan_row
from ..problem import Problem
from ..scoring import fastest
from ..search.device_sets import list_shapes
from ..search.family import Family
from ..search.placements import ANY, Placement
from ..search.space import with_cuts
from .explain_context import (
    MANY,
    SECONDS,
    ExplainContext,
    bandwidth_range,
    resolve,
    search_near,
    with_bandwidth,
    with_slower_layers,
    with_topology,
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
        plan=None if plan is None else plan_row(plan, exact=best.proven),
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


Varied = Callable[[float], Problem]


@dataclass(frozen=True)
class _Variation:
    """What is varied, from which factor to which, and whether all plans become faster with a larger one."""

    what: str
    ends: tuple[float, float]
    faster_above: bool
    varied: Varied


def sensitivities(
    context: ExplainContext, seeds: Sequence[ScoredPlan], busiest: int
) -> Iterator[Sensitivity]:
    """Bandwidth of all links, of those between nodes, and seconds of the heaviest stage's layers. `busiest`:
    that stage."""
    first, end = _heaviest(context, busiest)
    layers = _Variation(
        f"seconds of the {_heaviest_in_words(context, busiest, end - first)}",
        (1 / WIDEST_SECONDS, WIDEST_SECONDS),
        False,
        lambda f: with_slower_layers(context.problem, first, end, f),
    )
    for one in _links(context.problem):
        yield _reach(context, seeds, one)
    own = _reach(context, seeds, layers)
    yield own.model_copy(update={"first_layer": first, "last_layer": end - 1})


def _links(problem: Problem) -> Iterator[_Variation]:
    topology = problem.topology
    if problem.gpus > 1:
        yield _Variation(
            "bandwidth of all links",
            bandwidth_range(topology, WIDEST_BANDWIDTH),
            True,
            lambda f: with_topology(problem, with_bandwidth(topology, f)),
        )
    if problem.gpus > topology.gpus_per_node > 1:
        yield _Variation(
            "bandwidth between nodes",
            bandwidth_range(topology, WIDEST_BANDWIDTH, between_nodes=True),
            True,
            lambda f: with_topology(problem, with_bandwidth(topology, f, between_nodes=True)),
        )


def _heaviest(context: ExplainContext, stage: int) -> tuple[int, int]:
    """The layers of a stage: of its first part where it has several."""
    assembly = context.assembly
    part = min(part for place, part in assembly.program.parts_by_slot.items() if place.device == stage)
    return context.present.proposal.bounds[part]


def _heaviest_in_words(context: ExplainContext, stage: int, layers: int) -> str:
    noun = "layer" if layers == 1 else "layers"
    if context.present.config.virtual_stages == 1:
        return f"{noun} of stage {stage}"
    ranks = context.assembly.ranks[stage]
    return f"{noun} of the first part of {'device' if len(ranks) == 1 else 'devices'} {ranges(ranks)}"


def _reach(context: ExplainContext, seeds: Sequence[ScoredPlan], range: _Variation) -> Sensitivity:
    contest = _PlanRace(context.present, range.varied, range.faster_above, list(seeds))
    least, most = range.ends
    return Sensitivity(
        what=range.what,
        least=least,
        most=most,
        below=contest.turn(least),
        above=contest.turn(most),
    )


@dataclass
class _PlanRace:
    """The plan against its rivals, as something varies: all plans become faster with a larger factor
    (`faster_above`), or slower. Problems are kept, with their tables of stages."""

    present: ScoredPlan
    varied: Varied
    faster_above: bool
    rivals: list[ScoredPlan]
    _problems: dict[float, Problem] = field(default_factory=dict)
    _solved: set[float] = field(default_factory=set)

    def turn(self, end: float) -> Crossover | None:
        """Where between 1 and `end` the plan is first beaten; None where the range ends at 1."""
        if self._safe(end):
            return None
        factor = self._first(end)
        for _ in range(ROUNDS):
            probed = end if factor is None else factor
            new = [self._solve(probed**share) for share in self._probes]
            if not any(new):
                break
            factor = self._first(end)
        return None if factor is None else self._turn(factor)

    @property
    def _probes(self) -> tuple[float, ...]:
        """Where the problem is solved again: powers of a factor."""
        return (1,) if self._problem(1.0).usable_gpus > MANY else (1, 1 / 2)

    def _turn(self, factor: float) -> Crossover | None:
        plan, rival = self._scores(factor)
        if plan is None or rival is None:
            return None
        return Crossover(factor=factor, plan_seconds=plan.step_seconds, rival=plan_row(rival))

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
        plan_there = resolve(self._problem(factor), [self.present, *self.rivals], SECONDS / 4).best
        plan, _ = self._scores(factor)
        proposals = {rival.proposal for rival in (self.present, *self.rivals)}
        if plan_there is None or plan is None or plan_there.proposal in proposals:
            return False
        self.rivals.append(plan_there)
        return plan_there.step_seconds < plan.step_seconds * (1 - WORTH)

    def _scores(self, factor: float) -> tuple[ScoredPlan | None, ScoredPlan | None]:
        """The plan and its best rival."""
        problem = self._problem(factor)
        allowed = [rival.proposal for rival in self.rivals if problem.allows(rival.proposal)]
        return fastest(problem.space, [self.present.proposal]), fastest(problem.space, allowed)

    def _beaten(self, factor: float) -> bool:
        plan, rival = self._scores(factor)
        if plan is None or rival is None:
            return False
        return rival.step_seconds < plan.step_seconds * (1 - WORTH)

    def _first(self, end: float) -> float | None:
        """The factor nearest to 1 at which a known rival beats the plan, to the accuracy of the steps."""
        best_factor = 1.0
        for factor in _outwards(end):
            if self._beaten(factor):
                return self._bisect(best_factor, factor)
            best_factor = factor
        return None

    def _bisect(self, inner: float, beaten: float) -> float:
        for _ in range(HALVINGS):
            middle = (inner * beaten) ** 0.5
            if self._beaten(middle):
                beaten = middle
            else:
                inner = middle
        return beaten


def _outwards(end: float) -> Iterator[float]:
    """From near 1 to `end`, in equal ratios."""
    return (end ** (step / STEPS) for step in range(1, STEPS + 1))
