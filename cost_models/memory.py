"""The memory ledger of a stage: every term in bytes, of one of its devices.

All functions take floats or numpy arrays that broadcast together, so that one formula serves a single stage
and the table of all stages that a chain can have. Devices with several chunks, and schedules other than the
straight ones, are counted action by action in `device_memory`.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict

import numpy as np

from .errors import UsageError
from .optimizers import FLOAT32, OPTIMIZERS, Precision
from .stage_bytes import Amount, StageBytes, stage_workspace
from .training import Training

__all__ = [
    "FRAGMENTATION_RESERVE",
    "OPTIMIZER_STATES",
    "RECOMPUTES",
    "Amount",
    "LedgerOptions",
    "Recompute",
    "StageBytes",
    "ledger",
    "stage_workspace",
    "total",
    "with_reserve",
]

Recompute = Literal["never", "always", "except_last"]
Moment = Literal["any", "passes", "step"]
"""When a device holds most: while micro-batches pass, or while the optimizer steps."""
RECOMPUTES: tuple[Recompute, ...] = ("never", "always", "except_last")
"""Of a stage; a plan whose stages differ is called selective."""

OPTIMIZER_STATES = OPTIMIZERS
"""The optimizers by name."""

FRAGMENTATION_RESERVE = 0.05
"""Share added to the sum of the other terms for what the caching allocator cannot use. Our choice."""


class LedgerOptions(TypedDict, total=False):
    """Of `ledger`'s arguments those that most callers leave alone."""

    weight_versions: float
    zero: int
    precision: Precision
    context_bytes: float
    moment: Moment


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
    `replicas`, `zero` and `precision` as of `Training`; `weight_versions` may be an average over layers.
    One micro-batch is at work at a time, whatever is in flight, so that the workspace is there once.
    GPipe runs the last micro-batch's backward first, so `except_last` keeps what `always` does but one stage
    input: that of the last is among what it saves. Where backwards run in another order,
    `device_memory.device_ledger` counts.

    Raises UsageError.
    """
    training = Training(optimizer, precision, replicas, zero)
    terms = {
        **training.states(stage),
        "weight_versions": training.versions(stage, weight_versions),
        **_held(stage, in_flight, recompute),
        "communication": stage.received + stage.sent + training.exchanged(stage),
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
            gone = terms["activations"] + terms["stage_inputs"] + stage.workspace
            terms["optimizer_step"] = step_excess(temporaries, waits, gone)
    return with_reserve(terms, context_bytes)


def with_reserve(terms: dict[str, Amount], context_bytes: float = 0) -> dict[str, Amount]:
    """The terms with the reserve and, where there is one, the context, which no allocator divides."""
    context: dict[str, Amount] = {"context": context_bytes} if context_bytes else {}
    return terms | {"reserve": FRAGMENTATION_RESERVE * total(terms)} | context


def step_excess(temporaries: Amount, waits: Amount, gone: Amount) -> Amount:
    """Bytes that an optimizer's step needs with what waits meanwhile, above those of the passes before."""
    return np.maximum(temporaries + waits - gone, 0.0)


def total(terms: dict[str, Amount]) -> Any:
    """Sum of a ledger's terms."""
    return sum(terms.values())


def _waiting(stage: StageBytes, in_flight: float, recompute: str) -> Amount:
    """Of micro-batches that are in flight and not at work."""
    return in_flight * (stage.saved + stage.saved_input if recompute == "never" else stage.input)


def _held(stage: StageBytes, in_flight: float, recompute: str) -> dict[str, Amount]:
    """Activations and stage inputs of the micro-batches in flight, and of the one at work."""
    whole = stage.saved + stage.saved_input
    if recompute == "never":
        return {"activations": in_flight * whole, "stage_inputs": stage.input * 0}
    if recompute not in RECOMPUTES:
        raise UsageError(f"recompute {recompute!r}: not known", f"Use one of: {', '.join(RECOMPUTES)}.")
    waiting = in_flight - 1 if recompute == "except_last" else in_flight
    return {"activations": 1 * whole, "stage_inputs": stage.input * waiting}
