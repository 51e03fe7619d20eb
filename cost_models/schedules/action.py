"""An action of a stage, and what a schedule has to say of itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple


class Action(NamedTuple):
    """Forward (F) or backward (B) of one micro-batch (0-based) on the stage in whose list it stands."""

    kind: Literal["F", "B"]
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}"


@dataclass(frozen=True)
class Schedule:
    """`actions(stages, micro_batches)` gives each stage's list; `in_flight(stage, stages, micro_batches)`
    the most micro-batches (from the start of F to the end of B) that the stage holds at a time."""

    name: str
    actions: Callable[[int, int], list[list[Action]]]
    in_flight: Callable[[int, int, int], int]
