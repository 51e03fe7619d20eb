"""The bound on all plans against every plan of small problems: all cuts, replicas and choices of devices, of
every synchronous schedule, scored by the simulator."""

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
from pplan.cost_models.program import Program
from pplan.cost_models.schedules import SCHEDULES
from pplan.cost_models.timeline import step_seconds
from pplan.cost_models.topology import Device, Group, Level, Link, Topology
from pplan.planner.candidate import Proposal
from pplan.planner.plan_options import PlanOptions
from pplan.planner.problem import Problem
from pplan.planner.scoring import assemble, possible
from pplan.planner.universal_bound import universal_bound, work_bound

MakeChain = Callable[..., Chain]
SYNCHRONOUS = [name for name, schedule in SCHEDULES.items() if schedule.synchronous]


def random_problem(seed: int, schedule: str, make_chain: MakeChain) -> Problem | None:
    """Two to four layers on one to three devices; None where the options leave no plan."""
    rng = np.random.default_rng(seed)
    layers, gpus = int(rng.integers(2, 5)), int(rng.integers(1, 4))
    chain = make_chain(seed, layers, traffic=float(rng.choice([0.01, 1, 5])), cuts=1.1)
    if rng.random() < 0.5:  # halves of the backward were measured, in all less or more than the whole
        share, both = rng.uniform(0.1, 0.9, (layers, 1)), float(rng.choice([0.5, 1.0, 1.2]))
        chain = replace(
            chain,
            backward_input_seconds=chain.backward_seconds * share * both,
            backward_weight_seconds=chain.backward_seconds * (1 - share) * both,
        )
    weights = float(rng.choice([0.01, 1, 10]))
    chain = replace(
        chain,
        parameter_bytes=chain.parameter_bytes * weights,
        trainable_bytes=chain.trainable_bytes * weights,
    )
    groups = [Group(Device("a", None, float(rng.uniform(0.3, 3))), 1)]
    groups += [Group(Device("b", None), gpus - 1)] if gpus > 1 else []
    inner = Level("node", int(rng.integers(1, 3)), Link(float(rng.choice([5, 50, 5e3])), 0.1))
    levels = (inner, Level("network", None, Link(5.0, float(rng.choice([0.0, 0.3])))))
    count, size = int(rng.choice([1, 2, 4])), int(rng.choice([1, 2, 3]))
    options = PlanOptions(
        mini_batch=count * size,
        micro_batches=count,
        schedule=schedule,
        recompute=["auto", "always"][seed % 2],
    )
    try:
        return Problem(chain, Topology(tuple(groups), levels), options)
    except UsageError:
        return None


def every_step(problem: Problem) -> Iterator[float]:
    """Of all plans, on any devices."""
    layers, config = len(problem.chain), problem.configs[0]
    schedule = SCHEDULES[config.schedule]
    parts = schedule.default_virtual_stages
    for stages in range(1, min(problem.gpus, layers // parts) + 1):
        try:
            program = schedule.program(stages, config.micro_batches, parts)
        except UsageError:
            continue
        own = replace(config, virtual_stages=parts)
        for devices, inner in product(
            _devices(problem.gpus, program), combinations(range(1, layers), stages * parts - 1)
        ):
            proposal = Proposal(own, (*inner, layers), devices)
            if possible(problem.space, proposal):
                mode: Recompute = "always" if config.recompute == "always" else "never"
                made = assemble(problem.space, proposal, [mode] * len(devices))
                yield float(step_seconds(made.program, made.costs())[0])


def _devices(gpus: int, program: Program) -> Iterator[tuple[tuple[int, ...], ...]]:
    """By part of the layers, all choices of devices with any numbers of replicas."""
    for replicas in product(range(1, gpus + 1), repeat=program.devices):
        if sum(replicas) <= gpus:
            for order in permutations(range(gpus), sum(replicas)):
                ranks = iter(order)
                own = [tuple(next(ranks) for _ in range(count)) for count in replicas]
                if all(list(shared) == sorted(shared) for shared in own):
                    yield tuple(own[place.device] for place in program.pipes[0])


QUICK = ("interleaved", "zb-v")


@pytest.mark.parametrize(
    "schedule", [pytest.param(own, marks=[pytest.mark.slow] * (own not in QUICK)) for own in SYNCHRONOUS]
)
def test_no_plan_is_below_it(schedule: str, make_chain: MakeChain) -> None:
    bounded = 0
    for seed in range(16):
        problem = random_problem(seed, schedule, make_chain)
        best = inf if problem is None else min(every_step(problem), default=inf)
        if problem is not None and best < inf:
            for step in (best, 1.7 * best, inf):
                assert universal_bound(problem, [schedule], step) <= best * (1 + 1e-9), seed
            assert work_bound(problem) <= best * (1 + 1e-9), seed
            bounded += universal_bound(problem, [schedule], best) > 0.2 * best
    assert bounded > 0


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_the_way_over_a_slow_cut_and_back(schedule: str, make_chain: MakeChain) -> None:
    """Layers that must be parted: a micro-batch takes both transfers, and no more of them is claimed."""
    for seed, (count, traffic) in enumerate(product((1, 2, 3), (0.5, 2.0, 10.0))):
        chain = make_chain(seed, 2, traffic=traffic, cuts=1.1)
        options = PlanOptions(
            mini_batch=count, micro_batches=count, schedule=schedule, recompute="never", cut_after=("layer0",)
        )
        topology = Topology((Group(Device("a", None), 2),), (Level("network", None, Link(5.0, 0.1)),))
        problem = Problem(chain, topology, options)
        best = min(every_step(problem))
        bound = universal_bound(problem, [schedule], 1.5 * best)
        assert bound <= best * (1 + 1e-9)


def test_the_least_of_several_schedules(make_chain: MakeChain) -> None:
    problem = random_problem(3, "1f1b", make_chain)
    assert problem is not None
    both = universal_bound(problem, ["naive", "zb-h1"], 1e9)
    assert both == min(universal_bound(problem, [name], 1e9) for name in ("naive", "zb-h1"))
    assert universal_bound(problem, [], 1.0) == inf
    least = universal_bound(problem, ["zb-h1"])
    assert (
        universal_bound(problem, ["zb-h1"], least / 2) == least
    )  # never lowered to a step: that would hide it


def test_schedules_with_whole_and_with_split_backwards_are_bounded_by_their_own_seconds() -> None:
    """Where the parts of a backward take less than the whole, 1F1B's seconds would bound ZB-H1 too high."""
    row = np.ones((3, 1))
    chain = replace(
        chain_of(3),
        backward_seconds=10 * row,
        backward_input_seconds=0.5 * row,
        backward_weight_seconds=0.5 * row,
        # Launches are as many as the work of 1F1B, which is then looked at first, and are shared evenly.
        forward_host_seconds=np.array([[8.3], [4.15], [4.15]]),
        backward_host_seconds=np.array([[8.3], [4.15], [4.15]]),
    )
    topology = Topology((Group(Device("toy", None), 2),), (Level("node", None, Link(1e9, 0.0)),))
    best = {}
    for schedule in ("1f1b", "zb-h1"):
        options = PlanOptions(mini_batch=4, micro_batches=4, schedule=schedule, recompute="never")
        problem = Problem(chain, topology, options)
        best[schedule] = min(every_step(problem))
    assert best["zb-h1"] < best["1f1b"]
    for schedules in (["1f1b", "zb-h1"], ["zb-h1", "1f1b"]):
        assert universal_bound(problem, schedules, 2 * best["1f1b"]) <= best["zb-h1"] * (1 + 1e-9)


def chain_of(layers: int) -> Chain:
    """Layers of 1 s forward and 2 s backward, one of them for the weights, and transfers of nothing."""
    row = np.ones((layers, 1))
    nothing, none = 0 * row, np.zeros(layers)
    return Chain(
        names=tuple(f"l{index}" for index in range(layers)),
        sizes=(1,),
        parameter_bytes=none,
        trainable_bytes=np.ones(layers),
        buffer_bytes=none,
        cut_after=np.append(np.ones(layers - 1, dtype=np.bool_), False),
        input_bytes_per_sample=0.0,
        forward_seconds=row,
        backward_seconds=2 * row,
        output_bytes=nothing,
        saved_bytes=nothing,
        saved_input_bytes=nothing,
        workspace_bytes=nothing,
        forward_host_seconds=nothing,
        backward_host_seconds=nothing,
    )


@pytest.mark.parametrize(
    ("schedule", "bound", "best"),
    [
        ("1f1b", 3 + 4 * 3, 15),  # fill and drain of the first layer, and four micro-batches on the second
        ("naive", 4 * 6, 24),  # micro-batch by micro-batch
        ("zb-h1", 1 + 4 * 3, 13),  # the weights' gradients fill the drain
    ],
)
def test_two_equal_stages(schedule: str, bound: float, best: float) -> None:
    """One sample a micro-batch, so that there are no replicas: each plan in hand."""
    topology = Topology((Group(Device("toy", None), 2),), (Level("node", None, Link(1e9, 0.0)),))
    problem = Problem(chain_of(2), topology, PlanOptions(mini_batch=4, micro_batches=4, schedule=schedule))
    assert min(every_step(problem)) == pytest.approx(best)
    assert universal_bound(problem, [schedule], best) == pytest.approx(bound, rel=1e-3)
