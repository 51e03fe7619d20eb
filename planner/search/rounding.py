"""Plans near the solutions of the relaxed problem, on the devices that there are, in their order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..candidate import Proposal
from .placements import Placement
from .relaxed_problem import RelaxedProblem
from .relaxed_programme import CheapestStage
from .space import Space, divide_batch
from .subproblem import Family


@dataclass
class _RoundedStage:
    """A stage on devices of a kind: `work`, seconds of a micro-batch on one device."""

    end: int
    kind: int
    replicas: int
    work: float

    @property
    def seconds(self) -> float:
        """Of a micro-batch, more or less."""
        return self.work / self.replicas


def round_stages(
    space: Space,
    family: Family,
    problem: RelaxedProblem,
    pipeline: Sequence[CheapestStage],
    families: Sequence[Family],
) -> list[Proposal]:
    """The pipeline with its replicas changed until it has devices enough, and leaves none where more help,
    in each of the orders of the devices."""
    tables, stages = problem.stages, list[_RoundedStage]()
    cut_points = tables.cut_points
    for own in pipeline:
        replicas = int(tables.replicas[own.choice])
        at = own.choice, own.start, own.end
        seconds = float(tables.forward[at] + tables.backward[at])
        stages.append(
            _RoundedStage(cut_points[own.end], int(tables.kind[own.choice]), replicas, seconds * replicas)
        )
    ends = [stage.end for stage in stages]
    if any(end <= start for start, end in zip([0, *ends], ends, strict=False)):
        return []
    if not all(_fit_replicas(space, family, stages, kind, int(n)) for kind, n in enumerate(tables.devices)):
        return []
    orders = dict.fromkeys(own.placement for own in families if own.config == family.config)
    return [
        Proposal(family.config, tuple(ends), devices)
        for order in orders
        if (devices := _devices(space, order, problem, stages))
    ]


def _fit_replicas(
    space: Space, family: Family, stages: Sequence[_RoundedStage], kind: int, devices: int
) -> bool:
    """Changes the replicas on a kind of device until there are devices enough; whether there are."""
    own = [stage for stage in stages if stage.kind == kind]
    spare = devices - sum(stage.replicas for stage in own)
    counts = list(_counts(space, family))
    while spare < 0:
        shrinkable = [stage for stage in own if stage.replicas > counts[0]]
        if not shrinkable:
            return False
        stage = min(shrinkable, key=lambda own: own.work / _below(counts, own.replicas))
        fewer = _below(counts, stage.replicas)
        spare, stage.replicas = spare + stage.replicas - fewer, fewer
    while own:
        stage = max(own, key=lambda own: own.seconds)
        more = next((count for count in counts if count > stage.replicas), None)
        if more is None or more - stage.replicas > spare:
            break
        spare, stage.replicas = spare - more + stage.replicas, more
    return True


def _below(counts: Sequence[int], count: int) -> int:
    return max(own for own in counts if own < count)


def _counts(space: Space, family: Family) -> Iterator[int]:
    """Numbers of replicas that may be, of those with the same share the fewest."""
    size, last_size = family.config.micro_batch_size, -1
    counts = range(1, len(family.placement.ranks) + 1) if family.any_count else family.replicas
    for count in counts:
        if count <= size and divide_batch(size, count) != last_size and space.fits_someone(size, count):
            last_size = divide_batch(size, count)
            yield count


def _devices(
    space: Space, order: Placement, problem: RelaxedProblem, stages: Sequence[_RoundedStage]
) -> tuple[tuple[int, ...], ...]:
    """The next devices of its kind for every stage, in the order."""
    kinds, topology, ranks_in_order = problem.stages.kinds, space.topology, np.array(order.ranks)
    numbers = topology.kind_numbers(order.ranks)
    own = [ranks_in_order[numbers == topology.kinds.index(kind)].tolist() for kind in kinds]
    used_by_kind, ranks = [0] * len(kinds), []
    for stage in stages:
        first = used_by_kind[stage.kind]
        ranks.append(tuple(own[stage.kind][first : first + stage.replicas]))
        used_by_kind[stage.kind] += stage.replicas
    return tuple(ranks)
