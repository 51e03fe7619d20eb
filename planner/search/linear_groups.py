"""1F1B and GPipe pipelines side by side, with bounds on their steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ...cost_models.memory import Recompute
from ..candidate import PipelineConfig, Proposal
from ..stage_table import Floats
from .bounds_1f1b import whole_bound_1f1b
from .bounds_gpipe import whole_bound_gpipe
from .pipelines import Pipelines, build_pipelines
from .space import Space
from .stage_recompute import choose_modes

WHOLE_BOUNDS: dict[str, Callable[[Pipelines], Floats]] = {
    "1f1b": whole_bound_1f1b,
    "gpipe": whole_bound_gpipe,
}
"""Bounds on whole plans, by schedule."""


def group_alike(proposals: Iterable[Proposal]) -> list[list[Proposal]]:
    """Group proposals of one configuration with as many parts, in the order of the first of each."""
    groups = defaultdict[tuple[PipelineConfig, int], list[Proposal]](list)
    for proposal in proposals:
        groups[proposal.config, len(proposal.ends)].append(proposal)
    return list(groups.values())


@dataclass(frozen=True)
class LinearGroup:
    """Pipelines of 1F1B or GPipe side by side, of one configuration with as many stages; by row, the proposal
    and what each stage recomputes, and a bound on the step."""

    pipelines: Pipelines
    rows: list[tuple[Proposal, tuple[Recompute, ...]]]
    bounds: list[float]


def linear_group(space: Space, proposals: Iterable[Proposal]) -> LinearGroup | None:
    """Build those of the proposals that fit, as far as the time goes, one at least; None where none does."""
    rows = list[tuple[Proposal, tuple[Recompute, ...]]]()
    for proposal in proposals:
        if rows and space.budget.over:
            break
        modes = choose_modes(space, proposal)
        if modes is not None:
            rows.append((proposal, modes))
    if not rows:
        return None
    pipelines = build_pipelines(space, [proposal for proposal, _ in rows], [modes for _, modes in rows])
    return LinearGroup(pipelines, rows, WHOLE_BOUNDS[pipelines.config.schedule](pipelines).tolist())
