"""The bytes of one stage, layer by layer: what the tables of all stages are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from pplan.cost_models.errors import UsageError
from pplan.cost_models.layer import LayerCosts
from pplan.cost_models.memory import StageBytes


def is_copied(layers: Sequence[int], first: int, end: int) -> bool:
    """Return whether a layer from `first` to before `end` uses a tensor of these layers, and an earlier one
    as well."""
    return layers[0] < first and any(first <= layer < end for layer in layers)


def stage_bytes(costs: LayerCosts, first: int, last: int) -> StageBytes:
    """The bytes of the layers `first` to `last` (0-based, inclusive), or of a chunk of a device. Raises
    UsageError where the layers cannot be."""
    layers = len(costs.saved_bytes)
    if not 0 <= first <= last < layers:
        raise UsageError(
            f"layers {first} to {last} of {layers}: no stage", f"Give layers of 0 to {layers - 1}, in order."
        )
    own = slice(first, last + 1)
    received = float(costs.output_bytes[first - 1]) if first else 0.0
    copied = [weight for weight in costs.tied if is_copied(weight.layers, first, last + 1)]
    copies = sum(weight.trainable_bytes for weight in copied)
    buffers = sum(own.bytes for own in costs.shared_buffers if is_copied(own.layers, first, last + 1))
    output, is_last = float(costs.output_bytes[last]), last == layers - 1
    working = costs.offloaded_bytes[own] + np.append(0.0, costs.output_bytes[first:last])
    return StageBytes(
        parameters=float(costs.parameter_bytes[own].sum()) + sum(weight.bytes for weight in copied),
        trainable=float(costs.trainable_bytes[own].sum()) + copies,
        buffers=float(costs.buffer_bytes[own].sum()) + buffers,
        saved=float(costs.saved_bytes[own].sum()),
        saved_input=float(costs.saved_input_bytes[first]),
        input=received if first else costs.input_bytes,
        received=received,
        sent=0.0 if is_last else output,
        workspace=stage_workspace(costs.saved_bytes[own].tolist(), costs.workspace_bytes[own].tolist()),
        gathered=neighbours(costs.parameter_bytes[own].tolist()),
        copies=copies,
        largest=max([float(costs.largest_bytes[own].max()), *(own.trainable_bytes for own in copied)]),
        pending=float(costs.pending_bytes[own].sum()) if first else 0.0,
        output=output,
        released=costs.loss_bytes + output if first and is_last else 0.0,
        layer_workspace=float(costs.workspace_bytes[own].max()),
        working=float(working.max()),
        working_peak=float((working + costs.workspace_bytes[own]).max()),
        loss=costs.loss_bytes if is_last else 0.0,
    )


def stage_workspace(saved: Sequence[float], workspace: Sequence[float]) -> float:
    """Bytes a stage needs at its peak besides all that its layers save; both given by layer, in their order.

    While layer i of the stage runs, forward or backward, the micro-batch at work holds what layers 0 to i
    save and the workspace of layer i. The peak is the largest of these sums: less than all saved bytes plus
    the largest workspace, where that belongs to an early layer.
    """
    peak = max(before + own for before, own in zip(accumulate(saved), workspace, strict=True))
    return max(peak - sum(saved), 0.0)


def neighbours(parameters: Sequence[float]) -> float:
    """The parameters of two layers in a row at most, given by layer: of the one at work and of the one that
    is fetched meanwhile."""
    return max((a + b for a, b in pairwise(parameters)), default=parameters[0])
