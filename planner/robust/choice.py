"""The plan that loses least where seconds vary: the best 90th percentile of the step over the draws of the
layers' seconds, or, with slow devices, the shortest mean step over the draws of these.

Compared are plans whose own step is near the fastest one's (with slow devices: is no longer than the best
mean, which is at least a plan's own step): the best of each configuration and number of stages, those of the
named planners, and variations of the best of these, with a cut or a device moved, a device more or less,
stages joined or parted, again and again. All are scored on the same draws. It is no search of all plans, and
the draws are a sample: nothing is proven of percentile and mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ...cost_models.errors import UsageError
from ..candidate import PipelineConfig, Proposal, ScoredPlan, near_shapes, replicated_pipeline
from ..infeasible import no_plan_fits
from ..joint_search import JointSearchResult, is_small_problem
from ..plan_file import TIE
from ..problem import Problem
from ..scoring import fastest
from ..search.branch_and_bound import is_large, search
from ..search.budget import WORK_A_SECOND
from ..search.family import Family
from .resampling import DEVICE_SAMPLES, DrawnSteps, Draws, StepSampler, make_draws

NEAR = 0.2
"""Share by which the step of a plan that is compared may be longer than the fastest one's."""
MOST_BESTS = 64
"""Of the plans that are the best of their configuration and number of stages: the fastest."""
CLIMBED = 4
"""Plans that are varied at a time: the best so far."""
ROUNDS = 12


@dataclass(frozen=True)
class RobustPlan:
    """The plan that was chosen and its steps over the draws, those of the fastest plan, and how many plans
    were compared. `is_fastest`: whether it is that plan."""

    plan: ScoredPlan
    steps: DrawnSteps
    fastest_steps: DrawnSteps
    compared: int
    is_fastest: bool


def check_known(problem: Problem) -> None:
    """Raises UsageError where nothing varies: the profile has no spread, and no device is slow."""
    if problem.options.slow_devices is None and not problem.space.has_spread:
        raise UsageError(
            "`robust`: the profile has no spread of the layers' seconds (it is an estimate or an import)",
            "Measure it on the machine itself (pplan profile MODEL), give `slow_devices`, or omit `robust`.",
        )


def most_robust(problem: Problem, answer: JointSearchResult) -> RobustPlan:
    """The choice among plans near the fastest, which the answer holds.

    That one itself, unless another is better by more than `TIE`. Raises UsageError as `check_known`.
    """
    check_known(problem)
    best, slow_devices = answer.best, problem.options.slow_devices
    if best is None:
        raise no_plan_fits(problem)
    if slow_devices is None:
        draws = make_draws(len(problem.chain))
    else:
        draws = make_draws(len(problem.chain), DEVICE_SAMPLES, problem.gpus, slow_devices)
    contest = _Comparison(problem, best, draws)
    contest.enter([best])
    contest.enter(plan for plan in answer.by_planner.values() if isinstance(plan, ScoredPlan))
    contest.enter(_bests(problem, contest.longest))
    contest.climb()
    return contest.choose_best()


@dataclass
class _Comparison:
    """The plans that were compared, with the steps of each."""

    problem: Problem
    fastest: ScoredPlan
    draws: Draws
    scores: dict[Proposal, tuple[ScoredPlan, DrawnSteps]] = field(default_factory=dict)
    _looked_at: set[Proposal] = field(default_factory=set)
    _varied: set[Proposal] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._resampled = StepSampler(self.problem.space, self.draws)

    def enter(self, plans: Iterable[ScoredPlan]) -> None:
        """Scores those that are new and near the fastest."""
        for plan in plans:
            near = plan.step_seconds <= self.longest and self.problem.allows(plan.proposal)
            if near and plan.proposal not in self.scores:
                self.scores[plan.proposal] = plan, DrawnSteps.of(self._resampled.step_seconds(plan))

    def _seconds(self, steps: DrawnSteps) -> float:
        """What is to be short."""
        return steps.high_seconds if self.draws.slow is None else steps.mean_seconds

    @property
    def longest(self) -> float:
        """Seconds of the step of a plan that may be the best."""
        if self.draws.slow is None or not self.scores:
            return self.fastest.step_seconds * (1 + NEAR)
        return min(steps.mean_seconds for _, steps in self.scores.values())

    def climb(self) -> None:
        """Varies the best plans until no variation is better."""
        for _ in range(ROUNDS):
            leading = [plan for plan, _ in self._rank_plans()[:CLIMBED] if plan.proposal not in self._varied]
            if not leading or self.problem.budget.over:
                return
            for plan in leading:
                self._varied.add(plan.proposal)
                self.enter(self._variations(plan.proposal))

    def _variations(self, proposal: Proposal) -> Iterator[ScoredPlan]:
        for other in variations(self.problem, proposal):
            if other not in self._looked_at:
                self._looked_at.add(other)
                scored = fastest(self.problem.space, [other], self.longest)
                if scored is not None:
                    yield scored

    def _rank_plans(self) -> list[tuple[ScoredPlan, DrawnSteps]]:
        """The best first, among equals the fastest, then the one that was entered first."""
        return sorted(self.scores.values(), key=lambda row: (self._seconds(row[1]), row[0].step_seconds))

    def choose_best(self) -> RobustPlan:
        """The best plan."""
        own = self.scores[self.fastest.proposal]
        ranked = self._rank_plans()[0]
        better = self._seconds(ranked[1]) < self._seconds(own[1]) * (1 - TIE)
        plan, steps = ranked if better else own
        return RobustPlan(plan, steps, own[1], len(self.scores), plan == own[0])


def variations(problem: Problem, proposal: Proposal) -> Iterator[Proposal]:
    """The plans of shapes near a plan's; of one whose devices do not stand in their order, other cuts."""
    table = problem.space.table(problem.chain.sizes[0])
    own, config = proposal.replicas, proposal.config
    in_order = proposal == replicated_pipeline(config, proposal.ends, own)
    for ends, replicas in near_shapes(table.cut_points, proposal.ends, own, problem.gpus):
        if replicas == own and len(ends) == len(own):
            other = replace(proposal, ends=ends)
        elif in_order:
            other = replicated_pipeline(config, ends, replicas)
        else:
            continue
        if problem.allows(other):
            yield other


def _bests(problem: Problem, longest: float) -> list[ScoredPlan]:
    """The fastest of each configuration and number of stages, of those whose step is below `longest`; of
    problems that are too large to be searched again for each, none."""
    if is_large(problem.space, problem.families):
        return []
    alike: dict[PipelineConfig, list[Family]] = {}
    for family in problem.families:
        alike.setdefault(family.config, []).append(family)
    work = problem.options.time_limit * WORK_A_SECOND / max(1, len(alike) * len(problem.stage_counts))
    searches = _Searches(problem, longest, work)
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
