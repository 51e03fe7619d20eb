"""The cases of DeepSpeed in one process of a stage: built, measured alone, predicted, and run."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ....profiler.user_model.loaded_model import ModelInput
from ...deepspeed import build
from ...formats.deepspeed_export import DeepspeedExport
from ...formats.export_document import missing_package
from ..job import CaseResult, Job, Losses, Predicted, Ran, RuntimeCase, StageSeconds
from ..runtime_prediction import predicted_seconds
from .alone import measured_alone, stage_inputs
from .case_run import Together, slowest
from .failure import Journal
from .meeting import backend_of, patience, talk_group
from .numerics import LEARNING_RATE, plain_losses, varied, without_dropout
from .stamps import Stamps, clock_for
from .subject import Subject, named_subject


def run_deepspeed(job: Job, device: torch.device, journal: Journal) -> tuple[str, list[CaseResult]]:
    """The backend, and what was found; the same in every process. Raises MachineError without DeepSpeed."""
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    try:
        import deepspeed
        import deepspeed.ops
    except ImportError as error:
        raise missing_package("deepspeed", error) from error
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    if device.type == "cpu":
        # Without the operation that DeepSpeed would compile for processes on one CPU: a minute's work.
        deepspeed.ops.__compatible_ops__ = {}
    journal.begin("meeting the other processes")
    backend, wait = backend_of(device), patience(job, journal)
    deepspeed.init_distributed(backend, timeout=wait)
    together = Together(job, device, talk_group(backend, wait), journal)
    found = [DeepspeedRun(together, case).result() for case in job.runtime_cases]
    dist.destroy_process_group()
    return backend, found


class DeepspeedRun:
    """One case in this process."""

    def __init__(self, together: Together, case: RuntimeCase) -> None:
        if not isinstance(case.document, DeepspeedExport):
            raise TypeError(f"{case.name} is for {case.document.runtime}")
        self.job, self.device, self.together = together.job, together.device, together
        self.case, self.document = case, case.document
        self.stage, self.replica = divmod(dist.get_rank(), self.document.replicas)
        self.parts = case.micro_batches * case.replicas

    def result(self) -> CaseResult:
        """Predicts, then runs; the same in every process. Raises ValueError without a model."""
        self._begin("building the model")
        if self.job.model is None:
            raise ValueError(f"{self.case.name}: deepspeed runs a model, no stages that wait")
        subject = named_subject(self.job.model)
        samples = varied(subject.example.repeated(self.document.mini_batch))
        plain, reason = self._plain(subject, samples)
        size = self.document.micro_batch_size // self.document.replicas
        given = stage_inputs(
            subject.layers, self.document.parts[self.stage], subject.example.repeated(size).tensors
        )
        self._begin("building the pipeline")
        engine = self._engine(subject)
        self._begin("measuring the stages alone")
        predicted = self._predicted(engine.module, subject, given)
        losses = self._compared(engine, samples, plain, reason)
        ran = self._ran(engine, samples)
        return CaseResult(name=self.case.name, predicted=predicted, ran=ran, losses=losses)

    def _begin(self, doing: str) -> None:
        self.together.journal.begin(f"{doing} ({self.case.name})")

    def _plain(self, subject: Subject, samples: ModelInput) -> tuple[list[float] | None, str]:
        """The plain model's losses, on the last rank; the others wait for it."""
        steps = self.job.compared_steps
        if not steps:
            return None, ""
        told: list[Any] = [None]
        last = dist.get_world_size() - 1
        if dist.get_rank() == last:
            self._begin("running the plain model")
            told = [plain_losses(subject.layers, samples, subject.loss, self.parts, steps)]
        dist.broadcast_object_list(told, src=last, group=self.together.talk)
        found: tuple[list[float] | None, str] = told[0]
        return found

    def _engine(self, subject: Subject) -> Any:
        """With plain SGD in place of the plan's optimizer, as the plain model is trained."""
        import deepspeed

        stage = build(self.document, subject.layers, subject.loss, subject.example.handed)
        config = {name: value for name, value in self.document.config.items() if name != "optimizer"}
        optimizer = torch.optim.SGD(stage.parameters(), lr=LEARNING_RATE)
        engine, *_ = deepspeed.initialize(model=stage, optimizer=optimizer, config=config)
        return engine

    def _predicted(self, module: nn.Module, subject: Subject, given: tuple[torch.Tensor, ...]) -> Predicted:
        """From what every stage takes alone; all processes measure at the same time."""
        dist.barrier()
        count = self.document.num_stages
        own = measured_alone(
            _Stage(module),
            given,
            self.device,
            loss=subject.loss if self.stage == count - 1 else None,
            is_first=self.stage == 0,
            splits=False,
        )
        stages = self._by_stage(own)
        made = Predicted(stages=stages, step_seconds=predicted_seconds(self.case, stages))
        if dist.get_rank() == 0:
            self.together.journal.predicted(self.case.name, made)
        return made

    def _by_stage(self, own: StageSeconds) -> list[StageSeconds]:
        """Of every stage, its slowest replica."""
        everyone = self.together.told((self.stage, own))
        return [
            slowest([seconds for stage, seconds in everyone if stage == number])
            for number in range(self.document.num_stages)
        ]

    def _compared(
        self, engine: Any, samples: ModelInput, plain: list[float] | None, reason: str
    ) -> Losses | None:
        """The losses of the first steps."""
        if not self.job.compared_steps:
            return None
        losses = []
        for number in range(self.job.compared_steps):
            self._begin(f"step {number + 1} of those compared")
            with without_dropout(engine.module):
                losses.append(float(engine.train_batch(self._fed(samples))))
        return Losses(pipeline=losses, plain=plain, reason=reason)

    def _ran(self, engine: Any, samples: ModelInput) -> Ran:
        stamps = Stamps(clock_for(self.device))
        _watch(engine, stamps, self.stage)
        seconds = []
        for number in range(self.job.warm_ups + self.job.steps):
            self._begin(f"step {number + 1}")
            if number == self.job.warm_ups:
                stamps.forget()
                if self.device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats(self.device)
            fed = self._fed(samples)
            dist.barrier()
            start = time.perf_counter()
            engine.train_batch(fed)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            seconds.append((start, time.perf_counter()))
            stamps.settle()
        peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None
        everyone = self.together.told((seconds[self.job.warm_ups :], peak))
        steps = [
            max(end - start for start, end in each)
            for each in zip(*(own for own, _ in everyone), strict=True)
        ]
        replicas = self.document.replicas
        return Ran(
            stages=self._by_stage(stamps.stages()[self.stage]),
            step_seconds=steps,
            peak_bytes=[
                _most([peak for _, peak in everyone[first : first + replicas]])
                for first in range(0, len(everyone), replicas)
            ],
        )

    def _fed(self, samples: ModelInput) -> Iterator[tuple[Any, torch.Tensor]]:
        """Input and a target that nothing reads, of each micro-batch of this replica."""
        size = samples.batch // self.parts
        own = []
        for part in range(self.replica, self.parts, self.document.replicas):
            cut = tuple(tensor[part * size : (part + 1) * size].to(self.device) for tensor in samples.tensors)
            own.append((cut[0] if len(cut) == 1 else cut, torch.zeros(size, device=self.device)))
        return iter(own)


class _Stage(nn.Module):
    """DeepSpeed's stage, which takes its tensors one by one."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *given: torch.Tensor) -> Any:
        return self.module(given[0] if len(given) == 1 else given)


def _watch(engine: Any, stamps: Stamps, stage: int) -> None:
    """From now on, every forward and backward of the engine, which looks up what an instruction does."""
    from deepspeed.runtime.pipe import schedule

    table = dict(engine._INSTRUCTION_MAP)
    for kind, instruction in (("forward", schedule.ForwardPass), ("backward", schedule.BackwardPass)):
        table[instruction] = stamps.timed(stage, kind, table[instruction])
    engine._INSTRUCTION_MAP = table


def _most(peaks: list[int | None]) -> int | None:
    known = [peak for peak in peaks if peak is not None]
    return max(known) if len(known) == len(peaks) else None
