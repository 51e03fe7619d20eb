"""Families of plans: a configuration on an order of the devices, and bounds that need no tables of stages."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...cost_models.schedules import find_schedule
from ..candidate import PipelineConfig
from .placements import Placement
from .space import Space, divide_batch

SAFE = 1 - 1e-9
"""Factor on a bound, so that rounding never lifts it above a step."""


class RoughStage(NamedTuple):
    """A stage on devices of a kind: the layer that it ends before, the place of the kind among those of its
    family, replicas, and the seconds of a micro-batch on one device."""

    end: int
    kind: int
    replicas: int
    work: float


@dataclass(frozen=True)
class Family:
    """The pipelines of a configuration on an order of the devices, whose stages have these numbers of
    replicas; `on_all`: only those that leave no device free."""

    config: PipelineConfig
    placement: Placement
    replicas: tuple[int, ...]
    on_all: bool = False
    any_count: bool = False
    """Plans with other numbers of replicas are allowed, too; they are bounded, not searched."""


def splits_backward(config: PipelineConfig) -> bool:
    """Return whether the weights' gradients are actions of their own."""
    return find_schedule(config.schedule).splits_backward


def may_have(stages: int, counts: Collection[int], *, deeper: bool) -> bool:
    """Return whether plans may have so many stages: one of `counts`, with `deeper` also any larger number."""
    return stages in counts or (deeper and stages > max(counts))


def distinct_families(families: Iterable[Family]) -> list[Family]:
    """The families without those that differ from an earlier one by the order of the devices alone."""
    first = dict[object, Family]()
    for family in families:
        first.setdefault((family.config, family.replicas), family)
    return list(first.values())


def quick_bound(space: Space, family: Family) -> float:
    """A bound that needs no tables of stages: the work shared by all devices, and the launches by as many
    hosts as there can be."""
    config, devices = family.config, len(family.placement.ranks)
    launches = space.least_launch_seconds(
        config.micro_batch_size, bounded_counts(family), devices, recompute=config.recompute == "always"
    )
    return max(shared_work(space, family), config.micro_batches * max(launches))


def shared_work(space: Space, family: Family) -> float:
    """A bound on the work of the stage that has most: all work, as cheap as any number of replicas that is
    allowed makes each layer, shared over all devices by their speed. A replica of a stage does its share of
    the work in no more than a step, so that a device of half the speed does half of it at the most."""
    config, devices = family.config, _fast_devices(space, family)
    counts, recompute = bounded_counts(family), config.recompute == "always"
    share = 1 / config.micro_batches
    splits = splits_backward(config)
    work = space.cheapest_work(
        config.micro_batch_size, counts, recompute=recompute, first_share=share, splits=splits
    )
    return np.inf if work is None else float(config.micro_batches * work.sum() / devices)


def _fast_devices(space: Space, family: Family) -> float:
    """How many of the fastest kind the devices are worth at the most."""
    topology, ranks = space.topology, family.placement.ranks
    if len(topology.kinds) == 1 or any(kind.profile is not None for kind in topology.kinds):
        return float(len(ranks))
    fastest = max(kind.speed for kind in topology.kinds)
    if len(ranks) == topology.gpus:  # all of them, in some order
        return sum(device.speed * number for device, number in topology.groups) / fastest
    return sum(kind.speed * count for kind, count in topology.count_kinds(ranks).items()) / fastest


def bounded_counts(family: Family) -> list[int]:
    """The numbers of replicas that a bound holds for: of those with the same share the fewest, which do the
    same with less."""
    devices, size = len(family.placement.ranks), family.config.micro_batch_size
    if not family.any_count:
        return [count for count in family.replicas if count <= devices]
    counts, count = [], 1
    while count <= min(size, devices):
        counts.append(count)
        per_replica_batch = divide_batch(size, count)
        count = devices + 1 if per_replica_batch == 1 else (size - 1) // (per_replica_batch - 1) + 1
    return counts
