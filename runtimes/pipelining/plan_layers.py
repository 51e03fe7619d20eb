"""A user's model as the layers that a plan counts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from ...profiler.chain.layer_sequential import LayerSequential
from ...profiler.chain.shared_parameters import tensors_used
from ...profiler.sequential import sequential
from ...profiler.user_model.loaded_model import ModelInput
from ..formats.export_document import ExportDocument, check_layers
from .weight_copies import read_only_buffers, shared_tensor_error


def match_layers(
    document: ExportDocument,
    count: int,
    model: nn.Module,
    example: ModelInput | None,
    names: Sequence[str] | None,
    *,
    granularity: str,
) -> nn.Sequential:
    """`model` as it is where it is an nn.Sequential of the `count` layers of the plan, else made so: also
    where several of its layers register the same parameter or buffer, which runtimes refuse.

    Raises ExportError where it is another model, or is to be made sequential without an `example`.
    """
    is_so = isinstance(model, LayerSequential) or (
        isinstance(model, nn.Sequential) and len(model) == count and not _registers_twice(model)
    )
    made = model if is_so or example is None else sequential(model, example, granularity=granularity)
    return check_layers(document, count, made, names)


def _registers_twice(model: nn.Sequential) -> bool:
    by_layer = sum(len([*layer.parameters(), *layer.buffers()]) for layer in model)
    return by_layer != len([*model.parameters(), *model.buffers()])


def check_sharing(
    layers: nn.Sequential, parts: Sequence[int], devices: Sequence[object] | None = None
) -> None:
    """Raises ExportError where stages share a parameter, or a buffer that may be written, and are on
    different `devices` (None: all are)."""
    holder: dict[int, int] = {}
    read_only = {id(buffer) for buffer in read_only_buffers(layers)}
    for stage, (first, end) in enumerate(pairwise(parts)):
        for layer in layers[first:end]:
            for tensor in tensors_used(layer):
                if id(tensor) in read_only:
                    continue
                before = holder.setdefault(id(tensor), stage)
                if before != stage and (devices is None or devices[before] != devices[stage]):
                    raise shared_tensor_error(before, stage, tensor, "parameter or buffer")
