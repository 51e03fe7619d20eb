"""Galvatron's partitions against all partitions, by a second count of seconds and bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, pairwise
from math import inf
from typing import Any

import numpy as np
import pytest

from pplan.cost_models.layer import Chain
from pplan.cost_models.topology import Topology
from pplan.planner.balance import balance_table
from pplan.planner.plan_options import PlanOptions
from pplan.planner.planners import PLANNERS
from pplan.planner.planners.equal_replicas import StageTables, partition_for_memory, stage_tables
from pplan.planner.planners.replica_groups import micro_batch_choices
from pplan.planner.problem import Problem
from pplan.planner.scoring import fastest

MakeChain = Callable[..., Chain]


def sums(values: list[float]) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    until = np.append(0.0, np.cumsum(values))
    table = until[None, :] - until[:, None]
    return np.where(table > 0, table, inf)


def random_tables(seed: int, layers: int, depth: int) -> StageTables:
    rng = np.random.default_rng(seed)
    seconds = sums(rng.random(layers).tolist())
    sizes = sums(rng.random(layers).tolist())
    sizes_by_stage = [sizes * (depth - stage) for stage in range(depth)]
    return StageTables([seconds] * depth, sizes_by_stage, np.zeros_like(seconds))


def test_partition_by_brute_force() -> None:
    """The best is between the fullest device's least and what the partition by time needs, never worse than
    that by the estimate, and near the best of all partitions that are no fuller."""
    ratios = []
    for seed in range(30):
        tables = random_tables(seed, 10, 3)
        found = partition_for_memory(tables, 6)
        assert found is not None
        every = [(*cuts, 10) for cuts in combinations(range(1, 10), 2)]
        by_time = min(every, key=lambda ends: tables.slowest(ends)[0])
        fullest = min(tables.fullest(ends) for ends in every)
        most = max(
            tables.fullest(ends)
            for ends in every
            if tables.slowest(ends)[0] == pytest.approx(tables.slowest(by_time)[0])
        )
        assert fullest - 1e-12 <= tables.fullest(found) <= most + 1e-12
        assert tables.estimate(found, 6) <= tables.estimate(by_time, 6) * (1 + 1e-12)
        best = min(tables.estimate(ends, 6) for ends in every if tables.fullest(ends) <= most + 1e-12)
        ratios.append(tables.estimate(found, 6) / best)
    assert min(ratios) > 1 - 1e-12
    assert max(ratios) < 1.2


def test_tables_and_proposals(make_chain: MakeChain, make_topology: Callable[..., Topology]) -> None:
    """Depths are powers of two on all devices, what it takes to fit does fit, and the estimate is its
    formula, from the layers' own seconds."""
    chain = make_chain(3, 8, cuts=1.1, traffic=0.2)
    options = PlanOptions(mini_batch=16, optimizer="adam", memory_limit=2500)
    problem = Problem(chain, make_topology(4), options)
    proposals = list(PLANNERS["galvatron"].propose(problem))
    assert {len(own.ends) for own in proposals} <= {1, 2, 4}
    assert {len(own.ends) * own.replicas[0] for own in proposals} == {4}
    assert fastest(problem.space, proposals) is not None
    (choice,) = (one for one in micro_batch_choices(problem.configs) if one.size == 1)
    tables = stage_tables(problem.space, choice, 4, 1)
    own = next(one for one in proposals if len(one.ends) == 4 and one.config.micro_batch_size == 1)
    costs = chain.at(1)
    work = [
        float((costs.forward_seconds + costs.backward_seconds)[begin:end].sum())
        for begin, end in pairwise((0, *own.ends))
    ]
    again = [
        float(costs.forward_seconds[begin:end].sum())
        if tables_again(tables, stage, begin, end, work)
        else 0.0
        for stage, (begin, end) in enumerate(pairwise((0, *own.ends)))
    ]
    busy = [a + b for a, b in zip(work, again, strict=True)]
    assert own.estimate_seconds == pytest.approx(15 * max(busy) + sum(busy))


def tables_again(tables: StageTables, stage: int, begin: int, end: int, work: list[float]) -> bool:
    """Whether the stage's seconds hold a second forward."""
    return bool(tables.seconds[stage][begin, end] > work[stage] * (1 + 1e-9))


def test_no_memory(make_chain: MakeChain, make_topology: Callable[..., Topology]) -> None:
    problem = Problem(make_chain(3, 8), make_topology(4), PlanOptions(mini_batch=16, memory_limit=10))
    assert not list(PLANNERS["galvatron"].propose(problem))
    assert PLANNERS["galvatron"].refusal(problem).startswith("no depth that is a power of two")
    assert partition_for_memory(random_tables(0, 3, 3), 4) == (1, 2, 3)


@pytest.mark.parametrize("seed", range(20))
def test_all_partitions_on_the_way_are_looked_at(seed: int) -> None:
    """Layer by layer from the slowest stage to a neighbour that stays no slower and no device fuller than
    with even time: the least estimate of all that can be reached, and of even time."""
    tables = random_tables(seed, 7, 3)
    every = [(a, b, 7) for a in range(1, 6) for b in range(a + 1, 7)]

    def of(table: Sequence[Any], ends: tuple[int, ...]) -> list[float]:
        return [float(own[at]) for own, at in zip(table, pairwise((0, *ends)), strict=True)]

    by_memory, by_time = (tuple(balance_table(own.__getitem__, 3)) for own in (tables.bytes, tables.seconds))
    most = max(of(tables.bytes, by_time))
    reached, last = {by_memory}, set[tuple[int, ...]]()
    while reached != last:
        last = set(reached)
        for ends in last:
            own = of(tables.seconds, ends)
            slow = own.index(max(own))
            for cut, move in ((slow - 1, 1), (slow, -1)):
                if 0 <= cut < 2 and own[slow] > 0:
                    other = tuple(end + move * (index == cut) for index, end in enumerate(ends))
                    taker = slow - 1 if move == 1 else slow + 1
                    fits = other in every and max(of(tables.bytes, other)) <= most
                    if fits and of(tables.seconds, other)[taker] <= own[slow]:
                        reached.add(other)
    steps = [tables.estimate(ends, 4) for ends in {*reached, by_time}]
    chosen = partition_for_memory(tables, 4)
    assert chosen is not None
    assert chosen in {*reached, by_time}
    assert tables.estimate(chosen, 4) == pytest.approx(min(steps))


def test_the_slowest_stage() -> None:
    seconds = np.array([[0.0, 1.0, 5.0], [0.0, 0.0, 3.0], [0.0, 0.0, 0.0]])
    tables = StageTables([seconds, seconds], [seconds, seconds], np.zeros((3, 3)))
    assert tables.slowest((1, 2)) == (3.0, 1)
    assert tables.fullest((1, 2)) == 3.0
