"""SPP and Piper: consecutive stages on consecutive devices with the least bottleneck.

SPP: Luo et al., "Efficient Pipeline Planning for Expedited Distributed DNN Training", INFOCOM 2022
(arXiv:2204.10562), section IV. For each number of stages the least bottleneck of a synchronous step, over

    a stage                M (f + b) + AR
    the channel of a cut   M times its two transfers

by a dynamic programme over the layers, the devices, the number of stages and the replicas of the stage at the
cut; all devices are used. The paper orders devices by recursive minimum cuts of the links, which keeps the
devices of a node together; here the rank order does. The paper takes the number of stages with the shortest
list schedule; here each number is proposed, and the simulator judges it under the requested schedule. The
bottleneck is the planner's estimate of the step.

Piper: Tarnawski, Narayanan, Phanishayee, "Piper: Multidimensional Planner for DNN Parallelization", NeurIPS
2021, section 4. The least time per sample (TPS), that of the slowest stage, on at most all devices, with d
replicas:

    compute / d + 2 (a_before + a_after) / (d B) + 4 (d - 1) W / (d B M)

where B is the links' bandwidth (here of the outermost level that the devices need), a and W are bytes, and
the 4 and the 1 / M are those of the authors' code. M times it is what the planner estimates of the step.
Differences: tensor parallelism, a third dimension of the paper, is 1; a stage recomputes all layers or none,
while the paper chooses layer by layer; and the model is a chain, not a graph. Replicas share every
micro-batch, while they take turns in the paper, so a stage must fit with its shares of the micro-batches in
flight, not with ceil(k / d) whole ones (k: the replicas from it to the last stage).

In both: memory is pplan's ledger (SPP counts none), a stage that does not fit recomputes, and forbidden cuts
are excluded. More devices than `MOST_GROUPS` are grouped with their neighbours; cuts are thinned to `BLOCKS`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from typing import TYPE_CHECKING

import numpy as np

from ..candidate import Proposal
from ..search.space import Space
from ..stage_table import Floats, Indices
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
from .stage_programme import StagePlan, StageRule, Values, least_plans

if TYPE_CHECKING:
    from ..problem import Problem

BLOCKS = 60
"""Most blocks of layers between which a search may cut."""


class _Costs:
    """Costs of stages on consecutive groups of `each` devices, `groups` groups in all, for one choice."""

    def __init__(self, space: Space, choice: MicroBatchChoice, groups: int, each: int) -> None:
        self.space, self.choice, self.groups, self.each = space, choice, groups, each
        self.work, self.channel = cache(self._work), cache(self._channel)

    def ranks(self, size: int, used: int) -> tuple[int, ...]:
        """Return the devices of a stage of `size` groups; the stages from it on use `used` groups."""
        first = (self.groups - used) * self.each
        return tuple(range(first, first + size * self.each))

    def _work(self, size: int, used: int) -> ReplicaWork:
        return cost_replicas(self.space, self.choice, self.ranks(size, used))

    def spp_stage(self, size: int, to_last: int, rests: Indices, later: Values) -> Floats:
        """Return M (f + b) + AR of a stage, or what follows if that is slower."""
        works = [self.work(size, size + rest) for rest in rests.tolist()]
        in_flight, count = self.choice.in_flight(to_last), self.choice.micro_batches
        seconds = np.stack([count * work.work(in_flight) + work.all_reduce for work in works])
        return np.maximum(seconds, later[:, :, None])

    def spp_cut(self, size: int, following: int, rests: Indices, later: Values) -> Values:
        """Return M times the two transfers of a micro-batch between groups of replicas, or what follows."""
        return np.maximum([self.channel(size, following, rest) for rest in rests.tolist()], later)

    def _channel(self, size: int, following: int, rest: int) -> Floats:
        senders, receivers = self.ranks(size, size + rest), self.ranks(following, rest)
        latency, pace = self.space.routes.route(senders, receivers)
        crossing = self.work(size, size + rest).crossing * len(senders)
        return 2 * self.choice.micro_batches * (latency + pace * crossing)

    def piper_stage(self, size: int, to_last: int, rests: Indices, later: Values) -> Floats:
        """Return M times the compute, the transfers at both ends and the gradients' part of a micro-batch."""
        d, count = size * self.each, self.choice.micro_batches
        weights = np.asarray(self.space.table(self.space.chain.sizes[0]).stage_bytes.trainable)
        bandwidth = list_tiers(self.space.topology)[-1].bandwidth
        works = [self.work(size, size + rest) for rest in rests.tolist()]
        crossing = works[0].crossing
        moved = 2 * (crossing[:, None] + crossing) + 4 * (d - 1) / d * weights / count
        in_flight = self.choice.in_flight(to_last)
        seconds = np.stack([count * (work.work(in_flight) + moved / bandwidth) for work in works])
        return np.maximum(seconds, later[:, :, None])


def _propose(spp: bool, problem: Problem) -> Iterator[Proposal]:
    """Yield SPP's plan for each micro-batch size and stage count, or Piper's for each micro-batch size."""
    space = thin_cuts(problem.space, BLOCKS)
    for choice in micro_batch_choices(problem.configs):
        for plan, each in find_plans(space, choice, problem, spp=spp):
            yield choice.propose(space, plan.ends, [size * each for size in plan.sizes], plan.value)


PLANNERS = (Planner("spp", partial(_propose, True)), Planner("piper", partial(_propose, False)))


def find_plans(
    space: Space, choice: MicroBatchChoice, problem: Problem, *, spp: bool
) -> list[tuple[StagePlan, int]]:
    """Return the plans for one choice, each with the devices of a group.

    Args:
        space: Costs and limits.
        choice: Micro-batches.
        problem: What is asked.
        spp: Whether to return SPP's plans, by number of stages, instead of the one of Piper.
    """
    each, counts = group_choices(space, problem.usable_gpus)
    costs = _Costs(space, choice, problem.usable_gpus // each, each)
    rule = StageRule(costs.spp_stage, costs.spp_cut) if spp else StageRule(costs.piper_stage)
    most, cut_points = min(costs.groups, problem.stage_counts[-1]), len(space.usable)
    use_all = spp or problem.options.use_all
    plans = list[tuple[StagePlan, int]]()
    for sizes in counts:
        fitting = [
            size
            for size in sizes
            if size * each <= choice.size
            and problem.may_share(choice.size, [size * each])
            and space.fits_someone(choice.size, size * each)
        ]
        by_stages = least_plans(rule, fitting, costs.groups, cut_points, most, use_all=use_all)
        plans += [(plan, each) for plan in by_stages]
    return plans if spp else sorted(plans, key=lambda pair: pair[0].value)[:1]
