"""Of how many of its first blocks a stage may run again so that a plan is of use.

With N first blocks of each (virtual) stage running again, a device with n blocks fits from some N on, and
leaves a step of `enough` seconds up to some N. For its memory at least r(n) of n blocks in v virtual stages
must run again (`LayerTable.least_blocks_again`), so that N is at least r(n) / v; and the seconds that a step
takes at least, interleaved_bound.py's of a device or division_bound.py's of a run, grow with what runs again,
at least min(n, N) blocks. With n more blocks both limits are narrower. So of each N there is a most n of each
device, and where all of them together are less than the model has, no division with this N is of use. With
two kinds of blocks, and where weights or gradients are spread, every N is tried.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ...cost_models.transformer.layer_table import LayerTable
from ...cost_models.transformer.parallel_degrees import ParallelDegrees
from ...cost_models.transformer.training_setting import TrainingSetting
from .interleaved_bound import device_update_seconds, least_wait

Array = npt.NDArray[np.float64]

_ROUNDING = 1e-9
"""Of seconds that a step takes at least, what they may be off."""


class AgainNumbers:
    """Of combinations of which only the first blocks of a stage run again: the numbers of these that may be
    of use, the last answers kept."""

    def __init__(self, memory_bytes: float) -> None:
        self.memory_bytes = memory_bytes
        self._last: dict[tuple[ParallelDegrees, TrainingSetting], tuple[float, npt.NDArray[np.bool_]]] = {}

    def following(self, layers: LayerTable, enough: float) -> int | None:
        """The least number above that of these layers with which a step may take less than `enough` seconds;
        None where there is none."""
        number = layers.setting.recompute_blocks
        if number is None:
            return None
        if len(layers.blocks) > 1 or layers.degrees.zero > 1:
            return number + 1
        key = layers.degrees, replace(layers.setting, recompute_blocks=1)
        if key not in self._last or self._last[key][0] > enough:
            self._last[key] = enough, useful_numbers(layers, self.memory_bytes, enough)
        ahead = np.flatnonzero(self._last[key][1][number + 1 :])
        return number + 1 + int(ahead[0]) if len(ahead) else None


def useful_numbers(layers: LayerTable, memory_bytes: float, enough: float) -> npt.NDArray[np.bool_]:
    """By number of first blocks of a (virtual) stage that run again, from none on: whether a division that
    fits may take less than `enough` seconds, where they are no fewer than those of these layers."""
    numbers = np.arange(layers.shape.blocks + 1)
    together = np.zeros(len(numbers))
    for device in range(layers.degrees.pipeline):
        least, most = _limits(layers, device, memory_bytes, enough)
        # By number of blocks from the least that the device must have on; narrower with each more.
        least, most = np.minimum.accumulate(least[::-1])[::-1], np.maximum.accumulate(most[::-1])[::-1]
        fewest = layers.shape.blocks + 1 - len(least)
        fitting = np.searchsorted(least, numbers, side="right")
        short = len(most) - np.searchsorted(most[::-1], numbers, side="left")
        own = np.minimum(fitting, short)
        together += np.where(own > 0, fewest + own - 1, -np.inf)
    return np.asarray(together >= layers.shape.blocks)


def _limits(layers: LayerTable, device: int, memory_bytes: float, enough: float) -> tuple[Array, Array]:
    """By blocks of a device, from the fewest on: the first number that run again with which it fits, and the
    last with which a step may take less than `enough` seconds."""
    setting, slots = layers.setting, range(device, layers.slots, layers.degrees.pipeline)
    fewest = [layers.fewest_blocks[slot] for slot in slots]
    rest = max(sum(fewest) - 1, 0)
    every = np.arange(layers.shape.blocks + 1)
    # With as many as can be, and not all.
    anew = layers.with_setting(replace(setting, recompute_blocks=max(layers.shape.blocks - 1, 1)))
    numbers = dict.fromkeys(layers.blocks, every)
    again = anew.least_blocks_again(numbers, device, memory_bytes)[sum(fewest) :]
    number = every[sum(fewest) :]
    with_none, each = _step_seconds(layers, device, slots, number)
    left = enough - with_none * (1 - _ROUNDING)
    left = left / each - rest if each > 0 else np.where(left >= 0, np.inf, -1.0)
    some_again = np.maximum(again - rest, 0.0)
    never = ~(left >= np.where(np.isfinite(again), some_again, np.inf))
    if not set(slots) & set(setting.block_slots(layers.slots)):
        never |= number > 0
    # As many as there are beside those of the other virtual stages, any number may run again.
    last = np.where(left >= number - rest, np.inf, np.floor(left * (1 + _ROUNDING)))
    return np.where(never, np.inf, np.ceil(again / setting.virtual_stages)), np.where(never, -1.0, last)


def _step_seconds(
    layers: LayerTable, device: int, slots: range, number: npt.NDArray[np.int64]
) -> tuple[Array, float]:
    """That a step takes at least with so many blocks on a device, were none of them to run again, and those
    that one more adds that does."""
    (kind,) = layers.blocks
    setting, stages, more = layers.setting, layers.degrees.pipeline, layers.least_block_seconds[1]
    many, block = setting.micro_batches, layers.block_seconds(kind, again=False)
    both = sum(map(layers.fixed_seconds, slots)) + number * block.both
    update = np.maximum(device_update_seconds(layers, {kind: number}, slots), layers.least_update_seconds)
    if setting.virtual_stages > 1:
        wait = least_wait(layers, device, block.both + more)
        return np.asarray(wait + many * both + update, dtype=np.float64), many * more
    parts = layers.fixed_parts(device)
    forward = sum(count * own.forward for count, own in parts) + number * block.forward
    enter, leave = layers.cut_seconds(device)
    ahead = min(stages - 1 - device, many - 1)
    less = enter + ahead * forward + (ahead + 1) * leave
    whole = layers.whole_seconds + 2 * sum(map(layers.transfer_seconds, range(stages - 1)))
    with_none = whole + (many - 1) * both + many * (enter + leave) - less + update
    return np.asarray(with_none, dtype=np.float64), float((many - 1) * more)
