"""autopipe: the first micro-batch in halves."""

from __future__ import annotations

from typing import Any

import pytest

from pplan.cost_models.errors import UsageError
from pplan.cost_models.schedules import autopipe

# A tick is half a forward. F0 and F1 are the halves of the first micro-batch.
HALVES = """
F0 F1 F2 -  F3 -  .  .  B0 -  B1 -  .  .  .  .  .  .  B2 -  -  -  .  .  B3 -  -  -
.  F0 F1 .  F2 -  B0 -  B1 -  F3 -  .  .  B2 -  -  -  .  .  B3 -  -  -  .  .  .  .
.  .  F0 F1 B0 -  B1 -  F2 -  B2 -  -  -  F3 -  B3 -  -  -  .  .  .  .  .  .  .  .
"""


def test_drawing(picture: Any, drawn: Any) -> None:
    assert picture(autopipe(3, 3), tick=0.5, backward=2) == drawn(HALVES)


@pytest.mark.parametrize("stages", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("extra", [0, 1, 6])
@pytest.mark.parametrize(("f", "b"), [(1, 1), (1, 2), (2, 3), (1, 5)])
def test_the_fill_is_half_as_long(stages: int, extra: int, f: int, b: int, play: Any) -> None:
    """Where F <= B and (p - 1) F / 2B micro-batches are sliced, and only there."""
    micro_batches = 2 * stages + extra
    closed = (stages - 1) * (f / 2 + b) + micro_batches * (f + b)
    steps = []
    for sliced in range(min(stages + 1, 5)):
        played = play(autopipe(stages, micro_batches, sliced=sliced), f, b)
        steps.append(played.makespan)
        if sliced:
            assert played.spans[-1][0][1] == (stages - 1) * f / 2
        assert (played.makespan == closed) == (2 * sliced * b >= (stages - 1) * f)
    assert steps == sorted(steps, reverse=True)
    assert steps[0] == (micro_batches + stages - 1) * (f + b)


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("micro_batches", [1, 3, 8])
def test_halves_count_half(stages: int, micro_batches: int) -> None:
    program = autopipe(stages, micro_batches)
    assert program.shares == (0.5, 0.5, *[1.0] * (micro_batches - 1))
    for i in range(stages):
        assert max(program.in_flight(i)) == min(micro_batches, stages - i)


def test_slices_that_cannot_be() -> None:
    with pytest.raises(UsageError, match="micro-batches 2: autopipe needs at least 3, those that are sliced"):
        autopipe(4, 2, sliced=3)
    with pytest.raises(UsageError, match="sliced micro-batches -1"):
        autopipe(4, 2, sliced=-1)
