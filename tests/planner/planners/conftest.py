"""Problems for the planners' tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from pplan.cost_models.layer import Chain
from pplan.cost_models.topology import Topology
from pplan.planner.plan_options import PlanOptions
from pplan.planner.problem import Problem


@pytest.fixture
def make_problem(make_topology: Callable[..., Topology]) -> Callable[..., Problem]:
    """A function of (chain, gpus, **options): the problem on two nodes of half the devices each."""

    def make(chain: Chain, gpus: int, **options: object) -> Problem:
        return Problem(chain, make_topology(gpus, per_node=-(-gpus // 2)), PlanOptions(**options))  # type: ignore[arg-type]

    return make


@pytest.fixture
def make_named(make_chain: Callable[..., Chain]) -> Callable[..., Chain]:
    """A function of (names, parameter_bytes=None, cuts=None): a chain of layers of these names, of 1 byte of
    parameters each; `cuts`: where stages may end, as numbers of layers (None: everywhere)."""

    def make(
        names: Sequence[str],
        parameter_bytes: Sequence[float] | None = None,
        cuts: Sequence[int] | None = None,
    ) -> Chain:
        places = np.arange(1, len(names) + 1)
        return replace(
            make_chain(0, len(names)),
            names=tuple(names),
            parameter_bytes=np.array(parameter_bytes if parameter_bytes is not None else [1.0] * len(names)),
            cut_after=(places < len(names)) & (True if cuts is None else np.isin(places, cuts)),
        )

    return make
