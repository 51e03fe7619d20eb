"""One case of torchgpipe or FairScale: one process for all stages. Built, measured alone, predicted, run."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ....profiler.user_model.loaded_model import ModelInput
from ... import fairscale, torchgpipe
from ...formats.pipe_export import FairscaleExport
from ..job import CaseResult, Job, Losses, Predicted, Ran, RuntimeCase, StageSeconds
from ..runtime_prediction import predicted_seconds, recomputed
from .alone import measured_alone
from .failure import Journal
from .numerics import descend, plain_losses, varied, without_dropout
from .pipe_stamps import StageStamps
from .subject import Subject, named_subject


class PipeRun:
    """One case, in the one process there is."""

    def __init__(self, job: Job, case: RuntimeCase, journal: Journal) -> None:
        self.job, self.case, self.journal = job, case, journal

    def result(self) -> CaseResult:
        """Predicts, then runs. Raises ValueError without a model."""
        case = self.case
        self._begin("building the model")
        if self.job.model is None:
            raise ValueError(f"{case.name}: {case.document.runtime} runs a model, no stages that wait")
        subject = named_subject(self.job.model)
        samples = varied(subject.example.repeated(case.document.mini_batch))
        plain, reason = self._plain(subject, samples)
        self._begin("building the pipeline")
        threads = threading.enumerate()
        pipe = _built(case, subject)
        devices = [torch.device(device) for device in pipe.devices]
        self._begin("measuring the stages alone")
        predicted = self._predicted(pipe, devices, subject)
        self.journal.predicted(case.name, predicted)
        losses = self._compared(pipe, devices, subject, samples, plain, reason)
        ran = self._ran(pipe, devices, subject, samples)
        del pipe
        _end_threads(threads)
        return CaseResult(name=case.name, predicted=predicted, ran=ran, losses=losses)

    def _begin(self, doing: str) -> None:
        self.journal.begin(f"{doing} ({self.case.name})")

    def _plain(self, subject: Subject, samples: ModelInput) -> tuple[list[float] | None, str]:
        steps = self.job.compared_steps
        if not steps:
            return None, ""
        self._begin("running the plain model")
        return plain_losses(subject.layers, samples, subject.loss, self.case.micro_batches, steps)

    def _predicted(self, pipe: Any, devices: Sequence[torch.device], subject: Subject) -> Predicted:
        """Each stage is fed what the one before makes of a micro-batch. The stages as they are told have in
        their backward what it recomputes, as in the steps."""
        given = subject.example.repeated(self.case.document.micro_batch_size).tensors
        own: list[StageSeconds] = []
        for number, (partition, device) in enumerate(zip(pipe.partitions, devices, strict=True)):
            is_last = number == len(devices) - 1
            given = tuple(tensor.to(device) for tensor in given)
            stage = _Stage(partition)
            seconds = measured_alone(
                stage,
                given,
                device,
                loss=subject.loss if is_last else None,
                is_first=number == 0,
                splits=False,
            )
            own.append(seconds)
            if not is_last:
                given = _fed_on(stage, given)
        step = predicted_seconds(self.case, own)
        again = [
            seconds.model_copy(update={"backward": seconds.backward + seconds.forward}) for seconds in own
        ]
        return Predicted(stages=again if recomputed(self.case) else own, step_seconds=step)

    def _compared(
        self,
        pipe: Any,
        devices: Sequence[torch.device],
        subject: Subject,
        samples: ModelInput,
        plain: list[float] | None,
        reason: str,
    ) -> Losses | None:
        """The losses of the first steps."""
        if not self.job.compared_steps:
            return None
        losses = []
        for number in range(self.job.compared_steps):
            self._begin(f"step {number + 1} of those compared")
            with without_dropout(pipe):
                loss = self._loss(pipe, subject, samples, devices)
                torch.autograd.backward(loss)
            losses.append(float(loss.detach()))
            descend(list(pipe.parameters()))
        return Losses(pipeline=losses, plain=plain, reason=reason)

    def _ran(self, pipe: Any, devices: Sequence[torch.device], subject: Subject, samples: ModelInput) -> Ran:
        stamps = [
            StageStamps(partition, device) for partition, device in zip(pipe.partitions, devices, strict=True)
        ]
        seconds = []
        for number in range(self.job.warm_ups + self.job.steps):
            self._begin(f"step {number + 1}")
            if number == self.job.warm_ups:
                for own in stamps:
                    own.forget()
                _forget_peaks(devices)
            start = time.perf_counter()
            loss = self._loss(pipe, subject, samples, devices)
            for own in stamps:
                own.backward_runs = True
            torch.autograd.backward(loss)
            _settle(devices)
            seconds.append(time.perf_counter() - start)
            for own in stamps:
                own.backward_runs = False
                own.settle()
            descend(list(pipe.parameters()))
        for own in stamps:
            own.remove()
        return Ran(
            stages=[own.stage() for own in stamps],
            step_seconds=seconds[self.job.warm_ups :],
            peak_bytes=[_peak(device) for device in devices],
        )

    def _loss(
        self, pipe: Any, subject: Subject, samples: ModelInput, devices: Sequence[torch.device]
    ) -> Tensor:
        """The mean over the micro-batches, each by itself as in the plain model."""
        given = samples.to(device=devices[0])
        output = pipe(given.handed if isinstance(given.handed, Tensor) else given.tensors)
        count = self.case.micro_batches
        losses = [subject.loss(part, None) for part in _parts(output, count)]
        return torch.stack(losses).sum() / count


def _built(case: RuntimeCase, subject: Subject) -> Any:
    document = case.document
    if isinstance(document, FairscaleExport):
        return fairscale.build(document, subject.layers, subject.example.handed)
    if document.runtime == "torchgpipe":
        return torchgpipe.build(document, subject.layers, subject.example.handed)
    raise ValueError(f"{document.runtime} has a process for each stage")


class _Stage(nn.Module):
    """A partition that takes its tensors one by one."""

    def __init__(self, partition: nn.Module) -> None:
        super().__init__()
        self.partition = partition

    def forward(self, *given: Tensor) -> Any:
        return self.partition(given[0] if len(given) == 1 else given)


def _fed_on(stage: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What the next stage is fed."""
    with torch.no_grad():
        made = stage(*given)
    tensors = (made,) if isinstance(made, Tensor) else tuple(made)
    return tuple(tensor.detach().clone() for tensor in tensors)


def _parts(output: Any, count: int) -> list[Any]:
    """The output of each micro-batch."""
    if isinstance(output, Tensor):
        return list(output.chunk(count))
    return list(zip(*(tensor.chunk(count) for tensor in output), strict=True))


def _end_threads(others: Iterable[threading.Thread]) -> None:
    """Those of FairScale, whose Pipe is gone, are waited for: a living Pipe would keep the interpreter from
    ending, and a thread whose end meets the interpreter's may abort it."""
    gc.collect()
    for thread in set(threading.enumerate()).difference(others):
        thread.join(timeout=10)


def _settle(devices: Sequence[torch.device]) -> None:
    for device in _gpus(devices):
        torch.cuda.synchronize(device)


def _forget_peaks(devices: Sequence[torch.device]) -> None:
    for device in _gpus(devices):
        torch.cuda.reset_peak_memory_stats(device)


def _peak(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def _gpus(devices: Sequence[torch.device]) -> list[torch.device]:
    return [device for device in dict.fromkeys(devices) if device.type == "cuda"]
