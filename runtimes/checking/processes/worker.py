"""One process of a check: runs its cases together with the others.

Started by torchrun's launcher (`-m`, with a folder). Where a torchrun of the user's started `pplan check`,
that calls `run_job` itself.
"""

from __future__ import annotations

import gc
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from ....cost_models.errors import MachineError
from ....profiler.local_machine import device_name
from ....profiler.torchrun_env import TorchrunEnv, read_torchrun_env
from ...deepspeed import start as start_deepspeed
from ...documents import PipeExport
from ..calibration import fit_corrections
from ..deaths import advice, describe_exit
from ..job import Case, CaseResult, CheckMeasurements, Corrections, Job, RuntimeCase
from .case_run import CaseRun, CheckGroup
from .deepspeed_adapter import DeepspeedAdapter
from .hang_watch import HangWatch, Siblings
from .pipe_adapter import PipeAdapter
from .pipeline_adapter import PipelineAdapter
from .process_group import (
    choose_backend,
    choose_timeout,
    measure_links,
    new_control_group,
    take_device,
)
from .rank_journal import RankJournal, describe_failure
from .torch_adapter import TorchAdapter
from .training_target import TrainingTarget

DEATH_SECONDS = 1.0
"""How long to look for the death of a process that was lost: its sockets go first."""


def run_job(job: Job, process: TorchrunEnv, journal: RankJournal) -> CheckMeasurements | None:
    """Runs the cases with the other processes; what was found, on rank 0, else None.

    `journal` is told what is being done. Raises PplanError; what the model raises is left as it is.
    """
    torch.set_num_threads(1)
    backend, group = _join(job, process, journal)
    links = None
    if job.link_sizes:
        journal.begin("measuring the links")
        links = measure_links(job.link_sizes, group.device)

    def run(case: Case | RuntimeCase, corrections: Corrections | None, compared: int) -> CaseResult:
        build = partial(_build_adapter, group.device, corrections)
        return CaseRun(group, case, build, compared=compared).result()

    calibration = [run(case, None, 0) for case in job.calibration]
    corrections = job.corrections
    if calibration:
        # Every process has the same figures, and so fits the same.
        corrections = fit_corrections(job.calibration, calibration, links)
    cases: list[Case | RuntimeCase] = [*job.cases, *job.runtime_cases]
    results = [run(case, corrections, job.compared_steps) for case in cases]
    _leave()
    if process.rank:
        return None
    return CheckMeasurements(
        backend=backend,
        device_name=device_name(group.device),
        cases=results,
        links=links,
        corrections=corrections,
        calibration=calibration,
    )


def _join(job: Job, process: TorchrunEnv, journal: RankJournal) -> tuple[str, CheckGroup]:
    """The backend, and the processes, which have found each other."""
    first = job.runtime_cases[0].document if job.runtime_cases else None
    if isinstance(first, PipeExport):
        return "one process", CheckGroup(job, torch.device(first.devices[0]), journal)
    device = take_device(job, process)
    journal.begin("meeting the other processes")
    backend, wait = choose_backend(device), choose_timeout(job)
    if first is not None:
        start_deepspeed(device.type, wait)
    else:
        dist.init_process_group(backend, timeout=wait)
    return backend, CheckGroup(job, device, journal, new_control_group(backend, wait))


def _leave() -> None:
    """Ends the process groups and their threads.

    DistributedDataParallel keeps its group alive in a circle of references. A thread of gloo that still runs
    when Python ends aborts the process where it lets go of a tensor (PyTorch issue 190489).
    """
    if dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()


def _build_adapter(
    device: torch.device,
    corrections: Corrections | None,
    case: Case | RuntimeCase,
    target: TrainingTarget,
) -> PipelineAdapter:
    if isinstance(case, Case):
        return TorchAdapter(case, target, device, corrections)
    if isinstance(case.document, PipeExport):
        return PipeAdapter(case, target)
    return DeepspeedAdapter(case, target, device)


def main(arguments: Sequence[str]) -> int:
    """`FOLDER [NAME ...]`: of the job, of what is found, and of what is done meanwhile; and the names of a
    model and a loss that the user gave, without which no code but ours is imported."""
    folder = Path(arguments[0])
    process = read_torchrun_env(os.environ, "check", at_least=1)
    journal = RankJournal(folder, process.rank)
    # torchgpipe and FairScale, in one process, compute in threads of theirs.
    journal.listen(all_threads=process.world_size == 1)
    job = Job.model_validate_json((folder / "job.json").read_text()).naming(arguments[1:])
    try:
        measurements = run_job(job, process, journal)
    except BaseException as error:
        journal.write_failure(error)
        # Taking NCCL or gloo down would wait for the others.
        sys.stderr.flush()
        os._exit(1)
    if measurements is not None:
        journal.write("found.json", json.loads(measurements.model_dump_json()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))


def run_in_torchrun(job: Job, process: TorchrunEnv) -> CheckMeasurements | None:
    """Runs the job as a process of torchrun: returns the measurements in the first process, None in the
    others.

    Raises RankFailedError in the process that fails, LostRankError in those that lose it.
    """
    journal, siblings = RankJournal(None, process.rank), Siblings(process.rank)
    try:
        with HangWatch(journal, job.timeout_seconds):
            return run_job(job, process, journal)
    except Exception as error:
        failure = describe_failure(error)
        doing = f"while {journal.doing}" if journal.doing else "before it began"
        dead = siblings.find_dead(DEATH_SECONDS if failure["lost"] else 0.0)
        is_killed = dead is not None and (dead[1] or 0) < 0
        if not (failure["lost"] or is_killed):
            hint = failure["hint"] or _hint(failure)
            raise RankFailedError(f"check: rank {process.rank} {doing}: {failure['what']}", hint) from error
        if dead is None:
            what = f"check: rank {process.rank} lost another {doing}: {failure['what']}"
            raise LostRankError(what, _hint(failure), tells=process.local_rank == 0) from error
        rank, code = dead
        how = "see what it printed" if code is None else describe_exit(code)
        what = f"check: rank {rank} died, rank {process.rank} lost it {doing}: {how}"
        hint = advice(code or 0) or _hint(failure)
        raise LostRankError(what, hint, tells=siblings.is_first_without(rank)) from error


class RankFailedError(MachineError):
    """This process failed."""


class LostRankError(MachineError):
    """Another process has gone, or does not answer. `tells`: this process says so for its node."""

    def __init__(self, what: str, hint: str, *, tells: bool) -> None:
        super().__init__(what, hint)
        self.tells = tells


def _hint(failure: Mapping[str, object]) -> str:
    if re.search("EADDRINUSE|in use", str(failure["what"])):
        return "Another program has this port: name another with torchrun --master-port."
    if failure["lost"]:
        return "See what the other processes printed, and what torchrun says of them."
    return "Run it again as pplan --debug check to see more."
