"""The steps of planning anew, by hand: which plans are looked at, in what order, and which one is taken."""

from __future__ import annotations

from math import inf
from types import SimpleNamespace
from typing import Any

import pytest

from pplan.planner import device_loss as module
from pplan.planner.candidate import PipelineConfig, Proposal, ScoredPlan
from pplan.planner.device_loss import _Shapes

Patch = pytest.MonkeyPatch
POINTS = (0, 2, 3, 5, 8)
CONFIG, OTHER = PipelineConfig("1f1b", "never", 4, 2), PipelineConfig("1f1b", "always", 8, 1)
GPIPE = PipelineConfig("gpipe", "never", 4, 2)


def plan(seconds: float, ends: tuple[int, ...], devices: Any, config: PipelineConfig = CONFIG) -> ScoredPlan:
    return ScoredPlan(Proposal(config, ends, devices), ("never",) * len(ends), seconds)


def make(
    ranks: tuple[int, ...] = (0, 2, 3), counts: tuple[int, ...] = (1, 2, 3), within: float = 0.1, **more: Any
) -> Any:
    """Four devices, the last one the fastest; stages end at four places."""
    speeds = [1.0, 1.0, 1.0, 2.0]
    topology = SimpleNamespace(device=lambda rank: SimpleNamespace(speed=speeds[rank]))
    problem: Any = SimpleNamespace(
        **{
            "configs": (CONFIG, GPIPE, OTHER),
            "stage_counts": counts,
            "chain": SimpleNamespace(sizes=(1,)),
            "space": SimpleNamespace(table=lambda _: SimpleNamespace(cut_points=POINTS)),
            "topology": topology,
            "runtime": None,
            "options": SimpleNamespace(use_all=False),
            **more,
        }
    )
    own = _Shapes(problem, plan(1.0, (3, 8), ((0, 1), (2, 3))), ranks, within)
    vars(own)["_without_all"] = SimpleNamespace(allows=lambda _: True)
    return own


def seconds_of(own: Proposal) -> float:
    """Any number that is the same again, of no other plan."""
    return 10.0 + hash((own.ends, own.devices, own.config.micro_batches)) % 100_003 / 1e4


def scored(monkeypatch: Patch, seconds: Any = seconds_of) -> list[tuple[PipelineConfig, int, int]]:
    """What is scored side by side: configuration, number of stages, and of plans."""
    batches = []

    def score(_: Any, proposals: Any) -> Any:
        batches.append((proposals[0].config, len(proposals[0].ends), len(proposals)))
        assert len({(own.config, len(own.ends)) for own in proposals}) == 1
        for own in proposals:
            if seconds(own) < inf:
                yield ScoredPlan(own, ("never",) * len(own.ends), seconds(own))

    monkeypatch.setattr(_Shapes, "_score_alike", score)
    return batches


def test_smaller_micro_batches_where_the_first_do_not_fit(monkeypatch: Patch) -> None:
    """Where the present configuration has no plan, the others are tried at the start."""
    monkeypatch.setattr(module, "MOST_SHAPES", 3)
    scored(monkeypatch, lambda own: inf if own.config == CONFIG else seconds_of(own))
    own = make()
    own.look()
    assert {best.config for best in own.steps.values()} == {OTHER}
    scored(monkeypatch, lambda _: inf)
    none = make()
    none.look()
    assert none.steps == {}
