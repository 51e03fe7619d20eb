"""The ledger of two small models in training against live storages, as benchmarks/memory.py has it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from types import ModuleType

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/training_rows.py."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    import training_rows

    yielded: Any = training_rows
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == BENCHMARKS:
            monkeypatch.delitem(sys.modules, name)
    return yielded  # type: ignore[no-any-return]


SOME = (
    ("fp32", "adamw", False, torch.float32),
    ("mixed", "adamw", True, torch.bfloat16),
    ("autocast", "sgd", False, torch.float32),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "tied"])
def test_rows_are_within_one_percent(rows: ModuleType, name: str) -> None:
    made = list(rows.rows_of(name, 2, torch.device("meta"), SOME))
    assert len(made) == len(SOME)
    assert max(abs(row.error) for row in made) < 0.01
