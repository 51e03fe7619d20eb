"""What no division of a transformer's blocks over the stages of a 1F1B pipeline with equal degrees is faster
than, and the division of which this is known.

The bound of a pipeline is that of degrees by stage (stage_degree_bound.py): of each of its stages the seconds
before it, its own, and those in which it idles. With equal degrees, what is behind a stage takes as long
however it is divided, but for first blocks that run again, so that the least bound of all divisions is found
stage after stage, from the last to the first, by the block that a stage begins with.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from ...cost_models.schedules.one_f_one_b import in_flight
from ...cost_models.transformer.layer_table import LayerTable
from .stage_degree_bound import stage_bound
from .stage_degree_table import Array, BlockRuns


@lru_cache(maxsize=8)
def _block_runs(routed: tuple[bool, ...]) -> BlockRuns:
    return BlockRuns(routed)


def least_division(layers: LayerTable, memory_bytes: float) -> tuple[float, tuple[int, ...] | None]:
    """Seconds that no division that fits takes less than, and the division with this bound; (inf, None) where
    none fits. Of stages with one virtual stage each."""
    programme = _DivisionProgramme(layers, memory_bytes)
    stages, blocks = layers.degrees.pipeline, layers.shape.blocks
    behind = step = np.where(np.arange(blocks + 1) == blocks, 0.0, np.inf)
    ends = []
    for stage in range(stages - 1, -1, -1):
        latest, both = programme.bounds(stage, behind, step)
        ends.append(latest.argmin(axis=1))
        cut = 2 * layers.transfer_seconds(stage - 1) if stage else 0.0
        behind, step = cut + (both + behind).min(axis=1), cut + latest.min(axis=1)
    if not np.isfinite(step[0]):
        return float("inf"), None
    counts, start = [], 0
    for stops in reversed(ends):
        counts.append(int(stops[start]) - start)
        start = int(stops[start])
    return float(step[0]), tuple(counts)


@dataclass(frozen=True)
class _DivisionCosts:
    """Of a stage by first block and the one behind the last; infinite where there is no such stage. `fixed`:
    bytes beside activations; `saved`: of those that a micro-batch in flight keeps."""

    forward: Array
    backward: Array
    update: Array
    fixed: Array
    saved: Array


class _DivisionProgramme:
    """The stages of one combination."""

    def __init__(self, layers: LayerTable, memory_bytes: float) -> None:
        self.layers, self.memory_bytes = layers, memory_bytes
        self.runs = _block_runs(layers.shape.routed)
        self.passes = layers.seconds_by_range()
        self._costs: dict[tuple[bool, bool, bool], _DivisionCosts] = {}

    def bounds(self, stage: int, behind: Array, step: Array) -> tuple[Array, Array]:
        """Of the stages from this one on: seconds of a step, and those of a micro-batch in this one."""
        layers, stages = self.layers, self.layers.degrees.pipeline
        own, many = self._stage_costs(stage), layers.setting.micro_batches
        needs = own.fixed + own.saved * in_flight(stage, stages, many)
        allowed = (needs <= self.memory_bytes) & np.isfinite(own.forward) & np.isfinite(behind)
        allowed &= self._lengths(stage)
        forward, backward, update = (
            np.where(allowed, each, np.inf) for each in (own.forward, own.backward, own.update)
        )
        enter = layers.transfer_seconds(stage - 1) if stage else 0.0
        leave = layers.transfer_seconds(stage) if stage < stages - 1 else 0.0
        with np.errstate(invalid="ignore"):
            alone = stage_bound(forward, backward, enter, leave, behind, stages - 1 - stage, many)
            both = forward + backward
            latest = np.maximum(alone + np.maximum(update, layers.least_update_seconds), both + step)
        return np.where(allowed, latest, np.inf), np.where(allowed, both, np.inf)

    def _lengths(self, stage: int) -> npt.NDArray[np.bool_]:
        """Whether so many blocks may be on a stage."""
        setting, stages, blocks = self.layers.setting, self.layers.degrees.pipeline, self.layers.shape.blocks
        number = np.arange(blocks + 1) - np.arange(blocks + 1)[:, None]
        if setting.is_behind_predictors(stage, stages):
            return np.asarray(number == 0)
        return np.asarray(number >= setting.fewest_blocks(stage, stages))

    def _stage_costs(self, stage: int) -> _DivisionCosts:
        """Stages with the same beside blocks take as long."""
        last = self.layers.degrees.pipeline - 1
        predicts = stage == self.layers.setting.predictor_slot(last + 1)
        key = stage == 0, stage == last, predicts
        if key not in self._costs:
            self._costs[key] = self._costs_on(stage)
        return self._costs[key]

    def _costs_on(self, stage: int) -> _DivisionCosts:
        layers, stages = self.layers, self.layers.degrees.pipeline
        alive = in_flight(stage, stages, layers.setting.micro_batches)
        rows = np.full((len(self.runs.runs) + 1, 3), np.inf)
        for place, run in enumerate(self.runs.runs):
            ledger = layers.ledger((run,), stage)
            saved = ledger["activations"] / alive
            rows[place] = layers.update_seconds((run,), stage), sum(ledger.values()) - saved * alive, saved
        parts = layers.fixed_parts(stage)
        forward, backward = (
            own + sum(count * each[way] for count, each in parts) for way, own in enumerate(self.passes)
        )
        # Without a run: the last row.
        update, fixed, saved_bytes = (rows[self.runs.number, column] for column in range(3))
        return _DivisionCosts(forward, backward, update, fixed, saved_bytes)
