"""Lower bound on all divisions of a transformer's blocks over virtual stages of interleaved 1F1B.

There are v virtual stages on each of p devices, and m micro-batches. s_k is the seconds of a micro-batch in
virtual stage k, x_k those of its transfer to the next one, and T_d those of all virtual stages of device d.
The first forward of chunk j on d waits for the forwards of all earlier virtual stages and the transfers
between them. Until then d has run at most p forwards of each of its chunks before j, and no backward. After
the last backward of that chunk the same holds in reverse. So for every d and j a step takes at least

    m T_d + sum of s_k + 2 x_k, k < j p + d - p (sum of s_(i p + d), i < j)

plus the longest update: `interleaved_bound` of a division.

Every division takes no less than any weighted mean of these bounds, with every second of a block counted as
often as in the virtual stage where it counts least (`mean_interleaved`). Three kinds of weights are used:
over all chunks, with weights r_d / v that grow by 1 / (1 - 1 / (v m)) from device to device; over the last
chunk of every device, which waits for most transfers; and mixtures of both.

Every division also takes no less than whole blocks allow (`least_interleaved`). Device d takes m T_d and its
update, and waits for the embedding, the fewest blocks of the virtual stages before it, and the transfers.
Each of its virtual stages has its fewest blocks, and recomputes as many as its memory requires. All devices
together must have room for all blocks of both kinds.
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
"""Number of mixtures of the bounds of all virtual stages and of the last ones."""


def interleaved_bound(layers: LayerTable, counts: Sequence[int]) -> float:
    """Return the lower bound in seconds on a division that the module's docstring defines."""
    stages, ranges = layers.degrees.pipeline, block_ranges(counts)
    seconds = [layers.seconds(blocks, slot).both for slot, blocks in enumerate(ranges)]
    passes = [2 * layers.transfer_seconds(slot) for slot in range(len(seconds) - 1)]
    arrival = [0.0, *accumulate(map(add, seconds, passes))]
    pipeline = 0.0
    for device in range(stages):
        blocks = seconds[device::stages]
        earlier = [0.0, *accumulate(blocks)]
        waits = (arrival[chunk * stages + device] - stages * earlier[chunk] for chunk in range(len(blocks)))
        pipeline = max(pipeline, layers.setting.micro_batches * sum(blocks) + max(waits))
    updates = (layers.update_seconds(layers.own_blocks(ranges, device), device) for device in range(stages))
    return pipeline + max(updates)


def mean_interleaved(layers: LayerTable) -> float:
    """Return a lower bound in seconds on all divisions: a mean of the bounds by device and chunk."""
    setting = layers.setting
    times, transfers = _mean_times(layers.degrees.pipeline, setting.virtual_stages, setting.micro_batches)
    fixed = {slot: layers.fixed_seconds(slot) for slot in layers.fixed_slots}
    blocks = layers.whole_seconds - sum(fixed.values())
    fixed_means = times[:, list(fixed)] @ np.array(list(fixed.values()))
    passes = 2 * layers.transfer_seconds(0) * transfers
    return float((fixed_means + times.min(axis=1) * blocks + passes).max())


@lru_cache(maxsize=4096)
def _mean_times(stages: int, virtual: int, count: int) -> tuple[Array, Array]:
    """Return how often several means count a second of each virtual stage, and the transfers they wait for.

    Transfers are counted in one direction.
    """
    weights: Array = (1 - 1 / (virtual * count)) ** -np.arange(stages, dtype=np.float64)
    weights /= weights.sum()
    even, devices = np.full(stages, 1 / stages), np.arange(stages)
    later = (virtual - 1 - np.arange(virtual))[:, None] / virtual
    all_chunks = count * weights + _behind(weights) / virtual + later * (1 - stages * weights)
    last = np.full((virtual, stages), count / stages)
    last[-1] += _behind(even)
    hops = weights @ devices + stages * (virtual - 1) / 2, even @ devices + stages * (virtual - 1)
    share = np.linspace(0, 1, MEANS)[:, None]
    times = share * all_chunks.reshape(-1) + (1 - share) * last.reshape(-1)
    return times, share[:, 0] * hops[0] + (1 - share[:, 0]) * hops[1]


def _behind(weights: Array) -> Array:
    """Return, for each device, the sum of the weights of the later devices."""
    return np.asarray(weights.sum() - np.cumsum(weights))


def least_interleaved(layers: LayerTable, memory_bytes: float) -> float:
    """Return a lower bound in seconds on all divisions that fit, by what whole blocks allow.

    Inf if none fits.
    """
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
    """Return whether devices with these allowed block counts have room for all blocks.

    `allowed` is a (device, blocks of one kind, blocks of the other kind) mask.
    """
    most = allowed.shape[2] - 1
    most_others = np.where(allowed.any(axis=2), most - allowed[:, :, ::-1].argmax(axis=2), -np.inf)
    together = most_others[0]
    for device_others in most_others[1:]:
        together = np.array(
            [(together[: n + 1] + device_others[n::-1]).max() for n in range(len(device_others))]
        )
    return bool(together[-1] >= most)


def _device_seconds(
    layers: LayerTable, device: int, numbers: Mapping[bool, Counts], memory_bytes: float
) -> Array:
    """Return least seconds of a step by the blocks of each kind on a device, in whatever virtual stages.

    They are inf if the blocks do not fit, or are fewer than the fewest allowed.
    """
    slots = range(device, layers.slots, layers.degrees.pipeline)
    fewest = [layers.fewest_blocks[slot] for slot in slots]
    recomputed = layers.least_blocks_again(numbers, device, memory_bytes)
    allowed = (_total(numbers) >= sum(fewest)) & np.isfinite(recomputed)
    once, more = layers.least_block_seconds
    computing = sum(map(layers.fixed_seconds, slots)) + _total(numbers, once)
    computing += more * np.maximum(
        np.where(allowed, recomputed, 0), _first_blocks(layers, _total(numbers), sum(fewest))
    )
    update = np.maximum(device_update_seconds(layers, numbers, slots), layers.least_update_seconds)
    block = min(once[kind] for kind in layers.blocks) + more * layers.setting.recomputed(1)
    computing = least_wait(layers, device, block) + layers.setting.micro_batches * computing
    return np.where(allowed, computing + update, np.inf)


def least_wait(layers: LayerTable, device: int, block: float) -> float:
    """Return the seconds that a device waits for the first micro-batch and after the last one.

    They are those of the embedding, the fewest blocks of the virtual stages before it, each of at least
    `block` seconds, and the transfers.
    """
    wait = layers.fixed_seconds(0) + sum(layers.fewest_blocks[1:device]) * block if device else 0.0
    return wait + 2 * device * layers.transfer_seconds(0)


def _total(numbers: Mapping[bool, Counts], each: Mapping[bool, float] | None = None) -> Array:
    """Return the number of blocks of all kinds, or the sum of what `each` has."""
    parts = (count * (1.0 if each is None else each[kind]) for kind, count in numbers.items())
    return np.asarray(sum(parts), dtype=np.float64)


def _first_blocks(layers: LayerTable, number: Array, stages: int) -> Array:
    """Return the fewest recomputed blocks of `number` blocks in `stages` virtual stages."""
    setting, rest = layers.setting, max(stages - 1, 0)
    return rest * setting.recomputed(1) + np.minimum(number - rest, setting.recomputed(layers.shape.blocks))


def device_update_seconds(layers: LayerTable, numbers: Mapping[bool, Counts], slots: range) -> Array:
    """Return the least update seconds of a device with these virtual stages and blocks of each kind.

    Args:
        layers: Costs of the layers.
        numbers: Blocks by kind.
        slots: Virtual stages of the device.
    """
    fixed = [layers.parameters(range(0), slot) for slot in slots]
    blocks = layers.block_parameters
    dense = sum(parameters.dense for parameters in fixed) + _total(
        numbers, {kind: parameters.dense for kind, parameters in blocks.items()}
    )
    experts = _total(numbers, {kind: parameters.routed for kind, parameters in blocks.items()})
    seconds = np.zeros_like(dense)
    for counts, line in zip((dense, experts), layers.update_lines, strict=True):
        seconds += np.where(counts > 0, line.start + line.slope * counts, 0.0)
    return seconds
