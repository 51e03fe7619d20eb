"""How blocks move from stage to stage, once more: the first of all moves that helps, until none does."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from random import Random
from typing import Any

import numpy as np
import pytest

from pplan.cost_models.transformer.layer_table import LayerTable
from pplan.cost_models.transformer.training_setting import TrainingSetting, block_ranges
from pplan.cost_models.transformer.training_step import estimate_stages
from pplan.planner.degrees import stage_divisions
from pplan.planner.degrees.stage_divisions import (
    _moves_from,
    fit_division,
    improve_division,
)

from .test_exact_bounds import NO_LIMIT, divisions, table

Counts = tuple[int, ...]


def all_moves(layers: LayerTable, counts: Counts) -> list[Counts]:
    """A block from each virtual stage to each other, of the slowest device first, to the fastest first; of
    one device from the last."""
    stages, slots = layers.degrees.pipeline, len(counts)
    own = estimate_stages(layers, counts).stages
    seconds = [
        own[slot % stages].forward_seconds + own[slot % stages].backward_seconds for slot in range(slots)
    ]
    slow = sorted(range(slots), key=lambda slot: (seconds[slot], slot), reverse=True)
    moves = []
    for source in slow:
        for target in slow[::-1]:
            changed = list(counts)
            changed[source] -= 1
            changed[target] += 1
            least = 0 if source in (0, slots - 1) else 1
            if target != source and changed[source] >= least:
                moves.append(tuple(changed))
    return moves


@pytest.mark.parametrize(("stages", "virtual"), [(2, 1), (3, 1), (2, 2), (3, 2)])
@pytest.mark.parametrize("seed", range(3))
def test_moves_that_make_a_step_shorter(
    seed: int, stages: int, virtual: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after another the first that does and fits, in any memory; of no more trials than are allowed."""
    layers = table(seed, stages, virtual)
    every = list(map(tuple, divisions(layers.shape.blocks, stages * virtual)))
    start = every[Random(seed).randrange(len(every))]
    needs = sorted(layers.peak_bytes(own) for own in every)
    for limit in (NO_LIMIT, layers.peak_bytes(start), needs[len(needs) // 2]):
        best = start
        while True:
            step = estimate_stages(layers, best).step_seconds
            better = (
                own
                for own in all_moves(layers, best)
                if layers.peak_bytes(own) <= limit
                and estimate_stages(layers, own).step_seconds < step * (1 - 1e-9)
            )
            following = next(better, None)
            if following is None:
                break
            best = following
        monkeypatch.setattr(stage_divisions, "_MOST_TRIALS", 10_000)
        counts, estimate = improve_division(layers, start, limit)
        assert counts == best
        assert estimate == estimate_stages(layers, best)
    asked = list[Any]()

    def noted(*own: Any) -> Any:
        asked.append(own)
        return estimate_stages(*own)

    monkeypatch.setattr(stage_divisions, "_MOST_TRIALS", 3)
    monkeypatch.setattr(stage_divisions, "estimate_stages", noted)
    counts, estimate = improve_division(layers, start, NO_LIMIT)
    assert len(asked) <= 1 + 3
    assert estimate.step_seconds <= estimate_stages(layers, start).step_seconds


def lacking(layers: LayerTable, counts: Counts, limit: float) -> list[float]:
    return [max(0.0, own - limit) for own in layers.device_bytes(counts)]


@pytest.mark.parametrize(("stages", "virtual"), [(2, 2), (3, 2), (2, 3)])
@pytest.mark.parametrize("seed", range(3))
def test_moves_until_it_fits(seed: int, stages: int, virtual: int) -> None:
    """Of the device that lacks most a block to one of the last half of the virtual stages, to where all lack
    least; none where no move helps."""
    layers = table(seed, stages, virtual)
    every = list(map(tuple, divisions(layers.shape.blocks, stages * virtual)))
    needs = sorted(layers.peak_bytes(own) for own in every)
    slots, found = stages * virtual, set()
    for limit, start in ((needs[len(needs) // 3], every[-1]), (needs[0], every[0]), (needs[0] / 2, every[0])):
        best: Counts | None = start
        while best is not None and sum(lack := lacking(layers, best, limit)) > 0:
            device = lack.index(max(lack))
            trials = []
            for source in range(device, slots, stages):
                for target in range(slots // 2, slots):
                    trial = list(best)
                    trial[source] -= 1
                    trial[target] += 1
                    if source != target and trial[source] >= (0 if source in (0, slots - 1) else 1):
                        trials.append(tuple(trial))
            assert sorted(_moves_from(layers, best, device)) == sorted(trials)
            least = (
                min((sum(lacking(layers, own, limit)), own) for own in trials) if trials else (NO_LIMIT, best)
            )
            best = least[1] if least[0] < sum(lack) else None
        assert fit_division(layers, start, limit) == best
        found.add(best is None)
    assert True in found


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("seed", range(4))
def test_tables_that_share_what_they_know(seed: int, recompute: str) -> None:
    """With other virtual stages, or blocks that run again, a table says what one of its own says that has not
    been asked before: bytes by device, and how many blocks must run again in some memory."""
    stages = 2
    first = table(seed, stages, recompute=recompute)
    every = list(product((1, 2, 3), (None, 1, 2, 3) if recompute == "full" else (None,)))
    grid = np.indices([first.shape.routed.count(kind) + 1 for kind in (False, True)])
    numbers, answers = {False: grid[0], True: grid[1]}, set()
    needs = [own for counts in divisions(first.shape.blocks, stages) for own in first.device_bytes(counts)]
    memories = min(needs), sum(needs) / len(needs), max(needs)
    for virtual, again in Random(seed).sample(every, len(every)):
        setting = replace(first.setting, virtual_stages=virtual, recompute_blocks=again)
        layers = first.with_setting(setting)

        def alone(setting: TrainingSetting = setting) -> LayerTable:
            return LayerTable(first.shape, first.degrees, setting, first.costs)

        fresh = alone()
        for counts in divisions(first.shape.blocks, stages * virtual):
            ranges = block_ranges(counts)
            own = [sum(fresh.ledger(ranges[each::stages], each).values()) for each in range(stages)]
            assert layers.device_bytes(counts) == own
        for memory, device in product(memories, range(stages)):
            found = layers.least_blocks_again(numbers, device, memory).tolist()
            assert found == alone().least_blocks_again(numbers, device, memory).tolist()
            few = {kind: own[:1, :2] for kind, own in numbers.items()}
            assert layers.least_blocks_again(few, device, memory).tolist() == [found[0][:2]]
            answers |= {each for row in found for each in row}
    assert {0.0, NO_LIMIT} <= answers
