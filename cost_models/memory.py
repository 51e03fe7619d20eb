"""The memory ledger: bytes of a stage's layers, of the training of its weights, and every term of a device.

`StageBytes` holds the bytes of a stage's layers. `device_ledger` counts any program, action by action.
`ledger` sums the same terms with the closed forms of 1F1B and GPipe for what is in flight: its arguments are
floats or numpy arrays that broadcast together, so that one formula serves a single stage and the table of all
stages of a chain. tests/cost_models/test_memory_device.py compares both.

A device runs its list in order, so what is alive during an action follows from the list alone, whatever the
costs. A micro-batch is in flight on a chunk from the start of its F to the end of its W, of its B where it
has no W, and holds meanwhile:

    never         what its layers save, all the time
    always        its input, all the time; from the start of B also what its layers save
    except_last   as always; the last micro-batch as never

Where some backwards are in two parts, as torch.distributed.pipelining runs them (`stage_backward_input`,
`stage_backward_weight`; read and counted in torch 2.14), that is not all:

    F to the end  what the chunk hands on stays, too
    B             frees nothing while it runs, so that its workspace comes on top of all, and leaves the
                  gradients that W needs. Then it frees the part of the graph behind the last weight: counted
                  is the loss of the last chunk. On the first chunk it does nothing: W does all
    W             frees the rest as it goes; counted at its end

and PyTorch has, of every micro-batch of the step, a buffer for what each chunk receives, and one for its
gradient; and it keeps the gradients of the inputs to the end of the step.

A stage that recomputes `first_3` keeps its input and what its layers from the fourth on save; backward runs
the first three again when it comes to them, and by then nothing of the others is left. So these two never add
up: the larger counts for the micro-batch at work. Any other layers would be run again while what the layers
before them save is held. Megatron-LM's `--recompute-method block` takes the first layers of each stage, too,
each as its own checkpoint; here they are one checkpoint, which keeps one input.
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
    """What the ledger is made from: bytes of a stage's layers, at the micro-batch size of one replica.

    `trainable` are those of the parameters that get gradients. `saved` is what backward needs of the stage's
    own layers, `saved_input` the part of its input that it saves besides; `input` its whole input; `received`
    and `sent` the tensors that cross its two cuts (0 where it has none); `workspace` what it needs at its
    peak besides all it saves. `gathered`: the parameters of two neighbouring layers at
    most, which ZeRO has whole at a time (None: all of the stage). `copies`: of the trainable bytes those of
    tied weights that an earlier stage has, too: replicas do not add up their gradients among themselves (see
    `layer.TiedWeight`). `largest`: of the trainable parameters the largest. `besides`: where it
    recomputes, what a micro-batch in flight holds besides its input (see `recompute_first`).

    Of a backward in two parts (see above): `pending`: gradients that the first leaves for the
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


Recompute = str
RECOMPUTES: tuple[Recompute, ...] = ("never", "always", "except_last")
"""Of a stage, besides `first_N` (see `first_layers`) and `OFFLOAD`; a plan whose stages differ is called
by_stage."""
Moment = Literal["any", "passes", "step"]
"""When a device holds most: while micro-batches pass, or while the optimizer steps."""

FRAGMENTATION_RESERVE = 0.05
"""Share added to the sum of the other terms for what the caching allocator cannot use. Our choice."""
MEMORY_ERROR = 0.013
"""Share by which the ledger of a transformer's configuration may be off. The worst error of the published
B200 steps (`benchmarks/published_gpu.py`), rounded up: 1.11 % with each model predicted with the libraries'
bytes of the other, and 1.27 % with the loss that is assumed where none is known. A configuration that exceeds
a device's memory by no more than that is not refused."""


@dataclass(frozen=True)
class Training:
    """How the weights of a stage are trained. `replicas`: devices that add up their gradients.

    `zero` spreads over them: in stage 1 the optimizer's state (with the master weights), in stage 2 the
    gradients too, in stage 3 the parameters too; buffers stay whole. Rajbhandari et al., "ZeRO", SC 2020,
    section 5 and figure 1. Raises UsageError for what cannot be.
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
        """Bytes of the weights (with buffers), the gradients, the master weights, where there are some, and
        the optimizer's state on one replica."""
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
        """Bytes that an optimizer's step needs besides, while it runs; None where it allocates nothing.

        Of what it updates: the weights, or float32 masters, for which PyTorch's optimizers also need the
        gradients in float32.
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
        """Bytes of the weight versions besides the newest; a fraction is an average over layers."""
        if not number >= 1:
            raise UsageError(
                f"weight versions {number:g}: must be at least 1", "Give 1 for the weights alone."
            )
        return self._spread(stage.parameters, 3) * (number - 1)

    def exchange_bytes(self, stage: StageBytes) -> Amount:
        """Bytes of what the replicas exchange, on one of them.

        DistributedDataParallel's buckets hold the gradients once more, but for those of copies of tied
        weights. With ZeRO stage 1 gradients are reduced where they lie, after the last backward: what a
        reduction needs besides comes when the activations are gone. From stage 2 on the gradients of two
        neighbouring layers are whole at a time, with stage 3 the parameters too: of the layer at work and of
        the next one.
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
        """Bytes of the gradients of so many bytes of weights; tables of stages are not copied in vain."""
        precision = self.precision
        if precision.gradient == precision.weight:
            return weights
        return weights * (precision.gradient / precision.weight)

    def _spread(self, amount: Amount, from_stage: int) -> Amount:
        return amount / self.replicas if self.zero >= from_stage else amount


class LedgerOptions(TypedDict, total=False):
    """Of `ledger`'s arguments those that most callers leave alone."""

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
    """Bytes by term; their sum is what the stage needs.

    weights (with buffers), gradients, optimizer state, further weight versions, activations of the
    micro-batches in flight (under recomputation: of the one being recomputed), their stage inputs (under
    recomputation), communication (one micro-batch's activation and gradient at each cut; for replicas what
    they exchange), workspace, the optimizer's step, and the reserve; and the context of the device,
    where it has one.
    The optimizer's temporaries come when activations and workspace are gone, but for those of micro-batches
    that wait under an asynchronous schedule (one with several weight versions): its term is what they need
    above them. `moment`: with "passes" without it, with "step" as they are then; both are lines of
    `in_flight`, and the ledger is the larger.
    `ahead`: micro-batches of a step whose buffers are there from its beginning (see `receive_ahead`); 0: of
    none but the one at work.
    `replicas`, `zero` and `precision` as of `Training`; `weight_versions` may be an average over layers.
    One micro-batch is at work at a time, whatever is in flight, so that the workspace is there once.
    GPipe runs the last micro-batch's backward first, so `except_last` keeps what `always` does but one stage
    input: that of the last is among what it saves. Where backwards run in another order,
    `device_ledger` counts. `OFFLOAD`: as of `offload_saved`.

    Raises UsageError.
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
    """Bytes that come and go, as a device holds most of them; `waits`: of micro-batches that are in flight
    while the optimizer steps; `pending`: gradients that a W needs, where there is one."""

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
    """The terms with the reserve and, where there is one, the context, which no allocator divides."""
    context: dict[str, Amount] = {"context": context_bytes} if context_bytes else {}
    return terms | {"reserve": FRAGMENTATION_RESERVE * total(terms)} | context


def total(terms: Mapping[str, Amount]) -> Any:
    """Sum of a ledger's terms."""
    return sum(terms.values())


def _waiting(stage: StageBytes, in_flight: float, recompute: str) -> Amount:
    """Of micro-batches that are in flight and not at work."""
    return in_flight * (
        stage.saved + stage.saved_input if recompute == "never" else stage.input + stage.besides
    )


def _activations(stage: StageBytes, in_flight: float, recompute: str) -> tuple[Amount, Amount]:
    """Activations and stage inputs of the micro-batches in flight, and of the one at work."""
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
    """Bytes during each action of a device's list, each of shape (actions,): what comes and goes."""

    activations: Floats
    stage_inputs: Floats
    pending_gradients: Floats
    workspace: Floats
    in_flight: Floats
    """Number of micro-batches, by chunk, halves counted as whole ones."""

    @property
    def bytes(self) -> Floats:
        """All of it."""
        return self.activations + self.stage_inputs + self.pending_gradients + self.workspace


def micro_batches_by_action(program: Program, device: int, recompute: str = "never") -> tuple[Floats, Floats]:
    """Count what a device holds during each of its actions, whatever the costs.

    Returns:
        (actions, chunks, 2, 4): micro-batches by chunk, by whether they save all in forward, and by field of
        `MicroBatchBytes`; and (actions,): micro-batches in flight, halves counted as whole ones.
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
    """Count the bytes that a device holds during each action, besides what it holds throughout.

    Micro-batches are counted, by chunk and by what they hold, before bytes are taken: counts are exact.
    Arguments and errors as of `device_ledger`.
    """
    counts, in_flight = micro_batches_by_action(program, device, recompute)
    sizes = np.array([micro_batch_bytes(chunk, program) for chunk in chunk_bytes])
    activations, inputs, pending = (np.tensordot(counts, own, axes=3) for own in np.moveaxis(sizes, -1, 0))
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
    """The ledger of one device of `program`: the terms of `ledger`, counted action by action.

    `chunk_bytes`: of each of its chunks, at the size of a whole micro-batch of one replica. The replicas of
    `training` are all devices that add up the same gradients: Chimera's other direction counts too.
    `weight_versions`: of every chunk, or one value a chunk; `copies` of the weights as the schedule says.

    Weights, gradients, states and versions are those of all chunks, and of the copies that no pipe trains
    (AvgPipe's reference). Activations, stage inputs and the workspace of the chunk at work are taken
    together, at the action at which their sum is largest; the optimizer's step as in `ledger`.
    Transfers: the largest received and the largest sent tensor of a chunk; none between chunks of the device.
    `ahead`: of all chunks, whose bytes are those of `receive_ahead`.
    Raises UsageError.
    """
    usage = bytes_by_action(program, device, chunk_bytes, recompute)
    peak = int(np.argmax(usage.bytes))
    activations, stage_inputs, pending, workspace, in_flight = (float(own[peak]) for own in usage)
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
    """Bytes of activations, of stage inputs and of pending gradients: floats, or tables of all stages."""

    activations: Any
    inputs: Any = 0.0
    pending: Any = 0.0


class MicroBatchBytes(NamedTuple):
    """Of a whole micro-batch on a chunk: what it holds from its F on; what its B adds as it begins; and,
    where the backward is in two parts, what the first adds then, and at its end."""

    forward: TermBytes
    backward: TermBytes
    first_part: TermBytes = TermBytes(0.0)
    behind_first_part: TermBytes = TermBytes(0.0)


def micro_batch_bytes(stage: StageBytes, program: Program) -> tuple[MicroBatchBytes, MicroBatchBytes]:
    """Of a micro-batch of `program` that recomputes, and of one that saves all in forward."""
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
    """All chunks of a device in one, as far as the terms of the weights read it."""
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
    """Weight versions besides the newest, and copies of the weights besides those of the pipes."""
    each = [float(versions)] * len(chunks) if isinstance(versions, (int, float)) else list(versions)
    if len(each) != len(chunks):
        raise UsageError(
            f"weight_versions: {len(each)} values for {len(chunks)} chunks",
            "Give one value, or one for each chunk.",
        )
    older = sum(training.versions(chunk, own) for chunk, own in zip(chunks, each, strict=True))
    pipes = len(program.pipes)
    return older + _merge_chunks(chunks).parameters / pipes * max(copies - pipes, 0)


def _transfers(program: Program, device: int, chunks: Sequence[StageBytes], ahead: bool) -> float:
    """The largest tensor that comes from the device before, and the largest that goes to the one after; with
    a backward in two parts PyTorch's buffers (see above), those of every chunk and micro-batch."""
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
    """A ledger's terms in whole bytes, each less than a byte off. Their sum is that of the terms, rounded
    up: the least whole memory that they fit into."""
    whole = {name: floor(amount) for name, amount in terms.items()}
    lacking = ceil(sum(terms.values())) - sum(whole.values())
    for name in sorted(terms, key=lambda name: whole[name] - terms[name])[:lacking]:
        whole[name] += 1
    return whole


_WORD = re.compile(r"first_([1-9]\d{0,6})")


def first_layers_word(count: int) -> str:
    """The word for a stage that runs so many of its first layers again.

    >>> first_layers_word(3)
    'first_3'
    """
    return f"first_{count}"


def count_first_layers(word: str) -> int | None:
    """How many of its first layers a stage of such a word runs again; None of every other word.

    >>> count_first_layers("first_3"), count_first_layers("always")
    (3, None)
    """
    match = _WORD.fullmatch(word)
    return None if match is None else int(match[1])


def check_stage_word(word: str, words: Collection[str], unit: str = "layers") -> str:
    """Return the word if it is one of these, or `first_N`. Raises ValueError."""
    if word not in words and count_first_layers(word) is None:
        raise ValueError(f"must be one of {', '.join(words)}, or first_N for the first N {unit} of the stage")
    return word


def whole_word(word: str) -> str:
    """The word as the ledger takes it, for which a stage of `recompute_first` recomputes always, and so does
    one of `offload_saved`.

    >>> whole_word("first_3"), whole_word("never"), whole_word("offload")
    ('always', 'never', 'always')
    """
    return word if count_first_layers(word) is None and word != OFFLOAD else "always"


def repeat_word(word: str) -> str:
    """The word as the seconds take it: what is run again, of some layers or of all; what comes back from the
    host is not.

    >>> repeat_word("first_3"), repeat_word("offload")
    ('always', 'never')
    """
    return "never" if word == OFFLOAD else whole_word(word)


def recompute_kind(word: str) -> str:
    """The word without its number of layers, as runtimes know it.

    >>> recompute_kind("first_3"), recompute_kind("always")
    ('first_layers', 'always')
    """
    return word if count_first_layers(word) is None else "first_layers"


def recompute_kinds(words: Sequence[str]) -> set[str]:
    """The kinds of several words.

    >>> sorted(recompute_kinds(["first_3", "never", "first_1"]))
    ['first_layers', 'never']
    """
    return {recompute_kind(word) for word in words}


def recompute_first(stage: StageBytes, first: StageBytes, rest: StageBytes) -> StageBytes:
    """The bytes of a stage that runs its `first` layers again and keeps what the `rest` saves, as those of a
    stage that recomputes always.

    In flight it holds its input and what the rest saves. The micro-batch at work needs the workspace of the
    rest on top of that, or, when the rest is done, what the first layers save and their workspace in place of
    what the rest saved: the larger of both.
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
