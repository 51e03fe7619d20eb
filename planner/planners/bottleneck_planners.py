"""SPP and Piper: consecutive stages on consecutive devices, the slowest of which is as fast as can be.

SPP: Luo et al., "Efficient Pipeline Planning for Expedited Distributed DNN Training", INFOCOM 2022
(arXiv:2204.10562), section IV. For each number of stages the least bottleneck of a synchronous step, over

    a stage                M (f + b) + AR
    the channel of a cut   M times its two transfers

by a dynamic programme whose state is the layers, the devices, the number of stages and the replicas of the
stage at the cut; all devices are used. The device order of the paper, by recursive minimum cuts of the links,
keeps the devices of a node together: here it is that of the ranks. Of the numbers of stages the paper takes
the one whose list schedule is shortest; here each is proposed, and pplan's simulator judges it under the
schedule that was asked for. The bottleneck is what the planner estimates of the step.

Piper: Tarnawski, Narayanan, Phanishayee, "Piper: Multidimensional Planner for DNN Parallelization", NeurIPS
2021, section 4. The least time per sample (TPS), that of the slowest stage, on at most all devices, with d
replicas:

    compute / d + 2 (a_before + a_after) / (d B) + 4 (d - 1) W / (d B M)

where B is the links' bandwidth (here of the outermost level that the devices need), a and W are bytes, and
the 4 and the 1 / M are those of the authors' code. M times it is what the planner estimates of the step.
Here tensor parallelism, a third dimension of the paper, is 1, as plans of layers have none; a stage
recomputes whole or not at all, where the paper chooses layer by layer; and the model is a chain, not a graph.
Replicas share every micro-batch, where they take turns in the paper, so that a stage has to fit with its
shares of the micro-batches that its schedule has in flight, not with ceil(k / d) whole ones (k: the replicas
from it to the last stage).

Beyond both: memory is pplan's ledger (SPP counts none), a stage that does not fit recomputes, and forbidden
cuts are not made. More devices than `MOST_GROUPS` stay together with their neighbours; cuts are thinned to
`BLOCKS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING

import numpy as np

from ..candidate import Proposal, replicated_pipeline
from ..stage_table import Floats
from .base import Planner
from .replica_groups import (
    MicroBatchChoice,
    ReplicaWork,
    cost_replicas,
    group_choices,
    list_tiers,
    micro_batch_choices,
    thin_cuts,
)

if TYPE_CHECKING:
    from ..problem import Problem
    from ..search.space import Space

BLOCKS = 60
"""Blocks of layers between which a search may cut."""


@dataclass(frozen=True)
class BottleneckRule:
    """What stages and cuts take, with the devices counted from the last stage.

    stage(replicas, devices, to_last): (cut points, cut points), seconds of every stage on so many replicas,
    where so many devices and stages go from it to the last; inf for what does not fit.
    channel(replicas, following, devices): (cut points,), seconds of the cut before a stage of `following`
    replicas, where so many devices go from that to the last; None where cuts are of the stages.
    """

    stage: Callable[[int, int, int], Floats]
    channel: Callable[[int, int, int], Floats] | None = None


@dataclass(frozen=True)
class BottleneckPlan:
    """By stage the cut point it ends at and its replicas; the slowest of the stages and cuts, in seconds."""

    ends: tuple[int, ...]
    replicas: tuple[int, ...]
    seconds: float


Table = dict[tuple[int, int], Floats]
"""By devices, and replicas of the first stage on them: the least bottleneck from every cut point to the end,
(cut points,)."""


def least_bottlenecks(
    rule: BottleneckRule, sizes: Sequence[int], devices: int, most_stages: int, *, on_all: bool
) -> Iterator[BottleneckPlan]:
    """By number of stages, the plan whose slowest stage or cut is fastest, where there is one.

    `sizes`: the replicas that a stage may have; `on_all`: whether no device stays free.
    """
    tables: list[Table] = []
    for to_last in range(1, most_stages + 1):
        table: Table = {}
        for used in range(to_last, devices + 1):
            for replicas in (size for size in sizes if size <= used):
                following = [] if not tables else _behind(rule, tables[-1], replicas, used - replicas)
                if following:
                    behind = np.minimum.reduce([totals for totals, _ in following])
                    table[used, replicas] = np.maximum(rule.stage(replicas, used, to_last), behind).min(
                        axis=1
                    )
                elif not tables and used == replicas:
                    table[used, replicas] = rule.stage(replicas, used, 1)[:, -1]
        if not table:
            return
        tables.append(table)
        starts = [(float(own[0]), key) for key, own in table.items() if key[0] == devices or not on_all]
        seconds, key = min(starts, default=(np.inf, (0, 0)))
        if seconds < np.inf:
            yield _trace_back(rule, tables, key, seconds)


def _behind(
    rule: BottleneckRule, table: Table, replicas: int, rest: int
) -> list[tuple[Floats, tuple[int, int]]]:
    """By what follows a stage, the least bottleneck of a cut at every place and all behind it."""
    channel = rule.channel
    return [
        (best if channel is None else np.maximum(channel(replicas, following, rest), best), (rest, following))
        for (used, following), best in table.items()
        if used == rest
    ]


def _trace_back(
    rule: BottleneckRule, tables: Sequence[Table], key: tuple[int, int], seconds: float
) -> BottleneckPlan:
    """The stages behind a least bottleneck."""
    place, ends, counts = 0, list[int](), list[int]()
    for to_last in range(len(tables), 0, -1):
        used, replicas = key
        counts.append(replicas)
        own = rule.stage(replicas, used, to_last)[place]
        if to_last > 1:
            following = _behind(rule, tables[to_last - 2], replicas, used - replicas)
            totals, key = min(
                ((np.maximum(own, behind), key) for behind, key in following), key=lambda pair: pair[0].min()
            )
            place = int(totals.argmin())
        else:
            place = len(own) - 1
        ends.append(place)
    return BottleneckPlan(tuple(ends), tuple(counts), seconds)


class _Costs:
    """Stages on consecutive groups of `each` devices, `groups` of them in all, for one choice."""

    def __init__(self, space: Space, choice: MicroBatchChoice, groups: int, each: int) -> None:
        self.space, self.choice, self.groups, self.each = space, choice, groups, each
        self.work = cache(self._cost)

    def ranks(self, groups: int, devices: int) -> tuple[int, ...]:
        """Of so many groups, with which so many begin that end with the last."""
        first = (self.groups - devices) * self.each
        return tuple(range(first, first + groups * self.each))

    def _cost(self, groups: int, devices: int) -> ReplicaWork:
        """What all stages cost there."""
        return cost_replicas(self.space, self.choice, self.ranks(groups, devices))

    def spp_stage(self, replicas: int, devices: int, to_last: int) -> Floats:
        """M (f + b) + AR."""
        work = self.work(replicas, devices)
        computing = work.work(self.choice.in_flight(to_last))
        return self.choice.micro_batches * computing + work.all_reduce

    def spp_channel(self, replicas: int, following: int, devices: int) -> Floats:
        """M times the two transfers of a micro-batch between the groups of replicas."""
        senders, receivers = self.ranks(replicas, devices + replicas), self.ranks(following, devices)
        latency, each = self.space.routes.route(senders, receivers)
        crossing = self.work(replicas, devices + replicas).crossing * len(senders)
        return 2 * self.choice.micro_batches * (latency + each * crossing)

    def piper_stage(self, replicas: int, devices: int, to_last: int) -> Floats:
        """Compute, transfers at both ends and the gradients' part of a micro-batch, M times."""
        work, d = self.work(replicas, devices), replicas * self.each
        moved = 2 * (work.crossing[:, None] + work.crossing[None, :])
        weights = self.space.table(self.space.chain.sizes[0]).stage_bytes.trainable
        exchanged = 4 * (d - 1) / d * np.asarray(weights) / self.choice.micro_batches
        bandwidth = list_tiers(self.space.topology)[-1].bandwidth
        seconds = work.work(self.choice.in_flight(to_last)) + (moved + exchanged) / bandwidth
        return self.choice.micro_batches * seconds


def _propose(spp: bool, problem: Problem) -> Iterator[Proposal]:
    """SPP's plan for each micro-batch size and number of stages; Piper's for each micro-batch size."""
    space = thin_cuts(problem.space, BLOCKS)
    cut_points = space.table(space.chain.sizes[0]).cut_points
    for choice in micro_batch_choices(problem.configs):
        for plan, each in find_plans(space, choice, problem, spp=spp):
            ends = tuple(cut_points[end] for end in plan.ends)
            replicas = [count * each for count in plan.replicas]
            yield replicated_pipeline(choice.config(recomputes=False), ends, replicas, plan.seconds)


PLANNERS = (Planner("spp", partial(_propose, True)), Planner("piper", partial(_propose, False)))


def find_plans(
    space: Space, choice: MicroBatchChoice, problem: Problem, *, spp: bool
) -> list[tuple[BottleneckPlan, int]]:
    """The plans for one choice, each with the devices that stay together: SPP's by number of stages, or the
    one of Piper."""
    each, counts = group_choices(space, problem.usable_gpus)
    costs = _Costs(space, choice, problem.usable_gpus // each, each)
    rule = BottleneckRule(
        cache(costs.spp_stage if spp else costs.piper_stage), cache(costs.spp_channel) if spp else None
    )
    most = min(costs.groups, problem.stage_counts[-1])
    on_all = spp or problem.options.use_all
    plans = list[tuple[BottleneckPlan, int]]()
    for own in counts:
        sizes = [
            count
            for count in own
            if count * each <= choice.size
            and problem.may_share(choice.size, [count * each])
            and space.fits_someone(choice.size, count * each)
        ]
        bottlenecks = least_bottlenecks(rule, sizes, costs.groups, most, on_all=on_all)
        plans += [(plan, each) for plan in bottlenecks]
    return plans if spp else sorted(plans, key=lambda pair: pair[0].seconds)[:1]
