"""The ledger of a device under any program: when it holds most, counted action by action.

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
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, floor
from typing import NamedTuple

import numpy as np

from .errors import UsageError
from .memory import RECOMPUTES, Training, step_excess, with_reserve
from .schedules.action import Action, Program
from .stage_bytes import Amount, StageBytes
from .tied_weights import Floats


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
    `ahead`: of all chunks, whose bytes are those of `stage_bytes.receive_ahead`.
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
