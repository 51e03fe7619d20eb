"""Weights that stages share: their copies, and the sums of their gradients, by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from pplan.cost_models.collectives import (
    TiedSum,
    all_reduce_seconds,
    least_seconds_after,
    reduction_seconds,
    tied_sums,
)
from pplan.cost_models.errors import UsageError
from pplan.cost_models.layer import LayerCosts, TiedWeight, copy_bytes
from pplan.cost_models.memory import Training
from pplan.cost_models.optimizers import FLOAT32, MIXED_FLOAT32_GRADIENTS
from pplan.cost_models.schedules import cached_program
from pplan.cost_models.step_costs import Costs, stage_costs
from pplan.cost_models.timeline import simulate, step_seconds
from pplan.cost_models.topology import Device, Link, Topology, two_level_topology
from tests.candidates import side_by_side
from tests.stage_bytes import is_copied, stage_bytes

EMBEDDING = TiedWeight("embedding", 1000.0, 1000.0, (0, 5))
FROZEN = TiedWeight("frozen", 100.0, 0.0, (1, 2, 4))


def measured() -> LayerCosts:
    """Six layers of 10 bytes each besides the tied weights, which the first users count."""
    own = np.full(6, 10.0) + np.array([1000, 100, 0, 0, 0, 0])
    ones = np.ones(6)
    return LayerCosts(
        size=1,
        input_bytes=1.0,
        parameter_bytes=own,
        trainable_bytes=own - np.array([0, 100, 0, 0, 0, 0]),
        buffer_bytes=0 * ones,
        forward_seconds=ones,
        backward_seconds=ones,
        output_bytes=ones,
        saved_bytes=ones,
        saved_input_bytes=ones,
        workspace_bytes=ones,
        forward_host_seconds=ones,
        backward_host_seconds=ones,
        tied=(EMBEDDING, FROZEN),
    )


@pytest.mark.parametrize(
    ("first", "last", "parameters", "trainable", "copies"),
    [
        (0, 5, 1160, 1060, 0),  # two users on one stage: once
        (0, 2, 1130, 1030, 0),
        (3, 5, 30 + 1000 + 100, 30 + 1000, 1000),
        (2, 3, 20 + 100, 20, 0),
        (3, 3, 10, 10, 0),
        (1, 4, 140, 40, 0),
    ],
)
def test_each_stage_with_a_user_holds_one(
    first: int, last: int, parameters: float, trainable: float, copies: float
) -> None:
    stage = stage_bytes(measured(), first, last)
    assert (stage.parameters, stage.trainable, stage.copies) == (parameters, trainable, copies)


def test_a_copy_has_gradients_and_states_but_no_place_in_the_replicas_buckets() -> None:
    stage = stage_bytes(measured(), 5, 5)
    training = Training("adam", FLOAT32, replicas=2)
    states = training.states(stage)
    assert (states["weights"], states["gradients"], states["optimizer"]) == (1010, 1010, 2020)
    assert training.exchange_bytes(stage) == 10
    assert Training("adam", FLOAT32, replicas=2, zero=1).states(stage)["optimizer"] == 1010


def test_the_table_of_copies_is_that_of_its_stages() -> None:
    points = (0, 1, 3, 4, 6)
    table = copy_bytes([(own.bytes, own.layers) for own in (EMBEDDING, FROZEN)], points)
    for i, j in combinations(range(len(points)), 2):
        own = [weight for weight in (EMBEDDING, FROZEN) if is_copied(weight.layers, points[i], points[j])]
        assert table[i, j] == sum(weight.bytes for weight in own)


def topology(gpus: int) -> Topology:
    return two_level_topology(Device("toy", None), gpus, 2, Link(100.0, 0.01), Link(10.0, 0.1))


def test_a_sum_goes_over_every_replica_of_every_holder() -> None:
    machine = topology(4)
    ranks, stages = [(0, 1), (2,), (3,)], [[0], [1], [2]]
    seconds = reduction_seconds(machine)
    tied = (EMBEDDING, FROZEN, TiedWeight("near", 7.0, 7.0, (2, 3)))
    (embedding, near) = tied_sums(tied, (2, 3, 6), ranks, stages, MIXED_FLOAT32_GRADIENTS, seconds)
    assert (embedding.parts, embedding.stages, embedding.ranks) == ((0, 2), (0, 2), (0, 1, 3))
    assert embedding.bytes == 2000  # in float32, of a 16-bit weight
    assert embedding.seconds == float(all_reduce_seconds(machine, (0, 1, 3), 2000.0))
    assert (near.parts, near.ranks) == ((1, 2), (2, 3))


def test_parts_of_one_device_and_whole_models_add_up_nothing() -> None:
    seconds = reduction_seconds(topology(2))
    v_shape = [(0,), (1,), (1,), (0,)], [[0], [1], [1], [0]]
    assert not list(tied_sums((EMBEDDING,), (1, 2, 4, 6), *v_shape, FLOAT32, seconds))
    assert not list(tied_sums((EMBEDDING,), (6,), [(0, 1)], [[0]], FLOAT32, seconds))


def two_stages(count: int, *tied: TiedSum) -> tuple[float, Costs]:
    """Forward 1 and 2, backward 2 and 3, no transfers."""
    program = cached_program("1f1b", 2, count)
    costs = replace(stage_costs(program, [1, 2], [2, 3]), tied=tied)
    return float(step_seconds(program, costs)[0]), costs


def summed(name: str, stages: tuple[int, ...], seconds: float) -> TiedSum:
    return TiedSum(name, stages, stages, stages, 1.0, seconds)


def test_a_step_with_sums_by_hand() -> None:
    """Of one micro-batch: stage 1 is done at 1 + 2 + 3 = 6, stage 0 at 8."""
    assert two_stages(1)[0] == 8
    assert two_stages(1, summed("a", (0, 1), 5))[0] == 13
    assert two_stages(1, summed("a", (1,), 1))[0] == 8
    assert two_stages(1, summed("a", (0, 1), 5), summed("b", (0, 1), 2))[0] == 15
    assert two_stages(1, summed("b", (1,), 4), summed("a", (0, 1), 5))[0] == 15


def test_sums_wait_for_the_stages_own_all_reduce() -> None:
    program = cached_program("1f1b", 2, 1)
    _, costs = two_stages(1, summed("a", (0, 1), 5))
    costs = replace(costs, all_reduce=np.array([[0.0], [4.0]]))
    timeline = simulate(program, costs)
    assert timeline.stage_end == (15, 15)  # stage 1 at 6 + 4
    assert [(own.stages, own.start, own.end) for own in timeline.reductions][-1] == ((0, 1), 10, 15)


def test_many_candidates_side_by_side_are_as_one_by_one() -> None:
    program, random = cached_program("1f1b", 3, 4), np.random.default_rng(0)
    tied = (summed("a", (0, 2), 1.5), summed("b", (1, 2), 0.5))
    each = [
        replace(
            stage_costs(program, random.random(3).tolist(), random.random(3).tolist()),
            all_reduce=random.random((3, 1)),
            tied=tied,
        )
        for _ in range(5)
    ]
    together = step_seconds(program, side_by_side(each))
    alone = [simulate(program, own).step_seconds for own in each]
    assert together == pytest.approx(alone, abs=1e-12)


def test_stages_that_update_by_themselves_share_nothing() -> None:
    program = replace(cached_program("1f1b", 2, 4), update_every=2)
    _, costs = two_stages(4, summed("a", (0, 1), 5))
    with pytest.raises(UsageError, match="a is on several stages"):
        simulate(program, costs)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_no_sum_takes_less_than_the_least(replicas: int) -> None:
    machine, points = topology(8), (0, 2, 3, 6)
    least = least_seconds_after((EMBEDDING, FROZEN), points, machine, FLOAT32, replicas)
    assert least[0, 3] == least[1, 2] == 0  # type: ignore[index]
    assert least[0, 1] == least[2, 3] > 0  # type: ignore[index]
    for others in range(1, 4):
        for held in combinations(range(8), replicas + others):
            assert reduction_seconds(machine)(held, 1000.0) >= least[0, 1]  # type: ignore[index]
