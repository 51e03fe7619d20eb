"""The bound over all partitions against every plan of small problems in which memory and all-reduces decide.

Plans have all cuts, replicas and devices. Each stage recomputes where it must, and the simulator scores them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, permutations, product
from math import inf

import numpy as np
import pytest

from pplan.cost_models.errors import UsageError
from pplan.cost_models.layer import Chain
from pplan.cost_models.memory import Recompute
from pplan.cost_models.schedules import SCHEDULES
from pplan.cost_models.timeline import step_seconds
from pplan.cost_models.topology import Device, Group, Level, Link, Topology
from pplan.planner.candidate import Proposal
from pplan.planner.plan_options import PlanOptions
from pplan.planner.problem import Problem
from pplan.planner.scoring import assemble, possible
from pplan.planner.universal_bound import STRAIGHT, STRAIGHT_SPLIT, universal_bound

MakeChain = Callable[..., Chain]
SYNCHRONOUS = [name for name, own in SCHEDULES.items() if own.synchronous and own.trains_one_model]
QUICK = ("chimera", "1f1b")
SEEDS = range(16)


def random_problem(seed: int, schedule: str, make_chain: MakeChain) -> Problem | None:
    """Two to four layers on two to four devices in nodes of two; None where the options leave no plan."""
    rng = np.random.default_rng(seed)
    layers, gpus = int(rng.integers(2, 5)), int(rng.integers(2, 5))
    chain = make_chain(seed, layers, traffic=float(rng.choice([0.01, 0.3])), cuts=1.1, adding=0.5)
    weights = float(rng.choice([0.1, 1, 10]))
    chain = replace(
        chain,
        parameter_bytes=chain.parameter_bytes * weights,
        trainable_bytes=chain.trainable_bytes * weights,
    )
    speeds = [1.0] if rng.random() < 0.7 or gpus < 3 else [1.0, float(rng.uniform(0.3, 3))]
    groups = [Group(Device("a", None), gpus - len(speeds) + 1)]
    groups += [Group(Device("b", None, speed), 1) for speed in speeds[1:]]
    inner = Level("node", 2, Link(float(rng.choice([50, 5e3])), 0.1))
    levels = (inner, Level("network", None, Link(float(rng.choice([5.0, 100.0])), 0.01)))
    count, size = int(rng.choice([1, 2, 4])), int(rng.choice([1, 2, 4]))
    options = PlanOptions(
        mini_batch=count * size,
        micro_batches=count,
        schedule=schedule,
        optimizer=str(rng.choice(["sgd", "adam"])),
        zero=int(rng.choice([0, 0, 1])),
        recompute=str(rng.choice(["auto", "auto", "always", "never"])),
    )
    try:
        return Problem(chain, Topology(tuple(groups), levels), options)
    except UsageError:
        return None


def every_plan(problem: Problem) -> Iterator[tuple[float, float]]:
    """The bytes and the step of all plans, on any devices and with any recomputation of each stage."""
    layers, config = len(problem.chain), problem.configs[0]
    needs: dict[object, float] = {}  # devices are alike in what memory asks of them
    schedule = SCHEDULES[config.schedule]
    parts = schedule.default_virtual_stages
    words: tuple[Recompute, ...] = (
        ("never", "always") if config.recompute == "by_stage" else (config.recompute,)
    )
    for stages in range(1, min(problem.gpus, layers // parts) + 1):
        try:
            program = schedule.program(stages, config.micro_batches, parts)
        except UsageError:
            continue
        own = replace(config, virtual_stages=parts)
        for inner in combinations(range(1, layers), stages * parts - 1):
            for devices in _devices(problem, stages):
                proposal = Proposal(
                    own, (*inner, layers), tuple(devices[place.device] for place in program.pipes[0])
                )
                if not possible(problem.space, proposal):
                    continue
                for modes in product(words, repeat=stages):
                    of_parts = [modes[place.device] for place in program.pipes[0]]
                    made = assemble(problem.space, proposal, of_parts)
                    key = stages, inner, tuple(map(len, proposal.devices)), modes
                    if key not in needs:
                        needs[key] = max(sum(made.ledger(device).values()) for device in range(stages))
                    need = needs[key]
                    yield need, float(step_seconds(made.program, made.costs())[0])


def _devices(problem: Problem, stages: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Any numbers of replicas of each stage, on any devices; of alike ones in one order of the ranks."""
    gpus, kinds = problem.gpus, problem.topology.kind_numbers(range(problem.gpus)).tolist()
    for counts in product(range(1, gpus + 1), repeat=stages):
        if sum(counts) <= gpus:
            for order in permutations(range(gpus), sum(counts)):
                ranks = iter(order)
                own = [tuple(next(ranks) for _ in range(count)) for count in counts]
                firsts = [shared[0] for shared in own]
                sorted_inside = all(list(shared) == sorted(shared) for shared in own)
                if sorted_inside and (len(set(kinds)) > 1 or firsts == sorted(firsts)):
                    yield tuple(own)


@pytest.mark.parametrize(
    "schedule", [pytest.param(own, marks=[pytest.mark.slow] * (own not in QUICK)) for own in SYNCHRONOUS]
)
def test_no_plan_that_fits_is_below_it(schedule: str, make_chain: MakeChain) -> None:
    raised = 0
    for seed in SEEDS:
        problem = random_problem(seed, schedule, make_chain)
        plans = [] if problem is None else list(every_plan(problem))
        if problem is None or not plans:
            continue
        for share in (0.02, 0.3, 1.0):
            limit = float(np.quantile([need for need, _ in plans], share))
            own = replace(problem, options=replace(problem.options, memory_limit=limit))
            best = min((step for need, step in plans if need <= limit * (1 + 1e-12)), default=inf)
            bound = universal_bound(own, [schedule], 1.3 * best)
            assert bound <= best * (1 + 1e-9), (seed, share)
            raised += bound > 1.01 * universal_bound(own, [schedule])
    assert raised > 0 or schedule not in STRAIGHT | STRAIGHT_SPLIT
