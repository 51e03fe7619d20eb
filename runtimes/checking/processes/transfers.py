"""What a transfer between two neighbouring processes takes, measured as the check begins."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

import torch
import torch.distributed as dist

from ..job import LinkSeconds

REPEATS, WARM_UPS = 10, 3
ELEMENT = 4


def measured_links(sizes: Sequence[int], device: torch.device) -> LinkSeconds:
    """Medians over the pairs of neighbouring ranks, one pair after another. Every process calls it.

    Half of a round trip of as many bytes there and back.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    taken: dict[int, list[float]] = {size: [] for size in sizes}
    for first in range(world - 1):
        for size in sizes:
            if rank in (first, first + 1):
                seconds = _half_round_trip(size, 2 * first + 1 - rank, device, asks=rank == first)
                taken[size] += [seconds] if rank == first else []
        dist.barrier()
    everyone: list[dict[int, list[float]]] = [{}] * world
    dist.all_gather_object(everyone, taken)
    return LinkSeconds(
        sizes=list(sizes),
        seconds=[median(value for own in everyone for value in own[size]) for size in sizes],
    )


def _half_round_trip(size: int, other: int, device: torch.device, *, asks: bool) -> float:
    held = torch.zeros(max(size // ELEMENT, 1), device=device)
    taken = []
    for _ in range(WARM_UPS + REPEATS):
        start = time.perf_counter()
        for sends in (asks, not asks):
            if sends:
                dist.send(held, other)
            else:
                dist.recv(held, other)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append((time.perf_counter() - start) / 2)
    return median(taken[WARM_UPS:])
