"""Pipelines that are never flushed: their program, their steady state in the simulator, and their plan.

PipeDream's micro-batches are whole global batches, and every one of them updates the weights; PipeDream-2BW
updates after all micro-batches of a global batch. Replicas share every micro-batch, as in all plans here. The
step of such a plan is what a further global batch takes, once the pipeline is full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..cost_models.memory import Recompute
from ..cost_models.quantities import counted
from ..cost_models.schedules import schedule_named
from ..cost_models.simulator.steady import steady_state
from .assembly import Assembly
from .candidate import Proposal, ScoredPlan
from .plan_records import PlannedStage
from .plan_stages import make_stages
from .scoring import assemble
from .search.space import Space

PIPEDREAM, TWO_VERSIONS = "pipedream", "pipedream-2bw"
ASYNCHRONOUS = (PIPEDREAM, TWO_VERSIONS)
ROUNDS = 12
"""Micro-batches a stage that are simulated to see the steady state; twice as many, and again, until it is."""
MOST_ROUNDS = 96


def assemble_endless(
    space: Space, proposal: Proposal, modes: Sequence[Recompute], rounds: int = ROUNDS
) -> Assembly:
    """The pipeline as it runs on and on, made ready for the simulator."""
    made, config = assemble(space, proposal, modes), proposal.config
    stages = len(proposal.ends)
    count = max(rounds * stages, 4 * config.micro_batches)
    program = schedule_named(config.schedule).program(stages, count)
    return replace(made, program=replace(program, update_every=config.micro_batches))


def steady_seconds(space: Space, proposal: Proposal, modes: Sequence[Recompute]) -> float:
    """Simulated seconds of a further global batch."""
    rounds, each = ROUNDS, 0.0
    while rounds <= MOST_ROUNDS:
        made = assemble_endless(space, proposal, modes, rounds)
        state = steady_state(made.program, made.costs())
        each = state.seconds_per_micro_batch
        if state.exact:
            break
        rounds *= 2
    return each * proposal.config.micro_batches


def steady_stages(space: Space, plan: ScoredPlan) -> list[PlannedStage]:
    """The stages of the plan, with the weight versions in their ledgers."""
    return make_stages(space, assemble_endless(space, plan.proposal, plan.recompute), plan)


def steady_bubble(space: Space, plan: ScoredPlan) -> float:
    """Idle share of the stages' time in the steady state."""
    made = assemble_endless(space, plan.proposal, plan.recompute)
    costs, stages = made.costs(), len(plan.proposal.ends)
    forward, backward = np.asarray(costs.forward), np.asarray(costs.backward)
    recompute = 0.0 if costs.recompute is None else costs.recompute * forward
    busy = float((forward + backward + recompute)[:, 0, 0].sum()) * plan.config.micro_batches
    return 1 - busy / (stages * plan.step_seconds)


def asynchronous_notes(plan: ScoredPlan) -> list[str]:
    """What a user must know before training so."""
    name, stages = plan.config.schedule, len(plan.proposal.ends)
    schedule, count = schedule_named(name), max(plan.config.micro_batches, stages)
    versions = [int(schedule.weight_versions(stage, stages, count)) for stage in range(stages)]
    stale = [schedule.staleness(stage, stages, count) for stage in range(stages)]
    return [
        f"{name} never waits for all gradients of a global batch: by stage it keeps "
        f"{_listed(versions)} weight versions, and gradients are {_listed(stale)} "
        f"{'update' if set(stale) == {1} else 'updates'} late; "
        "training may need other learning rates",
        f"the step is what a further global batch takes in the steady state; filling "
        f"{counted(stages, 'stage')} once is not counted",
    ]


def _listed(values: Sequence[int]) -> str:
    return str(values[0]) if len(set(values)) == 1 else "-".join(map(str, values))
