"""The precision of training, by name: bytes of a weight, a gradient and a master weight.

A profile says in which numbers the passes were measured; the precision says what training keeps besides. Of a
profile in 16 bits, `mixed` keeps float32 master weights beside the 16-bit ones (Micikevicius et al., "Mixed
Precision Training", ICLR 2018), `bf16` keeps none. Under autocast the weights, the gradients and the
optimizer's states are float32, and the 16-bit copies of the weights are among what backward saves: `mixed`,
too, without master weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

from . import arguments
from .errors import UsageError
from .optimizers import Optimizer, Precision, StepKernels
from .runtime import find_runtime

PRECISIONS = ("fp32", "mixed", "bf16")
"""The words of `precision`."""
GRADIENT_DTYPES = ("fp32", "bf16", "fp16")
"""The words of `gradient_dtype`."""
PrecisionName = Literal["fp64", "fp32", "mixed", "bf16"]
DtypeName = Literal["fp64", "fp32", "bf16", "fp16"]
_DTYPES: dict[str, DtypeName] = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_BYTES = {"fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2}


@dataclass(frozen=True)
class TrainingPrecision:
    """`name`: fp32, mixed or bf16 (fp64 of a profile in float64). `gradient_dtype`: of what the micro-batches
    add up. `autocast`: whether the profile's passes ran under it, with float32 weights."""

    name: PrecisionName
    gradient_dtype: DtypeName
    bytes: Precision
    autocast: bool = False

    def bytes_per_parameter(self, optimizer: Optimizer) -> float:
        """Of weight, gradient, master weight and the optimizer's states."""
        return self.bytes.weight + self.bytes.gradient + optimizer.bytes_per_parameter(self.bytes)

    @property
    def limitation(self) -> str | None:
        """A disadvantage of the precision, in words; None where it has none."""
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
    """The precision of a profile in `dtype`, measured under autocast to `amp` where that is given.

    `device`: cpu, cuda or analytic, as in the profile: it says how PyTorch's optimizers step; where it is not
    known, no temporaries of theirs are counted.

    "auto": `mixed` for 16 bits and for autocast, else as profiled. Gradients are by default in the dtype of
    the weights, but float32 where the weights are bfloat16 and the runtime adds up in float32
    (`Runtime.own_optimizer`). Raises UsageError for unknown words, and for a precision whose passes are
    not those that were profiled.
    """
    if dtype not in _DTYPES:
        raise UsageError(f"dtype {dtype!r} is unknown", f"Use one of: {', '.join(_DTYPES)}.")
    own = _DTYPES[dtype]
    check_word("precision", precision, ("auto", *PRECISIONS), own)
    check_word("gradient_dtype", gradient_dtype, ("auto", *GRADIENT_DTYPES), own)
    autocast = amp is not None and own == "fp32"
    usual = "mixed" if autocast or own in ("fp16", "bf16") else own
    name = cast(PrecisionName, usual if precision == "auto" else precision)
    _check_passes(name, own, autocast, amp)
    gradient = cast(DtypeName, gradient_dtype)
    if gradient_dtype == "auto":
        adds_up = name == "mixed" and own == "bf16" and _has_own_optimizer(runtime)
        gradient = "fp32" if adds_up else own
    _check_gradients(gradient, name, own, autocast)
    master = 4 if name == "mixed" and not autocast else 0
    bytes_of_training = Precision(_BYTES[own], _BYTES[gradient], master, step_kernels(device, runtime))
    return TrainingPrecision(name, gradient, bytes_of_training, autocast)


def _has_own_optimizer(runtime: str | None) -> bool:
    return runtime is not None and find_runtime(runtime).own_optimizer


def step_kernels(device: str, runtime: str | None = None) -> StepKernels:
    """How the optimizer of a runtime (None: PyTorch's own) steps on such a device."""
    if _has_own_optimizer(runtime):
        return "fused"
    return {"cpu": "for-loop", "cuda": "foreach", "analytic": "foreach"}.get(device, "fused")  # type: ignore[return-value]


def check_word(field: str, word: str, words: tuple[str, ...], also: str = "") -> None:
    """Raises UsageError, with the nearest of the known words, unless the word is one of them, or `also`."""
    if word not in (*words, also):
        raise arguments.unknown_word(field, word, words)


def _check_passes(name: str, own: str, autocast: bool, amp: str | None) -> None:
    """Whether a model profiled so can be trained so: seconds and activations are those of the profile."""
    if autocast:
        fits, measured = name == "mixed", f"under autocast to {amp}"
    elif own == "bf16":
        fits, measured = name in ("mixed", "bf16"), "in bfloat16"
    elif own == "fp16":
        fits, measured = name == "mixed", "in float16"
    else:
        fits, measured = name == own, f"in {'float32' if own == 'fp32' else 'float64'}"
    if fits:
        return
    needed = {
        "fp32": "pplan profile dtype='float32'",
        "mixed": "pplan profile dtype='bfloat16', or amp='bf16'",
        "bf16": "pplan profile dtype='bfloat16'",
    }.get(name, "pplan profile dtype='float64'")
    why = "float16 loses small gradients without float32 weights" if (own, name) == ("fp16", "bf16") else ""
    raise UsageError(
        f"precision={name!r}: the profile was measured {measured}{f' ({why})' if why else ''}",
        f"Its seconds and activations are not those of {name}: profile with {needed}.",
    )


def _check_gradients(gradient: str, name: str, own: str, autocast: bool) -> None:
    allowed = (own, "fp32") if name == "mixed" else (own,)
    if gradient in allowed:
        return
    what = "float32 weights under autocast" if autocast else f"{own} weights with precision={name!r}"
    raise UsageError(
        f"gradient_dtype={gradient!r}: the gradients of {what} are {' or '.join(dict.fromkeys(allowed))}",
        "Omit it, or choose another `precision`.",
    )
