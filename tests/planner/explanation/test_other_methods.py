"""Other methods of a problem: data parallelism by hand, and what they say of themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import pplan
from pplan.cost_models.errors import UsageError
from pplan.cost_models.layer import Chain
from pplan.cost_models.topology import Device, Group, Level, Link, Topology
from pplan.planner.candidate import ScoredPlan
from pplan.planner.explanation.compare import (
    OtherMethod,
    OtherMethodOptions,
    list_other_methods,
    make_workers,
)
from pplan.planner.joint_search import plan_with
from pplan.planner.plan_options import PlanOptions
from pplan.planner.planners import find_planner
from pplan.planner.problem import Problem

MakeChain = Callable[..., Chain]


def methods(chain: Chain, topology: Topology, **own: Any) -> dict[str, OtherMethod]:
    problem = Problem(chain, topology, PlanOptions(mini_batch=8))
    return {row.name: row for row in list_other_methods(problem, OtherMethodOptions(**own))}


def test_data_parallelism_by_hand(make_chain: MakeChain) -> None:
    """Two equal devices at 20 B/s, 4 samples each: c seconds, and the bytes of all weights."""
    chain = make_chain(1, 6, sizes=(1, 2, 4, 8))
    topology = Topology((Group(Device("toy", None), 2),), (Level("node", None, Link(20.0, 0.5)),))
    rows = methods(chain, topology, memory_bandwidth=200.0, staleness=2)
    costs, weights = chain.at(4), float(chain.trainable_bytes.sum())
    c, sent = float((costs.forward_seconds + costs.backward_seconds).sum()), weights / 20
    assert rows["dp-all-reduce"].step_seconds == pytest.approx(c + 2 * (sent / 2 + 0.5))
    cycle = c + 2 * sent + 2 * 0.5
    assert rows["dp-asynchronous"].step_seconds == pytest.approx(max(cycle, 2 * sent))
    assert rows["dp-stale-synchronous"].step_seconds == pytest.approx(max(cycle, 2 * sent))
    assert rows["dp-downpour"].step_seconds == pytest.approx(c + (2 * sent + 1) / 4)
    assert rows["dp-hogwild"].step_seconds == pytest.approx(max(c + 2 * weights / 200, 4 * weights / 200))
    assert rows["dp-synchronous"].step_seconds == pytest.approx(c + 3 * sent + 1.0)
    staleness = {name: (row.staleness, row.staleness_bounded) for name, row in rows.items()}
    assert staleness["dp-all-reduce"] == (0, False)
    assert staleness["dp-asynchronous"] == (1, False)
    assert staleness["dp-stale-synchronous"] == (2, True)
    for name, row in rows.items():
        if row.step_seconds is not None:
            assert row.samples_per_second == pytest.approx(8 / row.step_seconds)
            assert row.memory_bytes is not None
        else:
            assert row.reason, name
    assert rows["hetpipe-ed"].reason == "one node: as NP"
    assert "asteroid-shares" not in rows  # its shares are equal: a plan of pplan
    assert {row.energy_joules for row in rows.values()} == {None}
    powered = methods(chain, topology, watts={"toy": (300.0, 50.0)})["dp-all-reduce"]
    assert powered.energy_joules == pytest.approx(2 * (300 * c + 50 * 2 * (sent / 2 + 0.5)))
    with pytest.raises(UsageError, match="watts of other: the machine has none"):
        methods(chain, topology, watts={"toy": (300.0, 50.0), "other": (300.0, 50.0)})


def test_unlike_devices(make_chain: MakeChain) -> None:
    """Asteroid's shares follow the speeds, and are faster than equal ones."""
    chain = make_chain(3, 6, sizes=(1, 2, 4, 8), traffic=500.0)
    groups = Group(Device("fast", None), 1), Group(Device("slow", None, 0.3), 1)
    topology = Topology(groups, (Level("node", None, Link(2e3, 0.0)),))
    row = methods(chain, topology, watts="fast=100/10,slow=40/4")["asteroid-shares"]
    shares, said, *_ = row.detail.partition(" samples of each of ")
    fast, slow = map(int, shares.split(":"))
    assert said
    assert fast > slow > 0
    equal = chain.at(4)
    assert row.step_seconds is not None
    assert row.energy_joules is not None
    assert 14 * row.step_seconds < row.energy_joules < 140 * row.step_seconds
    assert row.step_seconds < float((equal.forward_seconds + equal.backward_seconds).sum()) / 0.3


def test_several_nodes_and_one_device(make_chain: MakeChain) -> None:
    chain, levels = make_chain(3, 6), (Level("node", 2, Link(2e4, 0.0)), Level("network", None, Link(5e3, 0)))
    rows = methods(chain, Topology((Group(Device("toy", None), 4),), levels))
    assert rows["dp-hogwild"].reason == "memory_bandwidth of the shared weights is not given"
    shared = methods(chain, Topology((Group(Device("toy", None), 4),), levels), memory_bandwidth=1e9)
    assert "in several nodes" in shared["dp-hogwild"].reason
    assert rows["hetpipe-np"].staleness_bounded
    topology = Topology((Group(Device("toy", None), 4),), levels)
    problem = Problem(chain, topology, PlanOptions(mini_batch=8, optimizer="adam"))
    adam = {row.name: row.memory_bytes for row in list_other_methods(problem, OtherMethodOptions())}
    states = 2 * float(chain.trainable_bytes.sum())
    assert adam["dp-all-reduce"] - adam["dp-asynchronous"] == pytest.approx(states, abs=2)  # type: ignore[operator]
    once = make_chain(3, 6, sizes=(2,))
    assert methods(once, Topology((Group(Device("a", None), 1), Group(Device("b", None, 0.5), 3)), levels))
    alone = methods(chain, Topology((Group(Device("toy", None), 1),), levels))
    assert alone["dp-all-reduce"].reason == "one device"


@pytest.mark.parametrize("watts", ["A100", "A100=400", "A100=60/400", {"A100": 400}, {}, 5, "A100=a/b"])
def test_watts_that_are_none(watts: Any) -> None:
    with pytest.raises(UsageError, match="watts"):
        OtherMethodOptions(watts=watts)


def test_compare_tells_the_energy(toy_profile: Path) -> None:
    """Of the plan: its stages' seconds, the rest of the step each device waits."""
    plan = pplan.solve(toy_profile, gpus=2, mini_batch=16, bandwidth=(1e9,))
    assert pplan.compare(plan, profile=toy_profile).rows[0].energy_joules is None
    rows = pplan.compare(plan, profile=toy_profile, watts="CUDA:0=400/60").rows
    busy = sum(
        (stage.forward_seconds + stage.backward_seconds) * plan.micro_batches * stage.replicas
        for stage in plan.stages
    )
    step = plan.prediction.step_seconds
    assert rows[0].energy_joules == pytest.approx(400 * busy + 60 * (2 * step - busy))
    alone = next(row for row in rows if row.name == "one-gpu")
    assert alone.energy_joules == pytest.approx(400 * alone.step_seconds, rel=0.05)  # type: ignore[operator]


def test_forwards_that_run_again_count(make_chain: MakeChain) -> None:
    """Data parallelism with and without what recomputing takes: a forward of each replica more."""
    chain = make_chain(1, 6, sizes=(1, 2, 4, 8))
    topology = Topology((Group(Device("toy", None), 2),), (Level("node", None, Link(20.0, 0.5)),))
    problem = Problem(chain, topology, PlanOptions(mini_batch=8))
    plan = plan_with(find_planner("data-parallel"), problem)
    assert isinstance(plan, ScoredPlan)
    size, count = plan.config.micro_batch_size // 2, plan.config.micro_batches
    forward = float(chain.at(size).forward_seconds.sum())
    never, always = (
        make_workers(problem, replace(plan, recompute=(mode,)), 3) for mode in ("never", "always")
    )
    assert never.servers == 3
    assert never.weight_bytes == never.gradient_bytes == pytest.approx(float(chain.trainable_bytes.sum()))
    assert (never.bandwidth_bytes_per_second, never.latency_seconds) == (20.0, 0.5)
    for less, more in zip(never.compute_seconds, always.compute_seconds, strict=True):
        assert more - less == pytest.approx(count * forward)
