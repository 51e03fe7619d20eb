"""Divisions of a transformer's layers over the stages of a pipeline, and what no division is faster than.

**The bound** of a combination holds for every division of its blocks over the stages; under 1F1B that of
division_bound.py is closer. With T the mean of the stages, or the longest layer, b the smallest share of a
layer's seconds that is backward, p stages and m micro-batches, the slowest stage s takes T_s >= T, of which
at least b T_s is backward. Its device computes
for m T_s. Before its last backwards end, and beside the warm-up's forwards, the first micro-batch goes
through all stages and back: until the first backward of s, the forwards of all stages and the backwards of
those after s pass, in which s runs at most p forwards; then m backwards and the other m - p forwards of s
follow, and the backwards of the stages before s. So a step takes at least

    max(m T,  total + (m - 1) b T + max(m - p, 0) (1 - b) T)

with `total` the seconds of one micro-batch on all stages, and the shortest update that a device can have.
interleaved_bound.py argues what is known of virtual stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...cost_models.transformer.layer_table import LayerTable
from ...cost_models.transformer.training_step import StepEstimate, estimate_stages
from .interleaved_bound import interleaved_bound, mean_interleaved


def lower_bound(layers: LayerTable) -> float:
    """Seconds that no step takes less than, whatever the division; see the top of this file."""
    stages, count = layers.degrees.pipeline, layers.setting.micro_batches
    slowest = layers.least_slowest_seconds()
    if layers.setting.virtual_stages > 1:
        return max(count * slowest, mean_interleaved(layers)) + layers.least_update_seconds
    whole = layers.whole_seconds
    share = layers.least_backward_share()
    ordered = whole + (count - 1) * share * slowest + max(count - stages, 0) * (1 - share) * slowest
    return max(count * slowest, ordered) + layers.least_update_seconds


def even_division(layers: LayerTable) -> tuple[int, ...]:
    """Blocks of each (virtual) stage, as equal as can be."""
    return tuple(layers.setting.even_blocks(layers.shape.blocks, layers.slots))


def round_division(layers: LayerTable, amounts: Sequence[float]) -> tuple[int, ...]:
    """Whole blocks of (virtual) stages that should have so many, each as many as it must and may."""
    free, fewest = layers.setting.block_slots(layers.slots), layers.fewest_blocks
    counts = [max(int(amounts[slot]), fewest[slot]) if slot in free else 0 for slot in range(layers.slots)]
    while (left := layers.shape.blocks - sum(counts)) != 0:
        step = 1 if left > 0 else -1
        allowed = [slot for slot in free if counts[slot] + step >= fewest[slot]]
        counts[max(allowed, key=lambda slot: step * (amounts[slot] - counts[slot]))] += step
    return tuple(counts)


def improve_division(
    layers: LayerTable, counts: Sequence[int], memory_bytes: float
) -> tuple[tuple[int, ...], StepEstimate]:
    """The division after moves of one block from the stages of the slowest device to those of others, each of
    which makes the step shorter and fits."""
    best, estimate = tuple(counts), estimate_stages(layers, counts)
    trials = _MOST_TRIALS
    while trials > 0:
        moved = None
        for trial in _moves(layers, best, estimate):
            bound = interleaved_bound(layers, trial)
            if bound >= estimate.step_seconds or layers.peak_bytes(trial) > memory_bytes:
                continue
            trials -= 1
            own = estimate_stages(layers, trial)
            if own.step_seconds < estimate.step_seconds * (1 - 1e-9):
                moved = trial, own
            if moved or trials <= 0:
                break
        if moved is None:
            break
        best, estimate = moved
    return best, estimate


MOST_FITTED_MOVES = 64
"""Blocks that are moved to make a division fit."""

_MOST_TRIALS = 24
"""Divisions that are simulated to improve one."""


def fit_division(layers: LayerTable, counts: Sequence[int], memory_bytes: float) -> tuple[int, ...] | None:
    """The division after moves of blocks from the device that needs most memory, each to where all devices
    together lack least: to later virtual stages, of which fewer micro-batches are in flight, or to other
    devices. None where that does not end in one that fits."""
    best = tuple(counts)
    lack = _lacking_bytes(layers, best, memory_bytes)
    for _ in range(MOST_FITTED_MOVES):
        if not sum(lack):
            return best
        device = max(range(len(lack)), key=lack.__getitem__)
        trials = [
            (sum(_lacking_bytes(layers, trial, memory_bytes)), trial)
            for trial in _moves_from(layers, best, device)
        ]
        least, trial = min(trials, default=(float("inf"), best))
        if least >= sum(lack):
            return None
        best, lack = trial, _lacking_bytes(layers, trial, memory_bytes)
    return None


def _lacking_bytes(layers: LayerTable, counts: Sequence[int], memory_bytes: float) -> list[float]:
    """Bytes by device beyond the memory."""
    return [max(0.0, own - memory_bytes) for own in layers.device_bytes(counts)]


def _moves_from(layers: LayerTable, counts: tuple[int, ...], device: int) -> Iterator[tuple[int, ...]]:
    """One block less on a virtual stage of a device, one more on one of the last half."""
    slots = len(counts)
    for source in range(device, slots, layers.degrees.pipeline):
        for target in layers.setting.block_slots(slots)[slots // 2 :]:
            if source != target and counts[source] > layers.fewest_blocks[source]:
                trial = list(counts)
                trial[source] -= 1
                trial[target] += 1
                yield tuple(trial)


def _moves(layers: LayerTable, counts: tuple[int, ...], estimate: StepEstimate) -> Iterator[tuple[int, ...]]:
    """One block less on a stage, one more on another; first from the slowest devices to the fastest."""
    stages, slots = layers.degrees.pipeline, len(counts)
    seconds = [own.forward_seconds + own.backward_seconds for own in estimate.stages]
    slow_first = sorted(range(slots), key=lambda slot: (-seconds[slot % stages], -slot))
    for source in slow_first:
        if counts[source] <= layers.fewest_blocks[source]:
            continue
        for target in reversed(slow_first):
            if target != source and target in layers.setting.block_slots(slots):
                trial = list(counts)
                trial[source] -= 1
                trial[target] += 1
                yield tuple(trial)
