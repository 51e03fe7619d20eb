"""torchgpipe and FairScale in the loop of a check: one process for all stages."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ....profiler.user_model.loaded_model import ModelInput
from ... import fairscale, torchgpipe
from ...documents import FairscaleExport, TorchgpipeExport
from ..job import CasePrediction, RuntimeCase, StageSeconds
from ..prediction import count_recomputed, predict_seconds
from .action_stamps import ActionStamps, PartitionStamps
from .isolated_stage import measure_isolated
from .pipeline_adapter import PipelineAdapter, SeparateTensors
from .training_target import TrainingTarget


class PipeAdapter(PipelineAdapter):
    """All stages of a case."""

    def __init__(self, case: RuntimeCase, target: TrainingTarget) -> None:
        self.case, self._target, self._threads = case, target, threading.enumerate()
        self._pipe: Any = _build_pipe(case, target)
        self.devices = [torch.device(device) for device in self._pipe.devices]
        self._stamps: list[PartitionStamps] = []

    @property
    def model(self) -> nn.Module:
        """All stages of the pipe."""
        pipe: nn.Module = self._pipe
        return pipe

    @property
    def stamps(self) -> Sequence[ActionStamps]:
        """The stamps of each stage."""
        return self._stamps

    def measure_stages(self) -> dict[int, StageSeconds]:
        """Each stage is fed what the one before makes of a micro-batch."""
        tensors = self._target.example.repeated(self.case.document.micro_batch_size).tensors
        seconds: dict[int, StageSeconds] = {}
        for number, (partition, device) in enumerate(zip(self._pipe.partitions, self.devices, strict=True)):
            is_last = number == len(self.devices) - 1
            stage, tensors = SeparateTensors(partition), tuple(tensor.to(device) for tensor in tensors)
            seconds[number] = measure_isolated(
                stage,
                tensors,
                device,
                loss=self._target.loss if is_last else None,
                is_first=number == 0,
                splits=False,
            )
            if not is_last:
                tensors = _outputs(stage, tensors)
        return seconds

    def predict(self, stages: Sequence[StageSeconds]) -> CasePrediction:
        """The stages that are written down have in their backward what it recomputes, as in the steps."""
        with_recompute = [
            stage.model_copy(update={"backward": stage.backward + stage.forward}) for stage in stages
        ]
        return CasePrediction(
            stages=with_recompute if count_recomputed(self.case) else list(stages),
            step_seconds=predict_seconds(self.case, stages),
        )

    def step(self, batch: ModelInput) -> list[Tensor]:
        """The mean over the micro-batches, each by itself as in the plain model."""
        self._set_backward(runs=False)
        inputs = batch.to(device=self.devices[0])
        output = self._pipe(inputs.layer_input if isinstance(inputs.layer_input, Tensor) else inputs.tensors)
        parts = _micro_batches(output, self.case.micro_batches)
        loss = torch.stack([self._target.loss(part, None) for part in parts]).sum() / len(parts)
        self._set_backward(runs=True)
        torch.autograd.backward(loss)
        return [loss.detach()]

    def _set_backward(self, *, runs: bool) -> None:
        for stamps in self._stamps:
            stamps.backward_runs = runs

    def watch(self) -> None:
        """Stamps the actions by hooks on the partitions."""
        pairs = zip(self._pipe.partitions, self.devices, strict=True)
        self._stamps = [PartitionStamps(partition, device) for partition, device in pairs]

    def stage_seconds(self) -> dict[int, StageSeconds]:
        """The measured seconds of all stages."""
        return {number: stamps.stage() for number, stamps in enumerate(self._stamps)}

    def close(self) -> None:
        """The pipe and its threads are gone."""
        for stamps in self._stamps:
            stamps.remove()
        self._stamps, self._pipe = [], None
        _end_threads(self._threads)


def _build_pipe(case: RuntimeCase, target: TrainingTarget) -> Any:
    document, example = case.document, target.example.layer_input
    if isinstance(document, FairscaleExport):
        return fairscale.build(document, target.layers, example)
    if isinstance(document, TorchgpipeExport):
        return torchgpipe.build(document, target.layers, example)
    raise ValueError(f"{document.runtime} has a process for each stage")


def _outputs(stage: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The inputs of the next stage."""
    with torch.no_grad():
        output = stage(*inputs)
    tensors = (output,) if isinstance(output, Tensor) else tuple(output)
    return tuple(tensor.detach().clone() for tensor in tensors)


def _micro_batches(output: Any, count: int) -> list[Any]:
    """The output of each micro-batch."""
    if isinstance(output, Tensor):
        return list(output.chunk(count))
    return list(zip(*(tensor.chunk(count) for tensor in output), strict=True))


def _end_threads(others: Iterable[threading.Thread]) -> None:
    """Waits for FairScale's threads after its Pipe is gone: a living Pipe would keep the interpreter from
    ending, and a thread whose end meets the interpreter's may abort it."""
    gc.collect()
    for thread in set(threading.enumerate()).difference(others):
        thread.join(timeout=10)
