"""Other methods of a problem: data parallelism by hand, and what they say of themselves."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pplan.cost_models.layer import Chain
from pplan.cost_models.topology import Device, Group, Level, Link, Topology
from pplan.planner.explanation.other_methods import OtherMethod, OtherMethodOptions, list_other_methods
from pplan.planner.plan_options import PlanOptions
from pplan.planner.problem import Problem

MakeChain = Callable[..., Chain]


def methods(chain: Chain, topology: Topology, **own: float) -> dict[str, OtherMethod]:
    problem = Problem(chain, topology, PlanOptions(mini_batch=8))
    return {row.name: row for row in list_other_methods(problem, OtherMethodOptions(**own))}  # type: ignore[arg-type]


def test_data_parallelism_by_hand(make_chain: MakeChain) -> None:
    """Two equal devices at 20 B/s, 4 samples each: c seconds, and the bytes of all weights."""
    chain = make_chain(1, 6, sizes=(1, 2, 4, 8))
    topology = Topology((Group(Device("toy", None), 2),), (Level("node", None, Link(20.0, 0.5)),))
    rows = methods(chain, topology, memory_bandwidth=200.0, staleness=2)
    costs, weights = chain.at(4), float(chain.trainable_bytes.sum())
    c, sent = float((costs.forward_seconds + costs.backward_seconds).sum()), weights / 20
    assert rows["dp-ring"].step_seconds == pytest.approx(c + 2 * (sent / 2 + 0.5))
    assert rows["dp-tree"].step_seconds == pytest.approx(c + 2 * sent + 2 * 0.5)
    cycle = c + 2 * sent + 2 * 0.5
    assert rows["dp-asynchronous"].step_seconds == pytest.approx(max(cycle, 2 * sent))
    assert rows["dp-stale-synchronous"].step_seconds == pytest.approx(max(cycle, 2 * sent))
    assert rows["dp-downpour"].step_seconds == pytest.approx(c + (2 * sent + 1) / 4)
    assert rows["dp-hogwild"].step_seconds == pytest.approx(max(c + 2 * weights / 200, 4 * weights / 200))
    assert rows["dp-synchronous"].step_seconds == pytest.approx(c + 3 * sent + 1.0)
    staleness = {name: (row.staleness, row.staleness_bounded) for name, row in rows.items()}
    assert staleness["dp-ring"] == (0, False)
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


def test_unlike_devices(make_chain: MakeChain) -> None:
    """Asteroid's shares follow the speeds, and are faster than equal ones."""
    chain = make_chain(3, 6, sizes=(1, 2, 4, 8), traffic=500.0)
    groups = Group(Device("fast", None), 1), Group(Device("slow", None, 0.3), 1)
    topology = Topology(groups, (Level("node", None, Link(2e3, 0.0)),))
    row = methods(chain, topology)["asteroid-shares"]
    shares, said, *_ = row.detail.partition(" samples of each of ")
    fast, slow = map(int, shares.split(":"))
    assert said
    assert fast > slow > 0
    equal = chain.at(4)
    assert row.step_seconds is not None
    assert row.step_seconds < float((equal.forward_seconds + equal.backward_seconds).sum()) / 0.3


def test_several_nodes_and_one_device(make_chain: MakeChain) -> None:
    chain, levels = make_chain(3, 6), (Level("node", 2, Link(2e4, 0.0)), Level("network", None, Link(5e3, 0)))
    rows = methods(chain, Topology((Group(Device("toy", None), 4),), levels))
    assert rows["dp-hogwild"].reason == "memory_bandwidth of the shared weights is not given"
    shared = methods(chain, Topology((Group(Device("toy", None), 4),), levels), memory_bandwidth=1e9)
    assert "in several nodes" in shared["dp-hogwild"].reason
    assert rows["hetpipe-np"].staleness_bounded
    alone = methods(chain, Topology((Group(Device("toy", None), 1),), levels))
    assert alone["dp-ring"].reason == "one device"
