"""How far bandwidth is varied: no further than that of a link may be."""

from __future__ import annotations

from math import inf

import pytest

from pplan.cost_models.quantities import LEAST_RATE, MOST_RATE
from pplan.cost_models.topology import Device, Link, Topology, two_level_topology
from pplan.planner.explanation.explain_context import bandwidth_range, with_bandwidth


def nodes(inside: float, between: float) -> Topology:
    return two_level_topology(Device("toy", None), 4, 2, Link(inside, 0.0), Link(between, 0.0))


@pytest.mark.parametrize("inside", [LEAST_RATE, 3.0, 49.0, 1e9, MOST_RATE / 3, MOST_RATE, inf])
@pytest.mark.parametrize("between", [LEAST_RATE, 7.0, 1e9, MOST_RATE, inf])
@pytest.mark.parametrize("between_nodes", [False, True])
def test_both_ends_are_bandwidths(inside: float, between: float, between_nodes: bool) -> None:
    topology = nodes(inside, between)
    least, most = bandwidth_range(topology, 16, between_nodes=between_nodes)
    assert 1 / 16 <= least <= 1 <= most <= 16
    for factor in (least, most):
        with_bandwidth(topology, factor, between_nodes=between_nodes)


def test_only_links_that_vary_narrow_it() -> None:
    topology = nodes(MOST_RATE, 1e9)
    assert bandwidth_range(topology, 16) == (1 / 16, 1)
    assert bandwidth_range(topology, 16, between_nodes=True) == (1 / 16, 16)
    assert bandwidth_range(nodes(2, 4), 16)[0] == pytest.approx(1 / 2)
