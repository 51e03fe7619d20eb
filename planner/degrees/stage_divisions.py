"""Divisions of a transformer's layers over the stages of a pipeline, and what no division is faster than.

**The bound** of a combination holds for every division of its blocks over the stages. With T the time of the
slowest stage of the best division, b the smallest share of a layer's seconds that is backward, p stages and m
micro-batches, the slowest stage s takes T_s >= T, of which at least b T_s is backward. Its device computes
for m T_s. Before its last backwards end, and beside the warm-up's forwards, the first micro-batch goes
through all stages and back: until the first backward of s, the forwards of all stages and the backwards of
those after s pass, in which s runs at most p forwards; then m backwards and the other m - p forwards of s
follow, and the backwards of the stages before s. So a step takes at least

    max(m T,  total + (m - 1) b T + max(m - p, 0) (1 - b) T)

with `total` the seconds of one micro-batch on all stages, and the shortest update that a device can have.

**Interleaved 1F1B.** Of virtual stages two divisions are searched: evenly by number (Megatron-LM's
`--num-layers-per-virtual-pipeline-stage`, where it divides) and evenly by seconds. Each is simulated, unless
its own bound exceeds what was found: device d computes for m T_d, and its first forward and last backward are
those of its first virtual stage, which wait for the virtual stages before:

    max over d of (m T_d + the seconds of a micro-batch in the virtual stages before d) + the longest update
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from ...cost_models.transformer.layer_table import LayerTable
from ...cost_models.transformer.training_setting import block_ranges, even_blocks

_HALVINGS = 24


def slowest_stage(layers: LayerTable, memory_bytes: float) -> tuple[float, list[int] | None]:
    """The least seconds of a micro-batch that the slowest stage can take within the memory, and a division
    with them; (inf, None) where none fits.

    A stage of fewer blocks takes no longer and needs no more, so for given seconds and memory as many blocks
    as fit, stage after stage, is a division wherever there is one; the least seconds are found by bisection.
    """
    ranges = _longest(layers, float("inf"), memory_bytes)
    if ranges is None:
        return float("inf"), None

    def slowest(ranges: list[range]) -> float:
        return max(layers.seconds(own, stage).both for stage, own in enumerate(ranges))

    high = slowest(ranges)
    low = min(layers.least_slowest_seconds(), high)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        trial = _longest(layers, middle, memory_bytes)
        if trial is None:
            low = middle
        else:
            ranges = trial
            high = slowest(ranges)
    return low, [len(own) for own in ranges]


def _longest(layers: LayerTable, seconds: float, memory_bytes: float) -> list[range] | None:
    """Stages of at most so many seconds that fit, at least one block each; None where there are none.

    Stage after stage takes as many blocks as it can. Where a block without experts fits into an early stage
    and one with experts does not, as many can be too many: then every number is tried."""
    stages, blocks = layers.degrees.pipeline, layers.shape.blocks

    def farthest_end(stage: int, start: int) -> int:
        """Of the longest stage from `start`; `start` itself where not one block fits."""
        low, high = start, blocks - (stages - 1 - stage)
        while low < high:
            middle = (low + high + 1) // 2
            own = range(start, middle)
            fits = (
                layers.seconds(own, stage).both <= seconds and layers.stage_bytes(own, stage) <= memory_bytes
            )
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    starts = [0]
    for stage in range(stages):
        starts.append(farthest_end(stage, starts[-1]))
    if starts[-1] == blocks and all(a < b for a, b in pairwise(starts)):
        return [range(a, b) for a, b in pairwise(starts)]
    return _any_division(stages, blocks, farthest_end) if len(set(layers.shape.routed)) > 1 else None


def _any_division(stages: int, blocks: int, farthest_end: Callable[[int, int], int]) -> list[range] | None:
    """By all places where a stage can end: from each start all up to the farthest."""
    came_from: list[dict[int, int]] = [{0: 0}]
    for stage in range(stages):
        ends: dict[int, int] = {}
        for start in came_from[-1]:
            for end in range(start + 1, farthest_end(stage, start) + 1):
                ends.setdefault(end, start)
        came_from.append(ends)
    if blocks not in came_from[-1]:
        return None
    ranges, end = [], blocks
    for ends in reversed(came_from[1:]):
        ranges.append(range(ends[end], end))
        end = ends[end]
    return ranges[::-1]


def lower_bound(layers: LayerTable, slowest: float) -> float:
    """Seconds that no step takes less than, whatever the division; see the top of this file."""
    stages, count = layers.degrees.pipeline, layers.setting.micro_batches
    if layers.setting.virtual_stages > 1:
        return count * slowest + layers.least_update_seconds()
    whole = layers.whole_seconds()
    share = layers.least_backward_share()
    ordered = whole + (count - 1) * share * slowest + max(count - stages, 0) * (1 - share) * slowest
    return max(count * slowest, ordered) + layers.least_update_seconds()


def interleaved_divisions(layers: LayerTable) -> list[tuple[int, ...]]:
    """Of virtual stages: evenly by number, and evenly by seconds."""
    even = even_blocks(layers.shape.blocks, layers.slots)
    return list(dict.fromkeys((tuple(even), tuple(divide_by_seconds(layers)))))


def interleaved_bound(layers: LayerTable, counts: Sequence[int]) -> float:
    """Seconds that a division of virtual stages takes at least; see the top of this file."""
    stages, ranges = layers.degrees.pipeline, block_ranges(counts)
    seconds = [layers.seconds(own, slot).both for slot, own in enumerate(ranges)]
    pipeline = max(
        layers.setting.micro_batches * sum(seconds[device::stages]) + sum(seconds[:device])
        for device in range(stages)
    )
    updates = (layers.update_seconds(layers.own_blocks(ranges, device), device) for device in range(stages))
    return pipeline + max(updates)


def divide_by_seconds(layers: LayerTable) -> list[int]:
    """Each stage ends where the seconds before come nearest to its share of the whole; at least a block
    each."""
    stages, blocks = layers.slots, layers.shape.blocks
    before = [layers.seconds(range(end), 0).both for end in range(blocks + 1)]
    share = layers.whole_seconds() / stages
    ends = [0]
    for stage in range(1, stages):
        allowed = range(ends[-1] + 1, blocks - (stages - stage) + 1)
        ends.append(min(allowed, key=lambda end: abs(before[end] - stage * share)))
    return [b - a for a, b in pairwise([*ends, blocks])]
