"""Rates and durations as a file of a machine has them."""

from __future__ import annotations

import pytest

from pplan.cost_models.topology_file import _duration, _rate


@pytest.mark.parametrize(
    ("value", "text"), [(25e9, "25GB/s"), (1e9 / 3, "333333333.3333333B/s"), (float("inf"), "inf")]
)
def test_rates_are_written_in_gigabytes_where_that_is_exact(value: float, text: str) -> None:
    assert _rate(value) == text


@pytest.mark.parametrize(("value", "text"), [(5e-6, "5us"), (0.25, "250000us"), (1e-6 / 3, f"{1e-6 / 3!r}s")])
def test_durations_are_written_in_microseconds_where_that_is_exact(value: float, text: str) -> None:
    assert _duration(value) == text
