"""The memory ledger: bytes of a stage's layers, of the training of its weights, and every term of a device.

`StageBytes` holds the bytes of a stage's layers. `ledger` is the closed form for 1F1B and GPipe: its
arguments are floats or numpy arrays that broadcast together, so that one formula serves a single stage and
the table of all stages of a chain. `device_ledger` counts any program, action by action; a test
compares them.

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, floor
from typing import Any, Literal, NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt

from .errors import UsageError
from .layer import Floats
from .optimizers import FLOAT32, ZERO_STAGES, Optimizer, Precision, find_optimizer
from .program import Action, Program
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
selective."""
Moment = Literal["any", "passes", "step"]
"""When a device holds most: while micro-batches pass, or while the optimizer steps."""

FRAGMENTATION_RESERVE = 0.05
"""Share added to the sum of the other terms for what the caching allocator cannot use. Our choice."""


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
    terms = {
        **training.states(stage),
        "weight_versions": training.versions(stage, weight_versions),
        **_activations(stage, in_flight, recompute),
        "communication": stage.received + stage.sent + training.exchange_bytes(stage),
        "workspace": stage.workspace,
    }
    temporaries = training.step_temporaries(stage)
    if temporaries is not None and moment != "passes":
        waits = _waiting(stage, in_flight - 1, recompute) if weight_versions > 1 else 0.0
        if moment == "step":
            terms |= {
                "activations": waits,
                "stage_inputs": 0.0,
                "workspace": 0.0,
                "optimizer_step": temporaries,
            }
        else:
            freed = terms["activations"] + terms["stage_inputs"] + stage.workspace
            terms["optimizer_step"] = step_excess(temporaries, waits, freed)
    return with_reserve(terms, context_bytes)


def with_reserve(terms: dict[str, Amount], context_bytes: float) -> dict[str, Amount]:
    """The terms with the reserve and, where there is one, the context, which no allocator divides."""
    context: dict[str, Amount] = {"context": context_bytes} if context_bytes else {}
    return terms | {"reserve": FRAGMENTATION_RESERVE * total(terms)} | context


def step_excess(temporaries: Amount, waits: Amount, freed: Amount) -> Amount:
    """Bytes that an optimizer's step needs with what waits meanwhile, above those of the passes before."""
    return np.maximum(temporaries + waits - freed, 0.0)


def total(terms: dict[str, Amount]) -> Any:
    """Sum of a ledger's terms."""
    return sum(terms.values())


def _waiting(stage: StageBytes, in_flight: float, recompute: str) -> Amount:
    """Of micro-batches that are in flight and not at work."""
    return in_flight * (
        stage.saved + stage.saved_input if recompute == "never" else stage.input + stage.besides
    )


def _activations(stage: StageBytes, in_flight: float, recompute: str) -> dict[str, Amount]:
    """Activations and stage inputs of the micro-batches in flight, and of the one at work."""
    whole = stage.saved + stage.saved_input
    if recompute == "never":
        return {"activations": in_flight * whole, "stage_inputs": stage.input * 0}
    if recompute not in RECOMPUTES:
        raise UsageError(f"recompute {recompute!r}: not known", f"Use one of: {', '.join(RECOMPUTES)}.")
    waiting = in_flight - 1 if recompute == "except_last" else in_flight
    besides = in_flight * stage.besides
    return {"activations": 1 * whole + besides, "stage_inputs": stage.input * waiting}


class InFlightBytes(NamedTuple):
    """A micro-batch in flight on a chunk, and the bytes that it holds."""

    micro_batch: int
    chunk: int
    bytes: float


@dataclass(frozen=True)
class DeviceLedger:
    """Bytes by term as a device holds most; `action`: the first one during which it does; `alive`: the
    micro-batches in flight then, whose bytes add up to the terms `activations`, `stage_inputs` and
    `pending_gradients`."""

    terms: dict[str, float]
    action: Action
    alive: tuple[InFlightBytes, ...]

    @property
    def bytes(self) -> float:
        """What the device needs."""
        return sum(self.terms.values())


class ActionBytes(NamedTuple):
    """Bytes during each action of a device's list, each of shape (actions,): what comes and goes."""

    activations: Floats
    stage_inputs: Floats
    pending_gradients: Floats
    workspace: Floats

    @property
    def bytes(self) -> Floats:
        """All of it."""
        return self.activations + self.stage_inputs + self.pending_gradients + self.workspace


def bytes_by_action(
    program: Program, device: int, chunk_bytes: Sequence[StageBytes], recompute: str = "never"
) -> ActionBytes:
    """What a device holds during each action, besides what it has all the time. Arguments and errors as of
    `device_ledger`."""
    _check(program, device, chunk_bytes, recompute)
    own, stays = program.actions[device], _lifetimes(program, device, recompute)
    sizes = [micro_batch_bytes(chunk, program) for chunk in chunk_bytes]
    split = {action[1:] for action in own if action.kind == "W"}
    workspace = np.array(
        [
            float(chunk.layer_workspace if action.kind != "F" and action[1:] in split else chunk.workspace)
            for action in own
            for chunk in (chunk_bytes[action.chunk],)
        ]
    )
    return ActionBytes(*_over_time(len(own), stays, sizes), workspace)


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
) -> DeviceLedger:
    """The ledger of one device of `program`, with the terms of `memory.ledger`.

    `chunk_bytes`: of each of its chunks, at the size of a whole micro-batch of one replica. The replicas of
    `training` are all devices that add up the same gradients: Chimera's other direction counts too.
    `weight_versions`: of every chunk, or one value a chunk; `copies` of the weights as the schedule says.

    Weights, gradients, states and versions are those of all chunks, and of the copies that no pipe trains
    (AvgPipe's reference). Activations, stage inputs and the workspace of the chunk at work are taken
    together, at the action at which their sum is largest; the optimizer's step as in `memory.ledger`.
    Transfers: the largest received and the largest sent tensor of a chunk; none between chunks of the device.
    `ahead`: of all chunks, whose bytes are those of `receive_ahead`.
    Raises UsageError.
    """
    usage = bytes_by_action(program, device, chunk_bytes, recompute)
    peak = int(np.argmax(usage.bytes))
    whole = _merge_chunks(chunk_bytes)
    terms = {
        **training.states(whole),
        "weight_versions": _versions(program, chunk_bytes, training, weight_versions, copies),
        "activations": float(usage.activations[peak]),
        "stage_inputs": float(usage.stage_inputs[peak]),
        **({"pending_gradients": float(usage.pending_gradients[peak])} if program.splits_backward else {}),
        "communication": _transfers(program, device, chunk_bytes, ahead) + training.exchange_bytes(whole),
        "workspace": float(usage.workspace[peak]),
    }
    alive = tuple(_alive(program, device, chunk_bytes, recompute, peak))
    temporaries = training.step_temporaries(whole)
    if temporaries is not None:
        asynchronous = np.max(weight_versions) > 1
        waiting = usage.activations[peak] if recompute == "never" else usage.stage_inputs[peak]
        waits = float(waiting) * (len(alive) - 1) / len(alive) if asynchronous else 0.0
        terms["optimizer_step"] = step_excess(temporaries, waits, float(usage.bytes[peak]))
    closed = {name: float(amount) for name, amount in with_reserve(terms, context_bytes).items()}
    return DeviceLedger(closed, program.actions[device][peak], alive)


def _alive(
    program: Program, device: int, chunks: Sequence[StageBytes], recompute: str, position: int
) -> Iterator[InFlightBytes]:
    """The micro-batches in flight at a position in the list, in the order of their forwards."""
    sizes = [micro_batch_bytes(chunk, program) for chunk in chunks]
    for stay in _lifetimes(program, device, recompute):
        if stay.start <= position <= stay.end:
            own = sizes[stay.chunk][stay.saves]
            phases = [True, position >= stay.backward, *(position > before for before in stay.part_starts)]
            amount = sum(sum(size) for size, is_on in zip(own, phases, strict=False) if is_on)
            yield InFlightBytes(stay.micro_batch, stay.chunk, stay.share * amount)


class TermBytes(NamedTuple):
    """Bytes of activations, of stage inputs and of pending gradients."""

    activations: float
    inputs: float = 0.0
    pending: float = 0.0


class MicroBatchBytes(NamedTuple):
    """Of a whole micro-batch on a chunk: what it holds from its F on; what its B adds as it begins; and,
    where the backward is in two parts, what the first adds then, and at its end."""

    forward: TermBytes
    backward: TermBytes
    first_part: TermBytes = TermBytes(0.0)
    behind_first_part: TermBytes = TermBytes(0.0)


class _Lifetime(NamedTuple):
    """A micro-batch on a chunk: the positions in the list of its F, its B and what ends it."""

    micro_batch: int
    chunk: int
    share: float
    start: int
    backward: int
    end: int
    saves: bool
    """Whether it saves all in forward."""

    @property
    def part_starts(self) -> tuple[int, ...]:
        """The last positions before the third and the fourth of `MicroBatchBytes` are there."""
        return (self.backward - 1, self.backward) if self.end > self.backward else ()


def _lifetimes(program: Program, device: int, recompute: str) -> list[_Lifetime]:
    """In the order of the forwards."""
    where = {action: position for position, action in enumerate(program.actions[device])}
    last = program.micro_batches - 1
    stays = []
    for (kind, m, chunk), start in where.items():
        if kind == "F":
            backward = where[Action("B", m, chunk)]
            end = where.get(Action("W", m, chunk), backward)
            saves = recompute == "never" or (recompute == "except_last" and m == last)
            stays.append(_Lifetime(m, chunk, program.share(m), start, backward, end, saves))
    return stays


def micro_batch_bytes(stage: StageBytes, program: Program) -> tuple[MicroBatchBytes, MicroBatchBytes]:
    """Of a micro-batch of `program` that recomputes, and of one that saves all in forward."""
    saved, besides = float(stage.saved + stage.saved_input), float(stage.besides)
    if not program.splits_backward:
        recomputing = MicroBatchBytes(TermBytes(besides, float(stage.input)), TermBytes(saved))
        return recomputing, MicroBatchBytes(TermBytes(saved), TermBytes(0.0))
    output = float(stage.output)
    parts = TermBytes(0.0, 0.0, float(stage.pending)), TermBytes(-float(stage.released))
    return (
        MicroBatchBytes(TermBytes(output + besides, float(stage.input)), TermBytes(saved), *parts),
        MicroBatchBytes(TermBytes(saved + output), TermBytes(0.0), *parts),
    )


def _over_time(
    count: int, stays: Sequence[_Lifetime], sizes: Sequence[tuple[MicroBatchBytes, MicroBatchBytes]]
) -> tuple[Floats, Floats, Floats]:
    """(actions,) each: bytes of activations, stage inputs and pending gradients during every action.

    Micro-batches are counted, by chunk and by what they hold, before bytes are taken: counts are exact.
    """
    changes = np.zeros((count + 1, len(sizes), 2, 4))  # by chunk, whether it saves, and as MicroBatchBytes
    for stay in stays:
        counts = changes[:, stay.chunk, int(stay.saves)]
        starts = (stay.start, stay.backward, *(position + 1 for position in stay.part_starts))
        for phase, start in enumerate(starts):
            counts[start, phase] += stay.share
            counts[stay.end + 1, phase] -= stay.share
    totals = np.cumsum(changes, axis=0)[:-1]
    activations, inputs, pending = np.moveaxis(np.array(sizes), -1, 0)
    return tuple(np.tensordot(totals, table, axes=3) for table in (activations, inputs, pending))  # type: ignore[return-value]


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


def _check(program: Program, device: int, chunks: Sequence[StageBytes], recompute: str) -> None:
    if not 0 <= device < program.devices:
        raise UsageError(
            f"device {device}: the program has devices 0 to {program.devices - 1}", "Name one of them."
        )
    own = {place.chunk for pipe in program.pipes for place in pipe if place.device == device}
    if len(chunks) != len(own):
        raise UsageError(
            f"chunk_bytes: {len(chunks)} for {len(own)} chunks of device {device}",
            "Give the bytes of each chunk, in order.",
        )
    if recompute not in RECOMPUTES:
        raise UsageError(f"recompute {recompute!r}: not known", f"Use one of: {', '.join(RECOMPUTES)}.")


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
