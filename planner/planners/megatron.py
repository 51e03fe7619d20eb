"""Megatron: the transformer blocks evenly over the stages, the embedding first, the head last.

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021,
section 2.2: every stage has the same number of blocks. Ranks are ordered with the pipeline outermost
(tp-cp-ep-dp-pp), so that the replicas of a stage are neighbours. A cut that is forbidden is moved to the
nearest that is allowed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...cost_models.layer import Chain
from ...cost_models.quantities import counted
from ..candidate import Proposal
from .equal_pipelines import (
    Ends,
    equal_pipelines,
    linear_configs,
    replicated_shapes,
    stage_counts,
)
from .nearest_cuts import nearest_cuts
from .repeated_blocks import Blocks, repeated_blocks

if TYPE_CHECKING:
    from ..problem import Problem


class Megatron:
    """Even blocks on all devices."""

    name = "megatron"

    def propose(self, problem: Problem) -> Iterator[Proposal]:
        """Each number of stages that divides blocks and devices, with the replicas that use all devices; none
        where the names of the layers tell no blocks."""
        chain, blocks = problem.space.chain, repeated_blocks(problem.space.chain)
        if blocks is None:
            return
        devices = problem.reached
        shapes = [(devices, 1)] if devices in stage_counts(problem) else []
        for stages, replicas in (*shapes, *replicated_shapes(problem)):
            yield from equal_pipelines(
                problem,
                linear_configs(problem),
                lambda count, _: block_ends(chain, blocks, count),
                stages,
                replicas,
            )

    def refusal(self, problem: Problem) -> str:
        """Why it proposes nothing."""
        blocks = repeated_blocks(problem.space.chain)
        if blocks is None:
            return "the names of the layers tell no transformer blocks"
        devices = counted(problem.reached, "device")
        return f"{len(blocks)} blocks, {blocks.stem}*, do not divide into stages of {devices} in use"


def block_ends(chain: Chain, blocks: Blocks, stages: int) -> Ends | None:
    """Ends of stages of as many blocks each; None where they do not divide."""
    each, rest = divmod(len(blocks), stages)
    if rest or stages > chain.max_stages:
        return None
    inner = blocks.starts[each : each * stages : each]
    return nearest_cuts(chain, (*inner, len(chain)))


PLANNER = Megatron()
