"""Changes with which a plan from a configuration would fit, where none does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..cost_models.errors import InfeasibleError, UsageError
from ..cost_models.quantities import format_seconds
from ..cost_models.topology import Topology
from ..cost_models.transformer.rank_costs import RankCosts, TopologyLinks
from ..cost_models.transformer.transformer_shape import TransformerShape
from ..planner.degrees.degree_options import DegreeOptions
from ..planner.degrees.degree_refusals import FREE_VALUES
from ..planner.degrees.degree_search import search_degrees

MOST_GPUS = 16
"""Devices of a machine for which changes are tried: of many a search takes long."""
LEAST_SEQUENCE = 256
"""Tokens of the shortest sequence that is tried."""
_MOST_TIMES = 8
"""Times as many devices that are tried."""


def fitting_changes(
    shape: TransformerShape, options: DegreeOptions, topology: Topology, costs: RankCosts, limit_bytes: float
) -> Iterator[str]:
    """Find changes that make a plan fit, each alone, with the step of the fastest plan then.

    Args:
        shape: The model.
        options: Options under which nothing fits.
        topology: The machine.
        costs: Seconds of kernels on it.
        limit_bytes: The most that the ledger of a device may add up to.

    Returns:
        The smallest change of each kind that is enough, as `sequence=2048 (1.2 s a step)`.
    """
    if topology.gpus > MOST_GPUS:
        return
    for kind in _changes(options, topology.gpus, can_offload=costs.host_bandwidth is not None):
        for words, change in kind:
            own, machine = dict(change), topology
            if "gpus" in own:
                machine = topology.with_gpus(own.pop("gpus"))
            links = costs.links
            if isinstance(links, TopologyLinks):
                links = replace(links, topology=machine)
            try:
                answer = search_degrees(
                    shape, machine.gpus, replace(costs, links=links), replace(options, **own), limit_bytes
                )
            except (InfeasibleError, UsageError):
                continue
            yield f"{words} ({format_seconds(answer.plans[0].estimate.step_seconds)} a step)"
            break


def _changes(
    options: DegreeOptions, gpus: int, *, can_offload: bool
) -> Iterator[Sequence[tuple[str, Mapping[str, Any]]]]:
    """Changes by kind, the smallest first."""
    for name, value in FREE_VALUES.items():
        if getattr(options, name) != value:
            yield [(f"any `{name}`", {name: value})]
    if can_offload and not options.offload and options.implementation == "megatron":
        yield [("`offload`", {"offload": True})]
    lengths, length = [], options.sequence // 2
    while length >= LEAST_SEQUENCE:
        lengths.append((f"sequence={length}", {"sequence": length}))
        length //= 2
    yield lengths
    times, counts = 2, []
    while times <= _MOST_TIMES:
        counts.append((f"gpus={times * gpus}", {"gpus": times * gpus}))
        times *= 2
    yield counts
