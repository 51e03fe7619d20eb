"""The model that a check trains, its stages that wait instead of computing, and the plain model's losses."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ....cost_models.errors import ModelError
from ....cost_models.quantities import format_count
from ....profiler.layers import sequential
from ....profiler.local_machine import parse_dtype
from ....profiler.losses import load_loss
from ....profiler.models import load_model
from ....profiler.modes import Modes
from ....profiler.names import LOSSES, quote_name
from ....profiler.torch_private import tree_leaves
from ....profiler.user_model import ModelInput
from ...documents import hash_names
from ...pipelining.stage import add_zero_gradients
from ..records import Case, ModelSpec, StageSeconds, StageWaits

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


@dataclass(frozen=True, eq=False)
class TrainingTarget:
    """The layers to be cut, an example input of any batch, and the loss of an output."""

    layers: nn.Sequential
    example: ModelInput
    loss: Loss


def load_target(model: ModelSpec | None, case: Case) -> TrainingTarget:
    """The target of a case. Raises ModelError as loading and cutting the model do, ValueError where there is
    none."""
    if case.waits is not None:
        layers = emulate_stages(case.waits, case.document.replica_samples)
        return TrainingTarget(layers, ModelInput.of(torch.zeros(2, 1)), emulated_loss)
    if model is None:
        raise ValueError(f"{case.name}: its stages neither wait nor have a model")
    return _load_model(model)


def _load_model(spec: ModelSpec) -> TrainingTarget:
    """A model by its name, as `pplan profile` makes it.

    Raises ModelError, also where its layers are not the profile's, or it or its loss is code that the user
    did not name.
    """
    fixed = spec.name.startswith("hf:") or spec.name.endswith(".json")
    loaded = load_model(
        spec.name,
        classes=spec.classes,
        input_shape=None if fixed else spec.input_shape,
        settings=spec.settings,
        input_like=_input_function(spec),
        seed=spec.seed,
        known_only=spec.name not in spec.by_user,
    )
    dtype = parse_dtype(spec.dtype)
    modes = Modes(channels_last=spec.channels_last)
    module = modes.converted(loaded.module.to(dtype))
    example = loaded.example.to(dtype=dtype, memory_format=modes.memory_format)
    layers = sequential(module, example, granularity=spec.granularity)
    _check_layers(layers, spec)
    user_loss = load_loss(_loss(spec), spec.seed)
    return TrainingTarget(
        layers, example, partial(_sum_of_means) if user_loss is None else lambda out, _: user_loss.of(out)
    )


def _input_function(spec: ModelSpec) -> str | None:
    if spec.input_like is not None and spec.input_like not in spec.by_user:
        raise ModelError(
            f"input_like {quote_name(spec.input_like)}: a file's word runs no code",
            "Name it yourself: `input_like`.",
        )
    return spec.input_like


def _loss(spec: ModelSpec) -> str:
    if spec.loss not in LOSSES and spec.loss not in spec.by_user:
        raise ModelError(
            f"loss {quote_name(spec.loss)}: a file's word runs no code", "Name it yourself: `loss`."
        )
    return spec.loss


def _check_layers(layers: nn.Sequential, spec: ModelSpec) -> None:
    names = tuple(getattr(layers, "layer_names", ()))
    if not names or spec.layers_sha256 in ("", hash_names(names)):
        return
    raise ModelError(
        f"{spec.name} is not the model that was profiled as {quote_name(spec.profiled)}: it has "
        f"{format_count(len(names), 'layer')}, {quote_name(names[0])} to {quote_name(names[-1])}, "
        "with other names",
        "Give that one as `model`, and as `settings` what it was profiled with.",
    )


def _sum_of_means(output: Any, target: object) -> torch.Tensor:
    """Something to go backward from, where no loss is named."""
    del target
    leaves = tree_leaves(output)
    means = [leaf.mean() for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    return torch.stack(means).sum()


Sleep = Callable[[float], None]
ELEMENT = 4
"""Bytes of a float32, which cross the cuts."""


class EmulatedStage(nn.Module):
    """Takes and returns float32 tensors of shape (samples, elements). `elements`: of a sample, as it returns
    them. `seconds` are slept, on meta not."""

    def __init__(self, seconds: StageSeconds, elements: int, sleep: Sleep = time.sleep) -> None:
        super().__init__()
        self.seconds, self.elements, self.sleep = seconds, elements, sleep
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, tensor: Tensor) -> Tensor:
        """Returns a batch of as many samples as the input."""
        waits = not tensor.is_meta
        splits_backward = self.seconds.input + self.seconds.weight > 0
        input_wait = self.seconds.input if splits_backward else self.seconds.backward
        weight_wait = self.seconds.weight if splits_backward else 0.0
        if waits:
            self.sleep(self.seconds.forward)
        # The first stage's input needs no gradient, but the layers behind its first one have one.
        waits_for = tensor if tensor.requires_grad else self.weight
        input_part = _Wait.apply(waits_for, input_wait if waits else 0.0, self.sleep)
        weight_part: Tensor = _Wait.apply(self.weight, weight_wait if waits else 0.0, self.sleep)
        zeros = tensor.new_zeros((len(tensor), self.elements))
        return add_zero_gradients(zeros, (input_part,)) + weight_part


class _Wait(torch.autograd.Function):
    """Returns the tensor; its backward waits as long as the gradient of it takes."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, seconds: float, sleep: Sleep) -> Tensor:
        ctx.seconds, ctx.sleep = seconds, sleep
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if ctx.seconds:
            ctx.sleep(ctx.seconds)
        return gradient, None, None


def emulate_stages(waits: StageWaits, samples: int) -> nn.Sequential:
    """The stages, one element each, which hand on as many bytes as the model's, for micro-batches of
    `samples`; the last returns one number a sample."""
    per_sample = [max(size // (ELEMENT * samples), 1) for size in waits.crossing_bytes]
    pairs = zip(waits.stages, [*per_sample, 1], strict=True)
    return nn.Sequential(*(EmulatedStage(seconds, elements) for seconds, elements in pairs))


def emulated_loss(output: Tensor, target: object) -> Tensor:
    """The mean: there is nothing to learn."""
    del target
    return output.mean()
