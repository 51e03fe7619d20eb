"""The bound with layers that may be parted against every plan of small problems."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, permutations, product

import numpy as np
import pytest

from pplan.cost_models.layer import Chain
from pplan.cost_models.topology import Device, Group, Level, Link, Topology
from pplan.planner.candidate import PipelineConfig, Proposal
from pplan.planner.plan_options import PlanOptions
from pplan.planner.problem import Problem
from pplan.planner.scoring import fastest
from pplan.planner.search.family import quick_bound
from pplan.planner.search.fill_bound import fill_bound

MakeChain = Callable[..., Chain]


def random_problem(seed: int, make_chain: MakeChain) -> Problem:
    """One to four layers, some of which cost nothing, on one to four devices of one to three kinds, with
    tight memory, unequal links, or gradients that take time to add up."""
    rng = np.random.default_rng(seed)
    chain = make_chain(
        seed,
        int(rng.integers(1, 5)),
        traffic=rng.choice([0.0, 0.3, 3.0]),
        cuts=1.1,
        adding=rng.choice([0.0, 0.9]),
    )
    if rng.random() < 0.3:
        costs = rng.random(len(chain)) < 0.5
        changed = {
            name: own * (costs if own.ndim == 1 else costs[:, None])
            for name in ("forward_seconds", "backward_seconds", "accumulation_seconds")
            if (own := getattr(chain, name)) is not None
        }
        chain = replace(chain, **changed)
    speeds = rng.choice([1.0, 0.5, 0.9, 3.0], size=int(rng.integers(1, 5)))
    memory = int(rng.choice([400, 1_500, 10_000]))
    groups = tuple(Group(Device(f"{speed}", memory, speed=float(speed)), 1) for speed in speeds)
    inner = Link(float(rng.choice([5.0, 500.0])), 0.05)
    levels = (Level("node", 2, inner), Level("network", None, Link(float(rng.choice([1.0, 50.0])), 0.2)))
    return Problem(chain, Topology(groups, levels), PlanOptions(mini_batch=int(rng.choice([4, 8, 12]))))


def every_plan(problem: Problem, config: PipelineConfig) -> Iterator[Proposal]:
    """All cuts, replicas and devices, the devices of a stage in rank order."""
    layers, gpus = len(problem.chain), problem.gpus
    for stages in range(1, min(layers, gpus) + 1):
        for ends, counts in product(
            combinations(range(1, layers), stages - 1), product(range(1, gpus + 1), repeat=stages)
        ):
            if sum(counts) <= gpus:
                shapes = set()
                for order in permutations(range(gpus), sum(counts)):
                    left = iter(order)
                    shapes.add(tuple(tuple(sorted(next(left) for _ in range(n))) for n in counts))
                yield from (Proposal(config, (*ends, layers), devices) for devices in sorted(shapes))


def attack(seed: int, make_chain: MakeChain) -> tuple[int, int]:
    """The numbers of configurations with a plan, and of bounds above the quick one."""
    problem = random_problem(seed, make_chain)
    tried = better = 0
    for config in problem.configs:
        family = next(own for own in problem.families if own.config == config)
        best = fastest(problem.space, every_plan(problem, config))
        if best is None:
            continue
        tried += 1
        least = fill_bound(problem.space, family, best.step_seconds * 1.01)
        assert least <= best.step_seconds * (1 + 1e-9), (seed, config, best)
        better += least > quick_bound(problem.space, family) * (1 + 1e-9)
    return tried, better


@pytest.mark.slow
def test_no_plan_is_below_it(make_chain: MakeChain) -> None:
    rows = [attack(seed, make_chain) for seed in (*range(5), 5033, 5112)]  # two that found a mistake
    tried, better = (sum(own) for own in zip(*rows, strict=True))
    assert tried > 20
    assert better > 3


def test_a_long_chain_on_equal_devices(make_chain: MakeChain) -> None:
    """Of 64 stages of a device each with as much work, the step is (M + 63) x: the bound knows nearly all of
    the fill."""
    alike, nothing = np.ones((640, 1)), np.zeros(640)
    chain = replace(
        make_chain(0, 640, cuts=1.1, traffic=0.0, sizes=(1,)),
        forward_seconds=alike,
        backward_seconds=alike,
        trainable_bytes=nothing,
        parameter_bytes=nothing,
    )
    topology = Topology((Group(Device("toy", None), 64),), (Level("node", None, Link(1e9, 0.0)),))
    problem = Problem(chain, topology, PlanOptions(mini_batch=512, micro_batches=512, schedule="1f1b"))
    family = problem.families[0]
    plan = fastest(
        problem.space, [Proposal(family.config, tuple(range(10, 641, 10)), tuple((r,) for r in range(64)))]
    )
    assert plan is not None
    assert plan.step_seconds == pytest.approx((512 + 63) * 20)
    assert quick_bound(problem.space, family) == pytest.approx(512 * 20)
    whole = fill_bound(problem.space, family, plan.step_seconds)
    assert 512 * 20 * (1 + 0.98 * 63 / 512) < whole <= plan.step_seconds
