"""The bytes of a stage's layers that its ledger is made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from .errors import UsageError
from .layer import LayerCosts

Amount = float | npt.NDArray[np.float64]


@dataclass(frozen=True)
class StageBytes:
    """What the ledger is made from: bytes of a stage's layers, at the micro-batch size of one replica.

    `trainable` are those of the parameters that get gradients. `saved` is what backward needs of the stage's
    own layers, `saved_input` the part of its input that it saves besides; `input` its whole input; `received`
    and `sent` the tensors that cross its two cuts (0 where it has none); `workspace` what it needs at its
    peak besides all it saves (`stage_workspace`). `gathered`: the parameters of two neighbouring layers at
    most, which ZeRO has whole at a time (None: all of the stage). `copies`: of the trainable bytes those of
    tied weights that an earlier stage has, too: replicas do not add up their gradients among themselves (see
    `tied_weights`).
    """

    parameters: Amount
    trainable: Amount
    buffers: Amount
    saved: Amount
    saved_input: Amount
    input: Amount
    received: Amount
    sent: Amount
    workspace: Amount
    gathered: Amount | None = None
    copies: Amount = 0.0


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
    copied = [weight for weight in costs.tied if weight.is_copied(first, last + 1)]
    copies = sum(weight.trainable_bytes for weight in copied)
    buffers = sum(own.bytes for own in costs.shared_buffers if own.is_copied(first, last + 1))
    return StageBytes(
        parameters=float(costs.parameter_bytes[own].sum()) + sum(weight.bytes for weight in copied),
        trainable=float(costs.trainable_bytes[own].sum()) + copies,
        buffers=float(costs.buffer_bytes[own].sum()) + buffers,
        saved=float(costs.saved_bytes[own].sum()),
        saved_input=float(costs.saved_input_bytes[first]),
        input=received if first else costs.input_bytes,
        received=received,
        sent=float(costs.output_bytes[last]) if last < layers - 1 else 0.0,
        workspace=stage_workspace(costs.saved_bytes[own].tolist(), costs.workspace_bytes[own].tolist()),
        gathered=neighbours(costs.parameter_bytes[own].tolist()),
        copies=copies,
    )


def stage_workspace(saved: Sequence[float], workspace: Sequence[float]) -> float:
    """Bytes a stage needs at its peak besides all that its layers save; both given by layer, in their order.

    While layer i of the stage runs, forward or backward, the micro-batch at work holds what layers 0 to i
    save and the workspace of layer i. The peak is the largest of these sums: less than all saved bytes plus
    the largest workspace, where that belongs to an early layer.
    """
    peak = max(kept + own for kept, own in zip(accumulate(saved), workspace, strict=True))
    return max(peak - sum(saved), 0.0)


def neighbours(parameters: Sequence[float]) -> float:
    """The parameters of two layers in a row at most, given by layer: of the one at work and of the one that
    is fetched meanwhile."""
    return max((a + b for a, b in pairwise(parameters)), default=parameters[0])


def workspace_before_loss(own: Amount, loss_saved: Amount, loss_workspace: Amount) -> Amount:
    """Workspace of the last layer with the loss behind it, whose saved bytes count as the layer's own.

    `own`: the layer's, counted without the loss. Nothing of the loss is held while the layer itself runs, so
    the layer needs no more than what exceeds the loss' saved bytes, or what the loss needs above them.
    """
    return np.maximum(np.maximum(own - loss_saved, loss_workspace), 0)
