"""Tiny problems of which every plan can be scored one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, combinations, product

import numpy as np
import pytest

from pplan.cost_models.layer import Chain
from pplan.cost_models.memory import Recompute
from pplan.cost_models.timeline import step_seconds
from pplan.cost_models.topology import Device, Link, two_level_topology
from pplan.planner.candidate import PipelineConfig, Proposal
from pplan.planner.plan_options import PlanOptions
from pplan.planner.problem import Problem
from pplan.planner.scoring import assemble

MakeChain = Callable[..., Chain]
MODES: tuple[Recompute, Recompute] = ("never", "always")
EXCEPT_LAST: Recompute = "except_last"
Shapes = Callable[[Problem, int], Iterator[tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]]]
SCALE = 1e6
"""Of all bytes: no two plans need nearly the same."""


@pytest.fixture
def make_problem(make_chain: MakeChain) -> Callable[..., Problem]:
    """A function of (seed, layers, gpus, *, memory, **options): bytes in millions, one node."""

    def make(seed: int, layers: int, gpus: int, *, memory: float | None = None, **options: object) -> Problem:
        chain = make_chain(seed, layers, traffic=[0.1, 1.0, 4.0][seed % 3], cuts=0.9)
        scaled = {
            name: np.asarray(values) * SCALE
            for name, values in vars(chain).items()
            if name.endswith("_bytes") and values is not None
        }
        chain = replace(chain, **scaled, input_bytes_per_sample=5.0 * SCALE)  # type: ignore[arg-type]
        device = Device("toy", None if memory is None else round(memory * SCALE))
        link = Link(20 * SCALE, [0.0, 0.05][seed % 2])
        topology = two_level_topology(device, gpus, 8, link, link)
        return Problem(chain, topology, PlanOptions(**({"mini_batch": 4} | options)))  # type: ignore[arg-type]

    return make


def shapes(problem: Problem, sizes: int) -> Iterator[tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]]:
    """Ends and devices of every pipeline whose replicas share micro-batches of so many samples."""
    chain, gpus = problem.chain, problem.gpus
    cuts = [int(i) + 1 for i in np.flatnonzero(chain.cut_after)]
    for stages in range(1, min(gpus, len(cuts) + 1) + 1):
        for chosen in combinations(cuts, stages - 1):
            for counts in product(range(1, min(gpus, sizes) + 1), repeat=stages):
                if sum(counts) > gpus:
                    continue
                starts = (0, *accumulate(counts))
                devices = tuple(
                    tuple(range(first, first + count)) for first, count in zip(starts, counts, strict=False)
                )
                yield (*chosen, len(chain)), devices


def spread(counts: Sequence[int], free: Sequence[tuple[int, ...]]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every choice of devices for stages of so many replicas: of `free` devices, those alike in one group."""
    if not counts:
        yield ()
        return
    for numbers in product(*(range(min(counts[0], len(ranks)) + 1) for ranks in free)):
        if sum(numbers) == counts[0]:
            chosen = [rank for ranks, number in zip(free, numbers, strict=True) for rank in ranks[:number]]
            left = [ranks[number:] for ranks, number in zip(free, numbers, strict=True)]
            for later in spread(counts[1:], left):
                yield (tuple(chosen), *later)


def shapes_anywhere(
    problem: Problem, sizes: int
) -> Iterator[tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]]:
    """Ends and devices of every pipeline on any devices; those of a kind are alike."""
    kinds = problem.topology.kinds
    alike = [tuple(rank for rank in range(problem.gpus) if problem.topology.device(rank) == k) for k in kinds]
    for ends, devices in shapes(problem, sizes):
        for chosen in spread([len(ranks) for ranks in devices], alike):
            yield ends, chosen


def plans(problem: Problem, shapes: Shapes = shapes) -> Iterator[tuple[Proposal, float, float]]:
    """Every plan that flushes and fits, its simulated step and the most that a device holds."""
    for schedule, size in product(("1f1b", "gpipe"), (1, 2, 4)):
        for ends, devices in shapes(problem, size):
            routes: list[tuple[Recompute, ...]] = list(product(MODES, repeat=len(ends)))
            if schedule == "gpipe" and size < 4:
                routes.append(tuple([EXCEPT_LAST] * len(ends)))
            for modes in routes:
                mode = "except_last" if "except_last" in modes else "by_stage"
                proposal = Proposal(PipelineConfig(schedule, mode, 4 // size, size), ends, devices)  # type: ignore[arg-type]
                made = assemble(problem.space, proposal, modes)
                in_flight = [sum(made.ledger(device).values()) for device in range(made.program.devices)]
                limits = [problem.space.limit(ranks) for ranks in devices]
                if all(bytes <= limit for bytes, limit in zip(in_flight, limits, strict=True)):
                    yield proposal, float(step_seconds(made.program, made.costs())[0]), max(in_flight)


@pytest.fixture
def every_plan() -> Callable[[Problem], list[tuple[Proposal, float, float]]]:
    """Of a problem with a mini-batch of 4."""
    return lambda problem: list(plans(problem))


@pytest.fixture
def every_plan_anywhere() -> Callable[[Problem], list[tuple[Proposal, float, float]]]:
    """As `every_plan`, on any devices; those of a kind are alike."""
    return lambda problem: list(plans(problem, shapes_anywhere))


@pytest.fixture
def every_shape() -> Callable[[Problem, int], list[tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]]]:
    """Ends and devices of every pipeline, for micro-batches of a size."""
    return lambda problem, size: list(shapes(problem, size))
