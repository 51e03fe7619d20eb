"""DAPPLE's early backward scheduling: 1F1B, with as many forwards ahead as the transfers ask for.

    PA         stage 0  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
    (p - i)    stage 1  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3
               stage 2  .  .  F0 B0 F1 B1 F2 B2 F3 B3

    PB         stage 0  F0 F1 F2 F3 .  B0 .  B1 .  B2 .  B3
    (2(p-i)-1) stage 1  .  F0 F1 F2 B0 F3 B1 .  B2 .  B3
               stage 2  .  .  F0 B0 F1 B1 F2 B2 F3 B3

PA is 1F1B's order. PB keeps computing while activations and gradients travel, for nearly twice the memory;
worth it where a transfer is long beside a stage. Fan et al., "DAPPLE", PPoPP 2021, section 3.
Needs of the runtime: as 1F1B. Weight versions: 1. Staleness: 0.
"""

from __future__ import annotations

from typing import Literal

from .action import Program, Schedule, check_virtual_stages, linear_program
from .one_f_one_b import alternate_passes

Policy = Literal["PA", "PB"]


def program(stages: int, micro_batches: int, virtual_stages: int = 1, policy: Policy = "PA") -> Program:
    """1F1B with the warm-up of the policy: PA where transfers are short, PB where they are long."""
    check_virtual_stages("dapple", virtual_stages, 1)
    return linear_program(
        [
            alternate_passes(in_flight(stage, stages, micro_batches, policy), micro_batches)
            for stage in range(stages)
        ]
    )


def in_flight(stage: int, stages: int, micro_batches: int, policy: Policy = "PA") -> int:
    """Micro-batches held at a time by `stage` (0-based): the forwards ahead of its first backward."""
    ahead = stages - stage if policy == "PA" else 2 * (stages - stage) - 1
    return min(micro_batches, ahead)


SCHEDULE = Schedule(
    "dapple",
    program,
    source='Fan et al., "DAPPLE", PPoPP 2021, section 3',
    needs="each stage working by itself: a process or a queue a stage",
    bubble="(p-1)/(m+p-1)",
    in_flight_formula="min(m, p-i), or min(m, 2(p-i)-1) for long transfers",
    closed_in_flight=in_flight,
)
