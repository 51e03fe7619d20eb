"""Weights, gradients and optimizer state of a stage, whole or spread over its replicas (ZeRO)."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import UsageError
from .optimizers import FLOAT32, Optimizer, Precision, optimizer_named
from .precision import ZERO_STAGES
from .stage_bytes import Amount, StageBytes


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
        optimizer_named(self.optimizer)
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
        made: dict[str, Amount] = {
            "weights": self._spread(stage.parameters, 3) + stage.buffers,
            "gradients": self._spread(self._gradients(stage.trainable), 2),
        }
        if precision.master:
            made["master_weights"] = self._spread(stage.trainable * (precision.master / precision.weight), 1)
        return made | {"optimizer": self._spread(stage.trainable * (state / precision.weight), 1)}

    def step_temporaries(self, stage: StageBytes) -> Amount | None:
        """Bytes that an optimizer's step needs besides, while it runs; None where it makes nothing.

        Of what it updates: the weights, or float32 masters, for which PyTorch's optimizers also need the
        gradients in float32.
        """
        optimizer, precision = self._optimizer, self.precision
        if not optimizer.has_temporaries(precision):
            return None
        if precision.kernels == "foreach":
            made = optimizer.foreach * stage.trainable
        else:
            made = optimizer.for_loop * stage.largest
        made = made * ((precision.master or precision.weight) / precision.weight)
        if precision.gradient < precision.master:
            made = made + stage.trainable * (precision.master / precision.weight)
        return self._spread(made, 1)

    def versions(self, stage: StageBytes, number: float) -> Amount:
        """Bytes of the weight versions besides the newest; a fraction is an average over layers."""
        if not number >= 1:
            raise UsageError(
                f"weight versions {number:g}: must be at least 1", "Give 1 for the weights alone."
            )
        return self._spread(stage.parameters, 3) * (number - 1)

    def exchanged(self, stage: StageBytes) -> Amount:
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
        return optimizer_named(self.optimizer)

    def _gradients(self, weights: Amount) -> Amount:
        """Bytes of the gradients of so many bytes of weights; tables of stages are not copied in vain."""
        precision = self.precision
        if precision.gradient == precision.weight:
            return weights
        return weights * (precision.gradient / precision.weight)

    def _spread(self, amount: Amount, from_stage: int) -> Amount:
        return amount / self.replicas if self.zero >= from_stage else amount
