"""How means of the bounds of interleaved stages count their seconds, by hand, and what room whole blocks
need, against every way to share them."""

from __future__ import annotations

from itertools import product
from random import Random

import numpy as np
import pytest

from pplan.planner.degrees.interleaved_bound import _has_room, _mean_times


def test_how_often_a_mean_counts_each_virtual_stage() -> None:
    """Two devices with two virtual stages each, four micro-batches. Of all: weights of 7/15 and 8/15, which
    grow by 1 / (1 - 1/8). Of chunk 0 a second counts 4 w, half of the weights behind its device, and for the
    second chunk half of 1 - 2 w; of chunk 1 nothing waits but what is behind. Of the last ones: half of each
    device's four, and of the last chunk what is behind. Transfers: 0 and 1 in the first chunk, 2 and 3 in the
    other."""
    first, second = 7 / 15, 8 / 15
    times, transfers = _mean_times(2, 2, 4)
    assert times[-1].tolist() == pytest.approx(
        [
            4 * first + second / 2 + (1 - 2 * first) / 2,
            4 * second + (1 - 2 * second) / 2,
            4 * first + second / 2,
            4 * second,
        ]
    )
    assert times[0].tolist() == pytest.approx([2.0, 2.0, 2.5, 2.0])
    assert transfers[[0, -1]].tolist() == pytest.approx([2.5, first * 1 + second * 2])
    assert times[2].tolist() == pytest.approx(((times[0] + times[-1]) / 2).tolist())
    assert (_mean_times(1, 1, 5)[0] == 5.0).all()
    assert _mean_times(1, 3, 2)[0][-1].tolist() == pytest.approx([2.0, 2.0, 2.0])


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("virtual", [1, 2, 3])
def test_a_mean_counts_no_more_than_the_slowest_device(stages: int, virtual: int) -> None:
    """The bounds by device and chunk of seconds by chance: their largest is no less than the means."""
    random, count = Random(10 * stages + virtual), 2 * stages
    times, transfers = _mean_times(stages, virtual, count)
    for _ in range(50):
        seconds = [random.random() * (random.random() < 0.7) for _ in range(stages * virtual)]
        passing = random.random()
        largest = 0.0
        for device in range(stages):
            own = seconds[device::stages]
            for chunk in range(virtual):
                before = chunk * stages + device
                waits = sum(seconds[:before]) + before * passing - stages * sum(own[:chunk])
                largest = max(largest, count * sum(own) + waits)
        assert (times @ np.array(seconds) + transfers * passing).max() <= largest * (1 + 1e-12)


def test_room_for_blocks_of_two_kinds() -> None:
    """Against every way to give each device so many of the one kind, with as many of the other as it may have
    beside them; one kind is a single row."""
    random = Random(1)
    found = set()
    for _ in range(300):
        devices, rare, common = random.randint(1, 4), random.choice((0, 0, 1, 2, 3)), random.randint(1, 6)
        most = [[random.randint(-1, 3) for _ in range(rare + 1)] for _ in range(devices)]
        allowed = np.array(
            [[[n <= own[row] for n in range(common + 1)] for row in range(rare + 1)] for own in most]
        )
        ways = (own for own in product(range(rare + 1), repeat=devices) if sum(own) == rare)
        room = any(
            all(own[row] >= 0 for own, row in zip(most, way, strict=True))
            and sum(min(own[row], common) for own, row in zip(most, way, strict=True)) >= common
            for way in ways
        )
        assert _has_room(allowed) == room
        found.add(room)
    assert found == {True, False}
