"""PipeDream-2BW, BaPipe and Galvatron: pipelines whose stages all have equal replicas.

PipeDream-2BW: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021, section 4.
Every width w (replicas of each stage) and depth d (stages) that make all devices, every micro-batch size,
with recomputation on all stages or on none. Stages have equal numbers of transformer blocks (of layers, if
the names show no blocks), as far as possible, with more on later stages. The estimate of a step of M
micro-batches is

    M max over stages of max(f + b + its transfers, AR / M)

and a plan must fit. Here memory is pplan's for the searched schedule: two weight versions only under
`schedule='pipedream-2bw'`.

BaPipe: Zhao et al., "BaPipe: Exploration of Balanced Pipeline Parallelism for DNN Training",
arXiv:2012.12544, section 3. Stages of as equal seconds as can be, one a device, in the order of the devices,
each with the seconds of its own device; where a transfer would take longer than an ideal stage, 1 / sum of
1 / T_n of the whole model's seconds T_n, only the cuts below that (the coarse-grained partition); stages that
do not fit are left out (the fine-tuning). The number of micro-batches is explored with the seconds of 1F1B,

    1F1B-SO    (M + N - 1) (F + B) + (N - 1) 2 SR

F, B and SR of the slowest stage and cut. Here the exact most even partition is taken where the paper fills
the stages one after another and then moves layers; 1F1B-SNO, whose transfers block, the schedules for FPGAs,
and layers that are shared among devices are left out.

Galvatron: Wang et al., "Improving Automatic Parallel Training via Balanced Memory Workload Optimization",
TKDE 2024 (Galvatron-BMW), without its choice of a parallelism for each layer. For every micro-batch size and
every depth that is a power of two and divides the devices, each stage on as many of them: the partition goes
from the one with the least memory on its fullest device, M micro-batches in flight as the schedule holds
them, towards the one with the fastest slowest stage. In turn the slowest stage gives its first layer to the
stage before it, or its last one to the stage behind. A partition is kept where the stage that took the layer
is not slower than the slowest was, and where no device is fuller than the fullest one of the partition by
time, or than it has room for. The least

    (M - 1) max over stages of (F + B) + sum over stages of (F + B) + max AR

is proposed, of all partitions on the way and the one by time. F and B are with recomputation where a stage
does not fit without. Galvatron chooses for every layer of a stage among data, sharded data and tensor
parallelism and recomputation, by a dynamic programme; here all layers of a stage are replicated, and a stage
recomputes as a whole. A layer is what lies between two allowed cuts. At most `MOST_PARTITIONS` of one shape
are looked at.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from ...cost_models.layer import Chain
from ..candidate import Proposal, replicated_pipeline
from ..stage_table import Floats
from .base import Ends, Planner, can_share, nearest_cuts, stage_counts
from .replica_groups import (
    MicroBatchChoice,
    cost_replicas,
    equal_shapes,
    even_stages,
    micro_batch_choices,
    misfit_reason,
    stage_entries,
)
from .rules import repeated_blocks

if TYPE_CHECKING:
    from ..problem import Problem
    from ..search.space import Space

MOST_PARTITIONS = 400
"""Most partitions of one shape that are tried."""


def _width_and_depth(problem: Problem) -> Iterator[Proposal]:
    """Yield the width and depth with the least estimate for each micro-batch size."""
    plans = dict[MicroBatchChoice, list[WidthDepthPlan]]()
    for choice, stages, width in equal_shapes(problem):
        plans.setdefault(choice, []).extend(width_and_depth_plans(problem.space, choice, stages, width))
    for choice, choice_plans in plans.items():
        if choice_plans:
            seconds, ends, replicas, recomputes = min(choice_plans)
            yield replicated_pipeline(choice.config(recomputes), ends, replicas, seconds)


WidthDepthPlan = tuple[float, Ends, tuple[int, ...], bool]
"""Estimated step, ends and replicas of the stages, and whether all stages recompute."""


def width_and_depth_plans(
    space: Space, choice: MicroBatchChoice, stages: int, width: int
) -> Iterator[WidthDepthPlan]:
    """Yield PipeDream-2BW's plans of this depth and width that fit, without and with recomputation."""
    cut_points, ends = list(space.table(space.chain.sizes[0]).cut_points), equal_blocks(space.chain, stages)
    places = list(pairwise([0, *(cut_points.index(end) for end in ends)]))
    ranks = [tuple(range(stage * width, (stage + 1) * width)) for stage in range(stages)]
    work = [cost_replicas(space, choice, stage_work) for stage_work in ranks]
    moved = [0.0]
    for (start, _), stage_work, here, there in zip(places[1:], work[1:], ranks, ranks[1:], strict=False):
        latency, pace = space.routes.route(here, there)
        moved.append(2 * (latency + pace * float(stage_work.crossing[start]) * width))
    for recomputes in (False, True):
        seconds = 0.0
        for stage, (stage_work, at) in enumerate(zip(work, places, strict=True)):
            fits = (
                choice.in_flight(stages - stage)
                <= (stage_work.always if recomputes else stage_work.never)[at]
            )
            computing = stage_work.forward[at] * (1 + recomputes) + stage_work.backward[at]
            busy = max(computing + moved[stage], float(stage_work.all_reduce[at]) / choice.micro_batches)
            seconds = max(seconds, busy if fits else inf)
        if seconds < inf:
            yield choice.micro_batches * float(seconds), ends, (width,) * stages, recomputes


def equal_blocks(chain: Chain, stages: int) -> Ends:
    """Return ends of stages with equal numbers of transformer blocks, else of layers, more on later stages.

    A forbidden cut is moved to the nearest allowed one.
    """
    blocks = repeated_blocks(chain)
    starts = tuple(range(len(chain) + 1))
    if blocks is not None and len(blocks) >= stages:
        starts = (0, *blocks.starts[1:-1], len(chain))
    each, larger = divmod(len(starts) - 1, stages)
    counts = [each + (stage >= stages - larger) for stage in range(stages)]
    return nearest_cuts(chain, [starts[end] for end in np.cumsum(counts).tolist()])


def _bapipe(problem: Problem) -> Iterator[Proposal]:
    """Yield the fastest micro-batches for each number of stages, one device per stage."""
    space = problem.space
    if space.is_long:
        return
    choices = [
        choice_ for choice_ in micro_batch_choices(problem.configs) if can_share(problem, choice_.size, 1)
    ]
    for stages in stage_counts(problem):
        plans = [(find_bapipe_plan(space, choice, stages), choice) for choice in choices]
        fitting = [(plan, choice) for plan, choice in plans if plan is not None]
        if fitting:
            (seconds, ends), choice = min(fitting, key=lambda pair: pair[0])
            yield choice.propose(space, ends, [1] * stages, seconds)


def find_bapipe_plan(space: Space, choice: MicroBatchChoice, stages: int) -> tuple[float, Ends] | None:
    """Return the seconds of a step and the cut points where the stages end; None if no partition fits."""
    work = [cost_replicas(space, choice, [rank]) for rank in range(stages)]
    ideal = 1 / sum(
        1 / max(float((stage_work.forward + stage_work.backward)[0, -1]), 1e-300) for stage_work in work
    )
    sent = np.zeros((stages + 1, len(work[0].crossing)))
    for stage in range(1, stages):
        latency, pace = space.routes.route((stage - 1,), (stage,))
        sent[stage] = latency + pace * work[stage].crossing
    for most in (ideal, inf):
        allowed = sent <= most
        costs = [
            np.where(
                allowed[stage][:, None] & allowed[stage + 1],
                stage_work.work(choice.in_flight(stages - stage)),
                inf,
            )
            for stage, stage_work in enumerate(work)
        ]
        if (ends := even_stages(costs)) is not None:
            slowest = max(stage_entries(costs, ends))
            send = max(
                (float(stage_work[end]) for stage_work, end in zip(sent[1:], ends[:-1], strict=False)),
                default=0.0,
            )
            return bapipe_seconds(slowest, send, choice.micro_batches, stages), ends
    return None


def bapipe_seconds(slowest: float, send: float, micro_batches: int, stages: int) -> float:
    """Return the seconds of a step of 1F1B-SO."""
    return (micro_batches + stages - 1) * slowest + (stages - 1) * 2 * send


def _galvatron(problem: Problem) -> Iterator[Proposal]:
    """Yield the partition of the least estimate for each micro-batch size and depth."""
    if problem.space.is_long:
        return
    for choice, depth, replicas in equal_shapes(problem):
        if depth & (depth - 1) == 0:
            tables = stage_tables(problem.space, choice, depth, replicas)
            ends = partition_for_memory(tables, choice.micro_batches)
            if ends is not None:
                seconds = tables.estimate(ends, choice.micro_batches)
                yield choice.propose(problem.space, ends, [replicas] * depth, seconds)


@dataclass(frozen=True, eq=False)
class StageTables:
    """Tables by stage over the cut points between which it lies.

    Attributes:
        seconds: Forward and backward seconds, with recomputation if it must; inf for what does not fit.
        bytes: Bytes of a replica; inf for what does not fit.
        reduced: Seconds of its all-reduce, the same on all stages.
    """

    seconds: Sequence[Floats]
    bytes: Sequence[Floats]
    reduced: Floats

    def slowest(self, ends: Ends) -> tuple[float, int]:
        """Return the seconds of the slowest stage, and its number."""
        seconds = stage_entries(self.seconds, ends)
        return max(seconds), seconds.index(max(seconds))

    def fullest(self, ends: Ends) -> float:
        """Return the bytes of the fullest device."""
        return max(stage_entries(self.bytes, ends))

    def estimate(self, ends: Ends, micro_batches: int) -> float:
        """Return the estimated seconds of a step."""
        seconds, reduced = stage_entries(self.seconds, ends), stage_entries([self.reduced] * len(ends), ends)
        return (micro_batches - 1) * max(seconds) + sum(seconds) + max(reduced)


def stage_tables(space: Space, choice: MicroBatchChoice, depth: int, replicas: int) -> StageTables:
    """Return the tables of a pipeline of `depth` stages on `replicas` devices each."""
    work = cost_replicas(space, choice, range(replicas))
    seconds, sizes = list[Floats](), list[Floats]()
    for in_flight in (choice.in_flight(depth - stage) for stage in range(depth)):
        never, always = work.group.bytes(in_flight, "never"), work.group.bytes(in_flight, "always")
        seconds.append(work.work(in_flight))
        sizes.append(
            np.where(in_flight <= work.never, never, np.where(in_flight <= work.always, always, inf))
        )
    return StageTables(seconds, sizes, work.all_reduce)


def partition_for_memory(tables: StageTables, micro_batches: int) -> Ends | None:
    """Return the partition with the least estimate between even memory and even time; None if none fits."""
    first, by_time = even_stages(tables.bytes), even_stages(tables.seconds)
    if first is None or by_time is None:
        return None
    most = tables.fullest(by_time)
    partitions, queue = {first, by_time}, deque([first])
    while queue:
        ends = queue.popleft()
        seconds, slowest = tables.slowest(ends)
        for moved, taker in _moves(ends, slowest):
            fits = tables.fullest(moved) <= most and stage_entries(tables.seconds, moved)[taker] <= seconds
            if moved not in partitions and fits and len(partitions) < MOST_PARTITIONS:
                partitions.add(moved)
                queue.append(moved)
    return min(partitions, key=lambda candidate: (tables.estimate(candidate, micro_batches), candidate))


def _moves(ends: Ends, stage: int) -> Iterator[tuple[Ends, int]]:
    """Yield partitions with a layer of the stage moved to a neighbouring stage, and that stage."""
    begin, end = (0, *ends)[stage], ends[stage]
    if end - begin < 2:
        return
    if stage > 0:
        yield (*ends[: stage - 1], begin + 1, *ends[stage:]), stage - 1
    if stage + 1 < len(ends):
        yield (*ends[:stage], end - 1, *ends[stage + 1 :]), stage + 1


_NO_DEPTH = "no depth that is a power of two divides devices and batch, and fits"

PLANNERS = (
    Planner("pipedream-2bw", _width_and_depth),
    Planner("bapipe", _bapipe, partial(misfit_reason, "does not fit")),
    Planner("galvatron", _galvatron, partial(misfit_reason, _NO_DEPTH)),
)
