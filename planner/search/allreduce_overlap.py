"""What of the all-reduce follows the last backward, for all stages of a chain at once.

The same as `cost_models.communication.exposed_all_reduce_seconds` for one stage. Buckets are filled from the
end of a stage towards its start, so those of stages with the same end are the same, but for the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...cost_models.communication import BUCKET_BYTES, FIRST_BUCKET_BYTES

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Buckets:
    """The buckets of all stages between `cut_points` (n + 1).

    `closed`: (layer, stage ends, bytes) of the buckets that become complete with a layer, from the last layer
    to the first; `left` (n + 1, n + 1): bytes of the bucket that stage [start, end] fills last, 0 where its
    first layer completed one; `left_layer`: the layer that it becomes complete with.
    """

    cut_points: tuple[int, ...]
    closed: tuple[tuple[int, Indices, Floats], ...]
    left: Floats
    left_layer: Indices

    def exposed(self, backward_seconds: Floats, reduce: Callable[[Floats], Floats]) -> Floats:
        """(n + 1, n + 1): seconds from the end of each stage's backward until its gradients are reduced.

        `backward_seconds` by layer; `reduce`: seconds of an all-reduce of so many bytes.
        """
        cut_points = np.array(self.cut_points)
        since = np.append(0.0, np.cumsum(backward_seconds))  # up to each layer
        end = np.zeros(len(cut_points))
        exposed = np.zeros_like(self.left)
        closings = list(self.closed)
        seconds = np.split(
            reduce(np.concatenate([np.zeros(0), *(sizes for _, _, sizes in closings)])),
            np.cumsum([len(sizes) for _, _, sizes in closings])[:-1],
        )
        last, step = reduce(self.left), 0
        for start in reversed(range(len(cut_points) - 1)):
            while step < len(closings) and closings[step][0] >= cut_points[start]:
                layer, ends, _ = closings[step]
                ready = since[cut_points[ends]] - since[layer]
                end[ends] = np.maximum(end[ends], ready) + seconds[step]
                step += 1
            ready = since[cut_points] - since[self.left_layer[start]]
            whole = np.where(self.left[start] > 0, np.maximum(end, ready) + last[start], end)
            exposed[start] = np.maximum(whole - (since[cut_points] - since[cut_points[start]]), 0.0)
        made: Floats = np.triu(exposed, 1)
        return made


def make_buckets(gradient_bytes: Floats, cut_points: Sequence[int]) -> Buckets:
    """The buckets as DistributedDataParallel makes them: see `communication.gradient_buckets`."""
    ends = np.array(cut_points)
    held, size = np.zeros(len(ends)), np.full(len(ends), float(FIRST_BUCKET_BYTES))
    last = np.zeros(len(ends), dtype=np.int64)
    left, left_layer = np.zeros((len(ends),) * 2), np.zeros((len(ends),) * 2, dtype=np.int64)
    closed, row_of = [], {layer: row for row, layer in enumerate(cut_points)}
    for layer in reversed(range(cut_points[-1])):
        if gradient_bytes[layer] > 0:
            inside = ends > layer
            held[inside] += gradient_bytes[layer]
            last[inside] = layer
            full = inside & (held >= size)
            if full.any():
                closed.append((layer, np.flatnonzero(full), held[full].copy()))
                held[full], size[full] = 0.0, float(BUCKET_BYTES)
        if layer in row_of:
            left[row_of[layer]], left_layer[row_of[layer]] = held, last
    return Buckets(tuple(cut_points), tuple(closed), left, left_layer)
