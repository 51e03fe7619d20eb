"""1F1B (PipeDream-flush): a stage runs ahead by as many forwards as stages follow, then alternates.

    stage 0  F0 F1 F2 .  .  B0 F3 .  B1 .  .  B2 .  .  B3
    stage 1  .  F0 F1 .  B0 F2 .  B1 F3 .  B2 .  .  B3
    stage 2  .  .  F0 B0 .  F1 B1 .  F2 B2 .  F3 B3

Narayanan et al., "PipeDream", SOSP 2019, section 3.2, with a flush every mini-batch as in "Memory-Efficient
Pipeline-Parallel DNN Training", ICML 2021, section 2.2. Weight versions: 1. Staleness: 0.
Stage i of p (0-based) holds at most min(micro-batches, p - i).
"""

from __future__ import annotations

from .action import Action, Schedule


def actions(stages: int, micro_batches: int) -> list[list[Action]]:
    """Each stage's actions in order."""
    return [_stage(in_flight(stage, stages, micro_batches), micro_batches) for stage in range(stages)]


def _stage(ahead: int, micro_batches: int) -> list[Action]:
    order = [Action("F", m) for m in range(ahead)]
    for m in range(micro_batches - ahead):
        order += [Action("B", m), Action("F", m + ahead)]
    return order + [Action("B", m) for m in range(micro_batches - ahead, micro_batches)]


def in_flight(stage: int, stages: int, micro_batches: int) -> int:
    """Micro-batches held at a time by `stage` (0-based)."""
    return min(micro_batches, stages - stage)


SCHEDULE = Schedule("1f1b", actions, in_flight)
