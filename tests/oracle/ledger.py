"""How weights are trained, what ZeRO exchanges, and the memory of a device, term by term.

A plan that does not say its precision keeps weights, gradients and states in the profile's dtype. `mixed`
keeps float32 master weights beside 16-bit ones; under autocast (`amp` of the profile) weights are float32 and
nothing is kept besides. ZeRO spreads over the replicas of a stage the states and master weights from its
stage 1 on, the gradients from 2 on, the weights in 3.

What comes and goes is counted action by action of the device's list: the terms are those of the action during
which they are the largest together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from .layers import PartBytes, Vector
from .machine import Machine, half_reduce_seconds
from .orders import Order

BYTES = {"float64": 8.0, "float32": 4.0, "float16": 2.0, "bfloat16": 2.0}
GRADIENTS = {"fp64": 8.0, "fp32": 4.0, "bf16": 2.0, "fp16": 2.0}
STATES = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2, "adamw-8bit": 0}
"""Tensors of the size of the weights that an optimizer keeps."""
OTHER_STATES = {"adamw-8bit": 2 * (1 + 4 / 256)}
"""Bytes a parameter that do not go by the dtype: two states of a byte, with a float32 scale for every 256."""
FUSED = ("megatron", "megatron-bridge", "deepspeed")
"""Runtimes whose optimizers make no temporaries."""
KERNELS = {"cpu": "for-loop", "cuda": "foreach", "analytic": "foreach"}
"""By device of the profile, how PyTorch's optimizers step."""
TEMPORARIES = {
    "foreach": {"sgd": 1, "momentum": 1, "adam": 1, "adamw": 1},
    "for-loop": {"sgd": 1, "momentum": 1, "adam": 4, "adamw": 3},
}
"""Tensors that a step makes, each of the size of all weights; or, parameter by parameter, of the largest."""
RESERVE = 0.05
"""Share of the other terms that the allocator cannot use."""
SAME = 1e-12


@dataclass(frozen=True)
class Training:
    """Bytes of a parameter's weight, gradient and master copy (0: there is none), the optimizer, the stage of
    ZeRO, and how the optimizer steps."""

    optimizer: str
    weight: float
    gradient: float
    master: float = 0.0
    zero: int = 0
    kernels: str = "fused"

    @property
    def scale(self) -> float:
        """Bytes of gradient for a byte of weight."""
        return self.gradient / self.weight

    @property
    def state(self) -> float:
        """Bytes a parameter of the optimizer's states."""
        return STATES[self.optimizer] * (self.master or self.weight) + OTHER_STATES.get(self.optimizer, 0.0)

    @property
    def update_bytes(self) -> float:
        """Bytes that an optimizer reads and writes a byte of weight, at least: the gradient once, states and
        what is updated (the masters, where there are any) twice, weights beside masters once."""
        updated = 2 * self.master + self.weight if self.master else 2 * self.weight
        return (self.gradient + 2 * self.state + updated) / self.weight

    def step_temporaries(self, trainable: float, largest: float, is_gpu: bool) -> float | None:
        """Bytes that a step makes and frees again; None: it allocates nothing. Float32 masters need the
        gradients in float32, too."""
        kernels = "foreach" if is_gpu and self.kernels == "for-loop" else self.kernels
        count = TEMPORARIES.get(kernels, {}).get(self.optimizer)
        if count is None:
            return None
        updated = (self.master or self.weight) / self.weight
        casts = trainable * updated if self.gradient < self.master else 0.0
        return count * (trainable if kernels == "foreach" else largest) * updated + casts

    def spread(self, amount: float, replicas: int, from_stage: int) -> float:
        """What each replica keeps of what ZeRO spreads from that stage on."""
        return amount / replicas if self.zero >= from_stage else amount


def find_kernels(device: str, runtime: str | None) -> str:
    """How the optimizer of a runtime (None: PyTorch's own) steps with a profile of such a device."""
    return "fused" if runtime in FUSED else KERNELS.get(device, "fused")


def read_training(plan: dict[str, Any]) -> Training:
    """How a plan trains."""
    profile, precision = plan["profile"], plan.get("precision")
    weight = BYTES[profile.get("dtype", "float32")]
    autocast = profile.get("amp") is not None and weight == 4
    gradient = GRADIENTS[plan["gradient_dtype"]] if precision and plan.get("gradient_dtype") else weight
    master = 4.0 if precision == "mixed" and not autocast else 0.0
    kernels = find_kernels(profile.get("device", ""), plan.get("runtime"))
    return Training(plan["optimizer"], weight, gradient, master, plan.get("zero", 0), kernels)


@dataclass(frozen=True, eq=False)
class Exchange:
    """What ZeRO exchanges over replicas, of the layers of one part: while a layer runs the next one's weights
    come and the last one's gradients go. With fewer than two replicas, or below its stage 2, nothing."""

    machine: Machine
    ranks: list[int]
    training: Training
    parameters: Vector
    trainable: Vector

    @property
    def by_layer(self) -> bool:
        """True if forwards and backwards exchange something."""
        return self.training.zero >= 2 and len(self.ranks) > 1

    def _halves(self, sizes: Vector) -> Vector:
        return np.array([half_reduce_seconds(self.machine, self.ranks, float(size)) for size in sizes])

    def seconds(self, name: str, layers: Vector) -> float:
        """Sum over layers with these seconds: `forward_seconds`, `backward_seconds`, or a part of it."""
        if not self.by_layer:
            return float(layers.sum())
        spreads = self.training.zero == 3 and name != "backward_weight_seconds"
        gathered = self._halves(self.parameters * spreads)
        if name == "forward_seconds":
            return float(gathered[0] + np.maximum(layers, np.append(gathered[1:], 0.0)).sum())
        reduced = self._halves(self.trainable * self.training.scale * (name != "backward_input_seconds"))
        meanwhile = np.append(0.0, gathered[:-1]) + np.append(reduced[1:], 0.0)
        return float(gathered[-1] + np.maximum(layers, meanwhile).sum() + reduced[0])

    def at_end(self) -> float:
        """Seconds after the last backward, with ZeRO: gradients are reduced, updated weights gathered."""
        trained = float(self.trainable.sum())
        sizes = {1: [trained, trained * self.training.scale], 2: [trained]}.get(self.training.zero, [])
        return sum(half_reduce_seconds(self.machine, self.ranks, size) for size in sizes)

    def bytes_at_end(self) -> float:
        """With ZeRO, after the last backward: bytes of an all-reduce that sends as much. A reduce-scatter
        sends half of it, as does an all-gather."""
        trained = float(self.trainable.sum())
        return {1: (trained * self.training.scale + trained) / 2, 2: trained / 2}.get(self.training.zero, 0.0)

    def bytes_by_layer(self) -> float:
        """The same of the forward and the backward of a micro-batch."""
        if not self.by_layer:
            return 0.0
        reduced = float(self.trainable.sum()) * self.training.scale
        return reduced / 2 + (float(self.parameters.sum()) if self.training.zero == 3 else 0.0)


class Moment(NamedTuple):
    """What a device holds during an action: bytes of activations, stage inputs, pending gradients and the
    workspace; and the micro-batches in flight."""

    activations: float
    stage_inputs: float
    pending_gradients: float
    workspace: float
    in_flight: int = 0

    @property
    def bytes(self) -> float:
        """All of them."""
        return sum(self[:4])


class Ledger(NamedTuple):
    """Bytes by term. Where several actions hold equally much, `moments` has what else the terms that come and
    go may be."""

    terms: dict[str, float]
    moments: list[Moment]

    @property
    def bytes(self) -> float:
        """All of them."""
        return sum(self.terms.values())


def compute_ledger(
    order: Order,
    device: int,
    chunks: list[PartBytes],
    training: Training,
    *,
    recompute: str,
    replicas: int,
    weight_versions: Sequence[float],
    copies: int,
    context_bytes: float,
    receives_ahead: bool = False,
) -> Ledger:
    """The ledger of one device. `chunks`: the parts of the layers that it has. `replicas`: devices that sum
    the same gradients. `weight_versions`: of each part, or one for all. `copies`: of the weights that the
    schedule keeps, of which each route trains one. `receives_ahead`: whether PyTorch runs it."""
    is_split = any(order.split)
    receives_ahead = receives_ahead and not is_split
    if receives_ahead:
        chunks = [chunk.with_buffers(len(order.shares)) for chunk in chunks]
    parameters, trainable = sum(own.parameters for own in chunks), sum(own.trainable for own in chunks)
    gradients = trainable * training.scale
    moments = _largest_moments(order, device, chunks, recompute)
    most, routes = moments[0], len(order.routes)
    each = weight_versions if len(weight_versions) > 1 else [*weight_versions] * len(chunks)
    spare = sum(own.parameters * (number - 1) for own, number in zip(chunks, each, strict=True))
    terms = {
        "weights": training.spread(parameters, replicas, 3) + sum(own.buffers for own in chunks),
        "gradients": training.spread(gradients, replicas, 2),
        "optimizer": training.spread(trainable * training.state / training.weight, replicas, 1),
        "weight_versions": training.spread(spare, replicas, 3)
        + parameters / routes * max(copies - routes, 0),
        "activations": most.activations,
        "stage_inputs": most.stage_inputs,
        "communication": _at_cuts(order, device, chunks, receives_ahead)
        + _exchange_bytes(chunks, training, replicas, gradients),
        "workspace": most.workspace,
    }
    if is_split:
        terms["pending_gradients"] = most.pending_gradients
    if training.master:
        master = trainable * training.master / training.weight
        terms["master_weights"] = training.spread(master, replicas, 1)
    temporaries = training.step_temporaries(trainable, max(own.largest for own in chunks), context_bytes > 0)
    if temporaries is not None:
        held = most.activations if recompute == "never" else most.stage_inputs
        waits = held * (most.in_flight - 1) / most.in_flight if max(weight_versions) > 1 else 0.0
        needed = training.spread(temporaries, replicas, 1) + waits
        terms["optimizer_step"] = max(needed - most.bytes, 0.0)
    terms["reserve"] = RESERVE * sum(terms.values())
    if context_bytes:
        terms["context"] = float(context_bytes)
    return Ledger(terms, moments)


def _exchange_bytes(chunks: list[PartBytes], training: Training, replicas: int, gradients: float) -> float:
    """What replicas exchange: buckets hold the gradients once more, but for those of copies; ZeRO-1 reduces
    them where they lie; where ZeRO spreads them, those of two neighbouring layers are whole at a time, and
    where it spreads the weights, those of two, too."""
    if replicas == 1 or training.zero == 1:
        return 0.0
    if training.zero == 0:
        return gradients - sum(own.copied for own in chunks) * training.scale
    whole = max(own.neighbours for own in chunks)
    return whole * training.scale + (whole if training.zero == 3 else 0.0)


def _at_cuts(order: Order, device: int, chunks: list[PartBytes], receives_ahead: bool) -> float:
    """The largest tensor that comes from another device, and the largest that goes to one. Where backwards
    are in two parts, PyTorch has for every micro-batch of the step and every part of the device what comes
    in, its gradient, and the gradient of what goes out."""
    if any(order.split):
        return sum(order.shares) * sum(own.received * 2 + own.sent for own in chunks)
    if receives_ahead:
        return sum(own.received + own.sent for own in chunks)
    cuts = [cut for route in order.routes for cut in pairwise(route) if cut[0][0] != cut[1][0]]
    received = [chunks[right].received for _, (at, right) in cuts if at == device]
    return max(received, default=0.0) + max(
        (chunks[left].sent for (at, left), _ in cuts if at == device), default=0.0
    )


def _largest_moments(order: Order, device: int, chunks: list[PartBytes], recompute: str) -> list[Moment]:
    """The moments at which a device holds most (without repeats, the first one first).

    A micro-batch is in flight from its F to its W, to its B without one. It holds what its layers save; where
    they recompute its input, and from its B on what they save besides. `except_last`: the last saves all.
    Where the order splits backwards, it holds its output, too; from a B before a W on the gradients that are
    pending, and behind that B no more what it drops.
    """
    last, split, is_split = len(order.route_of) - 1, order.split[device], any(order.split)
    counts = np.zeros((5, len(chunks)))
    waiting, inputs, pending, dropped, flying = counts
    held = np.array(
        [[own.waiting, own.input, own.besides, own.pending, own.dropped, own.output] for own in chunks]
    ).T
    moments: dict[tuple[float, ...], Moment] = {}
    alive = 0
    for kind, batch, chunk in order.lists[device]:
        share, in_parts = order.shares[batch], (batch, chunk) in split
        saves = recompute == "never" or (recompute == "except_last" and batch == last)
        if kind == "F":
            alive += 1
            flying[chunk] += share
            (waiting if saves else inputs)[chunk] += share
        elif kind == "B":
            waiting[chunk] += 0.0 if saves else share
            pending[chunk] += share if in_parts else 0.0
        activations = waiting @ held[0] - dropped @ held[4] + inputs @ held[2]
        activations += flying @ held[5] if is_split else 0.0
        part = chunks[chunk]
        workspace = part.layer_workspace if in_parts and kind != "F" else part.workspace
        moment = Moment(
            float(activations), float(inputs @ held[1]), float(pending @ held[3]), workspace, alive
        )
        moments.setdefault(moment[:4], moment)
        if kind == "B" and in_parts:
            dropped[chunk] += share
        if kind == "W" or (kind == "B" and not in_parts):
            alive -= 1
            counts[:, chunk] -= share * np.array([1, not saves, in_parts, in_parts, 1])
    most = max(moment.bytes for moment in moments.values())
    return [moment for moment in moments.values() if moment.bytes >= most * (1 - SAME)]
