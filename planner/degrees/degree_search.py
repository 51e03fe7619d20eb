"""The degrees of parallelism, division of the layers and micro-batch size with the shortest step.

All combinations that are allowed are tried, but for those whose bound exceeds the best. Of each the blocks
are divided over the stages evenly by number, and, under 1F1B, as the least bound of all divisions within the
memory has it; of the best, blocks then move from stage to stage. Another division may be
faster: the bound says by how much at most (division_bound.py and stage_divisions.py argue it).
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ...cost_models.transformer.kernel_table import Product
from ...cost_models.transformer.layer_table import LayerTable
from ...cost_models.transformer.layer_work import Tokens
from ...cost_models.transformer.parallel_degrees import ParallelDegrees
from ...cost_models.transformer.rank_costs import RankCosts, products
from ...cost_models.transformer.training_setting import TrainingSetting
from ...cost_models.transformer.training_step import StepEstimate, estimate_stages
from ...cost_models.transformer.transformer_shape import TransformerShape
from ..plan_degrees import SAME
from .degree_combinations import (
    Combination,
    list_combinations,
    most_recompute_blocks,
)
from .degree_options import DegreeOptions
from .degree_refusals import nothing_fits, nothing_possible
from .division_bound import least_division
from .division_search import DivisionSearch
from .interleaved_bound import interleaved_bound, least_interleaved
from .stage_degree_search import StageAnswer
from .stage_divisions import (
    even_division,
    fit_division,
    improve_division,
    lower_bound,
)

MOST_PLANS = 10
"""Degrees and micro-batch sizes that an answer lists."""

MOST_FITTED = 8
"""Interleaved pipelines of which blocks are moved until they fit."""
MOST_WORK = 300_000
"""Of the search of divisions of interleaved pipelines, as `DivisionSearch.work` counts it."""


@dataclass(frozen=True)
class DegreePlan(Combination):
    """One way to train: a combination with the blocks of each (virtual) stage, and what it takes."""

    blocks: tuple[int, ...]
    estimate: StepEstimate
    layers: LayerTable = field(repr=False, compare=False)


@dataclass(frozen=True)
class DegreeBaseline:
    """What a rule of this name plans; without a plan the `reason`."""

    name: str
    plan: DegreePlan | None
    reason: str = ""


@dataclass(frozen=True)
class DegreeAnswer:
    """The fastest plans, the best first; `bound_seconds`: no division of the layers that fits takes less
    under any of the `combinations`. `limit_bytes`: what a device's ledger may add up to."""

    shape: TransformerShape
    devices: int
    options: DegreeOptions
    costs: RankCosts
    plans: tuple[DegreePlan, ...]
    bound_seconds: float
    combinations: int
    limit_bytes: float
    baselines: tuple[DegreeBaseline, ...] = ()
    by_stage: StageAnswer | None = None
    """With degrees by stage, where the options ask for it."""

    def with_baselines(self, baselines: tuple[DegreeBaseline, ...]) -> DegreeAnswer:
        """The same, compared with these."""
        return replace(self, baselines=baselines)

    @property
    def gap(self) -> float:
        """The best plan's step over the bound, less 1."""
        return self.plans[0].estimate.step_seconds / self.bound_seconds - 1

    @cached_property
    def kernels(self) -> list[Product]:
        """The different products of the best plan."""
        best = self.plans[0]
        layers = LayerTable(self.shape, best.degrees, best.setting, self.costs)
        predictors = [layers.predictor] if best.setting.predictors else []
        return products((*layers.blocks.values(), layers.embedding, layers.head, *predictors))

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
    candidate: DegreePlan | None = None,
) -> DegreeAnswer:
    """Tries all combinations, and a `candidate` plan that fits. Raises UsageError where none is possible,
    InfeasibleError where none fits."""
    combinations = list(list_combinations(shape, devices, options))
    if not combinations and candidate is None:
        raise nothing_possible(shape, devices, options)
    plans = _BestPlans(memory_bytes, candidate)
    ahead = [
        (lower_bound(layers), number, layers, one)
        for number, (one, layers) in enumerate(_layer_tables(shape, combinations, costs))
    ]
    heapq.heapify(ahead)
    while ahead and ahead[0][0] < plans.worst:
        _, number, layers, one = heapq.heappop(ahead)
        plans.try_combination(layers, one)
        following = _more_again(shape, layers, one)
        if following is not None:
            heapq.heappush(ahead, (lower_bound(following[0]), number, *following))
    count = sum(
        1 if one.recompute_blocks is None else most_recompute_blocks(shape, one) for one in combinations
    )
    plans.fit()
    if not plans.best:
        raise nothing_fits(shape, devices, count, plans.attempts, memory_bytes)
    plans.improve()
    plans.search_divisions()
    bound = min(plans.bound, _step_seconds(plans.plans[0]))
    return DegreeAnswer(shape, devices, options, costs, plans.plans, bound, count, memory_bytes)


def _more_again(
    shape: TransformerShape, layers: LayerTable, one: Combination
) -> tuple[LayerTable, Combination] | None:
    """Return the same with one more recomputed block per stage; None if no stage has as many."""
    if one.recompute_blocks is None or one.recompute_blocks == most_recompute_blocks(shape, one):
        return None
    setting = replace(one.setting, recompute_blocks=one.recompute_blocks + 1)
    return layers.with_setting(setting), Combination(one.degrees, setting)


def _layer_tables(
    shape: TransformerShape, combinations: Sequence[Combination], costs: RankCosts
) -> Iterator[tuple[Combination, LayerTable]]:
    """Virtual stages, and numbers of blocks that run again, change no layer."""
    same: dict[tuple[ParallelDegrees, TrainingSetting], LayerTable] = {}
    for one in combinations:
        key = one.degrees, replace(one.setting, virtual_stages=1, recompute_blocks=None)
        if key not in same:
            same[key] = LayerTable(shape, *key, costs)
        yield one, same[key].with_setting(one.setting)


class _BestPlans:
    """The best plan of each degrees with a micro-batch size, the `bound` of all that was tried, and the
    `attempts` before the first that fitted. Of 1F1B and of interleaved pipelines each, until blocks were
    moved: it gains more in these."""

    def __init__(self, memory_bytes: float, candidate: DegreePlan | None = None) -> None:
        self.memory_bytes = memory_bytes
        self.best: dict[tuple[ParallelDegrees, Tokens, bool], DegreePlan] = {}
        if candidate is not None:
            self.best[_pool(candidate)] = candidate
        self.worst = self._bound = float("inf")
        self.attempts: list[tuple[LayerTable, Combination]] = []
        self._unfit: list[tuple[float, int, LayerTable, Combination]] = []
        self._interleaved: list[tuple[float, int, LayerTable, Combination]] = []

    @property
    def bound(self) -> float:
        """Seconds that nothing that was tried takes less than."""
        return min([self._bound, *(own[0] for own in self._interleaved)])

    @property
    def plans(self) -> tuple[DegreePlan, ...]:
        """The best first."""
        fastest: dict[tuple[ParallelDegrees, Tokens], DegreePlan] = {}
        for plan in sorted(self.best.values(), key=_step_seconds):
            fastest.setdefault((plan.degrees, plan.setting.tokens), plan)
        return tuple(fastest.values())[:MOST_PLANS]

    def try_combination(self, layers: LayerTable, one: Combination) -> None:
        """All divisions of its layers: the bound of all, and the best of a few."""
        if not self.best:
            self.attempts.append((layers, one))
        if layers.least_bytes() > self.memory_bytes:
            return
        if one.virtual_stages == 1:
            self._try_divisions(layers, one)
        else:
            self._try_interleaved(layers, one)

    def _try_divisions(self, layers: LayerTable, one: Combination) -> None:
        quick = lower_bound(layers)
        if quick >= self.useful(one):
            self._bound = min(self._bound, quick)
            return
        lower, divided = least_division(layers, self.memory_bytes, self.useful(one))
        if divided is None:
            return
        self._bound = min(self._bound, max(lower, quick))
        if lower < self.useful(one):
            self._keep(_best_division(layers, divided, one, self.memory_bytes))

    def _try_interleaved(self, layers: LayerTable, one: Combination) -> None:
        lower = lower_bound(layers)
        if lower < self.useful(one):
            lower = max(lower, least_interleaved(layers, self.memory_bytes))
        self._interleaved.append((lower, len(self._interleaved), layers, one))
        if lower >= self.useful(one):
            return
        counts = even_division(layers)
        if interleaved_bound(layers, counts) >= self.useful(one):
            return
        if layers.peak_bytes(counts) <= self.memory_bytes:
            self._keep(_plan(layers, one, counts))
        elif one.recompute_blocks is None:
            self._unfit.append((lower, len(self._unfit), layers, one))

    def fit(self) -> None:
        """Of interleaved pipelines of which no division fitted, those of the least bounds, with blocks moved
        until one fits."""
        for lower, _, layers, one in sorted(self._unfit)[:MOST_FITTED]:
            if lower >= self.useful(one):
                continue
            own = fit_division(layers, even_division(layers), self.memory_bytes)
            if own is not None and interleaved_bound(layers, own) < self.useful(one):
                counts, estimate = improve_division(layers, own, self.memory_bytes)
                self._keep(DegreePlan(one.degrees, one.setting, counts, estimate, layers))

    def improve(self) -> None:
        """Of each plan: blocks move from one stage to another while that makes the step shorter."""
        keys = {(plan.degrees, plan.setting.tokens) for plan in self.plans}
        for key, plan in self.best.items():
            if key[:2] in keys:
                counts, estimate = improve_division(plan.layers, plan.blocks, self.memory_bytes)
                self.best[key] = replace(plan, blocks=counts, estimate=estimate)

    def search_divisions(self) -> None:
        """Of the interleaved pipelines that may be faster than the best plan all divisions, a part of them at
        a time, those of the pipeline with the least bound first."""
        self._bound_any_again()
        heapq.heapify(self._interleaved)
        searches: dict[int, DivisionSearch] = {}
        work = 0
        while self._interleaved and work < MOST_WORK:
            lower, number, layers, one = self._interleaved[0]
            best = _step_seconds(self.plans[0])
            if lower >= min(best * (1 - SAME), self._bound):
                break
            if number not in searches:
                searches[number] = DivisionSearch(layers, self.memory_bytes)
            search = searches[number]
            before = search.work
            search.advance(best * (1 - SAME))
            work += search.work - before
            heapq.heapreplace(self._interleaved, (max(lower, search.bound_seconds), number, layers, one))
            if search.best is not None:
                self._keep(DegreePlan(one.degrees, one.setting, *search.best, layers))

    def _bound_any_again(self) -> None:
        """Raise the bounds of interleaved pipelines that differ only in how many first blocks run again to
        one that holds for every number of them."""
        best = _step_seconds(self.plans[0]) * (1 - SAME)
        alike = defaultdict[tuple[ParallelDegrees, TrainingSetting], list[int]](list)
        for place, (lower, _, _, one) in enumerate(self._interleaved):
            if lower < best and one.recompute_blocks is not None:
                alike[one.degrees, replace(one.setting, recompute_blocks=None)].append(place)
        for places in alike.values():
            layers = self._interleaved[places[0]][2]
            root = DivisionSearch(layers, self.memory_bytes, any_again=True).bound_root(best)
            for place in places:
                lower, number, own, one = self._interleaved[place]
                self._interleaved[place] = max(lower, root), number, own, one

    def useful(self, one: Combination) -> float:
        """Seconds from which on a plan is of no use."""
        own = self.best.get(_pool(one))
        return self.worst if own is None else min(self.worst, _step_seconds(own))

    def _keep(self, plan: DegreePlan) -> None:
        if _step_seconds(plan) < self.useful(plan):
            self.best[_pool(plan)] = plan
            plans = self.plans
            if len(plans) >= MOST_PLANS:
                self.worst = _step_seconds(plans[-1])


def _plan(layers: LayerTable, one: Combination, counts: tuple[int, ...]) -> DegreePlan:
    return DegreePlan(one.degrees, one.setting, counts, estimate_stages(layers, counts), layers)


def _pool(one: Combination) -> tuple[ParallelDegrees, Tokens, bool]:
    """What plans are compared within."""
    return one.degrees, one.setting.tokens, one.virtual_stages > 1


def _step_seconds(plan: DegreePlan) -> float:
    return plan.estimate.step_seconds


def _best_division(
    layers: LayerTable, divided: Sequence[int], one: Combination, memory_bytes: float
) -> DegreePlan:
    """Under 1F1B the faster of two that fits: even blocks, and that of the least bound."""
    choices = dict.fromkeys((even_division(layers), tuple(divided)))
    trials = [(counts, estimate_stages(layers, counts)) for counts in choices]
    fitting = [each for each in trials if each[1].peak_bytes <= memory_bytes]
    counts, estimate = min(fitting, key=lambda each: each[1].step_seconds)
    return DegreePlan(one.degrees, one.setting, counts, estimate, layers)
