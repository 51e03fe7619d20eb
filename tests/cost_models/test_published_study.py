"""The published study of VGG-19 on A100s, foreseen as `benchmarks/seed_study.py` says."""

from __future__ import annotations

from statistics import median

import pytest
from seed_study import STEPS, fit, published_cells, rank_correlation, step_seconds


@pytest.mark.slow
def test_the_cells_are_foreseen_in_their_order() -> None:
    cells = list(published_cells())
    assert len(cells) == 56
    factor, outside = fit(cells)
    predicted = [STEPS * (step_seconds(cell, factor) + outside) for cell in cells]
    published = [cell.seconds for cell in cells]
    assert rank_correlation(published, predicted) >= 0.9
    assert median(abs(p / s - 1) for p, s in zip(predicted, published, strict=True)) <= 0.2


def test_ranks_by_hand() -> None:
    assert rank_correlation([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3, 4], [40, 30, 20, 10]) == pytest.approx(-1)
    # Spearman's with differences of ranks d = 0, 1, -1, 0: 1 - 6 * 2 / (4 * 15).
    assert rank_correlation([1, 2, 3, 4], [10, 30, 20, 40]) == pytest.approx(0.8)
