"""What of the all-reduce follows the backward, of all stages at once, against one stage at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from pplan.cost_models.collectives import exposed_all_reduce_seconds, gradient_buckets
from pplan.cost_models.layer import Chain
from pplan.cost_models.topology import Topology
from pplan.planner.search.space import Space

MakeChain = Callable[..., Chain]
MakeTopology = Callable[..., Topology]
Heavier = Callable[[Chain, Topology], tuple[Chain, Topology]]


@pytest.mark.parametrize("devices", [(0, 1), (1, 2), (0, 1, 2, 3, 4)])
@pytest.mark.parametrize("seed", range(6))
def test_every_stage(
    seed: int,
    devices: tuple[int, ...],
    make_chain: MakeChain,
    make_topology: MakeTopology,
    heavier: Heavier,
) -> None:
    """Layers of up to 60 MiB, some without gradients, some of a few bytes; some cuts forbidden."""
    rng = np.random.default_rng(seed)
    chain, topology = heavier(make_chain(seed, 14, cuts=0.8), make_topology(6, per_node=2, latency=0.01))
    gradients = chain.trainable_bytes * rng.choice([0, 1e-6, 0.02, 1], 14)
    space = Space(replace(chain, trainable_bytes=gradients), topology, "sgd")
    size = 2 * len(devices)
    team, costs = space.replica_group(size, devices), space.chain.at(2)
    cut_points, several = team.table.cut_points, 0
    for i, j in combinations(range(len(cut_points)), 2):
        own = slice(cut_points[i], cut_points[j])
        expected = exposed_all_reduce_seconds(costs.backward_seconds[own], gradients[own], topology, devices)
        assert team.exposed_allreduce[i, j] == pytest.approx(expected, rel=1e-9, abs=1e-12)
        several += len(gradient_buckets(gradients[own][::-1])) > 2
    assert several > 5


def test_one_device_has_nothing_to_reduce(
    make_chain: MakeChain, make_topology: MakeTopology, heavier: Heavier
) -> None:
    chain, topology = heavier(make_chain(1, 5), make_topology(2))
    assert not Space(chain, topology, "sgd").replica_group(2, (1,)).exposed_allreduce.any()
