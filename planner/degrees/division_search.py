"""The division of blocks over virtual stages with the shortest step: branch and bound.

Divisions are split into boxes, in each of which a device or a virtual stage has at most, or at least, so many
blocks (Land and Doig, "An Automatic Method of Solving Discrete Programming Problems", Econometrica 28(3),
1960); none of a box is faster than its linear programme (linear_bound.py), and a box with one division is
that division. The box with the least bound is split next, where its programme's solution has parts of blocks:
first those of a device, whose micro-batches all take longer by them, then those of a virtual stage. All boxes
share the paths, of which the critical one of each solution is added as long as that makes the bound larger.
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
"""Critical paths that are added for all divisions, and for a part of them."""
FITTED = 4
"""Boxes, the first ones, near whose solutions blocks are moved until a division fits."""
_CLOSE = 1e-8
"""Of the step of a programme's solution: from there on further paths are not worth while."""
_GAIN = 1e-8
"""Of its value, that a path must add."""
_WHOLE = 1e-4
"""What is left of a block that is taken for none."""
_MOST_FORWARDS = 8192
"""Of steps that are simulated for paths."""
_FORWARDS_OF_WORK = 16
"""That are simulated in the time in which a programme with one more variable is solved."""


@dataclass(order=True)
class _Open:
    """A box that is not yet searched, and a lower bound on its divisions."""

    seconds: float
    number: int
    box: DivisionBox = field(compare=False)


class DivisionSearch:
    """Of one combination, one box at a time. `best`: the fastest division that it tried and that fits;
    `boxes` that it looked into, and `work`: limits of all programmes that it solved, and what
    was simulated for their paths."""

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
        """That no division that fits takes less than."""
        return min(self._closed, self._open[0].seconds if self._open else float("inf"))

    def advance(self, enough: float) -> None:
        """Looks into the box with the least bound, if that is below `enough` seconds: divisions are of no use
        that take so long."""
        if not self._open or self._open[0].seconds >= enough:
            return
        own = heapq.heappop(self._open)
        self.boxes += 1
        solution = self._solve(own.box, enough)
        if solution.seconds >= enough:
            self._closed = min(self._closed, max(solution.seconds, own.seconds))
            return
        for box in self._parts(own.box, solution):
            if not box.is_empty:
                self._push(max(own.seconds, solution.seconds), box, enough)

    def bound_root(self, enough: float) -> float:
        """Lower bound on all divisions, without looking into their parts; `enough` as for `advance`."""
        return self._solve(self.programme.whole_box(), enough).seconds

    def _push(self, seconds: float, box: DivisionBox, enough: float) -> None:
        """A box, or, where it is a single division, what that takes."""
        counts = box.counts
        if counts is None:
            self._number += 1
            heapq.heappush(self._open, _Open(seconds, self._number, box))
            return
        self._try(counts, enough)
        if self.layers.peak_bytes(counts) <= self.memory_bytes:
            self._closed = min(self._closed, estimate_stages(self.layers, counts).step_seconds)

    def _solve(self, box: DivisionBox, enough: float) -> BoxSolution:
        """The programme of a box, with critical paths of its solutions, and divisions near them tried."""
        solution = self._solve_programme(box)
        for _ in range(ROOT_PATHS if self.boxes == 1 else BOX_PATHS):
            if solution.seconds >= enough or not self._paths_help:
                break
            update = self.layers.least_update_seconds
            pipeline = self._add_path(solution.amounts)
            if (pipeline + update) * (1 - _CLOSE) <= solution.seconds:
                break
            before, solution = solution.seconds, self._solve_programme(box)
            if solution.seconds <= before * (1 + _GAIN):
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
        """Parts of a box, in none of which the solution's amounts are allowed if they are no whole blocks."""
        amounts = solution.amounts.sum(axis=0)
        devices = amounts.reshape(-1, len(box.device_low)).sum(axis=0)
        for own, split, low, high in (
            (devices, box.split_device, box.device_low, box.device_high),
            (amounts, box.split_slot, box.low, box.high),
        ):
            inside = own.clip(low, high)
            rest = np.where(high > low, np.abs(inside - np.round(inside)), 0.0)
            if rest.max() > _WHOLE:
                place = int(rest.argmax())
                return list(split(place, int(np.floor(inside[place]))))
        counts = np.round(amounts).astype(int).clip(box.low, box.high)
        place = int((box.high - box.low).argmax())
        most = min(int(counts[place]), int(box.high[place]) - 1)
        return list(box.split_slot(place, most))

    def _try_near(self, amounts: Array, enough: float) -> None:
        """The whole division nearest to these amounts, with blocks moved until it fits."""
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
        """As a plan, if it may take less than `enough` seconds; and its critical path."""
        most = enough if self.best is None else min(enough, self.best[1].step_seconds)
        if interleaved_bound(self.layers, counts) >= most:
            return
        if self.layers.peak_bytes(counts) > self.memory_bytes:
            return
        if self._paths_help:
            self._add_path(self.programme.whole_amounts(counts))
        if estimate_stages(self.layers, counts).step_seconds < most:
            self.best = improve_division(self.layers, counts, self.memory_bytes)
