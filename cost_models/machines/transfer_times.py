"""What typical transfers and all-reduces of a topology take: a table to judge it by."""

from __future__ import annotations

from dataclasses import dataclass

from ..collectives import Algorithm, all_reduce_seconds, best_algorithm, is_even
from ..topology import Topology

SIZES = (10**6, 10**9)
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


def transfers(topology: Topology) -> list[TransferTime]:
    """Of both sizes, at every level from the inside, also where the devices do not reach it."""
    return [
        TransferTime(level.name, size, float(level.link.seconds(float(size))))
        for level in topology.levels
        for size in SIZES
    ]


def all_reduces(topology: Topology) -> list[AllReduceTime]:
    """Of both sizes, over a node and over all devices where these are more; none for one device."""
    node = min(topology.gpus_per_node, topology.gpus)
    groups = {f"a node ({node} GPUs)": node, f"all {topology.gpus} GPUs": topology.gpus}
    if node == topology.gpus:
        groups = {f"all {topology.gpus} GPUs": topology.gpus}
    return [
        _all_reduce(topology, over, gpus, size) for over, gpus in groups.items() if gpus > 1 for size in SIZES
    ]


def _all_reduce(topology: Topology, over: str, gpus: int, size: int) -> AllReduceTime:
    ways: list[Algorithm] = ["ring", "tree"]
    if is_even(topology, range(gpus)):
        ways.append("hierarchical")
    seconds: dict[str, float] = {
        way: float(all_reduce_seconds(topology, range(gpus), float(size), way)) for way in ways
    }
    return AllReduceTime(over, gpus, size, best_algorithm(topology, range(gpus), float(size)), seconds)
