"""Precision of training by name: bytes of a weight, a gradient and a master weight.

A profile says in which dtype the passes were measured. The precision says what training keeps in addition.
For a profile in 16 bits, `mixed` keeps float32 master weights (Micikevicius et al., "Mixed Precision
Training", ICLR 2018), `bf16` keeps none. Under autocast the weights, the gradients and the optimizer's states
are float32, and the 16-bit copies of the weights are among the tensors saved for backward. This is also
`mixed`, without master weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

from . import arguments
from .errors import UsageError
from .optimizers import Optimizer, Precision, StepKernels
from .runtime import find_runtime

PRECISIONS = ("fp32", "mixed", "bf16")
"""Values of `precision`."""
GRADIENT_DTYPES = ("fp32", "bf16", "fp16")
"""Values of `gradient_dtype`."""
PrecisionName = Literal["fp64", "fp32", "mixed", "bf16"]
DtypeName = Literal["fp64", "fp32", "bf16", "fp16"]
_DTYPES: dict[str, DtypeName] = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_BYTES = {"fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2}


@dataclass(frozen=True)
class TrainingPrecision:
    """Precision of training.

    Attributes:
        name: fp32, mixed or bf16 (fp64 for a profile in float64).
        gradient_dtype: Dtype of the sum over micro-batches.
        bytes: Bytes of a parameter.
        autocast: Whether the profiled passes ran under autocast with float32 weights.
    """

    name: PrecisionName
    gradient_dtype: DtypeName
    bytes: Precision
    autocast: bool = False

    def bytes_per_parameter(self, optimizer: Optimizer) -> float:
        """Return the bytes of weight, gradient, master weight and the optimizer's states."""
        return self.bytes.weight + self.bytes.gradient + optimizer.bytes_per_parameter(self.bytes)

    @property
    def limitation(self) -> str | None:
        """Disadvantage of the precision as text, or None."""
        if self.name != "bf16":
            return None
        return (
            "pure bf16: no float32 master weights and states, so an update of less than about 1/256 of a "
            "weight is rounded away; precision='mixed' counts them"
        )


def training_precision(
    dtype: str,
    amp: str | None = None,
    *,
    precision: str = "auto",
    gradient_dtype: str = "auto",
    runtime: str | None = None,
    device: str = "",
) -> TrainingPrecision:
    """Return the precision of training on a profile.

    "auto" is `mixed` for 16 bits and for autocast, else as profiled. Gradients are by default in the dtype of
    the weights, but float32 if the weights are bfloat16 and the runtime sums in float32
    (`Runtime.own_optimizer`).

    Args:
        dtype: Dtype of the profile.
        amp: Dtype of autocast during the profile, or None.
        precision: One of `PRECISIONS`, or "auto".
        gradient_dtype: One of `GRADIENT_DTYPES`, or "auto".
        runtime: Name of the runtime, or None.
        device: Device of the profile: cpu, cuda or analytic. It decides the kernels of PyTorch's optimizers.
            No temporaries are counted if it is unknown.

    Raises:
        UsageError: A word is unknown, or the passes of the precision are not those of the profile.
    """
    if dtype not in _DTYPES:
        raise UsageError(f"dtype {dtype!r} is unknown", f"Use one of: {', '.join(_DTYPES)}.")
    weights = _DTYPES[dtype]
    check_word("precision", precision, ("auto", *PRECISIONS), weights)
    check_word("gradient_dtype", gradient_dtype, ("auto", *GRADIENT_DTYPES), weights)
    autocast = amp is not None and weights == "fp32"
    usual = "mixed" if autocast or weights in ("fp16", "bf16") else weights
    name = cast(PrecisionName, usual if precision == "auto" else precision)
    _check_passes(name, weights, autocast, amp)
    gradient = cast(DtypeName, gradient_dtype)
    if gradient_dtype == "auto":
        adds_up = name == "mixed" and weights == "bf16" and _has_own_optimizer(runtime)
        gradient = "fp32" if adds_up else weights
    _check_gradients(gradient, name, weights, autocast)
    master = 4 if name == "mixed" and not autocast else 0
    bytes_of_training = Precision(_BYTES[weights], _BYTES[gradient], master, step_kernels(device, runtime))
    return TrainingPrecision(name, gradient, bytes_of_training, autocast)


def _has_own_optimizer(runtime: str | None) -> bool:
    return runtime is not None and find_runtime(runtime).own_optimizer


def step_kernels(device: str, runtime: str | None = None) -> StepKernels:
    """Return the kernels with which the optimizer of a runtime (None for PyTorch) steps on a device."""
    if _has_own_optimizer(runtime):
        return "fused"
    return {"cpu": "for-loop", "cuda": "foreach", "analytic": "foreach"}.get(device, "fused")  # type: ignore[return-value]


def check_word(field: str, word: str, words: tuple[str, ...], also: str = "") -> None:
    """Check that the word is one of `words` or `also`.

    Raises:
        UsageError: The word is unknown. The message names the most similar one.
    """
    if word not in (*words, also):
        raise arguments.unknown_word(field, word, words)


def _check_passes(name: str, weights: str, autocast: bool, amp: str | None) -> None:
    """Check that the profile's seconds and activations are those of training with this precision.

    Args:
        name: Precision of training.
        weights: Dtype of the profiled weights.
        autocast: Whether the profile ran under autocast.
        amp: Dtype of autocast.
    """
    if autocast:
        fits, measured = name == "mixed", f"under autocast to {amp}"
    elif weights == "bf16":
        fits, measured = name in ("mixed", "bf16"), "in bfloat16"
    elif weights == "fp16":
        fits, measured = name == "mixed", "in float16"
    else:
        fits, measured = name == weights, f"in {'float32' if weights == 'fp32' else 'float64'}"
    if fits:
        return
    needed = {
        "fp32": "pplan profile dtype='float32'",
        "mixed": "pplan profile dtype='bfloat16', or amp='bf16'",
        "bf16": "pplan profile dtype='bfloat16'",
    }.get(name, "pplan profile dtype='float64'")
    why = (
        "float16 loses small gradients without float32 weights" if (weights, name) == ("fp16", "bf16") else ""
    )
    raise UsageError(
        f"precision={name!r}: the profile was measured {measured}{f' ({why})' if why else ''}",
        f"Its seconds and activations are not those of {name}: profile with {needed}.",
    )


def _check_gradients(gradient: str, name: str, weights: str, autocast: bool) -> None:
    allowed = (weights, "fp32") if name == "mixed" else (weights,)
    if gradient in allowed:
        return
    what = "float32 weights under autocast" if autocast else f"{weights} weights with precision={name!r}"
    raise UsageError(
        f"gradient_dtype={gradient!r}: the gradients of {what} are {' or '.join(dict.fromkeys(allowed))}",
        "Omit it, or choose another `precision`.",
    )
