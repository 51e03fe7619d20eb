"""A check of torchgpipe, FairScale or DeepSpeed in this process."""

from __future__ import annotations

import torch

from ....profiler.machine import device_name
from ....profiler.torchrun_env import Launched
from ...formats.deepspeed_export import DeepspeedExport
from ..job import Job, Measured
from .failure import Journal
from .meeting import device_of


def run_runtime_job(job: Job, process: Launched, journal: Journal) -> Measured | None:
    """Runs the cases; what was found, on rank 0, else None."""
    first = job.runtime_cases[0].document
    if isinstance(first, DeepspeedExport):
        from .deepspeed_run import run_deepspeed

        device = device_of(job, process)
        backend, cases = run_deepspeed(job, device, journal)
    else:
        from .pipe_run import PipeRun

        device = torch.device(first.devices[0])
        backend, cases = "one process", [PipeRun(job, case, journal).result() for case in job.runtime_cases]
    if process.rank:
        return None
    return Measured(backend=backend, device_name=device_name(device), cases=cases)
