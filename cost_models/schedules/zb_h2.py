"""ZB-H2: the weight gradients fill the drain, and twice the forwards ahead fill the start.

    stage 0  F0 F1 F2 F3 F4 B0 W0 F5 B1 W1 B2 W2 B3 W3 B4 W4 B5 W5
    stage 1  .  F0 F1 F2 B0 F3 B1 F4 B2 W0 F5 B3 W1 B4 W2 B5 W3 W4 W5
    stage 2  .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 W0 F5 B5 W1 W2 W3 W4 W5

Stage i runs 2(p - i) - 1 forwards ahead and keeps the W of 2i micro-batches back, so that every stage holds
2p - 1 of them. With F = B = W no stage is idle from its first to its last action, though they end one after
another: the next step's fill takes the place, if the optimizer's step needs no barrier.
Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.2 and figure 3.
Needs of the runtime: input and weight gradients computed apart; an optimizer step that waits for no other
stage (checked and rolled back afterwards, section 4). Weight versions: 1. Staleness: 0.
"""

from __future__ import annotations

from .action import Program, Schedule, check_virtual_stages, linear_program
from .zb_h1 import split_backwards


def program(stages: int, micro_batches: int, virtual_stages: int = 1) -> Program:
    """ZB-H1's order with warm-ups of 2(p - i) - 1."""
    check_virtual_stages("zb-h2", virtual_stages, 1)
    return linear_program(
        [split_backwards(2 * (stages - stage) - 1, 2 * stage, micro_batches) for stage in range(stages)]
    )


def in_flight(stage: int, stages: int, micro_batches: int) -> int:  # noqa: ARG001 - the same on every stage
    """Micro-batches held at a time, to the end of their W."""
    return min(micro_batches, 2 * stages - 1)


SCHEDULE = Schedule(
    "zb-h2",
    program,
    source='Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.2',
    needs="input and weight gradients computed apart; an optimizer step without a barrier between stages",
    bubble="t/(t+m(F+B+W)), t = (p-1)(F+B-2W), where W <= F and 2W <= F+B",
    in_flight_formula="min(m, 2p-1)",
    closed_in_flight=in_flight,
    splits_backward=True,
)
