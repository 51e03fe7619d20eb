"""What no division of a transformer's blocks over the stages of a 1F1B pipeline with equal degrees is faster
than, and the division of which this is known.

The bound of a pipeline is that of degrees by stage (stage_degree_bound.py): of each of its stages the seconds
before it, its own, and those in which it idles. With equal degrees, what is behind a stage takes as long
however it is divided, but for first blocks that run again, so that the least bound of all divisions is found
stage after stage, from the last to the first, by the block that a stage begins with.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from ...cost_models.schedules import one_f_one_b_in_flight
from ...cost_models.transformer.layer_table import LayerTable
from .stage_degree_bound import stage_bound
from .stage_degree_table import BlockRuns, RunCosts

_ROUNDING = 1e-9
"""Of a bound, what it may be off."""


@lru_cache(maxsize=8)
def _block_runs(routed: tuple[bool, ...]) -> BlockRuns:
    return BlockRuns(routed)


def least_division(
    layers: LayerTable, memory_bytes: float, enough: float = float("inf")
) -> tuple[float, tuple[int, ...] | None]:
    """Seconds that no division that fits takes less than, and the division with this bound; (inf, None) where
    none fits, or none has a bound of `enough` seconds or less. Of stages with one virtual stage each."""
    runs, stages = _block_runs(layers.shape.routed), range(layers.degrees.pipeline)
    by_role: dict[tuple[bool, bool, bool], RunCosts] = {}
    costs = [_stage_costs(layers, stage, runs, by_role) for stage in stages]
    allowed = [
        _fitting_runs(layers, stage, own, runs, memory_bytes)
        for stage, own in zip(stages, costs, strict=True)
    ]
    places = _places(layers.shape.blocks, [runs.lengths[own] for own in allowed])
    if places is None:
        return float("inf"), None
    behind = step = np.zeros(1)
    ends = []
    for stage in reversed(stages):
        starts, stops = places[stage], places[stage + 1]
        number = runs.number[starts.start : starts.stop, stops.start : stops.stop]
        is_there = allowed[stage][number] & (number >= 0) & np.isfinite(behind)
        update, forward, backward = (np.where(is_there, own[number], np.inf) for own in costs[stage][:3])
        enter, leave = layers.cut_seconds(stage)
        after, many = len(stages) - 1 - stage, layers.setting.micro_batches
        with np.errstate(invalid="ignore"):
            alone = stage_bound(forward, backward, enter, leave, behind, after, many)
            latest = np.maximum(
                alone + np.maximum(update, layers.least_update_seconds), forward + backward + step
            )
        latest = np.where(is_there, latest, np.inf)
        ends.append(latest.argmin(axis=1))
        behind, step = 2 * enter + (forward + backward + behind).min(axis=1), 2 * enter + latest.min(axis=1)
    if not step[0] <= enough * (1 + _ROUNDING) or not np.isfinite(step[0]):
        return float("inf"), None
    cuts = [0]
    for stops, own, following in zip(reversed(ends), places, places[1:], strict=False):
        cuts.append(following[int(stops[cuts[-1] - own.start])])
    return float(step[0]), tuple(stop - start for start, stop in pairwise(cuts))


def _stage_costs(
    layers: LayerTable, stage: int, runs: BlockRuns, by_role: dict[tuple[bool, bool, bool], RunCosts]
) -> RunCosts:
    """Costs of a stage by run; stages with the same beside blocks share them."""
    last = layers.degrees.pipeline - 1
    key = stage == 0, stage == last, stage == layers.setting.predictor_slot(last + 1)
    if key not in by_role:
        by_role[key] = RunCosts.of(layers, stage, runs.ends)
    return by_role[key]


def _fitting_runs(
    layers: LayerTable, stage: int, own: RunCosts, runs: BlockRuns, memory_bytes: float
) -> npt.NDArray[np.bool_]:
    """Runs that the stage has memory for, and blocks enough."""
    setting, stages = layers.setting, layers.degrees.pipeline
    alive = one_f_one_b_in_flight(stage, stages, setting.micro_batches)
    fits = own.fixed + own.saved * alive <= memory_bytes
    if stage not in setting.block_slots(stages):
        return np.asarray(fits & (runs.lengths == 0))
    return np.asarray(fits & (runs.lengths >= layers.fewest_blocks[stage]))


def _places(blocks: int, lengths: Sequence[npt.NDArray[np.int64]]) -> list[range] | None:
    """Blocks that each stage with runs of these lengths can begin with, and the one behind the last; None
    where there is no division."""
    if not all(map(len, lengths)):
        return None
    least = [0, *accumulate(int(own.min()) for own in lengths)]
    most = [0, *accumulate(int(own.max()) for own in lengths)]
    places = [
        range(max(low, blocks - most[-1] + high), min(high, blocks - least[-1] + low) + 1)
        for low, high in zip(least, most, strict=True)
    ]
    return places if all(places) else None
