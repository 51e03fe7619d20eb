"""What no division of a transformer's blocks over the stages of a 1F1B pipeline with equal degrees is faster
than, and the division of which this is known.

The bound of a pipeline is that of degrees by stage (stage_degree_bound.py): of each of its stages the seconds
before it, its own, and those in which it idles. With equal degrees, what is behind a stage takes as long
however it is divided, but for first blocks that run again, so that the least bound of all divisions is found
stage after stage, from the last to the first, by the block that a stage begins with.

**Runs that are left out.** Let T be the seconds of a micro-batch on all stages and over all cuts, there and
back. Of a stage with a = min(k, m - 1) forwards ahead, what is before it and behind it takes
A + D = T - f - b, and where D is a second longer A is a second shorter and the stage idles none, one or two
more: none up to the lesser of a f + (a + 1) l and a (b + e) + l. So, whatever the other stages have, a step
takes at least the update and

    T - (f + b) + m (f + b + e + l) - e - min(a f + (a + 1) l, a (b + e) + l)

A run of blocks that does not fit on a stage, or makes this more than `enough`, is none of that stage's; the
longest and the shortest runs of the others say between which blocks it can begin.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from ...cost_models.schedules import one_f_one_b_in_flight
from ...cost_models.transformer.layer_table import LayerTable
from .stage_degree_bound import stage_bound
from .stage_degree_table import Array, BlockRuns

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
    programme = _DivisionProgramme(layers, memory_bytes, enough)
    places = programme.places()
    if places is None:
        return float("inf"), None
    behind = step = np.zeros(1)
    ends = []
    for stage in range(layers.degrees.pipeline - 1, -1, -1):
        latest, both = programme.bounds(stage, places[stage], places[stage + 1], behind, step)
        ends.append(latest.argmin(axis=1))
        cut = 2 * layers.transfer_seconds(stage - 1) if stage else 0.0
        behind, step = cut + (both + behind).min(axis=1), cut + latest.min(axis=1)
    if not step[0] <= enough * (1 + _ROUNDING) or not np.isfinite(step[0]):
        return float("inf"), None
    cuts = [0]
    for stops, own, following in zip(reversed(ends), places, places[1:], strict=False):
        cuts.append(following[int(stops[cuts[-1] - own.start])])
    return float(step[0]), tuple(stop - start for start, stop in pairwise(cuts))


@dataclass(frozen=True)
class _DivisionCosts:
    """Of a stage by run of blocks: seconds of its update, and of the passes of a micro-batch; bytes beside
    activations, and of those that a micro-batch in flight keeps."""

    update: Array
    forward: Array
    backward: Array
    fixed: Array
    saved: Array


class _DivisionProgramme:
    """The stages of one combination."""

    def __init__(self, layers: LayerTable, memory_bytes: float, enough: float) -> None:
        self.layers, self.memory_bytes, self.enough = layers, memory_bytes, enough
        self.runs = _block_runs(layers.shape.routed)
        self._costs: dict[tuple[bool, bool, bool], _DivisionCosts] = {}
        stages = range(layers.degrees.pipeline)
        self._fitting = [self._fitting_runs(stage) for stage in stages]
        self._allowed, before = self._fitting, -1
        # What is left out makes others longer.
        while (left := sum(int(own.sum()) for own in self._allowed)) != before and left:
            before, whole = left, self._least_whole()
            self._allowed = [self._useful_runs(stage, whole) for stage in stages]

    def _least_whole(self) -> float:
        """Seconds of a micro-batch on all stages and over all cuts at least. Where the first N blocks run
        again, of a stage's n at least n N / l do, with no stage longer than l."""
        layers, setting = self.layers, self.layers.setting
        cuts = sum(2 * layers.transfer_seconds(stage) for stage in range(layers.degrees.pipeline - 1))
        longest = max(int(self.runs.lengths[allowed].max(initial=1)) for allowed in self._allowed)
        once, more = layers.least_block_seconds
        again = layers.shape.blocks * min(1.0, setting.recomputed(longest) / longest)
        blocks = sum(once[kind] for kind in layers.shape.routed) + again * more
        return max(layers.whole_seconds, blocks + sum(map(layers.fixed_seconds, layers.fixed_slots))) + cuts

    def places(self) -> list[range] | None:
        """The blocks that each stage can begin with, and the one behind the last; None where there is no
        division."""
        lengths = [self.runs.lengths[allowed] for allowed in self._allowed]
        if not all(map(len, lengths)):
            return None
        blocks = self.layers.shape.blocks
        least = [0, *accumulate(int(own.min()) for own in lengths)]
        most = [0, *accumulate(int(own.max()) for own in lengths)]
        places = [
            range(max(low, blocks - most[-1] + high), min(high, blocks - least[-1] + low) + 1)
            for low, high in zip(least, most, strict=True)
        ]
        return places if all(places) else None

    def bounds(
        self, stage: int, starts: range, stops: range, behind: Array, step: Array
    ) -> tuple[Array, Array]:
        """Of the stages from this one on, by its first block and the one behind its last: seconds of a step,
        and those of a micro-batch in this one."""
        layers, own = self.layers, self._stage_costs(stage)
        number = self.runs.number[starts.start : starts.stop, stops.start : stops.stop]
        allowed = self._allowed[stage][number] & (number >= 0) & np.isfinite(behind)
        passes = layers.seconds_between(np.array(starts)[:, None], np.array(stops))
        parts = layers.fixed_parts(stage)
        forward, backward = (
            np.where(allowed, each + sum(count * beside[way] for count, beside in parts), np.inf)
            for way, each in enumerate(passes)
        )
        update = np.where(allowed, np.maximum(own.update[number], layers.least_update_seconds), np.inf)
        enter, leave = layers.cut_seconds(stage)
        after = layers.degrees.pipeline - 1 - stage
        with np.errstate(invalid="ignore"):
            alone = stage_bound(forward, backward, enter, leave, behind, after, layers.setting.micro_batches)
            both = forward + backward
            latest = np.maximum(alone + update, both + step)
        return np.where(allowed, latest, np.inf), np.where(allowed, both, np.inf)

    def _fitting_runs(self, stage: int) -> npt.NDArray[np.bool_]:
        """Those that the stage has memory for, and blocks enough."""
        own, setting, lengths = self._stage_costs(stage), self.layers.setting, self.runs.lengths
        stages = self.layers.degrees.pipeline
        fits = (
            own.fixed + own.saved * one_f_one_b_in_flight(stage, stages, setting.micro_batches)
            <= self.memory_bytes
        )
        if stage not in setting.block_slots(stages):
            return np.asarray(fits & (lengths == 0))
        return np.asarray(fits & (lengths >= self.layers.fewest_blocks[stage]))

    def _useful_runs(self, stage: int, whole: float) -> npt.NDArray[np.bool_]:
        """Those that fit and leave a step of `enough` seconds, with so many of a micro-batch in all."""
        layers, own, stages = self.layers, self._stage_costs(stage), self.layers.degrees.pipeline
        many = layers.setting.micro_batches
        enter, leave = layers.cut_seconds(stage)
        ahead, both = min(stages - 1 - stage, many - 1), own.forward + own.backward
        less = np.minimum(ahead * own.forward + (ahead + 1) * leave, ahead * (own.backward + enter) + leave)
        alone = whole - both + many * (both + enter + leave) - enter - less
        alone += np.maximum(own.update, layers.least_update_seconds)
        return np.asarray(self._fitting[stage] & (alone * (1 - _ROUNDING) <= self.enough))

    def _stage_costs(self, stage: int) -> _DivisionCosts:
        """Stages with the same beside blocks take as long."""
        last = self.layers.degrees.pipeline - 1
        predicts = stage == self.layers.setting.predictor_slot(last + 1)
        key = stage == 0, stage == last, predicts
        if key not in self._costs:
            self._costs[key] = self._costs_on(stage)
        return self._costs[key]

    def _costs_on(self, stage: int) -> _DivisionCosts:
        layers, runs = self.layers, self.runs
        update, fixed, saved = layers.columns(runs.ends, stage)
        forward, backward = layers.seconds_between(*runs.ends)
        for count, own in layers.fixed_parts(stage):
            forward, backward = forward + count * own.forward, backward + count * own.backward
        return _DivisionCosts(update, forward, backward, fixed, saved)
