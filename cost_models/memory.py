"""The memory ledger of a stage: the bytes of its layers, of its weights' training, and every term.

All functions take floats or numpy arrays that broadcast together, so that one formula serves a single stage
and the table of all stages that a chain can have. Devices with several chunks, and schedules other than the
straight ones, are counted action by action in `device_memory`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import numpy as np

from .errors import UsageError
from .optimizers import FLOAT32, Optimizer, Precision, find_optimizer
from .precision import ZERO_STAGES
from .runtime import OFFLOAD
from .stage_bytes import Amount, StageBytes, offload_saved, receive_ahead

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
    `device_memory.device_ledger` counts. `OFFLOAD`: as of `offload_saved`.

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
