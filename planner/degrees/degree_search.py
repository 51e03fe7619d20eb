"""Search for degrees of parallelism, division of the layers and micro-batch size with the shortest step.

All allowed combinations are tried, except those whose bound exceeds the best plan. For each, the blocks are
divided evenly over the stages and, under 1F1B, also as the division with the least bound within the memory.
In the best plans, blocks then move from stage to stage. Another division may be faster; the bound says by how
much at most (see division_bound.py and stage_divisions.py).
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
"""Most degrees and micro-batch sizes that an answer lists."""

MOST_FITTED = 8
"""Most interleaved pipelines in which blocks are moved until they fit."""
MOST_WORK = 300_000
"""Most work of the search of divisions of interleaved pipelines, in units of `DivisionSearch.work`."""


@dataclass(frozen=True)
class DegreePlan(Combination):
    """A combination with the blocks of each (virtual) stage, and its estimated step and memory."""

    blocks: tuple[int, ...]
    estimate: StepEstimate
    layers: LayerTable = field(repr=False, compare=False)


@dataclass(frozen=True)
class DegreeBaseline:
    """Plan of a baseline rule, or the `reason` why none exists."""

    name: str
    plan: DegreePlan | None
    reason: str = ""


@dataclass(frozen=True)
class DegreeAnswer:
    """Fastest plans by degrees, best first.

    Attributes:
        shape: The transformer.
        devices: Number of devices.
        options: The options.
        costs: Costs of kernels and communication.
        plans: The plans.
        bound_seconds: Lower bound on every division of the layers that fits under any of the combinations.
        combinations: Number of combinations.
        limit_bytes: Bytes that the ledger of a device may add up to.
        baselines: Plans of rules of thumb.
    """

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
    """Answer with degrees by stage, if the options ask for it."""

    def with_baselines(self, baselines: tuple[DegreeBaseline, ...]) -> DegreeAnswer:
        """Return the answer with baselines."""
        return replace(self, baselines=baselines)

    @property
    def gap(self) -> float:
        """Step of the best plan over the bound, minus 1."""
        return self.plans[0].estimate.step_seconds / self.bound_seconds - 1

    @cached_property
    def kernels(self) -> list[Product]:
        """Distinct matrix products of the best plan."""
        best = self.plans[0]
        layers = LayerTable(self.shape, best.degrees, best.setting, self.costs)
        predictors = [layers.predictor] if best.setting.predictors else []
        return products((*layers.blocks.values(), layers.embedding, layers.head, *predictors))

    @property
    def assumed_kernels(self) -> list[Product]:
        """Products whose shape is not in the table of measured kernels."""
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
    """Search all combinations.

    Args:
        shape: The transformer.
        devices: Number of devices.
        costs: Costs of kernels and communication.
        options: Allowed degrees, and the training setting.
        memory_bytes: Bytes that a device may use.
        candidate: A plan that fits, to compare with.

    Returns:
        The answer, with a bound on all combinations.

    Raises:
        UsageError: No combination is possible.
        InfeasibleError: No combination fits.
    """
    combinations = list(list_combinations(shape, devices, options))
    if not combinations and candidate is None:
        raise nothing_possible(shape, devices, options)
    plans = _BestPlans(memory_bytes, candidate)
    ahead = [
        (lower_bound(layers), number, layers, combination)
        for number, (combination, layers) in enumerate(_layer_tables(shape, combinations, costs))
    ]
    heapq.heapify(ahead)
    while ahead and ahead[0][0] < plans.worst:
        _, number, layers, combination = heapq.heappop(ahead)
        plans.try_combination(layers, combination)
        following = _more_again(shape, layers, combination)
        if following is not None:
            heapq.heappush(ahead, (lower_bound(following[0]), number, *following))
    count = sum(
        1 if combination.recompute_blocks is None else most_recompute_blocks(shape, combination)
        for combination in combinations
    )
    plans.fit()
    if not plans.best:
        raise nothing_fits(shape, devices, count, plans.attempts, memory_bytes)
    plans.improve()
    plans.search_divisions()
    bound = min(plans.bound, _step_seconds(plans.plans[0]))
    return DegreeAnswer(shape, devices, options, costs, plans.plans, bound, count, memory_bytes)


def _more_again(
    shape: TransformerShape, layers: LayerTable, combination: Combination
) -> tuple[LayerTable, Combination] | None:
    """Return the combination with one more recomputed block per stage; None if no stage has as many."""
    if combination.recompute_blocks is None or combination.recompute_blocks == most_recompute_blocks(
        shape, combination
    ):
        return None
    setting = replace(combination.setting, recompute_blocks=combination.recompute_blocks + 1)
    return layers.with_setting(setting), Combination(combination.degrees, setting)


def _layer_tables(
    shape: TransformerShape, combinations: Sequence[Combination], costs: RankCosts
) -> Iterator[tuple[Combination, LayerTable]]:
    """Yield the layer costs of all combinations.

    Virtual stages and numbers of recomputed blocks change no layer, so combinations share tables.
    """
    same: dict[tuple[ParallelDegrees, TrainingSetting], LayerTable] = {}
    for combination in combinations:
        key = combination.degrees, replace(combination.setting, virtual_stages=1, recompute_blocks=None)
        if key not in same:
            same[key] = LayerTable(shape, *key, costs)
        yield combination, same[key].with_setting(combination.setting)


class _BestPlans:
    """Best plan of each set of degrees and micro-batch size, and the `bound` on all that was tried.

    `attempts` are the combinations tried before the first one that fitted. 1F1B and interleaved pipelines
    have separate best plans until blocks were moved, because moving gains more in interleaved ones.
    """

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
        """Lower bound in seconds on everything that was tried."""
        return min([self._bound, *(pipeline[0] for pipeline in self._interleaved)])

    @property
    def plans(self) -> tuple[DegreePlan, ...]:
        """Best plans, fastest first."""
        fastest: dict[tuple[ParallelDegrees, Tokens], DegreePlan] = {}
        for plan in sorted(self.best.values(), key=_step_seconds):
            fastest.setdefault((plan.degrees, plan.setting.tokens), plan)
        return tuple(fastest.values())[:MOST_PLANS]

    def try_combination(self, layers: LayerTable, combination: Combination) -> None:
        """Try a combination: bound all divisions of its layers, and keep the best of a few."""
        if not self.best:
            self.attempts.append((layers, combination))
        if layers.least_bytes() > self.memory_bytes:
            return
        if combination.virtual_stages == 1:
            self._try_divisions(layers, combination)
        else:
            self._try_interleaved(layers, combination)

    def _try_divisions(self, layers: LayerTable, combination: Combination) -> None:
        quick = lower_bound(layers)
        if quick >= self.useful(combination):
            self._bound = min(self._bound, quick)
            return
        lower, divided = least_division(layers, self.memory_bytes, self.useful(combination))
        if divided is None:
            return
        self._bound = min(self._bound, max(lower, quick))
        if lower < self.useful(combination):
            self._keep(_best_division(layers, divided, combination, self.memory_bytes))

    def _try_interleaved(self, layers: LayerTable, combination: Combination) -> None:
        lower = lower_bound(layers)
        if lower < self.useful(combination):
            lower = max(lower, least_interleaved(layers, self.memory_bytes))
        self._interleaved.append((lower, len(self._interleaved), layers, combination))
        if lower >= self.useful(combination):
            return
        counts = even_division(layers)
        if interleaved_bound(layers, counts) >= self.useful(combination):
            return
        if layers.peak_bytes(counts) <= self.memory_bytes:
            self._keep(_plan(layers, combination, counts))
        elif combination.recompute_blocks is None:
            self._unfit.append((lower, len(self._unfit), layers, combination))

    def fit(self) -> None:
        """Move blocks of interleaved pipelines until one fits, if no division of any fitted.

        Those with the least bounds come first.
        """
        for lower, _, layers, combination in sorted(self._unfit)[:MOST_FITTED]:
            if lower >= self.useful(combination):
                continue
            fitting = fit_division(layers, even_division(layers), self.memory_bytes)
            if fitting is not None and interleaved_bound(layers, fitting) < self.useful(combination):
                counts, estimate = improve_division(layers, fitting, self.memory_bytes)
                self._keep(DegreePlan(combination.degrees, combination.setting, counts, estimate, layers))

    def improve(self) -> None:
        """Move blocks of each plan from stage to stage while that makes the step shorter."""
        keys = {(plan.degrees, plan.setting.tokens) for plan in self.plans}
        for key, plan in self.best.items():
            if key[:2] in keys:
                counts, estimate = improve_division(plan.layers, plan.blocks, self.memory_bytes)
                self.best[key] = replace(plan, blocks=counts, estimate=estimate)

    def search_divisions(self) -> None:
        """Search all divisions of the interleaved pipelines that may be faster than the best plan.

        A part of the divisions is searched at a time, of the pipeline with the least bound first.
        """
        self._bound_any_again()
        heapq.heapify(self._interleaved)
        searches: dict[int, DivisionSearch] = {}
        work = 0
        while self._interleaved and work < MOST_WORK:
            lower, number, layers, combination = self._interleaved[0]
            best = _step_seconds(self.plans[0])
            if lower >= min(best * (1 - SAME), self._bound):
                break
            if number not in searches:
                searches[number] = DivisionSearch(layers, self.memory_bytes)
            search = searches[number]
            work_before = search.work
            search.advance(best * (1 - SAME))
            work += search.work - work_before
            heapq.heapreplace(
                self._interleaved, (max(lower, search.bound_seconds), number, layers, combination)
            )
            if search.best is not None:
                self._keep(DegreePlan(combination.degrees, combination.setting, *search.best, layers))

    def _bound_any_again(self) -> None:
        """Raise the bounds of interleaved pipelines that differ only in recomputed first blocks.

        The new bound holds for every number of them.
        """
        best = _step_seconds(self.plans[0]) * (1 - SAME)
        alike = defaultdict[tuple[ParallelDegrees, TrainingSetting], list[int]](list)
        for place, (lower, _, _, combination) in enumerate(self._interleaved):
            if lower < best and combination.recompute_blocks is not None:
                alike[combination.degrees, replace(combination.setting, recompute_blocks=None)].append(place)
        for places in alike.values():
            layers = self._interleaved[places[0]][2]
            root = DivisionSearch(layers, self.memory_bytes, any_again=True).bound_root(best)
            for place in places:
                lower, number, table, combination = self._interleaved[place]
                self._interleaved[place] = max(lower, root), number, table, combination

    def useful(self, combination: Combination) -> float:
        """Return the seconds from which on a plan is not worth keeping."""
        best = self.best.get(_pool(combination))
        return self.worst if best is None else min(self.worst, _step_seconds(best))

    def _keep(self, plan: DegreePlan) -> None:
        if _step_seconds(plan) < self.useful(plan):
            self.best[_pool(plan)] = plan
            plans = self.plans
            if len(plans) >= MOST_PLANS:
                self.worst = _step_seconds(plans[-1])


def _plan(layers: LayerTable, combination: Combination, counts: tuple[int, ...]) -> DegreePlan:
    return DegreePlan(
        combination.degrees, combination.setting, counts, estimate_stages(layers, counts), layers
    )


def _pool(combination: Combination) -> tuple[ParallelDegrees, Tokens, bool]:
    """Return a key of the combinations among which the best plan is kept."""
    return combination.degrees, combination.setting.tokens, combination.virtual_stages > 1


def _step_seconds(plan: DegreePlan) -> float:
    return plan.estimate.step_seconds


def _best_division(
    layers: LayerTable, divided: Sequence[int], combination: Combination, memory_bytes: float
) -> DegreePlan:
    """Return the faster of two 1F1B divisions that fit: even blocks, and the one with the least bound."""
    choices = dict.fromkeys((even_division(layers), tuple(divided)))
    trials = [(counts, estimate_stages(layers, counts)) for counts in choices]
    fitting = [trial for trial in trials if trial[1].peak_bytes <= memory_bytes]
    counts, estimate = min(fitting, key=lambda trial: trial[1].step_seconds)
    return DegreePlan(combination.degrees, combination.setting, counts, estimate, layers)
