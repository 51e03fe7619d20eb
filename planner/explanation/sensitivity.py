"""Sensitivity of a plan: the bandwidth, or the error of the layers' seconds, at which another plan becomes
better.

The factor nearest to 1 at which a known rival beats the plan is found by steps outwards and bisection,
scoring only the plan and its rivals; then the problem is solved again there (at the end of the range where
none does) and half way. Whatever beats the plan there joins the rivals, until nothing new does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ...cost_models.document import Record
from ...cost_models.quantities import ranges
from ..candidate import ScoredPlan
from ..plan_file import PlanSummary, summarize
from ..problem import Problem
from ..scoring import fastest
from .explain_context import ExplainContext
from .resolve import (
    MANY,
    SECONDS,
    bandwidth_range,
    resolve,
    with_bandwidth,
    with_slower_layers,
    with_topology,
)

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
    rival: PlanSummary


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
        return Crossover(factor=factor, plan_seconds=plan.step_seconds, rival=summarize(rival))

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
