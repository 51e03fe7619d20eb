"""torchgpipe's way to cut a chain: block partitions, which even out stages by one layer at a time.

Bárány and Grinberg, "Block Partitions of Sequences", arXiv:1308.2452: a partition in which the largest block
exceeds the smallest by no more than the largest item. torchgpipe 0.0.7 first takes the smallest cost off
every layer, so that seven equal layers in four stages stay as they begin: 1, 1, 1, 4.
"""

from __future__ import annotations

from collections.abc import Sequence


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
