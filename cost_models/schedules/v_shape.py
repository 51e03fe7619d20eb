"""What the schedules of two chunks laid out as a V share: where micro-batches go, how turns are counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from .action import Action, Kind, StageSlot

Turn = tuple[Kind, int]
"""What a device does next on which of its chunks; the micro-batch is the next for both."""

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
