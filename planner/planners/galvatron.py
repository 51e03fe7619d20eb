"""Galvatron's plans of pipelines, without its choice of a parallelism for each layer.

Wang et al., "Improving Automatic Parallel Training via Balanced Memory Workload Optimization", TKDE 2024
(Galvatron-BMW). For every micro-batch size and every depth that is a power of two and divides the devices,
each stage on as many of them: the partition goes from the one with the least memory on its fullest device, M
micro-batches in flight as the schedule holds them, towards the one with the fastest slowest stage. In turn
the slowest stage gives its first layer to the stage before it, or its last one to the stage behind. A
partition is kept where the stage that took the layer is not slower than the slowest was, and where no device
is fuller than the fullest one of the partition by time, or than it has room for. The least

    (M - 1) max over stages of (F + B) + sum over stages of (F + B) + max AR

is proposed, of all partitions on the way and the one by time. F and B are with recomputation where a stage
does not fit without.

Here and not there: Galvatron chooses for every layer of a stage among data, sharded data and tensor
parallelism and recomputation, by a dynamic programme; here all layers of a stage are replicated, and a stage
recomputes as a whole. What it gains inside of a stage is so left out. A layer is what lies between two
allowed cuts. At most `MOST_PARTITIONS` of one shape are looked at.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from ...cost_models.collectives import all_reduce_seconds
from ...cost_models.errors import InfeasibleError
from ..balance import balance_table
from ..candidate import Proposal, replicated_pipeline
from ..stage_table import Floats
from .base import Ends, stage_counts
from .replica_groups import MicroBatchChoice, cost_replicas, micro_batch_choices, misfit_reason

if TYPE_CHECKING:
    from ..problem import Problem
    from ..search.space import Space

MOST_PARTITIONS = 400
"""That are looked at of one shape."""


@dataclass(frozen=True, eq=False)
class StageTables:
    """By stage, tables over the cut points a stage lies between: seconds of forward and backward, with
    recomputation where it must; bytes of a replica; inf for what does not fit. `reduced`: seconds of its
    all-reduce, the same on all stages."""

    seconds: Sequence[Floats]
    bytes: Sequence[Floats]
    reduced: Floats

    def slowest(self, ends: Ends) -> tuple[float, int]:
        """Seconds of the slowest stage, and which it is."""
        own = [float(table[at]) for table, at in zip(self.seconds, _places(ends), strict=True)]
        return max(own), own.index(max(own))

    def fullest(self, ends: Ends) -> float:
        """Bytes of the fullest device."""
        return max(float(table[at]) for table, at in zip(self.bytes, _places(ends), strict=True))

    def estimate(self, ends: Ends, micro_batches: int) -> float:
        """Seconds of a step."""
        own = [float(table[at]) for table, at in zip(self.seconds, _places(ends), strict=True)]
        return (
            (micro_batches - 1) * max(own) + sum(own) + max(float(self.reduced[at]) for at in _places(ends))
        )


def _places(ends: Ends) -> list[tuple[int, int]]:
    return list(zip((0, *ends), ends, strict=False))


class Galvatron:
    """The bi-objective search of partitions."""

    name = "galvatron"

    def propose(self, problem: Problem) -> Iterator[Proposal]:
        """For each micro-batch size and depth the partition of the least estimate."""
        space, devices = problem.space, problem.usable_gpus
        if space.is_long:
            return
        cut_points = space.table(space.chain.sizes[0]).cut_points
        for choice in micro_batch_choices(problem.configs):
            for depth in stage_counts(problem):
                replicas, rest = divmod(devices, depth)
                if rest or depth & (depth - 1) or not _can_share(problem, choice, [replicas] * depth):
                    continue
                space.budget.check()
                tables = stage_tables(space, choice, depth, replicas)
                ends = partition_for_memory(tables, choice.micro_batches)
                if ends is not None:
                    seconds = tables.estimate(ends, choice.micro_batches)
                    own, config = [cut_points[end] for end in ends], choice.config(recomputes=False)
                    yield replicated_pipeline(config, own, [replicas] * depth, seconds)

    def refusal(self, problem: Problem) -> str:
        """Why it proposes nothing."""
        if problem.space.is_long:
            return "too many layers"
        misfit = "no depth that is a power of two divides devices and batch, and fits"
        return misfit_reason(problem.configs, misfit)


GALVATRON = Galvatron()


def _can_share(problem: Problem, choice: MicroBatchChoice, replicas: list[int]) -> bool:
    """Whether the runtime has such replicas; they share a micro-batch equally, of a size with costs."""
    size, count = choice.size, replicas[0]
    runs = problem.runtime is None or problem.runtime.runs_replicas(replicas)
    return runs and size % count == 0 and problem.space.fits_someone(size, count)


def stage_tables(space: Space, choice: MicroBatchChoice, depth: int, replicas: int) -> StageTables:
    """Of a pipeline of so many stages on so many devices each."""
    group = space.replica_group(choice.size, range(replicas))
    gradients = space.gradients(np.asarray(group.table.stage_bytes.trainable))
    reduced = np.asarray(all_reduce_seconds(space.topology, range(replicas), gradients))
    work = cost_replicas(space, group, choice.modes, reduced)
    seconds, sizes = list[Floats](), list[Floats]()
    for stage in range(depth):
        in_flight = choice.in_flight(depth - stage)
        never, always = group.bytes(in_flight, "never"), group.bytes(in_flight, "always")
        own = np.where(in_flight <= work.never, never, np.where(in_flight <= work.always, always, inf))
        seconds.append(work.work(in_flight))
        sizes.append(np.broadcast_to(own, seconds[-1].shape))
    return StageTables(seconds, sizes, np.broadcast_to(reduced, seconds[0].shape))


def partition_for_memory(tables: StageTables, micro_batches: int) -> Ends | None:
    """Of the partitions on the way from even memory to even time the one of the least estimate; None where
    none fits."""
    depth = len(tables.seconds)
    try:
        first, by_time = (
            tuple(balance_table(own.__getitem__, depth)) for own in (tables.bytes, tables.seconds)
        )
    except InfeasibleError:
        return None
    most = tables.fullest(by_time)
    partitions, queue = {first, by_time}, deque([first])
    while queue:
        ends = queue.popleft()
        seconds, slowest = tables.slowest(ends)
        for other, taker in _moves(ends, slowest):
            at = _places(other)[taker]
            fits = tables.fullest(other) <= most and float(tables.seconds[taker][at]) <= seconds
            if other not in partitions and fits and len(partitions) < MOST_PARTITIONS:
                partitions.add(other)
                queue.append(other)
    return min(partitions, key=lambda own: (tables.estimate(own, micro_batches), own))


def _moves(ends: Ends, stage: int) -> Iterator[tuple[Ends, int]]:
    """With a layer of the stage on the one before it, or behind it, and which stage that is."""
    begin, end = _places(ends)[stage]
    if end - begin < 2:
        return
    if stage > 0:
        yield (*ends[: stage - 1], begin + 1, *ends[stage:]), stage - 1
    if stage + 1 < len(ends):
        yield (*ends[:stage], end - 1, *ends[stage + 1 :]), stage + 1
