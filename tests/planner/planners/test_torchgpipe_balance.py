"""torchgpipe's block partitions against torchgpipe itself and against what the paper proves."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from pplan.planner.balance import balance
from pplan.planner.planners.torchgpipe_balance import block_partition


def counts_of(costs: list[float], stages: int) -> list[int]:
    return [end - first for first, end in pairwise((0, *block_partition(costs, stages)))]


def test_equal_layers_stay_as_they_begin() -> None:
    assert counts_of([5.0] * 7, 4) == [1, 1, 1, 4]


@pytest.mark.parametrize("least", [0.0, 1.0], ids=["unlike", "alike"])
def test_it_cuts_as_torchgpipe_does(least: float) -> None:
    solve = pytest.importorskip("torchgpipe.balance.blockpartition").solve
    rng = random.Random(3)
    unlike_balance = 0
    for _ in range(300):
        costs = [rng.uniform(least, 1.0) for _ in range(rng.randint(1, 14))]
        stages = rng.randint(1, len(costs))
        counts = counts_of(costs, stages)
        assert counts == [len(block) for block in solve(costs, stages)]
        unlike_balance += counts != balance(costs, stages)
    assert unlike_balance > 30


def test_it_ends_with_full_blocks_where_torchgpipe_does_not() -> None:
    # torchgpipe 0.0.7 gives overlapping blocks for the first and does not return for the second.
    for costs, stages in (([0, 0, 0, 0, 3, 100], 5), ([3, 1, 0, 0, 0, 0, 0, 0, 3, 3], 9)):
        assert min(counts_of([float(cost) for cost in costs], stages)) >= 1


def test_blocks_differ_by_the_largest_item_at_most() -> None:
    """Theorem 1 of the paper, for the costs less the smallest."""
    rng = random.Random(4)
    for _ in range(1000):
        costs = [float(rng.choice([0, 0, 1, 3, 40, rng.randint(0, 50)])) for _ in range(rng.randint(1, 12))]
        stages = rng.randint(1, len(costs))
        ends = block_partition(costs, stages)
        assert len(ends) == stages
        assert ends[-1] == len(costs)
        items = np.array(costs) - min(costs)
        sizes = [items[first:end].sum() for first, end in pairwise((0, *ends))]
        assert max(sizes) - min(sizes) <= items.max() * (1 + 1e-9)
        assert all(first < end for first, end in pairwise((0, *ends)))
