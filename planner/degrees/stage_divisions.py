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

**Interleaved 1F1B**, with v virtual stages on a device, s_k the seconds of a micro-batch in virtual stage k,
and T_d those of all that are on device d. The first forward of chunk j on d waits for the forwards of
the virtual stages before it; until then d has run at most p forwards of each of its chunks before j, and no
backward. After the last backward of that chunk the same is true backwards. So for every d and j a step takes
at least

    m T_d + sum of s_k, k < j p + d - p (sum of s_(i p + d), i < j)

and the longest update: `interleaved_bound` of a division. Every division takes no less than any weighted mean
of these, with weights r_d / v that grow by 1 / (1 - 1 / (v m)) from device to device, in which every second
of a block counts at least as often as where that is least; and no less than what whole blocks allow: device d
with n blocks of a kind, whatever others it has, takes m T_d and waits for the embedding and one block of each
virtual stage between, and there must be room for all blocks of the kind (`least_interleaved`); how many have
to run again to fit is counted where all blocks are equal.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np

from ...cost_models.transformer.layer_table import LayerTable
from ...cost_models.transformer.training_setting import block_ranges
from ...cost_models.transformer.training_step import StepEstimate, estimate_stages


def lower_bound(layers: LayerTable) -> float:
    """Seconds that no step takes less than, whatever the division; see the top of this file."""
    stages, count = layers.degrees.pipeline, layers.setting.micro_batches
    slowest = layers.least_slowest_seconds()
    if layers.setting.virtual_stages > 1:
        return max(count * slowest, _weighted_mean(layers)) + layers.least_update_seconds
    whole = layers.whole_seconds
    share = layers.least_backward_share()
    ordered = whole + (count - 1) * share * slowest + max(count - stages, 0) * (1 - share) * slowest
    return max(count * slowest, ordered) + layers.least_update_seconds


def interleaved_divisions(layers: LayerTable) -> list[tuple[int, ...]]:
    """Of virtual stages those to begin with: evenly by number, and evenly by seconds."""
    even = layers.setting.even_blocks(layers.shape.blocks, layers.slots)
    return list(dict.fromkeys((tuple(even), tuple(divide_by_seconds(layers)))))


def interleaved_bound(layers: LayerTable, counts: Sequence[int]) -> float:
    """Seconds that a division of virtual stages takes at least; see the top of this file."""
    stages, ranges = layers.degrees.pipeline, block_ranges(counts)
    seconds = [layers.seconds(own, slot).both for slot, own in enumerate(ranges)]
    before = [0.0, *accumulate(seconds)]
    pipeline = 0.0
    for device in range(stages):
        own = seconds[device::stages]
        earlier = [0.0, *accumulate(own)]
        waits = (before[chunk * stages + device] - stages * earlier[chunk] for chunk in range(len(own)))
        pipeline = max(pipeline, layers.setting.micro_batches * sum(own) + max(waits))
    updates = (layers.update_seconds(layers.own_blocks(ranges, device), device) for device in range(stages))
    return pipeline + max(updates)


def least_interleaved(layers: LayerTable, memory_bytes: float) -> float:
    """Seconds that no division of virtual stages that fits takes less than; inf where none fits."""
    return max(
        lower_bound(layers),
        _whole_blocks(layers, memory_bytes) + layers.least_update_seconds,
    )


def _weighted_mean(layers: LayerTable) -> float:
    """Of the bounds by device and chunk, as the top of this file says."""
    setting = layers.setting
    times = _mean_times(layers.degrees.pipeline, setting.virtual_stages, setting.micro_batches)
    fixed = {slot: layers.fixed_seconds(slot) for slot in layers.fixed_slots}
    blocks = layers.whole_seconds - sum(fixed.values())
    return sum(times[slot] * own for slot, own in fixed.items()) + min(times) * blocks


@lru_cache(maxsize=4096)
def _mean_times(stages: int, virtual: int, count: int) -> list[float]:
    """How often the mean counts a second of each virtual stage."""
    weights = (1 - 1 / (virtual * count)) ** -np.arange(stages)
    weights /= weights.sum()
    behind = weights.sum() - np.cumsum(weights)
    later = (virtual - 1 - np.arange(virtual))[:, None] / virtual
    times = count * weights + behind / virtual + later * (1 - stages * weights)
    return [float(own) for own in times.reshape(-1)]


def _whole_blocks(layers: LayerTable, memory_bytes: float) -> float:
    """The least seconds in which all blocks of a kind find room, of those that a device can have; of the kind
    where they are longest. Where all blocks are equal, with as many of them run again as its memory asks; inf
    where there is no room."""
    return max(_room_for(layers, kind, memory_bytes) for kind in layers.blocks)


def _room_for(layers: LayerTable, kind: bool, memory_bytes: float) -> float:
    stages, blocks = layers.degrees.pipeline, layers.shape.routed.count(kind)
    numbers = np.arange(1, blocks + 1)
    one = np.ones(1, dtype=int)
    block = min(float(layers.least_equal_seconds(one, np.zeros(1), each)[0]) for each in layers.blocks)
    fixed = [0.0] * stages
    for slot in layers.fixed_slots:
        fixed[slot % stages] += layers.fixed_seconds(slot)
    first = layers.fixed_seconds(0)
    rooms: list[np.ndarray] = []
    for device in range(stages):
        wait = first + (device - 1) * block if device else 0.0
        again = np.zeros(blocks)
        if len(layers.blocks) == 1:
            again = layers.least_blocks_again(numbers, device, memory_bytes)
        middle = layers.least_equal_seconds(numbers, np.where(np.isinf(again), 0, again), kind)
        own = wait + layers.setting.micro_batches * (middle + fixed[device])
        rooms.append(own[np.isfinite(again)])
    together = np.sort(np.concatenate(rooms))
    return float(together[blocks - 1]) if len(together) >= blocks else float("inf")


def divide_by_seconds(layers: LayerTable) -> list[int]:
    """Each stage ends where the seconds before come nearest to its share of the whole; with as few blocks
    as a stage can have at least."""
    stages, blocks = layers.slots, layers.shape.blocks
    before = layers.seconds_before
    share = layers.whole_seconds / stages
    fewest = [layers.setting.fewest_blocks(slot, stages) for slot in range(stages)]
    ends, fixed = [0], 0.0
    for slot in range(stages - 1):
        fixed += layers.fixed_seconds(slot) if slot else 0.0
        if slot == layers.setting.predictor_slot(stages):
            return [b - a for a, b in pairwise([*ends, blocks])] + [0] * (stages - 1 - slot)
        allowed = range(ends[-1] + fewest[slot], blocks - sum(fewest[slot + 1 :]) + 1)
        aim = (slot + 1) * share - fixed
        ends.append(_nearest(allowed, before, aim))
    return [b - a for a, b in pairwise([*ends, blocks])]


def _nearest(ends: range, before: Sequence[float], aim: float) -> int:
    """The first of those with the seconds before that are nearest to the aim; these never become fewer."""
    low, high = ends.start, ends.stop
    after = bisect_left(before, aim, low, high)
    best = min(range(max(after - 1, low), min(after + 1, high)), key=lambda end: abs(before[end] - aim))
    return bisect_left(before, before[best], low, high)


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


_MOST_TRIALS = 24
"""Divisions that are simulated to improve one."""


def _moves(layers: LayerTable, counts: tuple[int, ...], estimate: StepEstimate) -> Iterator[tuple[int, ...]]:
    """One block less on a stage, one more on another; first from the slowest devices to the fastest."""
    stages, slots = layers.degrees.pipeline, len(counts)
    seconds = [own.forward_seconds + own.backward_seconds for own in estimate.stages]
    slow_first = sorted(range(slots), key=lambda slot: (-seconds[slot % stages], -slot))
    for source in slow_first:
        if counts[source] <= layers.setting.fewest_blocks(source, slots):
            continue
        for target in reversed(slow_first):
            if target != source and not layers.setting.is_behind_predictors(target, slots):
                trial = list(counts)
                trial[source] -= 1
                trial[target] += 1
                yield tuple(trial)
