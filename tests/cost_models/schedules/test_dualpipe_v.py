"""dualpipe-v: a V of two chunks, forwards and backwards in pairs."""

from __future__ import annotations

from typing import Any

import pytest

from pplan.cost_models.errors import UsageError
from pplan.cost_models.program import Program
from pplan.cost_models.schedules import dualpipe_v

SIZES = [(stages, 2 * stages + extra) for stages in (1, 2, 3, 4, 6) for extra in (0, 1, 5)]

# One device: every pair goes at once; the last micro-batches leave the weights to the end.
ONE_DEVICE = """
F0 f0 F1 b0 -  f1 B0 -  b1 -  B1 W1
"""

TWO_DEVICES = """
F0 F1 F2 f0 b0 w0 f1 F3 b1 -  f2 B0 -  b2 -  f3 .  B1 -  b3 -  B2 W2 B3 W3
.  F0 f0 F1 f1 F2 b0 -  f2 B0 -  F3 b1 -  f3 B1 -  b2 -  B2 -  b3 B3 w3 W3
"""


def pairs(program: Program, stages: int) -> frozenset[tuple[int, int]]:
    """Where a forward and the whole backward after it are one: from the steady part of each device on, but
    for the first pair of the last device."""
    found = set()
    for device, own in enumerate(program.actions):
        steady = 2 * (stages - 1 - device) + 2 * (device + 1) + 3 * (stages - 1 - device)
        split = {action[1:] for action in own if action.kind == "W"}
        for at in range(steady, len(own) - 1):
            one, other = own[at : at + 2]
            if one.kind == "F" and other.kind == "B" and other[1:] not in split:
                found.add((device, at))
        if device == stages - 1:
            found.discard((device, steady))
    return frozenset(found)


def test_drawings(picture: Any, drawn: Any) -> None:
    assert picture(dualpipe_v(1, 2)) == drawn(ONE_DEVICE)
    assert picture(dualpipe_v(2, 4)) == drawn(TWO_DEVICES)


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
@pytest.mark.parametrize(("forward", "weight"), [(1, 1), (2, 1), (3, 2), (5, 5)])
def test_bubble(
    stages: int, micro_batches: int, forward: int, weight: int, play: Any, play_together: Any
) -> None:
    """The report's (p - 1)(F&B + B - 3W) of p devices, B whole, where the input's gradient takes as long as F
    and W no longer: with F&B as one action. With F and B one after the other the next device has F's result
    earlier, and F + B - 2W are idle."""
    program = dualpipe_v(stages, micro_batches)
    whole = forward + weight
    work = 2 * micro_batches * (forward + whole)
    together = pairs(program, stages)
    assert len(together) == sum(2 * micro_batches - 3 * stages + 1 + device for device in range(stages)) - 1
    played = play_together(program, forward, forward, weight, together=together)
    assert played.makespan == work + (stages - 1) * (forward + whole + whole - 3 * weight)
    apart = play(program, forward, forward, weight)
    assert apart.makespan == work + (stages - 1) * (forward + whole - 2 * weight)


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_in_flight(stages: int, micro_batches: int) -> None:
    """2p + 1 chunks on p devices: the report's PP + 1 of PP = 2p stages."""
    program = dualpipe_v(stages, micro_batches)
    most = [max(program.in_flight(device)) for device in range(stages)]
    assert most == [min(micro_batches, (2 * stages + 1) / 2)] * stages


def test_too_few_micro_batches() -> None:
    with pytest.raises(UsageError, match="micro-batches 7: dualpipe-v needs at least 8, two a stage"):
        dualpipe_v(4, 7)
