"""When each action of a process starts and ends."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from ....profiler.passes.clocks import Clock, CpuClock, CudaClock
from ..job import StageSeconds


def clock_for(device: torch.device) -> Clock:
    """Of the device that computes."""
    return CudaClock(device) if device.type == "cuda" else CpuClock()


class ActionStamps:
    """The seconds of a process's actions, by stage and kind: forward, loss, backward, input, weight."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._pending: list[tuple[int, str, Any, Any]] = []
        self._seconds: dict[tuple[int, str], list[float]] = {}

    def timed(self, stage: int, kind: str, run: Callable[..., Any]) -> Callable[..., Any]:
        """`run` with a stamp before and after."""

        def run_timed(*args: Any, **kwargs: Any) -> Any:
            start = self._clock.stamp()
            made = run(*args, **kwargs)
            self._pending.append((stage, kind, start, self._clock.stamp()))
            return made

        return run_timed

    def settle(self) -> None:
        """Reads the stamps of a step that is over."""
        self._clock.settle()
        for stage, kind, start, end in self._pending:
            self._seconds.setdefault((stage, kind), []).append(self._clock.seconds(start, end))
        self._pending.clear()

    def forget(self) -> None:
        """What was stamped so far: those were warm-ups."""
        self.settle()
        self._seconds.clear()

    def stages(self) -> dict[int, StageSeconds]:
        """Medians over all micro-batches of all steps; the last stage's forward has the loss in it."""
        found: dict[int, StageSeconds] = {}
        for stage in {stage for stage, _ in self._seconds}:
            of = {
                kind: self._median(stage, kind) for kind in ("forward", "loss", "backward", "input", "weight")
            }
            whole = of["backward"] or of["input"] + of["weight"]
            found[stage] = StageSeconds(
                forward=of["forward"] + of["loss"], backward=whole, input=of["input"], weight=of["weight"]
            )
        return found

    def _median(self, stage: int, kind: str) -> float:
        seconds = self._seconds.get((stage, kind))
        return median(seconds) if seconds else 0.0
