"""Small spaces whose best plan the first bound, of nothing chosen yet, proves: it is the step of that plan.

A bound that is too high for some plan is found by brute force; one that has become lower is seen here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from pplan.cost_models.layer import Chain
from pplan.cost_models.runtime import RUNTIMES
from pplan.cost_models.topology import Device, Group, Link, Topology, two_level_topology
from pplan.planner.candidate import pipeline_configs
from pplan.planner.search.branch_and_bound import search
from pplan.planner.search.family import Family
from pplan.planner.search.placements import list_placements
from pplan.planner.search.space import Space

MakeChain = Callable[..., Chain]
TIGHT: dict[str, tuple[int, ...]] = {
    "free": (
        1,
        5,
        6,
        7,
        10,
        14,
        21,
        24,
        31,
        33,
        34,
        36,
        39,
        44,
        49,
        52,
        55,
        59,
        61,
        66,
        68,
        69,
        71,
        73,
        76,
        82,
    ),
    "torchgpipe": (
        2,
        6,
        9,
        11,
        16,
        31,
        35,
        36,
        37,
        39,
        42,
        48,
        49,
        54,
        55,
        57,
        58,
        59,
        62,
        65,
        66,
        72,
        74,
        78,
        83,
        84,
        85,
        88,
    ),
    "deepspeed": (
        2,
        3,
        7,
        12,
        15,
        19,
        20,
        21,
        22,
        25,
        34,
        35,
        37,
        39,
        45,
        47,
        48,
        56,
        59,
        62,
        63,
        65,
        66,
        67,
        72,
        76,
    ),
    "kinds": (
        5,
        7,
        8,
        10,
        13,
        17,
        19,
        20,
        21,
        28,
        30,
        32,
        37,
        39,
        40,
        68,
        69,
        72,
        76,
        89,
        90,
        92,
        99,
        100,
        104,
    ),
}
"""Of seeds by chance those with several stages of which it is so."""


def problem(kind: str, seed: int, make_chain: MakeChain) -> tuple[Space, list[Family]]:
    """Up to six layers on two to four devices: slow links and fast, memory that bites, late hosts, gradients
    that take time to add up; on `kinds` half of the devices are slower."""
    rng = np.random.default_rng([seed, len(kind)])
    chain = make_chain(
        seed,
        int(rng.integers(2, 7)),
        traffic=float(rng.choice([0, 0.1, 1])),
        cuts=float(rng.choice([0.7, 1.1])),
        adding=float(rng.choice([0, 0.5])),
    )
    late = float(rng.choice([0, 1, 8]))
    chain = replace(
        chain,
        forward_host_seconds=late * chain.forward_host_seconds,
        backward_host_seconds=late * chain.backward_host_seconds,
    )
    gpus, latency = int(rng.integers(2, 5)), float(rng.choice([0, 0.05]))
    memory = [None, 700, 1000, 1500][int(rng.integers(4))]
    inside, between = Link(20.0, latency), Link(5.0, 4 * latency)
    topology = two_level_topology(Device("toy", memory), gpus, int(rng.choice([2, 8])), inside, between)
    if kind == "kinds":
        slow = Device("slow", memory, speed=0.5)
        topology = Topology(
            (Group(topology.device(0), gpus // 2), Group(slow, gpus - gpus // 2)), topology.levels
        )
    runtime = RUNTIMES.get(kind)
    modes = ("never", "except_last", "always") if runtime else ("by_stage", "never", "except_last", "always")
    schedules = ("1f1b", "gpipe") if runtime is None else tuple({"1f1b", "gpipe"} & runtime.schedules)
    configs = pipeline_configs(4, sorted(schedules), modes, [1, 2, 4])  # type: ignore[arg-type]
    config = configs[int(rng.integers(len(configs)))]
    space = Space(chain, topology, "sgd", runtime=runtime)
    counts = [(1,)] if kind == "torchgpipe" else [(1,), (2,)] if kind == "deepspeed" else [(1, 2, 3)]
    placements = list_placements(topology) if runtime is None else list_placements(topology)[:1]
    return space, [Family(config, placement, own) for placement in placements for own in counts]


@pytest.mark.parametrize("kind", TIGHT)
def test_the_first_bound_is_the_best_step(kind: str, make_chain: MakeChain) -> None:
    for seed in TIGHT[kind]:
        space, families = problem(kind, seed, make_chain)
        found = search(space, families, range(1, space.topology.gpus + 1))
        assert found.exact
        assert found.best is not None
        assert len(found.best.proposal.ends) > 1
        assert found.root_bound_seconds == pytest.approx(found.best.step_seconds, rel=1e-9), seed
