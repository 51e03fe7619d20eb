"""Which sizes are tried, and what is said of those that are not measured."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from pplan.cost_models.errors import ModelError
from pplan.profiler.size_sweep import budget_detail, is_left_out, list_unmeasured, seconds_text, sizes_to_try


@pytest.mark.parametrize(
    ("named", "device", "sizes"),
    [
        (None, "cpu", [1, 2, 4, 8, 16, 32, 64]),
        (None, "cuda:1", [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]),
        ((3, 100), "cpu", [3, 100]),
    ],
)
def test_powers_of_two_unless_sizes_are_named(
    named: Sequence[int] | None, device: str, sizes: list[int]
) -> None:
    assert list(sizes_to_try(named, torch.device(device))) == sizes


def test_only_a_default_size_of_one_may_fail() -> None:
    error = ModelError("batch norm refuses", "")
    assert is_left_out(1, None, error)
    assert not is_left_out(2, None, error)
    assert not is_left_out(1, (1, 2), error)


def test_larger_named_sizes_are_left_with_the_first() -> None:
    def told(named: Sequence[int] | None) -> list[tuple[int, str, str]]:
        left = list_unmeasured(4, named, "budget", "too long")
        return [(each.micro_batch_size, each.reason, each.detail) for each in left]

    assert told(None) == [(4, "budget", "too long")]
    assert told((2, 4, 6)) == [
        (4, "budget", "too long"),
        (6, "budget", "after micro-batch size 4: too long"),
    ]


def test_seconds_in_words() -> None:
    assert budget_detail(432.4, 0.123, 60.0) == "it would take about 432 s, 0.12 s of 60 s are left"
    assert budget_detail(9.96, -1.0, 0.5) == "it would take about 10 s, 0 s of 0.5 s are left"
    assert seconds_text(12.1, math.ceil) == "13 s"
