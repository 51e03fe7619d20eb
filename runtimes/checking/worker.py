"""One process of a check: builds its stages, measures them alone, and runs the steps.

Started by torchrun's launcher as `-m pplan.runtimes.checking.worker FOLDER`, or by `pplan check` itself where
a torchrun of the user's started that.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...profiler.inputs import ModelInput
from ...profiler.launched import Launched
from ...profiler.losses import loss_named
from ...profiler.machine import device_name, dtype_named
from ...profiler.models import load_model
from ...profiler.modes import Modes
from ...profiler.sequential import sequential
from ..pipelining.inputs import InputForm
from ..pipelining.process import PipelineProcess
from ..pipelining.stage_module import StageModule, loss_of
from ..torch_actions import splits_backward
from ..torch_pipelining import build
from .alone import measured_alone, stage_inputs
from .calibration import fitted
from .emulated import emulated, emulated_loss
from .failure import Journal
from .job import Case, CaseResult, Corrections, Job, Losses, Measured, ModelSpec, Predicted, Ran, StageSeconds
from .numerics import Loss, descend, plain_losses, varied, without_dropout
from .prediction import predicted_step
from .stamps import Stamps, clock_for
from .transfers import measured_links


@dataclass(frozen=True, eq=False)
class Subject:
    """The layers to be cut, an example input of any batch, and the loss of an output."""

    layers: nn.Sequential
    example: ModelInput
    loss: Loss


def run_job(job: Job, process: Launched, journal: Journal) -> Measured | None:
    """Runs the cases with the other processes; what was found, on rank 0, else None.

    `journal` is told what is being done. Raises PplanError; what the model raises is left as it is.
    """
    journal.begin("meeting the other processes")
    device = _device(job, process)
    torch.set_num_threads(1)
    backend = "nccl" if device.type == "cuda" else "gloo"
    # The parent, which knows which process hangs, is to be the first that loses patience.
    wait = timedelta(
        seconds=job.timeout_seconds * (1 if journal.folder is None else 2) + 30 * (journal.folder is not None)
    )
    dist.init_process_group(backend, timeout=wait)
    # What the processes tell each other goes through gloo: NCCL would put it on the GPU.
    talk: Any = dist.new_group(backend="gloo", timeout=wait) if backend == "nccl" else None
    links = None
    if job.link_sizes:
        journal.begin("measuring the links")
        links = measured_links(job.link_sizes, device)

    def run(case: Case, corrections: Corrections | None, compared: int) -> CaseResult:
        return _Run(job, case, device, talk, journal, corrections, compared).result()

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


def _device(job: Job, process: Launched) -> torch.device:
    if job.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", process.local_rank)
    torch.cuda.set_device(device)
    return device


class _Run:
    """One case in this process."""

    def __init__(
        self,
        job: Job,
        case: Case,
        device: torch.device,
        talk: Any,
        journal: Journal,
        corrections: Corrections | None,
        compared: int,
    ) -> None:
        self.job, self.case, self.device, self.talk, self.journal = job, case, device, talk, journal
        self.corrections = corrections
        self.compared = compared if case.waits is None else 0
        self.document = case.document

    def result(self) -> CaseResult:
        """Predicts, then runs; the same in every process."""
        self.journal.begin(f"building the model ({self.case.name})")
        subject = _subject(self.job, self.case)
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
            inner = _inner(module)
            own[stage] = measured_alone(
                inner,
                given[stage],
                self.device,
                loss=loss_of(inner, loss) if stage == count - 1 else None,
                is_first=stage == 0,
                splits=splits,
            )
        everyone = self._told(own)
        stages = [_slowest([one[stage] for one in everyone if stage in one]) for stage in range(count)]
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
        dist.broadcast_object_list(told, src=last, group=self.talk)
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
            with _all_without_dropout(process):
                made = self._step(process, samples)
            descend(process.parameters())
            own = [float(loss) for loss in made]
            told = [each for each in self._told(own) if each]
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
        everyone = self._told((seconds, stamps.stages(), peak))
        return self._gathered(everyone)

    def _gathered(self, everyone: Sequence[Any]) -> Ran:
        """A step lasts from when the barrier lets go to the last process' end: the longest of all."""
        steps = [
            max(end - start for start, end in each)
            for each in zip(*(own[0] for own in everyone), strict=True)
        ]
        count, replicas = len(self.document.parts) - 1, self.document.replicas
        stages = [_slowest([own[1][stage] for own in everyone if stage in own[1]]) for stage in range(count)]
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

    def _told(self, own: Any) -> list[Any]:
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own, group=self.talk)
        return everyone


def _all_without_dropout(process: PipelineProcess) -> Any:
    return without_dropout(nn.ModuleList(process.wrapped.values()))


def _slowest(each: Sequence[StageSeconds]) -> StageSeconds:
    """Of replicas."""
    return max(each, key=lambda own: own.forward + own.backward)


def _inner(module: nn.Module) -> StageModule:
    """The stage inside DistributedDataParallel."""
    inner = getattr(module, "module", module)
    return inner  # type: ignore[no-any-return]


def _subject(job: Job, case: Case) -> Subject:
    """The model as it was profiled, or stages that wait."""
    document = case.document
    if case.waits is not None:
        size = document.micro_batch_size // document.replicas
        return Subject(emulated(case.waits, size), ModelInput.of(torch.zeros(2, 1)), emulated_loss)
    assert job.model is not None
    return _named_subject(job.model)


def _named_subject(spec: ModelSpec) -> Subject:
    fixed = spec.name.startswith("hf:") or spec.name.endswith(".json")
    loaded = load_model(
        spec.name,
        classes=spec.classes,
        input_shape=None if fixed else spec.input_shape,
        settings=spec.settings,
        seed=spec.seed,
    )
    dtype = dtype_named(spec.dtype)
    modes = Modes(channels_last=spec.channels_last)
    module = modes.converted(loaded.module.to(dtype))
    example = loaded.example.to(dtype=dtype, memory_format=modes.memory_format)
    layers = sequential(module, example, granularity=spec.granularity)
    named = loss_named(spec.loss, spec.seed)
    return Subject(layers, example, partial(_sum_of_means) if named is None else lambda out, _: named.of(out))


def _sum_of_means(output: Any, target: object) -> torch.Tensor:
    """Something to go backward from, where no loss is named."""
    del target
    leaves = torch.utils._pytree.tree_leaves(output)
    means = [leaf.mean() for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    return torch.stack(means).sum()


def main(arguments: Sequence[str]) -> int:
    """`FOLDER`: of the job, of what is found, and of what is done meanwhile."""
    import os

    from ...profiler.launched import launched

    folder = Path(arguments[0])
    process = launched(os.environ, "check", at_least=1)
    journal = Journal(folder, process.rank)
    journal.listen()
    job = Job.model_validate_json((folder / "job.json").read_text())
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
