"""torchgpipe's balance: block partitions of the layers' seconds or bytes.

A block partition evens out stages by one layer at a time. `balance_by_time` takes a layer's forward and
backward at the size of a micro-batch. `balance_by_size` takes its parameters, times the number of copies that
training holds (`param_scale`: weight, gradient and optimizer states), plus the activations that it keeps of a
micro-batch for its backward. torchgpipe ignores forbidden cuts; here they are moved to the nearest allowed
ones.
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
    """Return the ends of the stages, as torchgpipe's `blockpartition.solve` finds them.

    Items move from the largest block towards a smallest one until they differ by at most the largest item. Of
    several smallest blocks torchgpipe fills the first; its paper fills the one nearest to the largest block.
    With the first, blocks can become empty, and torchgpipe may end with empty or overlapping blocks, or never
    end. In that case the paper's choice is used.

    Args:
        costs: Costs of the layers.
        stages: Number of stages, at most that of the layers.
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
        if giver == largest:  # it gave an item, so another block may be the largest now
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
    """Return GPipe's schedule on cuts by seconds or bytes, one device of a node per stage, without replicas.

    torchgpipe drives all devices from one process.
    """
    configs = [config for config in linear_configs(problem) if config.schedule == "gpipe"]
    copies = parameter_copies(problem.options.optimizer, problem.precision.bytes)

    def ends(stages: int, size: int) -> Ends:
        costs = problem.space.chain.at(size, past_largest=True)
        sizes = costs.parameter_bytes * copies + costs.saved_bytes
        layer_costs = sizes if by_size else work_seconds(problem, size)
        return nearest_cuts(problem.space.chain, block_partition(layer_costs.tolist(), stages))

    return linear_pipelines(problem, configs, ends, of_a_node=True)


def parameter_copies(optimizer: str, precision: Precision) -> float:
    """Return torchgpipe's `param_scale`: 2 for SGD, 3 with momentum, 4 for Adam, more with master weights.

    Raises:
        UsageError: The optimizer is unknown.
    """
    states = find_optimizer(optimizer).bytes_per_parameter(precision)
    return 1 + (precision.gradient + states) / precision.weight


PLANNERS = (
    Planner("torchgpipe-time", partial(_propose, False)),
    Planner("torchgpipe-size", partial(_propose, True)),
)
