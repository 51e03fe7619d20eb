"""Families of plans (a configuration on an order of the devices) and bounds that need no stage tables."""

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
"""Factor on a bound, so that rounding never lifts it above the step time."""


class RoughStage(NamedTuple):
    """A stage on devices of one kind.

    Attributes:
        end: Number of layers up to its end.
        kind: Index of the kind among those of the family.
        replicas: Number of devices.
        work: Seconds of a micro-batch on one device.
    """

    end: int
    kind: int
    replicas: int
    work: float


@dataclass(frozen=True)
class Family:
    """All pipelines of one configuration on one order of the devices.

    Attributes:
        config: Schedule, micro-batches and recomputation.
        placement: Order of the devices.
        replicas: Numbers of replicas that stages may have.
        on_all: Whether every device must be used.
    """

    config: PipelineConfig
    placement: Placement
    replicas: tuple[int, ...]
    on_all: bool = False
    any_count: bool = False
    """True if plans with other numbers of replicas are allowed. They are bounded but not searched."""


def splits_backward(config: PipelineConfig) -> bool:
    """Return whether the schedule computes weight gradients in separate actions."""
    return find_schedule(config.schedule).splits_backward


def may_have(stages: int, counts: Collection[int], *, deeper: bool) -> bool:
    """Return whether plans may have `stages` stages.

    Args:
        stages: Number of stages.
        counts: Searched numbers of stages.
        deeper: Whether every number above max(counts) is allowed, too.
    """
    return stages in counts or (deeper and stages > max(counts))


def distinct_families(families: Iterable[Family]) -> list[Family]:
    """Remove families that differ from an earlier one only in the order of the devices."""
    first = dict[object, Family]()
    for family in families:
        first.setdefault((family.config, family.replicas), family)
    return list(first.values())


def quick_bound(space: Space, family: Family) -> float:
    """Return a lower bound in seconds that needs no stage tables.

    It is the maximum of the work shared by all devices and of the launches shared by as many hosts as
    possible.
    """
    config, devices = family.config, len(family.placement.ranks)
    launches = space.least_launch_seconds(
        config.micro_batch_size, bounded_counts(family), devices, recompute=config.recompute == "always"
    )
    return max(shared_work(space, family), config.micro_batches * max(launches))


def shared_work(space: Space, family: Family) -> float:
    """Return a lower bound in seconds on the busiest stage of a step.

    Let w_l be the least device seconds of layer l over the allowed numbers of replicas, M the micro-batches,
    and D the devices in units of the fastest one. All devices finish M sum_l w_l within T seconds, and a
    device of half the speed does at most half of the work, so

        T >= M sum_l w_l / D
    """
    config, devices = family.config, _fast_devices(space, family)
    counts, recompute = bounded_counts(family), config.recompute == "always"
    share = 1 / config.micro_batches
    splits = splits_backward(config)
    work = space.cheapest_work(
        config.micro_batch_size, counts, recompute=recompute, first_share=share, splits=splits
    )
    return np.inf if work is None else float(config.micro_batches * work.sum() / devices)


def _fast_devices(space: Space, family: Family) -> float:
    """Return the number of devices in units of the fastest kind."""
    topology, ranks = space.topology, family.placement.ranks
    if len(topology.kinds) == 1 or any(kind.profile is not None for kind in topology.kinds):
        return float(len(ranks))
    fastest = max(kind.speed for kind in topology.kinds)
    if len(ranks) == topology.gpus:  # all devices, in some order
        return sum(device.speed * number for device, number in topology.groups) / fastest
    return sum(kind.speed * count for kind, count in topology.count_kinds(ranks).items()) / fastest


def bounded_counts(family: Family) -> list[int]:
    """Return the numbers of replicas for which a bound must hold.

    Of several numbers with the same share of a micro-batch, ceil(size / count), the fewest stand for all:
    they do the same with fewer devices.
    """
    devices, size = len(family.placement.ranks), family.config.micro_batch_size
    if not family.any_count:
        return [count for count in family.replicas if count <= devices]
    counts, count = [], 1
    while count <= min(size, devices):
        counts.append(count)
        per_replica_batch = divide_batch(size, count)
        count = devices + 1 if per_replica_batch == 1 else (size - 1) // (per_replica_batch - 1) + 1
    return counts
