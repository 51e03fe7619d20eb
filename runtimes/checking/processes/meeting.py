"""How the processes of a check find each other, and the device of each."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ....profiler.torchrun_env import Launched
from ..job import Job
from .failure import Journal

LAST_SECONDS = 30
"""By which the processes are more patient than their parent, who knows which of them hangs."""


def device_of(job: Job, process: Launched) -> torch.device:
    """This process's, made the current one."""
    if job.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", process.local_rank)
    torch.cuda.set_device(device)
    return device


def backend_of(device: torch.device) -> str:
    """Of torch.distributed."""
    return "nccl" if device.type == "cuda" else "gloo"


def patience(job: Job, journal: Journal) -> timedelta:
    """How long a process waits for another."""
    alone = journal.folder is None
    return timedelta(seconds=job.timeout_seconds if alone else 2 * job.timeout_seconds + LAST_SECONDS)


def talk_group(backend: str, wait: timedelta) -> Any:
    """The group in which the processes tell each other what they found: NCCL would put it on the GPU."""
    return dist.new_group(backend="gloo", timeout=wait) if backend == "nccl" else None
