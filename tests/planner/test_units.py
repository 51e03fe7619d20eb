"""A small problem in other units of time has the same plan: no cost of the planner has seconds of its own.

All seconds of the layers and the links' latencies are multiplied by a power of two, which rounds nothing, and
the bandwidths are divided by it. Cuts, replicas, micro-batches, schedule and recomputation must stay, and the
step and its bound be that many times as long. Of bytes the like does not hold: DistributedDataParallel's
buckets have a size of their own, and each costs the link's latency.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pplan.cost_models.layer import Chain
from pplan.cost_models.topology import Topology
from pplan.planner.joint_search import find_best_plan
from pplan.planner.plan_options import PlanOptions
from pplan.planner.problem import Problem

MakeChain = Callable[..., Chain]
MakeTopology = Callable[..., Topology]
InUnits = Callable[[Chain, Topology, float], tuple[Chain, Topology]]

CASES: dict[str, tuple[int, int, dict[str, Any], dict[str, Any]]] = {
    "one node": (6, 4, {}, {}),
    "two nodes": (6, 4, {"per_node": 2}, {}),
    "latency": (5, 3, {"latency": 0.2}, {}),
    "little memory": (6, 3, {"memory": 1500}, {}),
    "zero-bubble": (6, 3, {}, {"schedule": "zb-h1"}),
    "any schedule": (5, 2, {}, {"schedule": "any"}),
}
"""By name: layers, devices, what the machine has, options."""
QUICK = ("one node", "little memory")


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        pytest.param(name, seed, marks=[pytest.mark.slow] * (seed == 1 or name not in QUICK))
        for name in CASES
        for seed in range(2)
    ],
)
def test_the_plan_is_the_same_in_other_units_of_time(
    name: str, seed: int, make_chain: MakeChain, make_topology: MakeTopology, in_units: InUnits
) -> None:
    layers, gpus, machine, options = CASES[name]
    chain, topology = make_chain(seed, layers), make_topology(gpus, **machine)

    def answer(factor: float) -> Any:
        own = in_units(chain, topology, factor)
        return find_best_plan(Problem(*own, PlanOptions(mini_batch=8, **options)))

    now, factor = answer(1.0), 2.0**-30
    other = answer(factor)
    assert (now.best is None) == (other.best is None)
    if now.best is not None:
        assert other.best.proposal == now.best.proposal
        assert other.best.step_seconds == pytest.approx(factor * now.best.step_seconds, rel=1e-12)
        assert other.result.bound_seconds == pytest.approx(factor * now.result.bound_seconds, rel=1e-9)
        assert other.result.exact == now.result.exact
