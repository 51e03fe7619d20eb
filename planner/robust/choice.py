"""The plan with the best 90th percentile of the step over the draws of the layers' seconds.

Compared are plans whose own step is near the fastest one's: the best of each configuration and number of
stages, those of the named planners, and variations of the best of these, with a cut moved by one place or a
device to the stage beside, again and again. All are scored on the same draws. It is no search of all plans:
nothing is proven of the percentile.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ...cost_models.errors import UsageError
from ..candidate import Proposal, ScoredPlan, replicated_pipeline
from ..infeasible import no_plan_fits
from ..joint_search import JointSearchResult, is_small_problem
from ..pipeline_config import PipelineConfig
from ..plan_records import TIE
from ..problem import Problem
from ..scoring import fastest
from ..search.branch_and_bound import search
from ..search.budget import WORK_A_SECOND
from ..search.coarse import is_large
from ..search.subproblem import Family
from .resampling import Draws, StepSampler, has_spread, make_draws, percentiles

NEAR = 0.2
"""Share by which the step of a plan that is compared may be longer than the fastest one's."""
MOST_BESTS = 64
"""Of the plans that are the best of their configuration and number of stages: the fastest."""
CLIMBED = 4
"""Plans that are varied at a time: the best so far."""
ROUNDS = 12


@dataclass(frozen=True)
class RobustPlan:
    """The plan that was chosen, its 90th percentile and that of the fastest plan, and how many plans were
    compared. `is_fastest`: whether it is that plan."""

    plan: ScoredPlan
    high_seconds: float
    fastest_high_seconds: float
    compared: int
    is_fastest: bool


def check_known(problem: Problem) -> None:
    """Raises UsageError where the profile has no spread of the layers' seconds."""
    if not has_spread(problem.space):
        raise UsageError(
            "`robust`: the profile has no spread of the layers' seconds (it is an estimate or an import)",
            "Measure it on the machine itself (pplan profile MODEL), or omit `robust`.",
        )


def most_robust(problem: Problem, answer: JointSearchResult) -> RobustPlan:
    """The choice among plans near the fastest, which the answer holds.

    That one itself, unless another is better by more than `TIE`. Raises UsageError as `check_known`.
    """
    check_known(problem)
    best = answer.best
    if best is None:
        raise no_plan_fits(problem)
    contest = _Comparison(problem, best, make_draws(len(problem.chain)))
    contest.enter([best])
    contest.enter(plan for plan in answer.by_planner.values() if isinstance(plan, ScoredPlan))
    contest.enter(_bests(problem, best))
    contest.climb()
    return contest.choose_best()


@dataclass
class _Comparison:
    """The plans that were compared, with the 90th percentile of each."""

    problem: Problem
    fastest: ScoredPlan
    draws: Draws
    scores: dict[Proposal, tuple[ScoredPlan, float]] = field(default_factory=dict)
    _looked_at: set[Proposal] = field(default_factory=set)
    _varied: set[Proposal] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._resampled = StepSampler(self.problem.space, self.draws)

    def enter(self, plans: Iterable[ScoredPlan]) -> None:
        """Scores those that are new and near the fastest."""
        for plan in plans:
            near = plan.step_seconds <= self._longest and self.problem.allows(plan.proposal)
            if near and plan.proposal not in self.scores:
                steps = self._resampled.step_seconds(plan)
                self.scores[plan.proposal] = plan, percentiles(steps).high_seconds

    @property
    def _longest(self) -> float:
        return self.fastest.step_seconds * (1 + NEAR)

    def climb(self) -> None:
        """Varies the best plans until no variation is better."""
        for _ in range(ROUNDS):
            leading = [plan for plan, _ in self._rank_plans()[:CLIMBED] if plan.proposal not in self._varied]
            if not leading:
                return
            for plan in leading:
                self._varied.add(plan.proposal)
                self.enter(self._variations(plan.proposal))

    def _variations(self, proposal: Proposal) -> Iterator[ScoredPlan]:
        for other in variations(self.problem, proposal):
            if other not in self._looked_at:
                self._looked_at.add(other)
                scored = fastest(self.problem.space, [other], self._longest)
                if scored is not None:
                    yield scored

    def _rank_plans(self) -> list[tuple[ScoredPlan, float]]:
        """The best first, among equals the fastest, then the one that was entered first."""
        return sorted(self.scores.values(), key=lambda row: (row[1], row[0].step_seconds))

    def choose_best(self) -> RobustPlan:
        """The best plan."""
        own = self.scores[self.fastest.proposal]
        ranked = self._rank_plans()[0]
        plan, high = ranked if ranked[1] < own[1] * (1 - TIE) else own
        return RobustPlan(plan, high, own[1], len(self.scores), plan == own[0])


def variations(problem: Problem, proposal: Proposal) -> Iterator[Proposal]:
    """The plan with a cut one place further, or with a device of one stage on the stage beside it."""
    for other in (*_move_cuts(problem, proposal), *_move_devices(proposal)):
        if problem.allows(other):
            yield other


def _move_cuts(problem: Problem, proposal: Proposal) -> Iterator[Proposal]:
    cut_points = [
        0,
        *(int(i) + 1 for i in problem.space.chain.cut_after[:-1].nonzero()[0]),
        len(problem.chain),
    ]
    at = [cut_points.index(end) for end in proposal.ends]
    for cut in range(len(at) - 1):
        before, after = (at[cut - 1] if cut else 0), at[cut + 1]
        for moved in (at[cut] - 1, at[cut] + 1):
            if before < moved < after:
                ends = (*proposal.ends[:cut], cut_points[moved], *proposal.ends[cut + 1 :])
                yield replace(proposal, ends=ends)


def _move_devices(proposal: Proposal) -> Iterator[Proposal]:
    """Of devices that stand in their order."""
    own = proposal.replicas
    if proposal != replicated_pipeline(proposal.config, proposal.ends, own):
        return
    for stage in range(len(own) - 1):
        for step in (-1, 1):
            counts = list(own)
            counts[stage], counts[stage + 1] = own[stage] + step, own[stage + 1] - step
            if min(counts) > 0:
                yield replicated_pipeline(proposal.config, proposal.ends, counts)


def _bests(problem: Problem, best: ScoredPlan) -> list[ScoredPlan]:
    """The fastest of each configuration and number of stages, of those that are near the fastest of all; of
    problems that are too large to be searched again for each, none."""
    if is_large(problem.space, problem.families):
        return []
    alike: dict[PipelineConfig, list[Family]] = {}
    for family in problem.families:
        alike.setdefault(family.config, []).append(family)
    work = problem.options.time_limit * WORK_A_SECOND / max(1, len(alike) * len(problem.stage_counts))
    searches = _Searches(problem, best.step_seconds * (1 + NEAR), work)
    plans = [plan for families in alike.values() for plan in searches.by_stages(families)]
    return sorted(plans, key=lambda plan: plan.step_seconds)[:MOST_BESTS]


@dataclass(frozen=True)
class _Searches:
    """Searches of a part of the space for plans below `limit` seconds, each with so much work."""

    problem: Problem
    limit: float
    work: float

    def by_stages(self, families: Sequence[Family]) -> Iterator[ScoredPlan]:
        """The fastest of these families with any number of stages, and those with other numbers: where the
        problem is not small, one stage more or less."""
        counts = self.problem.stage_counts
        first = self._fastest(families, counts)
        if first is None:
            return
        yield first
        own = len(first.proposal.ends)
        for stages in counts:
            if stages != own and (is_small_problem(self.problem) or abs(stages - own) == 1):
                other = self._fastest(families, [stages])
                if other is not None:
                    yield other

    def _fastest(self, families: Sequence[Family], counts: Iterable[int]) -> ScoredPlan | None:
        return search(self.problem.space, families, counts, work=self.work, limit=self.limit).best
