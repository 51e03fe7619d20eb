"""Batch norms over the replicas of a stage: on every device, and in processes that other stages share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce


def join_batch_norms(modules: Iterable[nn.Module], group: dist.ProcessGroup) -> None:
    """Let batch norms normalise a micro-batch over all replicas of its stage.

    torch.nn.SyncBatchNorm runs on GPUs alone. Modules keep their identity, parameters and buffers.

    Args:
        modules: Stages of this process. Their batch norms get another class.
        group: The processes of the replicas. All get equal numbers of samples.
    """
    for stage in modules:
        for norm in stage.modules():
            if isinstance(norm, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)):
                kind: Any = type(norm)
                norm.__class__ = type(f"Joined{kind.__name__}", (_JoinedNorm, kind), {})
                norm.__dict__["replicas"] = group


class _JoinedNorm(nn.Module):
    """What a batch norm does where mean and variance are those of all replicas."""

    replicas: Any
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None
    momentum: float | None
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    _check_input_dim: Any

    def forward(self, input: Tensor) -> Tensor:
        """Normalise; in evaluation mode with running statistics as any batch norm."""
        if not self.training and self.running_mean is not None:
            as_usual: Tensor = super().forward(input)
            return as_usual
        self._check_input_dim(input)
        values = input if input.dtype == torch.float64 else input.float()
        dims = [0, *range(2, input.dim())]
        shape = [1, -1, *[1] * (input.dim() - 2)]
        count = input.numel() // input.shape[1] * dist.get_world_size(self.replicas)
        mean = self._sum(values.sum(dims)) / count
        centered = values - mean.reshape(shape)
        variance = self._sum(centered.square().sum(dims)) / count
        if self.training and self.running_mean is not None:
            self._update(mean.detach(), variance.detach() * count / max(count - 1, 1))
        scale = torch.rsqrt(variance + self.eps)
        if self.weight is not None:
            scale = scale * self.weight
        output = centered * scale.reshape(shape)
        if self.bias is not None:
            output = output + self.bias.reshape(shape)
        return output.to(input.dtype)

    def _sum(self, values: Tensor) -> Tensor:
        """The sum over the replicas; its gradient is summed up likewise."""
        add_up: Any = all_reduce
        total: Tensor = add_up(values, group=self.replicas)
        return total

    @torch.no_grad()
    def _update(self, mean: Tensor, variance: Tensor) -> None:
        """Count the micro-batch in the running statistics."""
        momentum = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            momentum = 1 / float(self.num_batches_tracked) if momentum is None else momentum
        for running, value in ((self.running_mean, mean), (self.running_var, variance)):
            if running is not None:
                running.lerp_(value.to(running.dtype), momentum or 0.0)
