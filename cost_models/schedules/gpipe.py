"""GPipe: all forwards, then all backwards, the last micro-batch first.

    stage 0  F0 F1 F2 .  .  .  .  B2 B1 B0
    stage 1  .  F0 F1 F2 .  .  B2 B1 B0
    stage 2  .  .  F0 F1 F2 B2 B1 B0

Huang et al., "GPipe", NeurIPS 2019, section 2.3 and figure 2c; torchgpipe and FairScale run this order.
Weight versions: 1. Staleness: 0. Every stage holds all micro-batches.
"""

from __future__ import annotations

from .action import Action, Schedule


def actions(stages: int, micro_batches: int) -> list[list[Action]]:
    """Each stage's actions in order."""
    forwards = [Action("F", m) for m in range(micro_batches)]
    backwards = [Action("B", m) for m in reversed(range(micro_batches))]
    return [forwards + backwards for _ in range(stages)]


def in_flight(stage: int, stages: int, micro_batches: int) -> int:  # noqa: ARG001 - the same on every stage
    """Micro-batches held at a time: all."""
    return micro_batches


SCHEDULE = Schedule("gpipe", actions, in_flight)
