"""Partition: the stages of a model; a balance is the list of their layer counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from .errors import UsageError


@dataclass(frozen=True)
class Stage:
    """Layers `first` to `last` (0-based, inclusive) on `devices`: more than one are replicas."""

    first: int
    last: int
    devices: tuple[int, ...]

    @property
    def replicas(self) -> int:
        """Devices that share the stage's micro-batches."""
        return len(self.devices)


@dataclass(frozen=True)
class Partition:
    """All stages of a model, in order."""

    stages: tuple[Stage, ...]

    @property
    def balance(self) -> list[int]:
        """Layers of each stage."""
        return [stage.last - stage.first + 1 for stage in self.stages]


def straight(balance: Sequence[int]) -> Partition:
    """Stages of so many layers, one device each, in order. Raises UsageError for an empty stage."""
    if not balance or min(balance) < 1:
        raise UsageError(f"balance {list(balance)}: every stage needs a layer", "Use counts of at least 1.")
    ends = list(accumulate(balance))
    return Partition(
        tuple(
            Stage(end - count, end - 1, (device,))
            for device, (count, end) in enumerate(zip(balance, ends, strict=True))
        )
    )


def forbidden_cuts(balance: Sequence[int], cut_after: npt.NDArray[np.bool_]) -> list[int]:
    """Layers after which the balance cuts although `cut_after` forbids it."""
    ends = list(accumulate(balance))[:-1]
    return [end - 1 for end in ends if not cut_after[end - 1]]
