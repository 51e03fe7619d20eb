"""One process of a check: builds each case and runs it with the other processes.

Started with `-m` and a folder. If the user's torchrun started `pplan check`, that calls
`run_in_torchrun` itself.
"""

from __future__ import annotations

import gc
import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined,unused-ignore]  # public, not exported

from ....cost_models.errors import MachineError
from ....cost_models.runtime import find_runtime
from ....profiler.links import LinkBench
from ....profiler.local_machine import device_name
from ....profiler.torchrun_env import TorchrunEnv, read_torchrun_env
from ....profiler.user_model import ModelInput
from ...deepspeed import start as start_deepspeed
from ...documents import DeepspeedExport
from ..launching import end_with_parent
from ..records import (
    MEMORY_STEPS,
    Case,
    CaseResult,
    CheckMeasurements,
    Job,
    LinkSeconds,
    Losses,
    RunSeconds,
    StageSeconds,
)
from .checked_training import CheckedTraining
from .journal import RankJournal, describe_failure, hang_watch
from .trained_model import TrainingTarget, load_target, plain_losses, vary_samples, without_dropout

LAST_SECONDS = 30
"""By which those that wait are more patient than their parent, who knows which of them hangs; without one,
than the process that hangs itself (see journal.py)."""
TRIPS = 10
"""Of each transfer."""


def measure_links(sizes: Sequence[int], group: CheckGroup) -> LinkSeconds:
    """Medians over the pairs of neighbouring ranks, one pair after another. Every process calls it."""
    rank, pairs = dist.get_rank(), range(dist.get_world_size() - 1)
    bench = LinkBench(rank, group.device, None, TRIPS, group.job.timeout_seconds)
    everyone = group.gather([bench.transfers(first, first + 1, sizes) for first in pairs])
    by_size = zip(*(everyone[first][first] for first in pairs), strict=True)
    return LinkSeconds(sizes=list(sizes), seconds=[median(seconds) for seconds in by_size])


T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class CheckGroup:
    """The processes of a check, as one of them sees them.

    `talk`: the group in which they tell each other what they found; None for the default one.
    """

    job: Job
    device: torch.device
    journal: RankJournal
    talk: Any = None

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that reports."""
        return dist.get_rank() == 0

    def gather(self, own: T) -> list[T]:
        """Gathers a value of every process, by rank."""
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own, group=self.talk)
        return everyone

    def compute_on_last(self, compute: Callable[[], T]) -> T:
        """Computes on the last process; the others wait for the result."""
        objects: list[Any] = [None]
        last = dist.get_world_size() - 1
        if dist.get_rank() == last:
            objects = [compute()]
        dist.broadcast_object_list(objects, src=last, group=self.talk)
        value: T = objects[0]
        return value


class CaseRun:
    """One case. `compared`: steps whose losses are held against the plain model's."""

    def __init__(self, group: CheckGroup, case: Case, *, compared: int) -> None:
        self.group, self.job, self.case = group, group.job, case
        self.compared = 0 if case.waits is not None else compared

    def result(self) -> CaseResult:
        """Run it; the same in every process."""
        self._begin("building the model")
        target = load_target(self.job.model, self.case)
        samples = vary_samples(target.example.repeated(self.case.document.mini_batch))
        plain_losses_of_steps, reason = self._train_plain(target, samples)
        self._begin("building the pipeline")
        pipeline = CheckedTraining(self.case, target, self.group.device)
        losses = self._compare_losses(pipeline, samples, plain_losses_of_steps, reason)
        ran = self._run(pipeline, samples)
        pipeline.close()
        return CaseResult(name=self.case.name, ran=ran, losses=losses)

    def _begin(self, doing: str) -> None:
        self.group.journal.begin(f"{doing} ({self.case.name})")

    def _train_plain(self, target: TrainingTarget, samples: ModelInput) -> tuple[list[float] | None, str]:
        """The plain model's losses, or why they cannot be compared."""
        if not self.compared:
            return None, ""

        def train() -> tuple[list[float] | None, str]:
            self._begin("running the plain model")
            parts = self.case.micro_batches * self.case.replicas
            return plain_losses(target.layers, samples, target.loss, parts, self.compared)

        losses = self.group.compute_on_last(train)
        self.group.journal.add_steps(self.compared * self.job.processes)
        return losses

    def _by_stage(self, everyone: Sequence[dict[int, StageSeconds]]) -> list[StageSeconds]:
        """The slowest replica of every stage."""
        return [
            max((own[stage] for own in everyone if stage in own), key=lambda own: own.forward + own.backward)
            for stage in range(len(self.case.parts) - 1)
        ]

    def _compare_losses(
        self, pipeline: CheckedTraining, samples: ModelInput, plain: list[float] | None, reason: str
    ) -> Losses | None:
        """The losses of the first steps."""
        if not self.compared:
            return None
        losses = []
        for number in range(self.compared):
            self._begin(f"step {number + 1} of those compared")
            with without_dropout(pipeline.model):
                losses.append(float(pipeline.step(samples)))
            pipeline.update()
            self.group.journal.add_steps()
        return Losses(pipeline=losses, plain=plain, reason=reason)

    def _run(self, pipeline: CheckedTraining, samples: ModelInput) -> RunSeconds:
        """The steps on the clock, after those that only warm up, and those whose memory is measured."""
        pipeline.watch()
        seconds = []
        for number in range(self.job.warm_ups + self.job.steps):
            self._begin(f"step {number + 1}")
            if number == self.job.warm_ups:
                for stamps in pipeline.stamps:
                    stamps.forget()
            dist.barrier()
            start = time.perf_counter()
            pipeline.step(samples)
            for device in _gpus(pipeline.devices):
                torch.cuda.synchronize(device)
            seconds.append((start, time.perf_counter()))
            for stamps in pipeline.stamps:
                stamps.settle()
            pipeline.update()
            self.group.journal.add_steps()
        seconds_by_stage, peaks = pipeline.stage_seconds(), [0] * len(pipeline.devices)
        if self.job.measures_memory and self.case.waits is None:
            self._begin("measuring memory")
            peaks = pipeline.peak_bytes(samples, lambda: self._begin("measuring memory in a second step"))
            self.group.journal.add_steps(MEMORY_STEPS)
        return self._join(self.group.gather((seconds[self.job.warm_ups :], seconds_by_stage, peaks)))

    def _join(self, everyone: Sequence[Any]) -> RunSeconds:
        """Joins the measurements of all processes. A step lasts from the common start to the last process's
        end."""
        by_step = zip(*(seconds for seconds, _, _ in everyone), strict=True)
        peaks = [peak for _, _, process_peaks in everyone for peak in process_peaks]
        replicas = self.case.replicas
        return RunSeconds(
            stages=self._by_stage([stages for _, stages, _ in everyone]),
            step_seconds=[max(end - start for start, end in times) for times in by_step],
            peak_bytes=[max(peaks[i : i + replicas]) or None for i in range(0, len(peaks), replicas)],
        )


def _gpus(devices: Sequence[torch.device]) -> list[torch.device]:
    return [device for device in dict.fromkeys(devices) if device.type == "cuda"]


def run_job(job: Job, process: TorchrunEnv, journal: RankJournal) -> CheckMeasurements | None:
    """Runs the cases with the other processes; what was found, on rank 0, else None.

    `journal` is told what is being done. Raises PplanError; what the model raises is left as it is.
    """
    torch.set_num_threads(1)
    backend, group = _join(job, process, journal)
    links = None
    if job.link_sizes:
        journal.begin("measuring the links")
        links = measure_links(job.link_sizes, group)

    calibration = [CaseRun(group, case, compared=0).result() for case in job.calibration]
    results = [CaseRun(group, case, compared=job.compared_steps).result() for case in job.cases]
    _leave()
    if process.rank:
        return None
    return CheckMeasurements(
        backend=backend,
        device_name=device_name(group.device),
        cases=results,
        links=links,
        calibration=calibration,
    )


def _join(job: Job, process: TorchrunEnv, journal: RankJournal) -> tuple[str, CheckGroup]:
    """The backend, and the processes, which have found each other."""
    first = job.cases[0].document
    backend, device = "gloo", torch.device("cpu")
    is_one = find_runtime(first.runtime).one_process
    if is_one:
        device = torch.device(first.devices[0])
    elif job.device == "cuda":
        backend, device = "nccl", torch.device("cuda", process.local_rank)
        torch.cuda.set_device(device)
    journal.begin("meeting the other processes")
    # A process may begin later with what it then hangs in.
    wait = timedelta(seconds=2 * job.timeout_seconds + LAST_SECONDS)
    # A file, not a port: two checks that start at once could take the same one. torchrun names its own port.
    folder, size = journal.folder, process.world_size
    store = None if folder is None else FileStore(str(folder / "store"), size)
    dist.init_process_group(backend, store=store, rank=process.rank, world_size=size, timeout=wait)
    if first.runtime == DeepspeedExport.kind:
        start_deepspeed(device.type, wait)
    # What the processes find would go over the GPU with NCCL.
    talk = dist.new_group(backend="gloo", timeout=wait) if backend == "nccl" else None
    return "one process" if is_one else backend, CheckGroup(job, device, journal, talk)


def _leave() -> None:
    """Ends the process groups and their threads.

    DistributedDataParallel keeps its group alive in a circle of references. A thread of gloo that still runs
    when Python ends aborts the process where it lets go of a tensor (PyTorch issue 190489).
    """
    gc.collect()
    dist.destroy_process_group()


def main(arguments: Sequence[str]) -> int:
    """`FOLDER [NAME ...]`: of the job, of what is found, and of what is done meanwhile; and the names of a
    model and a loss that the user gave, without which no code but ours is imported."""
    folder = Path(arguments[0])
    process = read_torchrun_env(os.environ, "check", at_least=1)
    journal = RankJournal(folder, process.rank)
    end_with_parent(folder)
    job = Job.model_validate_json((folder / "job.json").read_text()).naming(arguments[1:])
    try:
        with hang_watch(journal, job.timeout_seconds):
            measurements = run_job(job, process, journal)
    except BaseException as error:
        journal.write_failure(describe_failure(error))
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

    Raises RankError in the process that fails and in those that lose it.
    """
    journal = RankJournal(None, process.rank)
    try:
        with hang_watch(journal, job.timeout_seconds):
            return run_job(job, process, journal)
    except Exception as error:
        failure = describe_failure(error)
        lost = "lost another " if failure["lost"] else ""
        raise RankError(
            f"check: rank {process.rank} {lost}{journal.while_doing}: {failure['what']}",
            failure["hint"] or _hint(failure),
            reports=process.local_rank == 0 or not lost,
        ) from error


class RankError(MachineError):
    """This process failed, or lost another, which torchrun names. `reports`: it reports that for its node."""

    def __init__(self, what: str, hint: str, *, reports: bool) -> None:
        super().__init__(what, hint)
        self.reports = reports


def _hint(failure: Mapping[str, object]) -> str:
    if re.search("EADDRINUSE|in use", str(failure["what"])):
        return "Another program has this port: name another with torchrun --master-port."
    if failure["lost"]:
        return "See what the other processes printed, and what torchrun says of them."
    return "Run it again as pplan --debug check to see more."
