"""Plans for the devices that are left, against every plan on them and every way to give them out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, permutations, product
from typing import Any

import numpy as np
import pytest

from pplan.cost_models.errors import InfeasibleError, UsageError
from pplan.cost_models.layer import Chain
from pplan.cost_models.topology import Device, Group, Level, Link, Topology
from pplan.planner.candidate import Proposal, ScoredPlan
from pplan.planner.device_loss import _Shapes, replan_problem
from pplan.planner.joint_search import find_best_plan
from pplan.planner.plan_options import PlanOptions
from pplan.planner.problem import Problem
from pplan.planner.scoring import fastest
from pplan.planner.universal_bound import universal_bound
from pplan.planner.weight_moves import layers_by_device, list_moves

MakeChain = Callable[..., Chain]


def alike(gpus: int, memory: int | None = None, *, per_node: int | None = None) -> Topology:
    levels = [Level("node", per_node, Link(20.0, 0.1))]
    if per_node:
        levels.append(Level("network", None, Link(5.0, 0.5)))
    return Topology((Group(Device("toy", memory), gpus),), tuple(levels))


def solved(chain: Chain, topology: Topology, **options: Any) -> tuple[Problem, ScoredPlan]:
    problem = Problem(chain, topology, PlanOptions(mini_batch=8, **options))
    best = find_best_plan(problem).best
    assert best is not None
    return problem, best


def weight_bytes(chain: Chain) -> list[float]:
    return [float(own) for own in chain.parameter_bytes + chain.buffer_bytes]


def moved(chain: Chain, before: ScoredPlan, after: Proposal) -> float:
    """Layer by layer and device by device."""
    bytes, had = weight_bytes(chain), set()
    for (first, end), ranks in zip(before.proposal.bounds, before.proposal.devices, strict=True):
        had |= {(rank, layer) for rank in ranks for layer in range(first, end)}
    return sum(
        bytes[layer]
        for (first, end), ranks in zip(after.bounds, after.devices, strict=True)
        for rank in ranks
        for layer in range(first, end)
        if (rank, layer) not in had
    )


def every_plan(problem: Problem, schedule: str, ranks: list[int]) -> Iterator[ScoredPlan]:
    """The fastest of each choice of cuts, micro-batches and devices, one by one; replicas in rank order."""
    layers = len(problem.chain)
    cuts = [int(layer) + 1 for layer in np.flatnonzero(problem.chain.cut_after)]
    for stages in range(1, len(ranks) + 1):
        for ends, counts in product(
            combinations(cuts, stages - 1), product(range(1, len(ranks) + 1), repeat=stages)
        ):
            if sum(counts) > len(ranks):
                continue
            shapes = set()
            for order in permutations(ranks, sum(counts)):
                left = iter(order)
                shapes.add(tuple(tuple(sorted(next(left) for _ in range(count))) for count in counts))
            for config in problem.configs:
                if config.schedule != schedule:
                    continue
                first = fastest(problem.space, [Proposal(config, (*ends, layers), min(shapes))])
                if first is not None:  # devices are alike: the others are as fast
                    for devices in shapes:
                        proposal = Proposal(config, (*ends, layers), devices)
                        yield ScoredPlan(proposal, first.recompute, first.step_seconds)


@pytest.mark.parametrize(
    "seed", [pytest.param(s, marks=[pytest.mark.slow] * (s not in (1, 2, 5))) for s in range(6)]
)
def test_against_every_plan(seed: int, make_chain: MakeChain) -> None:
    """The least bytes among those of at most so much more than the shortest step."""
    chain = make_chain(seed, 4, traffic=[0.1, 1][seed % 2], cuts=1.1)
    micro_batches = [None, 4][seed % 2]
    problem, best = solved(chain, alike(4, [None, 1_500][seed // 4]), micro_batches=micro_batches)
    lost = [[0], [3], [1], [0, 2]][seed % 4]
    within = [0.0, 0.05, 0.5][seed % 3]
    answer = replan_problem(problem, best, lost, within)
    assert answer.complete
    ranks = [rank for rank in range(4) if rank not in lost]
    plans = list(every_plan(problem, best.config.schedule, ranks))
    least = min(plan.step_seconds for plan in plans)
    assert answer.fastest_seconds == pytest.approx(least, rel=1e-9)
    near = [plan for plan in plans if plan.step_seconds <= least * (1 + within) * (1 + 1e-9)]
    fewest = min(moved(chain, best, plan.proposal) for plan in near)
    assert moved(chain, best, answer.plan.proposal) == pytest.approx(fewest, abs=1e-6)
    assert answer.plan.step_seconds <= least * (1 + within) * (1 + 1e-9)
    assert answer.moved_bytes == pytest.approx(fewest, abs=len(answer.moves))
    assert set(layers_by_device(answer.plan.proposal)) <= set(ranks)
    bounds = [universal_bound(problem, [best.config.schedule], least, own) for own in (ranks, range(4))]
    assert bounds[1] <= bounds[0] <= least * (1 + 1e-9)


@pytest.mark.parametrize("seed", [1, 3])
def test_varied_plans_reach_the_fastest_of_all(
    seed: int, make_chain: MakeChain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where not all plans are looked at, as of these few all but one may be: the step of every shape that was
    looked at, one by one, and the shortest that there is."""
    chain = make_chain(seed, 5, traffic=[0.1, 1][seed % 2], cuts=1.1)
    problem, best = solved(chain, alike(4), micro_batches=[None, 4][seed % 2])
    configs = [own for own in problem.configs if own.schedule == best.config.schedule]
    ranks = (0, 1, 3)
    every = _Shapes(problem, best, ranks, 0.0)._count() * len(configs)
    assert every == len(configs) * sum(
        1
        for stages in (1, 2, 3)
        for _ in combinations(range(4), stages - 1)
        for counts in product((1, 2, 3), repeat=stages)
        if sum(counts) <= 3
    )
    monkeypatch.setattr("pplan.planner.device_loss.MOST_SHAPES", every - 1)
    shapes = _Shapes(problem, best, ranks, 0.05)
    shapes.look()
    assert not shapes.complete
    steps = dict[object, float]()
    for plan in every_plan(problem, best.config.schedule, list(ranks)):
        shape = plan.proposal.ends, plan.proposal.replicas
        steps[shape] = min(steps.get(shape, np.inf), plan.step_seconds)
    least = min(steps.values())
    for shape, plan in shapes.steps.items():
        same = fastest(problem.space, [plan.proposal])
        assert same is not None
        assert plan.step_seconds >= steps[shape] * (1 - 1e-9)
        if plan.step_seconds <= shapes.longest:
            assert plan.step_seconds == pytest.approx(same.step_seconds)
    assert min(plan.step_seconds for plan in shapes.steps.values()) == pytest.approx(least)
    assert shapes.longest == pytest.approx(1.05 * least)


def test_the_bound_is_of_the_devices_that_are_left(make_chain: MakeChain) -> None:
    """Half of them do no more than half of the work in as long."""
    problem, _ = solved(make_chain(1, 4, traffic=0.0, cuts=1.1), alike(4), micro_batches=8)
    whole, left = (universal_bound(problem, ["gpipe"], devices=own) for own in (None, (1, 3)))
    work = problem.chain.at(1).forward_seconds + problem.chain.at(1).backward_seconds
    assert left >= 8 * float(work.sum()) / 2 * (1 - 1e-9)
    assert left > 1.2 * whole


def test_a_plan_of_all_devices_is_of_all_that_are_left(make_chain: MakeChain) -> None:
    problem, best = solved(make_chain(3, 4, cuts=1.1), alike(4), use_all=True)
    answer = replan_problem(problem, best, [1], within=10.0)
    assert answer.plan.proposal.device_count == 3
    assert answer.complete


def test_orders_that_are_not_made_anew(make_chain: MakeChain) -> None:
    problem, best = solved(make_chain(1, 4, cuts=1.1), alike(2), schedule="naive")
    assert best.config.schedule == "naive"
    with pytest.raises(UsageError, match="a plan of naive cannot be replanned, only plans of 1f1b and gpipe"):
        replan_problem(problem, best, [1])


def unlike(random: np.random.Generator, gpus: int) -> Topology:
    """The slow devices come first, or the fast ones."""
    slow = int(random.integers(1, gpus))
    groups = (
        Group(Device("one", None, 1.0), slow),
        Group(Device("two", None, float(random.choice([0.2, 3]))), gpus - slow),
    )
    return Topology(groups, (Level("node", None, Link(float(random.choice([1.0, 1e6])), 0.0)),))


@pytest.mark.parametrize("seed", range(8))
def test_unlike_devices_against_every_plan_on_one(seed: int, make_chain: MakeChain) -> None:
    """What is called the fastest is no slower than any device alone that is left, nor than the answer, and
    the answer is as near to it as asked."""
    random = np.random.default_rng(seed)
    topology = unlike(random, gpus=4)
    problem, present = solved(make_chain(seed, int(random.integers(1, 5))), topology, schedule="1f1b")
    lost, within = int(random.integers(4)), float(random.choice([0.0, 0.05, 1.0]))
    answer = replan_problem(problem, present, [lost], within)
    whole = problem.space.table(problem.chain.sizes[0]).cut_points[-1]
    alone = [
        fastest(problem.space, [Proposal(config, (whole,), ((rank,),))])
        for config in problem.configs
        for rank in range(4)
        if rank != lost
    ]
    single = min(plan.step_seconds for plan in alone if plan is not None)
    assert answer.fastest_seconds <= min(single, answer.plan.step_seconds) * (1 + 1e-9)
    assert answer.plan.step_seconds <= answer.fastest_seconds * (1 + within) * (1 + 1e-9)
    assert lost not in {rank for ranks in answer.plan.proposal.devices for rank in ranks}
    left = [rank for rank in range(4) if rank != lost]
    assert universal_bound(problem, ["1f1b"], single, left) <= answer.fastest_seconds * (1 + 1e-9)


def test_a_replica_that_is_gone_moves_nothing(make_chain: MakeChain) -> None:
    """All layers on each of four devices, with a link so slow that nothing else is near: three go on."""
    chain = make_chain(1, 3, cuts=0.0)
    problem, _ = solved(chain, alike(4))
    config = problem.configs[0]
    present = fastest(problem.space, [Proposal(config, (3,), ((0, 1, 2, 3),))])
    assert present is not None
    answer = replan_problem(problem, present, [2])
    assert answer.plan.proposal.devices == ((0, 1, 3),)
    assert (answer.moved_bytes, answer.move_seconds) == (0, 0.0)


def test_what_moves_and_how_long(make_chain: MakeChain) -> None:
    """By hand: two stages of two devices on two nodes lose the whole second; one of three takes it over."""
    chain = make_chain(1, 4, cuts=1.1)
    bytes = np.array(weight_bytes(chain))
    topology = alike(4, per_node=2)
    problem, _ = solved(chain, topology)
    config = problem.configs[0]
    before = {0: (0, 2), 1: (0, 2), 2: (2, 4)}
    after = Proposal(config, (2, 4), ((0,), (1, 2)))
    moves, seconds = list_moves(topology, before, [0, 1, 2], after, bytes)
    (move,) = moves
    assert (move.sender, move.receiver, move.first_layer, move.last_layer) == (2, 1, 2, 3)
    assert move.bytes == round(bytes[2] + bytes[3])
    assert seconds == pytest.approx(float(bytes[2] + bytes[3]) / 5.0 + 0.5)
    (gone,), nothing = list_moves(
        topology, {0: (0, 2), 1: (0, 2)}, [0, 1], Proposal(config, (2, 4), ((0,), (1,))), bytes
    )
    assert (gone.sender, gone.receiver, nothing) == (None, 1, 0.0)


@pytest.mark.parametrize(
    ("lost", "message"),
    [([4], "lost=4: there are 4 devices"), ([0, 1, 2, 3], "names all 4 devices"), ([], "names no device")],
)
def test_devices_that_cannot_be_lost(lost: list[int], message: str, make_chain: MakeChain) -> None:
    problem, best = solved(make_chain(1, 4, cuts=1.1), alike(4))
    with pytest.raises(UsageError, match=message):
        replan_problem(problem, best, lost)


def test_nothing_fits_on_what_is_left(make_chain: MakeChain) -> None:
    chain = make_chain(1, 4, cuts=1.1)
    one = solved(chain, alike(1))[0]
    group = one.space.replica_group(1, (0,))
    whole = float(min(group.bytes(1, "always")[0, -1], group.bytes(1, "never")[0, -1]))
    problem, best = solved(chain, alike(4, int(0.9 * whole)))
    with pytest.raises(InfeasibleError, match="the remaining 1 device"):
        replan_problem(problem, best, [0, 1, 2])


@pytest.mark.slow
def test_fewer_replicas_whose_shares_were_not_measured(make_chain: MakeChain) -> None:
    """Of 64 replicas two are gone: a micro-batch of 256 would be 5 samples for each, and the most is 4."""
    chain = make_chain(2, 24, traffic=10.0, cuts=1.1, sizes=(1, 2, 4))
    problem = Problem(chain, alike(64, per_node=8), PlanOptions(mini_batch=512))
    config = next(own for own in problem.configs if own.micro_batch_size == 256)
    present = fastest(problem.space, [Proposal(config, (24,), (tuple(range(64)),))])
    assert present is not None
    answer = replan_problem(problem, present, [3, 7])
    assert max(answer.plan.proposal.replicas) * 4 >= answer.plan.config.micro_batch_size


def test_as_fast_as_solving_for_the_devices_that_are_left(make_chain: MakeChain) -> None:
    """Where there are too many plans to score them all, and everything may move."""
    chain = make_chain(4, 12, traffic=0.1, cuts=1.1)
    problem, best = solved(chain, alike(6, 2_000), schedule="1f1b")
    answer = replan_problem(problem, best, [1, 2], within=0.0)
    assert not answer.complete
    anew = find_best_plan(replace(problem, topology=alike(4, 2_000))).best
    assert anew is not None
    assert answer.plan.step_seconds <= anew.step_seconds * (1 + 1e-9)


def test_sixty_four_devices(make_chain: MakeChain) -> None:
    chain = make_chain(2, 24, traffic=0.1, cuts=1.1, sizes=(1, 2, 4, 8))
    problem = Problem(chain, alike(64, per_node=8), PlanOptions(mini_batch=256, micro_batches=32))
    config = problem.configs[0]
    devices = tuple(tuple(range(first, first + 8)) for first in range(0, 64, 8))
    present = fastest(problem.space, [Proposal(config, tuple(range(3, 25, 3)), devices)])
    assert present is not None
    answer = replan_problem(problem, present, [3, 7])
    assert not answer.complete
    assert answer.plan.step_seconds <= answer.fastest_seconds * 1.05
    assert {3, 7}.isdisjoint(layers_by_device(answer.plan.proposal))


@pytest.mark.parametrize(
    ("left", "joined", "shared"),
    [
        ([0, 2, 1], ((4, 6), (2, 1)), (1, 1, 1)),
        ([2, 1, 0], ((2, 6), (2, 1)), (1, 1, 1)),
        ([3, 0, 0], ((6,), (3,)), (1, 1, 1)),
        ([1, 1, 1], ((2, 4, 6), (1, 1, 1)), (1, 1, 1)),
        ([4, 0, 1], ((4, 6), (4, 1)), (3, 1, 1)),
    ],
)
def test_where_the_search_starts(
    left: list[int], joined: object, shared: tuple[int, ...], make_chain: MakeChain
) -> None:
    """Stages that lost all devices joined to one beside them, or with one of the stage with most; as many on
    each; and one stage."""
    problem, best = solved(make_chain(1, 6, cuts=1.1), alike(6))
    ranks = tuple(range(sum(left)))
    starts = list(_Shapes(problem, best, ranks, 0.05)._starts((2, 4, 6), left))
    equal = ((2, 4, 6), (len(ranks) // 3,) * 3)
    assert starts == [joined, ((2, 4, 6), shared), equal, ((6,), (len(ranks),))]
