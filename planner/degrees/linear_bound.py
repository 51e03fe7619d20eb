"""Linear programmes that no division of blocks over virtual stages is faster than.

Blocks are split into parts of any size: each virtual stage has some of each kind, of which the first may run
again, and as many as it must have; every device has memory for what it keeps at each of its peaks (of its
first virtual stages it keeps more micro-batches than of its last); and the step takes as long as each path
through its actions. Paths are those of `interleaved_bound`, one by virtual stage, and, one after another,
the critical path of the step that the programme's own solution takes: the order of the actions is the same
in all divisions, and so none is faster than any path (Kelley, "The Cutting-Plane Method for Solving Convex
Programs", 1960).

What is returned is not the value of a solution, but that of the dual problem at the prices that it has,
worked out anew: whatever the prices are, that is no more than any division takes (weak duality: Bertsimas and
Tsitsiklis, "Introduction to Linear Optimization", 1997, theorem 4.3).
"""

from __future__ import annotations

from functools import lru_cache
from heapq import heapify, heapreplace

import numpy as np
import numpy.typing as npt

from ...cost_models.timeline import simulate
from ...cost_models.transformer.layer_table import LayerTable
from ...cost_models.transformer.rank_costs import PassSeconds
from ...cost_models.transformer.training_step import pipeline_costs, pipeline_program
from ..cut_search.cut_bound import count_critical_path
from .simplex import maximize

Array = npt.NDArray[np.float64]

_GIGABYTE = 1e9
_ROUNDING = 1e-12
"""Of the sum of all terms without their signs, what their sum may be off."""
_FAR = 1e3
"""Along a ray."""
_CLOSE = 1e-3
"""Of the step of the programme's solution: from there on further paths are not worth while."""
_MOST_FORWARDS = 4096
"""Of steps that are simulated."""


class DivisionProgramme:
    """All divisions of a combination with virtual stages. Of each kind of block there is a row, and two where
    the first blocks of a virtual stage run again: that of those, and that of the others."""

    def __init__(self, layers: LayerTable, memory_bytes: float) -> None:
        self.layers = layers
        setting, slots = layers.setting, layers.slots
        self.blocks = [layers.shape.routed.count(kind) for kind in sorted(layers.blocks)]
        self._kinds = sorted(layers.blocks)
        self._fewest = np.array(
            [setting.fewest_blocks(slot, slots) for slot in range(slots)], dtype=np.float64
        )
        every = layers.shape.blocks
        self._most = setting.recomputed(every) if setting.recomputed(every) < every else 0
        again = (True, False) if self._most else (bool(setting.recomputed(every)),)
        self._rows = [(kind, own) for own in again for kind in self._kinds]
        seconds = [layers.block_seconds(kind, again=own) for kind, own in self._rows]
        self._seconds = np.array(seconds)
        parts = [[(0, PassSeconds(0.0, 0.0)), *layers.fixed_parts(slot)] for slot in range(slots)]
        self._fixed = np.array([[sum(n * own[way] for n, own in each) for each in parts] for way in (0, 1)])
        self._transfers = np.array([layers.transfer_seconds(slot) for slot in range(slots - 1)])
        self._needs, self._rooms = self._memory(memory_bytes)
        times = _times(layers.degrees.pipeline, setting.virtual_stages, setting.micro_batches)
        passes = np.cumsum([0.0, *(2 * self._transfers)])
        # (paths, rows, virtual stages), and (paths,).
        self._paths = self._seconds.sum(axis=1)[:, None] * times[:, None]
        self._constants = times @ self._fixed.sum(axis=0) + passes
        self._common = int(np.argmax(self.blocks))
        self._quota = -(-self.blocks[self._common] // layers.degrees.pipeline)
        self._solutions: dict[int | None, tuple[float, Array]] = {}

    def bound(self, paths: int = 0, enough: float = float("inf")) -> float:
        """Seconds of the pipeline that no division that fits takes less than, very many where none fits; with
        at most so many critical paths, until it is `enough` or as good as it gets."""
        if not paths:
            return self._solve(None)
        least: list[tuple[float, int]] = [
            (self._solve(device), device) for device in range(self.layers.degrees.pipeline)
        ]
        heapify(least)
        small = self.layers.setting.micro_batches * self.layers.slots <= _MOST_FORWARDS
        for _ in range(paths if small else 0):
            value, device = least[0]
            if value >= enough or self._add_path(device) * (1 - _CLOSE) <= value:
                break
            heapreplace(least, (max(value, self._solve(device)), device))
        return least[0][0]

    def amounts(self) -> Array:
        """Of the solution with the least bound, the blocks of each virtual stage."""
        _, least = min(self._solutions.values(), key=lambda own: own[0])
        return np.asarray(least.sum(axis=0))

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
                needs.append(need / _GIGABYTE)
                rooms.append(room / _GIGABYTE)
        return np.array(needs).reshape(-1, len(self._rows), layers.slots), np.array(rooms)

    def _quotas(self, last: int | None) -> tuple[Array, Array]:
        """Of the commonest kind one device has its share of the blocks, rounded up, and one is the last that
        has so many. By device: 1 where it has at least, -1 where it has at most, 0 where either may be (None:
        of all), and how many."""
        if last is None:
            return np.zeros(self.layers.degrees.pipeline), np.zeros(self.layers.degrees.pipeline)
        devices = np.arange(self.layers.degrees.pipeline)
        signs = np.where(devices > last, -1.0, 1.0 * (devices == last))
        return signs, np.where(devices > last, self._quota - 1.0, self._quota)

    def _solve(self, last: int | None) -> float:
        """The value of the dual problem, whose variables are prices: of each path, of each peak's memory, of
        a block of each kind, of each device's quota, of a block that a virtual stage must have, and of one
        more that may run again."""
        slots, kinds, stages = len(self._fewest), len(self._kinds), self.layers.degrees.pipeline
        signs, most = self._quotas(last)
        objective = [self._constants, -self._rooms, self.blocks, signs * most, self._fewest]
        objective.append(np.full(slots, -self._most))
        of_device = signs[:, None] * (np.arange(slots) % stages == np.arange(stages)[:, None])
        limits = []
        for row in range(len(self._rows)):
            of_kind = np.zeros((kinds, slots))
            of_kind[row % kinds] = 1.0
            quotas = of_device * (row % kinds == self._common)
            own = np.eye(slots) * (row < kinds)
            parts = (-self._paths[:, row], -self._needs[:, row], of_kind, quotas, own)
            limits.append(np.concatenate([*parts, -own * bool(self._most)]).T)
        weights = np.zeros((1, sum(map(len, objective))))
        weights[0, : len(self._paths)] = 1.0
        solution = maximize(
            np.concatenate(objective),
            np.concatenate([*limits, weights]),
            np.append(np.zeros(slots * len(limits)), 1.0),
        )
        value = self.value(solution.values, last)
        if solution.ray is not None:
            value = max(value, self.value(solution.values + _FAR * solution.ray, last))
        amounts = solution.prices[:-1].clip(0.0).reshape(len(self._rows), slots)
        self._solutions[last] = value, amounts
        return value

    def value(self, prices: Array, last: int | None) -> float:
        """That no division takes less than of which this device is the last with its quota (None: whichever
        is), by any prices of the paths, the peaks, the kinds and the quotas: the best of the virtual stages
        follow from these."""
        kinds_number, stages = len(self._kinds), self.layers.degrees.pipeline
        ends = np.cumsum([len(self._paths), len(self._rooms), kinds_number, stages])
        parts = np.split(prices.clip(0.0), ends)[:4]
        if not parts[0].sum():
            parts[0] = np.ones(len(self._paths))
        paths, peaks, kinds, quotas = (own / parts[0].sum() for own in parts)
        signs, most = self._quotas(last)
        costs = np.tensordot(paths, self._paths, axes=1) + np.tensordot(peaks, self._needs, axes=1)
        costs[self._common :: kinds_number] -= np.tile(signs * quotas, len(self._fewest) // stages)
        # Of the last rows there may be any number of blocks: none is worth more than it costs.
        kinds = np.minimum(kinds, costs[-kinds_number:].min(axis=1))
        least = (costs[:kinds_number] - kinds[:, None]).min(axis=0)
        own = np.where(least < 0, self._most, self._fewest) * least
        fixed = paths * self._constants, -peaks * self._rooms, kinds * self.blocks, signs * most * quotas
        terms = np.concatenate([*fixed, own])
        return float(terms.sum() - _ROUNDING * np.abs(terms).sum())

    def _add_path(self, last: int) -> float:
        """Adds the critical path of the last solution with such quotas; the seconds of its pipeline."""
        setting, stages = self.layers.setting, self.layers.degrees.pipeline
        virtual = setting.virtual_stages
        seconds = self._fixed + self._seconds.T @ self._solutions[last][1]
        program = pipeline_program(stages, setting.micro_batches, virtual)
        costs = pipeline_costs([PassSeconds(*own) for own in seconds.T], self._transfers.tolist(), virtual)
        timeline = simulate(program, costs)
        counts = count_critical_path(program, timeline.run, np.zeros(len(self._fewest)))
        # From a device's virtual stages one after another to the order in which a micro-batch meets them.
        actions = counts.actions[:, :2].reshape(stages, virtual, 2).swapaxes(0, 1).reshape(-1, 2).T
        constant = (actions * self._fixed).sum() + counts.transfers[0] @ self._transfers
        self._paths = np.concatenate([self._paths, (self._seconds @ actions)[None]])
        self._constants = np.append(self._constants, constant)
        return timeline.step_seconds


@lru_cache(maxsize=256)
def _times(stages: int, virtual: int, count: int) -> Array:
    """How often the bound of each virtual stage counts a second of each: `interleaved_bound`."""
    slots = np.arange(stages * virtual)
    same, earlier = slots[:, None] % stages == slots % stages, slots < slots[:, None]
    return np.asarray(count * same + earlier - stages * (same & earlier), dtype=np.float64)
