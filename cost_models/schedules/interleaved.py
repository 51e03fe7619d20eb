"""Interleaved 1F1B: each device holds v chunks of layers, and 1F1B runs over all of them.

Two devices, two chunks each (lower case: a device's second chunk), four micro-batches:

    F0 F1 f0 f1 F2 b0 F3 b1 f2 B0 f3 B1 .  b2 .  b3 B2 B3
    .  F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 f2 b2 f3 b3 B2 B3

Micro-batches go in rounds of p: a round goes through chunk 0, then chunk 1, and so on; backwards in the same
rounds from the last chunk. Stage i runs (v-1)p + 2(p-1-i) forwards ahead. The fill is v times shorter than
1F1B's, there are v times the transfers.
Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021,
section 2.2 and figure 4. Needs of the runtime: several chunks a device, transfers from the last device to
the first. Weight versions: 1. Staleness: 0.
"""

from __future__ import annotations

from collections.abc import Iterable

from .action import Action, Program, Schedule, StageSlot, check_at_least, check_multiple

Turn = tuple[int, int]
"""A micro-batch and a chunk."""


def program(stages: int, micro_batches: int, virtual_stages: int = 2, a_round: int | None = None) -> Program:
    """`a_round`: micro-batches of a round, which must divide all; None: the stages, as Megatron-LM has it."""
    size = stages if a_round is None else a_round
    check_at_least("interleaved", "micro-batches of a round", size, 1, "to make progress")
    check_multiple("interleaved", micro_batches, size, "the stages" if a_round is None else "a round")
    actions = tuple(
        tuple(device_actions(device, stages, micro_batches, virtual_stages, size)) for device in range(stages)
    )
    return Program(actions, looped_pipe(stages, virtual_stages), (0,) * micro_batches)


def device_actions(
    device: int, stages: int, micro_batches: int, virtual_stages: int, a_round: int | None = None
) -> list[Action]:
    """One device's list; numbers as of `program`."""
    size = stages if a_round is None else a_round
    forwards = list_turns(range(virtual_stages), micro_batches, size)
    backwards = list_turns(range(virtual_stages - 1, -1, -1), micro_batches, size)
    return alternate_actions(forwards, backwards, (virtual_stages - 1) * size + 2 * (stages - 1 - device))


def list_turns(chunks: Iterable[int], micro_batches: int, size: int) -> list[Turn]:
    """The turns in order: a round of `size` micro-batches goes through all chunks, then the next round."""
    order = tuple(chunks)
    return [
        (first + m, chunk) for first in range(0, micro_batches, size) for chunk in order for m in range(size)
    ]


def alternate_actions(forwards: list[Turn], backwards: list[Turn], ahead: int) -> list[Action]:
    """A device's list: `ahead` forwards, then a forward and a backward in turn, then the backwards left."""
    order = [Action("F", *turn) for turn in forwards[:ahead]]
    together = len(forwards) - len(order)
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        order += [Action("F", *forward), Action("B", *backward)]
    return order + [Action("B", *turn) for turn in backwards[together:]]


def looped_pipe(stages: int, virtual_stages: int) -> tuple[tuple[StageSlot, ...], ...]:
    """One pipe: all devices with their first chunk, then all with their second, and so on."""
    return (tuple(StageSlot(device, chunk) for chunk in range(virtual_stages) for device in range(stages)),)


SCHEDULE = Schedule(
    "interleaved",
    program,
    source='Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", SC 2021',
    needs="several chunks of layers on a device, transfers from the last device to the first",
    bubble="(p-1)/(vm+p-1)",
    in_flight_formula="min(vm, 2(p-i-1)+(v-1)p+1)/v",
    default_virtual_stages=2,
)
