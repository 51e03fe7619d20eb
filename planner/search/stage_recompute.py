"""Recomputation of the stages of a pipeline: the cheapest mode with which each stage fits."""

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
"""Value of `recompute_end` for a stage that offloads its activations instead of recomputing them."""


def stage_modes(config: PipelineConfig) -> tuple[Recompute, ...]:
    """Return the modes in which whole stages may recompute, cheapest first.

    `offload` comes in addition if the configuration allows it.
    """
    return ("never", "always") if config.recompute in ("by_stage", *UNPROPOSED) else (config.recompute,)


def name_recompute(
    config: PipelineConfig, cut_points: Sequence[int], start: int, recompute_end: int, end: int
) -> Recompute:
    """Return the recomputation mode of a stage.

    Args:
        config: Configuration, which fixes the mode or leaves it to the stages.
        cut_points: Numbers of layers before each cut point.
        start: Cut point where the stage begins.
        recompute_end: Cut point up to which its forward is recomputed, or `OFFLOADS`.
        end: Cut point where the stage ends.
    """
    if config.recompute not in ("by_stage", *UNPROPOSED):
        return config.recompute
    if recompute_end == OFFLOADS:
        return OFFLOAD
    if recompute_end in (start, end):
        return "never" if recompute_end == start else "always"
    return first_layers_word(cut_points[recompute_end] - cut_points[start])


def cheapest_mode(
    group: ReplicaGroupCosts, config: PipelineConfig, i: int, j: int, in_flight: float
) -> Recompute | None:
    """Return the cheapest recomputation with which a stage fits.

    Args:
        group: Costs of all stages on the devices.
        config: Configuration of the pipeline.
        i: Cut point where the stage begins.
        j: Cut point where the stage ends.
        in_flight: Micro-batches in flight.

    Returns:
        The mode; None if the stage fits with none.
    """
    offloads = config.recompute == OFFLOAD and in_flight <= group.most_in_flight(OFFLOAD)[i, j]
    for mode in stage_modes(config):
        if mode == "always" and offloads and 2 * group.copy_seconds[i, j] < group.forward[i, j]:
            break
        if mode == "always" and config.recompute == FIRST_LAYERS:
            places = np.arange(i + 1, j)
            room = group.room(mode, np.full(len(places), i), np.full(len(places), j), recompute_end=places)
            fitting = places[in_flight <= room]
            if len(fitting):
                return name_recompute(config, group.table.cut_points, i, int(fitting[0]), j)
        if in_flight <= group.most_in_flight(mode)[i, j]:
            return mode
    return OFFLOAD if offloads else None


def choose_modes(space: Space, proposal: Proposal) -> tuple[Recompute, ...] | None:
    """Return the recomputation mode of each stage of a linear pipeline.

    Returns:
        Modes by stage; None if a stage does not fit or is not allowed.
    """
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
    """Return the cut point up to which a stage recomputes its forward; its start if nothing is recomputed."""
    first = count_first_layers(mode)
    if first is not None:
        return cut_points.index(cut_points[start] + first)
    return start if mode in ("never", OFFLOAD) else end
