"""Linear programmes that no division of blocks over virtual stages is faster than.

Blocks are split into parts of any size: each virtual stage and each device has as many as a box allows (all
divisions at first, then a part of these, division_search.py), of each kind as many as can be among the blocks
that it may begin and end with, and of those the first run again; every device has memory for what it keeps at
each of its peaks (of its first virtual stages it keeps more micro-batches than of its last); and the step
takes as long as each path through its actions, and the update of the weights of each device behind it. Paths
are those of `interleaved_bound`, one by virtual stage, and, one after another, the critical path of the step
that the programme's own solution takes: the order of the actions is the same in all divisions, and so none is
faster than any path (Kelley, "The Cutting-Plane Method for Solving Convex Programs", 1960).

What is returned is not the value of a solution, but that of the dual problem at the prices that it has,
worked out anew: whatever the prices are, that is no more than any division takes (weak duality: Bertsimas and
Tsitsiklis, "Introduction to Linear Optimization", 1997, theorem 4.3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from ...cost_models.timeline import simulate
from ...cost_models.transformer.layer_table import LayerTable
from ...cost_models.transformer.rank_costs import PassSeconds
from ...cost_models.transformer.training_setting import block_ranges
from ...cost_models.transformer.training_step import pipeline_costs, pipeline_program
from ..cut_search.cut_bound import count_critical_path
from .division_box import DivisionBox
from .simplex import Array, SimplexTable

_GIGABYTE = 1e9
_ROUNDING = 1e-12
"""Of the sum of all terms without their signs, what their sum may be off."""
_FAR = 1e3
"""Along a ray."""


@dataclass(frozen=True, eq=False)
class BoxSolution:
    """No division of a box takes less than `seconds`; `amounts`: blocks by row and virtual stage of the
    programme's solution, which takes so long as the programme knows."""

    seconds: float
    amounts: Array


class DivisionProgramme:
    """All divisions of a combination with virtual stages. Of each kind of block there is a row, and two where
    the first blocks of a virtual stage run again: that of those, and that of the others. Variables of the
    dual problem are prices: of memory, of a block of each kind, of what each of several groups of blocks must
    and may have, of updates, and of paths, which become more."""

    def __init__(self, layers: LayerTable, memory_bytes: float) -> None:
        self.layers = layers
        setting, slots = layers.setting, layers.slots
        self._kinds = sorted(layers.blocks)
        every = layers.shape.blocks
        self._most = setting.recomputed(every) if setting.recomputed(every) < every else 0
        again = (True, False) if self._most else (bool(setting.recomputed(every)),)
        self._rows = [(kind, own) for own in again for kind in self._kinds]
        self._seconds = np.array([layers.block_seconds(kind, again=own) for kind, own in self._rows])
        parts = [[(0, PassSeconds(0.0, 0.0)), *layers.fixed_parts(slot)] for slot in range(slots)]
        self._fixed = np.array([[sum(n * own[way] for n, own in each) for each in parts] for way in (0, 1)])
        self._transfers = np.array([layers.transfer_seconds(slot) for slot in range(slots - 1)])
        self._before = np.cumsum(
            [[0, *(own is kind for own in layers.shape.routed)] for kind in self._kinds], 1
        )
        self.masks = self._groups()
        # Of paths by row and virtual stage, and beside.
        self._paths: list[Array] = []
        self._constants: list[float] = []
        self._keys: set[bytes] = set()
        self._all: Array | None = None
        self._fixed_columns, self._fixed_objective = self._columns(memory_bytes)
        times = _times(layers.degrees.pipeline, setting.virtual_stages, setting.micro_batches)
        constants = times @ self._fixed.sum(axis=0) + np.cumsum([0.0, *(2 * self._transfers)])
        for own, constant in zip(times, constants.tolist(), strict=True):
            self._append(self._seconds.sum(axis=1)[:, None] * own, constant)

    def whole_box(self) -> DivisionBox:
        """All divisions."""
        setting, slots = self.layers.setting, self.layers.slots
        blocks = self.layers.shape.blocks
        most = [blocks if slot in setting.block_slots(slots) else 0 for slot in range(slots)]
        return DivisionBox.of_fewest(blocks, self.layers.fewest_blocks, most, self.layers.degrees.pipeline)

    def table(self) -> SimplexTable:
        """Of prices, before any is chosen."""
        table = SimplexTable(np.append(np.zeros(len(self._rows) * self.layers.slots), [1.0, 1.0]))
        table.add(self._fixed_objective, self._fixed_columns)
        return table

    def solve(self, box: DivisionBox, table: SimplexTable, enough: float = float("inf")) -> BoxSolution:
        """The programme of a box, from the last prices of the table on; no more than `enough` seconds need be
        known."""
        objective, own = self._objective(box), self._matrix()
        before = table.variables - len(self._fixed_objective)
        if before < len(self._paths):
            table.add(np.array(self._constants[before:]), own[:, table.variables :])
        table.change(objective)
        solution = table.solve(enough)
        value = self.value(solution.values, box)
        if solution.ray is not None:
            value = max(value, self.value(solution.values + _FAR * solution.ray, box))
        # Where no division of the box fits, prices have no limit, nor have the amounts.
        amounts = solution.prices[:-2].reshape(len(self._rows), -1).clip(0.0, box.high)
        return BoxSolution(value, amounts)

    def value(self, prices: Array, box: DivisionBox) -> float:
        """Seconds that no division of the box takes less than, by any prices: what each is worth, and, of
        every part of a virtual stage that is worth more than it costs, as much as there may be."""
        prices = prices.clip(0.0)
        matrix, objective = self._matrix(), self._objective(box)
        both = matrix[-2:] @ prices
        prices = prices / max(float(both.max()), 1e-9)
        more = (matrix[:-2] @ prices).clip(0.0).reshape(len(self._rows), -1)
        terms = np.concatenate([objective * prices, -(more * box.high).ravel()])
        return float(terms.sum() - _ROUNDING * np.abs(terms).sum())

    def add_path(self, seconds: Array) -> float:
        """Adds the critical path of the step whose virtual stages take so long, forward and backward (2,
        slots); the seconds of its pipeline."""
        layers, stages = self.layers, self.layers.degrees.pipeline
        virtual = layers.setting.virtual_stages
        program = pipeline_program(stages, layers.setting.micro_batches, virtual)
        costs = pipeline_costs([PassSeconds(*own) for own in seconds.T], self._transfers.tolist(), virtual)
        timeline = simulate(program, costs)
        counts = count_critical_path(program, timeline.run, np.zeros(layers.slots))
        # From a device's virtual stages one after another to the order in which a micro-batch meets them.
        actions = counts.actions[:, :2].reshape(stages, virtual, 2).swapaxes(0, 1).reshape(-1, 2).T
        if counts.key not in self._keys:
            self._keys.add(counts.key)
            constant = (actions * self._fixed).sum() + counts.transfers[0] @ self._transfers
            self._append(self._seconds @ actions, float(constant))
        return float(timeline.step_seconds)

    def stage_seconds(self, amounts: Array) -> Array:
        """Of virtual stages with so much of each row, forward and backward."""
        return np.asarray(self._fixed + self._seconds.T @ amounts)

    def whole_amounts(self, counts: Sequence[int]) -> Array:
        """By row and virtual stage, of a division."""
        setting, amounts = self.layers.setting, np.zeros((len(self._rows), len(counts)))
        for slot, own in enumerate(block_ranges(counts)):
            first = setting.recomputed(len(own)) if self._most else 0
            middle = own.start + first
            for row, (kind, again) in enumerate(self._rows):
                before = self._before[self._kinds.index(kind)]
                ends = (own.start, middle) if again and self._most else (middle, own.stop)
                amounts[row, slot] = before[ends[1]] - before[ends[0]]
        return amounts

    def _append(self, path: Array, constant: float) -> None:
        self._paths.append(path)
        self._constants.append(constant)
        self._all = None

    def _matrix(self) -> Array:
        """By row and virtual stage, and of the two sums of prices that are at most 1 (of paths, of updates):
        what each price counts."""
        if self._all is None:
            paths = np.array(self._paths).reshape(len(self._paths), -1)
            sums = np.tile([[1.0], [0.0]], len(self._paths))
            columns = np.concatenate([-paths.T, sums])
            self._all = np.concatenate([self._fixed_columns, columns], axis=1)
        return self._all

    def _objective(self, box: DivisionBox) -> Array:
        """What each price is worth."""
        objective = self._fixed_objective.copy()
        low, high = self._group_limits(box)
        objective[self._groups_from : self._groups_from + 2 * len(low)] = np.concatenate([low, -high])
        return np.concatenate([objective, self._constants])

    def _groups(self) -> npt.NDArray[np.bool_]:
        """Of parts of virtual stages of which a box says how many blocks they have: all of a virtual stage,
        all of a device, those of a kind in a virtual stage, and those that run again, or do not: (groups,
        rows x virtual stages)."""
        rows, slots, stages = len(self._rows), self.layers.slots, self.layers.degrees.pipeline
        every = np.eye(slots, dtype=bool)
        devices = np.arange(slots) % stages == np.arange(stages)[:, None]
        masks = [np.tile(every, rows), np.tile(devices, rows)]
        if len(self._kinds) > 1:
            masks += [np.hstack([every * (own == kind) for own, _ in self._rows]) for kind in self._kinds]
        if self._most:
            masks += [np.hstack([every * (own == again) for _, own in self._rows]) for again in (True, False)]
        return np.concatenate(masks).astype(bool)

    def _group_limits(self, box: DivisionBox) -> tuple[Array, Array]:
        """Of each group of parts the fewest blocks and the most."""
        low, high = [box.low, box.device_low], [box.high, box.device_high]
        if len(self._kinds) > 1:
            first, last = box.places()
            inner = np.maximum(first[1:], last[:-1])
            fewest = [np.maximum(own[inner] - own[last[:-1]], 0) for own in self._before]
            most = [np.minimum(own[last[1:]] - own[first[:-1]], box.high) for own in self._before]
            low += [np.maximum(own, box.low - other) for own, other in zip(fewest, most[::-1], strict=True)]
            high += most
        if self._most:
            low += [np.minimum(box.low, self._most), (box.low - self._most).clip(0)]
            high += [np.minimum(box.high, self._most), (box.high - self._most).clip(0)]
        return np.concatenate(low).astype(np.float64), np.concatenate(high).astype(np.float64)

    def _columns(self, memory_bytes: float) -> tuple[Array, Array]:
        """Of all prices but those of paths: what each counts by row and virtual stage, and in the two sums;
        and what each is worth, but those of groups."""
        needs, rooms = self._memory(memory_bytes)
        kinds = np.array([[own == kind for own, _ in self._rows] for kind in self._kinds])
        of_kind = np.repeat(kinds, self.layers.slots, axis=1).astype(np.float64)
        numbers = self._before[:, -1].astype(np.float64)
        groups = self.masks.astype(np.float64)
        slopes, least = self._updates()
        columns = np.concatenate([-needs, of_kind, groups, -groups, -slopes]).T
        sums = np.zeros((2, columns.shape[1]))
        sums[1, -len(slopes) :] = 1.0
        self._groups_from = len(needs) + len(of_kind)
        worth = np.concatenate([-rooms, numbers, np.zeros(2 * len(groups)), least])
        return np.concatenate([columns, sums]), worth

    def _updates(self) -> tuple[Array, Array]:
        """Terms of the update that virtual stages add, of the mean device and of each, and the rest.

        A device may have no experts.
        """
        layers, stages = self.layers, self.layers.degrees.pipeline
        line, routed = layers.update_lines[0], layers.routed_update_slope
        blocks = [layers.block_parameters[kind] for kind, _ in self._rows]
        adds = np.array([line.slope * own.dense + routed * own.routed for own in blocks])
        slopes, least = [np.zeros((len(self._rows), layers.slots))], [layers.least_update_seconds]
        for device in range(stages):
            slots = range(device, layers.slots, stages)
            slopes.append(np.zeros((len(self._rows), layers.slots)))
            slopes[-1][:, device::stages] = adds[:, None]
            dense = sum(layers.parameters(range(0), slot).dense for slot in slots)
            least.append(line.start + line.slope * dense)
        return np.array(slopes).reshape(len(slopes), -1), np.array(least)

    def _memory(self, memory_bytes: float) -> tuple[Array, Array]:
        """Of each peak of each device the gigabytes that a block of each row needs in each virtual stage, and
        those that there are."""
        layers, stages = self.layers, self.layers.degrees.pipeline
        needs, rooms = [], []
        for device in range(stages) if np.isfinite(memory_bytes) else ():
            peaks, room = layers.peak_room(device, memory_bytes)
            for peak in peaks:
                need = np.zeros((len(self._rows), layers.slots))
                parts = (layers.block_bytes(kind, again=again) for kind, again in self._rows)
                need[:, device::stages] = [states + saved * peak for states, saved in parts]
                needs.append(need.ravel() / _GIGABYTE)
                rooms.append(room / _GIGABYTE)
        return np.array(needs).reshape(-1, len(self._rows) * layers.slots), np.array(rooms)


@lru_cache(maxsize=256)
def _times(stages: int, virtual: int, count: int) -> Array:
    """How often the bound of each virtual stage counts a second of each: `interleaved_bound`."""
    slots = np.arange(stages * virtual)
    same, earlier = slots[:, None] % stages == slots % stages, slots < slots[:, None]
    return np.asarray(count * same + earlier - stages * (same & earlier), dtype=np.float64)
