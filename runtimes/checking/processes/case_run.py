"""One case of a check in this process, whatever runtime runs it: built, measured alone, predicted, run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ....profiler.user_model.loaded_model import ModelInput
from ..job import Case, CasePrediction, CaseResult, Job, Losses, RunSeconds, RuntimeCase, StageSeconds
from .pipeline_adapter import PipelineAdapter
from .plain_model import plain_losses, vary_samples, without_dropout
from .rank_journal import RankJournal
from .training_target import TrainingTarget, load_target

T = TypeVar("T")
Build = Callable[[Case | RuntimeCase, TrainingTarget], PipelineAdapter]


@dataclass(frozen=True, eq=False)
class CheckGroup:
    """The processes of a check, as one of them sees them; one alone needs no torch.distributed.

    `talk`: the group in which they tell each other what they found; None for the default one.
    """

    job: Job
    device: torch.device
    journal: RankJournal
    talk: Any = None

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that reports."""
        return not dist.is_initialized() or dist.get_rank() == 0

    def gather(self, own: T) -> list[T]:
        """Gathers a value of every process, by rank."""
        if not dist.is_initialized():
            return [own]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own, group=self.talk)
        return everyone

    def compute_on_last(self, compute: Callable[[], T]) -> T:
        """Computes on the last process; the others wait for the result."""
        if not dist.is_initialized():
            return compute()
        objects: list[Any] = [None]
        last = dist.get_world_size() - 1
        if dist.get_rank() == last:
            objects = [compute()]
        dist.broadcast_object_list(objects, src=last, group=self.talk)
        value: T = objects[0]
        return value

    def wait(self) -> None:
        """Waits until all processes are here."""
        if dist.is_initialized():
            dist.barrier()


class CaseRun:
    """One case. `compared`: steps whose losses are held against the plain model's."""

    def __init__(self, group: CheckGroup, case: Case | RuntimeCase, build: Build, *, compared: int) -> None:
        self.group, self.job, self.case, self.build = group, group.job, case, build
        self.compared = 0 if isinstance(case, Case) and case.waits is not None else compared

    def result(self) -> CaseResult:
        """Predicts, then runs; the same in every process."""
        self._begin("building the model")
        target = load_target(self.job.model, self.case)
        samples = vary_samples(target.example.repeated(self.case.document.mini_batch))
        plain_losses_of_steps, reason = self._train_plain(target, samples)
        self._begin("building the pipeline")
        pipeline = self.build(self.case, target)
        self._begin("measuring the stages alone")
        prediction = self._predict(pipeline)
        losses = self._compare_losses(pipeline, samples, plain_losses_of_steps, reason)
        ran = self._run(pipeline, samples)
        pipeline.close()
        return CaseResult(name=self.case.name, predicted=prediction, ran=ran, losses=losses)

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

    def _predict(self, pipeline: PipelineAdapter) -> CasePrediction:
        """Predicts the case from its stages measured alone."""
        self.group.wait()
        prediction = pipeline.predict(self._by_stage(self.group.gather(pipeline.measure_stages())))
        if self.group.is_first:
            self.group.journal.write_prediction(self.case.name, prediction)
        return prediction

    def _by_stage(self, everyone: Sequence[dict[int, StageSeconds]]) -> list[StageSeconds]:
        """The slowest replica of every stage."""
        return [
            max((own[stage] for own in everyone if stage in own), key=lambda own: own.forward + own.backward)
            for stage in range(len(self.case.parts) - 1)
        ]

    def _compare_losses(
        self, pipeline: PipelineAdapter, samples: ModelInput, plain: list[float] | None, reason: str
    ) -> Losses | None:
        """The losses of the first steps."""
        if not self.compared:
            return None
        losses = []
        for number in range(self.compared):
            self._begin(f"step {number + 1} of those compared")
            with without_dropout(pipeline.model):
                own_losses = [float(loss) for loss in pipeline.step(pipeline.feed(samples))]
            pipeline.update()
            all_losses = [loss for process_losses in self.group.gather(own_losses) for loss in process_losses]
            losses.append(sum(all_losses) / max(len(all_losses), 1))
            self.group.journal.add_steps()
        return Losses(pipeline=losses, plain=plain, reason=reason)

    def _run(self, pipeline: PipelineAdapter, samples: ModelInput) -> RunSeconds:
        """The steps on the clock, after those that only warm up."""
        pipeline.watch()
        seconds = []
        for number in range(self.job.warm_ups + self.job.steps):
            self._begin(f"step {number + 1}")
            if number == self.job.warm_ups:
                _forget_stamps(pipeline)
            batch = pipeline.feed(samples)
            self.group.wait()
            start = time.perf_counter()
            pipeline.step(batch)
            for device in _gpus(pipeline.devices):
                torch.cuda.synchronize(device)
            seconds.append((start, time.perf_counter()))
            for stamps in pipeline.stamps:
                stamps.settle()
            pipeline.update()
            self.group.journal.add_steps()
        results = seconds[self.job.warm_ups :], pipeline.stage_seconds(), _peaks(pipeline.devices)
        return self._join(self.group.gather(results))

    def _join(self, everyone: Sequence[Any]) -> RunSeconds:
        """Joins the measurements of all processes. A step lasts from the common start to the last process's
        end."""
        by_step = zip(*(seconds for seconds, _, _ in everyone), strict=True)
        peaks = [peak for _, _, process_peaks in everyone for peak in process_peaks]
        replicas = self.case.replicas
        return RunSeconds(
            stages=self._by_stage([stages for _, stages, _ in everyone]),
            step_seconds=[max(end - start for start, end in times) for times in by_step],
            peak_bytes=[_most(peaks[i : i + replicas]) for i in range(0, len(peaks), replicas)],
        )


def _forget_stamps(pipeline: PipelineAdapter) -> None:
    """Drops stamps and memory peaks so far, those of warm-ups."""
    for stamps in pipeline.stamps:
        stamps.forget()
    for device in _gpus(pipeline.devices):
        torch.cuda.reset_peak_memory_stats(device)


def _peaks(devices: Sequence[torch.device]) -> list[int | None]:
    return [torch.cuda.max_memory_allocated(one) if one.type == "cuda" else None for one in devices]


def _most(peaks: Sequence[int | None]) -> int | None:
    measured_peaks = [peak for peak in peaks if peak is not None]
    return max(measured_peaks) if len(measured_peaks) == len(peaks) else None


def _gpus(devices: Sequence[torch.device]) -> list[torch.device]:
    return [device for device in dict.fromkeys(devices) if device.type == "cuda"]
