"""Data parallelism: the whole model on every device, which share the micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..candidate import Proposal
from .equal_pipelines import equal_pipelines, linear_configs

if TYPE_CHECKING:
    from ..problem import Problem


class DataParallel:
    """One stage with all devices as its replicas."""

    name = "data-parallel"

    def propose(self, problem: Problem) -> Iterator[Proposal]:
        """Each micro-batch size; none where the runtime has no replicas."""
        devices, runtime = problem.topology.gpus, problem.runtime
        if runtime is None or runtime.runs_replicas([devices]):
            whole = (len(problem.space.chain),)
            configs = linear_configs(problem)
            yield from equal_pipelines(problem, configs, lambda *_: whole, 1, devices)


PLANNER = DataParallel()
