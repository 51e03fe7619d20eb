"""What `pplan solve` answers, and what it refuses, about small profiles: nothing is stood in for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pplan
from pplan.planner.search.budget import SearchBudget
from pplan.profiler.profile_file import Profile

Run = Callable[..., Any]
SECONDS = 1e-3


def make_profile(
    layers: int, *, sizes: tuple[int, ...] = (1,), parameter_bytes: int = 10**8, trained: bool = True
) -> Profile:
    """Equal layers: forward 1 ms and backward 2 ms a sample."""
    rows = [
        {
            "name": f"l{index}",
            "kind": "Linear",
            "parameter_bytes": parameter_bytes,
            "trainable_bytes": parameter_bytes if trained or index else 0,
            "buffer_bytes": 0,
            "cut_after": True,
            "crossing": 1,
            "costs": [
                {
                    "micro_batch_size": size,
                    "forward_seconds": size * SECONDS,
                    "backward_seconds": 2 * size * SECONDS,
                    "output_bytes": 8 * size,
                    "saved_bytes": 8 * size,
                    "saved_input_bytes": 0,
                    "workspace_bytes": 0,
                }
                for size in sizes
            ],
        }
        for index in range(layers)
    ]
    document = {
        "schema": 1,
        "model": "toy",
        "device": "cuda",
        "device_name": "D",
        "dtype": "float32",
        "granularity": "block",
        "settings": {},
        "seed": 0,
        "layers": rows,
    }
    return Profile.parse(json.dumps(document), "toy")


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every search was stopped by its time limit at some point."""
    monkeypatch.setattr(SearchBudget, "was_interrupted", True)


@pytest.mark.usefixtures("interrupted")
def test_a_proven_answer_has_no_warning_about_the_time_limit(run: Run, here: Path) -> None:
    make_profile(6).save(here / "toy.profile.json", force=False)
    ran = run("solve", "--gpus", "2", "--memory", "8GiB", "--mini-batch", "4")
    assert "Optimal in the search space" in ran.out, ran.err
    assert "time limit" not in ran.out + ran.err
    plan = json.loads((here / "toy.plan.json").read_text())
    assert plan["prediction"]["exact"]
    assert plan["warnings"] == []


@pytest.mark.usefixtures("interrupted")
@pytest.mark.parametrize("objective", ["step-time", "memory"])
def test_an_answer_that_is_not_proven_has_the_warning(objective: str) -> None:
    options: dict[str, Any] = {"gpus": 6, "memory_bytes": 2**33, "mini_batch": 12, "objective": objective}
    plan = pplan.solve(make_profile(24), schedule="zb-h1", time_limit=0.001, **options)
    proven = plan.prediction.exact if plan.objective is None else plan.objective.exact
    assert not proven
    assert "the time limit of 0.001 s ended the search" in " ".join(plan.warnings)


def test_a_schedule_that_was_not_searched_and_is_faster_stands_in_the_second_line(
    run: Run, here: Path
) -> None:
    make_profile(8).save(here / "toy.profile.json", force=False)
    options = ("--gpus", "4", "--memory", "8GiB", "--mini-batch", "4")
    ran = run("solve", *options)
    first, second = ran.out.splitlines()[:2]
    assert first.startswith(
        "A pipeline of 2 stages over 4 GPUs is the fastest of the plans searched: 42.0 ms"
    )
    assert second == (
        "The baseline interleaved would take 33.1 ms (1.27 x faster): its schedule was not searched; "
        "search it with --schedule any."
    )
    searched = run("solve", *options, "--schedule", "any")
    assert "would take" not in searched.out
    assert json.loads((here / "toy.plan.json").read_text())["prediction"]["step_seconds"] <= 0.0332
