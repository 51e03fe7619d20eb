"""The model that is measured: its working copy on the device, its layers and the clock."""

from __future__ import annotations

import dataclasses
import itertools
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf

import torch
from torch import nn

from ..cost_models.errors import ModelError
from .clocks import Clock
from .comparison import left_alone
from .flow import KEEP_BATCH, ShapeDependsOnBatch
from .layer_sequential import storage_aliases
from .layers import LayerChain, build_chain
from .local_machine import DTYPES, parse_dtype
from .losses import Loss, load_loss
from .modes import Modes
from .repeated_layers import shorten
from .tracing import refuse_hooks
from .user_model import (
    DoesNotFit,
    LoadedModel,
    ModelInput,
    copy_model,
    copy_to_host,
    copy_to_meta,
    is_out_of_memory,
    own_dtype,
    refusal,
    refuse_unusable,
)


@dataclass(frozen=True)
class MeasurementTarget:
    """The working copy of the model, its layers, and the clock."""

    loaded: LoadedModel
    chain: LayerChain
    device: torch.device
    dtype: torch.dtype
    clock: Clock
    seed: int
    notes: tuple[str, ...] = ()
    """What the profile is to say of it."""
    modes: Modes = field(default_factory=Modes)
    """The working copy is converted already."""
    loss: Loss | None = None
    representatives: tuple[int, ...] | None = None
    """By layer: itself, or, for one that cannot be run, an equal one. None: each itself."""


@dataclass(frozen=True)
class Setup:
    """How a model is to be measured."""

    device: torch.device
    dtype: str | None
    granularity: str
    keep_together: tuple[str, ...]
    loss: str
    modes: Modes
    seed: int
    clock: Clock
    verify_seconds: float = inf
    """That comparing layers and model may take, but for a first pass."""


def build_target(
    loaded: LoadedModel, setup: Setup, smallest: int, *, host: bool = False, few_blocks: bool = False
) -> MeasurementTarget:
    """The working copy on the device (`host`: left on the CPU), and its layers. `few_blocks`: of many equal
    blocks only some need be traced. Raises DoesNotFit."""
    kind, notes = dtype_for(loaded, setup.dtype)
    place = torch.device("cpu") if host else setup.device
    refuse_hooks(loaded.module, loaded.name)  # a copy of a GraphModule has none
    try:
        copy = setup.modes.converted(_copied_to(place, loaded).to(kind))
        for parameter in copy.parameters():
            parameter.grad = None
        example = loaded.example_input_for(smallest).to(dtype=kind)
        with left_alone(loaded.module, loaded.name):
            chain, representatives = _chain(copy, example, loaded, setup, few_blocks=few_blocks)
        if chain.faults.any_size:
            raise ShapeDependsOnBatch(f"{loaded.name}: {chain.faults.any_size}", KEEP_BATCH)
        layouts = setup.modes.notes((*copy.parameters(), *copy.buffers(), *example.tensors))
        return MeasurementTarget(
            dataclasses.replace(loaded, module=copy),
            chain,
            setup.device,
            kind,
            setup.clock,
            setup.seed,
            (*loaded.notes, *notes, *layouts),
            setup.modes,
            load_loss(setup.loss, setup.seed),
            representatives,
        )
    except Exception as error:
        if isinstance(error, ModelError) and notes:
            error.hint = (
                f"Its parameters are of several dtypes, and were converted to {_name(kind)} before it ran: "
                f"let forward convert by the weights at hand, as in x.to(layer.weight.dtype). {error.hint}"
            )
        if not is_out_of_memory(error):
            raise
        reason = refusal(error)
    raise DoesNotFit(
        f"{loaded.name}: the model does not fit on {place}: {reason}",
        "Use a smaller `dtype`, a smaller model, or a device of more memory.",
    )


def _chain(
    copy: nn.Module, example: ModelInput, loaded: LoadedModel, setup: Setup, *, few_blocks: bool
) -> tuple[LayerChain, tuple[int, ...] | None]:
    """The layers, and their `representatives`."""
    aliases = storage_aliases(loaded.module)
    build = partial(
        build_chain,
        copy,
        example,
        name=loaded.name,
        granularity=setup.granularity,
        keep_together=setup.keep_together,
        aliases=aliases,
        verify=True,
        verify_seconds=setup.verify_seconds,
    )
    if few_blocks and not (aliases or setup.keep_together):
        with shorten(copy, example, setup.granularity) as row, suppress(ModelError):
            chain = None if row is None else build()
        whole = None if row is None or chain is None else row.complete(chain, copy)
        if whole is not None:
            return whole
    return build(), None


def _copied_to(place: torch.device, loaded: LoadedModel) -> nn.Module:
    """A copy there. To another device than the model's own, it does not lie on that twice."""
    model, name = loaded.module, loaded.name
    if place.type == "meta":
        return copy_to_meta(model, name)
    if place.type == "cpu" and any(parameter.device.type == "cuda" for parameter in model.parameters()):
        return copy_to_host(model, name)
    for path, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise ModelError(
                f"{name}: {path} is on the meta device and has no values",
                "Build it outside torch.device('meta'), or look at its structure alone: device='meta'.",
            )
    return copy_model(model, name).to(place)


def dtype_for(loaded: LoadedModel, name: str | None) -> tuple[torch.dtype, tuple[str, ...]]:
    """What the model is converted to, and what is to be said of it. Raises UsageError, ModelError."""
    dtype = None if name is None else parse_dtype(name)
    module = loaded.module
    refuse_unusable(loaded.name, module)
    tensors = list(itertools.chain(module.named_parameters(), module.named_buffers()))
    for path, tensor in tensors:
        if tensor.is_complex():
            raise ModelError(
                f"{loaded.name}: {path} is {_name(tensor.dtype)}; only real numbers can be measured",
                "Keep real and imaginary parts in tensors of their own (torch.view_as_real).",
            )
    if dtype is not None:
        return dtype, ()
    own = own_dtype(module)
    if own is not None and own in DTYPES.values():
        return own, ()
    kinds = sorted({_name(tensor.dtype) for _, tensor in tensors if tensor.dtype.is_floating_point})
    note = f"the model is in {' and '.join(kinds)} and was measured in float32; choose another with `dtype`"
    return torch.float32, (note,) if kinds else ()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
