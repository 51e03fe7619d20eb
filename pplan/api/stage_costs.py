"""The costs of a pipeline as a user gives them, instead of a plan's."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from numbers import Real
from typing import TYPE_CHECKING, Any

from ..cost_models import arguments
from ..cost_models.arguments import Converted, Options, option, options_class
from ..cost_models.errors import UsageError
from ..cost_models.quantities import MOST_ACTIONS, format_count

if TYPE_CHECKING:
    from ..cost_models.program import Program, StageSlot
    from ..cost_models.step_costs import Array, Costs

MOST_MILLISECONDS = 1e9
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def _read_milliseconds(text: str, name: str) -> tuple[float, ...]:
    """`18.5` or `18.5,20,19`. Raises UsageError."""
    return tuple(_milliseconds(part.strip(), f"{name} {text}", name) for part in text.split(","))


def _milliseconds(part: str, text: str, name: str) -> float:
    hint = f"Give milliseconds, one value or one a stage: {name} 18.5 or {name} 18.5,20,19"
    if not _NUMBER.fullmatch(part):
        raise UsageError(f"{text}: {part!r} is not a number of milliseconds", hint)
    value = float(part)
    if value < 0:
        raise UsageError(f"{text}: {part} must not be negative", hint)
    if not math.isfinite(value) or value > MOST_MILLISECONDS:
        raise UsageError(f"{text}: {part} must be at most {MOST_MILLISECONDS:.0f}", hint)
    return value


def _checked_milliseconds(name: str, value: Any) -> tuple[float, ...] | None:
    if value is None:
        return None
    if isinstance(value, Real | str) or not hasattr(value, "__iter__"):
        return (_duration(name, value),)
    return tuple(_duration(f"{name}[{index}]", milliseconds) for index, milliseconds in enumerate(value))


def _duration(name: str, value: Any) -> float:
    """Milliseconds. Raises UsageError."""
    duration = arguments.number(name, value)
    if not 0 <= duration <= MOST_MILLISECONDS:
        raise UsageError(f"{name}={value!r}: must be 0 to {MOST_MILLISECONDS:.0f}", "Give milliseconds.")
    return duration


def _cost(help: str) -> Any:
    return option(
        None,
        _checked_milliseconds,
        help,
        "MS[,MS...]",
        read=_read_milliseconds,
        panel="Costs, instead of a plan: one value, or one a stage",
    )


@options_class
class CostOptions(Options):
    """Costs of a pipeline's stages instead of a plan's, in milliseconds: one value, or one a stage."""

    forward_ms: Converted[float | Sequence[float] | None, tuple[float, ...] | None] = _cost(
        "Forward of a micro-batch."
    )
    backward_ms: Converted[float | Sequence[float] | None, tuple[float, ...] | None] = _cost(
        "Its backward; with `weight_ms`, the gradient of the input alone."
    )
    weight_ms: Converted[float | Sequence[float] | None, tuple[float, ...] | None] = _cost(
        "The gradient of the weights."
    )
    transfer_ms: Converted[float | Sequence[float] | None, tuple[float, ...] | None] = _cost(
        "From a stage to the next, and back: latency only; default: 0."
    )

    def seconds(self, name: str) -> tuple[float, ...] | None:
        """Those of a field."""
        values: tuple[float, ...] | None = getattr(self, name)
        return None if values is None else tuple(value / 1e3 for value in values)


@dataclass(frozen=True)
class StageCosts:
    """Seconds of the stages, one value or one a stage; `transfer` one, one a stage, or one a boundary."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...] | None
    transfer: tuple[float, ...]

    @property
    def stages(self) -> int | None:
        """The number of stages, where values are given for each."""
        most = max(len(self.forward), len(self.backward), len(self.weight or ()))
        return most if most > 1 else None

    def costs(self, program: Program, transfers: str = "overlapped") -> Costs:
        """The costs of a program, `transfers` as of `Costs`.

        Raises UsageError for wrong counts, and where a split backward is given whole.
        """
        from ..cost_models.step_costs import stage_costs

        self._check(program)
        costs = stage_costs(program, self.forward, self.backward, self.weight)
        latency = self._latency(program)
        return replace(costs, forward_latency=latency, backward_latency=latency, transfers=transfers)

    def _check(self, program: Program) -> None:
        stages = program.devices
        values_by_name = (
            ("forward_ms", self.forward),
            ("backward_ms", self.backward),
            ("weight_ms", self.weight or (0.0,)),
        )
        for name, values in values_by_name:
            if len(values) not in (1, stages):
                raise _wrong_count(name, values, stages, f"Give one value, or one for each stage: {stages}.")
        between = f"Give one value, or one for each of the {stages - 1} boundaries between the stages."
        if len(self.transfer) not in (1, stages - 1, stages):
            raise _wrong_count("transfer_ms", self.transfer, stages, between)
        if program.splits_backward and self.weight is None:
            raise UsageError(
                "`weight_ms` is missing: the schedule runs the gradient of the weights apart",
                "Give it, as in weight_ms=9.3; `backward_ms` is then the gradient of the input alone.",
            )
        if not any(self.forward + self.backward + (self.weight or ())):
            raise UsageError("`forward_ms` and `backward_ms` are 0: there is no step", "Give one above 0.")

    def _latency(self, program: Program) -> Array:
        """By pipe and cut."""
        import numpy as np

        pipes = program.pipes
        rows = [[self._link_seconds(*ends, program.devices) for ends in pairwise(pipe)] for pipe in pipes]
        return np.array(rows, dtype=np.float64).reshape(len(pipes), program.slots - 1)

    def _link_seconds(self, source: StageSlot, destination: StageSlot, stages: int) -> float:
        """Between neighbours the value of the boundary, from the last stage to the first the last stage's."""
        if len(self.transfer) == 1 or source.device == destination.device:
            return self.transfer[0]
        low, high = sorted((source.device, destination.device))
        boundary = low if high - low == 1 else stages - 1
        if boundary == len(self.transfer):
            raise UsageError(
                f"`transfer_ms`: {len(self.transfer)} values, and the schedule sends from the last stage to "
                "the first",
                f"Give {stages} values, the last for that transfer, or one for all.",
            )
        return self.transfer[boundary]


def _wrong_count(name: str, values: tuple[float, ...], stages: int, hint: str) -> UsageError:
    text = ",".join(f"{1e3 * value:g}" for value in values[:8]) + (",…" if len(values) > 8 else "")
    return UsageError(
        f"{name}={text}: {format_count(len(values), 'value')} for {format_count(stages, 'stage')}", hint
    )


def check_size(stages: int, micro_batches: int, virtual_stages: int) -> None:
    """Raises UsageError where there would be more actions than can be looked at."""
    actions = _actions(stages, micro_batches, virtual_stages)
    if actions > MOST_ACTIONS:
        raise UsageError(
            f"stages={stages} and micro_batches={micro_batches}: {actions} actions, at most "
            f"{MOST_ACTIONS} are simulated",
            "Use fewer of either.",
        )


def check_steady_size(stages: int, micro_batches: int, virtual_stages: int) -> None:
    """Raises UsageError where an asynchronous schedule needs too many, which follow of the stages alone, to
    be steady."""
    actions = _actions(stages, micro_batches, virtual_stages)
    if actions > MOST_ACTIONS:
        raise UsageError(
            f"stages={stages}: the steady state shows after {micro_batches} micro-batches, {actions} "
            f"actions, at most {MOST_ACTIONS} are simulated",
            "Use fewer stages, or a synchronous schedule.",
        )


def _actions(stages: int, micro_batches: int, virtual_stages: int) -> int:
    """The most that there can be: F, B and W."""
    return 3 * stages * micro_batches * virtual_stages
