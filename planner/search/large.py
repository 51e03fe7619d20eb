"""The search where there are too many layers and devices to look at all plans.

First with few cuts, spread so that the layers between them cost alike, and with devices taken by several at a
time; then again with the cuts near those of the best plan. What it finds is no proof: the bound on all plans
is that of their work.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import inf

import numpy as np
import numpy.typing as npt

from ..candidate import Candidate
from ..plan_file import TIE
from .branch_and_bound import Found, search
from .space import Space, with_cuts
from .subproblem import Family, quick_bound

MOST_DEVICES = 64
"""Of so many, stages may begin at any."""
COARSE_BLOCKS = 64
NEAR = 3
"""Cuts on either side to which a refined search may move one."""
REFINEMENTS = 2
MOST_STAGES = 64
"""That are searched; proposed plans may have more."""


def is_large(space: Space, families: Sequence[Family]) -> bool:
    """Whether not all plans are searched."""
    replicated = max(
        (len(family.placement.ranks) for family in families if family.replicas != (1,)), default=1
    )
    return space.is_long or replicated > MOST_DEVICES


def search_large(
    space: Space,
    families: Sequence[Family],
    stage_counts: Iterable[int],
    seeds: Iterable[Candidate],
    work: float,
) -> Found:
    """The best plan found of these families, no slower than the seeds."""
    counts = [count for count in stage_counts if count <= MOST_STAGES]
    best = min(seeds, key=lambda plan: plan.step_seconds, default=None)
    families = [_in_units(family) for family in families]
    cuts = _spread(space, COARSE_BLOCKS)
    best = _better(best, with_cuts(space, cuts), families, counts, work / 2)
    for _ in range(REFINEMENTS):
        if best is not None:
            setting, stages = best.setting, len(best.proposal.ends)
            alike = [family for family in families if family.setting == setting]
            best = _better(best, with_cuts(space, _near(space, best)), alike, [stages], work / 4)
    step = inf if best is None else best.step_seconds
    bound = min(step, *(quick_bound(space, family) for family in families))
    return Found(best, bound, bound, bound >= step * (1 - TIE))


def _better(
    best: Candidate | None,
    space: Space,
    families: Sequence[Family],
    stage_counts: Sequence[int],
    work: float,
) -> Candidate | None:
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
    wanted = np.linspace(0, before[-1], blocks + 1)[1:-1]
    right = np.searchsorted(before[allowed], wanted).clip(0, len(allowed) - 1)
    kept = np.zeros(len(space.chain), dtype=np.bool_)
    kept[allowed[right]] = True
    kept[[*space.limits.must_cut, *_between_pins(space)]] = True
    return kept


def _near(space: Space, best: Candidate) -> npt.NDArray[np.bool_]:
    """The allowed cuts near those of a plan."""
    allowed = np.flatnonzero(space.chain.cut_after)
    kept = np.zeros(len(space.chain), dtype=np.bool_)
    for end in best.proposal.ends[:-1]:
        at = int(np.searchsorted(allowed, end - 1))
        kept[allowed[max(at - NEAR, 0) : at + NEAR + 1]] = True
    kept[[*space.limits.must_cut, *_between_pins(space)]] = True
    return kept


def _between_pins(space: Space) -> list[int]:
    """Allowed cuts, as many between pinned layers as lie between their stages."""
    allowed, made = np.flatnonzero(space.chain.cut_after), list[int]()
    before, stage = 0, 0
    for layer, own in sorted(space.limits.pins):
        between = allowed[(allowed >= before) & (allowed < layer)]
        count = min(own - stage, len(between))
        made += between[np.linspace(0, len(between) - 1, count).round().astype(np.int64)].tolist()
        before, stage = layer, own
    return made
