"""Asynchronous pipelines, which are never flushed: program, steady state in the simulator, and plan.

A micro-batch of PipeDream is a whole global batch, and each one updates the weights. PipeDream-2BW, XPipe and
WPipe update after all micro-batches of a global batch. 2BW needs at least as many micro-batches as stages,
WPipe a multiple: it runs rounds of one micro-batch per stage, and updates a group of layers between two
rounds. Replicas share every micro-batch, as in all plans. The step of such a plan is the time of one more
global batch once the pipeline is full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from ..cost_models.collectives import all_reduce_seconds
from ..cost_models.memory import Recompute
from ..cost_models.quantities import format_count
from ..cost_models.schedules import find_schedule, xpipe_staleness
from ..cost_models.step_costs import Costs
from ..cost_models.timeline import simulate, steady_state
from .assembly import Assembly
from .candidate import PipelineConfig, Proposal, ScoredPlan
from .scoring import assemble, device_modes
from .search.space import Space
from .stage_table import Floats

PIPEDREAM, TWO_VERSIONS, XPIPE, WPIPE = "pipedream", "pipedream-2bw", "xpipe", "wpipe"
ASYNCHRONOUS = (PIPEDREAM, TWO_VERSIONS, XPIPE, WPIPE)
PREDICTING = ("adam", "adamw", "adamw-8bit")
"""Optimizers with the two moments from which XPipe predicts weights."""
ROUNDS = 12
"""First number of micro-batches per stage to simulate. It doubles until the steady state is reached."""
MOST_ROUNDS = 96
"""Most micro-batches per stage to simulate."""


def assemble_endless(
    space: Space, proposal: Proposal, modes: Sequence[Recompute], rounds: int = ROUNDS
) -> Assembly:
    """Return the pipeline as it runs without end, as input of the simulator.

    Args:
        space: Costs and limits.
        proposal: The plan.
        modes: Recomputation by part of the layers.
        rounds: Micro-batches per stage to simulate.
    """
    assembly, config = assemble(space, proposal, modes), proposal.config
    stages = len(proposal.ends) // config.virtual_stages
    # WPipe runs whole rounds of one micro-batch per stage.
    count = -(-max(rounds * stages, 4 * config.micro_batches) // stages) * stages
    program = find_schedule(config.schedule).program(stages, count, config.virtual_stages)
    return replace(assembly, program=replace(program, update_every=config.micro_batches))


def steady_seconds(space: Space, proposal: Proposal, modes: Sequence[Recompute]) -> float:
    """Return the simulated seconds of one more global batch.

    Args:
        space: Costs and limits.
        proposal: The plan.
        modes: Recomputation by part of the layers.
    """
    rounds, micro_batch_seconds = ROUNDS, 0.0
    while rounds <= MOST_ROUNDS:
        assembly = assemble_endless(space, proposal, modes, rounds)
        state = steady_state(assembly.program, assembly.costs())
        micro_batch_seconds = state.seconds_per_micro_batch
        if state.exact:
            break
        rounds *= 2
    return micro_batch_seconds * proposal.config.micro_batches


def score_endless(space: Space, proposal: Proposal) -> ScoredPlan | None:
    """Return the plan with the least recomputation that its devices need; None if one has no room."""
    assembly = assemble_endless(space, proposal, ["never"] * len(proposal.ends), 1)
    modes = device_modes(space, assembly, proposal)
    if modes is None:
        return None
    by_part = tuple(modes[place.device] for place in assembly.program.pipes[0])
    return ScoredPlan(proposal, by_part, steady_seconds(space, proposal, by_part))


@lru_cache(maxsize=1)
def assemble_candidate(space: Space, plan: ScoredPlan) -> Assembly:
    """Return a scored plan as input of the simulator, without end under an asynchronous schedule.

    The last result is cached.
    """
    make = assemble_endless if plan.config.schedule in ASYNCHRONOUS else assemble
    return make(space, plan.proposal, plan.recompute)


def bubble(space: Space, plan: ScoredPlan) -> float:
    """Return the idle share of the devices' time, in the steady state of an asynchronous schedule."""
    assembly = assemble_candidate(space, plan)
    costs, stages = assembly.costs(), assembly.program.devices
    if plan.config.schedule not in ASYNCHRONOUS:
        return simulate(assembly.program, costs).bubble
    forward, backward = np.asarray(costs.forward), np.asarray(costs.backward)
    recompute = 0.0 if costs.recompute is None else costs.recompute * forward
    busy = float((forward + backward + recompute)[:, :, 0].sum()) * plan.config.micro_batches
    return 1 - busy / (stages * plan.step_seconds)


def asynchronous_notes(plan: ScoredPlan) -> list[str]:
    """Return notes on weight versions, stale gradients and the meaning of the step."""
    config, stages = plan.config, len(plan.proposal.ends) // plan.config.virtual_stages
    schedule, count = find_schedule(config.schedule), max(config.micro_batches, stages)
    versions = [schedule.weight_versions(stage, stages, count) for stage in range(stages)]
    predicted = ", two of them predicted" if config.schedule == XPIPE else ""
    first = " in the first group of layers and never in the second" if config.schedule == WPIPE else ""
    stale = [_updates_late(config, stage, stages) for stage in range(stages)]
    return [
        f"{config.schedule} never waits for all gradients of a global batch: by stage it keeps "
        f"{_join_words(versions)} weight versions{predicted}, and gradients are {_join_words(stale)} "
        f"{'update' if set(stale) == {1} else 'updates'} late{first}; "
        "training may need other learning rates",
        f"the step is the time of one more global batch in the steady state; filling "
        f"{format_count(stages, 'stage')} once is not counted",
    ]


def _updates_late(config: PipelineConfig, stage: int, stages: int) -> int:
    """Return the updates that a gradient of the stage misses in the steady state."""
    if config.schedule == XPIPE:
        return xpipe_staleness(stage, stages, (stages + 1) * config.micro_batches, config.micro_batches)
    return find_schedule(config.schedule).staleness(stage, stages, max(config.micro_batches, stages))


def _join_words(values: Sequence[float]) -> str:
    words = [f"{value:g}" for value in values]
    return words[0] if len(set(words)) == 1 else "-".join(words)


def reduced_seconds(space: Space, ranks: Sequence[int], trainable: Floats) -> Floats:
    """Return the seconds to all-reduce the gradients of `trainable` bytes of weights over these devices."""
    seconds: Floats = np.asarray(all_reduce_seconds(space.topology, ranks, space.gradients(trainable)))
    return seconds


def pace(space: Space, proposal: Proposal, modes: Sequence[Recompute]) -> float:
    """Return the seconds of a micro-batch in the steady state, by formula."""
    costs, count = assemble_endless(space, proposal, modes).costs(), proposal.config.micro_batches
    return float(steady_steps(costs, count)[0]) / count


def steady_steps(costs: Costs, micro_batches: int) -> Floats:
    """Return the seconds of one more global batch of a linear asynchronous pipeline.

    Stage i of p holds p - i micro-batches. The formula is at the head of `objectives/steady_search.py`.

    Args:
        costs: Costs of the candidates.
        micro_batches: Micro-batches of a global batch.

    Returns:
        (candidates,) seconds.
    """
    work = _by_stage(costs.backward) + _by_stage(costs.forward) * (1 + _by_stage(costs.recompute))
    occupancy, latency = (
        np.asarray(seconds_by_cut)[0] for seconds_by_cut in (costs.forward_occupancy, costs.forward_latency)
    )
    launches = _by_stage(costs.forward_launch) + _by_stage(costs.backward_launch)
    longest = np.maximum(work, launches).max(axis=0)
    for start in range(len(work)):
        seconds = work[start]
        for end in range(start + 1, len(work)):
            seconds = seconds + work[end] + 2 * (occupancy + latency)[end - 1]
            longest = np.maximum(longest, seconds / (end - start + 1))
    if len(occupancy):
        longest = np.maximum(longest, occupancy.max(axis=0))
    if costs.all_reduce is not None:
        longest = np.maximum(longest, costs.all_reduce[:, 0].max(axis=0) / micro_batches)
    steps: Floats = np.broadcast_to(longest, costs.candidates or 1) * micro_batches
    return steps


def _by_stage(values: Floats | None) -> Floats:
    """Return (stages, candidates) values that are the same for all micro-batches."""
    return np.zeros((1, 1)) if values is None else values[:, 0].reshape(len(values), -1)
