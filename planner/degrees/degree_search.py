"""The degrees of parallelism, division of the layers and micro-batch size with the shortest step.

All combinations that are allowed are tried, but for those whose bound exceeds what was found. Of each, the
blocks are divided over the stages evenly by number, evenly by seconds, and so that the slowest stage takes as
little as can be within the memory (`slowest_stage`); the fastest is kept. Another division may be faster: the
bound says by how much at most.

**The bound** of a combination holds for every division of its blocks over the stages. With T the time of the
slowest stage of the best division, b the smallest share of a layer's seconds that is backward, p stages and m
micro-batches, the slowest stage s takes T_s >= T, of which at least b T_s is backward. Its device computes
for m T_s. Before its last backwards end, and beside the warm-up's forwards, the first micro-batch goes
through all stages and back: until the first backward of s, the forwards of all stages and the backwards of
those after s pass, in which s runs at most p forwards; then m backwards and the other m - p forwards of s
follow, and the backwards of the stages before s. So a step takes at least

    max(m T,  total + (m - 1) b T + max(m - p, 0) (1 - b) T)

with `total` the seconds of one micro-batch on all stages, and the shortest update that a device can have.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, product

from ...cost_models.errors import InfeasibleError, UsageError
from ...cost_models.transformer.block_kernels import Tokens
from ...cost_models.transformer.kernel_table import Product
from ...cost_models.transformer.parallel_degrees import ParallelDegrees
from ...cost_models.transformer.rank_costs import RankCosts, products
from ...cost_models.transformer.training_step import (
    LayerTable,
    Recomputation,
    StepEstimate,
    TrainingSetting,
    estimate_stages,
    even_blocks,
)
from ...cost_models.transformer.transformer_shape import TransformerShape
from .degree_options import DegreeOptions

MOST_PLANS = 10
"""Combinations that an answer lists."""
_HALVINGS = 24


@dataclass(frozen=True)
class Combination:
    """Degrees with the micro-batches and recomputation."""

    degrees: ParallelDegrees
    setting: TrainingSetting

    @property
    def micro_batch_size(self) -> int:
        """Sequences."""
        return self.setting.tokens.samples

    @property
    def micro_batches(self) -> int:
        """Of one replica."""
        return self.setting.micro_batches

    @property
    def recompute(self) -> Recomputation:
        """Of every block."""
        return self.setting.recompute


@dataclass(frozen=True)
class DegreePlan(Combination):
    """One way to train: a combination with the blocks of each stage, and what it takes."""

    blocks: tuple[int, ...]
    estimate: StepEstimate


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
        raise _nothing_possible(shape, devices, options)
    tables = [(LayerTable(shape, one.degrees, one.setting, costs), one) for one in combinations]
    quick = [lower_bound(layers, layers.least_slowest_seconds()) for layers, _ in tables]
    best: list[tuple[float, int, DegreePlan]] = []
    bound = least = float("inf")
    for number in sorted(range(len(tables)), key=quick.__getitem__):
        layers, one = tables[number]
        if len(best) == MOST_PLANS and quick[number] >= -best[0][0]:
            break
        if layers.least_bytes() > memory_bytes:
            least = min(least, layers.least_bytes())
            continue
        slowest, divided = slowest_stage(layers, memory_bytes)
        if divided is None:
            least = min(least, layers.peak_bytes(even_blocks(shape.blocks, one.degrees.pipeline)))
            continue
        lower = lower_bound(layers, slowest)
        bound = min(bound, lower)
        if len(best) == MOST_PLANS and lower >= -best[0][0]:
            continue
        plan = _best_division(layers, divided, one, memory_bytes)
        entry = (-plan.estimate.step_seconds, -number, plan)
        (heapq.heappush if len(best) < MOST_PLANS else heapq.heappushpop)(best, entry)
    if not best:
        raise _nothing_fits(shape, devices, len(combinations), least, memory_bytes)
    plans = tuple(plan for _, _, plan in sorted(best, reverse=True))
    return DegreeAnswer(shape, devices, options, costs, plans, bound, len(combinations), memory_bytes)


def list_combinations(shape: TransformerShape, devices: int, options: DegreeOptions) -> Iterator[Combination]:
    """All that the options allow and that divide the model, the devices and the batch."""
    divisors = [number for number in range(1, devices + 1) if devices % number == 0]
    tensors, contexts = options.tp or divisors, options.cp or (1,)
    recomputes: tuple[Recomputation, ...] = ("none", "full")
    modes = [each for each in recomputes if options.recompute in ("auto", each)]
    for tensor, context, stages in product(tensors, contexts, options.pp or divisors):
        if devices % (tensor * context * stages):
            continue
        data = devices // (tensor * context * stages)
        if options.batch_size % data:
            continue
        for expert in _expert_degrees(shape, tensor * context * data, options):
            degrees = ParallelDegrees(tensor, context, expert, stages, data, options.zero)
            if degrees.problem_with(shape, options.sequence):
                continue
            for size in _micro_batch_sizes(options, options.batch_size // data):
                tokens = Tokens(options.sequence, size)
                for recompute in modes:
                    count = options.batch_size // data // size
                    yield Combination(degrees, TrainingSetting(count, tokens, recompute))


def _expert_degrees(shape: TransformerShape, group: int, options: DegreeOptions) -> list[int]:
    allowed = options.ep or range(1, group + 1)
    if shape.experts is None:
        return [1] if 1 in allowed else []
    return [degree for degree in allowed if group % degree == 0 and shape.experts.number % degree == 0]


def _micro_batch_sizes(options: DegreeOptions, per_replica: int) -> list[int]:
    powers = [2**exponent for exponent in range(per_replica.bit_length())]
    return [
        size for size in options.micro_batch_size or powers if size <= per_replica and per_replica % size == 0
    ]


def slowest_stage(layers: LayerTable, memory_bytes: float) -> tuple[float, list[int] | None]:
    """The least seconds of a micro-batch that the slowest stage can take within the memory, and a division
    with them; (inf, None) where none fits.

    A stage of fewer blocks takes no longer and needs no more, so for given seconds and memory as many blocks
    as fit, stage after stage, is a division wherever there is one; the least seconds are found by bisection.
    """
    ranges = _longest(layers, float("inf"), memory_bytes)
    if ranges is None:
        return float("inf"), None

    def slowest(ranges: list[range]) -> float:
        return max(layers.seconds(own, stage).both for stage, own in enumerate(ranges))

    high = slowest(ranges)
    low = min(layers.least_slowest_seconds(), high)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        trial = _longest(layers, middle, memory_bytes)
        if trial is None:
            low = middle
        else:
            ranges = trial
            high = slowest(ranges)
    return low, [len(own) for own in ranges]


def _longest(layers: LayerTable, seconds: float, memory_bytes: float) -> list[range] | None:
    """Stages of at most so many seconds that fit, at least one block each; None where there are none.

    Stage after stage takes as many blocks as it can. Where a block without experts fits into an early stage
    and one with experts does not, as many can be too many: then every number is tried."""
    stages, blocks = layers.degrees.pipeline, layers.shape.blocks

    def end_of(stage: int, start: int) -> int:
        """Of the longest stage from `start`; `start` itself where not one block fits."""
        low, high = start, blocks - (stages - 1 - stage)
        while low < high:
            middle = (low + high + 1) // 2
            own = range(start, middle)
            fits = (
                layers.seconds(own, stage).both <= seconds and layers.stage_bytes(own, stage) <= memory_bytes
            )
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    starts = [0]
    for stage in range(stages):
        starts.append(end_of(stage, starts[-1]))
    if starts[-1] == blocks and all(a < b for a, b in pairwise(starts)):
        return [range(a, b) for a, b in pairwise(starts)]
    return _any_division(stages, blocks, end_of) if len(set(layers.shape.routed)) > 1 else None


def _any_division(stages: int, blocks: int, end_of: Callable[[int, int], int]) -> list[range] | None:
    """By all places where a stage can end: from each start all up to the farthest."""
    came_from: list[dict[int, int]] = [{0: 0}]
    for stage in range(stages):
        ends: dict[int, int] = {}
        for start in came_from[-1]:
            for end in range(start + 1, end_of(stage, start) + 1):
                ends.setdefault(end, start)
        came_from.append(ends)
    if blocks not in came_from[-1]:
        return None
    ranges, end = [], blocks
    for ends in reversed(came_from[1:]):
        ranges.append(range(ends[end], end))
        end = ends[end]
    return ranges[::-1]


def lower_bound(layers: LayerTable, slowest: float) -> float:
    """Seconds that no step takes less than, whatever the division; see the top of this file."""
    stages, count = layers.degrees.pipeline, layers.setting.micro_batches
    whole = layers.whole_seconds()
    share = layers.least_backward_share()
    ordered = whole + (count - 1) * share * slowest + max(count - stages, 0) * (1 - share) * slowest
    return max(count * slowest, ordered) + layers.least_update_seconds()


def _best_division(
    layers: LayerTable, divided: Sequence[int], one: Combination, memory_bytes: float
) -> DegreePlan:
    """The fastest of three that fits: even blocks, even seconds, and the least slowest stage, which does."""
    even = even_blocks(layers.shape.blocks, one.degrees.pipeline)
    choices = dict.fromkeys((tuple(even), tuple(divided), tuple(_by_seconds(layers))))
    trials = [(counts, estimate_stages(layers, counts)) for counts in choices]
    fitting = [each for each in trials if each[1].peak_bytes <= memory_bytes]
    counts, estimate = min(fitting, key=lambda each: each[1].step_seconds)
    return DegreePlan(one.degrees, one.setting, counts, estimate)


def _by_seconds(layers: LayerTable) -> list[int]:
    """Each stage ends where the seconds before come nearest to its share of the whole; at least a block
    each."""
    stages, blocks = layers.degrees.pipeline, layers.shape.blocks
    before = [layers.seconds(range(end), 0).both for end in range(blocks + 1)]
    share = layers.whole_seconds() / stages
    ends = [0]
    for stage in range(1, stages):
        allowed = range(ends[-1] + 1, blocks - (stages - stage) + 1)
        ends.append(min(allowed, key=lambda end: abs(before[end] - stage * share)))
    return [b - a for a, b in pairwise([*ends, blocks])]


def _nothing_possible(shape: TransformerShape, devices: int, options: DegreeOptions) -> UsageError:
    free = replace(options, tp=None, pp=None, cp=None, ep=None, micro_batch_size=None)
    if next(list_combinations(shape, devices, free), None) is not None:
        allowed = ", ".join(
            f"{name}={','.join(map(str, value))}"
            for name in ("tp", "pp", "cp", "ep", "micro_batch_size")
            if (value := getattr(options, name))
        )
        return UsageError(
            f"{allowed}: no such degrees divide {devices} devices, the batch of {options.batch_size} "
            "and the model",
            "Allow more of them.",
        )
    degrees = ParallelDegrees(pipeline=1, data=devices)
    why = (
        degrees.problem_with(shape, options.sequence) or f"the batch of {options.batch_size} does not divide"
    )
    return UsageError(
        f"no degrees divide {devices} devices, {shape.blocks} layers and a batch of "
        f"{options.batch_size}: {why}",
        "Give another number of devices, or another batch.",
    )


def _nothing_fits(
    shape: TransformerShape, devices: int, combinations: int, least: float, memory_bytes: float
) -> InfeasibleError:
    return InfeasibleError(
        f"{shape.name}: none of {combinations} combinations fits: the least needs {least / 2**30:.1f} GiB "
        f"on a device, which has {memory_bytes / 2**30:.1f} GiB",
        f"Use more than {devices} devices, a shorter sequence, or allow more degrees.",
    )
