"""Lower bound on all divisions of a transformer's blocks over 1F1B stages with equal degrees.

The bound of a pipeline is that of degrees by stage (stage_degree_bound.py): for each stage the seconds before
it, its own, and those in which it idles. With equal degrees, the stages after a stage take as long however
they are divided, except for recomputed first blocks. So a dynamic programme from the last stage to the first
finds the least bound of all divisions, by the block with which a stage begins.
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
"""Relative error of a bound."""


@lru_cache(maxsize=8)
def _block_runs(routed: tuple[bool, ...]) -> BlockRuns:
    return BlockRuns(routed)


def least_division(
    layers: LayerTable, memory_bytes: float, enough: float = float("inf")
) -> tuple[float, tuple[int, ...] | None]:
    """Return a lower bound on all divisions that fit, and the division with this bound.

    Args:
        layers: Costs of the layers, with one virtual stage per device.
        memory_bytes: Bytes that a device may use.
        enough: Seconds above which bounds are of no interest.

    Returns:
        (inf, None) if no division fits, or none has a bound of at most `enough` seconds.
    """
    runs, stages = _block_runs(layers.shape.routed), range(layers.degrees.pipeline)
    by_role: dict[tuple[bool, bool, bool], RunCosts] = {}
    costs = [_stage_costs(layers, stage, runs, by_role) for stage in stages]
    allowed = [
        _fitting_runs(layers, stage, stage_costs, runs, memory_bytes)
        for stage, stage_costs in zip(stages, costs, strict=True)
    ]
    places = _places(layers.shape.blocks, [runs.lengths[stage_costs] for stage_costs in allowed])
    if places is None:
        return float("inf"), None
    later = step = np.zeros(1)
    ends = []
    for stage in reversed(stages):
        starts, stops = places[stage], places[stage + 1]
        number = runs.number[starts.start : starts.stop, stops.start : stops.stop]
        is_there = allowed[stage][number] & (number >= 0) & np.isfinite(later)
        update, forward, backward = (
            np.where(is_there, stage_costs[number], np.inf) for stage_costs in costs[stage][:3]
        )
        enter, leave = layers.cut_seconds(stage)
        later_stages, micro_batches = len(stages) - 1 - stage, layers.setting.micro_batches
        with np.errstate(invalid="ignore"):
            alone = stage_bound(forward, backward, enter, leave, later, later_stages, micro_batches)
            latest = np.maximum(
                alone + np.maximum(update, layers.least_update_seconds), forward + backward + step
            )
        latest = np.where(is_there, latest, np.inf)
        ends.append(latest.argmin(axis=1))
        later, step = 2 * enter + (forward + backward + later).min(axis=1), 2 * enter + latest.min(axis=1)
    if not step[0] <= enough * (1 + _ROUNDING) or not np.isfinite(step[0]):
        return float("inf"), None
    cuts = [0]
    for stops, stage_costs, following in zip(reversed(ends), places, places[1:], strict=False):
        cuts.append(following[int(stops[cuts[-1] - stage_costs.start])])
    return float(step[0]), tuple(stop - start for start, stop in pairwise(cuts))


def _stage_costs(
    layers: LayerTable, stage: int, runs: BlockRuns, by_role: dict[tuple[bool, bool, bool], RunCosts]
) -> RunCosts:
    """Return the costs of a stage by run of blocks. Stages with the same additional layers share them."""
    last = layers.degrees.pipeline - 1
    key = stage == 0, stage == last, stage == layers.setting.predictor_slot(last + 1)
    if key not in by_role:
        by_role[key] = RunCosts.of(layers, stage, runs.ends)
    return by_role[key]


def _fitting_runs(
    layers: LayerTable, stage: int, stage_costs: RunCosts, runs: BlockRuns, memory_bytes: float
) -> npt.NDArray[np.bool_]:
    """Return a mask of the runs that fit into the memory of the stage and have enough blocks."""
    setting, stages = layers.setting, layers.degrees.pipeline
    alive = one_f_one_b_in_flight(stage, stages, setting.micro_batches)
    fits = stage_costs.fixed + stage_costs.saved * alive <= memory_bytes
    if stage not in setting.block_slots(stages):
        return np.asarray(fits & (runs.lengths == 0))
    return np.asarray(fits & (runs.lengths >= layers.fewest_blocks[stage]))


def _places(blocks: int, lengths: Sequence[npt.NDArray[np.int64]]) -> list[range] | None:
    """Return the blocks with which each stage can begin, and the one after the last; None if impossible."""
    if not all(map(len, lengths)):
        return None
    least = [0, *accumulate(int(stage_lengths.min()) for stage_lengths in lengths)]
    most = [0, *accumulate(int(stage_lengths.max()) for stage_lengths in lengths)]
    places = [
        range(max(low, blocks - most[-1] + high), min(high, blocks - least[-1] + low) + 1)
        for low, high in zip(least, most, strict=True)
    ]
    return places if all(places) else None
