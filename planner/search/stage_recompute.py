"""What the stages of a pipeline recompute: the cheapest way in which each fits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...cost_models.memory import Recompute, count_first_layers, first_layers_word
from ...cost_models.runtime import OFFLOAD
from ...cost_models.schedules import find_schedule
from ..candidate import FIRST_LAYERS, UNPROPOSED, PipelineConfig, Proposal
from .replica_group import ReplicaGroupCosts
from .space import Space

OFFLOADS = -1
"""Instead of the cut point up to which a stage runs forward again: it offloads."""


def stage_modes(config: PipelineConfig) -> tuple[Recompute, ...]:
    """The ways in which a whole stage may recompute, the cheapest first; it may offload besides, where the
    configuration says so."""
    return ("never", "always") if config.recompute in ("by_stage", *UNPROPOSED) else (config.recompute,)


def stage_word(
    config: PipelineConfig, cut_points: Sequence[int], start: int, again: int, end: int
) -> Recompute:
    """What a stage between two cut points recomputes that runs again what lies before a third, or
    `OFFLOADS`."""
    if config.recompute not in ("by_stage", *UNPROPOSED):
        return config.recompute
    if again == OFFLOADS:
        return OFFLOAD
    if again in (start, end):
        return "never" if again == start else "always"
    return first_layers_word(cut_points[again] - cut_points[start])


def cheapest_mode(
    group: ReplicaGroupCosts, config: PipelineConfig, i: int, j: int, in_flight: float
) -> Recompute | None:
    """How a stage between two cut points recomputes so that it fits; None where it does not."""
    offloads = config.recompute == OFFLOAD and in_flight <= group.most_in_flight(OFFLOAD)[i, j]
    for mode in stage_modes(config):
        if mode == "always" and offloads and 2 * group.copy_seconds[i, j] < group.forward[i, j]:
            break
        if mode == "always" and config.recompute == FIRST_LAYERS:
            places = np.arange(i + 1, j)
            room = group.room(mode, np.full(len(places), i), np.full(len(places), j), again=places)
            fitting = places[in_flight <= room]
            if len(fitting):
                return stage_word(config, group.table.cut_points, i, int(fitting[0]), j)
        if in_flight <= group.most_in_flight(mode)[i, j]:
            return mode
    return OFFLOAD if offloads else None


def choose_modes(space: Space, proposal: Proposal) -> tuple[Recompute, ...] | None:
    """By stage, what recomputes in a linear pipeline; None where it does not fit, or a stage may not be."""
    config, cut_points = proposal.config, list(space.table(space.chain.sizes[0]).cut_points)
    schedule, stages, modes = find_schedule(config.schedule), len(proposal.ends), []
    for stage, ((first, end), devices) in enumerate(zip(proposal.bounds, proposal.devices, strict=True)):
        if not space.fits_someone(config.micro_batch_size, len(devices)):
            return None
        if len(devices) > config.micro_batch_size or first not in cut_points or end not in cut_points:
            return None
        group, i, j = (
            space.replica_group(config.micro_batch_size, devices),
            cut_points.index(first),
            cut_points.index(end),
        )
        if not space.usable[i, j]:
            return None
        in_flight = schedule.in_flight(stage, stages, config.micro_batches)
        mode = cheapest_mode(group, config, i, j, in_flight)
        if mode is None:
            return None
        modes.append(mode)
    return tuple(modes)


def repeat_end(cut_points: Sequence[int], start: int, end: int, mode: Recompute) -> int:
    """The cut point up to which a stage runs forward again; its start, where it does not."""
    first = count_first_layers(mode)
    if first is not None:
        return cut_points.index(cut_points[start] + first)
    return start if mode in ("never", OFFLOAD) else end
