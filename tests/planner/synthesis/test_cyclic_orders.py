"""What `benchmarks/cyclic_orders.py` says of two stages' cycles, against runs of both that repeat them."""

from __future__ import annotations

import pytest
from cyclic_orders import SECONDS, TRANSFER, held, least_memory, more_waiting, starts, strings

ROUNDS = 12


def seconds_of_cycle(cycles: tuple[str, str], waiting: tuple[int, int], ahead: int) -> float:
    """Of the last rounds of two stages, on each of which as many micro-batches wait for their B, the first so
    many F's `ahead` of the second; infinite where they wait for each other for ever."""
    count = len(cycles[0]) // 3
    # By stage, the numbers of the next F and B; what is older has been done.
    numbers = [[100 + ahead, 100 + ahead - waiting[0]], [100, 100 - waiting[1]]]
    arrived = [dict.fromkeys(range(numbers[1][1]), 0.0), dict.fromkeys(range(numbers[0][0]), 0.0)]
    free, at = [0.0, 0.0], [0, 0]
    ends: list[list[float]] = [[], []]
    goes_on = True
    while goes_on:
        goes_on = False
        for stage in (0, 1):
            while at[stage] < 3 * count * ROUNDS:
                kind = cycles[stage][at[stage] % (3 * count)]
                begin, needed = free[stage], kind == "FB"[1 - stage]
                number = numbers[stage]["FB".index(kind)] if kind != "W" else 0
                if needed and number not in arrived[stage]:
                    break
                begin = max(begin, arrived[stage][number]) if needed else begin
                free[stage] = begin + SECONDS[kind]
                if kind != "W":
                    numbers[stage]["FB".index(kind)] += 1
                    if not needed:
                        arrived[1 - stage][number] = free[stage] + TRANSFER
                at[stage], goes_on = at[stage] + 1, True
                if at[stage] % (3 * count) == 0:
                    ends[stage].append(free[stage])
    if min(map(len, ends)) < ROUNDS - 1:
        return float("inf")
    return (max(own[ROUNDS - 2] for own in ends) - max(own[3] for own in ends)) / (ROUNDS - 5)


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_two_stages_never_wait_with_so_many_more_and_no_fewer(count: int) -> None:
    cycles = list(strings({"F": count, "B": count, "W": count}))
    period = count * sum(SECONDS.values())
    more = more_waiting(starts(cycles, "F", count), starts(cycles, "B", count), period)
    for first, own in enumerate(cycles):
        for second, other in enumerate(cycles):
            fewest = int(more[first, second])
            for extra, is_enough in ((fewest, True), (fewest - 1, False)):
                waiting = 20 + extra, 20
                shifts = range(-2 * count, 3 * count + 1)
                best = min(seconds_of_cycle((own, other), waiting, ahead) for ahead in shifts)
                assert (best <= period * (1 + 1e-9)) == is_enough


def test_cycles_are_counted_and_hold_what_they_say() -> None:
    """Necklaces by Burnside's lemma; a stage that does F, B and W in turns holds one more than wait."""
    assert [len(list(strings(dict.fromkeys("FBW", count)))) for count in (1, 2, 3)] == [2, 16, 188]
    assert held("FBW", 15, 0.0) == 16
    assert held("FBW", 15, 0.86) == pytest.approx(16.86)
    assert held("FFBWBW", 3, 0.0) == 5
    assert least_memory(4, 1, 0.0) == (2, 4.0)
