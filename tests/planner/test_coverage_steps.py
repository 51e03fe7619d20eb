"""What is said of the plans that were looked at, word by word, and which plans those are, one by one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from pplan.planner import coverage as module
from pplan.planner.candidate import PipelineConfig
from pplan.planner.coverage import (
    describe_exact_search,
)
from pplan.planner.plan_options import PlanOptions

Patch = pytest.MonkeyPatch
CONFIG = PipelineConfig("1f1b", "never", 4, 2)
OPTIONS = set(PlanOptions.__dataclass_fields__) - {"runtime"}


@dataclass(frozen=True)
class Place:
    """Devices in an order; a stage may leave one of them free."""

    ranks: tuple[int, ...]
    name: str = "ranks"
    in_words: str = "in rank order"

    def starts_after(self, position: int) -> tuple[int, ...]:
        return (position, position + 1)


@dataclass(frozen=True)
class Family:
    """Plans of a configuration, on an order of the devices."""

    config: PipelineConfig
    placement: Any
    replicas: tuple[int, ...] = (1, 2)
    on_all: bool = False
    any_count: bool = False


def make(**more: Any) -> Any:
    """1F1B and GPipe on 4 devices, where nothing else is said; options by their names."""
    options = {name: more.pop(name) for name in list(more) if name in OPTIONS}
    known = {
        "options": PlanOptions(mini_batch=8, **options),
        "gpus": 4,
        "runtime": None,
        "chain": SimpleNamespace(tied=[SimpleNamespace(name=name) for name in "abcd"]),
        "untied_reason": "",
        "heuristic_schedules": (),
        "makes_orders": options.get("schedule") == "synthesized",
        "allowed_schedules": ("1f1b", "gpipe"),
        "schedules": ("1f1b", "gpipe"),
        "stage_counts": (1, 2, 3),
        "may_be_deeper": False,
        "any_count": True,
        "any_devices": False,
        "configs": [CONFIG, replace(CONFIG, micro_batches=8, micro_batch_size=1)],
        "mini_batch": 8,
        "placements": [Place((0, 1, 2, 3)), Place((3, 2, 1, 0), in_words="backwards")],
        "replica_sets": [(1, 2, 4)],
        "families": [Family(CONFIG, Place((0, 1, 2, 3)))],
        "space": None,
    }
    return SimpleNamespace(**(known | more))


RUNTIME = SimpleNamespace(replicas="equal")


@pytest.fixture(autouse=True)
def small(monkeypatch: Patch) -> None:
    monkeypatch.setattr(module, "is_large", lambda *_: False)


def divided(problem: Any) -> list[str]:
    return describe_exact_search(problem).split(", ")


def test_words_of_a_large_problem() -> None:
    """Its bound is of any number of stages and replicas, and any order."""

    def relaxed(**more: Any) -> list[str]:
        return describe_exact_search(make(**more), relaxed=True).split(", ")

    assert relaxed(may_be_deeper=True)[:2] == ["any number of stages", "any number of replicas"]
    assert relaxed()[0] == "1 to 3 stages"
    assert relaxed(any_count=False, replica_sets=[(1, 2)])[1] == "1 to 2 replicas each"
    assert relaxed(any_count=False, runtime=RUNTIME)[1] == "equal replicas"
    assert relaxed()[-1] == "any order of the devices"
    assert "order" not in " ".join(relaxed(gpus=1))
    assert divided(make(may_be_deeper=True))[0] == "1 to 3 stages"
