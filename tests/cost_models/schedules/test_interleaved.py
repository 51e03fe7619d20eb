"""interleaved and looped-bfs: several chunks a device, in a loop over the devices."""

from __future__ import annotations

from typing import Any

import pytest

from pplan.cost_models.errors import UsageError
from pplan.cost_models.program import Action
from pplan.cost_models.schedules import interleaved, looped_bfs

GRID = [
    (stages, rounds * stages, chunks)
    for stages in (1, 2, 3, 4, 6)
    for rounds in (1, 3)
    for chunks in (1, 2, 3)
]
COSTS = [(1, 2), (3, 1), (5, 7)]

INTERLEAVED = """
F0 F1 f0 f1 F2 b0 F3 b1 f2 B0 f3 B1 .  b2 .  b3 B2 B3
.  F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 f2 b2 f3 b3 B2 B3 .
"""

# One round of three: only on the last device are forwards left when the backwards start.
ONE_ROUND = """
F0 F1 F2 f0 f1 f2 .  .  b0 .  b1 .  b2 B0 B1 B2
.  F0 F1 F2 f0 f1 f2 b0 .  b1 .  b2 B0 B1 B2 .
.  .  F0 F1 F2 f0 b0 f1 b1 f2 b2 B0 B1 B2 .  .
"""

# Breadth-first: the three micro-batches go through a chunk before the next; back the same way.
LOOPED_BFS = """
F0 F1 F2 f0 f1 f2 .  .  b2 b1 b0 B2 B1 B0
.  F0 F1 F2 f0 f1 f2 b2 b1 b0 B2 B1 B0
"""


def test_drawings(picture: Any, drawn: Any) -> None:
    assert picture(interleaved(2, 4)) == drawn(INTERLEAVED)
    assert picture(interleaved(3, 3)) == drawn(ONE_ROUND)
    assert picture(looped_bfs(2, 3)) == drawn(LOOPED_BFS)


def test_order_of_megatrons_figure() -> None:
    """SC 2021, figure 4: four devices, two chunks each, eight micro-batches."""

    def order(text: str) -> list[Action]:
        return [Action(word[0].upper(), int(word[1:]), int(word[0].islower())) for word in text.split()]  # type: ignore[arg-type]

    actions = interleaved(4, 8).actions
    first = "F0 F1 F2 F3 f0 f1 f2 f3 F4 F5 F6 b0 F7 b1 f4 b2 f5 b3 f6 B0 f7 B1"
    assert list(actions[0][:22]) == order(first)
    last = "F0 F1 F2 F3 f0 b0 f1 b1 f2 b2 f3 b3 F4 B0 F5 B1 F6 B2 F7 B3 f4 b4 f5 b5 f6 b6 f7 b7 B4 B5 B6 B7"
    assert list(actions[3]) == order(last)


@pytest.mark.parametrize(("stages", "micro_batches", "chunks"), GRID)
@pytest.mark.parametrize(("forward", "backward"), COSTS)
def test_bubble(stages: int, micro_batches: int, chunks: int, forward: int, backward: int, play: Any) -> None:
    """(p-1) / (v m + p-1): seconds are of a chunk."""
    seconds = (chunks * micro_batches + stages - 1) * (forward + backward)
    for program in (interleaved, looped_bfs):
        played = play(program(stages, micro_batches, chunks), forward, backward)
        assert played.makespan == seconds
        assert played.bubble == pytest.approx((stages - 1) / (chunks * micro_batches + stages - 1))


@pytest.mark.parametrize(("stages", "micro_batches", "v"), GRID)
def test_in_flight(stages: int, micro_batches: int, v: int) -> None:
    one, other = (program(stages, micro_batches, v) for program in (interleaved, looped_bfs))
    for i in range(stages):
        most = min(v * micro_batches, 2 * (stages - i - 1) + (v - 1) * stages + 1) / v
        assert max(one.in_flight(i)) == pytest.approx(most)
        assert max(other.in_flight(i)) == micro_batches


def test_rounds_of_other_sizes() -> None:
    assert interleaved(4, 10, 2, a_round=5).micro_batches == 10
    with pytest.raises(UsageError, match="micro-batches 10: interleaved needs a multiple of the stages, 4"):
        interleaved(4, 10, 2)
    with pytest.raises(UsageError, match="micro-batches 10: interleaved needs a multiple of a round, 3"):
        interleaved(4, 10, 2, a_round=3)
    with pytest.raises(UsageError, match="micro-batches of a round 0"):
        interleaved(4, 10, 2, a_round=0)
