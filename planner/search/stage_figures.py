"""Least costs of every stage on any devices of a kind: what the bound is made from.

Numbers of replicas with the same share of a micro-batch cost the same, so the fewest of them stand for all;
of very many shares neighbours are taken together, with the least of each figure of a layer. Transfers leave
by the ports of all levels at once, all-reduces send what any must send through the ports of a node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import pairwise
from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt

from ...cost_models.layer import MEASURED, LayerCosts, list_cut_points
from ...cost_models.memory import LedgerOptions, Recompute
from ...cost_models.topology import Device, Topology
from ..stage_table import Floats, Indices, StageTable, least_backward, ledger_options
from .family import Family, bounded_counts, splits_backward
from .least_collectives import all_reduce_pace, fastest_transfer
from .least_exchange import exposed_exchange
from .replica_group import ReplicaGroupCosts
from .space import Space, divide_batch
from .stage_recompute import stage_modes

LEAST_SHARES, MOST_ENTRIES = 48, 2e5
"""Replica shares that are told apart, at least; and stages of all shares, where there may be more."""


@dataclass(frozen=True)
class ReplicaRange:
    """Numbers of replicas from `fewest` to `most`, and the samples that a replica computes with them."""

    fewest: int
    most: int
    per_replica_batches: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class StageFigures:
    """Least costs of stages. A *choice* is a kind of device and numbers of replicas.

    By kind: `devices`, and `speed` relative to the fastest. By choice: `kind` and `replicas`, the fewest
    devices. By stage, sorted by start and end: `choice`; `start` and `end`, places of `cut_points`; seconds
    of a micro-batch `forward`, `backward` without recomputation, `accumulation` the part of it that the first
    of a step does not take, `exposed_allreduce`, `launches` of its host without recomputation (0 where one
    process launches for all stages), `cut` of the transfer to the next stage; `room`: by mode of
    recomputation, how many micro-batches may be in flight.
    """

    choices: Sequence[Choice]
    kinds: tuple[Device, ...]
    devices: Floats
    speed: Floats
    kind: Indices
    replicas: Indices
    cut_points: tuple[int, ...]
    choice: Indices
    start: Indices
    end: Indices
    forward: Floats
    backward: Floats
    accumulation: Floats
    exposed_allreduce: Floats
    launches: Floats
    cut: Floats
    room: dict[Recompute, Floats]


def make_stage_figures(space: Space, family: Family, limit: float) -> StageFigures | None:
    """The stages of a family that a plan below `limit` seconds may have; None where no number of replicas can
    be costed."""
    kinds, devices, speed, choices = list_choices(space, family)
    if not choices:
        return None
    config = family.config
    # Of a step at least M - 1 micro-batches of a stage take x each.
    longest = limit / (config.micro_batches - 1) if config.micro_batches > 1 else inf
    columns = [one.all_columns(longest) for one in choices]
    together = {name: np.concatenate([one[name] for one in columns]) for name in columns[0]}
    choice = np.repeat(np.arange(len(columns)), [len(one["start"]) for one in columns])
    order = np.lexsort((choice, together["end"], together["start"]))
    together = {name: values[order] for name, values in together.items()}
    return StageFigures(
        choices=choices,
        kinds=kinds,
        devices=devices,
        speed=speed,
        kind=np.array([one.place for one in choices]),
        replicas=np.array([one.counts.fewest for one in choices]),
        cut_points=choices[0].cut_points,
        choice=choice[order],
        room={mode: together.pop(mode) for mode in stage_modes(config)},
        **together,
    )


def list_choices(space: Space, family: Family) -> tuple[tuple[Device, ...], Floats, Floats, list[Choice]]:
    """The kinds of a family's devices, by kind how many there are and their speed relative to the fastest;
    and the choices of a stage, those on one kind in a row."""
    numbers_by_kind = space.topology.count_kinds(family.placement.ranks)
    kinds, numbers = tuple(numbers_by_kind), list(numbers_by_kind.values())
    counts, config = list(replica_counts(space, family)), family.config
    choices = [
        Choice(
            space,
            kind,
            place,
            kinds,
            each,
            config.micro_batch_size,
            stage_modes(config),
            splits_backward(config),
        )
        for place, kind in enumerate(kinds)
        for each in counts
        if each.fewest <= _as_fast(kind, kinds, numbers)
    ]
    return kinds, np.array(numbers, dtype=np.float64), _speeds(kinds), choices


@dataclass(frozen=True, eq=False)
class Choice:
    """Stages on numbers of replicas of a kind of device, of those with the least costs; `place` of the kind
    among all `kinds`."""

    space: Space
    kind: Device
    place: int
    kinds: tuple[Device, ...]
    counts: ReplicaRange
    size: int
    modes: tuple[Recompute, ...]
    splits: bool = False
    """A backward may be two actions: it takes the less of the whole and its parts."""

    @cached_property
    def cut_points(self) -> tuple[int, ...]:
        """Places of cuts, with both ends of the chain."""
        return tuple(list_cut_points(self.space.chain))

    @cached_property
    def seconds(self) -> StageTable:
        """Its seconds, before the kind's scale."""

        def table(batch: int) -> StageTable:
            whole = self.space.kind_table(self.kind, batch)
            if not self.splits:
                return whole
            least = least_backward(whole.costs, 0.0, splits=True)
            return StageTable(replace(whole.costs, backward_seconds=least), whole.cut_points)

        return _least_table(self.counts.per_replica_batches, table)

    @cached_property
    def table(self) -> StageTable:
        """Its bytes and launches."""
        return _least_table(self.counts.per_replica_batches, self.space.table)

    @property
    def ledger(self) -> LedgerOptions:
        """What the kind adds to every ledger, with the least context of all: it may share a stage with
        others."""
        first, *others = (
            ledger_options(kind, self.space.dtype, self.space.number_bytes, self.space.zero)
            for kind in (self.kind, *self.kinds)
        )
        return {**first, "context_bytes": min(other["context_bytes"] for other in others)}

    @cached_property
    def _slowest_backward(self) -> Floats:
        """(layers,): backward seconds of a replica, at most."""
        slowest: Floats = np.maximum.reduce(
            [
                self.space.kind_table(kind, batch).costs.backward_seconds * kind.seconds_scale
                for kind in self.kinds
                for batch in self.counts.per_replica_batches
            ]
        )
        return slowest

    def least_exposed(self) -> Floats:
        """(layers,): terms whose sum over a stage is a lower bound on its exposed all-reduce, if positive: no
        more of it is hidden than the backward takes."""
        sent = self.space.gradients(self.table.costs.trainable_bytes)
        pace = all_reduce_pace(self.space.topology, self.counts.fewest)
        exposed: Floats = sent * pace - self._slowest_backward
        return exposed

    def exposed_allreduce(self, per_node: int | None = None) -> Floats:
        """(cut points, cut points): lower bound on the exposed all-reduce of stages with at most `per_node`
        replicas in a node."""
        table, fewest = self.table, self.counts.fewest
        exposed = exposed_exchange(self.space, fewest, table, self._slowest_backward, per_node)
        return exposed + self.space.least_tied(table, fewest)

    def launches(self) -> Floats:
        """(layers,): seconds of the host for a micro-batch, without recomputation."""
        costs = self.table.costs
        launches: Floats = costs.forward_host_seconds + costs.backward_host_seconds
        return launches

    def _group(self) -> ReplicaGroupCosts:
        """The tables as of a replica group; its replicas are the most, of which each needs least memory."""
        scale = self.kind.seconds_scale
        return ReplicaGroupCosts(
            table=self.table,
            replicas=self.counts.most,
            per_replica_batch=self.counts.per_replica_batches[-1],
            size=self.size,
            forward=self.seconds.forward * scale,
            backward=self.seconds.backward * scale,
            accumulation=self.seconds.accumulation * scale,
            exposed_allreduce=self.exposed_allreduce(),
            limit=self.space.kinds_limit([self.kind]),
            optimizer=self.space.optimizer,
            ledger=self.ledger,
        )

    def all_columns(self, longest: float) -> dict[str, npt.NDArray[Any]]:
        """All stages that take no longer than `longest` seconds."""
        group = self._group()
        first = group.backward - group.accumulation
        start, end = at = np.nonzero(self.space.usable & (group.forward + first <= longest))
        launches = group.table.forward_launch[at] + group.table.backward_launch[at]
        rooms = {mode: group.most_in_flight(mode)[at] for mode in self.modes}
        return {
            "start": start,
            "end": end,
            "forward": group.forward[at],
            "backward": group.backward[at],
            "accumulation": group.accumulation[at],
            "exposed_allreduce": group.exposed_allreduce[at],
            "launches": np.zeros_like(launches) if self.space.one_process else launches,
            "cut": _cut_seconds(self.space.topology, group.table)[end],
            **rooms,
        }


def _speeds(kinds: Sequence[Device]) -> Floats:
    """(kinds,): relative to the fastest; 1 where a kind was profiled itself."""
    speeds = np.array([kind.speed for kind in kinds])
    return np.ones(len(kinds)) if any(kind.profile is not None for kind in kinds) else speeds / speeds.max()


def replica_counts(space: Space, family: Family) -> Iterator[ReplicaRange]:
    """The numbers of replicas that stages may have, those with the same share together."""
    size, devices = family.config.micro_batch_size, len(family.placement.ranks)
    most, counts = min(size, devices), bounded_counts(family)
    after = [count - 1 for count in counts[1:]] + [most]
    each = zip(counts, after if family.any_count else counts, strict=True)
    own = [(low, high) for low, high in each if high <= most and space.fits_someone(size, low)]
    groups = max(LEAST_SHARES, MOST_ENTRIES / (space.chain.max_stages + 1) ** 2)
    for group in _group_sizes(own, int(groups)):
        yield ReplicaRange(group[0][0], group[-1][1], tuple(divide_batch(size, low) for low, _ in group))


def _group_sizes(own: Sequence[tuple[int, int]], most: int) -> list[Sequence[tuple[int, int]]]:
    """The first half of `most` groups alone, the others with their neighbours."""
    if len(own) <= most:
        return [[each] for each in own]
    single = most // 2
    ends = np.geomspace(single, len(own), most - single + 1).round().astype(int)
    bounds = sorted({*range(single), *ends.tolist()})
    return [own[start:end] for start, end in pairwise(bounds)]


def _as_fast(kind: Device, kinds: Sequence[Device], numbers: Sequence[int]) -> int:
    """Devices of a stage whose slowest is of the kind: no more than there are as fast ones. Kinds that were
    profiled themselves may be slower for some layers and faster for others."""
    if any(other.profile is not None for other in kinds):
        return sum(numbers)
    return sum(n for other, n in zip(kinds, numbers, strict=True) if other.speed >= kind.speed)


def _least_table(sizes: Sequence[int], table: Callable[[int], StageTable]) -> StageTable:
    """The table of several micro-batch sizes together, with the least of every figure of a layer."""
    tables = [table(size) for size in sizes]
    if len(tables) == 1:
        return tables[0]
    return StageTable(reduce(_smaller, (one.costs for one in tables)), tables[0].cut_points)


def _smaller(one: LayerCosts, other: LayerCosts) -> LayerCosts:
    least = {name: np.minimum(getattr(one, name), getattr(other, name)) for name in MEASURED}
    return replace(one, input_bytes=min(one.input_bytes, other.input_bytes), **least)


def _cut_seconds(topology: Topology, table: StageTable) -> Floats:
    """(cut points,): the fastest transfer of a replica's share. A stage that follows with fewer replicas has
    a larger share to take."""
    bandwidth, latency = fastest_transfer(topology)
    seconds = table.crossing / bandwidth
    seconds[1:-1] += latency
    least_seconds: Floats = seconds
    return least_seconds


def spread_cuts(space: Space, places: int) -> npt.NDArray[np.bool_]:
    """Cuts at about equal distances in seconds, and those that are asked for."""
    costs, allowed = space.chain.at(space.chain.sizes[-1]), np.flatnonzero(space.chain.cut_after[:-1])
    cuts = np.zeros(len(space.chain), dtype=np.bool_)
    cuts[even_cuts(costs.forward_seconds + costs.backward_seconds, allowed, places - 1)] = True
    cuts[[*space.limits.must_cut, *_between_pins(space, allowed)]] = True
    return cuts


def even_cuts(work: Floats, allowed: Indices, parts: int) -> Indices:
    """The allowed cuts nearest to those into equal parts.

    Args:
        work: (layers,), not negative.
        allowed: Layers that a cut may follow, ascending.
        parts: Number of parts.

    Returns:
        Layers that cuts follow, ascending; fewer than `parts` - 1 where some would coincide.
    """
    before = np.cumsum(work)
    targets = before[-1] * np.arange(1, parts) / parts
    return np.unique(allowed[np.searchsorted(before[allowed], targets).clip(0, len(allowed) - 1)])


def _between_pins(space: Space, allowed: Indices) -> list[int]:
    """Allowed cuts, as many between pinned layers as lie between their stages."""
    cuts, before, stage = list[int](), 0, 0
    for layer, pinned in sorted(space.limits.pins):
        between = allowed[(allowed >= before) & (allowed < layer)]
        count = min(pinned - stage, len(between))
        cuts += between[np.linspace(0, len(between) - 1, count).round().astype(np.int64)].tolist()
        before, stage = layer, pinned
    return cuts
