"""State of optimizers in addition to weights and gradients, and bytes of a parameter by precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .errors import UsageError

SCALE_BLOCK = 256
"""Number of parameters that share one scale of an 8-bit state."""

StepKernels = Literal["fused", "foreach", "for-loop"]
"""Kernels of an optimizer's step.

"fused" is one kernel without temporaries. "foreach" makes the temporaries of all parameters at once
(PyTorch's default on a GPU). "for-loop" goes parameter by parameter (PyTorch's default on a CPU).
"""


ZERO_STAGES = (0, 1, 2, 3)
"""Stages of ZeRO, by what the replicas of a pipeline stage spread (see `memory.Training`)."""


@dataclass(frozen=True)
class Precision:
    """Bytes of a parameter.

    Attributes:
        weight: Bytes of a weight in the profiled passes.
        gradient: Bytes of a gradient.
        master: Bytes of the copy that the optimizer updates instead of the weight. 0 for no copy.
        kernels: Kernels of the optimizer's step.

    Raises:
        UsageError: A number of bytes is not positive.
    """

    weight: float
    gradient: float
    master: float = 0
    kernels: StepKernels = "fused"

    def __post_init__(self) -> None:
        for name in ("weight", "gradient", "master"):
            value = getattr(self, name)
            if not (value > 0 or (name == "master" and value == 0)):
                raise UsageError(
                    f"{name} of {value:g} bytes a parameter", "Give 4 for float32, 2 for 16 bits."
                )


FLOAT32 = Precision(weight=4, gradient=4)
MIXED = Precision(weight=2, gradient=2, master=4)
"""16-bit weights and gradients, float32 master weights and states: with Adam 2 + 2 + 12 bytes a parameter.

Micikevicius et al., "Mixed Precision Training", ICLR 2018; Rajbhandari et al., "ZeRO", SC 2020, section 3.1.
This holds for float16 and bfloat16 if the model was profiled in them. Autocast keeps the weights of FLOAT32.
"""
MIXED_FLOAT32_GRADIENTS = Precision(weight=2, gradient=4, master=4)
"""Like `MIXED` with gradients summed in float32, as Megatron-LM does for bfloat16."""


@dataclass(frozen=True)
class Optimizer:
    """Optimizer and its memory.

    Temporaries are those of torch.optim 2.14 with weight decay
    (tests/profiler/memory/test_optimizer_steps.py).

    Attributes:
        name: Name of the optimizer.
        states: Tensors of the size of the weights, in the dtype of what the optimizer updates.
        own_bytes: Bytes per parameter that do not depend on that dtype.
        foreach: Temporaries of a step with `foreach`, each of the size of all weights.
        for_loop: Temporaries of a step with `for-loop`, each of the size of the largest weight.
    """

    name: str
    states: int
    own_bytes: float = 0.0
    foreach: int = 0
    for_loop: int = 0

    def bytes_per_parameter(self, precision: Precision) -> float:
        """Return the bytes per parameter of the states and of the master weights if there are any."""
        updated = precision.master or precision.weight
        return precision.master + self.states * updated + self.own_bytes

    def update_bytes(self, precision: Precision) -> float:
        """Return the fewest bytes that a step reads and writes per parameter.

        It reads the gradient, reads and writes the updated weight and the states, and writes the weight if
        there is a master weight.
        """
        weight = precision.weight if precision.master else 2 * precision.weight
        return precision.gradient + weight + 2 * self.bytes_per_parameter(precision)

    def has_temporaries(self, precision: Precision) -> bool:
        """Return whether a step allocates tensors that it frees again."""
        return precision.kernels != "fused" and bool(self.foreach or self.for_loop)


_ALL = (
    Optimizer("sgd", 0, foreach=1, for_loop=1),
    Optimizer("momentum", 1, foreach=1, for_loop=1),
    Optimizer("adam", 2, foreach=1, for_loop=4),
    Optimizer("adamw", 2, foreach=1, for_loop=3),
    # bitsandbytes from 0.44 on: two states of a byte and, for each block of either, a float32 scale. Its
    # tensors of fewer than 4096 elements, which keep float32 states, are few bytes of a model.
    # Dettmers et al., "8-bit Optimizers via Block-wise Quantization", ICLR 2022;
    # https://github.com/bitsandbytes-foundation/bitsandbytes/pull/1365
    Optimizer("adamw-8bit", 0, own_bytes=2 * (1 + 4 / SCALE_BLOCK)),
)

OPTIMIZERS: dict[str, Optimizer] = {optimizer.name: optimizer for optimizer in _ALL}


def find_optimizer(name: str) -> Optimizer:
    """Return the optimizer of this name.

    Raises:
        UsageError: There is no such optimizer. The message lists the known names.
    """
    try:
        return OPTIMIZERS[name]
    except KeyError:
        raise UsageError(f"optimizer {name!r} is unknown", f"Use one of: {', '.join(OPTIMIZERS)}.") from None
