"""DAPPLE's latency on drawn pipelines."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from pplan.planner.planners.dapple_planner import LastStages
from pplan.planner.stage_table import Floats


def of(
    forward: Sequence[float],
    backward: Sequence[float],
    all_reduce: Sequence[float],
    transfers: Sequence[float],
    micro_batches: int,
) -> Floats:
    return latency(
        np.array([forward, backward, all_reduce])[..., None], np.array(transfers)[:, None], micro_batches
    )


def latency(stages: Floats, transfers: Floats, micro_batches: int) -> Floats:
    """(plans,): of stages (forward, backward and all-reduce, stages, plans), the last one first."""
    forward, backward, reduced = stages
    none, terms = np.zeros(stages.shape[2], dtype=np.int64), np.full((4, stages.shape[2]), -np.inf)
    plans = LastStages(none, none, none, none, none > 0, *terms)
    for stage in reversed(range(stages.shape[1])):
        plans = plans.after(forward[stage], backward[stage], reduced[stage], micro_batches)
        if stage:
            plans = plans.after(transfers[stage - 1], transfers[stage - 1], 0.0, micro_batches)
    return plans.seconds


def test_equal_stages_turn_around_the_last() -> None:
    """Two stages, F 1, B 2, a transfer of 1, three micro-batches; of stage 0 only what the formula counts.

    second     0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15 16
    stage 0   F0                                  B2 B2 AR AR AR
    link         F0                            B2
    stage 1         F0 B0 B0 F1 B1 B1 F2 B2 B2 AR AR AR AR
              T_w      T_s               T_e

    T_w = 1 + 1 + 1, T_s = 2 x 3, T_e = max(3 + 2 + 1 + 2, 4 + 2) = 8.
    """
    found = of([1, 1], [2, 2], [3, 4], [1], 3)
    assert found == pytest.approx([3 + 6 + 8])


def test_a_slow_early_stage_is_the_pivot() -> None:
    """F 4 and B 4 against 1 and 1, M 5: 4 x 8 > 4 x 2 + 2 (the transfer's F and B between).

    T_e: the pivot's own backward and all-reduce, 4 + 2, or the last stage's all-reduce of 9, which begins a
    transfer's backward earlier than the pivot's backward: 9 - 1.
    """
    found = of([4, 1], [4, 1], [2, 9], [1], 5)
    assert found == pytest.approx([4 + 4 * 8 + max(2 + 4, 9 - 1)])


def test_a_slow_transfer_is_the_pivot() -> None:
    """A transfer of 5 each way against stages of 3, M 4: fill 1 + 5, steady 3 x 10, drain 5 + 2."""
    found = of([1, 1], [2, 2], [0, 0], [5], 4)
    assert found == pytest.approx([6 + 30 + 7])


def test_the_pivot_moves_twice() -> None:
    """From the last stage (w = 2) to the middle (w = 4), from there to the first (w = 9); M 3, no transfers
    to speak of: 2 x 4 > 2 x 2 + 0, and 2 x 9 > 2 x 4 + 0."""
    found = of([4, 2, 1], [5, 2, 1], [0, 0, 0], [0, 0], 3)
    assert found == pytest.approx([4 + 2 * 9 + 5])


def test_one_micro_batch_and_one_stage() -> None:
    """One micro-batch goes through and back; one stage computes all of them, then reduces."""
    assert of([1, 2], [3, 4], [0, 0], [0.5], 1) == pytest.approx([1 + 0.5 + 2 + 4 + 0.5 + 3])
    assert of([1], [2], [7], [], 6) == pytest.approx([6 * 3 + 7])


def test_many_plans_side_by_side() -> None:
    """Arrays of plans give what each gives alone."""
    rng = np.random.default_rng(0)
    stages = rng.random((3, 4, 50)) * np.array([1, 4])[rng.integers(0, 2, (1, 4, 50))]
    transfers = rng.random((3, 50))
    found = latency(stages, transfers, 5)
    for plan in range(50):
        alone = latency(stages[..., [plan]], transfers[:, [plan]], 5)
        assert alone[0] == found[plan]
