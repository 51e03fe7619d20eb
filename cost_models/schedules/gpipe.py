"""GPipe: all forwards, then all backwards, the last micro-batch first.

    stage 0  F0 F1 F2 .  .  .  .  B2 B1 B0
    stage 1  .  F0 F1 F2 .  .  B2 B1 B0
    stage 2  .  .  F0 F1 F2 B2 B1 B0

Huang et al., "GPipe", NeurIPS 2019, section 2.3 and figure 2c; torchgpipe and FairScale run this order,
torch.distributed.pipelining the backwards from the first to the last (`first_to_last`).
Needs of the runtime: memory for all micro-batches, or recomputation. Weight versions: 1. Staleness: 0.
"""

from __future__ import annotations

from typing import Literal

from .action import Action, Program, Schedule, check_virtual_stages, linear_program

Backwards = Literal["last_to_first", "first_to_last"]


def program(
    stages: int, micro_batches: int, virtual_stages: int = 1, backwards: Backwards = "last_to_first"
) -> Program:
    """All forwards, then the backwards in the order that `backwards` says."""
    check_virtual_stages("gpipe", virtual_stages, 1)
    forward = range(micro_batches)
    backward = reversed(forward) if backwards == "last_to_first" else forward
    order = [Action("F", m) for m in forward] + [Action("B", m) for m in backward]
    return linear_program([order] * stages)


def in_flight(stage: int, stages: int, micro_batches: int) -> int:  # noqa: ARG001 - the same on every stage
    """Micro-batches held at a time: all."""
    return micro_batches


SCHEDULE = Schedule(
    "gpipe",
    program,
    source='Huang et al., "GPipe", NeurIPS 2019, section 2.3',
    needs="memory for all micro-batches of a step, or recomputation",
    bubble="(p-1)/(m+p-1)",
    in_flight_formula="m",
    closed_in_flight=in_flight,
)
