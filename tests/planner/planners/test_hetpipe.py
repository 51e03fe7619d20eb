"""HetPipe's virtual workers by hand, and their partitions against brute force."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, pairwise, permutations

import numpy as np
import pytest

from pplan.cost_models.layer import Chain
from pplan.cost_models.memory import ledger, total
from pplan.cost_models.topology import Device, Group, Level, Link, Topology
from pplan.planner.plan_options import PlanOptions
from pplan.planner.planners.hetpipe import (
    HetPipePlan,
    best_partition,
    find_hetpipe_plan,
    virtual_workers,
)
from pplan.planner.problem import Problem
from pplan.planner.search.space import Space
from tests.stage_bytes import stage_bytes

MakeChain = Callable[..., Chain]


def cluster(nodes: int, each: int, memory: int | None = None) -> Topology:
    """Nodes of one kind each, every one slower than the one before."""
    groups = tuple(Group(Device(f"kind{n}", memory, 1 / (1 + n)), each) for n in range(nodes))
    return Topology(groups, (Level("node", each, Link(40.0, 0.0)), Level("network", None, Link(8.0, 0.01))))


def test_policies(make_chain: MakeChain) -> None:
    """Of four nodes V, R, G, Q of four devices, as in the paper's table 3: NP VVVV..., ED VRGQ, HD VVQQ and
    RRGG."""
    problem = Problem(make_chain(1, 8), cluster(4, 4), PlanOptions(mini_batch=16))
    for policy, expected in (
        ("NP", ["VVVV", "RRRR", "GGGG", "QQQQ"]),
        ("ED", ["VRGQ"] * 4),
        ("HD", ["VVQQ", "VVQQ", "RRGG", "RRGG"]),
    ):
        own = virtual_workers(problem, policy)
        assert not isinstance(own, str)
        assert ["".join("VRGQ"[rank // 4] for rank in ranks) for ranks in own] == expected
        assert sorted(rank for ranks in own for rank in ranks) == list(range(16))
    three = Problem(make_chain(1, 8), cluster(3, 2), PlanOptions(mini_batch=16))
    assert virtual_workers(three, "HD") == "takes half of each of two nodes"
    deep = Problem(make_chain(1, 3, cuts=1.1), cluster(1, 4), PlanOptions(mini_batch=16))
    assert find_hetpipe_plan(deep, "NP") == "virtual workers of 4 devices: the cuts make 3 stages"
    whole = Problem(make_chain(1, 1), cluster(1, 4), PlanOptions(mini_batch=16))
    assert find_hetpipe_plan(whole, "NP") == "virtual workers of 4 devices: the cuts make 1 stage"
    as_deep = Problem(make_chain(1, 4, cuts=1.1), cluster(1, 4), PlanOptions(mini_batch=16))
    plan = find_hetpipe_plan(as_deep, "NP")
    assert not isinstance(plan, str)
    one = Problem(make_chain(1, 8), cluster(1, 2), PlanOptions(mini_batch=16))
    assert virtual_workers(one, "ED") == "one node: as NP"


def slowest_stage(space: Space, order: tuple[int, ...], ends: tuple[int, ...], concurrent: int) -> float:
    """Computing and receiving, counted layer by layer; inf where a stage does not fit."""
    layers, slowest, depth = space.chain.at(2), 0.0, len(order)
    for stage, (a, b) in enumerate(pairwise((0, *ends))):
        kind = space.topology.device(order[stage])
        seconds = float((layers.forward_seconds + layers.backward_seconds)[a:b].sum()) / kind.speed
        if stage:
            seconds += space.topology.link(order[stage - 1], order[stage]).seconds(
                float(layers.output_bytes[a - 1])
            )
        if stage + 1 < depth:
            seconds += space.topology.link(order[stage], order[stage + 1]).seconds(
                float(layers.output_bytes[b - 1])
            )
        count = concurrent - stage if concurrent >= depth else min(concurrent, depth - stage)
        need = ledger(
            stage_bytes(layers, a, b - 1),
            in_flight=count,
            recompute="never",
            optimizer="sgd",
            weight_versions=count,
        )
        slowest = max(slowest, seconds if total(need) <= (kind.memory_bytes or np.inf) else np.inf)
    return slowest


def test_partition_by_brute_force(make_chain: MakeChain) -> None:
    """Over all orders of the devices and all cuts."""
    infeasible = reordered = 0
    for seed in range(16):
        chain = make_chain(seed, 6, cuts=1.1, traffic=[0.05, 0.5][seed % 2])
        space = Space(chain, cluster(3, 1, [None, 1100][seed // 2 % 2]), "sgd")
        concurrent = [2, 3, 5][seed % 3]
        best = min(
            slowest_stage(space, order, (*cuts, 6), concurrent)
            for order in permutations(range(3))
            for cuts in combinations(range(1, 6), 2)
        )
        own = best_partition(space, (0, 1, 2), 2, concurrent)
        if own is None:
            assert best == np.inf
            infeasible += 1
            continue
        assert max(own.stage_seconds) == pytest.approx(best)
        assert slowest_stage(space, own.devices, own.ends, concurrent) == pytest.approx(best)
        reordered += own.devices != (0, 1, 2)
    assert infeasible > 0
    assert reordered > 3


def test_pace_and_staleness(make_chain: MakeChain) -> None:
    """All virtual workers wait for the slowest; s_global = (D + 1)(s_local + 1) + s_local - 1."""
    problem = Problem(make_chain(2, 8, traffic=0.05), cluster(2, 2), PlanOptions(mini_batch=16))
    for distance in (0, 2):
        plan = find_hetpipe_plan(problem, "NP", distance)
        assert isinstance(plan, HetPipePlan)
        assert len(plan.workers) == 2
        n = plan.concurrent
        intervals = [max(max(own.stage_seconds), sum(own.stage_seconds) / n) for own in plan.workers]
        weights = 2 * float(problem.chain.trainable_bytes.sum())
        wave = max(n * max(intervals), 2 * weights / 4 / 8.0)
        assert plan.wave_seconds == pytest.approx(wave)
        assert plan.samples_per_second == pytest.approx(2 * n * plan.mini_batch_size / wave)
        assert plan.local_staleness == n - 1
        assert plan.global_staleness == (distance + 1) * n + n - 2
