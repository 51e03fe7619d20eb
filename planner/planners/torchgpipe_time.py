"""torchgpipe by time: its `balance_by_time`, block partitions of the layers' seconds.

The time of a layer is its forward and backward at the size of a micro-batch. torchgpipe knows no forbidden
cuts: where it makes one, it is moved to the nearest that is allowed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..candidate import Proposal
from .block_partition import block_partition
from .equal_pipelines import Ends, linear_configs, linear_pipelines, work_seconds
from .nearest_cuts import nearest_cuts

if TYPE_CHECKING:
    from ..problem import Problem


class TorchgpipeTime:
    """GPipe's schedule on the cuts of `balance_by_time`."""

    name = "torchgpipe-time"

    def propose(self, problem: Problem) -> Iterator[Proposal]:
        """Each number of stages, a device of one node a stage: one process, without replicas."""
        configs = [config for config in linear_configs(problem) if config.schedule == "gpipe"]

        def ends(stages: int, size: int) -> Ends:
            seconds = work_seconds(problem, size).tolist()
            return nearest_cuts(problem.space.chain, block_partition(seconds, stages))

        yield from linear_pipelines(problem, configs, ends, of_a_node=True)


PLANNER = TorchgpipeTime()
