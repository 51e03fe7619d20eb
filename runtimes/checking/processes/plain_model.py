"""The plain model's losses, to hold those of the pipeline against: the same weights, samples and steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ....profiler.user_model.loaded_model import ModelInput

LEARNING_RATE = 1e-3
"""Of plain SGD, so that a wrong gradient shows in the next loss."""
Loss = Callable[[Any, Any], Tensor]
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def vary_samples(example: ModelInput) -> ModelInput:
    """Samples that differ: of numbers each is scaled otherwise, of token ids each is shifted."""
    batch = example.batch

    def change(tensor: Tensor) -> Tensor:
        if tensor.dim() == 0 or len(tensor) != batch:
            return tensor
        if tensor.is_floating_point():
            factor = torch.linspace(0.5, 1.5, batch).to(tensor.dtype)
            return tensor * factor.reshape(-1, *[1] * (tensor.dim() - 1))
        if tensor is not example.tensors[0] or tensor.dim() < 2 or tensor.dtype == torch.bool:
            return tensor
        return torch.stack([sample.roll(number, -1) for number, sample in enumerate(tensor)])

    return example.mapped(change)


@contextmanager
def without_dropout(module: nn.Module) -> Iterator[None]:
    """Dropout drops nothing meanwhile."""
    own = [child for child in module.modules() if isinstance(child, _DROPOUTS)]
    shares = [child.p for child in own]
    for child in own:
        child.p = 0.0
    try:
        yield
    finally:
        for child, share in zip(own, shares, strict=True):
            child.p = share


def plain_losses(
    layers: nn.Sequential, samples: ModelInput, loss: Loss, parts: int, steps: int
) -> tuple[list[float] | None, str]:
    """The mean loss of each of `steps` steps of a copy of the model, in `parts` micro-batches, by plain SGD;
    or None and why they cannot be compared: the model draws random numbers."""
    model = copy.deepcopy(layers)
    size = samples.batch // parts
    state = torch.get_rng_state()
    losses = []
    with without_dropout(model):
        for _ in range(steps):
            total = 0.0
            for part in range(parts):
                micro_batch = _part(samples, part * size, size)
                part_loss = loss(model(micro_batch.layer_input), None) / parts
                torch.autograd.backward(part_loss)
                total += float(part_loss.detach())
            apply_sgd(list(model.parameters()))
            losses.append(total)
            if not torch.equal(state, torch.get_rng_state()):
                return None, "the model draws random numbers"
    return losses, ""


def apply_sgd(parameters: list[nn.Parameter]) -> None:
    """A step of plain SGD; gradients are gone after it."""
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=LEARNING_RATE)
                parameter.grad = None


def _part(samples: ModelInput, start: int, size: int) -> ModelInput:
    whole = samples.batch
    return samples.mapped(
        lambda tensor: tensor[start : start + size] if tensor.dim() and len(tensor) == whole else tensor
    )
