"""ZB-V: two chunks a device, laid out as a V, with weight gradients apart: no bubble, in 1F1B's memory.

Two devices, three micro-batches (lower case: the second chunk, which goes from the last device to the first):

    F0 F1 F2 f0 b0 w0 f1 b1 w1 B0 W0 f2 b2 w2 B1 W1 B2 W2
    .  F0 f0 F1 f1 b0 w0 F2 B0 W0 f2 b1 w1 B1 b2 B2 W1 w2 W2

Device i runs 2(p - i) - 1 forwards of its first chunk and i of each, then the second chunk's F, B, W; steady:
F B W of the first chunk and of the second; in the drain the weight gradients fill the waiting. Where F, B and
W take the same time, no device waits from its first to its last action.
Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 6; the order is that of
torch.distributed.pipelining.
Needs of the runtime: two chunks a device, input and weight gradients computed apart. Weight versions: 1.
Staleness: 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from .action import Action, Kind, Program, Schedule, StageSlot, check_virtual_stages

Turn = tuple[Kind, int]
"""A kind of action and its chunk, where two chunks are laid out as a V; its micro-batch is the next of the
chunk."""

F0: Turn = ("F", 0)
B0: Turn = ("B", 0)
W0: Turn = ("W", 0)
F1: Turn = ("F", 1)
B1: Turn = ("B", 1)
W1: Turn = ("W", 1)


def v_pipe(stages: int) -> tuple[tuple[StageSlot, ...], ...]:
    """One pipe: down the devices with their first chunk, back up with their second."""
    down = [StageSlot(device, 0) for device in range(stages)]
    up = [StageSlot(device, 1) for device in reversed(range(stages))]
    return (tuple(down + up),)


def number_actions(turns: Iterable[Turn]) -> Iterator[Action]:
    """The actions of the turns: each kind goes through the micro-batches of each chunk in order."""
    done: Counter[Turn] = Counter()
    for turn in turns:
        yield Action(turn[0], done[turn], turn[1])
        done[turn] += 1


def program(stages: int, micro_batches: int, virtual_stages: int = 2) -> Program:
    """Fewer micro-batches than 2p - 1 run in the order of 2p - 1, from which the others are left out."""
    check_virtual_stages("zb-v", virtual_stages, 2)
    turns = (_turns(device, stages, max(micro_batches, 2 * stages - 1)) for device in range(stages))
    actions = tuple(
        tuple(action for action in number_actions(own) if action.micro_batch < micro_batches) for own in turns
    )
    return Program(actions, v_pipe(stages), (0,) * micro_batches)


def _turns(device: int, stages: int, micro_batches: int) -> list[Turn]:
    from_end = stages - device
    fill = [F0] * (2 * from_end - 1) + [F1, F0] * device + [F1, B1, W1] * from_end
    steady = [F0, B0, W0, F1, B1, W1] * (micro_batches - 2 * stages + device + 1)
    steady += [B0, W0, F1, B1, W1] * (from_end - 1)
    return fill + steady + [B0, B1] * device + [B0, W0] * from_end + [W1] * device + [W0] * device


SCHEDULE = Schedule(
    "zb-v",
    program,
    source='Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 6',
    needs="two chunks of layers on a device, input and weight gradients computed apart",
    bubble="0 where F = B = W and m >= 2p-1",
    in_flight_formula="min(m, p)",
    default_virtual_stages=2,
    splits_backward=True,
)
