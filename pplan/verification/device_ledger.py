"""The memory of a device, term by term, as docs/verify.md states them.

All terms of the weights go by how the model is trained (`StatedTraining`); what comes and goes is counted
action by action of the device's list: the terms are those of the action during which they are the largest
together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from .layer_costs import PENDING, Layers
from .orders import ScheduleOrder
from .report import ImpossiblePlan
from .stated_training import StatedTraining

RESERVE = 0.05
"""Of the sum of the other terms: what the allocator cannot use."""
SAME = 1e-12


@dataclass(frozen=True)
class PartBytes:
    """Of a part of the layers at a replica's micro-batch size: `waiting` what a micro-batch in flight holds,
    `input` what it holds instead where it recomputes; `copied`: of the trainable bytes those of weights whose
    first user is in an earlier part; `neighbours` the parameters of two layers in a row at
    most, which ZeRO has whole at a time where it spreads them. Where backwards are in two parts: `output`
    what the part hands on, which stays; `pending` the gradients that B leaves for W, `dropped` what B frees
    of `waiting` and `output`, and `layer_workspace` the most that one layer needs."""

    parameters: float
    trainable: float
    buffers: float
    waiting: float
    input: float
    received: float
    sent: float
    workspace: float
    neighbours: float = 0.0
    copied: float = 0.0
    largest: float = 0.0
    """Of the trainable parameters; where they are not known one by one, of the layers."""
    output: float = 0.0
    pending: float = 0.0
    dropped: float = 0.0
    layer_workspace: float = 0.0
    saved_input: float = 0.0
    """Of `waiting`."""
    besides: float = 0.0
    """Where it recomputes its first layers, or offloads: what it holds besides `input`."""
    offloads: bool = False
    """`waiting` is then what is on the device of the micro-batch at work."""

    def with_buffers(self, micro_batches: int) -> PartBytes:
        """In PyTorch's pipelining, with whole backwards: every micro-batch of a step has a buffer for what
        comes in, where inputs in flight lie, and one for the gradient of what goes out; what goes out of
        those in flight, and the gradient of what came in, are there besides, and one gradient more."""
        again = max(self.received - self.saved_input, 0.0)
        output = self.output if self.received or self.sent else 0.0
        return replace(
            self,
            waiting=self.waiting + (0.0 if self.offloads else again + output),
            input=self.input + output,
            received=self.received * (micro_batches + 1),
            sent=self.sent * micro_batches,
        )


def part_bytes(layers: Layers, first: int, end: int, size: int, again: int | None = None) -> PartBytes:
    """Of the layers `first` to `end` - 1; `again`: how many of the first ones, alone, run again."""
    costs, own = layers.at(size), slice(first, end)
    saved, workspace = costs["saved_bytes"][own], costs["workspace_bytes"][own]
    received = float(costs["output_bytes"][first - 1]) if first else 0.0
    saved_before, parameters = saved.cumsum(), layers.parameters[own]
    copies = [weight for weight in layers.shared if weight.users[0] < first and weight.is_used(first, end)]
    copied = sum(weight.bytes for weight in copies if weight.trains)
    largest = layers.trainable if layers.largest is None else layers.largest
    buffers = sum(
        own.bytes for own in layers.shared_buffers if own.users[0] < first and own.is_used(first, end)
    )
    pairs = parameters[1:] + parameters[:-1]
    output = float(costs["output_bytes"][end - 1])
    part = PartBytes(
        parameters=float(parameters.sum()) + sum(weight.bytes for weight in copies),
        trainable=float(layers.trainable[own].sum()) + copied,
        buffers=float(layers.buffers[own].sum()) + buffers,
        waiting=float(saved.sum() + costs["saved_input_bytes"][first]),
        saved_input=float(costs["saved_input_bytes"][first]),
        input=received if first else layers.input_bytes_per_sample * size,
        received=received,
        sent=output if end < len(layers) else 0.0,
        workspace=max(float((saved_before + workspace).max() - saved_before[-1]), 0.0),
        neighbours=float(pairs.max() if len(pairs) else parameters[0]),
        copied=copied,
        largest=max([float(largest[own].max()), *(weight.bytes for weight in copies if weight.trains)]),
        output=output,
        pending=float(costs[PENDING][own].sum()) if first > 0 else 0.0,
        dropped=output + float(costs["loss_bytes"][-1]) if first > 0 and end == len(layers) else 0.0,
        layer_workspace=float(workspace.max()),
    )
    return part if again is None else _run_first_again(layers, part, first, end, size, again)


def _run_first_again(
    layers: Layers, part: PartBytes, first: int, end: int, size: int, count: int
) -> PartBytes:
    """The bytes of the part of the layers `first` to `end` - 1 that runs the first `count` of them again: in
    flight it holds its input and what the others save; at work all that while the others are, then what the
    first save instead of them. Raises ImpossiblePlan."""
    if count >= end - first:
        raise ImpossiblePlan(f"first_{count} of a stage of {end - first} layers")
    costs = layers.at(size)
    saved, workspace, at_start = (
        costs[name] for name in ("saved_bytes", "workspace_bytes", "saved_input_bytes")
    )
    peaks, sums = [], []
    for begin, stop in ((first, first + count), (first + count, end)):
        prefix = [saved[begin : layer + 1].sum() for layer in range(begin, stop)]
        peaks.append(max(own + more for own, more in zip(prefix, workspace[begin:stop], strict=True)))
        sums.append(float(prefix[-1]))
    again, besides = (
        total + float(at_start[begin]) for total, begin in zip(sums, (first, first + count), strict=True)
    )
    # Above what is kept, while the others are at work, and while the first ones are.
    needed = max(peaks[1] - sums[1], again - besides + max(peaks[0] - sums[0], 0.0), 0.0)
    more = max(again - besides, 0.0)
    return replace(part, waiting=more, besides=besides, workspace=needed - more)


def offloaded(layers: Layers, first: int, end: int, size: int) -> list[float]:
    """By layer from `first` to `end` - 1, what it saves that waits on the host: not what the loss saves."""
    costs = layers.at(size)
    saved = [float(own) for own in costs["saved_bytes"][first:end]]
    if end == len(layers):
        saved[-1] = max(saved[-1] - float(costs["loss_bytes"][-1]), 0.0)
    return saved


def on_host(layers: Layers, part: PartBytes, first: int, end: int, size: int) -> PartBytes:
    """The bytes of the part that offloads. In flight it holds its input, and what the loss behind it saved;
    at work besides what is largest of one of its layers: what that is handed, where it is not the first, and
    saves, and works with. `part`: as it is otherwise."""
    costs, saved = layers.at(size), offloaded(layers, first, end, size)
    at_work, needed = [], []
    for own, layer in zip(saved, range(first, end), strict=True):
        before = float(costs["output_bytes"][layer - 1]) if layer > first else 0.0
        at_work.append(before + own)
        needed.append(before + own + float(costs["workspace_bytes"][layer]))
    loss = float(costs["loss_bytes"][-1]) if end == len(layers) else 0.0
    room = max(needed) - max(at_work)
    return replace(part, waiting=max(at_work), besides=loss, workspace=room, offloads=True)


HeldBytes = tuple[float, float, float, float]
"""Bytes of activations, of stage inputs, of pending gradients, and of the workspace."""


@dataclass(frozen=True)
class Ledger:
    """Bytes by term. Where several actions hold equally much, `others` has what else the terms that come and
    go may be."""

    terms: dict[str, float]
    others: list[HeldBytes]

    @property
    def bytes(self) -> float:
        """All of them."""
        return sum(self.terms.values())

    def stated(self, plan_value: int) -> float:
        """All of them, as plans state them: rounded up, or, in older ones, each term rounded."""
        whole = sum(round(amount) for amount in self.terms.values())
        return min(self.bytes, whole, key=lambda own: abs(own - plan_value))


def compute_ledger(
    order: ScheduleOrder,
    device: int,
    chunks: list[PartBytes],
    training: StatedTraining,
    *,
    recompute: str,
    replicas: int,
    weight_versions: Sequence[float],
    copies: int,
    context_bytes: float,
    ahead: bool = False,
) -> Ledger:
    """The ledger of one device. `chunks`: the parts of the layers that it has. `replicas`: devices that sum
    the same gradients. `weight_versions`: of each part, or one for all. `copies`: of the weights that the
    schedule keeps, of which each route trains one. `ahead`: whether PyTorch runs it."""
    ahead = ahead and not _is_split(order)
    if ahead:
        chunks = [own.with_buffers(len(order.shares)) for own in chunks]
    parameters, trainable = (sum(getattr(own, key) for own in chunks) for key in ("parameters", "trainable"))
    gradients = trainable * training.gradient / training.weight
    most = _largest_terms(order, device, chunks, recompute)
    routes = len(order.routes)
    weights = training.spread(parameters, replicas, 3)
    each = weight_versions if len(weight_versions) > 1 else [*weight_versions] * len(chunks)
    spare = sum(own.parameters * (number - 1) for own, number in zip(chunks, each, strict=True))
    older = training.spread(spare, replicas, 3)
    terms = {
        "weights": weights + sum(own.buffers for own in chunks),
        "gradients": training.spread(gradients, replicas, 2),
        "optimizer": training.spread(trainable * training.state / training.weight, replicas, 1),
        "weight_versions": older + parameters / routes * max(copies - routes, 0),
        "activations": most[0][0],
        "stage_inputs": most[0][1],
        "communication": _at_cuts(order, device, chunks, ahead=ahead)
        + _exchange_bytes(chunks, training, replicas, gradients),
        "workspace": most[0][3],
    }
    if _is_split(order):
        terms["pending_gradients"] = most[0][2]
    if training.master:
        master = trainable * training.master / training.weight
        terms["master_weights"] = training.spread(master, replicas, 1)
    largest = max(own.largest for own in chunks)
    temporaries = training.step_temporaries(trainable, largest, gpu=context_bytes > 0)
    if temporaries is not None:
        waiting, inputs, _, _, alive = most[0]
        waiting_bytes = waiting if recompute == "never" else inputs
        waits = waiting_bytes * (alive - 1) / alive if max(weight_versions) > 1 else 0.0
        needed = training.spread(temporaries, replicas, 1) + waits
        terms["optimizer_step"] = max(needed - sum(most[0][:4]), 0.0)
    terms["reserve"] = RESERVE * sum(terms.values())
    if context_bytes:
        terms["context"] = float(context_bytes)
    return Ledger(terms, [moment[:4] for moment in most[1:]])


def _exchange_bytes(
    chunks: list[PartBytes], training: StatedTraining, replicas: int, gradients: float
) -> float:
    """What replicas exchange: buckets hold the gradients once more, but for those of copies; ZeRO-1 reduces
    them where they lie; where ZeRO spreads them, those of two neighbouring layers are whole at a time, and
    where it spreads the weights, those of two, too."""
    if replicas == 1 or training.zero == 1:
        return 0.0
    if training.zero == 0:
        return gradients - sum(own.copied for own in chunks) * training.gradient / training.weight
    whole = max(own.neighbours for own in chunks)
    return whole * training.gradient / training.weight + (whole if training.zero == 3 else 0.0)


def _is_split(order: ScheduleOrder) -> bool:
    """Whether some backward of some device is in two parts."""
    return any(kind == "W" for own in order.lists for kind, _, _ in own)


def _at_cuts(order: ScheduleOrder, device: int, chunks: list[PartBytes], *, ahead: bool) -> float:
    """The largest tensor that comes from another device, and the largest that goes to one. Where backwards
    are in two parts, PyTorch has for every micro-batch of the step and every part of the device what comes
    in, its gradient, and the gradient of what goes out."""
    if _is_split(order):
        return sum(order.shares) * sum(own.received * 2 + own.sent for own in chunks)
    if ahead:
        return sum(own.received + own.sent for own in chunks)
    received = sent = 0.0
    for route in order.routes:
        for (before, left), (after, right) in pairwise(route):
            if before != after == device:
                received = max(received, chunks[right].received)
            if after != before == device:
                sent = max(sent, chunks[left].sent)
    return received + sent


def _largest_terms(
    order: ScheduleOrder, device: int, chunks: list[PartBytes], recompute: str
) -> list[tuple[float, float, float, float, int]]:
    """The terms that come and go, at each action during which they are the largest together (without
    repeats, the first one first), and the micro-batches in flight then.

    A micro-batch is in flight from its F to its W, to its B without one. It holds what its layers save; where
    they recompute its input, and from its B on what they save besides. `except_last`: the last saves all.
    Where the order splits backwards, it holds its output, too; from a B before a W on the gradients that are
    pending, and behind that B no more what it drops.
    """
    own, last = order.lists[device], len(order.route_of) - 1
    split = {(batch, chunk) for kind, batch, chunk in own if kind == "W"}
    outputs = _is_split(order)
    waiting, inputs, pending, dropped, flying = ([0.0] * len(chunks) for _ in range(5))
    moments: dict[HeldBytes, int] = {}
    alive = 0
    for kind, batch, chunk in own:
        share = order.shares[batch]
        saves = recompute == "never" or (recompute == "except_last" and batch == last)
        in_parts = (batch, chunk) in split
        if kind == "F":
            alive += 1
            flying[chunk] += share
            (waiting if saves else inputs)[chunk] += share
        elif kind == "B":
            waiting[chunk] += 0.0 if saves else share
            pending[chunk] += share if in_parts else 0.0
        activations = _sum(waiting, chunks, "waiting") - _sum(dropped, chunks, "dropped")
        activations += _sum(inputs, chunks, "besides")
        moment = (
            activations + (_sum(flying, chunks, "output") if outputs else 0.0),
            _sum(inputs, chunks, "input"),
            _sum(pending, chunks, "pending"),
            chunks[chunk].layer_workspace if in_parts and kind != "F" else chunks[chunk].workspace,
        )
        moments.setdefault(moment, alive)
        if kind == "B" and in_parts:
            dropped[chunk] += share
        if kind == "W" or (kind == "B" and not in_parts):
            alive -= 1
            flying[chunk] -= share
            waiting[chunk] -= share
            inputs[chunk] -= 0.0 if saves else share
            if in_parts:
                pending[chunk] -= share
                dropped[chunk] -= share
    most = max(sum(moment) for moment in moments)
    return [(*moment, count) for moment, count in moments.items() if sum(moment) >= most * (1 - SAME)]


def _sum(counts: list[float], chunks: list[PartBytes], key: str) -> float:
    return sum(count * float(getattr(own, key)) for count, own in zip(counts, chunks, strict=True))
