"""Weights that move between devices when one plan replaces another.

A device keeps the weights of the layers that it has under both plans. Stages are runs of layers, and the
overlap of intervals has the Monge property: exchanging the order of two old and two new stages never
increases what is shared. So a matching in the order of devices and stages keeps the most, and a dynamic
programme finds it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ..cost_models.topology import Topology
from .candidate import Proposal
from .stage_table import Floats

Layers = tuple[int, int]
"""First layer, and the layer after the last."""


@dataclass(frozen=True)
class WeightMove:
    """Weights of the layers `first_layer` to `last_layer` that device `receiver` gets from `sender`.

    `sender` is None for a checkpoint, if no remaining device holds them.
    """

    sender: int | None
    receiver: int
    first_layer: int
    last_layer: int
    bytes: int


def layers_by_device(proposal: Proposal) -> dict[int, Layers]:
    """Return the layers of each rank."""
    stages = zip(proposal.bounds, proposal.devices, strict=True)
    return {rank: bounds for bounds, devices in stages for rank in devices}


def count_moved_bytes(before: Mapping[int, Layers], proposal: Proposal, weights: Floats) -> float:
    """Return the bytes of weights that devices must receive.

    Args:
        before: Layers that each device holds.
        proposal: The new plan.
        weights: (layers,) bytes.
    """
    return sum(
        float(weights[first:end].sum()) - _overlap(weights, before.get(rank), (first, end))
        for rank, (first, end) in layers_by_device(proposal).items()
    )


def _overlap(weights: Floats, one: Layers | None, other: Layers) -> float:
    """Return the bytes of the layers in both runs."""
    if one is None:
        return 0.0
    first, end = max(one[0], other[0]), min(one[1], other[1])
    return float(weights[first:end].sum()) if first < end else 0.0


def assign_devices(
    before: Mapping[int, Layers],
    ranks: Sequence[int],
    bounds: Sequence[Layers],
    replicas: Sequence[int],
    weights: Floats,
) -> tuple[tuple[int, ...], ...]:
    """Return the devices of the stages that receive the fewest bytes.

    Args:
        before: Layers that each device holds.
        ranks: Available devices.
        bounds: Layers of the stages.
        replicas: Number of devices by stage.
        weights: (layers,) bytes.
    """
    owners = sorted((rank for rank in ranks if rank in before), key=lambda rank: (before[rank], rank))
    slots = [stage for stage, count in enumerate(replicas) for _ in range(count)]
    best = np.zeros((len(owners) + 1, len(slots) + 1))
    shared = np.array([[_overlap(weights, before[rank], layers) for layers in bounds] for rank in owners])
    for i in range(len(owners)):
        most = np.maximum(best[i, 1:], best[i, :-1] + shared[i, slots])
        best[i + 1, 1:] = np.maximum.accumulate(most)
    devices: list[list[int]] = [[] for _ in replicas]
    i, j, free = len(owners), len(slots), set(ranks)
    while i and j:
        if best[i, j] == best[i - 1, j]:
            i -= 1
        elif best[i, j] == best[i, j - 1]:
            j -= 1
        else:
            i, j = i - 1, j - 1
            devices[slots[j]].append(owners[i])
            free.discard(owners[i])
    rest = iter(sorted(free))
    for stage, count in enumerate(replicas):
        devices[stage] += [next(rest) for _ in range(count - len(devices[stage]))]
    return tuple(tuple(sorted(stage_ranks)) for stage_ranks in devices)


def list_moves(
    topology: Topology,
    before: Mapping[int, Layers],
    ranks: Sequence[int],
    proposal: Proposal,
    weights: Floats,
) -> tuple[tuple[WeightMove, ...], float]:
    """Return what every device receives, and the seconds until the last one has it.

    Each run of layers comes from the device among `ranks` whose port is free first. Transfers through one
    port share it. Reading a checkpoint is not counted.

    Args:
        topology: Devices and links.
        before: Layers that each device holds.
        ranks: Devices that may send.
        proposal: The new plan.
        weights: (layers,) bytes.
    """
    loads, moves = defaultdict[object, float](float), []
    edges = sorted({0, len(weights), *(edge for layers in before.values() for edge in layers)})
    latency = 0.0
    for receiver, (first, end) in sorted(layers_by_device(proposal).items()):
        cuts = sorted({first, end, *(edge for edge in edges if first < edge < end)})
        for low, high in pairwise(cuts):
            bytes = float(weights[low:high].sum())
            if _has(before.get(receiver), low, high) or not bytes:
                continue
            senders = [rank for rank in ranks if _has(before.get(rank), low, high)]
            if not senders:
                moves.append(WeightMove(None, receiver, low, high - 1, round(bytes)))
                continue

            def end_of_transfer(sender: int, receiver: int = receiver, bytes: float = bytes) -> float:
                seconds = bytes / topology.link(sender, receiver).bandwidth_bytes_per_second
                return max(loads[port] + seconds for port in topology.ports(sender, receiver))

            sender = min(senders, key=end_of_transfer)
            link = topology.link(sender, receiver)
            latency = max(latency, link.latency_seconds)
            for port in topology.ports(sender, receiver):
                loads[port] += bytes / link.bandwidth_bytes_per_second
            moves.append(WeightMove(sender, receiver, low, high - 1, round(bytes)))
    return tuple(moves), max(loads.values(), default=0.0) + latency


def _has(layers: Layers | None, first: int, end: int) -> bool:
    return layers is not None and layers[0] <= first and end <= layers[1]
