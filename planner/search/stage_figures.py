"""Least costs of every stage on any devices of a kind, from which the memory bound is built.

Numbers of replicas with the same share of a micro-batch cost the same, so the fewest of them stand for all.
If there are very many shares, neighbours are merged with the least of each layer's figures. Transfers leave
by the ports of all levels at once. An all-reduce sends what any all-reduce must send through the ports of a
node.
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
"""Least number of replica shares that stay separate, and most stages over all shares if there are more."""


@dataclass(frozen=True)
class ReplicaRange:
    """Numbers of replicas from `fewest` to `most`, and the samples per replica with each of them."""

    fewest: int
    most: int
    per_replica_batches: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class StageFigures:
    """Least costs of stages by *choice*: a kind of device and a range of numbers of replicas.

    Arrays over stages are sorted by start and end. Seconds are those of one micro-batch.

    Attributes:
        choices: The choices.
        kinds: Kinds of devices.
        devices: (kinds,) number of devices.
        speed: (kinds,) speed relative to the fastest.
        kind: (choices,) kind of device.
        replicas: (choices,) fewest replicas.
        cut_points: Numbers of layers before each cut point.
        choice: (stages,) choice.
        start: (stages,) cut point where the stage begins.
        end: (stages,) cut point where it ends.
        forward: (stages,) forward seconds.
        backward: (stages,) backward seconds without recomputation.
        accumulation: (stages,) seconds that the first backward of a step saves.
        exposed_allreduce: (stages,) seconds of the all-reduce after the last backward.
        launches: (stages,) host seconds without recomputation; 0 if one process launches for all stages.
        cut: (stages,) seconds of the transfer to the next stage.
        room: By recomputation mode, (stages,) micro-batches that may be in flight.
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
    """Return the least costs of the stages that a plan below `limit` seconds may have.

    Args:
        space: Costs and limits.
        family: Configuration and devices, whose bound the figures serve.
        limit: Seconds of the best known step.

    Returns:
        The figures; None if no number of replicas has known costs.
    """
    kinds, devices, speed, choices = list_choices(space, family)
    if not choices:
        return None
    config = family.config
    # At least M - 1 micro-batches of a stage take x seconds each within a step.
    longest = limit / (config.micro_batches - 1) if config.micro_batches > 1 else inf
    columns = [column.all_columns(longest) for column in choices]
    together = {name: np.concatenate([column[name] for column in columns]) for name in columns[0]}
    choice = np.repeat(np.arange(len(columns)), [len(column["start"]) for column in columns])
    order = np.lexsort((choice, together["end"], together["start"]))
    together = {name: values[order] for name, values in together.items()}
    return StageFigures(
        choices=choices,
        kinds=kinds,
        devices=devices,
        speed=speed,
        kind=np.array([column.place for column in choices]),
        replicas=np.array([column.counts.fewest for column in choices]),
        cut_points=choices[0].cut_points,
        choice=choice[order],
        room={mode: together.pop(mode) for mode in stage_modes(config)},
        **together,
    )


def list_choices(space: Space, family: Family) -> tuple[tuple[Device, ...], Floats, Floats, list[Choice]]:
    """Return the kinds of a family's devices and the choices of a stage.

    Returns:
        Kinds, (kinds,) number of devices, (kinds,) speed relative to the fastest, and choices sorted by kind.
    """
    numbers_by_kind = space.topology.count_kinds(family.placement.ranks)
    kinds, numbers = tuple(numbers_by_kind), list(numbers_by_kind.values())
    counts, config = list(replica_counts(space, family)), family.config
    choices = [
        Choice(
            space,
            kind,
            place,
            kinds,
            replica_range,
            config.micro_batch_size,
            stage_modes(config),
            splits_backward(config),
        )
        for place, kind in enumerate(kinds)
        for replica_range in counts
        if replica_range.fewest <= _as_fast(kind, kinds, numbers)
    ]
    return kinds, np.array(numbers, dtype=np.float64), _speeds(kinds), choices


@dataclass(frozen=True, eq=False)
class Choice:
    """Stages on a kind of device and a range of numbers of replicas, with the least costs of these.

    Attributes:
        space: Costs and limits.
        kind: Kind of the slowest device of a stage.
        place: Index of the kind.
        kinds: All kinds.
        counts: Numbers of replicas.
        size: Samples of a micro-batch.
        modes: Recomputation modes, cheapest first.
    """

    space: Space
    kind: Device
    place: int
    kinds: tuple[Device, ...]
    counts: ReplicaRange
    size: int
    modes: tuple[Recompute, ...]
    splits: bool = False
    """True if a backward may be two actions. It then costs the smaller of the whole and the sum of its
    parts."""

    @cached_property
    def cut_points(self) -> tuple[int, ...]:
        """Numbers of layers before each cut point, both ends of the chain included."""
        return tuple(list_cut_points(self.space.chain))

    @cached_property
    def seconds(self) -> StageTable:
        """Least seconds of all stages, before the kind's scale."""

        def table(batch: int) -> StageTable:
            whole = self.space.kind_table(self.kind, batch)
            if not self.splits:
                return whole
            least = least_backward(whole.costs, 0.0, splits=True)
            return StageTable(replace(whole.costs, backward_seconds=least), whole.cut_points)

        return _least_table(self.counts.per_replica_batches, table)

    @cached_property
    def table(self) -> StageTable:
        """Least bytes and launch seconds of all stages."""
        return _least_table(self.counts.per_replica_batches, self.space.table)

    @property
    def ledger(self) -> LedgerOptions:
        """Options of the memory ledger for the kind, with the least context of all kinds.

        A stage may have devices of several kinds, so the least context is counted.
        """
        first, *rest = (
            ledger_options(kind, self.space.dtype, self.space.number_bytes, self.space.zero)
            for kind in (self.kind, *self.kinds)
        )
        return {**first, "context_bytes": min(options["context_bytes"] for options in rest)}

    @cached_property
    def _slowest_backward(self) -> Floats:
        """(layers,) most backward seconds of a replica."""
        slowest: Floats = np.maximum.reduce(
            [
                self.space.kind_table(kind, batch).costs.backward_seconds * kind.seconds_scale
                for kind in self.kinds
                for batch in self.counts.per_replica_batches
            ]
        )
        return slowest

    def least_exposed(self) -> Floats:
        """Return (layers,) seconds whose sum over a stage is a lower bound on its exposed all-reduce.

        The backward hides at most its own seconds of the all-reduce. A negative sum means no bound.
        """
        sent = self.space.gradients(self.table.costs.trainable_bytes)
        pace = all_reduce_pace(self.space.topology, self.counts.fewest)
        exposed: Floats = sent * pace - self._slowest_backward
        return exposed

    def exposed_allreduce(self, per_node: int | None = None) -> Floats:
        """Return a lower bound on the exposed all-reduce of all stages.

        Args:
            per_node: Most replicas of a stage in one node. None for no limit.

        Returns:
            (cut points, cut points) seconds.
        """
        table, fewest = self.table, self.counts.fewest
        exposed = exposed_exchange(self.space, fewest, table, self._slowest_backward, per_node)
        return exposed + self.space.least_tied(table, fewest)

    def launches(self) -> Floats:
        """Return (layers,) host seconds of a micro-batch, without recomputation."""
        costs = self.table.costs
        launches: Floats = costs.forward_host_seconds + costs.backward_host_seconds
        return launches

    def _group(self) -> ReplicaGroupCosts:
        """Return the tables as a replica group, for a lower bound on seconds and bytes.

        Its replicas are the most of the range: with more replicas, each needs less memory.
        """
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
        """Return the figures of all stages that take at most `longest` seconds for a micro-batch."""
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
    """Return (kinds,) speeds relative to the fastest; 1 if a kind has its own profile."""
    speeds = np.array([kind.speed for kind in kinds])
    return np.ones(len(kinds)) if any(kind.profile is not None for kind in kinds) else speeds / speeds.max()


def replica_counts(space: Space, family: Family) -> Iterator[ReplicaRange]:
    """Yield the numbers of replicas that stages may have, grouped by share of a micro-batch."""
    size, devices = family.config.micro_batch_size, len(family.placement.ranks)
    most, counts = min(size, devices), bounded_counts(family)
    last_counts = [count - 1 for count in counts[1:]] + [most]
    pairs = zip(counts, last_counts if family.any_count else counts, strict=True)
    shares = [(low, high) for low, high in pairs if high <= most and space.fits_someone(size, low)]
    groups = max(LEAST_SHARES, MOST_ENTRIES / (space.chain.max_stages + 1) ** 2)
    for group in _group_sizes(shares, int(groups)):
        yield ReplicaRange(group[0][0], group[-1][1], tuple(divide_batch(size, low) for low, _ in group))


def _group_sizes(ranges: Sequence[tuple[int, int]], most: int) -> list[Sequence[tuple[int, int]]]:
    """Return at most `most` groups of ranges: half of them single, the rest merged with neighbours."""
    if len(ranges) <= most:
        return [[single_range] for single_range in ranges]
    single = most // 2
    ends = np.geomspace(single, len(ranges), most - single + 1).round().astype(int)
    bounds = sorted({*range(single), *ends.tolist()})
    return [ranges[start:end] for start, end in pairwise(bounds)]


def _as_fast(kind: Device, kinds: Sequence[Device], numbers: Sequence[int]) -> int:
    """Return the most devices of a stage whose slowest device is of the kind: all that are as fast.

    Kinds with their own profiles may be slower for some layers and faster for others, so all devices count.
    """
    if any(candidate.profile is not None for candidate in kinds):
        return sum(numbers)
    return sum(n for candidate, n in zip(kinds, numbers, strict=True) if candidate.speed >= kind.speed)


def _least_table(sizes: Sequence[int], table: Callable[[int], StageTable]) -> StageTable:
    """Return one table with the least of every layer's figures over several micro-batch sizes."""
    tables = [table(size) for size in sizes]
    if len(tables) == 1:
        return tables[0]
    return StageTable(reduce(_smaller, (stage_table.costs for stage_table in tables)), tables[0].cut_points)


def _smaller(one: LayerCosts, other: LayerCosts) -> LayerCosts:
    """Return layer costs with the smaller of each figure."""
    least = {name: np.minimum(getattr(one, name), getattr(other, name)) for name in MEASURED}
    return replace(one, input_bytes=min(one.input_bytes, other.input_bytes), **least)


def _cut_seconds(topology: Topology, table: StageTable) -> Floats:
    """Return (cut points,) seconds of the fastest transfer of a replica's share.

    A next stage with fewer replicas has larger shares to receive, which takes longer.
    """
    bandwidth, latency = fastest_transfer(topology)
    seconds = table.crossing / bandwidth
    seconds[1:-1] += latency
    least_seconds: Floats = seconds
    return least_seconds


def spread_cuts(space: Space, places: int) -> npt.NDArray[np.bool_]:
    """Return a mask of cuts at about equal distances in seconds, with those that the options require."""
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
    """Return as many allowed cuts between pinned layers as the difference of their stages requires."""
    cuts, first_layer, stage = list[int](), 0, 0
    for layer, pinned in sorted(space.limits.pins):
        between = allowed[(allowed >= first_layer) & (allowed < layer)]
        count = min(pinned - stage, len(between))
        cuts += between[np.linspace(0, len(between) - 1, count).round().astype(np.int64)].tolist()
        first_layer, stage = layer, pinned
    return cuts
