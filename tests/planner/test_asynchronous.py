"""Pipelines that are never flushed: what is said of them, and what a cut takes, by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from pplan.cost_models.layer import Chain
from pplan.cost_models.topology import Device, Group, Level, Link, Topology
from pplan.planner.asynchronous import asynchronous_notes, bubble, pace, steady_seconds
from pplan.planner.candidate import PipelineConfig, Proposal, ScoredPlan
from pplan.planner.search.space import Space

MakeChain = Callable[..., Chain]


def even(make_chain: MakeChain, layers: int, sizes: tuple[int, ...] = (2,)) -> Chain:
    """Layers of 1 s forward and 2 s backward a sample, of 10 bytes a sample between them, without weights."""
    chain = make_chain(0, layers, sizes=sizes, cuts=1.1)
    each, nothing = np.outer(np.ones(layers), sizes).astype(np.float64), np.zeros(layers)
    return replace(
        chain,
        forward_seconds=each,
        backward_seconds=2 * each,
        output_bytes=10 * each,
        forward_host_seconds=0 * each,
        backward_host_seconds=0 * each,
        parameter_bytes=nothing,
        trainable_bytes=nothing,
    )


def line(gpus: int, bandwidth: float, latency: float = 0.0) -> Topology:
    return Topology((Group(Device("toy", None), gpus),), (Level("node", None, Link(bandwidth, latency)),))


def plan(
    schedule: str, stages: int, micro_batches: int, virtual_stages: int = 1, size: int = 2
) -> ScoredPlan:
    parts = stages * virtual_stages
    devices = tuple((stage,) for stage in range(stages)) * virtual_stages
    config = PipelineConfig(schedule, "never", micro_batches, size, virtual_stages)
    return ScoredPlan(Proposal(config, tuple(range(1, parts + 1)), devices), ("never",) * parts, 1.0)


@pytest.mark.parametrize(
    ("own", "versions", "late"),
    [
        (plan("pipedream", 3, 1), "3-2-1 weight versions", "2-1-0 updates late;"),
        (plan("pipedream", 1, 1), "1 weight versions", "0 updates late;"),
        (plan("pipedream-2bw", 3, 4), "2 weight versions", "1 update late;"),
        (plan("pipedream-2bw", 2, 2), "2 weight versions", "1 update late;"),
        (
            plan("wpipe", 2, 4, 2),
            "1.5 weight versions",
            "1 update late in the first group of layers and never in the second;",
        ),
        (plan("xpipe", 3, 2), "3 weight versions, two of them predicted", "1-1-0 updates late;"),
    ],
    ids=lambda own: own.config.schedule if isinstance(own, ScoredPlan) else None,
)
def test_what_is_said_of_versions_and_late_gradients(own: ScoredPlan, versions: str, late: str) -> None:
    first, second = asynchronous_notes(own)
    assert first.startswith(
        f"{own.config.schedule} never waits for all gradients of a global batch: by stage"
    )
    assert f"by stage it keeps {versions}, and gradients are {late}" in first
    stages = len(own.proposal.ends) // own.config.virtual_stages
    assert second.startswith("the step is the time of one more global batch in the steady state; filling ")
    assert f" {stages} stage{'s' * (stages > 1)} once" in second


def test_steady_state_by_hand(make_chain: MakeChain) -> None:
    """Two stages of 2 s forward and 4 s backward a micro-batch of two samples, and a cut of 20 bytes.

    Fast links: a micro-batch ends every 6 s, and none waits. 2 bytes/s: the cut takes 10 s each way, in turn
    with 2 + 4 of both stages and 10 back before the next may go: (2 * 6 + 2 * 10) / 2 = 16 s.
    """
    for bandwidth, latency, seconds in (
        (1e9, 0.0, 6.0),
        (2.0, 0.0, 16.0),
        (1e9, 10.0, 16.0),
        (1.0, 0.0, 26.0),
    ):
        space = Space(even(make_chain, 2), line(2, bandwidth, latency), "sgd")
        own = plan("pipedream-2bw", 2, 4)
        assert pace(space, own.proposal, own.recompute) == pytest.approx(seconds, rel=1e-6)
        step = steady_seconds(space, own.proposal, own.recompute)
        assert step == pytest.approx(4 * seconds, rel=1e-6)
        assert bubble(space, replace(own, step_seconds=step)) == pytest.approx(1 - 6 / seconds, abs=1e-6)
