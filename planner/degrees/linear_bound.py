"""Lower bound on the step of every division of blocks over virtual stages in a box, by linear programming.

A box (division_box.py) limits the blocks of each virtual stage and of each device. The programme splits
blocks into parts of any size. Symbols:

- `x[r, k]`: blocks of row r on virtual stage k. A row is a kind of block. If a stage recomputes its first
  blocks only, each kind has two rows: for recomputed blocks and for the others.
- `P`: seconds of the pipeline, `U`: seconds of the update of the weights.

    minimize    P + U
    subject to  P >= constant + path @ x                  for each path through the actions of a step
                U >= start + slope @ x                    for each device, and for the mean device
                sum of needs @ x <= room                  for each peak of each device's memory
                sum of x over a kind == its blocks        for each kind
                low <= sum of x over a group <= high      for each group of the box
                0 <= x <= blocks of the stage in the box

Paths are those of `interleaved_bound`, one for each virtual stage, and the critical paths of simulated
solutions, added one by one (`DivisionProgramme.add_path`). The order of the actions is the same in all
divisions, so no division is faster than any path (Kelley, "The Cutting-Plane Method for Solving Convex
Programs", 1960).

HiGHS solves the programme in floating point, so its objective value proves nothing. The bound is computed
anew from its dual prices: no division takes less than `L(y)` seconds for any prices y, with `L` as in
`DivisionProgramme.value` (weak duality: Bertsimas and Tsitsiklis, "Introduction to Linear Optimization",
1997, theorem 4.3). Prices that are slightly wrong give a slightly lower bound, not a wrong one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ...cost_models.timeline import simulate
from ...cost_models.transformer.layer_table import LayerTable
from ...cost_models.transformer.rank_costs import PassSeconds
from ...cost_models.transformer.training_setting import block_ranges
from ...cost_models.transformer.training_step import pipeline_costs, pipeline_program
from ..cut_search.cut_bound import count_critical_path
from ..linear_programme import new_solver
from .division_box import DivisionBox

Array = npt.NDArray[np.float64]

_GIGABYTE = 1e9
_ROUNDING = 1e-12
"""Rounding error of a sum, as a share of the sum of its terms without their signs."""
_FAR = 1e6
"""Length along a ray of prices that proves that no division fits."""


@dataclass(frozen=True, eq=False)
class BoxSolution:
    """Lower bound in `seconds` on the divisions of a box, and the `amounts` of blocks by row and stage."""

    seconds: float
    amounts: Array


class DivisionProgramme:
    """Linear programme of all divisions of a combination with virtual stages.

    Args:
        layers: Costs of the layers.
        memory_bytes: Bytes that a device may use.
        any_again: Whether it must hold for every number of recomputed first blocks (`recompute_blocks`).
    """

    def __init__(self, layers: LayerTable, memory_bytes: float, *, any_again: bool = False) -> None:
        self.layers = layers
        setting, slots = layers.setting, layers.slots
        self._kinds = sorted(layers.blocks)
        all_blocks = layers.shape.blocks
        self._most = setting.recomputed(all_blocks) if setting.recomputed(all_blocks) < all_blocks else 0
        self._limits_again = self._most > 0 and not any_again
        modes = (True, False) if self._most else (bool(setting.recomputed(all_blocks)),)
        self._rows = [(kind, mode) for mode in modes for kind in self._kinds]
        self._seconds = np.array([layers.block_seconds(kind, again=mode) for kind, mode in self._rows])
        parts = [[(0, PassSeconds(0.0, 0.0)), *layers.fixed_parts(slot)] for slot in range(slots)]
        self._fixed = np.array([[sum(n * part[i] for n, part in slot) for slot in parts] for i in (0, 1)])
        self._transfers = np.array([layers.transfer_seconds(slot) for slot in range(slots - 1)])
        self._before = np.cumsum(
            [[0, *(block is kind for block in layers.shape.routed)] for kind in self._kinds], 1
        )
        self._keys: set[bytes] = set()
        self._amounts = len(self._rows) * slots
        # Rows of the programme over x, P and U, and their limits.
        self.matrix = np.zeros((0, self._amounts + 2))
        self._low = self._high = np.zeros(0)
        self._solver = _new_solver(np.append(np.zeros(self._amounts), [1.0, 1.0]))
        groups = self._group_masks()
        self._groups = len(groups)
        self._add_rows(groups, 0.0, np.inf)
        kinds = np.array([[row == kind for row, _ in self._rows] for kind in self._kinds])
        self._add_rows(np.repeat(kinds, slots, axis=1), self._before[:, -1], self._before[:, -1])
        needs, rooms = self._memory(memory_bytes)
        self._add_rows(-needs, -rooms, np.inf)
        slopes, starts = self._updates()
        self._add_rows(-slopes, starts, np.inf, update=1.0)
        times = _times(layers.degrees.pipeline, setting.virtual_stages, setting.micro_batches)
        constants = times @ self._fixed.sum(axis=0) + np.cumsum([0.0, *(2 * self._transfers)])
        paths = self._seconds.sum(axis=1)[:, None] * times[:, None]
        self._add_rows(-paths.reshape(len(times), -1), constants, np.inf, pipeline=1.0)

    def whole_box(self) -> DivisionBox:
        """Return the box of all divisions."""
        setting, slots = self.layers.setting, self.layers.slots
        blocks = self.layers.shape.blocks
        most = [blocks if slot in setting.block_slots(slots) else 0 for slot in range(slots)]
        return DivisionBox.of_fewest(blocks, self.layers.fewest_blocks, most, self.layers.degrees.pipeline)

    def solve(self, box: DivisionBox) -> BoxSolution:
        """Solve the programme of a box. HiGHS starts from its last basis."""
        from highspy import HighsModelStatus

        solver, columns = self._solver, np.arange(self._amounts)
        most = np.tile(box.high, len(self._rows)).astype(np.float64)
        for row, limits in enumerate(zip(*self._group_limits(box), strict=True)):
            solver.changeRowBounds(row, *limits)
        solver.changeColsBounds(len(columns), columns, np.zeros(len(columns)), most)
        solver.run()
        solution = solver.getSolution()
        prices = np.array(solution.row_dual)
        if solver.getModelStatus() == HighsModelStatus.kInfeasible:
            _, has_ray, ray = solver.getDualRay()
            prices = prices + _FAR * ray if has_ray else prices
        seconds = self.value(prices, box)
        amounts = np.array(solution.col_value)[: self._amounts].clip(0.0, most)
        return BoxSolution(seconds, amounts.reshape(len(self._rows), -1))

    def value(self, prices: Array, box: DivisionBox) -> float:
        """Lower bound on the seconds of the divisions of a box, from any prices of the rows.

        With y the prices, scaled until those of paths and those of updates sum to at most 1 each:

            L(y) = sum of y * (high if y < 0 else low) - sum over x of max(y @ matrix, 0) * most

        Args:
            prices: One for each row of the programme, of any sign and size.
            box: The divisions.

        Returns:
            `L(y)` less its rounding error.
        """
        low, high = self._low.copy(), self._high.copy()
        low[: self._groups], high[: self._groups] = self._group_limits(box)
        prices = np.where(np.isinf(high), prices.clip(0.0), prices)
        prices = prices / max(1.0, float((prices @ self.matrix[:, -2:]).max()) * (1 + _ROUNDING))
        worth = prices * np.where(prices < 0, high, low)
        gains = prices @ self.matrix + _ROUNDING * (np.abs(prices) @ np.abs(self.matrix))
        most = np.tile(box.high, len(self._rows))
        terms = np.concatenate([worth, -gains[:-2].clip(0.0) * most])
        return float(terms.sum() - _ROUNDING * np.abs(terms).sum())

    def add_path(self, seconds: Array) -> float:
        """Add the critical path of a simulated step, and return the seconds of its pipeline.

        Args:
            seconds: (2, slots) forward and backward seconds of the virtual stages.
        """
        layers, stages = self.layers, self.layers.degrees.pipeline
        virtual = layers.setting.virtual_stages
        program = pipeline_program(stages, layers.setting.micro_batches, virtual)
        costs = pipeline_costs([PassSeconds(*slot) for slot in seconds.T], self._transfers.tolist(), virtual)
        timeline = simulate(program, costs)
        counts = count_critical_path(program, timeline.run, np.zeros(layers.slots))
        # Reorder from the virtual stages of each device to the order in which a micro-batch meets them.
        actions = counts.actions[:, :2].reshape(stages, virtual, 2).swapaxes(0, 1).reshape(-1, 2).T
        if counts.key not in self._keys:
            self._keys.add(counts.key)
            constant = (actions * self._fixed).sum() + counts.transfers[0] @ self._transfers
            path = (self._seconds @ actions).reshape(1, -1)
            self._add_rows(-path, float(constant), np.inf, pipeline=1.0)
        return float(timeline.step_seconds)

    def stage_seconds(self, amounts: Array) -> Array:
        """Return the (2, slots) forward and backward seconds of virtual stages with these amounts."""
        return np.asarray(self._fixed + self._seconds.T @ amounts)

    def whole_amounts(self, counts: Sequence[int]) -> Array:
        """Return the amounts of blocks by row and virtual stage of a whole division."""
        setting, amounts = self.layers.setting, np.zeros((len(self._rows), len(counts)))
        for slot, blocks in enumerate(block_ranges(counts)):
            first = setting.recomputed(len(blocks)) if self._most else 0
            middle = blocks.start + first
            for row, (kind, is_recomputed) in enumerate(self._rows):
                running = self._before[self._kinds.index(kind)]
                ends = (blocks.start, middle) if is_recomputed and self._most else (middle, blocks.stop)
                amounts[row, slot] = running[ends[1]] - running[ends[0]]
        return amounts

    def _add_rows(
        self,
        amounts: Array,
        low: Array | float,
        high: Array | float,
        pipeline: float = 0.0,
        update: float = 0.0,
    ) -> None:
        """Add rows `low <= amounts @ x + pipeline * P + update * U <= high`."""
        rows = np.column_stack([amounts, np.tile([pipeline, update], (len(amounts), 1))])
        low, high = (np.broadcast_to(np.asarray(limit, float), len(rows)) for limit in (low, high))
        self.matrix = np.concatenate([self.matrix, rows])
        self._low, self._high = np.append(self._low, low), np.append(self._high, high)
        places, columns = np.nonzero(rows)
        starts = np.searchsorted(places, np.arange(len(rows)))
        self._solver.addRows(len(rows), low, high, len(columns), starts, columns, rows[places, columns])

    def _group_masks(self) -> Array:
        """Return the groups of blocks that a box limits, as (groups, rows x virtual stages) masks.

        A group is a whole virtual stage, a whole device, one kind of block in a virtual stage, or its
        recomputed or other blocks.
        """
        rows, slots, stages = len(self._rows), self.layers.slots, self.layers.degrees.pipeline
        identity = np.eye(slots, dtype=bool)
        devices = np.arange(slots) % stages == np.arange(stages)[:, None]
        masks = [np.tile(identity, rows), np.tile(devices, rows)]
        if len(self._kinds) > 1:
            masks += [
                np.hstack([identity * (row_of == kind) for row_of, _ in self._rows]) for kind in self._kinds
            ]
        if self._limits_again:
            masks += [
                np.hstack([identity * (row_of == mode) for _, row_of in self._rows]) for mode in (True, False)
            ]
        return np.concatenate(masks).astype(np.float64)

    def _group_limits(self, box: DivisionBox) -> tuple[Array, Array]:
        """Return the fewest and most blocks of each group."""
        low, high = [box.low, box.device_low], [box.high, box.device_high]
        if len(self._kinds) > 1:
            first, last = box.places()
            inner = np.maximum(first[1:], last[:-1])
            fewest = [np.maximum(running[inner] - running[last[:-1]], 0) for running in self._before]
            most = [np.minimum(running[last[1:]] - running[first[:-1]], box.high) for running in self._before]
            low += [
                np.maximum(running, box.low - other)
                for running, other in zip(fewest, most[::-1], strict=True)
            ]
            high += most
        if self._limits_again:
            low += [np.minimum(box.low, self._most), (box.low - self._most).clip(0)]
            high += [np.minimum(box.high, self._most), (box.high - self._most).clip(0)]
        return np.concatenate(low).astype(np.float64), np.concatenate(high).astype(np.float64)

    def _updates(self) -> tuple[Array, Array]:
        """Return the update terms of virtual stages, for the mean device and each device, and the rest.

        A device may have no experts.
        """
        layers, stages = self.layers, self.layers.degrees.pipeline
        line, routed = layers.update_lines[0], layers.routed_update_slope
        blocks = [layers.block_parameters[kind] for kind, _ in self._rows]
        adds = np.array([line.slope * parameters.dense + routed * parameters.routed for parameters in blocks])
        slopes, least = [np.zeros((len(self._rows), layers.slots))], [layers.least_update_seconds]
        for device in range(stages):
            slots = range(device, layers.slots, stages)
            slopes.append(np.zeros((len(self._rows), layers.slots)))
            slopes[-1][:, device::stages] = adds[:, None]
            dense = sum(layers.parameters(range(0), slot).dense for slot in slots)
            least.append(line.start + line.slope * dense)
        return np.array(slopes).reshape(len(slopes), -1), np.array(least)

    def _memory(self, memory_bytes: float) -> tuple[Array, Array]:
        """Return needed gigabytes per block by row and stage, and available ones, for each memory peak."""
        layers, stages = self.layers, self.layers.degrees.pipeline
        needs, rooms = [], []
        for device in range(stages) if np.isfinite(memory_bytes) else ():
            for peak, room in zip(*layers.peak_room(device, memory_bytes), strict=True):
                need = np.zeros((len(self._rows), layers.slots))
                parts = (layers.block_bytes(kind, again=mode) for kind, mode in self._rows)
                need[:, device::stages] = [states + saved * peak for states, saved in parts]
                needs.append(need.ravel() / _GIGABYTE)
                rooms.append(room / _GIGABYTE)
        return np.array(needs).reshape(-1, len(self._rows) * layers.slots), np.array(rooms)


def _new_solver(costs: Array) -> Any:
    """Solver of a programme without rows that minimizes the costs of nonnegative variables."""
    solver = new_solver()
    solver.setOptionValue("presolve", "off")
    count = len(costs)
    solver.addCols(count, costs, np.zeros(count), np.full(count, np.inf), 0, [], [], [])
    return solver


@lru_cache(maxsize=256)
def _times(stages: int, virtual: int, count: int) -> Array:
    """Return how often the bound of each virtual stage counts a second of each, see `interleaved_bound`."""
    slots = np.arange(stages * virtual)
    same, earlier = slots[:, None] % stages == slots % stages, slots < slots[:, None]
    return np.asarray(count * same + earlier - stages * (same & earlier), dtype=np.float64)
