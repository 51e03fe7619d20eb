"""Memory ledger: bytes of a stage's layers, of the training of its weights, and every term of a device.

`StageBytes` holds the bytes of a stage's layers. `device_ledger` counts any program, action by action.
`ledger` sums the same terms with the closed forms of 1F1B and GPipe for the micro-batches in flight. Its
arguments are floats or numpy arrays that broadcast together, so one formula serves a single stage and the
table of all stages of a chain. tests/cost_models/test_memory_device.py compares both.

A device runs its list in order, so the list alone decides what is alive during an action, regardless of the
costs. A micro-batch is in flight on a chunk from the start of its F to the end of its W, or of its B if it
has no W. Meanwhile it holds:

    never         what its layers save, all the time
    always        its input, all the time; from the start of B also what its layers save
    except_last   like always; the last micro-batch like never

If some backwards are in two parts, as torch.distributed.pipelining runs them (`stage_backward_input`,
`stage_backward_weight`; read and counted in torch 2.14), these come on top:

    F to the end  the output of the chunk stays
    B             frees nothing while it runs, so its workspace comes on top. It leaves the gradients
                  that W needs. Then it frees the part of the graph after the last weight: the loss of
                  the last chunk is counted. On the first chunk it does nothing: W does all
    W             frees the rest gradually; counted at its end

PyTorch also has, for every micro-batch of the step, a buffer for the input of each chunk and one for its
gradient. It keeps the gradients of the inputs to the end of the step.

A stage that recomputes `first_3` keeps its input and what its layers from the fourth on save. Backward
recomputes the first three when it reaches them. By then nothing of the other layers is left, so these two
never add up: the larger counts for the micro-batch at work. Other layers would be recomputed while the saved
tensors of earlier layers are held. Megatron-LM's `--recompute-method block` also takes the first layers of
each stage, each as a separate checkpoint. Here they are one checkpoint, which keeps one input.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, floor
from typing import Any, Literal, NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt

from .errors import UsageError
from .layer import Floats
from .optimizers import FLOAT32, ZERO_STAGES, Optimizer, Precision, find_optimizer
from .program import Program
from .runtime import OFFLOAD

Amount = float | npt.NDArray[np.float64]


@dataclass(frozen=True)
class StageBytes:
    """Bytes of a stage's layers at the micro-batch size of one replica, the input of the ledger.

    Attributes:
        parameters: Bytes of all parameters.
        trainable: Bytes of the parameters that get gradients.
        buffers: Bytes of the buffers.
        saved: Bytes that backward needs of the stage's layers, without the stage's input.
        saved_input: Part of the stage's input that is saved for backward.
        input: Bytes of the stage's whole input.
        received: Bytes of the tensor that crosses the cut before the stage. 0 without a cut.
        sent: Bytes of the tensor that crosses the cut after the stage. 0 without a cut.
        workspace: Peak bytes in addition to all saved bytes.
        gathered: Most parameter bytes of two neighbouring layers, which ZeRO has whole at a time. None for
            the whole stage.
        copies: Trainable bytes of tied weights that an earlier stage also has. Replicas do not reduce them
            among themselves (see `layer.TiedWeight`).
        largest: Bytes of the largest trainable parameter.
        pending: With a backward in two parts, gradients that the first part leaves for the second.
        output: With a backward in two parts, bytes of the stage's output.
        released: With a backward in two parts, bytes of `saved` and `output` that the first part frees.
        layer_workspace: With a backward in two parts, largest workspace of a layer.
        besides: With recomputation, bytes of a micro-batch in flight in addition to its input (see
            `recompute_first`).
        working: With offloading (see `offload_saved`), most bytes that a layer receives and saves, without
            the stage's input.
        working_peak: With offloading, `working` with the layer's workspace.
        loss: With offloading, bytes that the loss after the last layer saves, included in `saved` alone.
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
        """Bytes of a micro-batch that go to the host and come back if the stage offloads."""
        return self.saved - self.loss


def workspace_before_loss(layer_workspace: Amount, loss_saved: Amount, loss_workspace: Amount) -> Amount:
    """Return the workspace of the last layer with the loss, whose saved bytes count for the layer.

    Nothing of the loss is held while the layer runs. So the layer needs only what exceeds the loss' saved
    bytes, or what the loss needs above them.

    Args:
        layer_workspace: Workspace of the layer, measured without the loss.
        loss_saved: Bytes that the loss saves.
        loss_workspace: Workspace of the loss.
    """
    return np.maximum(layer_workspace - loss_saved, loss_workspace)


def receive_ahead(stage: StageBytes, micro_batches: float) -> StageBytes:
    """Return the bytes of a stage as PyTorch's pipelining holds them if backwards are whole.

    From the beginning of a step there are buffers for the inputs and gradients that each of its micro-batches
    receives (torch/distributed/pipelining/stage.py: `_setup_forward_recv_info`). The input of a micro-batch
    in flight is in them. Its output stays until its backward. Then the input's gradient stays until it is
    sent, under GPipe with those of all other micro-batches. Each micro-batch is counted with both, plus one
    gradient. A stage without neighbours is unchanged.

    Args:
        stage: Bytes of the stage.
        micro_batches: Micro-batches of a step.
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
    """Return the bytes of a stage that offloads saved tensors, as those of one that always recomputes.

    Autograd's hooks copy each storage to the host when it is saved, and back for the operation that needs it
    (`runtimes/pipelining/stage.py`). For a micro-batch in flight the device holds the stage's input (and its
    output if the runtime keeps it) and what the loss saved, which runs outside of the hooks. For the
    micro-batch at work it holds what one layer receives, saves and works with, forward or backward. The
    layer's input counts whole: it exists while the layer runs, and comes back if the layer saved it.
    """
    return replace(
        stage,
        saved=stage.working,
        saved_input=stage.saved_input * 0,
        besides=stage.loss,
        workspace=stage.working_peak - stage.working,
    )


Recompute = str
RECOMPUTES: tuple[Recompute, ...] = ("never", "always", "except_last")
"""Recomputation of a stage, in addition to `first_N` (see `first_layers_word`) and `OFFLOAD`.

A plan whose stages differ is called by_stage.
"""
Moment = Literal["any", "passes", "step"]
"""Moment at which a device holds most: while micro-batches pass, or while the optimizer steps."""

FRAGMENTATION_RESERVE = 0.05
"""Share of the sum of the other terms that the caching allocator cannot use. An assumption of pplan."""
MEMORY_ERROR = 0.013
"""Relative error of the ledger of a transformer's configuration.

This is the largest error for the published B200 steps (`benchmarks/published_gpu.py`), rounded up: 1.11 %
with each model predicted with the libraries' bytes of the other, and 1.27 % with the assumed loss if none is
known. A configuration that exceeds a device's memory by no more than that is not refused.
"""


@dataclass(frozen=True)
class Training:
    """Training of a stage's weights.

    ZeRO spreads over the replicas (Rajbhandari et al., "ZeRO", SC 2020, section 5 and figure 1). Stage 1
    spreads the optimizer's state with the master weights, stage 2 also the gradients, stage 3 also the
    parameters. Buffers stay whole.

    Attributes:
        optimizer: Name of the optimizer.
        precision: Bytes of weights, gradients and master weights.
        replicas: Number of devices that add up their gradients.
        zero: ZeRO stage, 0 to 3.

    Raises:
        UsageError: A value is invalid.
    """

    optimizer: str = "sgd"
    precision: Precision = FLOAT32
    replicas: int = 1
    zero: int = 0

    def __post_init__(self) -> None:
        find_optimizer(self.optimizer)
        if self.zero not in ZERO_STAGES:
            raise UsageError(
                f"zero {self.zero}: there is no such stage", "Use 0 (nothing is spread), 1, 2 or 3."
            )
        if self.replicas < 1:
            raise UsageError(
                f"replicas {self.replicas}: must be at least 1", "Give the devices that hold the stage."
            )

    def states(self, stage: StageBytes) -> dict[str, Amount]:
        """Return the bytes of weights, buffers, gradients, master weights and optimizer state."""
        precision = self.precision
        state = self._optimizer.bytes_per_parameter(precision) - precision.master
        terms: dict[str, Amount] = {
            "weights": self._spread(stage.parameters, 3) + stage.buffers,
            "gradients": self._spread(self._gradients(stage.trainable), 2),
        }
        if precision.master:
            terms["master_weights"] = self._spread(stage.trainable * (precision.master / precision.weight), 1)
        return terms | {"optimizer": self._spread(stage.trainable * (state / precision.weight), 1)}

    def step_temporaries(self, stage: StageBytes) -> Amount | None:
        """Return the bytes that the optimizer's step allocates while it runs.

        None if it allocates nothing.

        The step updates the weights, or float32 master weights. For the latter PyTorch's optimizers also need
        the gradients in float32.
        """
        optimizer, precision = self._optimizer, self.precision
        if not optimizer.has_temporaries(precision):
            return None
        if precision.kernels == "foreach":
            amount = optimizer.foreach * stage.trainable
        else:
            amount = optimizer.for_loop * stage.largest
        amount = amount * ((precision.master or precision.weight) / precision.weight)
        if precision.gradient < precision.master:
            amount = amount + stage.trainable * (precision.master / precision.weight)
        return self._spread(amount, 1)

    def versions(self, stage: StageBytes, number: float) -> Amount:
        """Return the bytes of the weight versions in addition to the newest.

        Args:
            stage: Bytes of the stage.
            number: Number of versions. A fraction is an average over layers.

        Raises:
            UsageError: `number` is below 1.
        """
        if not number >= 1:
            raise UsageError(
                f"weight versions {number:g}: must be at least 1", "Give 1 for the weights alone."
            )
        return self._spread(stage.parameters, 3) * (number - 1)

    def exchange_bytes(self, stage: StageBytes) -> Amount:
        """Return the bytes of the buffers for the exchange between replicas, on one of them.

        DistributedDataParallel's buckets hold the gradients a second time, except those of copies of tied
        weights. With ZeRO stage 1 gradients are reduced in place after the last backward. The reduction
        allocates more only when the activations are gone. From stage 2 on the gradients of two neighbouring
        layers are whole at a time, with stage 3 also the parameters: those of the layer at work and of the
        next one.
        """
        if self.replicas == 1:
            return 0.0
        if self.zero == 0:
            return self._gradients(stage.trainable - stage.copies)
        if self.zero == 1:
            return stage.trainable * 0
        whole = stage.parameters if stage.gathered is None else stage.gathered
        return self._gradients(whole) + (whole if self.zero == 3 else 0.0)

    @property
    def _optimizer(self) -> Optimizer:
        return find_optimizer(self.optimizer)

    def _gradients(self, weights: Amount) -> Amount:
        """Return the gradient bytes for these bytes of weights.

        Tables of stages are not copied if both are equal.
        """
        precision = self.precision
        if precision.gradient == precision.weight:
            return weights
        return weights * (precision.gradient / precision.weight)

    def _spread(self, amount: Amount, from_stage: int) -> Amount:
        return amount / self.replicas if self.zero >= from_stage else amount


class LedgerOptions(TypedDict, total=False):
    """Arguments of `ledger` that most callers leave at their defaults."""

    weight_versions: float
    zero: int
    precision: Precision
    context_bytes: float
    moment: Moment
    ahead: float


def ledger(
    stage: StageBytes,
    *,
    in_flight: float,
    recompute: str,
    optimizer: str,
    replicas: int = 1,
    weight_versions: float = 1,
    zero: int = 0,
    precision: Precision = FLOAT32,
    context_bytes: float = 0,
    moment: Moment = "any",
    ahead: float = 0,
) -> dict[str, Amount]:
    """Return the bytes of a stage by term. Their sum is the memory that the stage needs.

    The terms are: weights (with buffers), gradients, optimizer state, further weight versions, activations of
    the micro-batches in flight (under recomputation: of the one being recomputed), their stage inputs (under
    recomputation), communication (one micro-batch's activation and gradient at each cut, and the exchange
    between replicas), workspace, the optimizer's step, the reserve, and the context of the device if it has
    one.

    The optimizer's temporaries are allocated after activations and workspace are freed, except for
    micro-batches that wait under an asynchronous schedule (one with several weight versions). Their term is
    the part above the freed bytes.

    One micro-batch is at work at a time, so the workspace counts once. GPipe runs the last micro-batch's
    backward first, so `except_last` keeps what `always` does except one stage input: that of the last is
    among its saved tensors. For other orders of the backwards use `device_ledger`. For `OFFLOAD` see
    `offload_saved`.

    Args:
        stage: Bytes of the stage's layers.
        in_flight: Micro-batches in flight.
        recompute: One of `RECOMPUTES`, or `OFFLOAD`.
        optimizer: See `Training`.
        replicas: See `Training`.
        weight_versions: Number of weight versions. May be an average over layers.
        zero: See `Training`.
        precision: See `Training`.
        context_bytes: Bytes of the device's context.
        moment: "passes" omits the optimizer's step, "step" gives the terms during it, "any" the larger. The
            first two are linear in `in_flight`.
        ahead: Micro-batches whose receive buffers exist from the beginning of a step (see `receive_ahead`). 0
            for the one at work.

    Raises:
        UsageError: A value is invalid.
    """
    training = Training(optimizer, precision, replicas, zero)
    stage = receive_ahead(stage, ahead) if ahead else stage
    if recompute == OFFLOAD:
        stage, recompute = offload_saved(stage), "always"
    activations, stage_inputs = _activations(stage, in_flight, recompute)
    versions = training.versions(stage, weight_versions)
    waits = _waiting(stage, in_flight - 1, recompute) if weight_versions > 1 else 0.0
    usage = Usage(activations, stage_inputs, stage.workspace, waits)
    return _sum_terms(training, stage, versions, usage, stage.received + stage.sent, context_bytes, moment)


class Usage(NamedTuple):
    """Temporary bytes at the moment when a device holds most of them.

    Attributes:
        activations: Bytes of saved activations.
        stage_inputs: Bytes of stage inputs under recomputation.
        workspace: Bytes of the workspace.
        waits: Bytes of micro-batches that are in flight while the optimizer steps.
        pending: Gradients that a W needs. None without W.
    """

    activations: Amount
    stage_inputs: Amount
    workspace: Amount
    waits: Amount
    pending: Amount | None = None


def _sum_terms(
    training: Training,
    stage: StageBytes,
    versions: Amount,
    usage: Usage,
    transfers: Amount,
    context_bytes: float,
    moment: Moment = "any",
) -> dict[str, Amount]:
    """Sum the terms of a ledger from the `usage`, which a closed form or a walk over the actions counted."""
    passing: dict[str, Amount] = {"activations": usage.activations, "stage_inputs": usage.stage_inputs}
    if usage.pending is not None:
        passing["pending_gradients"] = usage.pending
    terms = {
        **training.states(stage),
        "weight_versions": versions,
        **passing,
        "communication": transfers + training.exchange_bytes(stage),
        "workspace": usage.workspace,
    }
    temporaries = training.step_temporaries(stage)
    if temporaries is not None and moment == "step":
        terms |= {"activations": usage.waits, "stage_inputs": 0.0, "workspace": 0.0}
        terms["optimizer_step"] = temporaries
    elif temporaries is not None and moment == "any":
        freed = total(passing) + usage.workspace
        terms["optimizer_step"] = np.maximum(temporaries + usage.waits - freed, 0.0)
    return with_reserve(terms, context_bytes)


def with_reserve(terms: dict[str, Amount], context_bytes: float) -> dict[str, Amount]:
    """Return the terms with the reserve, and with the context if there is one.

    The allocator does not manage the context.
    """
    context: dict[str, Amount] = {"context": context_bytes} if context_bytes else {}
    return terms | {"reserve": FRAGMENTATION_RESERVE * total(terms)} | context


def total(terms: Mapping[str, Amount]) -> Any:
    """Return the sum of a ledger's terms."""
    return sum(terms.values())


def _waiting(stage: StageBytes, in_flight: float, recompute: str) -> Amount:
    """Return the bytes of micro-batches that are in flight and not at work."""
    return in_flight * (
        stage.saved + stage.saved_input if recompute == "never" else stage.input + stage.besides
    )


def _activations(stage: StageBytes, in_flight: float, recompute: str) -> tuple[Amount, Amount]:
    """Return the bytes of activations and of stage inputs, including the micro-batch at work."""
    whole = stage.saved + stage.saved_input
    _check_recompute(recompute)
    if recompute == "never":
        return in_flight * whole, stage.input * 0
    waiting = in_flight - 1 if recompute == "except_last" else in_flight
    return 1 * whole + in_flight * stage.besides, stage.input * waiting


def _check_recompute(recompute: str) -> None:
    if recompute not in RECOMPUTES:
        raise UsageError(f"recompute {recompute!r}: not known", f"Use one of: {', '.join(RECOMPUTES)}.")


class ActionBytes(NamedTuple):
    """Temporary bytes during each action of a device's list. Each array has shape (actions,)."""

    activations: Floats
    stage_inputs: Floats
    pending_gradients: Floats
    workspace: Floats
    in_flight: Floats
    """Number of micro-batches, summed over chunks. Halves count as whole ones."""

    @property
    def bytes(self) -> Floats:
        """(actions,) sum of all temporary bytes."""
        return self.activations + self.stage_inputs + self.pending_gradients + self.workspace


def micro_batches_by_action(program: Program, device: int, recompute: str = "never") -> tuple[Floats, Floats]:
    """Count the micro-batches that a device holds during each of its actions, regardless of the costs.

    Args:
        program: Program that the device runs.
        device: Number of the device.
        recompute: One of `RECOMPUTES`.

    Returns:
        (actions, chunks, 2, 4) micro-batches by chunk, by whether they save all in forward, and by field of
        `MicroBatchBytes`; and (actions,) micro-batches in flight, where halves count as whole ones.
    """
    _check_recompute(recompute)
    actions = program.actions[device]
    where: dict[tuple[str, int, int], int] = {action: position for position, action in enumerate(actions)}
    changes = np.zeros((len(actions) + 1, program.chunks, 2, 4))
    in_flight = np.zeros(len(actions) + 1)
    for start, (kind, m, chunk) in enumerate(actions):
        if kind != "F":
            continue
        backward = where["B", m, chunk]
        end = where.get(("W", m, chunk), backward)
        saves = recompute == "never" or (recompute == "except_last" and m == program.micro_batches - 1)
        starts = (start, backward, backward, backward + 1)
        for phase, begins in enumerate(starts if end > backward else starts[:2]):
            changes[begins, chunk, int(saves), phase] += program.share(m)
            changes[end + 1, chunk, int(saves), phase] -= program.share(m)
        in_flight[start] += 1
        in_flight[end + 1] -= 1
    return np.cumsum(changes, axis=0)[:-1], np.cumsum(in_flight)[:-1]


def bytes_by_action(
    program: Program, device: int, chunk_bytes: Sequence[StageBytes], recompute: str = "never"
) -> ActionBytes:
    """Count the temporary bytes of a device during each of its actions.

    Counts of micro-batches are multiplied by bytes at the end, so counts are exact. Arguments and errors are
    those of `device_ledger`.
    """
    counts, in_flight = micro_batches_by_action(program, device, recompute)
    sizes = np.array([micro_batch_bytes(chunk, program) for chunk in chunk_bytes])
    activations, inputs, pending = (
        np.tensordot(counts, amounts, axes=3) for amounts in np.moveaxis(sizes, -1, 0)
    )
    split = {action[1:] for action in program.actions[device] if action.kind == "W"}
    workspace = [
        chunk_bytes[chunk].layer_workspace
        if kind != "F" and (m, chunk) in split
        else chunk_bytes[chunk].workspace
        for kind, m, chunk in program.actions[device]
    ]
    return ActionBytes(activations, inputs, pending, np.array(workspace, np.float64), in_flight)


def device_ledger(
    program: Program,
    device: int,
    chunk_bytes: Sequence[StageBytes],
    training: Training,
    *,
    recompute: str = "never",
    weight_versions: float | Sequence[float] = 1,
    copies: int = 1,
    context_bytes: float = 0,
    ahead: bool = False,
) -> dict[str, float]:
    """Return the ledger of one device of `program`: the terms of `ledger`, counted action by action.

    Weights, gradients, states and versions are those of all chunks, and of the copies that no pipe trains
    (AvgPipe's reference). Activations, stage inputs and workspace are those of the action at which their sum
    is largest. The optimizer's step is that of `ledger`. Transfers are the largest received and the largest
    sent tensor of a chunk, without those between chunks of the device.

    Args:
        program: Program of the pipeline.
        device: Number of the device.
        chunk_bytes: Bytes of each chunk at the size of a whole micro-batch of one replica.
        training: Training of the weights. Its replicas are all devices that add up the same gradients,
            including Chimera's other direction.
        recompute: One of `RECOMPUTES`.
        weight_versions: Weight versions of every chunk, or one value per chunk.
        copies: Copies of the weights according to the schedule.
        context_bytes: Bytes of the device's context.
        ahead: Whether `chunk_bytes` are those of `receive_ahead`.

    Raises:
        UsageError: A value is invalid.
    """
    usage = bytes_by_action(program, device, chunk_bytes, recompute)
    peak = int(np.argmax(usage.bytes))
    activations, stage_inputs, pending, workspace, in_flight = (float(amounts[peak]) for amounts in usage)
    waiting = activations if recompute == "never" else stage_inputs
    waits = waiting * (in_flight - 1) / in_flight if np.max(weight_versions) > 1 else 0.0
    terms = _sum_terms(
        training,
        _merge_chunks(chunk_bytes),
        _versions(program, chunk_bytes, training, weight_versions, copies),
        Usage(activations, stage_inputs, workspace, waits, pending if program.splits_backward else None),
        _transfers(program, device, chunk_bytes, ahead),
        context_bytes,
    )
    return {name: float(amount) for name, amount in terms.items()}


class TermBytes(NamedTuple):
    """Bytes of activations, stage inputs and pending gradients: floats, or tables of all stages."""

    activations: Any
    inputs: Any = 0.0
    pending: Any = 0.0


class MicroBatchBytes(NamedTuple):
    """Bytes of a whole micro-batch on a chunk.

    Attributes:
        forward: Bytes held from its F on.
        backward: Bytes added at the start of its B.
        first_part: Bytes added at the start of a B with a separate W.
        after_first_part: Bytes added at the end of a B with a separate W.
    """

    forward: TermBytes
    backward: TermBytes
    first_part: TermBytes = TermBytes(0.0)
    after_first_part: TermBytes = TermBytes(0.0)


def micro_batch_bytes(stage: StageBytes, program: Program) -> tuple[MicroBatchBytes, MicroBatchBytes]:
    """Return the bytes of a micro-batch that recomputes, and of one that saves all in forward."""
    saved, besides = stage.saved + stage.saved_input, stage.besides
    if not program.splits_backward:
        recomputing = MicroBatchBytes(TermBytes(besides, stage.input), TermBytes(saved))
        return recomputing, MicroBatchBytes(TermBytes(saved), TermBytes(0.0))
    output = stage.output
    parts = TermBytes(0.0, 0.0, stage.pending), TermBytes(-stage.released)
    return (
        MicroBatchBytes(TermBytes(output + besides, stage.input), TermBytes(saved), *parts),
        MicroBatchBytes(TermBytes(saved + output), TermBytes(0.0), *parts),
    )


def _merge_chunks(chunks: Sequence[StageBytes]) -> StageBytes:
    """Merge all chunks of a device into one. Only the terms of the weights are valid."""
    parts = [float(chunk.parameters if chunk.gathered is None else chunk.gathered) for chunk in chunks]
    return replace(
        chunks[0],
        parameters=sum(float(chunk.parameters) for chunk in chunks),
        trainable=sum(float(chunk.trainable) for chunk in chunks),
        buffers=sum(float(chunk.buffers) for chunk in chunks),
        gathered=max(parts),
        copies=sum(float(chunk.copies) for chunk in chunks),
        largest=max(float(chunk.largest) for chunk in chunks),
    )


def _versions(
    program: Program,
    chunks: Sequence[StageBytes],
    training: Training,
    versions: float | Sequence[float],
    copies: int,
) -> Amount:
    """Return the bytes of older weight versions, and of copies of the weights that no pipe trains."""
    each = [float(versions)] * len(chunks) if isinstance(versions, (int, float)) else list(versions)
    if len(each) != len(chunks):
        raise UsageError(
            f"weight_versions: {len(each)} values for {len(chunks)} chunks",
            "Give one value, or one for each chunk.",
        )
    older = sum(training.versions(chunk, number) for chunk, number in zip(chunks, each, strict=True))
    pipes = len(program.pipes)
    return older + _merge_chunks(chunks).parameters / pipes * max(copies - pipes, 0)


def _transfers(program: Program, device: int, chunks: Sequence[StageBytes], ahead: bool) -> float:
    """Return the bytes of the largest tensors that a device receives and sends between its neighbours.

    With a backward in two parts these are PyTorch's buffers of every chunk and micro-batch (see the module).
    """
    if program.splits_backward:
        shares = sum(program.share(micro_batch) for micro_batch in range(program.micro_batches))
        return shares * sum(float(2 * chunk.received + chunk.sent) for chunk in chunks)
    if ahead:
        return sum(float(chunk.received + chunk.sent) for chunk in chunks)
    received, sent = [0.0], [0.0]
    for pipe in program.pipes:
        for before, after in pairwise(pipe):
            if before.device != after.device == device:
                received.append(float(chunks[after.chunk].received))
            if after.device != before.device == device:
                sent.append(float(chunks[before.chunk].sent))
    return max(received) + max(sent)


def round_ledger(terms: Mapping[str, float]) -> dict[str, int]:
    """Round the terms of a ledger to whole bytes, each by less than a byte.

    Their sum is that of the terms, rounded up: the fewest whole bytes that hold them.
    """
    whole = {name: floor(amount) for name, amount in terms.items()}
    lacking = ceil(sum(terms.values())) - sum(whole.values())
    for name in sorted(terms, key=lambda name: whole[name] - terms[name])[:lacking]:
        whole[name] += 1
    return whole


_WORD = re.compile(r"first_([1-9]\d{0,6})")


def first_layers_word(count: int) -> str:
    """Return the word for a stage that recomputes its first `count` layers.

    >>> first_layers_word(3)
    'first_3'
    """
    return f"first_{count}"


def count_first_layers(word: str) -> int | None:
    """Return how many first layers a stage with this word recomputes, or None for other words.

    >>> count_first_layers("first_3"), count_first_layers("always")
    (3, None)
    """
    match = _WORD.fullmatch(word)
    return None if match is None else int(match[1])


def check_stage_word(word: str, words: Collection[str], unit: str = "layers") -> str:
    """Return the word if it is one of `words` or `first_N`.

    Args:
        word: Word to check.
        words: Allowed words.
        unit: Unit of N for the message.

    Raises:
        ValueError: The word is not allowed.
    """
    if word not in words and count_first_layers(word) is None:
        raise ValueError(f"must be one of {', '.join(words)}, or first_N for the first N {unit} of the stage")
    return word


def whole_word(word: str) -> str:
    """Return the word for the ledger: "always" for the bytes of `recompute_first` and `offload_saved`.

    >>> whole_word("first_3"), whole_word("never"), whole_word("offload")
    ('always', 'never', 'always')
    """
    return word if count_first_layers(word) is None and word != OFFLOAD else "always"


def repeat_word(word: str) -> str:
    """Return the word for the seconds: whether some layers are recomputed. Offloading recomputes nothing.

    >>> repeat_word("first_3"), repeat_word("offload")
    ('always', 'never')
    """
    return "never" if word == OFFLOAD else whole_word(word)


def recompute_kind(word: str) -> str:
    """Return the word without its number of layers, as runtimes name it.

    >>> recompute_kind("first_3"), recompute_kind("always")
    ('first_layers', 'always')
    """
    return word if count_first_layers(word) is None else "first_layers"


def recompute_kinds(words: Sequence[str]) -> set[str]:
    """Return the kinds of several words.

    >>> sorted(recompute_kinds(["first_3", "never", "first_1"]))
    ['first_layers', 'never']
    """
    return {recompute_kind(word) for word in words}


def recompute_first(stage: StageBytes, first: StageBytes, rest: StageBytes) -> StageBytes:
    """Return the bytes of a stage that recomputes its first layers, as those of one that always recomputes.

    In flight it holds its input and what the rest saves. The micro-batch at work also needs the workspace of
    the rest. When the rest is done it needs what the first layers save and their workspace instead of what
    the rest saved. The larger of both counts.

    Args:
        stage: Bytes of the whole stage.
        first: Bytes of the layers that are recomputed.
        rest: Bytes of the other layers.
    """
    again, besides = first.saved + first.saved_input, rest.saved + rest.saved_input
    more = np.maximum(again - besides, 0.0)
    most = np.maximum(rest.workspace, again - besides + first.workspace)
    return replace(
        stage,
        saved=more - first.saved_input,
        saved_input=first.saved_input,
        besides=besides,
        workspace=most - more,
    )
