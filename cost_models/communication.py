"""Seconds of transfers, and of gradients that are reduced bucket by bucket during the backward pass.

`transfers` and `all_reduces` are tables to judge a topology by: what typical ones take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .collectives import Algorithm, all_reduce_seconds, all_reduce_seconds_by_algorithm
from .hardware import Amount, Link
from .topology import Topology

__all__ = [
    "BUCKET_BYTES",
    "FIRST_BUCKET_BYTES",
    "MIB",
    "all_reduce_seconds",
    "bucketed_all_reduce_end",
    "exposed_all_reduce_seconds",
    "exposed_all_reduces",
    "gradient_buckets",
    "point_to_point_seconds",
]

MIB = 2**20
FIRST_BUCKET_BYTES = 1 * MIB
"""torch.distributed's `_DEFAULT_FIRST_BUCKET_BYTES`: a small bucket first, so that reducing starts early."""
BUCKET_BYTES = 25 * MIB
"""DistributedDataParallel's default `bucket_cap_mb`."""

Values = Sequence[float] | npt.NDArray[np.float64]


def point_to_point_seconds(link: Link, bytes: Amount) -> Amount:
    """Seconds of one transfer; element by element for an array of sizes."""
    return link.seconds(bytes)


def gradient_buckets(parameter_bytes: Values) -> list[tuple[int, int]]:
    """Buckets of gradients as DistributedDataParallel makes them: ranges [start, stop) of the parameters.

    `parameter_bytes` stands in the order in which gradients become ready, by which DDP regroups after its
    first step. A bucket takes gradients until it holds at least its size, so that the last one may exceed
    it, by any amount: a parameter is never split. The first bucket is small, the last one has what remains.
    """
    buckets: list[tuple[int, int]] = []
    start, bytes_so_far, size = 0, 0.0, float(FIRST_BUCKET_BYTES)
    for index, own in enumerate(parameter_bytes):
        bytes_so_far += own
        if bytes_so_far >= size:
            buckets.append((start, index + 1))
            start, bytes_so_far, size = index + 1, 0.0, BUCKET_BYTES
    if bytes_so_far > 0:
        buckets.append((start, len(parameter_bytes)))
    return buckets


def bucketed_all_reduce_end(
    ready_seconds: Values,
    bucket_bytes: Values,
    topology: Topology,
    devices: Sequence[int],
) -> float:
    """When the last bucket is reduced, where bucket k is complete at `ready_seconds[k]`; 0 without buckets.

    Buckets are reduced one after another, in order (Li et al., PyTorch Distributed: Experiences on
    Accelerating Data Parallel Training, VLDB 2020, section 3.2.3).
    """
    end = 0.0
    for ready, size in zip(ready_seconds, bucket_bytes, strict=True):
        end = max(end, float(ready)) + all_reduce_seconds(topology, devices, float(size))
    return end


def exposed_all_reduce_seconds(
    layer_backward_seconds: Values,
    layer_parameter_bytes: Values,
    topology: Topology,
    devices: Sequence[int],
) -> float:
    """Seconds from the end of the backward pass until the gradients of all replicas are reduced.

    Figures of layers stand in forward order; backward runs from the last to the first, and the gradients of a
    layer, as large as its parameters and taken as one, are ready when its backward ends. Reducing overlaps
    the backward that is left, as in DistributedDataParallel, and slows it nowhere.
    """
    backward = np.asarray(layer_backward_seconds, dtype=np.float64)[::-1]
    gradients = np.asarray(layer_parameter_bytes, dtype=np.float64)[::-1]
    if len(devices) == 1 or not gradients.any():
        return 0.0
    done = np.cumsum(backward)
    last, sizes = _bucket_ends(gradients)
    end = bucketed_all_reduce_end(done[last], sizes, topology, devices)
    return max(0.0, end - float(done[-1]))


def exposed_all_reduces(
    layer_backward_seconds: npt.NDArray[np.float64],
    layer_parameter_bytes: Values,
    topology: Topology,
    devices: Sequence[int],
) -> npt.NDArray[np.float64]:
    """(many,): `exposed_all_reduce_seconds` for many backward passes of the same layers, (many, layers)."""
    gradients = np.asarray(layer_parameter_bytes, dtype=np.float64)[::-1]
    end = np.zeros(len(layer_backward_seconds))
    if len(devices) == 1 or not gradients.any():
        return end
    done = np.cumsum(layer_backward_seconds[:, ::-1], axis=1)
    for layer, size in zip(*_bucket_ends(gradients), strict=True):
        end = np.maximum(end, done[:, layer]) + all_reduce_seconds(topology, devices, size)
    exposed: npt.NDArray[np.float64] = np.maximum(end - done[:, -1], 0.0)
    return exposed


def _bucket_ends(gradients: npt.NDArray[np.float64]) -> tuple[list[int], list[float]]:
    """By bucket the index of its last gradient, in the order in which they become ready, and its bytes."""
    buckets = gradient_buckets(gradients)
    # A bucket is complete with its last gradient; layers without parameters add nothing to wait for.
    last = [int(start + np.flatnonzero(gradients[start:stop])[-1]) for start, stop in buckets]
    return last, [float(gradients[start:stop].sum()) for start, stop in buckets]


EXAMPLE_BYTES = (10**6, 10**9)
"""Bytes: one that latency decides, and one that bandwidth decides."""


@dataclass(frozen=True)
class TransferTime:
    """One transfer between two devices that only `level` joins."""

    level: str
    bytes: int
    seconds: float


@dataclass(frozen=True)
class AllReduceTime:
    """An all-reduce over the first `gpus` devices by every algorithm that can, and the `best` of them."""

    over: str
    gpus: int
    bytes: int
    best: Algorithm
    seconds: dict[str, float]


def list_transfer_times(topology: Topology) -> list[TransferTime]:
    """Of both sizes, at every level from the inside, also where the devices do not reach it."""
    return [
        TransferTime(level.name, size, float(level.link.seconds(float(size))))
        for level in topology.levels
        for size in EXAMPLE_BYTES
    ]


def list_all_reduce_times(topology: Topology) -> list[AllReduceTime]:
    """Of both sizes, over a node and over all devices where these are more; none for one device."""
    node = min(topology.gpus_per_node, topology.gpus)
    groups = {f"a node ({node} GPUs)": node, f"all {topology.gpus} GPUs": topology.gpus}
    if node == topology.gpus:
        groups = {f"all {topology.gpus} GPUs": topology.gpus}
    return [
        _all_reduce(topology, over, gpus, size)
        for over, gpus in groups.items()
        if gpus > 1
        for size in EXAMPLE_BYTES
    ]


def _all_reduce(topology: Topology, over: str, gpus: int, size: int) -> AllReduceTime:
    each = all_reduce_seconds_by_algorithm(topology, range(gpus), float(size))
    seconds: dict[str, float] = {name: float(own) for name, own in each.items()}
    return AllReduceTime(over, gpus, size, min(each, key=each.__getitem__), seconds)
