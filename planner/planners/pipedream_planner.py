"""PipeDream: stages and replicas by the hierarchical dynamic programme, for asynchronous throughput.

Narayanan et al., "PipeDream", SOSP 2019. Its objective is the seconds of a global batch in steady state, with
transfers and all-reduces beside the compute: those of the slowest stage or cut (`pipedream_programme`).
Latencies count nothing in it. What enters the pipeline at a time is a global batch of its own there, a
micro-batch here; replicas of a stage take turns there and share every micro-batch here: the recurrence is
the same for both.

Where a model has branches PipeDream's states are the down-sets of its graph. Here they are the cut points of
the chain: what a cut sends is every tensor made before it that is needed behind it, each once, and always
counts. Of devices of several kinds all count as the slowest, with the least memory.

`pipedream-published` counts as the code that its authors published, which is not as the paper does. Of a
stage on m components compute and all-reduce add up, and the all-reduce of m copies sends 4 (m-1) / m times
the weights; what a cut sends is divided among the components of the stage behind it. Cuts are charged, which
that code does on request; memory and unused machines are as in `pipedream`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from ..candidate import Proposal
from ..pipeline_config import PipelineConfig
from ..search.space import Space
from .pipedream_instance import (
    PAPER,
    PUBLISHED,
    Bottleneck,
    Instance,
    NestedStage,
    PipeDreamStages,
    Recurrence,
)
from .pipedream_programme import Programme
from .replica_groups import thin_cuts

if TYPE_CHECKING:
    from ..problem import Problem


ASYNCHRONOUS = ("pipedream", "pipedream-2bw")
SCHEDULES = (*ASYNCHRONOUS, "1f1b", "dapple", "gpipe")
"""Those whose stages hold what the number of stages behind them says; of several the first is taken."""
ENDLESS = 2**62
"""Micro-batches of a run that does not end."""
WORK = 4e9
"""What the programmes of one plan may compare, a nanosecond or two each."""
COARSE = 24
"""Places, or up to twice as many, that a long chain is planned over first."""
QUICK = 1e9
"""Comparisons up to which a chain is planned over all cut points at once, where memory is no matter."""

GUESSES = (1.2, 2.0, 4.0, np.inf)
"""Limits of the bottleneck under which a plan that fits is looked for, in what it were without memory."""


@dataclass(frozen=True)
class AsynchronousPlan:
    """A pipeline that is never flushed. By stage `ends`, the number of layers before its end, and `devices`,
    the ranks of its replicas; `seconds_per_mini_batch`: of the slowest stage or cut, by the recurrence."""

    ends: tuple[int, ...]
    devices: tuple[tuple[int, ...], ...]
    seconds_per_mini_batch: float

    @property
    def replicas(self) -> tuple[int, ...]:
        """By stage, how many devices share it."""
        return tuple(len(own) for own in self.devices)


def plan_asynchronous(
    space: Space,
    mini_batch: int,
    *,
    recurrence: Recurrence = PAPER,
    schedule: str = "pipedream",
    recompute: Literal["never", "always"] = "never",
    use_all: bool = False,
) -> AsynchronousPlan | None:
    """The plan with the highest throughput of global batches of that size, each of which updates the weights;
    None where none fits.

    Stage i of p keeps the weight versions and holds the activations that the asynchronous schedule says
    (PipeDream: p - i of both). Exact for the recurrence and the memory limits, up to `WORK`; fewer devices
    are used where more are not faster, unless `use_all`.
    """
    gpus = space.topology.gpus
    if not any(space.fits_someone(mini_batch, replicas) for replicas in range(1, gpus + 1)):
        return None
    config = PipelineConfig(schedule, recompute, ENDLESS, mini_batch)
    stages = PipeDreamStages(space, config, recurrence, use_all)
    solution = shortest_bottleneck(stages.instance, WORK)
    if solution is None:
        return None
    return AsynchronousPlan(*stages.place(solution.parts), solution.seconds)


LONG = 200
"""Blocks between the cuts that are left of a long chain."""


@dataclass(frozen=True)
class PipeDream:
    """The planner, with the paper's recurrence or another: the same partition under the requested
    schedule."""

    name: str
    recurrence: Recurrence

    def propose(self, problem: Problem) -> Iterable[Proposal]:
        """For every configuration its partition with the shortest bottleneck, where one fits. A runtime that
        runs no replicas, or the same number everywhere, is given one device a stage. Of a long chain some of
        the cuts: tables of all its stages would be too large."""
        space, configs = _within_reach(problem.space), _one_schedule(problem.configs)
        if space.is_long:
            space = thin_cuts(space, LONG)
        runtime = space.runtime
        for config in configs:
            size = config.micro_batch_size
            if not space.chain.reaches(size, past_largest=True):
                continue
            shared = space.fits_someone(size, 2) and (runtime is None or runtime.runs_replicas([2, 1]))
            stages = PipeDreamStages(space, config, self.recurrence, most_replicas=size if shared else 1)
            solution = shortest_bottleneck(stages.instance, WORK / 2 / len(configs))
            if solution is not None:
                yield Proposal(config, *stages.place(solution.parts))


def _within_reach(space: Space) -> Space:
    """With the devices that the runtime can use: one process has those of one node."""
    gpus, of_node = space.topology.gpus, space.topology.gpus_per_node
    if not space.one_process or gpus <= of_node:
        return space
    return replace(space, topology=space.topology.with_gpus(of_node))


def _one_schedule(configs: Sequence[PipelineConfig]) -> list[PipelineConfig]:
    """Of one schedule; where each stage may recompute or not, only so."""
    names = {config.schedule for config in configs}
    schedule = next((name for name in SCHEDULES if name in names), None)
    own = [config for config in configs if config.schedule == schedule]
    by_stage = [config for config in own if config.recompute == "by_stage"]
    return by_stage or own


PIPEDREAM = PipeDream("pipedream", PAPER)


PIPEDREAM_PUBLISHED = PipeDream("pipedream-published", PUBLISHED)


class Solution(NamedTuple):
    """The shortest bottleneck, the stages of the outermost level, and the number of cut points of the
    tables."""

    seconds: float
    parts: tuple[NestedStage, ...]
    places: int

    def flat(self) -> list[tuple[int, int, int]]:
        """(start, end, devices) of the stages of devices, in order."""
        return [stage for part in self.parts for stage in part.flat()]


def shortest_bottleneck(instance: Instance, work: float = WORK) -> Solution | None:
    """The plan with the shortest bottleneck; None where none fits.

    Exact, unless the cut points are too many for `work`: then over as many of them as it allows (`cut
    points`). Of equal plans one with the fewest components of the outermost level; then with no further cut,
    or with the most components on the first stage, and its earliest end.

    Long chains are planned over few cut points first: the plan is a limit for the next one, over more.
    """
    best: Solution | None = None
    depth, before, total = -1, 0.0, 0.0
    for count in _counts(instance):
        points = _select_points(instance, count)
        bottleneck, depth, spent = _deep_enough(
            instance.select_points(points), depth, best.seconds if best else np.inf
        )
        if bottleneck is not None:
            best = Solution(
                bottleneck.seconds, tuple(_renumber(part, points) for part in bottleneck.parts), len(points)
            )
        total += spent
        if total + spent * max(spent / before if before else 1.0, 1.0) > work:
            break
        before = spent
    return best


def _deep_enough(instance: Instance, depth: int, limit: float) -> tuple[Bottleneck | None, int, float]:
    """The plan, with the depth that it took and what was compared.

    Memory depends on the number of stages behind. These are counted only up to a depth (-1: memory is not
    limited); as no count exceeds the true one, no plan that fits is lost. If the best plan fits, it is the
    best of all; else the depth is raised. Without a limit, one is guessed by what memory would allow at best,
    as tables are short under it, and raised until there is a plan.
    """
    spent, limits = 0.0, [limit]
    while True:
        programme = Programme(
            instance if depth >= 0 else replace(instance, fits=None), max(depth, 0), limits[0]
        )
        bottleneck = programme.solution()
        spent += programme.work
        large = [] if bottleneck is None else _too_large(bottleneck.parts, instance)
        if bottleneck is not None and depth < 0 and large and np.isinf(limit):
            limits = [bottleneck.seconds * share for share in GUESSES]
        if bottleneck is None and len(limits) > 1:
            limits.pop(0)
        elif large:
            depth = 0 if depth < 0 else min(large)
        else:
            return bottleneck, depth, spent


def _too_large(parts: tuple[NestedStage, ...], instance: Instance) -> list[int]:
    """The numbers of stages behind those that do not fit."""
    fits, flat = instance.fits, [stage for part in parts for stage in part.flat()]
    if fits is None:
        return []
    behind = range(len(flat) - 1, -1, -1)
    return [b for b, (i, j, devices) in zip(behind, flat, strict=True) if not fits(devices, b)[i, j]]


def _counts(instance: Instance) -> list[int]:
    """All cut points, and before them halves of halves, where the programme is not quick at once."""
    *inside, outer = [tier.machines**2 / 2 for tier in instance.tiers]
    comparisons = outer * instance.last**2 + sum(inside) * instance.last**3 / 3
    counts = [instance.last]
    if instance.fits is not None or comparisons > QUICK:
        while counts[0] >= 2 * COARSE:
            counts.insert(0, counts[0] // 2)
    return counts


def _renumber(part: NestedStage, points: npt.NDArray[np.int64]) -> NestedStage:
    inner = tuple(_renumber(own, points) for own in part.inner)
    return NestedStage(int(points[part.start]), int(points[part.end]), part.replicas, inner)


def _select_points(instance: Instance, count: int) -> npt.NDArray[np.int64]:
    """About so many cut points, or all: of equal shares of the seconds the cut of each that least crosses."""
    if count >= instance.last:
        return np.arange(instance.last + 1)
    done = instance.running[1:]
    share = np.floor(done[:-1] / max(float(done[-1]), 1e-300) * (count - 1))
    starts = np.flatnonzero(np.diff(share, prepend=-1.0)) + 1
    inner = [a + int(instance.crossing[a:b].argmin()) for a, b in pairwise([*starts, instance.last])]
    return np.array([0, *inner, instance.last])
