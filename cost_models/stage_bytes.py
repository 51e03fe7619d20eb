"""The bytes of a stage's layers, from which its ledger is made.

All are floats, or numpy arrays that broadcast together: one formula serves a single stage and the table of
all stages that a chain can have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    `tied_weights`). `largest`: of the trainable parameters the largest. `besides`: where it recomputes, what
    a micro-batch in flight holds besides its input (see `first_layers`).

    Of a backward in two parts (see `device_memory`): `pending`: gradients that the first leaves for the
    second; `output`: what the stage hands on; `released`: of `saved` and `output` what the first frees;
    `layer_workspace`: the largest of a layer.

    Where what is saved goes to the host (see `offload_saved`): `working`: the most that a layer is handed and
    saves, the stage's own input aside; `working_peak`: the same with the layer's workspace; `loss`: what the
    loss behind the last layer saves, in `saved` alone.
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
    largest: Amount = 0.0
    pending: Amount = 0.0
    output: Amount = 0.0
    released: Amount = 0.0
    layer_workspace: Amount = 0.0
    besides: Amount = 0.0
    working: Amount = 0.0
    working_peak: Amount = 0.0
    loss: Amount = 0.0

    @property
    def offloaded(self) -> Amount:
        """Bytes of a micro-batch that go to the host, and come back, where the stage offloads."""
        return self.saved - self.loss


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
    buffers = sum(shared.bytes for shared in costs.shared_buffers if shared.is_copied(first, last + 1))
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


def workspace_before_loss(own: Amount, loss_saved: Amount, loss_workspace: Amount) -> Amount:
    """Workspace of the last layer with the loss behind it, whose saved bytes count as the layer's own.

    `own`: the layer's, counted without the loss. Nothing of the loss is held while the layer itself runs, so
    the layer needs no more than what exceeds the loss' saved bytes, or what the loss needs above them.
    """
    return np.maximum(own - loss_saved, loss_workspace)


def receive_ahead(stage: StageBytes, micro_batches: float) -> StageBytes:
    """The bytes of a stage as PyTorch's pipelining has them where backwards are whole.

    From the beginning of a step on it has buffers for what each of the step's micro-batches receives, inputs
    and gradients (torch/distributed/pipelining/stage.py: `_setup_forward_recv_info`). Of a micro-batch in
    flight the input lies in them; its output stays until its backward, and then the input's gradient until it
    is sent, under GPipe with those of all others: each is counted with both, and one gradient besides. A
    stage without neighbours is as it was.
    """
    output = np.where(stage.received + stage.sent > 0, stage.output, 0.0)
    return replace(
        stage,
        saved_input=np.maximum(stage.saved_input, stage.received) + output,
        input=stage.input + output,
        received=(micro_batches + 1) * stage.received,
        sent=micro_batches * stage.sent,
    )


def offload_saved(stage: StageBytes) -> StageBytes:
    """The bytes of a stage that keeps what it saves in the host's memory, as those of one that recomputes
    always.

    Autograd's hooks copy each storage to the host when it is saved, and back for the operation that needs it
    (`runtimes/pipelining/stage.py`). So the device has, of a micro-batch in flight, the stage's input
    (and its output, where the runtime keeps that), and what the loss saved, which runs outside of the hooks;
    and of the one at work what one layer is handed, saves and works with, forward or backward. What it is
    handed counts whole: that is there while it runs, and comes back where the layer saved it, too.
    """
    return replace(
        stage,
        saved=stage.working,
        saved_input=stage.saved_input * 0,
        besides=stage.loss,
        workspace=stage.working_peak - stage.working,
    )
