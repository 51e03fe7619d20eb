"""What no division of a transformer's blocks over the virtual stages of interleaved 1F1B is faster than.

With v virtual stages on each of p devices, s_k the seconds of a micro-batch in virtual stage k, x_k those of
passing it on to the next, and T_d those of all virtual stages of device d, for m micro-batches: the first
forward of chunk j on d waits for the forwards of the virtual stages before it, and for what is passed between
them; until then d has run at most p forwards of each of its chunks before j, and no backward. After the last
backward of that chunk the same is true backwards. So for every d and j a step takes at least

    m T_d + sum of s_k + 2 x_k, k < j p + d - p (sum of s_(i p + d), i < j)

and the longest update: `interleaved_bound` of a division. Every division takes no less than any weighted
mean of these, in which every second of a block counts at least as often as where that is least: of all
chunks, with weights r_d / v that grow by 1 / (1 - 1 / (v m)) from device to device, of the last chunk of
every device, which waits for most transfers, and of both (`mean_interleaved`). And it takes no less than what
whole blocks allow: device d takes m T_d and its own update, and waits for the embedding, the blocks that the
virtual stages between must have, and the transfers; each of its virtual stages has as many blocks as it must
have, as many blocks run again as its memory asks, and the devices must have room for all blocks of both kinds
together (`least_interleaved`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from operator import add

import numpy as np
import numpy.typing as npt

from ...cost_models.transformer.layer_table import LayerTable
from ...cost_models.transformer.training_setting import block_ranges

Array = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

MEANS = 5
"""Of the bounds of all virtual stages and of the last ones, that are tried."""


def interleaved_bound(layers: LayerTable, counts: Sequence[int]) -> float:
    """Seconds that a division of virtual stages takes at least; see the top of this file."""
    stages, ranges = layers.degrees.pipeline, block_ranges(counts)
    seconds = [layers.seconds(own, slot).both for slot, own in enumerate(ranges)]
    passes = [2 * layers.transfer_seconds(slot) for slot in range(len(seconds) - 1)]
    before = [0.0, *accumulate(map(add, seconds, passes))]
    pipeline = 0.0
    for device in range(stages):
        own = seconds[device::stages]
        earlier = [0.0, *accumulate(own)]
        waits = (before[chunk * stages + device] - stages * earlier[chunk] for chunk in range(len(own)))
        pipeline = max(pipeline, layers.setting.micro_batches * sum(own) + max(waits))
    updates = (layers.update_seconds(layers.own_blocks(ranges, device), device) for device in range(stages))
    return pipeline + max(updates)


def mean_interleaved(layers: LayerTable) -> float:
    """Seconds of all micro-batches that no division takes less than: the mean of the bounds by device and
    chunk, as the top of this file says."""
    setting = layers.setting
    times, transfers = _mean_times(layers.degrees.pipeline, setting.virtual_stages, setting.micro_batches)
    fixed = {slot: layers.fixed_seconds(slot) for slot in layers.fixed_slots}
    blocks = layers.whole_seconds - sum(fixed.values())
    own = times[:, list(fixed)] @ np.array(list(fixed.values()))
    passes = 2 * layers.transfer_seconds(0) * transfers
    return float((own + times.min(axis=1) * blocks + passes).max())


@lru_cache(maxsize=4096)
def _mean_times(stages: int, virtual: int, count: int) -> tuple[Array, Array]:
    """How often each of several means counts a second of each virtual stage, and how many transfers in either
    direction it waits for."""
    weights: Array = (1 - 1 / (virtual * count)) ** -np.arange(stages, dtype=np.float64)
    weights /= weights.sum()
    even, devices = np.full(stages, 1 / stages), np.arange(stages)
    later = (virtual - 1 - np.arange(virtual))[:, None] / virtual
    every = count * weights + _behind(weights) / virtual + later * (1 - stages * weights)
    last = np.full((virtual, stages), count / stages)
    last[-1] += _behind(even)
    hops = weights @ devices + stages * (virtual - 1) / 2, even @ devices + stages * (virtual - 1)
    share = np.linspace(0, 1, MEANS)[:, None]
    times = share * every.reshape(-1) + (1 - share) * last.reshape(-1)
    return times, share[:, 0] * hops[0] + (1 - share[:, 0]) * hops[1]


def _behind(weights: Array) -> Array:
    """Of each device the weights of those behind it."""
    return np.asarray(weights.sum() - np.cumsum(weights))


def least_interleaved(layers: LayerTable, memory_bytes: float) -> float:
    """Seconds that no division of virtual stages that fits takes less than, by what whole blocks allow: every
    device has the blocks that it must have, and all together have room for all, each for so many of the one
    kind with so many of the other; inf where there is no room."""
    kinds = sorted(layers.blocks, key=layers.shape.routed.count)
    most = [layers.shape.routed.count(kind) for kind in kinds]
    # By blocks of the rarer kind, if there are two, and of the other.
    grid = np.indices([number + 1 for number in most])
    numbers = dict(zip(kinds, grid, strict=True))
    devices = range(layers.degrees.pipeline)
    seconds = np.stack([_device_seconds(layers, device, numbers, memory_bytes) for device in devices])
    seconds = seconds.reshape(len(devices), -1, most[-1] + 1)
    values = np.unique(seconds[np.isfinite(seconds)])
    low, high = 0, len(values)
    while low < high:
        middle = (low + high) // 2
        if _has_room(seconds <= values[middle]):
            high = middle
        else:
            low = middle + 1
    return float(values[low]) if low < len(values) else float("inf")


def _has_room(allowed: npt.NDArray[np.bool_]) -> bool:
    """Whether devices that may each have so many blocks of the one kind beside so many of the other (device,
    one kind, other kind) have room for all."""
    every = allowed.shape[2] - 1
    others = np.where(allowed.any(axis=2), every - allowed[:, :, ::-1].argmax(axis=2), -np.inf)
    together = others[0]
    for own in others[1:]:
        together = np.array([(together[: n + 1] + own[n::-1]).max() for n in range(len(own))])
    return bool(together[-1] >= every)


def _device_seconds(
    layers: LayerTable, device: int, numbers: Mapping[bool, Counts], memory_bytes: float
) -> Array:
    """That a step takes at least with so many blocks of each kind on a device, in whatever virtual stages
    they lie; infinite where they do not fit, or are fewer than there must be."""
    slots = range(device, layers.slots, layers.degrees.pipeline)
    fewest = [layers.fewest_blocks[slot] for slot in slots]
    again = layers.least_blocks_again(numbers, device, memory_bytes)
    allowed = (_total(numbers) >= sum(fewest)) & np.isfinite(again)
    once, more = layers.least_block_seconds
    own = sum(map(layers.fixed_seconds, slots)) + _total(numbers, once)
    own += more * np.maximum(np.where(allowed, again, 0), _first_blocks(layers, _total(numbers), sum(fewest)))
    update = np.maximum(device_update_seconds(layers, numbers, slots), layers.least_update_seconds)
    block = min(once[kind] for kind in layers.blocks) + more * layers.setting.recomputed(1)
    own = least_wait(layers, device, block) + layers.setting.micro_batches * own
    return np.where(allowed, own + update, np.inf)


def least_wait(layers: LayerTable, device: int, block: float) -> float:
    """Seconds that a device waits for the first micro-batch, and behind the last, where a block takes no less
    than these: of the embedding, the blocks that virtual stages between must have, and the transfers."""
    wait = layers.fixed_seconds(0) + sum(layers.fewest_blocks[1:device]) * block if device else 0.0
    return wait + 2 * device * layers.transfer_seconds(0)


def _total(numbers: Mapping[bool, Counts], each: Mapping[bool, float] | None = None) -> Array:
    """Of so many blocks of each kind their number, or the sum of what each has."""
    parts = (own * (1.0 if each is None else each[kind]) for kind, own in numbers.items())
    return np.asarray(sum(parts), dtype=np.float64)


def _first_blocks(layers: LayerTable, number: Array, stages: int) -> Array:
    """How many of so many blocks at least run again as the first ones of virtual stages, of which so many
    must have one."""
    setting, rest = layers.setting, max(stages - 1, 0)
    return rest * setting.recomputed(1) + np.minimum(number - rest, setting.recomputed(layers.shape.blocks))


def device_update_seconds(layers: LayerTable, numbers: Mapping[bool, Counts], slots: range) -> Array:
    """Least update seconds of a device with these virtual stages and so many blocks of each kind."""
    fixed = [layers.parameters(range(0), slot) for slot in slots]
    blocks = layers.block_parameters
    dense = sum(own.dense for own in fixed) + _total(
        numbers, {kind: own.dense for kind, own in blocks.items()}
    )
    experts = _total(numbers, {kind: own.routed for kind, own in blocks.items()})
    seconds = np.zeros_like(dense)
    for counts, line in zip((dense, experts), layers.update_lines, strict=True):
        seconds += np.where(counts > 0, line.start + line.slope * counts, 0.0)
    return seconds
