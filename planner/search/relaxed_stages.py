"""What a stage costs at the least, on any devices of a kind: the tables of the relaxed problem.

Numbers of replicas with the same share of a micro-batch cost the same, so the fewest of them stand for all;
of very many shares neighbours are taken together, with the least of each figure of a layer. Transfers leave
by the ports of all levels at once, all-reduces send what any must send through the ports of a node.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise
from math import inf

import numpy as np
import numpy.typing as npt

from ...cost_models.hardware import Device
from ...cost_models.layer import MEASURED, LayerCosts
from ...cost_models.memory import LedgerOptions
from ...cost_models.topology import Topology
from ..stage_table import Floats, StageTable, ledger_options
from .least_collectives import fastest_transfer
from .least_exchange import exposed_exchange
from .replica_group import ReplicaGroupCosts
from .space import Space, divide_batch, with_cuts
from .stage_recompute import stage_modes
from .subproblem import Family, bounded_counts

MOST_PLACES = 97
"""Of longer chains stages are counted between as many cut points, without the layers around their cuts."""
MOST_SHARES = 48
SINGLE_SHARES = 24
"""So many stand alone where there are more."""


@dataclass(frozen=True)
class ReplicaRange:
    """Numbers of replicas from `fewest` to `most`, and the samples that a replica computes with them."""

    fewest: int
    most: int
    per_replica_batches: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class RelaxedStages:
    """Stages by (choice, place they start at, place they end at), inf where there is none. A choice is a kind
    of device and numbers of replicas.

    `kind`, `replicas` (choices,): which kind, and the fewest devices. Seconds of a micro-batch: `forward`,
    `backward` without recomputation, `accumulation` the part of it that the first of a step does not take;
    `exposed_allreduce`: of the all-reduce that follows; `launches`: of its host, without recomputation (0
    where one process launches for all stages); `cut` (choices, cut points): of the transfer to the next
    stage, by where it starts. `room`: by mode of recomputation, how many micro-batches may be in flight.
    `exact`: whether cut points are all cuts.
    """

    kinds: tuple[Device, ...]
    devices: Floats
    kind: npt.NDArray[np.int64]
    replicas: npt.NDArray[np.int64]
    forward: Floats
    backward: Floats
    accumulation: Floats
    exposed_allreduce: Floats
    launches: Floats
    cut: Floats
    room: dict[str, Floats]
    cut_points: tuple[int, ...]
    exact: bool


def make_relaxed_stages(space: Space, family: Family) -> RelaxedStages | None:
    """The tables of a family; None where no number of replicas can be costed."""
    config, topology = family.config, space.topology
    ranks = family.placement.ranks
    counts = list(replica_counts(space, family))
    if not counts:
        return None
    whole = space.table(counts[0].per_replica_batches[0])
    exact = whole.blocks < MOST_PLACES
    own = space if exact else with_cuts(space, _spread_cuts(space))
    numbers_by_kind = topology.count_kinds(ranks)
    kinds, numbers = tuple(numbers_by_kind), list(numbers_by_kind.values())
    size = config.micro_batch_size
    choices = [_choice(own, kind, kinds, each, size, exact=exact) for kind in kinds for each in counts]
    modes = stage_modes(config)
    usable = space.usable if exact else np.triu(np.ones_like(choices[0].forward, dtype=np.bool_), 1)

    def table(name: str) -> Floats:
        own = np.array([np.where(usable, getattr(choice, name), inf) for choice in choices])
        return np.where(within, own, inf)

    reach = [_as_fast(kind, kinds, numbers) for kind in kinds]
    within = np.array([each.fewest <= most for most in reach for each in counts])[:, None, None]
    stages = RelaxedStages(
        kinds=kinds,
        devices=np.array(numbers, dtype=np.float64),
        kind=np.repeat(np.arange(len(kinds)), len(counts)),
        replicas=np.array([each.fewest for _ in kinds for each in counts]),
        forward=table("forward"),
        backward=table("backward"),
        accumulation=table("accumulation"),
        exposed_allreduce=table("exposed_allreduce"),
        launches=np.array([_launch_seconds(own, choice.table) for choice in choices]),
        cut=np.array([_cut_seconds(topology, choice.table) for choice in choices]),
        room={mode: np.array([choice.most_in_flight(mode) for choice in choices]) for mode in modes},
        cut_points=choices[0].table.cut_points,
        exact=exact,
    )
    return stages if exact else _inner(stages)


def _launch_seconds(space: Space, table: StageTable) -> Floats:
    """(cut points, cut points): what each stage's host takes for a micro-batch, at the least."""
    seconds = table.forward_launch + table.backward_launch
    return np.zeros_like(seconds) if space.one_process else seconds


def replica_counts(space: Space, family: Family) -> Iterator[ReplicaRange]:
    """The numbers of replicas that stages may have, those with the same share together."""
    size, devices = family.config.micro_batch_size, len(family.placement.ranks)
    most, counts = min(size, devices), bounded_counts(family)
    after = [count - 1 for count in counts[1:]] + [most]
    each = zip(counts, after if family.any_count else counts, strict=True)
    own = [(low, high) for low, high in each if high <= most and space.fits_someone(size, low)]
    for group in _group_sizes(own):
        yield ReplicaRange(group[0][0], group[-1][1], tuple(divide_batch(size, low) for low, _ in group))


def _group_sizes(own: Sequence[tuple[int, int]]) -> list[Sequence[tuple[int, int]]]:
    if len(own) <= MOST_SHARES:
        return [[each] for each in own]
    ends = np.geomspace(SINGLE_SHARES, len(own), MOST_SHARES - SINGLE_SHARES + 1).round().astype(int)
    bounds = np.unique([*range(SINGLE_SHARES), *ends])
    return [own[start:end] for start, end in pairwise(bounds.tolist())]


def _choice(
    space: Space, kind: Device, kinds: Sequence[Device], counts: ReplicaRange, size: int, *, exact: bool
) -> ReplicaGroupCosts:
    """As a replica group of that kind; its replicas are the most, of which each needs the least memory."""
    timed = [
        _least(
            space.kind_table(kind, per_replica_batch).costs
            for per_replica_batch in counts.per_replica_batches
        )
    ]
    profiled = (
        timed if kind.profile is None else [_least(space.table(s).costs for s in counts.per_replica_batches)]
    )
    cut_points = space.table(counts.per_replica_batches[0]).cut_points
    seconds, table = StageTable(timed[0], cut_points), StageTable(profiled[0], cut_points)
    forward, backward, accumulation = (
        own * kind.seconds_scale for own in (seconds.forward, seconds.backward, seconds.accumulation)
    )
    slowest = np.maximum.reduce(
        [
            space.kind_table(other, per_replica_batch).costs.backward_seconds * other.seconds_scale
            for other in kinds
            for per_replica_batch in counts.per_replica_batches
        ]
    )
    exchanged = exposed_exchange(space, counts.fewest, table, slowest, exact=exact)
    # Between few cut points stages are taken without their outer layers, of which all users may be one.
    tied = space.least_tied(table, counts.fewest) if exact else 0.0
    return ReplicaGroupCosts(
        table=table,
        replicas=counts.most,
        per_replica_batch=counts.per_replica_batches[-1],
        size=size,
        forward=forward,
        backward=backward,
        accumulation=accumulation,
        exposed_allreduce=exchanged + tied,
        limit=_limit(space, kind),
        optimizer=space.optimizer,
        ledger=_ledger(space, kinds, kind),
    )


def _as_fast(kind: Device, kinds: Sequence[Device], numbers: Sequence[int]) -> int:
    """Devices of a stage whose slowest is of the kind: no more than there are as fast ones. Kinds that were
    profiled themselves may be slower for some layers and faster for others."""
    if any(other.profile is not None for other in kinds):
        return sum(numbers)
    return sum(n for other, n in zip(kinds, numbers, strict=True) if other.speed >= kind.speed)


def _limit(space: Space, kind: Device) -> float:
    own = [float(limit) for limit in (space.memory_limit, kind.memory_bytes) if limit is not None]
    return min(own, default=inf)


def _ledger(space: Space, kinds: Sequence[Device], kind: Device) -> LedgerOptions:
    """What the kind adds to every ledger, with the least context of all: it may share a stage with others."""
    first, *others = (
        ledger_options(own, space.dtype, space.number_bytes, space.zero) for own in (kind, *kinds)
    )
    contexts = [other["context_bytes"] for other in others]
    return {**first, "context_bytes": min(contexts)}


def _least(costs: Iterator[LayerCosts]) -> LayerCosts:
    """The least of every figure of a layer."""
    return reduce(_smaller, costs)


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


def _spread_cuts(space: Space) -> npt.NDArray[np.bool_]:
    """Cuts at about equal distances in seconds."""
    costs = space.chain.at(space.chain.sizes[-1])
    before = np.cumsum(costs.forward_seconds + costs.backward_seconds)
    allowed = np.flatnonzero(space.chain.cut_after[:-1])
    targets = np.linspace(0, before[-1], MOST_PLACES)[1:-1]
    cuts = np.zeros(len(space.chain), dtype=np.bool_)
    cuts[allowed[np.searchsorted(before[allowed], targets).clip(0, len(allowed) - 1)]] = True
    return cuts


def _inner(stages: RelaxedStages) -> RelaxedStages:
    """With cuts anywhere: place i stands for all cuts from it to before the next place, and a stage from one
    such cut to another for the layers that it holds whichever they are: those from the next place on."""

    def shift(values: Floats, empty: float) -> Floats:
        shifted = np.full_like(values, inf)
        shifted[:, :-1] = values[:, 1:]
        size = values.shape[1]
        start, end = np.indices((size, size))
        shifted[:, (end >= start) & (end <= start + 1) & (start < size - 1)] = empty
        shifted[:, end < start] = inf
        shifted[:, -1] = inf
        return shifted

    return replace(
        stages,
        forward=shift(stages.forward, 0.0),
        backward=shift(stages.backward, 0.0),
        accumulation=shift(stages.accumulation, 0.0),
        exposed_allreduce=shift(stages.exposed_allreduce, 0.0),
        launches=shift(stages.launches, 0.0),
        cut=np.zeros_like(stages.cut),
        room={mode: shift(values, inf) for mode, values in stages.room.items()},
    )
