"""Asteroid: hybrid pipelines on different devices, whose replicas take unequal shares of a micro-batch.

Ye et al., "Asteroid: Resource-Efficient Hybrid Pipeline Parallelism for Collaborative DNN Training on
Heterogeneous Edge Devices", MobiCom 2024 (arXiv:2408.08015), section 3. Devices are sorted by memory, largest
first, and a stage has a run of them. A round (pplan's step) of M micro-batches passes steps: the stages and
the transfers between them, with E_f and E_b seconds a micro-batch. Its latency is the largest sum over the
steps s of waiting, executing and all-reducing,

    T_w = sum of E_f before s
    T_e = M (E_f + E_b) of the dominant step + sum of E_f + E_b from s to it (- from it to s)
    T_a = 2 (g - 1) W / (g B) for g replicas

where the dominant step has the largest M (E_f + E_b) + sum of E_f + E_b before it. Rearranging the sums of
T_w + T_e gives

    max over c of (M (E_f + E_b)_c + sum of E_f + E_b before c) + max over s of (T_a - sum of E_b before s)

The dynamic programme adds a stage in front of the plans for the later layers, devices and stages. For each of
these, and each number of devices of the first stage, it keeps the plan with the least latency. E_f and E_b of
a stage are those of its slowest replica. The p-th stage from the end holds 2 p - 1 micro-batches.

The paper's Algorithm 1 finds the shares of different replicas by their speed, within their memory; then parts
move from the slowest replica to others while that is faster. It ends with the fastest slowest replica,
because seconds grow with samples. Here the parts that end first are taken, which gives the same result.

Differences: bytes are those of pplan's ledger, transfers and all-reduces take pplan's seconds, shares are
multiples of 1/32 micro-batch, cuts are thinned to `BLOCKS`, and more devices than `MOST_GROUPS` are grouped
with their neighbours. pplan's plans have equal shares, with which the simulator judges the proposal.
`shared_step` simulates it with the unequal shares.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ...cost_models.collectives import all_reduce_seconds
from ...cost_models.memory import Recompute
from ...cost_models.timeline import step_seconds
from ...cost_models.topology import Device
from ..candidate import Proposal
from ..scoring import assemble
from ..search.space import Space
from ..stage_table import Floats, Indices, ledger_options
from .base import Planner
from .replica_groups import MicroBatchChoice, group_choices, micro_batch_choices, thin_cuts
from .stage_programme import StageRule, Values, least_plans

if TYPE_CHECKING:
    from ..problem import Problem

BLOCKS = 40
"""Most blocks of layers between which a search may cut."""
MOST_SHARES = 32
"""Most parts into which a micro-batch is divided among replicas."""


class SharedStages(NamedTuple):
    """Figures of every stage, (cut points, cut points), on a group of devices.

    Attributes:
        forward: E_f, inf for what does not fit.
        backward: E_b, inf for what does not fit.
        shares: (devices, cut points, cut points) parts of a micro-batch that each device takes.
    """

    forward: Floats
    backward: Floats
    shares: Indices


class ShareTables:
    """Seconds and bytes of shares of a micro-batch on each kind of device.

    `parts`: number of parts of a micro-batch; 0 if none has known costs. `unit`: samples of a part. `most`:
    most parts of a device, as far as costs are known. `mode`: recomputation; none, unless nothing else is
    allowed. `share`: function that divides micro-batches among devices of given kinds, with a number in
    flight, for every stage.

    Args:
        space: Costs and limits.
        choice: Micro-batches.
    """

    def __init__(self, space: Space, choice: MicroBatchChoice) -> None:
        self.space, self.choice = space, choice
        counts = [n for n in range(1, MOST_SHARES + 1) if choice.size % n == 0]
        self.parts = max((n for n in counts if space.fits_someone(choice.size // n, 1)), default=0)
        self.unit = choice.size // max(self.parts, 1)
        shorter = (n for n in range(self.parts) if not space.fits_someone((n + 1) * self.unit, 1))
        self.most = next(shorter, self.parts)
        self.mode: Recompute = "never" if {"never", "by_stage"} & set(choice.modes) else "always"
        self._times, self._room, self.share = cache(self._cost), cache(self._fit), cache(self._share)

    def need(self, kind: Device, samples: int, in_flight: int) -> Floats:
        """Return the bytes of every stage on a device of a kind that takes `samples` samples."""
        options = ledger_options(kind, self.space.dtype, self.space.number_bytes, self.space.zero)
        table = self.space.kind_table(kind, samples)
        return table.memory(in_flight, self.mode, self.space.optimizer, 1, **options)

    def _cost(self, kind: Device) -> Floats:
        """Return (2, parts + 1, cut points, cut points) forward and backward seconds by number of parts."""
        times = np.zeros((2, self.most + 1, *self.space.usable.shape))
        for n in range(1, self.most + 1):
            table = self.space.kind_table(kind, n * self.unit)
            times[:, n] = table.forward, table.backward + (self.mode == "always") * table.forward
        return times * kind.seconds_scale

    def _fit(self, kind: Device, in_flight: int) -> Indices:
        """Return (cut points, cut points) most parts that fit; -1 if the stage is not allowed."""
        room = np.full(self.space.usable.shape, self.most)
        if (limit := self.space.kinds_limit([kind])) < inf:
            room[:] = 0
            for n in range(1, self.most + 1):
                need = self.need(kind, n * self.unit, in_flight)
                room = np.where((room == n - 1) & (need <= limit), n, room)
        return np.where(self.space.usable, room, -1)

    def _share(self, kinds: tuple[Device, ...], in_flight: int) -> SharedStages:
        self.space.budget.check()
        times = [self._times(kind) for kind in kinds]
        room = np.stack([self._room(kind, in_flight) for kind in kinds])
        shares = (
            _even_shares(self.parts, room) if len(set(kinds)) == 1 else _least_shares(times, room, self.parts)
        )
        fits = (shares <= room).all(axis=0) & (shares.sum(axis=0) == self.parts)
        parts = np.minimum(shares, self.most)
        seconds = np.max(
            [
                np.take_along_axis(kind_times, share[None, None], axis=1)[:, 0]
                for kind_times, share in zip(times, parts, strict=True)
            ],
            axis=0,
        )
        forward, backward = np.where(fits, seconds, inf)
        return SharedStages(forward, backward, shares)


def _even_shares(parts: int, room: Indices) -> Indices:
    """Divide parts among equal devices. The first ones get one more if they do not divide evenly."""
    least, larger = divmod(parts, len(room))
    shares = least + (np.arange(len(room)) < larger)
    return np.broadcast_to(shares[:, None, None], room.shape)


def _least_shares(times: Sequence[Floats], room: Indices, parts: int) -> Indices:
    """Divide parts so that the slowest device is as fast as possible, by taking the parts that end first."""
    seconds = np.stack([kind_times.sum(axis=0)[1:] for kind_times in times])
    count = np.arange(1, seconds.shape[1] + 1)[:, None, None]
    ends = np.where(count <= room[:, None], seconds, inf)
    earliest = ends.reshape(-1, *room.shape[1:]).argsort(axis=0, kind="stable")[:parts]
    device_of = earliest // seconds.shape[1]
    return np.stack([(device_of == device).sum(axis=0) for device in range(len(times))])


@dataclass(frozen=True)
class AsteroidPlan:
    """Plan with unequal shares.

    Attributes:
        ends: Cut points where the stages end.
        devices: Devices by stage.
        samples: Samples of a micro-batch that each device takes, by stage.
        latency_seconds: Latency of a round.
    """

    ends: tuple[int, ...]
    devices: tuple[tuple[int, ...], ...]
    samples: tuple[tuple[int, ...], ...]
    latency_seconds: float


class AsteroidSearch:
    """Dynamic programme for one choice on groups of `each` devices, sorted by memory."""

    def __init__(
        self, space: Space, choice: MicroBatchChoice, order: Sequence[int], each: int, sizes: Sequence[int]
    ) -> None:
        self.space, self.choice, self.order, self.each, self.sizes = space, choice, order, each, sizes
        self.tables = ShareTables(space, choice)
        trainable = np.asarray(space.table(space.chain.sizes[0]).stage_bytes.trainable)
        self._gradients = space.gradients(trainable)

    def ranks(self, size: int, used: int) -> tuple[int, ...]:
        """Return the devices of a stage of `size` groups; the stages from it on use `used` groups."""
        first = len(self.order) - used * self.each
        return tuple(self.order[first : first + size * self.each])

    def stages(self, ranks: Sequence[int], to_last: int) -> SharedStages:
        """Return the figures of all stages on these devices, `to_last` stages before the end."""
        in_flight = min(2 * to_last - 1, self.choice.micro_batches)
        return self.tables.share(tuple(map(self.space.topology.device, ranks)), in_flight)

    def _stage(self, size: int, to_last: int, rests: Indices, later: Values) -> Floats:
        """Return the two terms of the latency with a stage in front."""
        ranks = [self.ranks(size, size + rest) for rest in rests.tolist()]
        by_rest = [self.stages(stage_ranks, to_last) for stage_ranks in ranks]
        forward, backward = (np.stack(stage_ranks) for stage_ranks in list(zip(*by_rest, strict=True))[:2])
        reduced = np.stack(
            [
                np.asarray(all_reduce_seconds(self.space.topology, stage_ranks, self._gradients))
                for stage_ranks in ranks
            ]
        )
        seconds, (aligned, waiting) = forward + backward, later[..., None, :]
        aligned = np.maximum(self.choice.micro_batches * seconds, aligned + seconds)
        with np.errstate(invalid="ignore"):
            terms = np.stack([aligned, np.maximum(reduced, waiting - backward)])
        return np.where(np.isfinite(aligned), terms, inf)

    def _cut(self, size: int, following: int, rests: Indices, later: Values) -> Values:
        """Return the two terms with the transfer before the following stage, a step of equal directions."""
        measured, sent = self.tables.most * self.tables.unit, list[Floats]()
        crossing = self.space.table(measured).crossing * self.choice.size / measured
        for rest in rests.tolist():
            senders, receivers = sorted(self.ranks(size, size + rest)), sorted(self.ranks(following, rest))
            latency, pace = self.space.routes.route(tuple(senders), tuple(receivers))
            sent.append(latency + pace * crossing)
        seconds = np.stack(sent)
        aligned = np.maximum(2 * self.choice.micro_batches * seconds, later[0] + 2 * seconds)
        return np.stack([aligned, np.maximum(0.0, later[1] - seconds)])

    def best(self, most_stages: int) -> AsteroidPlan | None:
        """Return the plan with the least latency that the programme keeps; None if none fits."""
        groups, cut_points = len(self.order) // self.each, len(self.space.usable)
        rule = StageRule(self._stage, self._cut, terms=2)
        sizes = self.sizes if self.tables.most else []
        plan = min(least_plans(rule, sizes, groups, cut_points, most_stages), default=None)
        if plan is None:
            return None
        used, devices, samples = groups, [], []
        for stage, (at, size) in enumerate(zip(pairwise((0, *plan.ends)), plan.sizes, strict=True)):
            ranks = self.ranks(size, used)
            shares = self.stages(ranks, len(plan.ends) - stage).shares[:, *at] * self.tables.unit
            by_rank = sorted(zip(ranks, shares.tolist(), strict=True))
            devices.append(tuple(rank for rank, _ in by_rank))
            samples.append(tuple(share for _, share in by_rank))
            used -= size
        return AsteroidPlan(plan.ends, tuple(devices), tuple(samples), plan.value)


def find_asteroid_plan(problem: Problem, choice: MicroBatchChoice) -> AsteroidPlan | None:
    """Return the plan for one micro-batch size on all devices; None if none fits.

    Its ends are numbers of layers.
    """
    space, gpus = thin_cuts(problem.space, BLOCKS), problem.usable_gpus
    each, counts = group_choices(space, gpus)
    order = sorted(range(gpus), key=lambda rank: -(space.topology.device(rank).memory_bytes or inf))
    most = min(gpus // each, problem.stage_counts[-1])
    searches = [
        AsteroidSearch(space, choice, tuple(order[: gpus // each * each]), each, sizes) for sizes in counts
    ]
    plans = [plan for search in searches if (plan := search.best(most)) is not None]
    if not plans:
        return None
    plan = min(plans, key=lambda plan: plan.latency_seconds)
    cut_points = space.table(space.chain.sizes[0]).cut_points
    return replace(plan, ends=tuple(cut_points[end] for end in plan.ends))


def shared_step(space: Space, proposal: Proposal, samples: Sequence[Sequence[int]]) -> float:
    """Return the simulated step seconds of replicas with unequal shares.

    Transfers and all-reduces are those of equal shares.

    Args:
        space: Costs and limits.
        proposal: The plan.
        samples: Samples of each micro-batch by stage and rank.
    """
    assembly = assemble(space, proposal, ["never"] * len(proposal.ends))
    seconds = np.zeros((2, len(samples), 1, 1))
    for stage, (stage_samples, ranks) in enumerate(zip(samples, proposal.devices, strict=True)):
        at = assembly.bounds[stage]
        for share, rank in zip(stage_samples, ranks, strict=True):
            if share:
                kind = space.topology.device(rank)
                table, scale = space.kind_table(kind, share), kind.seconds_scale
                share_seconds = np.array([table.forward[at], table.backward[at]]) * scale
                seconds[:, stage, 0, 0] = np.maximum(seconds[:, stage, 0, 0], share_seconds)
    costs = replace(assembly.costs(), forward=seconds[0], backward=seconds[1], accumulation=None)
    return float(step_seconds(assembly.program, costs)[0])


def shared_load(space: Space, plan: AsteroidPlan, choice: MicroBatchChoice) -> tuple[float, dict[int, float]]:
    """Return the bytes of the fullest device, and the compute seconds of each rank in a step."""
    tables, most, busy = ShareTables(space, choice), 0.0, dict[int, float]()
    places = [space.table(space.chain.sizes[0]).cut_points.index(end) for end in (0, *plan.ends)]
    for stage, at in enumerate(pairwise(places)):
        in_flight = min(2 * (len(plan.ends) - stage) - 1, choice.micro_batches)
        for rank, share in zip(plan.devices[stage], plan.samples[stage], strict=True):
            busy[rank] = 0.0
            if share:
                kind = space.topology.device(rank)
                most = max(most, float(tables.need(kind, share, in_flight)[at]))
                table = space.kind_table(kind, share)
                seconds = float((table.forward + table.backward)[at]) * kind.seconds_scale
                busy[rank] = choice.micro_batches * seconds
    return most, busy


def _propose(problem: Problem) -> Iterator[Proposal]:
    """Yield the plan with the least latency for each micro-batch size."""
    for choice in micro_batch_choices(problem.configs):
        plan = find_asteroid_plan(problem, choice)
        if plan is not None:
            config = choice.config(recomputes=False)
            yield Proposal(config, plan.ends, plan.devices, plan.latency_seconds)


PLANNERS = (Planner("asteroid", _propose),)
