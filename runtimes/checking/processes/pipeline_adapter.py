"""A pipeline as the loop of a check runs it: what differs from runtime to runtime, behind one interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ....profiler.user_model.loaded_model import ModelInput
from ..job import CasePrediction, StageSeconds
from .action_stamps import ActionStamps
from .plain_model import apply_sgd


class PipelineAdapter(ABC):
    """A case that its runtime has built in this process.

    `devices`: of the pipeline, those that this process computes on, in their order.
    """

    devices: Sequence[torch.device]

    @property
    @abstractmethod
    def model(self) -> nn.Module:
        """All layers of this process, as they are trained."""

    @property
    @abstractmethod
    def stamps(self) -> Sequence[ActionStamps]:
        """The stamps of the actions since `watch`."""

    @abstractmethod
    def measure_stages(self) -> dict[int, StageSeconds]:
        """Measures each stage of this process alone. All processes measure at the same time."""

    @abstractmethod
    def predict(self, stages: Sequence[StageSeconds]) -> CasePrediction:
        """A step, of what all stages take alone."""

    def feed(self, samples: ModelInput) -> Any:
        """The input of a step for a global batch, prepared before the step's clock starts."""
        return samples

    @abstractmethod
    def step(self, batch: Any) -> list[Tensor]:
        """Forward and backward of a global batch; the losses that this process knows, of equal parts."""

    def update(self) -> None:
        """A step of plain SGD with the gradients."""
        apply_sgd(list(self.model.parameters()))

    @abstractmethod
    def watch(self) -> None:
        """Stamps every action from now on."""

    @abstractmethod
    def stage_seconds(self) -> dict[int, StageSeconds]:
        """The seconds of each stage of this process, from the stamps."""

    def close(self) -> None:  # noqa: B027 (most have nothing to end)
        """The case is over."""


class SeparateTensors(nn.Module):
    """A stage that takes a tensor or the tuple of several, as one that takes them one by one."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, *tensors: Tensor) -> Any:
        """The stage's output."""
        return self.stage(tensors[0] if len(tensors) == 1 else tensors)
