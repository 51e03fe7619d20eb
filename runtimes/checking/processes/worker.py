"""One process of a check: runs its cases together with the others.

Started by torchrun's launcher (`-m`, with a folder). Where a torchrun of the user's started `pplan check`,
that calls `run_job` itself.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from ....profiler.machine import device_name
from ....profiler.torchrun_env import Launched, launched
from ..calibration import fitted
from ..job import Case, CaseResult, Corrections, Job, Measured
from .case_run import CaseRun, Together
from .failure import Journal
from .meeting import backend_of, device_of, patience, talk_group
from .runtime_job import run_runtime_job
from .transfers import measured_links


def run_job(job: Job, process: Launched, journal: Journal) -> Measured | None:
    """Runs the cases with the other processes; what was found, on rank 0, else None.

    `journal` is told what is being done. Raises PplanError; what the model raises is left as it is.
    """
    torch.set_num_threads(1)
    if job.runtime_cases:
        return run_runtime_job(job, process, journal)
    journal.begin("meeting the other processes")
    device = device_of(job, process)
    backend, wait = backend_of(device), patience(job, journal)
    dist.init_process_group(backend, timeout=wait)
    talk = talk_group(backend, wait)
    links = None
    if job.link_sizes:
        journal.begin("measuring the links")
        links = measured_links(job.link_sizes, device)
    together = Together(job, device, talk, journal)

    def run(case: Case, corrections: Corrections | None, compared: int) -> CaseResult:
        return CaseRun(together, case, corrections, compared).result()

    tried = [run(case, None, 0) for case in job.calibration]
    corrections = job.corrections
    if tried:
        # Every process has the same figures, and so fits the same.
        corrections = fitted(job.calibration, tried, links)
    results = [run(case, corrections, job.compared_steps) for case in job.cases]
    dist.destroy_process_group()
    if process.rank:
        return None
    return Measured(
        backend=backend,
        device_name=device_name(device),
        cases=results,
        links=links,
        corrections=corrections,
        calibration=tried,
    )


def main(arguments: Sequence[str]) -> int:
    """`FOLDER [NAME ...]`: of the job, of what is found, and of what is done meanwhile; and the names of a
    model and a loss that the user gave, without which no code but ours is imported."""
    folder = Path(arguments[0])
    process = launched(os.environ, "check", at_least=1)
    journal = Journal(folder, process.rank)
    # torchgpipe and FairScale, in one process, compute in threads of theirs.
    journal.listen(all_threads=process.world_size == 1)
    job = Job.model_validate_json((folder / "job.json").read_text()).naming(arguments[1:])
    try:
        found = run_job(job, process, journal)
    except BaseException as error:
        journal.failed(error)
        # Taking NCCL or gloo down would wait for the others.
        sys.stderr.flush()
        os._exit(1)
    if found is not None:
        journal.write("found.json", json.loads(found.model_dump_json()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
