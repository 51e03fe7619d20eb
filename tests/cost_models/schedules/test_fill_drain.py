"""naive, gpipe, 1f1b and dapple: one chunk a device, a flush at the end of the mini-batch."""

from __future__ import annotations

from typing import Any

import pytest

from pplan.cost_models.schedules import dapple, dapple_in_flight, gpipe, naive, one_f_one_b

GRID = [(stages, micro_batches) for stages in (1, 2, 3, 4, 7) for micro_batches in (1, 2, 3, 8, 13)]
COSTS = [(1, 2), (3, 1), (5, 7)]

# GPipe's figure 2b, of three devices and two mini-batches.
NAIVE = """
F0 .  .  .  .  B0 F1 .  .  .  .  B1
.  F0 .  .  B0 .  .  F1 .  .  B1 .
.  .  F0 B0 .  .  .  .  F1 B1 .  .
"""

# GPipe's figure 2c, of three devices.
GPIPE = """
F0 F1 F2 F3 .  .  .  .  B3 B2 B1 B0
.  F0 F1 F2 F3 .  .  B3 B2 B1 B0 .
.  .  F0 F1 F2 F3 B3 B2 B1 B0 .  .
"""

GPIPE_FIRST_TO_LAST = """
F0 F1 F2 .  .  .  B0 -  B1 -  B2 -
.  F0 F1 F2 B0 -  B1 -  B2 -  .  .
"""

# Megatron-LM, SC 2021, figure 4, above (backwards of two ticks), with four micro-batches of the eight.
ONE_F_ONE_B = """
F0 F1 F2 F3 .  .  .  .  .  .  B0 -  .  B1 -  .  B2 -  .  B3 -
.  F0 F1 F2 .  .  .  .  B0 -  F3 B1 -  .  B2 -  .  B3 -  .  .
.  .  F0 F1 .  .  B0 -  F2 B1 -  F3 B2 -  .  B3 -  .  .  .  .
.  .  .  F0 B0 -  F1 B1 -  F2 B2 -  F3 B3 -  .  .  .  .  .  .
"""

DAPPLE_PB = """
F0 F1 F2 F3 .  B0 .  B1 .  B2 .  B3
.  F0 F1 F2 B0 F3 B1 .  B2 .  B3 .
.  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .
"""


def test_drawings(picture: Any, drawn: Any) -> None:
    assert picture(naive(3, 2)) == drawn(NAIVE)
    assert picture(gpipe(3, 4)) == drawn(GPIPE)
    assert picture(gpipe(2, 3, backwards="first_to_last"), backward=2) == drawn(GPIPE_FIRST_TO_LAST)
    assert picture(one_f_one_b(4, 4), backward=2) == drawn(ONE_F_ONE_B)
    assert picture(dapple(4, 4), backward=2) == drawn(ONE_F_ONE_B)
    assert picture(dapple(3, 4, policy="PB")) == drawn(DAPPLE_PB)


@pytest.mark.parametrize(("stages", "micro_batches"), GRID)
@pytest.mark.parametrize(("forward", "backward"), COSTS)
def test_bubble(stages: int, micro_batches: int, forward: int, backward: int, play: Any) -> None:
    def made(program: Any) -> float:
        seconds: float = play(program(stages, micro_batches), forward, backward).makespan
        return seconds

    pipelined = (micro_batches + stages - 1) * (forward + backward)
    assert made(gpipe) == pipelined
    assert made(lambda p, m: gpipe(p, m, backwards="first_to_last")) == pipelined
    assert made(one_f_one_b) == pipelined
    assert made(dapple) == pipelined
    assert made(lambda p, m: dapple(p, m, policy="PB")) == pipelined
    assert made(naive) == micro_batches * stages * (forward + backward)


@pytest.mark.parametrize(("stages", "micro_batches"), GRID)
def test_in_flight(stages: int, micro_batches: int) -> None:
    def most(program: Any) -> list[float]:
        made = program(stages, micro_batches)
        return [max(made.in_flight(device)) for device in range(stages)]

    ahead = [min(micro_batches, stages - i) for i in range(stages)]
    assert most(naive) == [1] * stages
    assert most(gpipe) == [micro_batches] * stages
    assert most(one_f_one_b) == most(dapple) == ahead
    twice = [min(micro_batches, 2 * (stages - i) - 1) for i in range(stages)]
    assert most(lambda p, m: dapple(p, m, policy="PB")) == twice
    assert [dapple_in_flight(i, stages, micro_batches, "PB") for i in range(stages)] == twice


@pytest.mark.parametrize("stages", [2, 3, 6])
def test_dapples_longer_warm_up_hides_transfers(stages: int, play: Any) -> None:
    """A transfer as long as half of F + B: with PB the last stage never waits after its first forward."""
    micro_batches, transfer = 4 * stages, 1.5
    played = play(dapple(stages, micro_batches, policy="PB"), 1, 2, 0, transfer)
    last = played.spans[-1]
    assert last[-1][2] - last[0][1] == 3 * micro_batches
    assert played.makespan < play(dapple(stages, micro_batches), 1, 2, 0, transfer).makespan
