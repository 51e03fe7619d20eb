"""What makes models of many blocks quick to search, against one run, or one division, after another."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from random import Random
from typing import Any

import numpy as np
import pytest

from pplan.cost_models.transformer.layer_table import LayerTable
from pplan.cost_models.transformer.training_setting import block_ranges
from pplan.cost_models.transformer.training_step import estimate_stages
from pplan.planner.degrees.again_numbers import AgainNumbers, useful_numbers
from pplan.planner.degrees.division_bound import least_division
from pplan.planner.degrees.stage_degree_table import BlockRuns

from .test_exact_bounds import NO_LIMIT, table

SETTINGS: list[dict[str, Any]] = [
    {},
    {"recompute": "selective"},
    {"recompute": "full"},
    {"recompute": "full", "recompute_blocks": 2},
    {"predictors": 1},
    {"recompute": "full", "recompute_blocks": 1, "predictors": 2, "predictor_offset": 1},
]


def one_kind(seed: int, stages: int, virtual: int, blocks: int, again: int = 1) -> LayerTable:
    """Without experts, of which the first blocks of a stage run again."""
    layers = table(seed, stages, virtual, recompute="full", recompute_blocks=again)
    shape = replace(layers.shape, routed=(False,) * blocks, experts=None)
    return LayerTable(shape, layers.degrees, layers.setting, layers.costs)


@pytest.mark.parametrize("more", SETTINGS)
def test_the_ledgers_of_all_runs_at_once(more: dict[str, Any]) -> None:
    """To the last bit those of one run after another, so that the same runs fit."""
    for seed, stages in product(range(3), (3, 4)):
        layers = table(seed, stages, blocks=9, **more)
        runs = BlockRuns(layers.shape.routed)
        for stage in range(stages):
            update, fixed, saved = layers.columns(runs.ends, stage)
            alive = min(layers.setting.micro_batches, stages - stage)
            for place, run in enumerate(runs.runs):
                ledger = layers.ledger((run,), stage)
                once = ledger["activations"] / alive
                assert saved[place] == once
                assert fixed[place] == sum(ledger.values()) - once * alive
                assert update[place] == layers.update_seconds((run,), stage)


def test_runs_of_the_same_kinds() -> None:
    for seed in range(20):
        random = Random(seed)
        routed = tuple(random.random() < 0.4 for _ in range(random.randint(1, 9)))
        runs, places = BlockRuns(routed), dict[tuple[bool, ...], int]()
        for start, stop in product(range(len(routed) + 1), repeat=2):
            if stop < start:
                assert runs.number[start, stop] == -1
                continue
            place = places.setdefault(routed[start:stop], len(places))
            assert runs.number[start, stop] == place
            assert runs.lengths[place] == stop - start
            own = runs.runs[place]
            assert routed[own.start : own.stop] == routed[start:stop]
        assert len(runs.runs) == len(places)


@pytest.mark.parametrize("more", SETTINGS)
def test_the_least_bound_below_enough_seconds(more: dict[str, Any]) -> None:
    """Runs that are of no use are left out, and no division of use: where less than the bound is enough there
    is none, where as much is, it is the same. Of first blocks that run again it may be closer, and is below
    every step."""
    for seed, stages in product(range(3), (2, 3)):
        layers = table(seed, stages, blocks=6, **more)
        every = steps(layers)
        bound, division = least_division(layers, NO_LIMIT)
        assert least_division(layers, NO_LIMIT, bound * (1 - 1e-6)) == (NO_LIMIT, None)
        for enough in (bound * (1 + 1e-12), bound * 1.01, bound * 1.1):
            own, counts = least_division(layers, NO_LIMIT, enough)
            if layers.setting.recompute_blocks is None:
                assert (own, counts) == (bound, division)
            assert bound <= own <= enough * (1 + 1e-9) or own == NO_LIMIT
            for each, step in every:
                assert own <= step * (1 + 1e-9) or step > enough, (each, own, step)


def steps(layers: LayerTable) -> list[tuple[tuple[int, ...], float]]:
    """Of every division."""
    slots, blocks, place = layers.slots, layers.shape.blocks, layers.setting.predictor_slot(layers.slots)
    last = slots - 1 if place is None else place
    every = product(
        *(range(int(0 < slot < last), blocks + 1) if slot <= last else (0,) for slot in range(slots))
    )
    own = (counts for counts in every if sum(counts) == blocks)
    return [(counts, estimate_stages(layers, counts).step_seconds) for counts in own]


@pytest.mark.parametrize(("stages", "virtual", "blocks"), [(1, 1, 9), (2, 1, 9), (3, 1, 8), (2, 2, 7)])
@pytest.mark.parametrize("seed", range(3))
def test_numbers_of_blocks_that_run_again(seed: int, stages: int, virtual: int, blocks: int) -> None:
    """No number is passed over with which a division fits and takes less than is enough; some are."""
    passed = 0
    layers = one_kind(seed, stages, virtual, blocks)
    every: dict[int, list[tuple[float, float]]] = {}
    for number in range(1, blocks):
        own = layers.with_setting(replace(layers.setting, recompute_blocks=number))
        every[number] = [(step, own.peak_bytes(counts)) for counts, step in steps(own)]
    needs = sorted(bytes for own in every.values() for _, bytes in own)
    for limit in (NO_LIMIT, needs[len(needs) // 4], needs[len(needs) // 20], needs[0], needs[0] * 0.999):
        fitting = sorted(step for own in every.values() for step, bytes in own if bytes <= limit)
        for enough in (NO_LIMIT, *fitting[:1], *fitting[len(fitting) // 3 :][:1], 0.0):
            allowed = useful_numbers(layers, limit, enough)
            for number, divided in every.items():
                useful = any(step < enough and bytes <= limit for step, bytes in divided)
                assert allowed[number] or not useful, (number, limit, enough)
                passed += not allowed[number]
    assert passed


def test_the_next_number() -> None:
    layers = one_kind(1, 2, 1, 9)
    numbers = AgainNumbers(NO_LIMIT)
    assert numbers.following(layers, NO_LIMIT) == 2
    assert numbers.following(layers, 0.0) is None
    none = layers.with_setting(replace(layers.setting, recompute_blocks=None))
    assert numbers.following(none, NO_LIMIT) is None
    two = table(0, 2, recompute="full", recompute_blocks=3)
    assert numbers.following(two, 0.0) == 4
    needs = np.array([each.peak_bytes((5, 4)) for each in (layers, none)])
    assert AgainNumbers(float(needs.min()) / 2).following(layers, NO_LIMIT) is None


@pytest.mark.parametrize("stages", [2, 3])
def test_seconds_before_a_place(stages: int) -> None:
    """On the first stage."""
    for seed, more in product(range(3), SETTINGS[:4]):
        layers = table(seed, stages, blocks=8, **more)
        expected = [layers.seconds(block_ranges([end])[0], 0).both for end in range(9)]
        assert layers.seconds_before == expected
