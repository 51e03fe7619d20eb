"""Parts of the search for divisions of blocks, by hand and against every division."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations_with_replacement, pairwise
from random import Random

import pytest

from pplan.planner.degrees.stage_divisions import _any_division, _mean_times


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


def farthest(rooms: list[int], weights: list[int]) -> Callable[[int, int, int], int | None]:
    """The end of the longest stage from a start whose blocks weigh no more than its room."""

    def end(stage: int, start: int, least: int) -> int | None:
        fitting = [
            end for end in range(start + least, len(weights) + 1) if sum(weights[start:end]) <= rooms[stage]
        ]
        return max(fitting, default=None)

    return end


@pytest.mark.parametrize("seed", range(40))
def test_any_division_is_found_where_there_is_one(seed: int) -> None:
    random = Random(seed)
    blocks, stages = random.randint(1, 7), random.randint(1, 4)
    weights = [random.choice((1, 1, 3)) for _ in range(blocks)]
    rooms = [random.randint(1, 9) for _ in range(stages)]
    fewest = [random.choice((0, 0, 1)) for _ in range(stages)]

    def fits(edges: tuple[int, ...]) -> bool:
        return all(
            b - a >= fewest[stage] and sum(weights[a:b]) <= rooms[stage]
            for stage, (a, b) in enumerate(pairwise(edges))
        )

    every = [
        (0, *inner, blocks)
        for inner in combinations_with_replacement(range(blocks + 1), stages - 1)
        if fits((0, *inner, blocks))
    ]
    found = _any_division(blocks, fewest, farthest(rooms, weights))
    if found is None:
        assert not every
    else:
        assert (0, *(own.stop for own in found)) in every
        assert [own.start for own in found] == [0, *(own.stop for own in found[:-1])]
