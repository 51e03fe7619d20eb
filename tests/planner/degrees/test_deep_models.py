"""What makes models of many blocks quick to search, against one run, or one division, after another."""

from __future__ import annotations

from itertools import product
from random import Random
from typing import Any

import pytest

from pplan.cost_models.transformer.layer_table import LayerTable
from pplan.cost_models.transformer.training_step import estimate_stages
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
