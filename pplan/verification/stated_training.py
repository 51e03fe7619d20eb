"""How the weights are trained: bytes of a parameter, the optimizer, and what ZeRO spreads over replicas.

A plan that does not say its precision keeps weights, gradients and states in the profile's dtype. `mixed`
keeps float32 master weights beside 16-bit ones; under autocast (`amp` of the profile) weights are float32 and
nothing is kept besides. ZeRO spreads over the replicas of a stage the states and master weights from its
stage 1 on, the gradients from 2 on, the weights in 3.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..cost_models.errors import UsageError
from .layer_costs import Vector
from .stated_machine import StatedMachine
from .stated_plan import StatedPlan
from .traffic import half_reduce_seconds

BYTES_BY_DTYPE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
GRADIENTS = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
PRECISIONS = {
    "fp64": ("float64",),
    "fp32": ("float32",),
    "bf16": ("bfloat16",),
    "mixed": ("bfloat16", "float16"),
}
"""By precision the dtypes of profiles that are trained so; `mixed` is of float32 under autocast, too."""
STATES = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2, "adamw-8bit": 0}
"""Tensors of the size of the weights that an optimizer keeps."""
OWN_BYTES = {"adamw-8bit": 2 * (1 + 4 / 256)}
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


@dataclass(frozen=True)
class StatedTraining:
    """Bytes of a parameter's weight, gradient and master copy (0: there is none), the optimizer, and the
    stage of ZeRO. Raises UsageError for an optimizer that is not known."""

    optimizer: str
    weight: float
    gradient: float
    master: float = 0.0
    zero: int = 0
    kernels: str = "fused"

    def __post_init__(self) -> None:
        if self.optimizer not in STATES:
            raise UsageError(f"optimizer {self.optimizer[:40]!r} is unknown", f"Known: {', '.join(STATES)}.")

    @property
    def state(self) -> float:
        """Bytes a parameter of the optimizer's states."""
        return STATES[self.optimizer] * (self.master or self.weight) + OWN_BYTES.get(self.optimizer, 0.0)

    @property
    def update_bytes(self) -> float:
        """That an optimizer reads and writes a byte of weight, at the least: the gradient once, states and
        what is updated (the masters, where there are any) twice, weights beside masters once."""
        updated = 2 * self.master + self.weight if self.master else 2 * self.weight
        return (self.gradient + 2 * self.state + updated) / self.weight

    def step_temporaries(self, trainable: float, largest: float, gpu: bool) -> float | None:
        """Bytes that a step makes and frees again; None: it allocates nothing. Float32 masters need the
        gradients in float32, too. `gpu`: whether the device is one that is known."""
        kernels = "foreach" if gpu and self.kernels == "for-loop" else self.kernels
        count = TEMPORARIES.get(kernels, {}).get(self.optimizer)
        if count is None:
            return None
        updated = (self.master or self.weight) / self.weight
        casts = trainable * updated if self.gradient < self.master else 0.0
        return count * (trainable if kernels == "foreach" else largest) * updated + casts

    def spread(self, amount: float, replicas: int, from_stage: int) -> float:
        """What each replica keeps of what ZeRO spreads from that stage on."""
        return amount / replicas if self.zero >= from_stage else amount


def optimizer_kernels(device: str, runtime: str | None) -> str:
    """How the optimizer of a runtime (None: PyTorch's own) steps with a profile of such a device."""
    return "fused" if runtime in FUSED else KERNELS.get(device, "fused")


def read_training(plan: StatedPlan) -> StatedTraining:
    """As the plan says. Raises UsageError for words that are not known, or are not of the profile's dtype."""
    dtype, amp = plan.profile.text("dtype", "float32"), plan.profile.optional_text("amp")
    if dtype not in BYTES_BY_DTYPE:
        raise UsageError(f"dtype {dtype[:40]!r} is unknown", f"Known: {', '.join(BYTES_BY_DTYPE)}.")
    weight = BYTES_BY_DTYPE[dtype]
    zero = plan.whole.count("zero", 0, most=3)
    precision = plan.whole.optional_text("precision")
    device = plan.profile.text("device", "")
    kernels = optimizer_kernels(device, plan.runtime)
    if precision is None:
        return StatedTraining(plan.optimizer, weight, weight, zero=zero, kernels=kernels)
    autocast = amp is not None and dtype == "float32"
    fits = precision == "mixed" if autocast else dtype in PRECISIONS.get(precision, ())
    gradient = plan.whole.optional_text("gradient_dtype")
    if not fits or (gradient is not None and gradient not in GRADIENTS):
        raise UsageError(
            f"precision {precision[:40]!r} with gradients in {str(gradient)[:40]!r}, of a profile in {dtype}",
            "",
        )
    master = 4.0 if precision == "mixed" and not autocast else 0.0
    return StatedTraining(
        plan.optimizer, weight, weight if gradient is None else GRADIENTS[gradient], master, zero, kernels
    )


@dataclass(frozen=True, eq=False)
class Exchange:
    """What ZeRO exchanges over replicas, of the layers of one part: while a layer runs the next one's weights
    come and the last one's gradients go. With fewer than two replicas, or below its stage 2, nothing."""

    machine: StatedMachine
    ranks: list[int]
    training: StatedTraining
    parameters: Vector
    trainable: Vector

    @property
    def by_layer(self) -> bool:
        """Whether forwards and backwards exchange something."""
        return self.training.zero >= 2 and len(self.ranks) > 1

    def seconds(self, name: str, own: Vector) -> float:
        """Of all layers with these seconds: `forward_seconds`, `backward_seconds`, or a part of it."""
        if not self.by_layer:
            return float(own.sum())
        gathered, reduced = self._gather_seconds(), self._reduce_seconds()
        if name == "forward_seconds":
            meanwhile = np.append(gathered[1:], 0.0)
            return float(gathered[0] + np.maximum(own, meanwhile).sum())
        if name == "backward_weight_seconds":
            gathered = gathered * 0.0
        if name == "backward_input_seconds":
            reduced = reduced * 0.0
        meanwhile = np.append(0.0, gathered[:-1]) + np.append(reduced[1:], 0.0)
        return float(gathered[-1] + np.maximum(own, meanwhile).sum() + reduced[0])

    def at_end(self) -> float:
        """Seconds after the last backward, with ZeRO: gradients are reduced, updated weights gathered."""
        if self.training.zero == 3:
            return 0.0
        gathered = half_reduce_seconds(self.machine, self.ranks, float(self.trainable.sum()))
        return gathered + (float(self._all_reduce_seconds()) if self.training.zero == 1 else 0.0)

    def bytes_at_end(self) -> float:
        """With ZeRO, after the last backward: bytes of an all-reduce that sends as much. A reduce-scatter
        sends half of it, as does an all-gather."""
        trained = float(self.trainable.sum())
        reduced = trained * self.training.gradient / self.training.weight
        return {1: (reduced + trained) / 2, 2: trained / 2}.get(self.training.zero, 0.0)

    def bytes_by_layer(self) -> float:
        """The same of the forward and the backward of a micro-batch."""
        if not self.by_layer:
            return 0.0
        reduced = float(self.trainable.sum()) * self.training.gradient / self.training.weight
        return reduced / 2 + (float(self.parameters.sum()) if self.training.zero == 3 else 0.0)

    def _gather_seconds(self) -> Vector:
        sizes = self.parameters if self.training.zero == 3 else self.parameters * 0.0
        return np.array([half_reduce_seconds(self.machine, self.ranks, float(size)) for size in sizes])

    def _reduce_seconds(self) -> Vector:
        scale = self.training.gradient / self.training.weight
        return np.array(
            [half_reduce_seconds(self.machine, self.ranks, float(size) * scale) for size in self.trainable]
        )

    def _all_reduce_seconds(self) -> float:
        scale = self.training.gradient / self.training.weight
        return half_reduce_seconds(self.machine, self.ranks, float(self.trainable.sum()) * scale)
