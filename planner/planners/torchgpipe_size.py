"""torchgpipe by size: its `balance_by_size`, block partitions of the layers' bytes.

The size of a layer is that of its parameters, times as many copies as training holds (`param_scale`: weight,
gradient and the optimizer's states), and of the activations that it keeps of a micro-batch for its backward.
torchgpipe knows no forbidden cuts: where it makes one, it is moved to the nearest that is allowed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...cost_models.optimizers import Precision, optimizer_named
from ..candidate import Proposal
from .block_partition import block_partition
from .equal_pipelines import Ends, linear_configs, linear_pipelines
from .nearest_cuts import nearest_cuts

if TYPE_CHECKING:
    from ..problem import Problem


class TorchgpipeSize:
    """GPipe's schedule on the cuts of `balance_by_size`."""

    name = "torchgpipe-size"

    def propose(self, problem: Problem) -> Iterator[Proposal]:
        """Each number of stages, a device of one node a stage: one process, without replicas."""
        configs = [config for config in linear_configs(problem) if config.schedule == "gpipe"]
        copies = parameter_copies(problem.wishes.optimizer, problem.precision.bytes)

        def ends(stages: int, size: int) -> Ends:
            costs = problem.space.chain.at(size, past_largest=True)
            sizes = costs.parameter_bytes * copies + costs.saved_bytes
            return nearest_cuts(problem.space.chain, block_partition(sizes.tolist(), stages))

        yield from linear_pipelines(problem, configs, ends, of_a_node=True)


def parameter_copies(optimizer: str, precision: Precision) -> float:
    """torchgpipe's `param_scale`: 2 for SGD, 3 with momentum, 4 for Adam; more with master weights. Raises
    UsageError."""
    states = optimizer_named(optimizer).bytes_per_parameter(precision)
    return 1 + (precision.gradient + states) / precision.weight


PLANNER = TorchgpipeSize()
