"""A layer that was traced in both modes, as its code differs between them (`if self.training:`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from torch import nn

from ...cost_models.errors import ModelError

TRACE_AGAIN = (
    "Make the layers anew from the model in that mode (pplan.sequential), or name the module around that "
    "line a layer: granularity='module:PATTERN'."
)


class ModeLayer(nn.Module):
    """Runs `layer`, or what was traced in the mode that it is switched to.

    `training`: the mode of the trace. `in_training`, `in_evaluation`: what runs in these modes; None:
    `layer`. They borrow what `layer` registers. `refusals`: by mode, why it cannot be switched to.
    """

    def __init__(
        self,
        layer: nn.Module,
        in_training: nn.Module | None = None,
        in_evaluation: nn.Module | None = None,
        refusals: Mapping[bool, str] | None = None,
        *,
        training: bool = True,
    ) -> None:
        super().__init__()
        self.layer, self.in_training, self.in_evaluation = layer, in_training, in_evaluation
        self.refusals = dict(refusals or {})
        self.training = training
        self.is_switched = (in_training if training else in_evaluation) is None
        """Return whether all its code is in one mode. Parts of a model may have had another."""

    def refuse(self, mode: bool) -> None:
        """Raise ModelError where the code of that mode could not be traced."""
        if mode in self.refusals:
            raise ModelError(self.refusals[mode], TRACE_AGAIN)

    def train(self, mode: bool = True) -> Self:
        """Switch to the code of that mode.

        Raises:
            ModelError: The code of that mode could not be traced.
        """
        self.refuse(mode)
        self.is_switched = True
        return super().train(mode)

    def forward(self, inputs: Any) -> Any:
        other = self.in_training if self.training else self.in_evaluation
        return self.layer(inputs) if other is None or not self.is_switched else other(inputs)
