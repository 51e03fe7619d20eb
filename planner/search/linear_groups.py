"""1F1B and GPipe pipelines of one configuration as arrays, with bounds on their steps."""

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
"""Bounds on whole plans by schedule."""


def group_alike(proposals: Iterable[Proposal]) -> list[list[Proposal]]:
    """Group proposals by configuration and number of stages, in the order of their first appearance."""
    groups = defaultdict[tuple[PipelineConfig, int], list[Proposal]](list)
    for proposal in proposals:
        groups[proposal.config, len(proposal.ends)].append(proposal)
    return list(groups.values())


@dataclass(frozen=True)
class LinearGroup:
    """1F1B or GPipe pipelines of one configuration with equal numbers of stages.

    Attributes:
        pipelines: Costs of the pipelines, one row each.
        rows: By row, the proposal and the recomputation of each stage.
        bounds: By row, a bound in seconds on the step.
    """

    pipelines: Pipelines
    rows: list[tuple[Proposal, tuple[Recompute, ...]]]
    bounds: list[float]


def linear_group(space: Space, proposals: Iterable[Proposal]) -> LinearGroup | None:
    """Build the pipelines of all proposals that fit in memory.

    If the time runs out, the rest of the proposals is skipped, but at least one is built.

    Returns:
        The pipelines; None if no proposal fits.
    """
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
