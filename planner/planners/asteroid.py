"""Asteroid: hybrid pipelines on unlike devices, whose replicas take unequal shares of a micro-batch.

Ye et al., "Asteroid: Resource-Efficient Hybrid Pipeline Parallelism for Collaborative DNN Training on
Heterogeneous Edge Devices", MobiCom 2024 (arXiv:2408.08015), section 3. Devices stand by their memory, the
most first; a stage has a run of them. A round, pplan's step, of M micro-batches passes steps, the stages and
the transfers between them, of E_f and E_b seconds a micro-batch. Its latency is the longest over the steps s
of waiting, executing and all-reducing,

    T_w = sum of E_f before s
    T_e = M (E_f + E_b) of the dominant step + sum of E_f + E_b from s to it (- from it to s)
    T_a = 2 (g - 1) W / (g B) for g replicas

where the dominant step has the largest M (E_f + E_b) + sum of E_f + E_b before it. As T_w + T_e takes the
sums apart, that is

    max over c of (M (E_f + E_b)_c + sum of E_f + E_b before c) + max over s of (T_a - sum of E_b before s)

The dynamic programme adds a stage in front of what it has for the layers, devices and stages behind, and
keeps of each the plan with the least latency. E_f and E_b of a stage are those of its slowest replica, with
the shares of Algorithm 1. A stage that is the p-th from the last holds 2 p - 1
micro-batches.

Algorithm 1, for every stage on unlike replicas: shares by the replicas' speed, within their memory; what is
too much goes to those that end first with it; then parts move from the slowest replica to others as long as
that is faster. As every part that is moved makes the slowest replica faster, and seconds only grow with the
samples, no shares are better.

Here bytes are pplan's ledger, transfers and all-reduces take pplan's seconds, shares are multiples of
1/32 micro-batch, cuts are thinned to `BLOCKS`, and more devices than `MOST_GROUPS` stay together with their
neighbours. pplan's plans have equal shares, with which its simulator judges the proposal; `shared_step`
simulates it with its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
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

if TYPE_CHECKING:
    from ..problem import Problem

BLOCKS = 40
"""Blocks of layers between which a search may cut."""
MOST_SHARES = 32
"""Into so many parts a micro-batch is divided among replicas, at the most."""


class SharedStages(NamedTuple):
    """Every stage, (cut points, cut points), on a group of devices: E_f and E_b, inf for what does not fit;
    `shares` (devices, cut points, cut points): the parts of a micro-batch that each device takes."""

    forward: Floats
    backward: Floats
    shares: Indices


@dataclass(frozen=True, eq=False)
class ShareTables:
    """What shares of a micro-batch take and need on each kind of device; `parts` of a micro-batch of
    `choice.size` samples, each of `unit`."""

    space: Space
    choice: MicroBatchChoice
    _times: dict[Device, tuple[Floats, Floats]] = field(default_factory=dict)
    _fits: dict[tuple[Device, int], Indices] = field(default_factory=dict)

    @cached_property
    def parts(self) -> int:
        """Into how many a micro-batch is divided."""
        size = self.choice.size
        counts = (count for count in range(1, MOST_SHARES + 1) if size % count == 0)
        return max((count for count in counts if self.space.fits_someone(size // count, 1)), default=0)

    @property
    def unit(self) -> int:
        """Samples of a part."""
        return self.choice.size // max(self.parts, 1)

    @property
    def mode(self) -> Recompute:
        """Asteroid does not recompute, unless nothing else is allowed."""
        return "never" if {"never", "by_stage"} & set(self.choice.modes) else "always"

    @cached_property
    def most(self) -> int:
        """Parts that a device may take, as far as they can be costed."""
        most = 0
        while most < self.parts and self.space.fits_someone((most + 1) * self.unit, 1):
            most += 1
        return most

    def times(self, kind: Device) -> tuple[Floats, Floats]:
        """(parts + 1, cut points, cut points): forward and backward seconds of so many parts."""
        if kind not in self._times:
            tables = [self.space.kind_table(kind, n * self.unit) for n in range(1, self.most + 1)]
            again = 1 if self.mode == "always" else 0
            forward = [np.zeros(self.space.usable.shape), *(own.forward for own in tables)]
            backward = [np.zeros_like(forward[0]), *(own.backward + again * own.forward for own in tables)]
            scale = kind.seconds_scale
            self._times[kind] = (np.stack(forward) * scale, np.stack(backward) * scale)
        return self._times[kind]

    def room(self, kind: Device, in_flight: int) -> Indices:
        """(cut points, cut points): the most parts that fit; -1 where not even the weights do."""
        if (kind, in_flight) not in self._fits:
            space, limit = self.space, min(kind.memory_bytes or inf, self.space.memory_limit or inf)
            room = np.full(space.usable.shape, self.most)
            if limit < inf:
                options = ledger_options(kind, space.dtype, space.number_bytes, space.zero)
                room[:] = 0
                for n in range(1, self.most + 1):
                    table = space.kind_table(kind, n * self.unit)
                    need = table.memory(in_flight, self.mode, space.optimizer, 1, **options)
                    room = np.where((room == n - 1) & (need <= limit), n, room)
            self._fits[kind, in_flight] = np.where(space.usable, room, -1)
        return self._fits[kind, in_flight]

    def share(self, kinds: Sequence[Device], in_flight: int) -> SharedStages:
        """Algorithm 1 for every stage on devices of these kinds."""
        if len(set(kinds)) == 1:
            return self._share_evenly(kinds[0], len(kinds), in_flight)
        forward = np.stack([self.times(kind)[0] for kind in kinds])
        backward = np.stack([self.times(kind)[1] for kind in kinds])
        room = np.stack([self.room(kind, in_flight) for kind in kinds])
        seconds = forward + backward
        shares = _by_speed(seconds, np.maximum(room, 0), self.parts)
        shares = _offload(seconds, np.maximum(room, 0), shares)
        fits = (shares.sum(axis=0) == self.parts) & (room >= 0).all(axis=0)
        slowest = [
            np.where(fits, np.take_along_axis(own, shares[:, None], axis=1)[:, 0].max(axis=0), inf)
            for own in (forward, backward)
        ]
        return SharedStages(slowest[0], slowest[1], shares)

    def _share_evenly(self, kind: Device, count: int, in_flight: int) -> SharedStages:
        """The same for devices of one kind."""
        least, larger = divmod(self.parts, count)
        most = least + (larger > 0)
        own = least + (np.arange(count) < larger)
        shares = np.broadcast_to(own[:, None, None], (count, *self.space.usable.shape))
        if most > self.most:
            nothing = np.full(self.space.usable.shape, inf)
            return SharedStages(nothing, nothing, shares)
        forward, backward = (
            np.where(most <= self.room(kind, in_flight), t[most], inf) for t in self.times(kind)
        )
        return SharedStages(forward, backward, shares)


def _by_speed(seconds: Floats, room: Indices, parts: int) -> Indices:
    """(devices, ...): parts in proportion to the speed of the devices, as many as have room; what is left
    goes, part by part, to the device that ends first with it."""
    speed = 1 / np.maximum(seconds[:, -1], 1e-300)
    shares: Indices = np.minimum((parts * speed / speed.sum(axis=0)).astype(np.int64), room)
    for _ in range(parts):
        receiver, longer = _next_receiver(seconds, room, shares)
        adds = (shares.sum(axis=0) < parts) & np.isfinite(longer)
        if not adds.any():
            break
        _add(shares, receiver, adds.astype(np.int64))
    return shares


def _offload(seconds: Floats, room: Indices, shares: Indices) -> Indices:
    """The shares, with parts moved from the slowest device as long as the one that takes a part is faster."""
    for _ in range(shares.shape[0] * seconds.shape[1]):
        own = np.take_along_axis(seconds, shares[:, None], axis=1)[:, 0]
        slowest, longest = own.argmax(axis=0), own.max(axis=0)
        receiver, longer = _next_receiver(seconds, room, shares)
        moves = longer < longest
        if not moves.any():
            break
        _add(shares, slowest, -moves.astype(np.int64))
        _add(shares, receiver, moves.astype(np.int64))
    return shares


def _next_receiver(seconds: Floats, room: Indices, shares: Indices) -> tuple[Indices, Floats]:
    """The device that ends first with a part more, and when; inf where none has room."""
    more = np.minimum(shares + 1, seconds.shape[1] - 1)
    longer = np.take_along_axis(seconds, more[:, None], axis=1)[:, 0]
    longer = np.where(shares < room, longer, inf)
    return longer.argmin(axis=0), longer.min(axis=0)


def _add(shares: Indices, device: Indices, amount: Indices) -> None:
    """Adds to the share of one device of every stage."""
    own = np.take_along_axis(shares, device[None], axis=0)
    np.put_along_axis(shares, device[None], own + amount[None], axis=0)


@dataclass(frozen=True)
class AsteroidPlan:
    """By stage the cut point it ends at, its devices, and the samples of a micro-batch that each takes; the
    latency of a round."""

    ends: tuple[int, ...]
    devices: tuple[tuple[int, ...], ...]
    samples: tuple[tuple[int, ...], ...]
    latency_seconds: float


class _State(NamedTuple):
    """By first cut point, of the layers behind it on so many devices: the two terms of the latency, where the
    first stage ends, and its devices."""

    aligned: Floats
    reduced: Floats
    end: Indices
    group: Indices


@dataclass(frozen=True, eq=False)
class AsteroidSearch:
    """The dynamic programme for one choice on groups of `each` devices, by memory."""

    space: Space
    choice: MicroBatchChoice
    order: tuple[int, ...]
    each: int
    sizes: Sequence[int]
    _stages: dict[tuple[tuple[Device, ...], int], SharedStages] = field(default_factory=dict)

    @cached_property
    def tables(self) -> ShareTables:
        """Of the shares."""
        return ShareTables(self.space, self.choice)

    @property
    def groups(self) -> int:
        """Of devices."""
        return len(self.order) // self.each

    def ranks(self, devices: int, count: int) -> tuple[int, ...]:
        """The first `count` groups of the last `devices` ones."""
        first = (self.groups - devices) * self.each
        return self.order[first : first + count * self.each]

    def stages(self, ranks: Sequence[int], to_last: int) -> SharedStages:
        """What all stages take there, so many stages from the last."""
        kinds = tuple(self.space.topology.device(rank) for rank in ranks)
        in_flight = min(2 * to_last - 1, self.choice.micro_batches)
        if (kinds, in_flight) not in self._stages:
            self.space.budget.check()
            self._stages[kinds, in_flight] = self.tables.share(kinds, in_flight)
        return self._stages[kinds, in_flight]

    def reduced(self, ranks: Sequence[int]) -> Floats:
        """T_a of every stage."""
        trainable = np.asarray(self.space.table(self.space.chain.sizes[0]).stage_bytes.trainable)
        return np.asarray(all_reduce_seconds(self.space.topology, ranks, self.space.gradients(trainable)))

    def sent(self, senders: tuple[int, ...], receivers: tuple[int, ...]) -> Floats:
        """(cut points,): seconds of a micro-batch across each cut, one way."""
        latency, each = self.space.routes.route(tuple(sorted(senders)), tuple(sorted(receivers)))
        measured = self.tables.most * self.tables.unit
        return latency + each * self.space.table(measured).crossing * self.choice.size / measured

    def best(self, most_stages: int) -> AsteroidPlan | None:
        """The plan with the least latency that the programme keeps; None where none fits."""
        if not self.tables.most:
            return None
        layers: list[dict[int, _State]] = []
        best: tuple[float, int] = (inf, 0)
        for to_last in range(1, most_stages + 1):
            layers.append({})
            for devices in range(to_last, self.groups + 1):
                states = [
                    state
                    for count in self.sizes
                    if (state := self._extend(layers, devices, count)) is not None
                ]
                if states:
                    layers[-1][devices] = _least(states)
            if self.groups in layers[-1]:
                state = layers[-1][self.groups]
                best = min(best, (float(state.aligned[0] + state.reduced[0]), to_last))
        return self._trace_back(layers[: best[1]], best[0]) if best[0] < inf else None

    def _extend(self, layers: list[dict[int, _State]], devices: int, count: int) -> _State | None:
        """A stage on so many groups in front of the best of the devices behind them."""
        ranks, behind = self.ranks(devices, count), devices - count
        if behind < 0 or (len(layers) == 1) != (behind == 0) or (behind and behind not in layers[-2]):
            return None
        own, reduced = self.stages(ranks, len(layers)), self.reduced(ranks)
        seconds, number = own.forward + own.backward, self.choice.micro_batches
        if behind == 0:
            end = np.full(len(seconds), len(seconds) - 1)
            return _State(number * seconds[:, -1], reduced[:, -1], end, np.full(len(end), count))
        after = layers[-2][behind]
        sent = np.zeros(len(seconds))
        for receivers in np.unique(after.group).tolist():
            to_these = self.sent(ranks, self.ranks(behind, receivers))
            sent = np.where(after.group == receivers, to_these, sent)
        aligned = np.maximum(2 * number * sent, after.aligned + 2 * sent)
        waiting = np.maximum(0.0, after.reduced - sent)
        with np.errstate(invalid="ignore"):
            all_aligned = np.maximum(number * seconds, aligned[None, :] + seconds)
            all_reduced = np.maximum(reduced, waiting[None, :] - own.backward)
        totals = np.where(np.isfinite(all_aligned), all_aligned + all_reduced, inf)
        end = totals.argmin(axis=1)
        rows = np.arange(len(end))
        return _State(all_aligned[rows, end], all_reduced[rows, end], end, np.full(len(end), count))

    def _trace_back(self, layers: Sequence[dict[int, _State]], latency: float) -> AsteroidPlan:
        place, devices, ends, ranks, samples = 0, self.groups, list[int](), [], []
        for to_last in range(len(layers), 0, -1):
            state = layers[to_last - 1][devices]
            count, end = int(state.group[place]), int(state.end[place])
            own = self.ranks(devices, count)
            shares = self.stages(own, to_last).shares[:, place, end] * self.tables.unit
            by_rank = sorted(zip(own, shares.tolist(), strict=True))
            ranks.append(tuple(rank for rank, _ in by_rank))
            samples.append(tuple(share for _, share in by_rank))
            ends.append(end)
            place, devices = end, devices - count
        return AsteroidPlan(tuple(ends), tuple(ranks), tuple(samples), latency)


def _least(states: Sequence[_State]) -> _State:
    """Of each first cut point the state with the least latency."""
    totals = np.stack([state.aligned + state.reduced for state in states])
    best = np.where(np.isfinite(totals), totals, inf).argmin(axis=0)[None]
    parts = [np.take_along_axis(np.stack(own), best, axis=0)[0] for own in zip(*states, strict=True)]
    return _State(*parts)


def find_asteroid_plan(problem: Problem, choice: MicroBatchChoice) -> AsteroidPlan | None:
    """The plan for one micro-batch size on all devices; None where none fits. Its ends are numbers of
    layers."""
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
    """Simulated seconds of a step whose replicas take so many samples of each micro-batch, by stage and rank;
    transfers and all-reduces are those of equal shares."""
    assembly = assemble(space, proposal, ["never"] * len(proposal.ends))
    forward, backward = (np.zeros((len(samples), 1, 1)) for _ in range(2))
    for stage, (own, ranks) in enumerate(zip(samples, proposal.devices, strict=True)):
        at = assembly.bounds[stage]
        for share, rank in zip(own, ranks, strict=True):
            if share:
                kind = space.topology.device(rank)
                table, scale = space.kind_table(kind, share), kind.seconds_scale
                forward[stage] = np.maximum(forward[stage], table.forward[at] * scale)
                backward[stage] = np.maximum(backward[stage], table.backward[at] * scale)
    costs = replace(assembly.costs(), forward=forward, backward=backward, accumulation=None)
    return float(step_seconds(assembly.program, costs)[0])


def shared_load(space: Space, plan: AsteroidPlan, choice: MicroBatchChoice) -> tuple[float, dict[int, float]]:
    """The bytes of the device that needs most, and the seconds that each rank computes in a step, with the
    samples that it takes."""
    most, busy, places = 0.0, dict[int, float](), list(space.table(space.chain.sizes[0]).cut_points)
    mode = ShareTables(space, choice).mode
    for stage, (start, end) in enumerate(pairwise((0, *plan.ends))):
        in_flight = min(2 * (len(plan.ends) - stage) - 1, choice.micro_batches)
        for rank, own in zip(plan.devices[stage], plan.samples[stage], strict=True):
            if own == 0:
                busy[rank] = 0.0
                continue
            kind = space.topology.device(rank)
            options = ledger_options(kind, space.dtype, space.number_bytes, space.zero)
            table = space.kind_table(kind, own)
            need = table.memory(in_flight, mode, space.optimizer, 1, **options)
            at = places.index(start), places.index(end)
            most = max(most, float(need[at]))
            seconds = float((table.forward + table.backward)[at]) * kind.seconds_scale
            busy[rank] = choice.micro_batches * seconds
    return most, busy


def _propose(problem: Problem) -> Iterator[Proposal]:
    """For each micro-batch size the plan with the least latency."""
    for choice in micro_batch_choices(problem.configs):
        plan = find_asteroid_plan(problem, choice)
        if plan is not None:
            config = choice.config(recomputes=False)
            yield Proposal(config, plan.ends, plan.devices, plan.latency_seconds)


PLANNERS = (Planner("asteroid", _propose),)
