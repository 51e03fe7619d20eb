"""Looped breadth-first: each device holds v chunks, and all micro-batches go through one before the next.

Two devices, two chunks each (lower case: a device's second chunk), two micro-batches:

    F0 F1 f0 f1 .  .  b1 b0 B1 B0
    .  F0 F1 f0 f1 b1 b0 B1 B0

GPipe over v times as many stages, with a fill v times shorter. A chunk's weights are gathered once for all
micro-batches (sharded data parallelism), which interleaved 1F1B cannot.
Lamy-Poirier, "Breadth-First Pipeline Parallelism", MLSys 2023 (arXiv 2211.05953); the backwards run from
the last micro-batch to the first, as in torch.distributed.pipelining.
Needs of the runtime: several chunks a device, transfers from the last device to the first, memory for all
micro-batches. Weight versions: 1. Staleness: 0.
"""

from __future__ import annotations

from .action import Action, Program, Schedule
from .interleaved import looped_pipe


def program(stages: int, micro_batches: int, virtual_stages: int = 2) -> Program:
    """All forwards chunk by chunk, then all backwards the other way round."""
    forwards = [Action("F", m, chunk) for chunk in range(virtual_stages) for m in range(micro_batches)]
    backwards = [Action("B", m, chunk) for _, m, chunk in reversed(forwards)]
    return Program(
        (tuple(forwards + backwards),) * stages, looped_pipe(stages, virtual_stages), (0,) * micro_batches
    )


def in_flight(stage: int, stages: int, micro_batches: int) -> int:  # noqa: ARG001 - the same on every stage
    """Micro-batches held at a time: all."""
    return micro_batches


SCHEDULE = Schedule(
    "looped-bfs",
    program,
    source='Lamy-Poirier, "Breadth-First Pipeline Parallelism", MLSys 2023',
    needs="several chunks of layers on a device, transfers from the last device to the first, memory for all "
    "micro-batches of a step",
    bubble="(p-1)/(vm+p-1)",
    in_flight_formula="m",
    default_virtual_stages=2,
    closed_in_flight=in_flight,
)
