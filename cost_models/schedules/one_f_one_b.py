"""1F1B (PipeDream-flush): a stage runs ahead by as many forwards as stages follow, then alternates.

    stage 0  F0 F1 F2 .  .  B0 F3 .  B1 .  .  B2 .  .  B3
    stage 1  .  F0 F1 .  B0 F2 .  B1 F3 .  B2 .  .  B3
    stage 2  .  .  F0 B0 .  F1 B1 .  F2 B2 .  F3 B3

Narayanan et al., "PipeDream", SOSP 2019, section 3.2, with a flush every global batch as in "Memory-Efficient
Pipeline-Parallel DNN Training", ICML 2021, section 3.2. Stage i of p (0-based) holds at most
min(micro-batches, p - i).
Needs of the runtime: a process or a queue for each stage. Weight versions: 1. Staleness: 0.
"""

from __future__ import annotations

from .action import Action, Program, Schedule, check_virtual_stages, linear_program


def program(stages: int, micro_batches: int, virtual_stages: int = 1) -> Program:
    """Each stage's warm-up of forwards, then a backward before every forward."""
    check_virtual_stages("1f1b", virtual_stages, 1)
    return linear_program(stage_lists(stages, micro_batches))


def stage_lists(stages: int, micro_batches: int) -> list[list[Action]]:
    """Each stage's actions in order."""
    return [
        alternate_passes(in_flight(stage, stages, micro_batches), micro_batches) for stage in range(stages)
    ]


def alternate_passes(ahead: int, micro_batches: int) -> list[Action]:
    """A stage's list: `ahead` forwards, then B and F in turn, then the backwards that are left."""
    order = [Action("F", m) for m in range(ahead)]
    for m in range(micro_batches - ahead):
        order += [Action("B", m), Action("F", m + ahead)]
    return order + [Action("B", m) for m in range(micro_batches - ahead, micro_batches)]


def in_flight(stage: int, stages: int, micro_batches: int) -> int:
    """Micro-batches held at a time by `stage` (0-based)."""
    return min(micro_batches, stages - stage)


SCHEDULE = Schedule(
    "1f1b",
    program,
    source='Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021, section 3.2',
    needs="each stage working by itself: a process or a queue a stage",
    bubble="(p-1)/(m+p-1)",
    in_flight_formula="min(m, p-i)",
    closed_in_flight=in_flight,
)
