"""Alpa's enumeration against brute force over all its plans, costed layer by layer; its submeshes by hand."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, pairwise, product

import numpy as np
import pytest

from pplan.cost_models.collectives import all_reduce_seconds
from pplan.cost_models.layer import Chain
from pplan.cost_models.memory import ledger, total
from pplan.cost_models.topology import Topology
from pplan.planner.planners import PLANNERS
from pplan.planner.planners.alpa import find_alpa_plan, submeshes
from pplan.planner.planners.replica_groups import MicroBatchChoice
from pplan.planner.problem import Problem
from pplan.planner.search.space import Space
from tests.stage_bytes import stage_bytes

MakeChain = Callable[..., Chain]
MakeTopology = Callable[..., Topology]


def stage_seconds(
    space: Space, choice: MicroBatchChoice, a: int, b: int, replicas: int, in_flight: int
) -> float:
    """A stage's micro-batch with its part of the all-reduce; inf where it does not fit."""
    layers = space.chain.at(-(-choice.size // replicas))
    f, w = float(layers.forward_seconds[a:b].sum()), float(layers.backward_seconds[a:b].sum())
    gradients = float(layers.trainable_bytes[a:b].sum())
    reduced = float(all_reduce_seconds(space.topology, range(replicas), gradients))
    held_bytes = stage_bytes(layers, a, b - 1)
    for mode, recompute in (("never", 0.0), ("always", f)):
        terms = ledger(
            held_bytes, in_flight=in_flight, recompute=mode, optimizer=space.optimizer, replicas=replicas
        )
        if space.memory_limit is None or total(terms) <= space.memory_limit:
            return f + w + recompute + reduced / choice.micro_batches
    return np.inf


def cost(space: Space, choice: MicroBatchChoice, ends: tuple[int, ...], replicas: tuple[int, ...]) -> float:
    """Sum of the stages and M - 1 times the slowest."""
    times = [
        stage_seconds(space, choice, a, b, own, min(choice.micro_batches, len(ends) - stage))
        for stage, ((a, b), own) in enumerate(zip(pairwise((0, *ends)), replicas, strict=True))
    ]
    if np.inf in times:
        return np.inf
    return sum(times) + (choice.micro_batches - 1) * max(times)


def least(space: Space, choice: MicroBatchChoice, gpus: int) -> float:
    """Of all plans on all devices."""
    cuts = [int(i) + 1 for i in np.flatnonzero(space.chain.cut_after)]
    sizes = [size for size in submeshes(gpus, space.topology.gpus_per_node) if size <= choice.size]
    return min(
        (
            cost(space, choice, (*chosen, len(space.chain)), replicas)
            for stages in range(1, min(gpus, len(cuts) + 1) + 1)
            for replicas in product(sizes, repeat=stages)
            if sum(replicas) == gpus
            for chosen in combinations(cuts, stages - 1)
        ),
        default=np.inf,
    )


def case(
    seed: int, make_chain: MakeChain, make_topology: MakeTopology
) -> tuple[Space, MicroBatchChoice, int]:
    rng = np.random.default_rng(seed)
    gpus = int(rng.integers(1, 7))
    chain = make_chain(seed, int(rng.integers(1, 9)), traffic=[0.01, 0.1, 1][seed % 3])
    topology = make_topology(gpus, per_node=[8, 2, 3][seed % 3], latency=[0, 0.05][seed % 2])
    space = Space(chain, topology, "adam", [None, 700, 1000, 1500, 3000][seed % 5])
    return (
        space,
        MicroBatchChoice("1f1b", [1, 2, 3, 8][seed % 4], [1, 2, 3, 4][seed // 4 % 4], ("by_stage",)),
        gpus,
    )


@pytest.mark.parametrize("seeds", [range(1, 150, 11), pytest.param(range(150), marks=pytest.mark.slow)])
def test_brute_force(seeds: range, make_chain: MakeChain, make_topology: MakeTopology) -> None:
    """Without a tolerance it finds the cheapest plan, and none where none fits; with one it misses little."""
    infeasible = several = replicated_pipeline = recomputing = 0
    for seed in seeds:
        space, choice, gpus = case(seed, make_chain, make_topology)
        expected, found = least(space, choice, gpus), find_alpa_plan(space, choice, gpus, tolerance=0.0)
        stepped = find_alpa_plan(space, choice, gpus)
        if found is None:
            assert expected == np.inf
            assert stepped is None
            infeasible += 1
            continue
        assert found.seconds == pytest.approx(expected, rel=1e-9)
        cut_points = space.table(space.chain.sizes[0]).cut_points
        ends = tuple(cut_points[end] for end in found.ends)
        assert cost(space, choice, ends, found.replicas) == pytest.approx(expected, rel=1e-9)
        assert stepped is not None
        assert expected * (1 - 1e-9) <= stepped.seconds <= expected * 1.02
        several += len(found.ends) > 1
        replicated_pipeline += max(found.replicas) > 1
        recomputing += found.recomputes
    assert infeasible > len(seeds) // 15
    assert several > len(seeds) // 4
    assert replicated_pipeline > len(seeds) // 4
    assert recomputing > len(seeds) // 60


@pytest.mark.parametrize("runtime", [None, "torchgpipe", "deepspeed"])
def test_proposals_of_a_runtime(
    runtime: str | None, make_chain: MakeChain, make_problem: Callable[..., Problem]
) -> None:
    problem = make_problem(make_chain(2, 8, cuts=1.0), 4, mini_batch=16, runtime=runtime)
    proposals = list(PLANNERS["alpa"].propose(problem))
    assert proposals
    for proposal in proposals:
        assert problem.allows(proposal)
        assert proposal.device_count == problem.usable_gpus
        assert proposal.config in problem.configs
