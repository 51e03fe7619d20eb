"""The degrees of parallelism, division of the layers and micro-batch size with the shortest step.

All combinations that are allowed are tried, but for those whose bound exceeds the best. Of each under 1F1B,
the blocks are divided over the stages evenly by number, evenly by seconds, and so that the slowest stage
takes as little as can be within the memory; the fastest is kept. Another division may be faster: the bound
says by how much at most (stage_divisions.py argues it).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ...cost_models.errors import InfeasibleError
from ...cost_models.transformer.block_kernels import Tokens
from ...cost_models.transformer.kernel_table import Product
from ...cost_models.transformer.layer_table import LayerTable
from ...cost_models.transformer.parallel_degrees import ParallelDegrees
from ...cost_models.transformer.rank_costs import RankCosts, products
from ...cost_models.transformer.training_setting import TrainingSetting, even_blocks
from ...cost_models.transformer.training_step import StepEstimate, estimate_stages
from ...cost_models.transformer.transformer_shape import TransformerShape
from .degree_combinations import Combination, list_combinations, nothing_possible
from .degree_options import DegreeOptions
from .stage_divisions import (
    divide_by_seconds,
    interleaved_bound,
    interleaved_divisions,
    lower_bound,
    slowest_stage,
)

MOST_PLANS = 10

"""Degrees and micro-batch sizes that an answer lists."""


@dataclass(frozen=True)
class DegreePlan(Combination):
    """One way to train: a combination with the blocks of each (virtual) stage, and what it takes."""

    blocks: tuple[int, ...]
    estimate: StepEstimate


@dataclass(frozen=True)
class DegreeAnswer:
    """The fastest plans, the best first; `bound_seconds`: no division of the layers that fits takes less
    under any of the `combinations` with 1F1B, and none of the two that are searched under those with
    interleaved 1F1B. `limit_bytes`: what a device's ledger may add up to."""

    shape: TransformerShape
    devices: int
    options: DegreeOptions
    costs: RankCosts
    plans: tuple[DegreePlan, ...]
    bound_seconds: float
    combinations: int
    limit_bytes: float

    @property
    def gap(self) -> float:
        """The best plan's step over the bound, less 1."""
        return self.plans[0].estimate.step_seconds / self.bound_seconds - 1

    @cached_property
    def kernels(self) -> list[Product]:
        """The different products of the best plan."""
        best = self.plans[0]
        layers = LayerTable(self.shape, best.degrees, best.setting, self.costs)
        return products((*layers.blocks.values(), layers.embedding, layers.head))

    @property
    def assumed_kernels(self) -> list[Product]:
        """Those of which no table has the shape."""
        table = self.costs.table
        return [kernel for kernel in self.kernels if table is None or not table.has(kernel)]


def search_degrees(
    shape: TransformerShape,
    devices: int,
    costs: RankCosts,
    options: DegreeOptions,
    memory_bytes: float,
) -> DegreeAnswer:
    """Tries all combinations. Raises UsageError where none is possible, InfeasibleError where none fits."""
    combinations = list(list_combinations(shape, devices, options))
    if not combinations:
        raise nothing_possible(shape, devices, options)
    tables = [(layers, one) for one, layers in _layer_tables(shape, combinations, costs)]
    quick = [lower_bound(layers, layers.least_slowest_seconds()) for layers, _ in tables]
    plans = _BestPlans(memory_bytes)
    for number in sorted(range(len(tables)), key=quick.__getitem__):
        layers, one = tables[number]
        if quick[number] >= plans.worst:
            break
        if layers.least_bytes() > memory_bytes:
            plans.least = min(plans.least, layers.least_bytes())
        elif one.virtual_stages == 1:
            plans.try_divisions(layers, one)
        else:
            plans.try_interleaved(layers, one)
    if not plans.best:
        raise _nothing_fits(shape, devices, len(combinations), plans.least, memory_bytes)
    return DegreeAnswer(
        shape, devices, options, costs, plans.plans, plans.bound, len(combinations), memory_bytes
    )


def _layer_tables(
    shape: TransformerShape, combinations: Sequence[Combination], costs: RankCosts
) -> Iterator[tuple[Combination, LayerTable]]:
    """Virtual stages change no layer."""
    same: dict[tuple[ParallelDegrees, TrainingSetting], LayerTable] = {}
    for one in combinations:
        key = one.degrees, replace(one.setting, virtual_stages=1)
        if key not in same:
            same[key] = LayerTable(shape, *key, costs)
        own = same[key]
        yield one, own if one.virtual_stages == 1 else own.with_virtual_stages(one.virtual_stages)


class _BestPlans:
    """The best plan of each degrees with a micro-batch size, the `bound` of all that was tried, and the
    `least` bytes that did not fit."""

    def __init__(self, memory_bytes: float) -> None:
        self.memory_bytes = memory_bytes
        self.best: dict[tuple[ParallelDegrees, Tokens], DegreePlan] = {}
        self.bound = self.least = self.worst = float("inf")

    @property
    def plans(self) -> tuple[DegreePlan, ...]:
        """The best first."""
        return tuple(heapq.nsmallest(MOST_PLANS, self.best.values(), key=_step_seconds))

    def try_divisions(self, layers: LayerTable, one: Combination) -> None:
        """All divisions, under 1F1B: the bound of all, and the best of three."""
        slowest, divided = slowest_stage(layers, self.memory_bytes)
        if divided is None:
            self.least = min(self.least, layers.peak_bytes(even_blocks(layers.shape.blocks, layers.slots)))
            return
        lower = lower_bound(layers, slowest)
        self.bound = min(self.bound, lower)
        if lower < self._useful(one):
            self._keep(_best_division(layers, divided, one, self.memory_bytes))

    def try_interleaved(self, layers: LayerTable, one: Combination) -> None:
        """The two divisions of virtual stages; of each its bound, or what it takes."""
        for counts in interleaved_divisions(layers):
            lower = interleaved_bound(layers, counts)
            if lower >= self.bound and lower >= self._useful(one):
                continue
            if (peak := layers.peak_bytes(counts)) > self.memory_bytes:
                self.least = min(self.least, peak)
                continue
            if lower < self._useful(one):
                plan = DegreePlan(one.degrees, one.setting, counts, estimate_stages(layers, counts))
                lower = _step_seconds(plan)
                self._keep(plan)
            self.bound = min(self.bound, lower)

    def _useful(self, one: Combination) -> float:
        """Seconds from which on a plan is of no use."""
        own = self.best.get((one.degrees, one.setting.tokens))
        return self.worst if own is None else min(self.worst, _step_seconds(own))

    def _keep(self, plan: DegreePlan) -> None:
        if _step_seconds(plan) < self._useful(plan):
            self.best[plan.degrees, plan.setting.tokens] = plan
            if len(self.best) >= MOST_PLANS:
                self.worst = _step_seconds(self.plans[-1])


def _step_seconds(plan: DegreePlan) -> float:
    return plan.estimate.step_seconds


def _best_division(
    layers: LayerTable, divided: Sequence[int], one: Combination, memory_bytes: float
) -> DegreePlan:
    """Under 1F1B the fastest of three that fits: even blocks, even seconds, and the least slowest stage,
    which does."""
    even = even_blocks(layers.shape.blocks, one.degrees.pipeline)
    choices = dict.fromkeys((tuple(even), tuple(divided), tuple(divide_by_seconds(layers))))
    trials = [(counts, estimate_stages(layers, counts)) for counts in choices]
    fitting = [each for each in trials if each[1].peak_bytes <= memory_bytes]
    counts, estimate = min(fitting, key=lambda each: each[1].step_seconds)
    return DegreePlan(one.degrees, one.setting, counts, estimate)


def _nothing_fits(
    shape: TransformerShape, devices: int, combinations: int, least: float, memory_bytes: float
) -> InfeasibleError:
    return InfeasibleError(
        f"{shape.name}: none of {combinations} combinations fits: the least needs {least / 2**30:.1f} GiB "
        f"on a device, which has {memory_bytes / 2**30:.1f} GiB",
        f"Use more than {devices} devices, a shorter sequence, or allow more degrees.",
    )
