"""How a mean of the bounds of interleaved stages counts their seconds, by hand."""

from __future__ import annotations

from random import Random

import pytest

from pplan.planner.degrees.stage_divisions import _mean_times


def test_how_often_a_mean_counts_each_virtual_stage() -> None:
    """Two devices with two virtual stages each, four micro-batches: weights of 7/15 and 8/15, which grow by
    1 / (1 - 1/8). Of chunk 0 a second counts 4 w, half of the weights behind its device, and for the second
    chunk half of 1 - 2 w; of chunk 1 nothing waits but what is behind."""
    first, second = 7 / 15, 8 / 15
    assert _mean_times(2, 2, 4) == pytest.approx(
        [
            4 * first + second / 2 + (1 - 2 * first) / 2,
            4 * second + (1 - 2 * second) / 2,
            4 * first + second / 2,
            4 * second,
        ]
    )
    assert _mean_times(1, 1, 5) == pytest.approx([5.0])
    assert _mean_times(1, 3, 2) == pytest.approx([2.0, 2.0, 2.0])


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("virtual", [1, 2, 3])
def test_a_mean_counts_no_more_than_the_slowest_device(stages: int, virtual: int) -> None:
    """The bounds by device and chunk of seconds by chance: their largest is no less than the mean."""
    random, count = Random(10 * stages + virtual), 2 * stages
    times = _mean_times(stages, virtual, count)
    for _ in range(50):
        seconds = [random.random() * (random.random() < 0.7) for _ in range(stages * virtual)]
        largest = 0.0
        for device in range(stages):
            own = seconds[device::stages]
            for chunk in range(virtual):
                waits = sum(seconds[: chunk * stages + device]) - stages * sum(own[:chunk])
                largest = max(largest, count * sum(own) + waits)
        assert sum(a * b for a, b in zip(times, seconds, strict=True)) <= largest * (1 + 1e-12)
