"""Orders of their own where the number of micro-batches is free: no slower than where a good one is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import pplan
from pplan.planner.search.budget import WORK_A_SECOND, SearchBudget


@pytest.mark.slow
def test_a_free_number_of_micro_batches_is_no_worse_than_a_given_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six equal blocks and a long head on four devices whose memory is short: two parts on each device
    are best, which the best known schedule of all numbers, with one part on each, does not lead to."""
    monkeypatch.setattr(SearchBudget, "of_seconds", lambda seconds: SearchBudget(seconds * WORK_A_SECOND))
    block = "4.0,8.0,8388608,234881024,201408512"
    rows = [
        "name,forward_ms,backward_ms,activation_bytes,saved_bytes,parameter_bytes",
        "embedding,0.2,0.5,8388608,65536,412090368",
        *(f"block{number},{block}" for number in range(6)),
        "norm,0.1,0.2,8388608,8388608,8192",
        "head,6.1,12.2,206045184,206045184,412090368",
    ]
    costs = tmp_path / "costs.csv"
    costs.write_text("\n".join(rows), encoding="utf-8")
    profile = pplan.import_profile(costs, micro_batch_size=4)
    options: dict[str, Any] = {
        "gpus": 4,
        "gpu": "a100-40gb",
        "memory_bytes": 6 * 2**30,
        "mini_batch": 64,
        "optimizer": "adam",
        "schedule": "synthesized",
    }
    free = pplan.solve(profile, **options)
    given = pplan.solve(profile, micro_batches=16, **options)
    assert free.prediction.step_seconds <= given.prediction.step_seconds
