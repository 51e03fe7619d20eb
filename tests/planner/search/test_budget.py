"""What a search may spend, with a clock of the test's own."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import pytest

from pplan.planner.search.budget import WORK_A_SECOND, OutOfTime, SearchBudget


@dataclass
class Clock:
    """Stands still unless it is moved."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def test_parts_spend_from_the_whole() -> None:
    whole = SearchBudget(work=1e9)
    part = whole.part(6e8)
    part.spend(5e8)
    assert (whole.remaining, part.remaining) == (5e8, 1e8)
    other = whole.part(9e8)
    assert other.remaining == 5e8
    other.spend(5e8)
    assert part.spent
    assert whole.spent
    assert not whole.was_interrupted


def test_time_ends_the_whole_and_its_parts_and_is_remembered() -> None:
    clock = Clock()
    whole = SearchBudget.of_seconds(2.0, clock)
    part = whole.part()
    assert whole.remaining == 2 * WORK_A_SECOND
    clock.now = 1.9
    part.check()
    assert not whole.was_interrupted
    clock.now = 2.0
    with pytest.raises(OutOfTime):
        part.check()
    assert part.over
    assert part.spent
    assert whole.was_interrupted


def test_a_share_of_the_time_ends_before_the_whole() -> None:
    clock = Clock(10.0)
    whole = SearchBudget(seconds=4.0, clock=clock)
    part = whole.part(share=0.5)
    clock.now = 12.5
    assert part.over
    assert not whole.over


def test_without_limits_nothing_is_over_and_no_clock_is_read() -> None:
    def never() -> float:
        raise AssertionError

    budget = SearchBudget(clock=never).part(share=0.5)
    budget.extend(1_000)
    budget.simulate(10, 1_000)
    assert budget.remaining == inf
    assert not budget.over
