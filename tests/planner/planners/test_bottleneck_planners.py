"""SPP, Piper, BaPipe, PipeDream-2BW and AutoPipe against brute force over their own rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, pairwise, product

import numpy as np
import pytest

from pplan.cost_models.collectives import Routes, all_reduce_seconds
from pplan.cost_models.layer import Chain
from pplan.cost_models.memory import ledger, total
from pplan.cost_models.topology import Device, Group, Level, Link, Topology
from pplan.planner.balance import balance
from pplan.planner.candidate import Proposal
from pplan.planner.plan_options import PlanOptions
from pplan.planner.planners import PLANNERS
from pplan.planner.planners.bottleneck_planners import find_plans
from pplan.planner.planners.critical_stages import autopipe_partition
from pplan.planner.planners.equal_replicas import (
    bapipe_seconds,
    find_bapipe_plan,
)
from pplan.planner.planners.replica_groups import MicroBatchChoice
from pplan.planner.problem import Problem
from pplan.planner.search.space import Space
from pplan.planner.stage_table import Floats
from tests.stage_bytes import stage_bytes

MakeChain = Callable[..., Chain]
MakeTopology = Callable[..., Topology]


def partitions(chain: Chain, most: int) -> Iterator[tuple[int, ...]]:
    """Ends of stages at allowed cuts, of up to so many stages."""
    cuts = [int(i) + 1 for i in np.flatnonzero(chain.cut_after)]
    for stages in range(1, min(most, len(cuts) + 1) + 1):
        for chosen in combinations(cuts, stages - 1):
            yield (*chosen, len(chain))


class Stage:
    """What a stage costs, counted layer by layer on its own devices."""

    def __init__(self, space: Space, choice: MicroBatchChoice, a: int, b: int, ranks: Sequence[int]) -> None:
        self.layers = space.chain.at(-(-choice.size // len(ranks)))
        self.scale = space.topology.device(ranks[0]).seconds_scale
        self.space, self.choice, self.a, self.b, self.ranks = space, choice, a, b, ranks
        self.gradients = float(self.layers.trainable_bytes[a:b].sum())
        self.reduced = float(all_reduce_seconds(space.topology, ranks, self.gradients))

    def sent(self, end: int) -> float:
        """Bytes of a whole micro-batch behind so many layers."""
        inner = 0 < end < len(self.space.chain)
        return float(self.layers.output_bytes[end - 1]) * len(self.ranks) if inner else 0.0

    def busy(self, in_flight: int) -> float:
        """Forward and backward seconds, with recomputation where it must; inf where it does not fit."""
        f = float(self.layers.forward_seconds[self.a : self.b].sum()) * self.scale
        w = float(self.layers.backward_seconds[self.a : self.b].sum()) * self.scale
        own = stage_bytes(self.layers, self.a, self.b - 1)
        for mode, again in (("never", 0.0), ("always", f)):
            terms = ledger(
                own, in_flight=in_flight, recompute=mode, optimizer="adam", replicas=len(self.ranks)
            )
            if total(terms) <= (self.space.memory_limit or np.inf):
                return f + w + again
        return np.inf


def spp_bottleneck(stages: Sequence[Stage], routes: Routes) -> float:
    """The slowest stage or channel."""
    count, slowest = stages[0].choice.micro_batches, 0.0
    for number, own in enumerate(stages):
        in_flight = min(count, len(stages) - number)
        slowest = max(slowest, count * own.busy(in_flight) + own.reduced)
    for one, other in pairwise(stages):
        latency, each = routes.route(tuple(one.ranks), tuple(other.ranks))
        slowest = max(slowest, 2 * count * (latency + each * one.sent(one.b)))
    return slowest


def piper_time(stages: Sequence[Stage], bandwidth: float) -> float:
    """M times the time per sample."""
    count, slowest = stages[0].choice.micro_batches, 0.0
    for number, own in enumerate(stages):
        d = len(own.ranks)
        moved = 2 * (own.sent(own.a) + own.sent(own.b)) / d
        exchanged = 4 * (d - 1) / d * own.gradients / count
        busy = own.busy(min(count, len(stages) - number))
        slowest = max(slowest, count * (busy + (moved + exchanged) / bandwidth))
    return slowest


def spaces(make_chain: MakeChain, make_topology: MakeTopology, seeds: range) -> Iterator[tuple[Problem, int]]:
    for seed in seeds:
        rng = np.random.default_rng(seed)
        gpus = int(rng.integers(1, 6))
        chain = make_chain(seed, int(rng.integers(2, 8)), traffic=[0.01, 0.1, 1][seed % 3])
        topology = make_topology(gpus, per_node=[8, 2, 3][seed % 3], latency=[0, 0.05][seed % 2])
        memory = [None, 700, 1000, 1500, 3000][seed % 5]
        yield Problem(chain, topology, PlanOptions(mini_batch=8, optimizer="adam", memory_limit=memory)), seed


@pytest.mark.parametrize("seeds", [range(1, 60, 7), pytest.param(range(60), marks=pytest.mark.slow)])
def test_spp_and_piper_by_brute_force(
    seeds: range, make_chain: MakeChain, make_topology: MakeTopology
) -> None:
    """SPP: of every number of stages on all devices; Piper: on any number of them."""
    several = replicated = infeasible = 0
    for problem, seed in spaces(make_chain, make_topology, seeds):
        space, gpus = problem.space, problem.gpus
        choice = MicroBatchChoice("1f1b", [2, 8][seed % 2], [1, 2, 4][seed // 4 % 3], ("by_stage",))
        routes, bandwidth = Routes(space.topology), space.topology.link(0, gpus - 1 or 0)
        spp: dict[int, float] = {}
        piper = np.inf
        for ends in partitions(space.chain, gpus):
            for replicas in product(range(1, min(gpus, choice.size) + 1), repeat=len(ends)):
                if sum(replicas) > gpus:
                    continue
                firsts = np.concatenate([[0], np.cumsum(replicas)])
                stages = [
                    Stage(space, choice, a, b, range(firsts[i], firsts[i + 1]))
                    for i, (a, b) in enumerate(pairwise((0, *ends)))
                ]
                piper = min(piper, piper_time(stages, bandwidth.bandwidth_bytes_per_second))
                if sum(replicas) == gpus:
                    spp[len(ends)] = min(spp.get(len(ends), np.inf), spp_bottleneck(stages, routes))
        plans = {len(plan.ends): plan for plan, _ in find_plans(space, choice, problem, spp=True)}
        best = {count: seconds for count, seconds in spp.items() if seconds < np.inf}
        assert {count: plan.value for count, plan in plans.items()} == pytest.approx(best, rel=1e-9)
        own = find_plans(space, choice, problem, spp=False)
        assert (own[0][0].value if own else np.inf) == pytest.approx(piper, rel=1e-9)
        infeasible += not own
        several += any(count > 1 for count in plans)
        replicated += any(max(plan.sizes) > 1 for plan in plans.values())
    assert infeasible > len(seeds) // 20
    assert several > len(seeds) * 5 // 12
    assert replicated > len(seeds) // 4


def test_bapipe_by_brute_force(make_chain: MakeChain) -> None:
    """Unlike devices: the most even partition whose transfers take no longer than an ideal stage, if any."""
    coarse = 0
    for seed in range(60):
        fast, slow = Group(Device("fast", None), 2), Group(Device("slow", None, 0.4), 2)
        level = Level("node", None, Link([5.0, 10.0][seed // 3 % 2], 0.0))
        topology = Topology((fast, slow), (level,))
        chain = make_chain(seed, 6, traffic=[0.5, 1][seed % 2], cuts=0.9)
        space, stages = Space(chain, topology, "adam", [None, 900][seed // 6 % 2]), 2 + seed % 3
        choice = MicroBatchChoice("1f1b", 8, 2, ("by_stage",))
        costs, work = chain.at(2), chain.at(2).forward_seconds + chain.at(2).backward_seconds
        ideal = 1 / sum(topology.device(rank).speed / work.sum() for rank in range(stages))
        by_coarse: dict[bool, list[tuple[float, tuple[int, ...]]]] = {True: [], False: []}
        for ends in partitions(chain, stages):
            if len(ends) == stages:
                busy = busiest(space, choice, ends)
                sent = max(float(costs.output_bytes[end - 1]) for end in ends[:-1])
                seconds = sent / level.link.bandwidth_bytes_per_second
                if busy < np.inf:
                    by_coarse[seconds <= ideal].append((busy, ends))
        expected = min(by_coarse[True] or by_coarse[False], default=None)
        plan = find_bapipe_plan(space, choice, stages)
        if expected is None or plan is None:
            assert plan is expected
            continue
        ends = tuple(space.table(chain.sizes[0]).cut_points[end] for end in plan[1])
        assert (busiest(space, choice, ends), ends) in [*by_coarse[True], *by_coarse[False]]
        assert busiest(space, choice, ends) == pytest.approx(expected[0])
        coarse += bool(by_coarse[True]) and bool(by_coarse[False]) and min(by_coarse[False]) < expected
    assert coarse > 3


def busiest(space: Space, choice: MicroBatchChoice, ends: Sequence[int]) -> float:
    """Seconds of the slowest stage, one a device."""
    own = [Stage(space, choice, a, b, [i]) for i, (a, b) in enumerate(pairwise((0, *ends)))]
    return max(stage.busy(min(8, len(ends) - i)) for i, stage in enumerate(own))


def test_bapipe_counts_the_transfers_of_1f1b() -> None:
    """3 stages, 4 micro-batches, stages of 10 s and transfers of 1 s each way."""
    assert bapipe_seconds(10, 1, 4, 3) == (4 + 3 - 1) * 10 + (3 - 1) * 2


def event_times(forward: Sequence[float], backward: Sequence[float], *, count: int) -> float:
    """1F1B by its dependencies alone: each stage's list, in order, as early as its inputs are there."""
    p = len(forward)
    lists = []
    for s in range(p):
        warm = min(count, p - s)
        own = [("F", m) for m in range(warm)]
        for m in range(count):
            own += [("B", m)] + ([("F", m + warm)] if m + warm < count else [])
        lists.append(own)
    ends: dict[tuple[str, int, int], float] = {}
    at, clock = [0] * p, [0.0] * p
    while any(at[s] < len(lists[s]) for s in range(p)):
        for s in range(p):
            while at[s] < len(lists[s]):
                kind, m = lists[s][at[s]]
                before = (kind, s - 1, m) if kind == "F" else (kind, s + 1, m)
                if 0 <= before[1] < p and before not in ends:
                    break
                start = max(clock[s], ends.get(before, 0.0))
                clock[s] = ends[kind, s, m] = start + (forward[s] if kind == "F" else backward[s])
                at[s] += 1
    return max(clock)


def least_step(forward: Floats, backward: Floats, stages: int, count: int) -> float:
    """Of 1F1B over all partitions."""
    steps = []
    for cuts in combinations(range(1, len(forward)), stages - 1):
        bounds = list(pairwise((0, *cuts, len(forward))))
        own = [[float(part[a:b].sum()) for a, b in bounds] for part in (forward, backward)]
        steps.append(event_times(*own, count=count))
    return min(steps)


def test_autopipe() -> None:
    """Its simulated seconds are those of the dependencies, and it is near the best of all partitions."""
    ratios, improved = [], 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        stages = int(rng.integers(2, 5))
        forward = rng.random(9) + 0.2
        backward = forward * (1 + rng.random(9))
        count = 2 * stages
        ends, seconds = autopipe_partition(forward, backward, stages, count)
        own = [[float(part[a:b].sum()) for a, b in pairwise((0, *ends))] for part in (forward, backward)]
        assert seconds == pytest.approx(event_times(*own, count=count))
        for fewer in (1, 2, stages):
            _, alone = autopipe_partition(np.array(own[0]), np.array(own[1]), stages, fewer)
            assert alone == pytest.approx(event_times(*own, count=fewer))
        ratios.append(seconds / least_step(forward, backward, stages, count))
        improved += ends != tuple(np.cumsum(balance(forward + backward, stages)).tolist())
    assert min(ratios) > 1 - 1e-9
    assert max(ratios) < 1.12
    assert np.median(ratios) < 1.02
    assert improved > 5


@pytest.mark.parametrize("memory", [None, 2000])
def test_width_and_depth_by_brute_force(
    memory: int | None, make_chain: MakeChain, make_topology: MakeTopology
) -> None:
    """Every width and depth, with recomputation and without, of equal numbers of layers."""
    chain = make_chain(3, 8, cuts=1.1, traffic=0.2)
    problem = Problem(
        chain, make_topology(4), PlanOptions(mini_batch=16, optimizer="adam", memory_limit=memory)
    )
    proposals: list[Proposal] = list(PLANNERS["pipedream-2bw"].propose(problem))
    assert proposals
    for proposal in proposals:
        config = proposal.config
        best = np.inf
        count, size = config.micro_batches, config.micro_batch_size
        for depth, width in ((1, 4), (2, 2), (4, 1)):
            if size % width or not problem.space.fits_someone(size, width):
                continue
            choice = MicroBatchChoice("1f1b", count, size, ("by_stage",))
            own = [
                Stage(problem.space, choice, a, b, range(i * width, (i + 1) * width))
                for i, (a, b) in enumerate(pairwise(range(0, 9, 8 // depth)))
            ]
            for again in (0, 1):
                slowest = 0.0
                for i, stage in enumerate(own):
                    layers, (a, b) = stage.layers, (stage.a, stage.b)
                    f, w = layers.forward_seconds[a:b].sum(), layers.backward_seconds[a:b].sum()
                    terms = ledger(
                        stage_bytes(layers, a, b - 1),
                        in_flight=min(config.micro_batches, depth - i),
                        recompute="always" if again else "never",
                        optimizer="adam",
                        replicas=width,
                    )
                    if memory is not None and total(terms) > memory:
                        slowest = np.inf
                    moved = 2 * stage.sent(a) / 20 / width
                    slowest = max(slowest, f * (1 + again) + w + moved, stage.reduced / config.micro_batches)
                best = min(best, config.micro_batches * slowest)
        assert proposal.estimate_seconds == pytest.approx(best)
