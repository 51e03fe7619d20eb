"""Problems whose layers' seconds spread, and the same ones as a draw makes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pplan.cost_models.layer import Chain
from pplan.cost_models.topology import Device, Group, Link, two_level_topology
from pplan.planner.plan_options import PlanOptions
from pplan.planner.problem import Problem
from pplan.planner.robust import Draws

SCALE = 1e6
"""Of all bytes, so that gradients fill several buckets."""


@pytest.fixture
def make_problem(make_chain: Callable[..., Chain]) -> Callable[..., Problem]:
    """A function of (seed, layers, gpus, *, spread, uncertainty, mixed, **options): `spread` is the most that
    a layer has, the same at all sizes; `mixed`: every second device takes 1.5 times as long."""

    def make(
        seed: int,
        layers: int,
        gpus: int,
        *,
        spread: float = 0.3,
        uncertainty: float | None = 0.02,
        mixed: bool = False,
        **options: Any,
    ) -> Problem:
        chain = make_chain(seed, layers, cuts=0.9)
        scaled = {
            name: SCALE * values
            for name, values in vars(chain).items()
            if name.endswith("_bytes") and values is not None
        }
        own = spread * np.random.default_rng(seed + 1000).random((layers, 1))
        chain = replace(
            chain,
            **scaled,
            input_bytes_per_sample=SCALE,
            spread=np.repeat(own, len(chain.sizes), axis=1),
            uncertainty=None if uncertainty is None else np.full(len(chain.sizes), uncertainty),
        )
        link = Link(100 * SCALE, 0.01)
        topology = two_level_topology(Device("toy", None), gpus, 8, link, link)
        if mixed:
            kinds = (Device("toy", None), Device("slow", None, speed=1 / 1.5))
            groups = tuple(Group(kinds[rank % 2], 1) for rank in range(gpus))
            topology = replace(topology, groups=groups)
        return Problem(chain, topology, PlanOptions(**({"mini_batch": 8} | options)))

    return make


@pytest.fixture
def as_drawn() -> Callable[[Problem, Draws, int], Problem]:
    """A function of (problem, draws, number): the problem whose layers take what they take in that draw."""

    def drawn(problem: Problem, draws: Draws, number: int) -> Problem:
        chain = problem.chain
        factors = draws.factors(chain.at(chain.sizes[0]))[number][:, None]
        changed = replace(
            chain,
            forward_seconds=factors * chain.forward_seconds,
            backward_seconds=factors * chain.backward_seconds,
        )
        return replace(problem, chain=changed)

    return drawn


@pytest.fixture
def every_cut() -> Callable[[Problem], Problem]:
    """A function of a problem: the same with all cuts allowed."""

    def freed(problem: Problem) -> Problem:
        cut_after = np.append(np.ones(len(problem.chain) - 1, dtype=np.bool_), False)
        return replace(problem, chain=replace(problem.chain, cut_after=cut_after))

    return freed
