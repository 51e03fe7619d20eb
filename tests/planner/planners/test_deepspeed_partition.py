"""DeepSpeed's cuts, as DeepSpeed 0.19.8 made them of random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from pplan.cost_models.layer import Chain
from pplan.planner.planners import PLANNERS
from pplan.planner.planners.deepspeed_partition import DeepSpeedBalance, deepspeed_ends
from pplan.planner.problem import Problem

MakeProblem = Callable[..., Problem]
RECORDED = """
5-10-14 1-4 4-7-9-14-16 2-3-4-5-6 1-2-4-5-6 2-4-7-9-11 6-8-10-11-13-14 4-7 3-6 5-9 3-4-5-6-7-8-9-10 5-9
1-2-6-7-9 2-6 2-4 2-4-6-8-10-12-14-16 3-5-8 3-5-10 3-4-5 3-6-9-12 5-10-15 1-2-4-5 12-16 3-6-9-12-15
2-3-5-7-9-10-11-12 3-6-8 5-7-8-9-10-11-13 2-4-6-8-9-10-11-12 2-4 3-6-8-10 3-4-5-6-7-8-9-10 2-3 2-3-4
1-3-4-5-7-8-9-10 2-5-10 3-6-8-10 2-4-7 3-5-9-12 3-5-9-10-11 3-5 4-9 3-4-5-7-8 5-11 2-3 1-2-3-5-8 2-6
4-5-6-10-11-13-14-15 4-7 2-3-4-7-8-10 2-3 4-7-9 2-4-6 4-8-16 2-3-5-6-7-10-11 6-9-12-14-15 2-3-4 4-8-12-16
2-3 2-5-6-7-8-9-10-11 3-6 2-3-4-5-6-7 4-6-9 6-9-14-15 2-4-5-6-7-8-9 1-2-4-5-6-7-9 5-8 2-3 2-4
1-2-4-7-9-11-13 5-6-8-10-12 5-6-7-14-15 4-7 2-4 3-6 9-15 3-5-7-9 4-8 4-6-8-9-10-12-14 8-12-14 2-4-5
1-2-3-6 3-6-8-10 2-3-4-5 3-6-9 3-5-8-10-13 2-3-4-5 6-7-8-10-12-14 2-4-5 1-2-3-4-5-6-8 3-4 2-3-5 2-3-4
2-4-6-8 2-9-11-12-13-14-15 8-10 5-9-13 3-5-8 2-3-5 4-5-6-7 2-3-4-5-6-7-8
"""
"""What `deepspeed.runtime.utils.partition_balanced` of version 0.19.8 came to for each of `weights_of`: the
layers before each stage's end."""


def weights_of(seed: int) -> tuple[list[int], int]:
    """Weights of 3 to 16 layers, and a number of stages: any, few different ones, 1 and 0, all alike."""
    rng = Random(seed)
    layers, most = 3 + int(rng.random() * 14), (1000, 3, 2, 1)[seed % 4]
    weights = [int(rng.random() * most) + (most == 1) for _ in range(layers)]
    return weights, 2 + int(rng.random() * min(layers - 2, 7))


def test_the_cuts_are_those_that_deepspeed_made() -> None:
    recorded = [tuple(map(int, ends.split("-"))) for ends in RECORDED.split()]
    assert len(recorded) == 100
    for seed, ends in enumerate(recorded):
        weights, stages = weights_of(seed)
        assert DeepSpeedBalance(weights).ends(stages) == ends, seed


def test_any_number_of_stages_is_cut_alike_in_any_order() -> None:
    weights, _ = weights_of(4)
    shared = DeepSpeedBalance(weights)
    for stages in (5, 2, 7, 3):
        assert shared.ends(stages) == DeepSpeedBalance(weights).ends(stages)


@pytest.mark.parametrize("seed", range(100, 160))
def test_the_cuts_are_those_of_the_deepspeed_that_is_installed(seed: int) -> None:
    """Where it is: an extra."""
    partition_balanced = pytest.importorskip("deepspeed.runtime.utils").partition_balanced
    weights, stages = weights_of(seed)
    assert DeepSpeedBalance(weights).ends(stages) == tuple(partition_balanced(weights, stages)[1:])


def test_no_stage_is_empty_and_no_table_too_large() -> None:
    assert DeepSpeedBalance([3, 1]).ends(3) is None
    assert DeepSpeedBalance([3, 1]).ends(2) == (1, 2)
    assert DeepSpeedBalance([3, 1]).ends(1) == (2,)
    assert DeepSpeedBalance(np.ones(4_000)).ends(2) is None


def test_the_planner_makes_the_cuts_of_the_trainable_parameters(
    make_named: Callable[..., Chain], make_problem: MakeProblem
) -> None:
    weights, stages = weights_of(0)
    chain = make_named([f"l{index}" for index in range(len(weights))])
    sizes = 4.0 * np.array(weights)
    chain = replace(chain, parameter_bytes=sizes + 1000, trainable_bytes=sizes)
    proposals = PLANNERS["parameters"].propose(make_problem(chain, stages))
    ends = {len(proposal.ends): proposal.ends for proposal in proposals}
    assert ends[stages] == tuple(map(int, RECORDED.split()[0].split("-")))


def test_a_forbidden_cut_moves_to_the_nearest_allowed(make_named: Callable[..., Chain]) -> None:
    weights = DeepSpeedBalance([1.0] * 8)
    names = [f"l{index}" for index in range(8)]
    assert deepspeed_ends(make_named(names), weights, 2) == (4, 8)
    assert deepspeed_ends(make_named(names, cuts=[1, 5, 7]), weights, 2) == (5, 8)
