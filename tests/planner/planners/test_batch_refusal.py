"""Why data parallelism proposes nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pplan.planner.planners.rules import DATA_PARALLEL


@pytest.mark.parametrize(
    ("batch", "words"), [(9, "does not divide by 4 devices"), (8, "micro-batches asked for")]
)
def test_the_batch_or_the_micro_batches(batch: int, words: str) -> None:
    problem: Any = SimpleNamespace(topology=SimpleNamespace(gpus=4), runtime=None, mini_batch=batch)
    assert words in DATA_PARALLEL.refusal(problem)
