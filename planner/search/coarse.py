"""The search where there are too many layers and devices to look at all plans.

The bound on all plans is that of `relaxed`, which has no positions of devices, and the plans near the
pipelines that attain it are scored. Then, with few cuts, spread so that the layers between them cost alike,
and with devices taken by several at a time, plans are searched; then again with the cuts near those of the
best plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import inf

import numpy as np
import numpy.typing as npt

from ...cost_models.errors import UsageError
from ..candidate import Proposal, ScoredPlan
from ..pipeline_config import UNPROPOSED
from ..plan_records import TIE
from .branch_and_bound import WORK, SearchResult, search
from .budget import OutOfTime, SearchBudget
from .deep_pipelines import propose_deep
from .pipelines import build_pipelines
from .placements import MOST_DEVICES
from .relaxed_bound import RelaxedBound
from .space import MOST_BLOCKS, Space, narrow_space, with_cuts
from .stage_recompute import choose_modes
from .subproblem import Family, quick_bound

MOST_LINEAR = 256
"""The same where stages have one device each."""
MOST_POSITIONS = 1_024
"""With more devices only plans near relaxed ones are scored: tables by position would be too large."""
COARSE_BLOCKS = 64
NEAR = 3
"""Cuts on either side to which a refined search may move one."""
REFINEMENTS = 2
MOST_STAGES = 64
"""That are searched; proposed plans may have more."""
FOR_DEEP = 0.3
"""Share of the work and the time that plans of equal numbers of replicas may have."""
FOR_BOUND = 0.5
"""Share of the work and the time that the bound may have."""


def is_large(space: Space, families: Sequence[Family]) -> bool:
    """Whether not all plans are searched."""
    most = {True: 1, False: 1}
    for family in families:
        linear = family.replicas == (1,)
        most[linear] = max(most[linear], len(family.placement.ranks))
    return space.is_long or most[False] > MOST_DEVICES or most[True] > MOST_LINEAR


def search_large(
    space: Space,
    families: Sequence[Family],
    stage_counts: Iterable[int],
    seeds: Iterable[ScoredPlan],
    work: float | None = None,
    *,
    deeper: bool = False,
) -> SearchResult:
    """The best plan found of these families, no slower than the seeds; and a bound on all of them, with any
    of the devices. `deeper`: plans with more stages are allowed, too: they are only bounded.
    Raises UsageError where first layers are to recompute, or stages to offload, of which the bound knows
    nothing."""
    if unknown := [own.config.recompute for own in families if own.config.recompute in UNPROPOSED]:
        raise UsageError(
            f"recompute={unknown[0]!r} of so many devices or layers",
            f"It is searched up to {MOST_DEVICES} devices and {MOST_BLOCKS} places to cut: recompute='auto'.",
        )
    budget = space.budget.part(WORK if work is None else work)
    counts = sorted(set(stage_counts))
    scored = _Scored(space, budget, min(seeds, key=lambda plan: plan.step_seconds, default=None))
    _score_deep(scored, families, counts, deeper, budget.part(FOR_DEEP * budget.remaining, share=FOR_DEEP))
    own = budget.part(FOR_BOUND * budget.remaining, share=FOR_BOUND)
    relaxed = RelaxedBound(space, families, counts, deeper, own, scored)
    bound = relaxed.least(scored.step)
    relaxed.propose_rest(budget.part(FOR_BOUND * budget.remaining, share=FOR_BOUND))
    _search_coarsely(scored, families, [count for count in counts if count <= MOST_STAGES], budget)
    bound = min(bound, scored.step)
    root = min([scored.step, *(quick_bound(space, family) for family in families)])
    return SearchResult(scored.best, bound, min(root, bound), bound >= scored.step * (1 - TIE))


def _score_deep(
    scored: _Scored, families: Sequence[Family], counts: Sequence[int], deeper: bool, budget: SearchBudget
) -> None:
    """Scores plans of equal numbers of replicas."""
    try:
        for proposal in propose_deep(scored.space.within(budget), families, lambda: scored.step):
            if (deeper or len(proposal.ends) in counts) and not budget.spent:
                scored([proposal])
    except OutOfTime:
        return


class _Scored:
    """The best plan so far. As a function: scores proposals, and gives the seconds of the best plan."""

    def __init__(self, space: Space, budget: SearchBudget, best: ScoredPlan | None) -> None:
        self.space, self.budget, self.best = space, budget, best
        self._proposals: set[Proposal] = set()

    @property
    def step(self) -> float:
        """Of the best plan; inf where there is none."""
        return inf if self.best is None else self.best.step_seconds

    def __call__(self, proposals: Sequence[Proposal]) -> float:
        for proposal in proposals:
            if proposal not in self._proposals:
                self._proposals.add(proposal)
                self._score(proposal)
        return self.step

    def _score(self, proposal: Proposal) -> None:
        config = proposal.config
        if not self.space.limits.allow(proposal.bounds):
            return
        narrow = narrow_space(self.space, proposal.ends) if self.space.is_long else self.space
        modes = choose_modes(narrow, proposal)
        if modes is None:
            return
        self.budget.check()
        pipelines = build_pipelines(narrow, [proposal], [modes])
        # Ports that stages share only make steps longer, and take long to look at where devices are many.
        step = float(pipelines.without_sharing().step_seconds()[0])
        if step < self.step:
            step = float(pipelines.step_seconds()[0])
        self.budget.simulate(1, 2 * len(proposal.ends) * config.micro_batches)
        if step < self.step:
            self.best = ScoredPlan(proposal, modes, step)


def _search_coarsely(
    scored: _Scored, families: Sequence[Family], counts: Sequence[int], budget: SearchBudget
) -> None:
    """Looks for better plans with few cuts and devices taken together, and then near the best one."""
    space = scored.space
    if max((len(family.placement.ranks) for family in families), default=0) > MOST_POSITIONS:
        return
    families = [_in_units(family) for family in families]
    try:
        cuts = _spread(space, COARSE_BLOCKS)
        scored.best = _better(scored.best, with_cuts(space, cuts), families, counts, budget.remaining / 2)
        for _ in range(REFINEMENTS):
            if scored.best is not None:
                config, stages = scored.best.config, len(scored.best.proposal.ends)
                alike = [family for family in families if family.config == config]
                near = with_cuts(space, _near(space, scored.best))
                scored.best = _better(scored.best, near, alike, [stages], budget.remaining / 2)
    except OutOfTime:
        return


def _better(
    best: ScoredPlan | None,
    space: Space,
    families: Sequence[Family],
    stage_counts: Sequence[int],
    work: float,
) -> ScoredPlan | None:
    """The best plan of a smaller space, where it is faster than `best`; else `best`."""
    limit = inf if best is None else best.step_seconds
    return search(space, families, stage_counts, work=work, limit=limit).best or best


def _in_units(family: Family) -> Family:
    """With devices taken by several at a time, so that stages begin at `MOST_DEVICES` of them or fewer."""
    devices, unit = len(family.placement.ranks), 1
    if len(family.replicas) == 1:
        return replace(family, unit=family.replicas[0])
    while devices > MOST_DEVICES * unit:
        unit *= 2
    return replace(family, unit=unit, replicas=tuple(n for n in family.replicas if n % unit == 0))


def _spread(space: Space, blocks: int) -> npt.NDArray[np.bool_]:
    """Allowed cuts, so many that the layers between them cost about alike."""
    costs = space.chain.at(space.chain.sizes[-1])
    before = np.cumsum(costs.forward_seconds + costs.backward_seconds)
    allowed = np.flatnonzero(space.chain.cut_after)
    if not len(allowed):
        return space.chain.cut_after
    targets = np.linspace(0, before[-1], blocks + 1)[1:-1]
    right = np.searchsorted(before[allowed], targets).clip(0, len(allowed) - 1)
    cuts = np.zeros(len(space.chain), dtype=np.bool_)
    cuts[allowed[right]] = True
    cuts[[*space.limits.must_cut, *_between_pins(space)]] = True
    return cuts


def _near(space: Space, best: ScoredPlan) -> npt.NDArray[np.bool_]:
    """The allowed cuts near those of a plan."""
    allowed = np.flatnonzero(space.chain.cut_after)
    cuts = np.zeros(len(space.chain), dtype=np.bool_)
    for end in best.proposal.ends[:-1]:
        at = int(np.searchsorted(allowed, end - 1))
        cuts[allowed[max(at - NEAR, 0) : at + NEAR + 1]] = True
    cuts[[*space.limits.must_cut, *_between_pins(space)]] = True
    return cuts


def _between_pins(space: Space) -> list[int]:
    """Allowed cuts, as many between pinned layers as lie between their stages."""
    allowed, cut_points = np.flatnonzero(space.chain.cut_after), list[int]()
    before, stage = 0, 0
    for layer, own in sorted(space.limits.pins):
        between = allowed[(allowed >= before) & (allowed < layer)]
        count = min(own - stage, len(between))
        cut_points += between[np.linspace(0, len(between) - 1, count).round().astype(np.int64)].tolist()
        before, stage = layer, own
    return cut_points
