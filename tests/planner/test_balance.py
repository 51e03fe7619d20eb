"""The partition against brute force over all cuts."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import numpy.typing as npt
import pytest

from pplan.cost_models.errors import InfeasibleError, UsageError
from pplan.planner.balance import balance, balance_table

Floats = npt.NDArray[np.float64]


def largest(costs: Floats, ends: list[int]) -> float:
    return max(float(costs[a:b].sum()) for a, b in pairwise([0, *ends]))


def brute_force(costs: Floats, stages: int, allowed: npt.NDArray[np.bool_]) -> float:
    places = [int(i) + 1 for i in np.flatnonzero(allowed)]
    return min(largest(costs, [*cuts, len(costs)]) for cuts in combinations(places, stages - 1))


def instance(seed: int) -> tuple[Floats, npt.NDArray[np.bool_], int]:
    """Costs (small integers for odd seeds: ties and zeros come up), allowed cuts, stages."""
    rng = np.random.default_rng(seed)
    layers = int(rng.integers(1, 11))
    draw = (lambda n: rng.integers(0, 6, n).astype(np.float64)) if seed % 2 else rng.random
    allowed = rng.random(layers - 1) < 0.8
    return draw(layers), allowed, int(rng.integers(1, allowed.sum() + 2))


@pytest.mark.parametrize("seed", range(100))
def test_the_largest_stage(seed: int) -> None:
    costs, allowed, stages = instance(seed)
    counts = balance(costs, stages, cut_after=allowed)
    ends = np.cumsum(counts).tolist()
    assert len(counts) == stages
    assert min(counts) >= 1
    assert all(allowed[end - 1] for end in ends[:-1])
    expected = brute_force(costs, stages, allowed)
    assert largest(costs, ends) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("seed", range(100))
def test_table_under_a_memory_limit(seed: int) -> None:
    """Stage k keeps stages - k micro-batches, as 1F1B does: what fits one stage may not fit another."""
    rng = np.random.default_rng(seed)
    layers = int(rng.integers(1, 9))
    stages = int(rng.integers(1, layers + 1))
    work, activations = rng.random(layers), rng.random(layers)
    limit = float(rng.uniform(0.3, 1.0) * activations.sum() * stages)

    def stage_cost(stage: int, a: int, b: int) -> float:
        fits = (stages - stage) * activations[a:b].sum() <= limit
        return float(work[a:b].sum()) if fits else np.inf

    def table(stage: int) -> Floats:
        places = range(layers + 1)
        return np.array([[stage_cost(stage, a, b) if a < b else np.inf for b in places] for a in places])

    every = [[0, *cuts, layers] for cuts in combinations(range(1, layers), stages - 1)]
    best = min(max(stage_cost(s, a, b) for s, (a, b) in enumerate(pairwise(ends))) for ends in every)
    if np.isinf(best):
        with pytest.raises(InfeasibleError):
            balance_table(table, stages)
        return
    ends = balance_table(table, stages)
    assert len(ends) == stages
    assert max(stage_cost(s, a, b) for s, (a, b) in enumerate(pairwise([0, *ends]))) == pytest.approx(best)


def test_seven_equal_layers() -> None:
    assert balance([5.0] * 7, 4) == [2, 2, 2, 1]


def test_large_chains_stay_exact_where_the_optimum_is_known() -> None:
    costs = np.ones(4096)
    assert balance(costs, 512) == [8] * 512


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_impossible_costs(bad: float) -> None:
    with pytest.raises(UsageError, match="costs holds"):
        balance([1.0, bad], 1)


def test_impossible_stage_counts() -> None:
    with pytest.raises(UsageError, match="0 stages"):
        balance([1.0], 0)
    with pytest.raises(InfeasibleError, match="3 stages of 3 layers: the allowed cuts make at most 2"):
        balance([1.0] * 3, 3, cut_after=[True, False])
