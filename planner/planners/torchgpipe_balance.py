"""torchgpipe's way to cut a chain: block partitions, of the layers' seconds and of their bytes.

A block partition evens out stages by one layer at a time. `balance_by_time` takes a layer's forward and
backward at the size of a micro-batch; `balance_by_size` its parameters, times as many copies as training
holds (`param_scale`: weight, gradient and the optimizer's states), and the activations that it keeps of a
micro-batch for its backward. torchgpipe knows no forbidden cuts: where it makes one, it is moved to the
nearest that is allowed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ...cost_models.optimizers import Precision, find_optimizer
from ..candidate import Proposal
from .base import Ends, linear_configs, linear_pipelines, nearest_cuts, work_seconds

if TYPE_CHECKING:
    from ..problem import Problem


def block_partition(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """Ends of the stages, as torchgpipe's `blockpartition.solve` finds them for as many layers or more.

    Of several smallest blocks it fills the first. The paper fills the one nearest to the largest block; with
    the first, blocks can become empty, and torchgpipe may then end with empty or overlapping ones, or never:
    there the paper's choice is taken.
    """
    partition = _Blocks(costs, stages)
    partition.settle(nearest=False)
    if partition.has_empty:
        partition = _Blocks(costs, stages)
        partition.settle(nearest=True)
    return tuple(partition.ends)


class _Blocks:
    """Blocks of items, by their ends, and the sizes of the blocks in parts of the largest item."""

    def __init__(self, costs: Sequence[float], blocks: int) -> None:
        least, most = min(costs), max(costs)
        self.items = [(cost - least) / ((most - least) or 1) for cost in costs]
        self.ends = [len(costs) // blocks * count for count in range(1, blocks)] + [len(costs)]
        self.sizes = [sum(self.items[slice(*self.bounds(block))]) for block in range(blocks)]

    def bounds(self, block: int) -> tuple[int, int]:
        """The first item of a block and the one after its last."""
        return (self.ends[block - 1] if block else 0), self.ends[block]

    def is_empty(self, block: int) -> bool:
        """Whether it has no items."""
        first, end = self.bounds(block)
        return first == end

    @property
    def has_empty(self) -> bool:
        """Whether any block has no items."""
        return any(self.is_empty(block) for block in range(len(self.ends)))

    def settle(self, *, nearest: bool) -> None:
        """Moves items from the largest block towards a smallest until they differ by one item at most."""
        while True:
            largest = max(range(len(self.sizes)), key=lambda block: (self.sizes[block], block))
            from_largest = False
            while not from_largest:
                smallest = min(self.sizes)
                if self.sizes[largest] <= smallest + 1:
                    return
                taker = self._taker(smallest, largest, nearest=nearest)
                giver = taker + (1 if taker < largest else -1)
                self._move(giver, taker)
                from_largest = giver == largest

    def _taker(self, smallest: float, largest: int, *, nearest: bool) -> int:
        """The smallest block that grows: at its neighbour's cost, on the side of the largest."""
        alike = [block for block, size in enumerate(self.sizes) if size == smallest]
        first = alike[0]
        if nearest or self.is_empty(first + (1 if first < largest else -1)):
            return min(alike, key=lambda block: abs(block - largest))
        return first

    def _move(self, giver: int, taker: int) -> None:
        if giver < taker:
            self.ends[giver] -= 1
        else:
            self.ends[taker] += 1
        for block in (giver, taker):
            self.sizes[block] = sum(self.items[slice(*self.bounds(block))])


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


BY_TIME = TorchgpipeTime()


class TorchgpipeSize:
    """GPipe's schedule on the cuts of `balance_by_size`."""

    name = "torchgpipe-size"

    def propose(self, problem: Problem) -> Iterator[Proposal]:
        """Each number of stages, a device of one node a stage: one process, without replicas."""
        configs = [config for config in linear_configs(problem) if config.schedule == "gpipe"]
        copies = parameter_copies(problem.options.optimizer, problem.precision.bytes)

        def ends(stages: int, size: int) -> Ends:
            costs = problem.space.chain.at(size, past_largest=True)
            sizes = costs.parameter_bytes * copies + costs.saved_bytes
            return nearest_cuts(problem.space.chain, block_partition(sizes.tolist(), stages))

        yield from linear_pipelines(problem, configs, ends, of_a_node=True)


def parameter_copies(optimizer: str, precision: Precision) -> float:
    """torchgpipe's `param_scale`: 2 for SGD, 3 with momentum, 4 for Adam; more with master weights. Raises
    UsageError."""
    states = find_optimizer(optimizer).bytes_per_parameter(precision)
    return 1 + (precision.gradient + states) / precision.weight


BY_SIZE = TorchgpipeSize()
