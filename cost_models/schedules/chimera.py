"""Chimera: two pipelines in opposite directions over the same devices, each with half the micro-batches.

Four devices, four micro-batches; 2 and 3 go from the last device to the first (lower case: the other copy):

    F0 F1 .  f2 b2 f3 b3 B0 .  B1
    .  F0 f2 F1 f3 b2 B0 b3 B1
    .  f2 F0 f3 F1 B0 b2 B1 b3
    f2 f3 .  F0 B0 F1 B1 b2 .  b3

With F = B the two fit without a collision: on a clock on which every action takes one tick, the forward of
the j-th micro-batch of a direction runs on its stage s at tick s + 2j, its backward at 2p - 1 - s + 2j, and p
being even, one direction has the even ticks of a device where the other has the odd ones. That clock gives
the order for any costs. Units of p micro-batches follow each other 2p ticks apart (direct concatenation).
Li and Hoefler, "Chimera", SC 2021, section 3 and figure 3.
Needs of the runtime: two stages a device, of two copies of the model, all-reduced between device d and
p - 1 - d; transfers both ways at once. Weight versions: 1 (two copies). Staleness: 0.
"""

from __future__ import annotations

from ..errors import UsageError
from .action import Action, Program, Schedule, StageSlot, check_multiple, check_virtual_stages


def program(stages: int, micro_batches: int, virtual_stages: int = 1) -> Program:
    """Of each unit of p micro-batches the first half goes down (chunk 0), the second up (chunk 1)."""
    check_virtual_stages("chimera", virtual_stages, 1)
    if stages % 2:
        raise UsageError(
            f"stages {stages}: chimera needs an even number",
            f"Use {stages - 1} or {stages + 1}." if stages > 1 else "Use 2 or more.",
        )
    check_multiple("chimera", micro_batches, stages, "the stages")
    down = tuple(StageSlot(device, 0) for device in range(stages))
    up = tuple(StageSlot(device, 1) for device in reversed(range(stages)))
    pipe_of = tuple(m % stages // (stages // 2) for m in range(micro_batches))
    return Program(tuple(_device(d, stages, pipe_of) for d in range(stages)), (down, up), pipe_of)


def _device(device: int, stages: int, pipe_of: tuple[int, ...]) -> tuple[Action, ...]:
    ticks: list[tuple[int, Action]] = []
    for m, pipe in enumerate(pipe_of):
        stage = stages - 1 - device if pipe else device
        start = m // stages * 2 * stages + m % (stages // 2) * 2
        ticks.append((start + stage, Action("F", m, pipe)))
        ticks.append((start + 2 * stages - 1 - stage, Action("B", m, pipe)))
    return tuple(action for _, action in sorted(ticks))


SCHEDULE = Schedule(
    "chimera",
    program,
    source='Li and Hoefler, "Chimera", SC 2021, section 3',
    needs="two stages on a device, of two copies of the model all-reduced at the end; transfers both ways",
    bubble="(p-2)/(2m+p-2) where F = B",
    in_flight_formula="p/2+1 to p",
    copies=2,
)
