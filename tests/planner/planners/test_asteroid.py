"""Asteroid: its latency by the paper's own terms, its shares and its programme against brute force."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, pairwise

import numpy as np
import pytest

from pplan.cost_models.collectives import Routes, all_reduce_seconds
from pplan.cost_models.layer import Chain
from pplan.cost_models.memory import ledger, total
from pplan.cost_models.topology import Device, Group, Level, Link, Topology
from pplan.planner.candidate import Proposal
from pplan.planner.plan_options import PlanOptions
from pplan.planner.planners import PLANNERS
from pplan.planner.planners.asteroid import (
    AsteroidPlan,
    AsteroidSearch,
    ShareTables,
    shared_load,
    shared_step,
)
from pplan.planner.planners.replica_groups import MicroBatchChoice
from pplan.planner.problem import Problem
from pplan.planner.scoring import fastest
from pplan.planner.search.space import Space
from tests.stage_bytes import stage_bytes

MakeChain = Callable[..., Chain]
FAST, SLOW = Device("fast", 2500), Device("slow", 1200, 0.4)


def machine(fast: int, slow: int, latency: float = 0.0) -> Topology:
    groups = [Group(kind, count) for kind, count in ((FAST, fast), (SLOW, slow)) if count]
    levels = (Level("node", 2, Link(20.0, latency)), Level("network", None, Link(5.0, latency)))
    return Topology(tuple(groups), levels)


class StageTimes:
    """E_f, E_b and T_a of layers on devices that take so many samples each; inf where they do not fit."""

    def __init__(
        self, space: Space, a: int, b: int, ranks: Sequence[int], samples: Sequence[int], in_flight: int
    ) -> None:
        self.forward = self.backward = 0.0
        for rank, own in zip(ranks, samples, strict=True):
            kind = space.topology.device(rank)
            layers = space.chain.at(max(own, 1))
            need = ledger(
                stage_bytes(layers, a, b - 1), in_flight=in_flight, recompute="never", optimizer="sgd"
            )
            if own and total(need) > (kind.memory_bytes or np.inf):
                self.forward = self.backward = np.inf
            if own:
                self.forward = max(self.forward, float(layers.forward_seconds[a:b].sum()) / kind.speed)
                self.backward = max(self.backward, float(layers.backward_seconds[a:b].sum()) / kind.speed)
        gradients = float(space.chain.trainable_bytes[a:b].sum())
        self.reduced = float(all_reduce_seconds(space.topology, ranks, gradients))


def latency(steps: Sequence[tuple[float, float, float]], count: int) -> float:
    """Equations 4 to 6 and 11 of the paper: steps of E_f, E_b and T_a."""

    def aligned(c: int) -> float:
        return count * (steps[c][0] + steps[c][1]) + sum(f + b for f, b, _ in steps[:c])

    dominant = max(range(len(steps)), key=aligned)
    longest = 0.0
    for s, (_, _, reduced) in enumerate(steps):
        waiting = sum(f for f, _, _ in steps[:s])
        executing = count * (steps[dominant][0] + steps[dominant][1])
        if s < dominant:
            executing += sum(f + b for f, b, _ in steps[s:dominant])
        else:
            executing -= sum(f + b for f, b, _ in steps[dominant:s])
        longest = max(longest, waiting + executing + reduced)
    return longest


def allocations(parts: int, devices: int) -> Iterator[tuple[int, ...]]:
    """All ways to share so many samples."""
    for cuts in combinations(range(parts + devices - 1), devices - 1):
        yield tuple(b - a - 1 for a, b in pairwise((-1, *cuts, parts + devices - 1)))


@pytest.mark.parametrize("seeds", [(4,), pytest.param(range(6), marks=pytest.mark.slow)])
def test_shares_by_brute_force(seeds: Sequence[int], make_chain: MakeChain) -> None:
    """No allocation has a faster slowest replica, nor does one fit where none is made."""
    unequal = full = 0
    for seed in seeds:
        space = Space(make_chain(seed, 4, sizes=(1, 2, 4, 8), cuts=1.1), machine(2, 2), "sgd")
        kinds = [[FAST, SLOW], [FAST, FAST, SLOW], [FAST, SLOW, SLOW]][seed % 3]
        ranks = [[0, 2], [0, 1, 2], [0, 2, 3]][seed % 3]
        in_flight = [1, 3][seed // 3 % 2]
        tables = ShareTables(space, MicroBatchChoice("1f1b", 8, 6, ("never",)))
        assert (tables.parts, tables.unit) == (6, 1)
        made = tables.share(tuple(kinds), in_flight)
        cut_points = space.table(1).cut_points
        for i, j in combinations(range(len(cut_points)), 2):
            best = np.inf
            for samples in allocations(6, len(kinds)):
                own = StageTimes(space, cut_points[i], cut_points[j], ranks, samples, in_flight)
                each = [
                    StageTimes(space, cut_points[i], cut_points[j], [rank], [share], in_flight)
                    for rank, share in zip(ranks, samples, strict=True)
                ]
                if own.forward < np.inf:
                    best = min(best, max(one.forward + one.backward for one in each))
            shares = tuple(int(share) for share in made.shares[:, i, j])
            if best == np.inf:
                assert made.forward[i, j] == np.inf
                full += 1
                continue
            own = StageTimes(space, cut_points[i], cut_points[j], ranks, shares, in_flight)
            assert sum(shares) == 6
            assert made.forward[i, j] == pytest.approx(own.forward)
            assert made.backward[i, j] == pytest.approx(own.backward)
            seconds = [
                StageTimes(space, cut_points[i], cut_points[j], [rank], [share], in_flight)
                for rank, share in zip(ranks, shares, strict=True)
            ]
            assert max(one.forward + one.backward for one in seconds) == pytest.approx(best)
            unequal += len(set(shares)) > 1
    assert unequal > (25 if len(seeds) > 1 else 2)
    assert full > 0 or len(seeds) == 1


@pytest.mark.parametrize("seeds", [range(0, 24, 5), pytest.param(range(1, 24, 3), marks=pytest.mark.slow)])
def test_latency_and_programme_by_brute_force(seeds: range, make_chain: MakeChain) -> None:
    """The latency is that of the paper's terms; no partition is shorter, in most cases: the programme keeps
    one plan for each of its states, as the paper does."""
    ratios, several = [], 0
    for seed in seeds:
        fast, slow = [(2, 1), (1, 2), (2, 2), (3, 0)][seed % 4]
        chain = make_chain(seed, 5, sizes=(1, 2, 4), cuts=1.1, traffic=[0.02, 0.3][seed % 2])
        space = Space(chain, machine(fast, slow, [0.0, 0.1][seed // 2 % 2]), "sgd")
        choice = MicroBatchChoice("1f1b", [2, 8][seed // 4 % 2], 4, ("never",))
        order = tuple(range(fast + slow))
        search = AsteroidSearch(space, choice, order, 1, range(1, len(order) + 1))
        plan, best = search.best(len(order)), np.inf
        for count in range(1, len(order) + 1):
            for cuts in combinations(range(1, 5), count - 1):
                for groups in combinations(range(1, len(order)), count - 1):
                    ranks = [order[a:b] for a, b in pairwise((0, *groups, len(order)))]
                    best = min(best, estimate(search, (*cuts, 5), ranks))
        if plan is None:
            assert best == np.inf
            continue
        ends = tuple(space.table(1).cut_points[end] for end in plan.ends)
        assert plan.latency_seconds == pytest.approx(estimate(search, ends, plan.devices))
        ratios.append(plan.latency_seconds / best)
        several += len(plan.ends) > 1
    assert min(ratios) > 1 - 1e-9
    assert max(ratios) < 1.05
    assert np.mean(np.array(ratios) < 1 + 1e-9) > 0.7
    assert several > 1


def estimate(search: AsteroidSearch, ends: Sequence[int], ranks: Sequence[tuple[int, ...]]) -> float:
    """The latency of a plan with Algorithm 1's shares, from its layers."""
    space, choice, steps = search.space, search.choice, list[tuple[float, float, float]]()
    places, routes = list(space.table(1).cut_points), Routes(space.topology)
    for stage, (a, b) in enumerate(pairwise((0, *ends))):
        if stage:
            latency_seconds, each = routes.route(ranks[stage - 1], ranks[stage])
            bytes = float(space.chain.at(choice.size).output_bytes[a - 1])
            steps.append((latency_seconds + each * bytes, latency_seconds + each * bytes, 0.0))
        in_flight = min(2 * (len(ends) - stage) - 1, choice.micro_batches)
        shares = search.stages(ranks[stage], len(ends) - stage).shares[:, places.index(a), places.index(b)]
        if shares.sum() < choice.size:
            return np.inf
        own = StageTimes(space, a, b, ranks[stage], shares.tolist(), in_flight)
        steps.append((own.forward, own.backward, own.reduced))
    return latency(steps, choice.micro_batches) if np.isfinite(steps).all() else np.inf


def test_its_shares_are_simulated(make_chain: MakeChain) -> None:
    """With equal shares as the simulator's own plan; with those by speed faster, by as much as the slowest
    replica is; the proposal says what it counts."""
    chain = make_chain(3, 4, sizes=(1, 2, 4, 8), cuts=1.1, traffic=0.02)
    groups = Group(Device("fast", None), 1), Group(Device("slow", None, 0.4), 1)
    topology = Topology(groups, (Level("node", None, Link(20.0, 0.0)),))
    problem = Problem(chain, topology, PlanOptions(mini_batch=16, micro_batches=2, recompute="never"))
    proposal = next(iter(PLANNERS["asteroid"].propose(problem)))
    assert proposal.estimate_seconds is not None
    both = Proposal(proposal.config, (4,), ((0, 1),))
    even = fastest(problem.space, [both])
    assert even is not None
    assert shared_step(problem.space, both, [(4, 4)]) == pytest.approx(even.step_seconds)
    by_speed = shared_step(problem.space, both, [(6, 2)])
    busy = [float((chain.at(own).forward_seconds + chain.at(own).backward_seconds).sum()) for own in (4, 6)]
    slow, fast = 2 * busy[0] / 0.4, 2 * busy[1]
    assert even.step_seconds - by_speed == pytest.approx(slow - fast, rel=0.2)


@pytest.mark.parametrize("micro_batches", [2, 4])
def test_what_unequal_shares_hold_and_compute(micro_batches: int, make_chain: MakeChain) -> None:
    """Of two stages the first holds three micro-batches, if there are as many; a device without samples is
    idle."""
    chain = make_chain(3, 4, sizes=(1, 2, 4, 8), cuts=1.1)
    space = Space(chain, machine(2, 1), "sgd")
    plan = AsteroidPlan((2, 4), ((0, 1), (2,)), ((8, 0), (8,)), 1.0)
    most, busy = shared_load(space, plan, MicroBatchChoice("1f1b", micro_batches, 8, ("never",)))
    layers, held = chain.at(8), (min(3, micro_batches), 1)
    needs = [
        total(ledger(stage_bytes(layers, a, a + 1), in_flight=own, recompute="never", optimizer="sgd"))
        for a, own in zip((0, 2), held, strict=True)
    ]
    assert most == pytest.approx(max(map(float, needs)))
    seconds = layers.forward_seconds + layers.backward_seconds
    scales = [space.topology.device(rank).seconds_scale for rank in (0, 2)]
    assert busy == {
        0: pytest.approx(micro_batches * seconds[:2].sum() * scales[0]),
        1: 0.0,
        2: pytest.approx(micro_batches * seconds[2:].sum() * scales[1]),
    }
