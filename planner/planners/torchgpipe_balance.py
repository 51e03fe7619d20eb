"""torchgpipe's way to cut a chain: block partitions, of the layers' seconds and of their bytes.

A block partition evens out stages by one layer at a time. `balance_by_time` takes a layer's forward and
backward at the size of a micro-batch; `balance_by_size` its parameters, times as many copies as training
holds (`param_scale`: weight, gradient and the optimizer's states), and the activations that it keeps of a
micro-batch for its backward. torchgpipe knows no forbidden cuts: where it makes one, it is moved to the
nearest that is allowed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from ...cost_models.optimizers import Precision, find_optimizer
from ..candidate import Proposal
from .base import Ends, Planner, linear_configs, linear_pipelines, nearest_cuts, work_seconds

if TYPE_CHECKING:
    from ..problem import Problem


def block_partition(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """Ends of the stages, as torchgpipe's `blockpartition.solve` finds them for as many layers or more.

    Items move from the largest block towards a smallest one until they differ by the largest item at most. Of
    several smallest blocks it fills the first. The paper fills the one nearest to the largest block. With the
    first, blocks can become empty, and torchgpipe may then end with empty or overlapping ones, or never. The
    paper's choice is taken there.
    """
    first = _settle(costs, stages, nearest=False)
    return first if min(np.diff(first, prepend=0)) > 0 else _settle(costs, stages, nearest=True)


def _settle(costs: Sequence[float], blocks: int, *, nearest: bool) -> tuple[int, ...]:
    least, most = min(costs), max(costs)
    items = [(cost - least) / ((most - least) or 1) for cost in costs]
    ends = [0, *(len(costs) // blocks * count for count in range(1, blocks)), len(costs)]
    giver = largest = -1
    while True:
        sizes = [sum(items[start:end]) for start, end in pairwise(ends)]
        if giver == largest:  # the largest block gave an item: there may be another one now
            largest = max(range(blocks), key=lambda block: (sizes[block], block))
        smallest = min(sizes)
        if sizes[largest] <= smallest + 1:
            return tuple(ends[1:])
        alike = [block for block, size in enumerate(sizes) if size == smallest]
        taker, beyond = alike[0], alike[0] + (1 if alike[0] < largest else -1)
        if nearest or ends[beyond] == ends[beyond + 1]:
            taker = min(alike, key=lambda block: abs(block - largest))
        giver = taker + (1 if taker < largest else -1)
        ends[max(giver, taker)] += 1 if giver > taker else -1


def _propose(by_size: bool, problem: Problem) -> Iterator[Proposal]:
    """GPipe's schedule on the cuts of the layers' seconds or bytes for micro-batches of a size: a device of
    one node a stage, as one process runs them, without replicas."""
    configs = [config for config in linear_configs(problem) if config.schedule == "gpipe"]
    copies = parameter_copies(problem.options.optimizer, problem.precision.bytes)

    def ends(stages: int, size: int) -> Ends:
        costs = problem.space.chain.at(size, past_largest=True)
        sizes = costs.parameter_bytes * copies + costs.saved_bytes
        own = sizes if by_size else work_seconds(problem, size)
        return nearest_cuts(problem.space.chain, block_partition(own.tolist(), stages))

    return linear_pipelines(problem, configs, ends, of_a_node=True)


def parameter_copies(optimizer: str, precision: Precision) -> float:
    """torchgpipe's `param_scale`: 2 for SGD, 3 with momentum, 4 for Adam; more with master weights. Raises
    UsageError."""
    states = find_optimizer(optimizer).bytes_per_parameter(precision)
    return 1 + (precision.gradient + states) / precision.weight


PLANNERS = (
    Planner("torchgpipe-time", partial(_propose, False)),
    Planner("torchgpipe-size", partial(_propose, True)),
)
