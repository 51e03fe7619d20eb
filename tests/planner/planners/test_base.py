"""Moved cuts against all partitions and hand examples."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import pytest

from pplan.cost_models.layer import Chain, list_cut_points
from pplan.planner.planners.base import allows, nearest_cuts


@pytest.mark.parametrize(
    ("ends", "moved"),
    [
        ((3, 9), (2, 9)),  # 2 and 4 are as near: the earlier
        ((4, 9), (4, 9)),
        ((5, 9), (4, 9)),
        ((9, 9), (8, 9)),
        ((0, 0, 9), (2, 4, 9)),
        ((8, 8, 9), (4, 8, 9)),
        ((1, 1, 1, 9), (2, 4, 8, 9)),
        ((9,), (9,)),
    ],
)
def test_ends_move_to_the_nearest_allowed_cut(
    make_named: Callable[..., Chain], ends: tuple[int, ...], moved: tuple[int, ...]
) -> None:
    chain = make_named([f"l{i}" for i in range(9)], cuts=[2, 4, 8])
    assert nearest_cuts(chain, ends) == moved


@pytest.mark.parametrize("seed", range(5))
def test_allowed_ends_stay_and_others_become_allowed(make_chain: Callable[..., Chain], seed: int) -> None:
    chain = make_chain(seed, 8, cuts=0.6)
    seen = set()
    for stages in range(1, chain.max_stages + 1):
        for inner in combinations(range(1, 8), stages - 1):
            ends = (*inner, 8)
            allowed = set(inner) <= set(list_cut_points(chain))
            assert allows(chain, ends) == allowed
            moved = nearest_cuts(chain, ends)
            assert allows(chain, moved)
            assert (moved == ends) == allowed
            seen.add(allowed)
    assert seen == {True, False}
    assert not allows(chain, (5, 5, 8))
    assert not allows(chain, (7,))
