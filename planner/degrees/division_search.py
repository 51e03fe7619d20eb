"""Branch and bound for the division of blocks over virtual stages with the shortest step.

Divisions are split into boxes. In each, a device or a virtual stage has at most, or at least, a number of
blocks (Land and Doig, "An Automatic Method of Solving Discrete Programming Problems", Econometrica 28(3),
1960). No division of a box is faster than its linear programme (linear_bound.py), and a box with a single
division is that division. The box with the least bound is split next, where the solution of its programme has
fractions of blocks: first those of a device, which delay all its micro-batches, then those of a virtual
stage. All boxes share the paths. The critical path of each solution is added while that raises the bound.
Whole divisions near each solution are tried as plans.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np

from ...cost_models.transformer.layer_table import LayerTable
from ...cost_models.transformer.training_step import StepEstimate, estimate_stages
from .division_box import DivisionBox
from .interleaved_bound import interleaved_bound
from .linear_bound import Array, BoxSolution, DivisionProgramme
from .stage_divisions import fit_division, improve_division, round_division

Division = tuple[tuple[int, ...], StepEstimate]

ROOT_PATHS, BOX_PATHS = 40, 4
"""Most critical paths that are added for the box of all divisions, and for a smaller box."""
FITTED = 4
"""Number of first boxes near whose solutions blocks are moved until a division fits."""
_CLOSE = 1e-8
"""Relative difference to the step of a programme's solution below which further paths do not pay."""
_GAIN = 1e-8
"""Least relative gain of a path."""
_WHOLE = 1e-4
"""Fraction of a block that counts as none."""
_MOST_FORWARDS = 8192
"""Most forwards of steps that are simulated for paths."""
_FORWARDS_OF_WORK = 16
"""Forwards that are simulated in the time of solving a programme with one more variable."""


@dataclass(order=True)
class _Open:
    """A box that is not searched yet, with a lower bound on its divisions."""

    seconds: float
    number: int
    box: DivisionBox = field(compare=False)


class DivisionSearch:
    """Search of the divisions of one combination, one box at a time.

    `best` is the fastest division that was tried and fits, `boxes` the number of boxes searched, and `work`
    the size of all solved programmes plus the simulations for their paths.

    Args:
        layers: Costs of the layers.
        memory_bytes: Bytes that a device may use.
        any_again: Whether the bounds must hold for any number of recomputed first blocks.
    """

    def __init__(self, layers: LayerTable, memory_bytes: float, *, any_again: bool = False) -> None:
        self.layers, self.memory_bytes = layers, memory_bytes
        self.programme = DivisionProgramme(layers, memory_bytes, any_again=any_again)
        self.best: Division | None = None
        self.boxes = self.work = 0
        self._number = 0
        self._trials: set[tuple[int, ...]] = set()
        self._closed = float("inf")
        self._open = [_Open(0.0, 0, self.programme.whole_box())]
        self._forwards = layers.setting.micro_batches * layers.slots
        self._paths_help = self._forwards <= _MOST_FORWARDS

    @property
    def bound_seconds(self) -> float:
        """Lower bound in seconds on all divisions that fit."""
        return min(self._closed, self._open[0].seconds if self._open else float("inf"))

    def advance(self, enough: float) -> None:
        """Search the box with the least bound, if that is below `enough` seconds.

        Divisions that take at least `enough` seconds are of no use.
        """
        if not self._open or self._open[0].seconds >= enough:
            return
        first = heapq.heappop(self._open)
        self.boxes += 1
        solution = self._solve(first.box, enough)
        if solution.seconds >= enough:
            self._closed = min(self._closed, max(solution.seconds, first.seconds))
            return
        for box in self._parts(first.box, solution):
            if not box.is_empty:
                self._push(max(first.seconds, solution.seconds), box, enough)

    def bound_root(self, enough: float) -> float:
        """Return a lower bound on all divisions without splitting them; see `advance` for `enough`."""
        return self._solve(self.programme.whole_box(), enough).seconds

    def _push(self, seconds: float, box: DivisionBox, enough: float) -> None:
        """Add a box or, if it is a single division, its step."""
        counts = box.counts
        if counts is None:
            self._number += 1
            heapq.heappush(self._open, _Open(seconds, self._number, box))
            return
        self._try(counts, enough)
        if self.layers.peak_bytes(counts) <= self.memory_bytes:
            self._closed = min(self._closed, estimate_stages(self.layers, counts).step_seconds)

    def _solve(self, box: DivisionBox, enough: float) -> BoxSolution:
        """Solve the programme of a box, add critical paths of its solutions, and try divisions near them."""
        solution = self._solve_programme(box)
        for _ in range(ROOT_PATHS if self.boxes == 1 else BOX_PATHS):
            if solution.seconds >= enough or not self._paths_help:
                break
            update = self.layers.least_update_seconds
            pipeline = self._add_path(solution.amounts)
            if (pipeline + update) * (1 - _CLOSE) <= solution.seconds:
                break
            last_seconds, solution = solution.seconds, self._solve_programme(box)
            if solution.seconds <= last_seconds * (1 + _GAIN):
                break
        if solution.seconds < enough:
            self._try_near(solution.amounts.sum(axis=0), enough)
        return solution

    def _add_path(self, amounts: Array) -> float:
        self.work += self._forwards // _FORWARDS_OF_WORK
        return self.programme.add_path(self.programme.stage_seconds(amounts))

    def _solve_programme(self, box: DivisionBox) -> BoxSolution:
        self.work += self.programme.matrix.shape[1]
        return self.programme.solve(box)

    def _parts(self, box: DivisionBox, solution: BoxSolution) -> list[DivisionBox]:
        """Return parts of a box that exclude the solution's fractional amounts."""
        amounts = solution.amounts.sum(axis=0)
        devices = amounts.reshape(-1, len(box.device_low)).sum(axis=0)
        for values, split, low, high in (
            (devices, box.split_device, box.device_low, box.device_high),
            (amounts, box.split_slot, box.low, box.high),
        ):
            inside = values.clip(low, high)
            rest = np.where(high > low, np.abs(inside - np.round(inside)), 0.0)
            if rest.max() > _WHOLE:
                place = int(rest.argmax())
                return list(split(place, int(np.floor(inside[place]))))
        counts = np.round(amounts).astype(int).clip(box.low, box.high)
        place = int((box.high - box.low).argmax())
        most = min(int(counts[place]), int(box.high[place]) - 1)
        return list(box.split_slot(place, most))

    def _try_near(self, amounts: Array, enough: float) -> None:
        """Try the whole division nearest to these amounts, with blocks moved until it fits."""
        counts = round_division(self.layers, amounts.tolist())
        if counts in self._trials:
            return
        self._trials.add(counts)
        if self.boxes > FITTED:
            self._try(counts, enough)
            return
        fitting = fit_division(self.layers, counts, self.memory_bytes)
        if fitting is not None:
            self._try(fitting, enough)

    def _try(self, counts: tuple[int, ...], enough: float) -> None:
        """Try a division as a plan if it may take less than `enough` seconds, and add its critical path."""
        most = enough if self.best is None else min(enough, self.best[1].step_seconds)
        if interleaved_bound(self.layers, counts) >= most:
            return
        if self.layers.peak_bytes(counts) > self.memory_bytes:
            return
        if self._paths_help:
            self._add_path(self.programme.whole_amounts(counts))
        if estimate_stages(self.layers, counts).step_seconds < most:
            self.best = improve_division(self.layers, counts, self.memory_bytes)
