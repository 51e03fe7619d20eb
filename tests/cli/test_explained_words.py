"""What `pplan explain` says of machines whose memory is not known, of stages of one layer, and of plans that
differ in their devices alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pplan.cli.explain_tables import describe_other
from pplan.planner.plan_file import PlanRow

Run = Callable[..., Any]

TABLE = """name,forward_ms,backward_ms,activation_bytes,parameter_bytes
a,10,20,1000,400
b,12,22,1000,400
c,50,90,1000,400
"""


def explained(run: Run, here: Path, *options: str) -> str:
    (here / "m.csv").write_text(TABLE)
    assert run("import", "m.csv").status == 0
    assert run("solve", "--gpus", "2", "--mini-batch", "4", *options).status == 0
    return " ".join(run("explain").out.split())


def test_a_memory_that_is_not_known_is_not_doubled(run: Run, here: Path) -> None:
    words = explained(run, here, "--max-stages", "2", "--cut-after", "b")
    assert "The memory of the devices is not known: it forbids no plan here." in words
    assert "Memory forbids" not in words
    assert "double the memory" not in words
    assert "seconds of the layer of stage 1 (2)" in words


def test_a_memory_that_is_known_is_doubled(run: Run, here: Path) -> None:
    words = explained(run, here, "--memory", "16GiB")
    assert "Memory forbids no faster plan." in words
    assert "double the memory" in words


def test_a_part_of_a_device_is_named_as_one(run: Run, here: Path) -> None:
    (here / "m.csv").write_text(TABLE + "d,10,20,1000,400\ne,10,20,1000,400\n")
    assert run("import", "m.csv").status == 0
    assert run("solve", "--gpus", "2", "--mini-batch", "4", "--schedule", "interleaved").status == 0
    words = " ".join(run("explain").out.split())
    assert "of the first part of device" in words
    assert "layers of stage" not in words
    assert "layer of stage" not in words


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"devices": [[1], [2, 3]]}, ", on devices 1; 2-3"),
        ({"stage_recompute": ["always", "never"]}, " (always, never)"),
        ({"micro_batches": 8}, ""),
        ({}, ""),
    ],
)
def test_plans_of_the_same_words_are_told_apart(changed: dict[str, Any], words: str) -> None:
    own = {
        "step_seconds": 1.0,
        "samples_per_second": 16.0,
        "balance": [3, 1],
        "replicas": [1, 2],
        "devices": [[0], [1, 2]],
        "schedule": "1f1b",
        "virtual_stages": 1,
        "micro_batches": 16,
        "micro_batch_size": 1,
        "recompute": "by_stage",
        "stage_recompute": ["never", "always"],
    }
    plan, other = PlanRow.model_validate(own), PlanRow.model_validate(own | changed)
    start = (
        f"2 stages of 3-1 layers, replicas 1-2, {other.micro_batches} micro-batches x 1, 1f1b, "
        "recompute by-stage"
    )
    assert describe_other(other, plan) == start + words
