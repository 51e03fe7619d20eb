"""What a check trains: the model as it was profiled, or stages that wait."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ....cost_models.errors import ModelError
from ....cost_models.quantities import counted
from ....profiler.local_machine import dtype_named
from ....profiler.models import load_model
from ....profiler.named_model import LOSSES, shown
from ....profiler.passes.modes import Modes
from ....profiler.sequential import sequential
from ....profiler.torch_internals import tree_leaves
from ....profiler.user_model.loaded_model import ModelInput
from ....profiler.user_model.losses import loss_named
from ...formats.export_document import hash_names
from ..job import Case, ModelSpec, RuntimeCase
from .emulated_stage import emulate_stages, emulated_loss
from .plain_model import Loss


@dataclass(frozen=True, eq=False)
class TrainingTarget:
    """The layers to be cut, an example input of any batch, and the loss of an output."""

    layers: nn.Sequential
    example: ModelInput
    loss: Loss


def load_target(model: ModelSpec | None, case: Case | RuntimeCase) -> TrainingTarget:
    """Of a case. Raises ModelError as loading and cutting the model do, ValueError where there is none."""
    if isinstance(case, Case) and case.waits is not None:
        size = case.document.micro_batch_size // case.document.replicas
        layers = emulate_stages(case.waits, size)
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
        seed=spec.seed,
        known_only=spec.name not in spec.by_user,
    )
    dtype = dtype_named(spec.dtype)
    modes = Modes(channels_last=spec.channels_last)
    module = modes.converted(loaded.module.to(dtype))
    example = loaded.example.to(dtype=dtype, memory_format=modes.memory_format)
    layers = sequential(module, example, granularity=spec.granularity)
    _check_layers(layers, spec)
    named = loss_named(_loss(spec), spec.seed)
    return TrainingTarget(
        layers, example, partial(_sum_of_means) if named is None else lambda out, _: named.of(out)
    )


def _loss(spec: ModelSpec) -> str:
    if spec.loss not in LOSSES and spec.loss not in spec.by_user:
        raise ModelError(f"loss {shown(spec.loss)}: a file's word runs no code", "Name it yourself: `loss`.")
    return spec.loss


def _check_layers(layers: nn.Sequential, spec: ModelSpec) -> None:
    names = tuple(getattr(layers, "layer_names", ()))
    if not names or spec.layers_sha256 in ("", hash_names(names)):
        return
    raise ModelError(
        f"{spec.name} is not the model that was profiled as {shown(spec.profiled)}: it has "
        f"{counted(len(names), 'layer')}, {shown(names[0])} to {shown(names[-1])}, with other names",
        "Give that one as `model`, and as `settings` what it was profiled with.",
    )


def _sum_of_means(output: Any, target: object) -> torch.Tensor:
    """Something to go backward from, where no loss is named."""
    del target
    leaves = tree_leaves(output)
    means = [leaf.mean() for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    return torch.stack(means).sum()
