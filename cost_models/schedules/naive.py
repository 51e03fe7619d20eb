"""Naive model parallelism: one micro-batch at a time, through all stages and back.

    stage 0  F0 .  .  .  .  B0 F1 .  .  .  .  B1
    stage 1  .  F0 .  .  B0 .  .  F1 .  .  B1 .
    stage 2  .  .  F0 B0 .  .  .  .  F1 B1 .  .

What a plain model on several devices does: Huang et al., "GPipe", NeurIPS 2019, figure 2b. Idle (p-1)/p.
Needs of the runtime: nothing but layers on several devices. Weight versions: 1. Staleness: 0.
"""

from __future__ import annotations

from .action import Action, Program, Schedule, check_virtual_stages, linear_program


def program(stages: int, micro_batches: int, virtual_stages: int = 1) -> Program:
    """Every stage runs F and B of a micro-batch before the F of the next."""
    check_virtual_stages("naive", virtual_stages, 1)
    order = [Action(kind, m) for m in range(micro_batches) for kind in ("F", "B")]
    return linear_program([order] * stages)


def in_flight(stage: int, stages: int, micro_batches: int) -> int:  # noqa: ARG001 - one, anywhere
    """Micro-batches held at a time: one."""
    return 1


SCHEDULE = Schedule(
    "naive",
    program,
    source='Huang et al., "GPipe", NeurIPS 2019, figure 2b',
    needs="layers on several devices",
    bubble="(p-1)/p",
    in_flight_formula="1",
    closed_in_flight=in_flight,
)
