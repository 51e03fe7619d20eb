"""What is proven holds for some problems of every kind; benchmarks/proofs.py attacks thousands."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from attack.problems import KINDS
from attack.registry import BOUNDS


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_plan_contradicts_what_is_proven(kind: str, bounded_run: Any) -> None:
    results = bounded_run.by_kind[kind]
    assert not [violation for result in results for violation in result.violations]
    assert sum(bool(result.refused) for result in results) <= len(results) // 2
    assert sum(result.plans for result in results) > 100


@pytest.mark.slow
def test_every_check_is_made(bounded_run: Any) -> None:
    made = Counter[str]()
    for results in bounded_run.by_kind.values():
        for result in results:
            made.update(result.checks)
    assert set(made) >= {
        *("bound", "exact", "nothing fits", "alternatives", "planners", "ports"),
        *("before searching", "of whole plans", "objective's bound", "objective exact"),
        *("frontier's bound", "frontier's point", "frontier complete"),
        *("what-if", "second best", "other stages", "memory forbids"),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", BOUNDS)
def test_it_reaches_every_bound(name: str, bounded_run: Any) -> None:
    assert name in bounded_run.reached
