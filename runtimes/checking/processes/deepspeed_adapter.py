"""DeepSpeed in the loop of a check: one process of a stage and replica."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ....profiler.user_model.loaded_model import ModelInput
from ...deepspeed import build
from ...documents import DeepspeedExport
from ...pipelining.runtime_internals import wrap_instructions
from ..job import CasePrediction, RuntimeCase, StageSeconds
from ..prediction import predict_seconds
from .action_stamps import ActionStamps, clock_for
from .isolated_stage import measure_isolated, stage_inputs
from .pipeline_adapter import PipelineAdapter, SeparateTensors
from .plain_model import LEARNING_RATE
from .training_target import TrainingTarget


class DeepspeedAdapter(PipelineAdapter):
    """One stage of a case. Plain SGD takes the place of the plan's optimizer, as for the plain model."""

    def __init__(self, case: RuntimeCase, target: TrainingTarget, device: torch.device) -> None:
        document = case.document
        if not isinstance(document, DeepspeedExport):
            raise TypeError(f"{case.name} is for {document.runtime}")
        import deepspeed

        self.case, self.document, self.devices, self._loss = case, document, [device], target.loss
        self.stage, self.replica = divmod(dist.get_rank(), document.replicas)
        example = target.example.repeated(document.micro_batch_size // document.replicas)
        self._inputs = stage_inputs(target.layers, document.parts[self.stage], example.tensors)
        stage = build(document, target.layers, target.loss, target.example.layer_input)
        config = {name: value for name, value in document.config.items() if name != "optimizer"}
        optimizer = torch.optim.SGD(stage.parameters(), lr=LEARNING_RATE)
        self.engine: Any
        self.engine, *_ = deepspeed.initialize(model=stage, optimizer=optimizer, config=config)
        self._stamps = ActionStamps(clock_for(device))

    @property
    def model(self) -> nn.Module:
        """The stage of this process."""
        module: nn.Module = self.engine.module
        return module

    @property
    def stamps(self) -> Sequence[ActionStamps]:
        """The stamps of this process."""
        return [self._stamps]

    def measure_stages(self) -> dict[int, StageSeconds]:
        """Measures this process's stage alone."""
        seconds = measure_isolated(
            SeparateTensors(self.model),
            self._inputs,
            self.devices[0],
            loss=self._loss if self.stage == self.document.num_stages - 1 else None,
            is_first=self.stage == 0,
            splits=False,
        )
        return {self.stage: seconds}

    def predict(self, stages: Sequence[StageSeconds]) -> CasePrediction:
        """Predicts by the simulator."""
        return CasePrediction(stages=list(stages), step_seconds=predict_seconds(self.case, stages))

    def feed(self, samples: ModelInput) -> Iterator[tuple[Any, Tensor]]:
        """Input and a target that nothing reads, of each micro-batch of this replica."""
        device, parts = self.devices[0], self.case.micro_batches * self.case.replicas
        size = samples.batch // parts
        own = []
        for part in range(self.replica, parts, self.document.replicas):
            cut = tuple(tensor[part * size : (part + 1) * size].to(device) for tensor in samples.tensors)
            own.append((cut[0] if len(cut) == 1 else cut, torch.zeros(size, device=device)))
        return iter(own)

    def step(self, batch: Iterator[tuple[Any, Tensor]]) -> list[Tensor]:
        """The mean loss, which DeepSpeed tells every process; the weights are new after it."""
        return [self.engine.train_batch(batch)]

    def update(self) -> None:
        """Nothing: DeepSpeed's step includes its optimizer."""

    def watch(self) -> None:
        """Every forward and backward of the engine, which looks up what an instruction does."""
        from deepspeed.runtime.pipe import schedule

        timed = partial(self._stamps.time_calls, self.stage)
        wrappers = {
            schedule.ForwardPass: partial(timed, "forward"),
            schedule.BackwardPass: partial(timed, "backward"),
        }
        wrap_instructions(self.engine, wrappers)

    def stage_seconds(self) -> dict[int, StageSeconds]:
        """The measured seconds of this process's stage."""
        return {self.stage: self._stamps.stages()[self.stage]}
