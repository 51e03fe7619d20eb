"""PipeDream-2BW, AutoPipe and BaPipe: pipelines whose stages all have as many replicas.

PipeDream-2BW: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021, section 4.
Every width w (replicas of each stage) and depth d (stages) that make all devices, every micro-batch size,
with recomputation on all stages or on none; the transformer blocks, or where the names tell none the layers,
as equal in number as can be, more on later stages. The estimate of a step of M micro-batches is

    M max over stages of max(f + b + its transfers, AR / M)

and a plan has to fit. Here memory is pplan's, of the schedule that is searched: two weight versions only
under `schedule='pipedream-2bw'`.

AutoPipe: Liu et al., "AutoPipe: A Fast Pipeline Parallelism Approach with Balanced Partitioning and
Micro-batch Slicing", CLUSTER 2022, section III. It starts from the partition whose slowest stage is fastest,
and simulates 1F1B without transfers. The master stage is the last that has no idle time between its first and
its last forward; the step is shorter where less lies before it. So its first block goes to the stages before
it, which are balanced again, until the master stage is the first one, has one block, or a partition comes
again; the shortest step counts. Here 2 p micro-batches are simulated, as in the authors' code, and the rest
takes that of the slowest stage; blocks are the layers between two allowed cuts. Its slicing of the first
micro-batch is the schedule `autopipe` of the simulator, which pplan's plans do not have.

BaPipe: Zhao et al., "BaPipe: Exploration of Balanced Pipeline Parallelism for DNN Training",
arXiv:2012.12544, section 3. Stages of as equal seconds as can be, one a device, in the order of the devices,
each with the seconds of its own device; where a transfer would take longer than an ideal stage, 1 / sum of
1 / T_n of the whole model's seconds T_n, only the cuts below that (the coarse-grained partition); stages that
do not fit are left out (the fine-tuning). The number of micro-batches is explored with the seconds of 1F1B,

    1F1B-SNO   (M + N - 1) (F + B) + (N + M - 2 - ceil((M - 1) / N)) 2 SR     transfers block
    1F1B-SO    (M + N - 1) (F + B) + (N - 1) 2 SR                             they overlap

F, B and SR of the slowest stage and cut. Here the exact most even partition is taken where the paper fills
the stages one after another and then moves layers; the schedules for FPGAs, and layers that are shared among
devices, are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ...cost_models.collectives import all_reduce_seconds
from ...cost_models.errors import InfeasibleError
from ...cost_models.layer import Chain
from ..balance import balance, balance_table
from ..candidate import Proposal, linear_pipeline, replicated_pipeline
from ..stage_table import Floats
from .base import Ends, nearest_cuts, replicated_shapes, stage_counts
from .megatron import repeated_blocks
from .replica_groups import MicroBatchChoice, ReplicaWork, cost_replicas, micro_batch_choices, misfit_reason

if TYPE_CHECKING:
    from ..problem import Problem
    from ..search.space import Space


def _shapes(problem: Problem) -> list[tuple[int, int]]:
    """Stages, and replicas of each, that together are all devices."""
    linear = [(problem.usable_gpus, 1)] if problem.usable_gpus in stage_counts(problem) else []
    return [*replicated_shapes(problem), *linear]


def _stage_work(space: Space, choice: MicroBatchChoice, ranks: Sequence[int]) -> ReplicaWork:
    """What all stages cost on these devices."""
    space.budget.check()
    group = space.replica_group(choice.size, ranks)
    gradients = space.gradients(np.asarray(group.table.stage_bytes.trainable))
    reduced = np.asarray(all_reduce_seconds(space.topology, ranks, gradients))
    return cost_replicas(space, group, choice.modes, reduced)


def _shared(problem: Problem, choice: MicroBatchChoice, replicas: int) -> bool:
    """Whether so many replicas share its micro-batches equally, at a size that can be costed."""
    return choice.size % replicas == 0 and problem.space.fits_someone(choice.size, replicas)


class WidthAndDepth:
    """PipeDream-2BW's planner."""

    name = "pipedream-2bw"

    def propose(self, problem: Problem) -> Iterator[Proposal]:
        """For each micro-batch size the width and depth with the least estimate."""
        for choice in micro_batch_choices(problem.configs):
            plans = [
                plan
                for stages, width in _shapes(problem)
                if _shared(problem, choice, width)
                for plan in width_and_depth_plans(problem.space, choice, stages, width)
            ]
            if plans:
                seconds, ends, replicas, recomputes = min(plans)
                yield replicated_pipeline(choice.config(recomputes), ends, replicas, seconds)


WIDTH_AND_DEPTH = WidthAndDepth()
WidthDepthPlan = tuple[float, Ends, tuple[int, ...], bool]
"""The estimated step, by stage its end and replicas, and whether all stages recompute."""


def width_and_depth_plans(
    space: Space, choice: MicroBatchChoice, stages: int, width: int
) -> Iterator[WidthDepthPlan]:
    """PipeDream-2BW's plans of this depth and width, without recomputation and with it, that fit."""
    cut_points, ends = list(space.table(space.chain.sizes[0]).cut_points), equal_blocks(space.chain, stages)
    places = [0, *(cut_points.index(end) for end in ends)]
    work = [_stage_work(space, choice, range(stage * width, (stage + 1) * width)) for stage in range(stages)]
    for recomputes in (False, True):
        seconds = 0.0
        for stage, own in enumerate(work):
            at, to_last = (places[stage], places[stage + 1]), stages - stage
            room = own.always if recomputes else own.never
            fits = choice.in_flight(to_last) <= room[at]
            computing = own.forward[at] * (1 + recomputes) + own.backward[at]
            moved = 0.0
            if stage:
                ranks = [tuple(range(first * width, (first + 1) * width)) for first in (stage - 1, stage)]
                latency, each = space.routes.route(*ranks)
                moved = 2 * (latency + each * float(own.crossing[at[0]]) * width)
            busy = max(computing + moved, float(own.all_reduce[at]) / choice.micro_batches)
            seconds = max(seconds, busy if fits else inf)
        if seconds < inf:
            yield choice.micro_batches * float(seconds), ends, (width,) * stages, recomputes


def equal_blocks(chain: Chain, stages: int) -> Ends:
    """Ends of stages of as many transformer blocks each as can be, else layers, more on later ones; a
    forbidden cut is moved to the nearest allowed one."""
    blocks = repeated_blocks(chain)
    starts = tuple(range(len(chain) + 1))
    if blocks is not None and len(blocks) >= stages:
        starts = (0, *blocks.starts[1:-1], len(chain))
    each, larger = divmod(len(starts) - 1, stages)
    counts = [each + (stage >= stages - larger) for stage in range(stages)]
    return nearest_cuts(chain, [starts[end] for end in np.cumsum(counts).tolist()])


class AutoPipe:
    """AutoPipe's partition."""

    name = "autopipe"

    def propose(self, problem: Problem) -> Iterator[Proposal]:
        """For each micro-batch size and shape on all devices the partition, and its shortest step."""
        cut_points = problem.space.table(problem.space.chain.sizes[0]).cut_points
        for choice in micro_batch_choices(problem.configs):
            for stages, replicas in _shapes(problem):
                if not _shared(problem, choice, replicas):
                    continue
                problem.space.budget.check()
                group = problem.space.replica_group(choice.size, range(replicas))
                blocks = np.arange(group.table.blocks)
                forward, backward = (
                    seconds[blocks, blocks + 1] for seconds in (group.forward, group.backward)
                )
                ends, seconds = autopipe_partition(forward, backward, stages, choice.micro_batches)
                own = [cut_points[end] for end in ends]
                yield replicated_pipeline(choice.config(recomputes=False), own, [replicas] * stages, seconds)


AUTOPIPE = AutoPipe()


def autopipe_partition(
    forward: Floats, backward: Floats, stages: int, micro_batches: int
) -> tuple[Ends, float]:
    """AutoPipe's partition of blocks of these seconds, and the seconds of its step as it simulates them."""
    work = forward + backward
    ends, best, earlier = _balanced(work, stages), None, set[Ends]()
    while ends not in earlier:
        earlier.add(ends)
        bounds = list(zip((0, *ends), ends, strict=False))
        own = [[float(part[a:b].sum()) for a, b in bounds] for part in (forward, backward)]
        seconds, master = simulate_1f1b(*own, micro_batches=micro_batches)
        best = min(best or (seconds, ends), (seconds, ends))
        start, end = bounds[master]
        if master > 0 and end - start > 1:
            ends = (*_balanced(work[: start + 1], master), *ends[master:])
    assert best is not None
    return best[1], best[0]


def _balanced(work: Floats, stages: int) -> Ends:
    return tuple(np.cumsum(balance(work, stages)).tolist())


def simulate_1f1b(
    forward: Sequence[float], backward: Sequence[float], *, micro_batches: int
) -> tuple[float, int]:
    """Seconds of a step of 1F1B without transfers, and its master stage: the last one without idle time
    between its first and its last forward, else the slowest. Of more than 2 p micro-batches the others take
    what they take on the slowest stage."""
    p = len(forward)
    count = min(micro_batches, 2 * p)
    warm = [min(count, p - stage) for stage in range(p)]
    done = [[0.0] * count for _ in range(2 * p)]  # ends of F, then of B
    free, idle = [0.0] * p, [0.0] * p
    for turn in range(count + max(warm) - 1):
        for s in range(p):
            if turn < count:
                start = max(free[s], done[s - 1][turn] if s else 0.0)
                idle[s] += start - free[s] if turn else 0.0
                free[s] = done[s][turn] = start + forward[s]
        for s in reversed(range(p)):
            own = turn - warm[s] + 1
            if 0 <= own < count:
                start = max(free[s], done[p + s + 1][own] if s + 1 < p else 0.0)
                idle[s] += start - free[s] if turn < count - 1 else 0.0
                free[s] = done[p + s][own] = start + backward[s]
    slowest = max(f + b for f, b in zip(forward, backward, strict=True))
    without = [s for s in range(p) if idle[s] <= 1e-12 * max(free)]
    busiest = max(range(p), key=lambda s: (forward[s] + backward[s], s))
    return max(free) + (micro_batches - count) * slowest, max(without, default=busiest)


class BaPipe:
    """BaPipe's exploration on unlike devices, one a stage."""

    name = "bapipe"

    def propose(self, problem: Problem) -> Iterator[Proposal]:
        """For each number of stages the micro-batches with the least seconds."""
        space = problem.space
        if space.is_long:
            return
        cut_points = space.table(space.chain.sizes[0]).cut_points
        overlap = space.runtime is None or space.runtime.transfers == "overlapped"
        choices = [choice for choice in micro_batch_choices(problem.configs) if _shared(problem, choice, 1)]
        for stages in stage_counts(problem):
            plans = [
                (plan, choice)
                for choice in choices
                if (plan := find_bapipe_plan(space, choice, stages, overlap=overlap)) is not None
            ]
            if plans:
                (seconds, ends), choice = min(plans, key=lambda pair: pair[0])
                proposal = linear_pipeline(choice.config(recomputes=False), [cut_points[end] for end in ends])
                yield Proposal(proposal.config, proposal.ends, proposal.devices, seconds)

    def refusal(self, problem: Problem) -> str:
        """Why it proposes nothing."""
        return "too many layers" if problem.space.is_long else misfit_reason(problem.configs, "does not fit")


BAPIPE = BaPipe()


def find_bapipe_plan(
    space: Space, choice: MicroBatchChoice, stages: int, *, overlap: bool
) -> tuple[float, Ends] | None:
    """Seconds of a step, and the cut points that the stages end at; None where no partition fits."""
    work = [_stage_work(space, choice, [rank]) for rank in range(stages)]
    ideal = 1 / sum(1 / max(float((own.forward + own.backward)[0, -1]), 1e-300) for own in work)
    sent = np.zeros((stages + 1, len(work[0].crossing)))
    for stage in range(1, stages):
        latency, each = space.routes.route((stage - 1,), (stage,))
        sent[stage] = latency + each * work[stage].crossing
    for coarse in (True, False):
        allowed = sent <= ideal if coarse else np.ones_like(sent, dtype=bool)
        cost = _stage_costs(work, choice, allowed)
        try:
            ends = tuple(balance_table(cost, stages))
        except InfeasibleError:
            continue
        places = list(zip((0, *ends), ends, strict=False))
        slowest = max(float(cost(stage)[at]) for stage, at in enumerate(places))
        send = max((float(sent[stage][at[0]]) for stage, at in enumerate(places) if stage), default=0.0)
        return bapipe_seconds(slowest, send, choice.micro_batches, stages, overlap=overlap), ends
    return None


def _stage_costs(
    work: Sequence[ReplicaWork], choice: MicroBatchChoice, allowed: npt.NDArray[np.bool_]
) -> Callable[[int], Floats]:
    """By stage, the seconds of the layers between any two cut points; inf for what does not fit, or has a cut
    that is not allowed."""

    def cost(stage: int) -> Floats:
        own = work[stage].work(choice.in_flight(len(work) - stage))
        return np.where(allowed[stage][:, None] & allowed[stage + 1][None, :], own, np.inf)

    return cost


def bapipe_seconds(slowest: float, send: float, micro_batches: int, stages: int, *, overlap: bool) -> float:
    """Of a step of 1F1B-SO, where transfers `overlap` computing, else of 1F1B-SNO."""
    count, most = micro_batches, stages
    blocking = most + count - 2 - -(-(count - 1) // most)
    return (count + most - 1) * slowest + (most - 1 if overlap else blocking) * 2 * send
