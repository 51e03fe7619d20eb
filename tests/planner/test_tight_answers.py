"""Small problems whose best plan is proven, schedule by schedule, and those that take the universal bound.

That no plan is below what is proven is tested elsewhere; here, that what was proven once still is.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pplan.cost_models.layer import Chain
from pplan.cost_models.topology import Device, Group, Link, Topology, two_level_topology
from pplan.planner.joint_search import find_best_plan
from pplan.planner.plan_options import PlanOptions
from pplan.planner.problem import Problem
from pplan.planner.universal_bound import universal_bound

MakeChain = Callable[..., Chain]
PROVEN: dict[str, tuple[int, ...]] = {
    "1f1b": (18, 19, 42, 43),
    "gpipe": (0, 4, 39, 44),
    "zb-h1": (13, 18, 31, 50),
    "zb-h2": (0, 8, 20, 22),
    "zb-v": (1, 22, 30, 41),
    "interleaved": (17, 36, 42, 44),
    "looped-bfs": (10, 12, 17, 18),
    "dapple": (22, 27, 41, 58),
    "naive": (4, 30, 44, 45),
    "chimera": (26, 27, 28, 41),
    "dualpipe-v": (38, 40, 56, 58),
    "autopipe": (21, 22, 24, 25),
    "avgpipe": (3, 4, 6, 23),
}
"""By schedule, seeds by chance whose answer has several stages and is proven."""
REACHED: dict[str, tuple[int, ...]] = {
    "1f1b": (22,),
    "dapple": (22,),
    "naive": (16, 30, 44),
}
"""And of whose answer the universal bound is the step."""


def problem(schedule: str, seed: int, make_chain: MakeChain) -> Problem:
    """Up to eight layers on two to four devices of one kind or of two, in one node or two."""
    rng = np.random.default_rng([seed, *map(ord, schedule)])
    chain = make_chain(seed, int(rng.integers(3, 9)), traffic=float(rng.choice([0, 0.1, 1])), cuts=1.1)
    gpus, latency = int(rng.choice([2, 2, 3, 4])), float(rng.choice([0, 0.05]))
    memory = [None, None, 1500][int(rng.integers(3))]
    inside, between = Link(20.0, latency), Link(5.0, 4 * latency)
    topology = two_level_topology(Device("toy", memory), gpus, int(rng.choice([2, 8])), inside, between)
    if rng.random() < 0.3:
        slow = Device("slow", memory, speed=0.5)
        topology = Topology(
            (Group(topology.device(0), gpus // 2), Group(slow, gpus - gpus // 2)), topology.levels
        )
    return Problem(
        chain,
        topology,
        PlanOptions(mini_batch=8, micro_batches=int(rng.choice([2, 4, 8])), schedule=schedule),
    )


@pytest.mark.parametrize(
    "schedule",
    [pytest.param(own, marks=[pytest.mark.slow] * (index % 3 != 0)) for index, own in enumerate(PROVEN)],
)
def test_the_answer_is_proven(schedule: str, make_chain: MakeChain) -> None:
    for seed in PROVEN[schedule]:
        found = find_best_plan(problem(schedule, seed, make_chain), []).result
        assert found.best is not None
        assert len(found.best.proposal.ends) > 1
        assert found.exact, seed


@pytest.mark.parametrize("schedule", REACHED)
def test_the_universal_bound_is_the_best_step(schedule: str, make_chain: MakeChain) -> None:
    for seed in REACHED[schedule]:
        own = problem(schedule, seed, make_chain)
        best = find_best_plan(own, []).best
        assert best is not None
        bound = universal_bound(own, own.allowed_schedules)
        assert bound == pytest.approx(best.step_seconds, rel=1e-6), seed
