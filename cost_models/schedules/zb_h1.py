"""ZB-H1: 1F1B whose backward is split; the weight gradients fill what would be idle, in 1F1B's memory.

    stage 0  F0 F1 F2 .  .  B0 W0 F3 B1 W1 B2 W2 B3 W3
    stage 1  .  F0 F1 .  B0 F2 B1 W0 F3 B2 W1 B3 W2 W3
    stage 2  .  .  F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3

The gradient of the input (B) goes on at once, that of the weights (W) waits: stage i runs p - i forwards
ahead and keeps the W of i micro-batches back, so that every stage holds p of them.
Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.1 and figure 3.
Needs of the runtime: input and weight gradients computed apart. Weight versions: 1. Staleness: 0.
"""

from __future__ import annotations

from .action import Action, Program, Schedule, check_virtual_stages, linear_program


def program(stages: int, micro_batches: int, virtual_stages: int = 1) -> Program:
    """Each stage's warm-up of forwards, then B, the W that is due, and F in turn."""
    check_virtual_stages("zb-h1", virtual_stages, 1)
    return linear_program([split_backwards(stages - stage, stage, micro_batches) for stage in range(stages)])


def split_backwards(ahead: int, behind: int, micro_batches: int) -> list[Action]:
    """A stage's list: `ahead` forwards, then B, W and F in turn, the W `behind` micro-batches after its B."""
    order = [Action("F", m) for m in range(min(ahead, micro_batches))]
    for m in range(micro_batches):
        order.append(Action("B", m))
        if m >= behind:
            order.append(Action("W", m - behind))
        if m + ahead < micro_batches:
            order.append(Action("F", m + ahead))
    return order + [Action("W", m) for m in range(max(micro_batches - behind, 0), micro_batches)]


def in_flight(stage: int, stages: int, micro_batches: int) -> int:  # noqa: ARG001 - the same on every stage
    """Micro-batches held at a time, to the end of their W."""
    return min(micro_batches, stages)


SCHEDULE = Schedule(
    "zb-h1",
    program,
    source='Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.1',
    needs="input and weight gradients computed apart",
    bubble="t/(t+m(F+B+W)), t = (p-1)(F+B-W), where W <= F and W <= B",
    in_flight_formula="min(m, p)",
    closed_in_flight=in_flight,
    splits_backward=True,
)
