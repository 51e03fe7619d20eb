"""The levels of bandwidth that PipeDream's programme plans on, and the devices of the stages it makes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import gcd, prod

from ...cost_models.topology import Topology
from .pipedream_table import Part, Tier


def tiers_of(topology: Topology) -> tuple[tuple[Tier, ...], str]:
    """The levels from the innermost, and in words what they leave out (nothing: an empty string).

    A level whose last group has fewer members is planned in the largest groups that all are made of: 12
    devices in nodes of 8 as three groups of 4, joined as nodes are; 9 as single devices. The links are then
    as slow as between nodes, or slower than they are.
    """
    tiers, inner, whole = list[Tier](), 1, 1
    uneven = False
    for level in topology.levels:
        whole = topology.gpus if level.size is None else min(whole * level.size, topology.gpus)
        group = gcd(whole, topology.gpus)
        uneven = uneven or group < whole
        if group > inner:
            tiers.append(Tier(group // inner, level.link.bandwidth_bytes_per_second))
            inner = group
        if whole == topology.gpus:
            break
    if not tiers:
        tiers = [Tier(1, topology.levels[0].link.bandwidth_bytes_per_second)]
    note = f"the groups of a level are uneven: planned as {_shape(tiers)} devices" if uneven else ""
    return tuple(tiers), note


def _shape(tiers: Sequence[Tier]) -> str:
    return " x ".join(str(tier.machines) for tier in reversed(tiers))


def devices_of(parts: Sequence[Part], tiers: Sequence[Tier]) -> list[tuple[int, ...]]:
    """The ranks of every stage of devices, in order: components are taken in turn.

    A stage of an outer level on several components has its inner stages on each of them: their replicas are
    those of all copies.
    """
    return list(_devices(parts, [tier.machines for tier in tiers], [0]))


def _devices(
    parts: Sequence[Part], machines: Sequence[int], bases: Sequence[int]
) -> Iterator[tuple[int, ...]]:
    size, first = prod(machines[:-1]), 0
    for part in parts:
        copies = [base + size * (first + own) for base in bases for own in range(part.replicas)]
        first += part.replicas
        if part.inner:
            yield from _devices(part.inner, machines[:-1], copies)
        else:
            yield tuple(copies)
