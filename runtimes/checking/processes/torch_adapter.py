"""torch.distributed.pipelining in the loop of a check: one process of the pipeline, or of a replica of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ....profiler.user_model.loaded_model import ModelInput
from ...pipelining.input_form import InputForm
from ...pipelining.stage_module import StageLoss, StageModule
from ...torch_actions import splits_backward
from ...torch_pipelining import build
from ..job import Case, CasePrediction, Corrections, StageSeconds
from ..prediction import predict_step
from .action_stamps import ActionStamps, clock_for
from .isolated_stage import measure_isolated, stage_inputs
from .pipeline_adapter import PipelineAdapter
from .training_target import TrainingTarget


class TorchAdapter(PipelineAdapter):
    """`corrections`: of its prediction, besides the one without."""

    def __init__(
        self, case: Case, target: TrainingTarget, device: torch.device, corrections: Corrections | None
    ) -> None:
        self.case, self.document, self.corrections = case, case.document, corrections
        self.devices, self._loss = [device], target.loss
        self._inputs = self._stage_inputs(target)  # before the layers are moved to the device
        self._stamps = ActionStamps(clock_for(device))
        self.process = build(
            self.document,
            target.layers,
            example_input=target.example,
            loss_fn=self._stamps.time_calls(len(case.parts) - 2, "loss", target.loss),
            device=device,
        )
        self._model = nn.ModuleList(self.process.wrapped.values())

    @property
    def model(self) -> nn.Module:
        """The stages of this process."""
        return self._model

    @property
    def stamps(self) -> Sequence[ActionStamps]:
        """The stamps of this process."""
        return [self._stamps]

    def _stage_inputs(self, target: TrainingTarget) -> dict[int, tuple[Tensor, ...]]:
        """The input of each of this process's stages for a micro-batch."""
        size = self.document.micro_batch_size // self.document.replicas
        arguments = target.example.repeated(size).layer_input
        first = InputForm.of(target.example).micro_batch(target.example, size)
        tensors = (arguments,) if isinstance(arguments, Tensor) else arguments
        return {
            stage: first if stage == 0 else stage_inputs(target.layers, self.document.parts[stage], tensors)
            for stage in self.document.stages[dist.get_rank() // self.document.replicas]
        }

    def measure_stages(self) -> dict[int, StageSeconds]:
        """Measures each stage as the schedule runs it, without the replicas' exchange of gradients."""
        last, seconds = len(self.document.parts) - 2, {}
        for stage, module in self.process.wrapped.items():
            inner = _stage_inside(module)
            seconds[stage] = measure_isolated(
                inner,
                self._inputs[stage],
                self.devices[0],
                loss=StageLoss(inner, self._loss) if stage == last else None,
                is_first=stage == 0,
                splits=splits_backward(self.document.actions),
            )
        return seconds

    def predict(self, stages: Sequence[StageSeconds]) -> CasePrediction:
        """Predicts by the simulator, without the corrections and with them."""
        corrections = self.corrections
        return CasePrediction(
            stages=list(stages),
            step_seconds=predict_step(self.case, stages, None).step_seconds,
            calibrated_step_seconds=None
            if corrections is None
            else predict_step(self.case, stages, corrections).step_seconds,
        )

    def step(self, batch: ModelInput) -> list[Tensor]:
        """The losses of the micro-batches, in the process of the last stage."""
        process, samples = self.process, self.document.mini_batch
        share = batch.mapped(
            lambda tensor: process.share(tensor) if tensor.dim() and len(tensor) == samples else tensor
        )
        target = torch.zeros(process.samples) if process.is_last else None
        return process.step(share if process.is_first else None, target)

    def watch(self) -> None:
        """Stamps the actions where PyTorch's schedule calls them."""
        stages: list[Any] = list(self.process.stages)
        for stage in stages:
            index = stage.stage_index
            stage.forward_one_chunk = self._stamps.time_calls(index, "forward", stage.forward_one_chunk)
            stage.backward_weight_one_chunk = self._stamps.time_calls(
                index, "weight", stage.backward_weight_one_chunk
            )
            full = self._stamps.time_calls(index, "backward", stage.backward_one_chunk)
            input_only = self._stamps.time_calls(index, "input", stage.backward_one_chunk)
            stage.backward_one_chunk = _choose_backward(full, input_only)

    def stage_seconds(self) -> dict[int, StageSeconds]:
        """The measured seconds of this process's stages."""
        return self._stamps.stages()


def _stage_inside(module: nn.Module) -> StageModule:
    """The stage inside DistributedDataParallel."""
    inner: Any = getattr(module, "module", module)
    stage: StageModule = inner
    return stage


def _choose_backward(full: Callable[..., Any], input_only: Callable[..., Any]) -> Callable[..., Any]:
    """A backward of all gradients, or of the input's alone."""

    def backward(
        index: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> Any:
        run = full if full_backward else input_only
        return run(index, loss=loss, full_backward=full_backward, last_backward=last_backward)

    return backward
