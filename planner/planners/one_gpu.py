"""One GPU: the whole model on one device, gradients added up over the micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..candidate import Proposal, linear_pipeline
from .equal_pipelines import linear_configs, shared_configs

if TYPE_CHECKING:
    from ..problem import Problem


class OneGpu:
    """No pipeline and no replicas."""

    name = "one-gpu"

    def propose(self, problem: Problem) -> Iterator[Proposal]:
        """The first device of each kind."""
        topology = problem.topology
        first = {topology.device(rank): rank for rank in reversed(range(topology.gpus))}
        for rank in sorted(first.values()):
            for config in shared_configs(problem, linear_configs(problem), 1):
                yield linear_pipeline(config, [len(problem.space.chain)], rank)


PLANNER = OneGpu()
