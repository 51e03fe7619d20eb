"""Devices of PipeDream's stages, and the configurations that it plans."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from pplan.planner.candidate import PipelineConfig
from pplan.planner.planners import pipedream_planner as module
from pplan.planner.planners.pipedream_planner import NestedStage, _one_schedule, _within_reach, place_parts
from pplan.planner.planners.replica_groups import Tier

Patch = pytest.MonkeyPatch


def test_devices_of_three_levels() -> None:
    """Of two in a pair, two pairs in a node and two nodes: components are taken in turn, by every copy."""
    two = tuple(NestedStage(0, 1, 1) for _ in "ab")
    pair, single = (NestedStage(0, 1, 2),), NestedStage
    tiers = [Tier(2, 1.0)] * 3
    parts = [
        single(0, 4, 1, (single(0, 2, 1, two), single(2, 4, 1, pair))),
        single(4, 6, 1, (single(4, 6, 2, two),)),
    ]
    assert place_parts(parts, tiers) == [(0,), (1,), (2, 3), (4, 6), (5, 7)]
    parts = [single(0, 4, 2, (single(0, 2, 1, pair), single(2, 4, 1, two)))]
    assert place_parts(parts, tiers) == [(0, 1, 4, 5), (2, 6), (3, 7)]


def test_which_configurations_are_planned() -> None:
    """Of the first schedule that there is; where stages may recompute or not, only so."""
    every = [PipelineConfig(name, mode, 4, 2) for name in ("gpipe", "1f1b") for mode in ("never", "always")]
    name = next(own for own in module.SCHEDULES if own in ("gpipe", "1f1b"))
    assert _one_schedule(every) == [own for own in every if own.schedule == name]
    mixed = [*every, PipelineConfig(name, "by_stage", 4, 2)]
    assert _one_schedule(mixed) == [mixed[-1]]
    assert _one_schedule([PipelineConfig("zb-v", "never", 4, 2)]) == []
    for one_process, gpus, expected in ((True, 8, 4), (True, 4, None), (False, 8, None)):
        topology = SimpleNamespace(gpus=gpus, gpus_per_node=4, with_gpus=lambda n: n)
        space: Any = Space(one_process, topology)
        found: Any = _within_reach(space)
        assert found is space if expected is None else found.topology == expected


class Space:
    """With what `replace` needs."""

    def __init__(self, one_process: bool, topology: Any) -> None:
        self.one_process, self.topology = one_process, topology


@pytest.fixture(autouse=True)
def replaced(monkeypatch: Patch) -> None:
    monkeypatch.setattr(
        module,
        "replace",
        lambda own, **more: (
            Space(own.one_process, more["topology"]) if isinstance(own, Space) else replace(own, **more)
        ),
    )
