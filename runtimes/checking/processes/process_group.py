"""How the processes of a check find each other, the device of each, and how long their transfers take."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from ....profiler.torchrun_env import TorchrunEnv
from ..job import Job, LinkSeconds

LAST_SECONDS = 30
"""By which those that wait are more patient than their parent, who knows which of them hangs; without one,
than the process that hangs itself (see hang_watch.py)."""
REPEATS, WARM_UPS = 10, 3
"""Of each transfer."""
ELEMENT = 4


def take_device(job: Job, process: TorchrunEnv) -> torch.device:
    """This process's, made the current one."""
    if job.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", process.local_rank)
    torch.cuda.set_device(device)
    return device


def choose_backend(device: torch.device) -> str:
    """The backend of torch.distributed for a device."""
    return "nccl" if device.type == "cuda" else "gloo"


def choose_timeout(job: Job) -> timedelta:
    """The time that a process waits for another, which may begin later with what it then hangs in."""
    return timedelta(seconds=2 * job.timeout_seconds + LAST_SECONDS)


def new_control_group(backend: str, wait: timedelta) -> Any:
    """The group in which the processes tell each other what they found: NCCL would put it on the GPU."""
    return dist.new_group(backend="gloo", timeout=wait) if backend == "nccl" else None


def measure_links(sizes: Sequence[int], device: torch.device) -> LinkSeconds:
    """Medians over the pairs of neighbouring ranks, one pair after another. Every process calls it.

    Half of a round trip of as many bytes there and back.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    trips: dict[int, list[float]] = {size: [] for size in sizes}
    for first in range(world - 1):
        for size in sizes:
            if rank in (first, first + 1):
                seconds = _half_round_trip(size, 2 * first + 1 - rank, device, asks=rank == first)
                trips[size] += [seconds] if rank == first else []
        dist.barrier()
    everyone: list[dict[int, list[float]]] = [{}] * world
    dist.all_gather_object(everyone, trips)
    return LinkSeconds(
        sizes=list(sizes),
        seconds=[
            median(value for seconds_by_size in everyone for value in seconds_by_size[size]) for size in sizes
        ],
    )


def _half_round_trip(size: int, other: int, device: torch.device, *, asks: bool) -> float:
    buffer = torch.zeros(max(size // ELEMENT, 1), device=device)
    trips = []
    for _ in range(WARM_UPS + REPEATS):
        start = time.perf_counter()
        for sends in (asks, not asks):
            if sends:
                dist.send(buffer, other)
            else:
                dist.recv(buffer, other)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        trips.append((time.perf_counter() - start) / 2)
    return median(trips[WARM_UPS:])
