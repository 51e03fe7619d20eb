"""PipeDream: 1F1B without a flush; every micro-batch is a global batch of its own and updates the weights.

    stage 0  F0 F1 F2 .  .  B0 F3 B1 F4 B2 F5 B3 .  B4 .  B5
    stage 1  .  F0 F1 .  B0 F2 B1 F3 B2 F4 B3 F5 B4 .  B5
    stage 2  .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5

A stage keeps the weights that each micro-batch in flight went forward with (weight stashing), so that its
backward uses the same: stage i of p (0-based) p - i versions, and its gradients are p - 1 - i updates late.
From the first backward of stage 0 to its last forward no stage waits.
Narayanan et al., "PipeDream", SOSP 2019, sections 3.2 and 3.3, figure 4.
Needs of the runtime: an update after every backward, stashed weights. Weight versions: p - i. Staleness:
p - 1 - i.
"""

from __future__ import annotations

from .action import Program, Schedule, check_virtual_stages, linear_program
from .one_f_one_b import in_flight, stage_lists


def program(stages: int, micro_batches: int, virtual_stages: int = 1) -> Program:
    """1F1B's lists, `micro_batches` global batches in a row, with an update after each."""
    check_virtual_stages("pipedream", virtual_stages, 1)
    return linear_program(stage_lists(stages, micro_batches), update_every=1)


def weight_versions(stage: int, stages: int, micro_batches: int) -> int:
    """Versions that `stage` (0-based) keeps: one for each micro-batch in flight."""
    return in_flight(stage, stages, micro_batches)


def staleness(stage: int, stages: int, micro_batches: int) -> int:
    """Updates between the weights that a gradient is of and those that it changes."""
    return in_flight(stage, stages, micro_batches) - 1


SCHEDULE = Schedule(
    "pipedream",
    program,
    source='Narayanan et al., "PipeDream", SOSP 2019, sections 3.2 and 3.3',
    needs="an update after every backward, stashed weights: one version for each micro-batch in flight",
    bubble="none in steady state",
    in_flight_formula="min(m, p-i)",
    synchronous=False,
    weight_versions=weight_versions,
    staleness=staleness,
    closed_in_flight=in_flight,
)
