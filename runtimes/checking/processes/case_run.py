"""One case of a check in one process: built, measured alone, predicted, and run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ....profiler.user_model.loaded_model import ModelInput
from ...formats.torch_actions import splits_backward
from ...pipelining.input_form import InputForm
from ...pipelining.process import PipelineProcess
from ...pipelining.stage_module import StageModule, stage_loss
from ...torch_pipelining import build
from ..job import Case, CaseResult, Corrections, Job, Losses, Predicted, Ran, StageSeconds
from ..prediction import predicted_step
from .alone import measured_alone, stage_inputs
from .failure import Journal
from .numerics import Loss, descend, plain_losses, varied, without_dropout
from .stamps import Stamps, clock_for
from .subject import Subject, subject_of


@dataclass(frozen=True, eq=False)
class Together:
    """What all cases of a process have in common. `talk`: the group in which the processes tell each other
    what they found; None for the default one."""

    job: Job
    device: torch.device
    talk: Any
    journal: Journal

    def told(self, own: Any) -> list[Any]:
        """What every process has, by rank."""
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own, group=self.talk)
        return everyone


class CaseRun:
    """One case in this process. `corrections`: of its prediction; `compared`: steps whose losses are held
    against the plain model's."""

    def __init__(
        self, together: Together, case: Case, corrections: Corrections | None, compared: int
    ) -> None:
        self.job, self.device, self.journal = together.job, together.device, together.journal
        self.together, self.case, self.corrections = together, case, corrections
        self.compared = compared if case.waits is None else 0
        self.document = case.document

    def result(self) -> CaseResult:
        """Predicts, then runs; the same in every process."""
        self.journal.begin(f"building the model ({self.case.name})")
        subject = subject_of(self.job.model, self.case)
        samples = varied(subject.example.repeated(self.document.mini_batch))
        plain, reason = self._plain(subject, samples)
        given = self._own_inputs(subject)
        stamps = Stamps(clock_for(self.device))
        loss = stamps.timed(len(self.document.parts) - 2, "loss", subject.loss)
        self.journal.begin(f"building the pipeline ({self.case.name})")
        process = self._built(subject, loss)
        self.journal.begin(f"measuring the stages alone ({self.case.name})")
        predicted = self._predicted(process, subject.loss, given)
        stamps.forget()
        losses = self._compared(process, samples, plain, reason)
        ran = self._ran(process, samples, stamps)
        return CaseResult(name=self.case.name, predicted=predicted, ran=ran, losses=losses)

    def _built(self, subject: Subject, loss: Loss) -> PipelineProcess:
        return build(
            self.document,
            subject.layers,
            example_input=subject.example,
            loss_fn=loss,
            device=self.device,
        )

    def _own_inputs(self, subject: Subject) -> dict[int, tuple[torch.Tensor, ...]]:
        """What each of this process's stages is sent for a micro-batch."""
        document = self.document
        size = document.micro_batch_size // document.replicas
        handed = subject.example.repeated(size)
        first = InputForm.of(subject.example).micro_batch(subject.example, size)
        index = dist.get_rank() // document.replicas
        given = (handed.handed,) if isinstance(handed.handed, torch.Tensor) else handed.handed
        return {
            stage: first if stage == 0 else stage_inputs(subject.layers, document.parts[stage], given)
            for stage in document.stages[index]
        }

    def _predicted(
        self, process: PipelineProcess, loss: Loss, given: dict[int, tuple[torch.Tensor, ...]]
    ) -> Predicted:
        """From what every stage takes alone; all processes measure at the same time."""
        own: dict[int, StageSeconds] = {}
        count, splits = len(self.document.parts) - 1, splits_backward(self.document.actions)
        dist.barrier()
        for stage, module in process.wrapped.items():
            inner = _stage_inside(module)
            own[stage] = measured_alone(
                inner,
                given[stage],
                self.device,
                loss=stage_loss(inner, loss) if stage == count - 1 else None,
                is_first=stage == 0,
                splits=splits,
            )
        everyone = self.together.told(own)
        stages = [slowest([one[stage] for one in everyone if stage in one]) for stage in range(count)]
        raw = predicted_step(self.case, stages, None)
        fixed = self.corrections
        calibrated = None if fixed is None else predicted_step(self.case, stages, fixed).step_seconds
        made = Predicted(stages=stages, step_seconds=raw.step_seconds, calibrated_step_seconds=calibrated)
        if dist.get_rank() == 0:
            self.journal.predicted(self.case.name, made)
        return made

    def _plain(self, subject: Subject, samples: ModelInput) -> tuple[list[float] | None, str]:
        """The plain model's losses, on the last rank; the others wait for it."""
        steps = self.compared
        if not steps:
            return None, ""
        told: list[Any] = [None]
        last = dist.get_world_size() - 1
        if dist.get_rank() == last:
            self.journal.begin(f"running the plain model ({self.case.name})")
            parts = self.document.micro_batches * self.document.replicas
            told = [plain_losses(subject.layers, samples, subject.loss, parts, steps)]
        dist.broadcast_object_list(told, src=last, group=self.together.talk)
        found: tuple[list[float] | None, str] = told[0]
        return found

    def _compared(
        self, process: PipelineProcess, samples: ModelInput, plain: list[float] | None, reason: str
    ) -> Losses | None:
        """The losses of the first steps."""
        steps = self.compared
        if not steps:
            return None
        losses = []
        for number in range(steps):
            self.journal.begin(f"step {number + 1} of those compared ({self.case.name})")
            with without_dropout(nn.ModuleList(process.wrapped.values())):
                made = self._step(process, samples)
            descend(process.parameters())
            own = [float(loss) for loss in made]
            told = [each for each in self.together.told(own) if each]
            losses.append(sum(map(sum, told)) / max(sum(map(len, told)), 1))
        return Losses(pipeline=losses, plain=plain, reason=reason)

    def _ran(self, process: PipelineProcess, samples: ModelInput, stamps: Stamps) -> Ran:
        stamps.watch(process)
        seconds = []
        for number in range(self.job.warm_ups + self.job.steps):
            self.journal.begin(f"step {number + 1} ({self.case.name})")
            if number == self.job.warm_ups:
                stamps.forget()
                if self.device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats(self.device)
            dist.barrier()
            start = time.perf_counter()
            self._step(process, samples)
            self._settle()
            end = time.perf_counter()
            stamps.settle()
            descend(process.parameters())
            if number >= self.job.warm_ups:
                seconds.append((start, end))
        peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None
        everyone = self.together.told((seconds, stamps.stages(), peak))
        return self._gathered(everyone)

    def _gathered(self, everyone: Sequence[Any]) -> Ran:
        """A step lasts from when the barrier lets go to the last process' end: the longest of all."""
        by_step = zip(*(own[0] for own in everyone), strict=True)
        steps = [max(end - start for start, end in each) for each in by_step]
        count, replicas = len(self.document.parts) - 1, self.document.replicas
        stages = [slowest([own[1][stage] for own in everyone if stage in own[1]]) for stage in range(count)]
        peaks: list[int | None] = []
        for device in range(len(self.document.stages)):
            own = [everyone[device * replicas + replica][2] for replica in range(replicas)]
            peaks.append(None if None in own else max(own))
        return Ran(stages=stages, step_seconds=steps, peak_bytes=peaks)

    def _step(self, process: PipelineProcess, samples: ModelInput) -> list[torch.Tensor]:
        share = samples.mapped(
            lambda tensor: (
                process.share(tensor) if tensor.dim() and len(tensor) == self.document.mini_batch else tensor
            )
        )
        target = torch.zeros(process.samples) if process.is_last else None
        return process.step(share if process.is_first else None, target)

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def slowest(each: Sequence[StageSeconds]) -> StageSeconds:
    """Of replicas."""
    return max(each, key=lambda own: own.forward + own.backward)


def _stage_inside(module: nn.Module) -> StageModule:
    """The stage inside DistributedDataParallel."""
    inner: Any = getattr(module, "module", module)
    own: StageModule = inner
    return own
