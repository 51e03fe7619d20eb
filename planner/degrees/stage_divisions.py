"""Divisions of a transformer's layers over the stages of a pipeline, and a lower bound on all of them.

**The bound** of a combination holds for every division of its blocks over the stages. Under 1F1B that of
division_bound.py is closer. Let T be the mean of the stages, or the longest layer if that is longer, b the
smallest backward share of a layer's seconds, p the stages and m the micro-batches. The slowest stage s takes
T_s >= T, of which at least b T_s is backward, and its device computes for m T_s. The first micro-batch goes
through all stages and back: until the first backward of s, the forwards of all stages and the backwards of
those after s pass, while s runs at most p forwards. Then m backwards and the other m - p forwards of s
follow, and the backwards of the stages before s. So a step takes at least

    max(m T,  total + (m - 1) b T + max(m - p, 0) (1 - b) T)

plus the shortest possible update of a device, with `total` the seconds of one micro-batch on all stages.
interleaved_bound.py has the bounds for virtual stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...cost_models.transformer.layer_table import LayerTable
from ...cost_models.transformer.training_step import StepEstimate, estimate_stages
from .interleaved_bound import interleaved_bound, mean_interleaved


def lower_bound(layers: LayerTable) -> float:
    """Return a lower bound in seconds on the step of every division, as the module's docstring defines it."""
    stages, count = layers.degrees.pipeline, layers.setting.micro_batches
    slowest = layers.least_slowest_seconds()
    if layers.setting.virtual_stages > 1:
        return max(count * slowest, mean_interleaved(layers)) + layers.least_update_seconds
    whole = layers.whole_seconds
    share = layers.least_backward_share()
    ordered = whole + (count - 1) * share * slowest + max(count - stages, 0) * (1 - share) * slowest
    return max(count * slowest, ordered) + layers.least_update_seconds


def even_division(layers: LayerTable) -> tuple[int, ...]:
    """Return the blocks of each (virtual) stage, as equal as possible."""
    return tuple(layers.setting.even_blocks(layers.shape.blocks, layers.slots))


def round_division(layers: LayerTable, amounts: Sequence[float]) -> tuple[int, ...]:
    """Return whole blocks of (virtual) stages close to these amounts, within the allowed numbers."""
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
    """Move blocks from the stages of the slowest device to others while that shortens the step.

    Each move leaves a division that fits.

    Args:
        layers: Costs of the layers.
        counts: Blocks of each (virtual) stage.
        memory_bytes: Bytes that a device may use.

    Returns:
        The division and its estimate.
    """
    best, estimate = tuple(counts), estimate_stages(layers, counts)
    trials = _MOST_TRIALS
    while trials > 0:
        moved = None
        for trial in _moves(layers, best, estimate):
            bound = interleaved_bound(layers, trial)
            if bound >= estimate.step_seconds or layers.peak_bytes(trial) > memory_bytes:
                continue
            trials -= 1
            trial_estimate = estimate_stages(layers, trial)
            if trial_estimate.step_seconds < estimate.step_seconds * (1 - 1e-9):
                moved = trial, trial_estimate
            if moved or trials <= 0:
                break
        if moved is None:
            break
        best, estimate = moved
    return best, estimate


MOST_FITTED_MOVES = 64
"""Most blocks that are moved to make a division fit."""

_MOST_TRIALS = 24
"""Most divisions that are simulated to improve one."""


def fit_division(layers: LayerTable, counts: Sequence[int], memory_bytes: float) -> tuple[int, ...] | None:
    """Move blocks from the device that needs most memory until the division fits.

    Each move goes where all devices together lack least: to later virtual stages, which have fewer
    micro-batches in flight, or to other devices.

    Args:
        layers: Costs of the layers.
        counts: Blocks of each (virtual) stage.
        memory_bytes: Bytes that a device may use.

    Returns:
        The division; None if the moves do not reach one that fits.
    """
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
    """Return the bytes that each device lacks."""
    return [max(0.0, needed - memory_bytes) for needed in layers.device_bytes(counts)]


def _moves_from(layers: LayerTable, counts: tuple[int, ...], device: int) -> Iterator[tuple[int, ...]]:
    """Yield divisions with one block moved from a device to a virtual stage of the last half."""
    slots = len(counts)
    for source in range(device, slots, layers.degrees.pipeline):
        for target in layers.setting.block_slots(slots)[slots // 2 :]:
            if source != target and counts[source] > layers.fewest_blocks[source]:
                trial = list(counts)
                trial[source] -= 1
                trial[target] += 1
                yield tuple(trial)


def _moves(layers: LayerTable, counts: tuple[int, ...], estimate: StepEstimate) -> Iterator[tuple[int, ...]]:
    """Yield divisions with one block moved between stages, from the slowest devices to the fastest first."""
    stages, slots = layers.degrees.pipeline, len(counts)
    seconds = [stage.forward_seconds + stage.backward_seconds for stage in estimate.stages]
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
