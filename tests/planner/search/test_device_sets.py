"""Any devices for each stage: which differ, and the search over them against every assignment, one by one."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from typing import Any

import numpy as np
import pytest

from pplan.cost_models.layer import Chain
from pplan.cost_models.topology import Device, Group, Level, Link, Topology
from pplan.planner.candidate import pipeline_configs
from pplan.planner.search.branch_and_bound import search
from pplan.planner.search.device_sets import list_shapes, may_search_any
from pplan.planner.search.family import Family
from pplan.planner.search.placements import place_anywhere
from pplan.planner.search.space import Space

MakeChain = Callable[..., Chain]
BruteForce = Callable[..., Any]


def unlike(rng: np.random.Generator, gpus: int, *, per_node: int | None = None, port: int = 1) -> Topology:
    """Devices each of their own speed and memory; in nodes all of one kind."""
    alone = (Level("node", None, Link(float(rng.uniform(3, 40)), 0.05)),)
    if per_node is None:
        kinds = [
            Device(f"kind{i}", int(rng.integers(600, 2_500)), float(rng.uniform(0.3, 2))) for i in range(gpus)
        ]
        return Topology(tuple(Group(kind, 1) for kind in kinds), alone)
    inner = Level("node", per_node, Link(40.0, 0.0))
    outer = Level("network", None, Link(float(rng.uniform(2, 10)), 0.2), port)
    return Topology((Group(Device("kind", 1_500), gpus),), (inner, outer))


@pytest.mark.parametrize("kind", [pytest.param("unlike", marks=pytest.mark.slow), "nodes", "ports"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1,))])
def test_no_assignment_is_faster(
    kind: str, seed: int, make_chain: MakeChain, brute_force: BruteForce
) -> None:
    rng = np.random.default_rng([seed, len(kind)])
    topology = {
        "unlike": lambda: unlike(rng, 4),
        "nodes": lambda: unlike(rng, 4, per_node=[1, 2, 3][seed % 3]),
        "ports": lambda: unlike(rng, 4, per_node=2, port=2),
    }[kind]()
    space = Space(make_chain(seed, 4, traffic=[0.1, 1, 5][seed % 3], cuts=1.1), topology, "sgd")
    configs = pipeline_configs(4, ("1f1b", "gpipe"), ("by_stage",), [1, 4])
    families = [Family(config, place_anywhere(topology), (1, 2, 3, 4)) for config in configs]
    best = brute_force(space, families).fastest()
    answer = search(space, families, range(1, 5))
    if best is None:
        assert answer.best is None
        return
    assert answer.exact
    assert answer.best is not None
    assert answer.best.step_seconds == pytest.approx(best.step_seconds, rel=1e-9)


def test_one_of_each_choice_that_differs() -> None:
    """Two nodes of two, one device each for two stages: the same node, or both; of unlike ones all."""
    rng = np.random.default_rng(0)
    assert list(list_shapes(unlike(rng, 4, per_node=2), 2, [1])) == [((0,), (1,)), ((0,), (2,))]
    mixed = unlike(rng, 3)
    assert set(list_shapes(mixed, 2, [1])) == {((a,), (b,)) for a, b in permutations(range(3), 2)}
    counts = [len(list(list_shapes(unlike(rng, 4), stages, [1, 2, 3, 4]))) for stages in (1, 4)]
    assert counts == [15, 24]


def test_where_it_makes_a_difference_and_is_not_too_much() -> None:
    rng = np.random.default_rng(0)
    assert may_search_any(unlike(rng, 8), tuple(range(1, 9)), 60)
    assert not may_search_any(unlike(rng, 12), tuple(range(1, 13)), 8)
    assert may_search_any(unlike(rng, 8, per_node=2), tuple(range(1, 9)), 8)
    alike = Topology((Group(Device("kind", None), 4),), (Level("node", None, Link(10.0, 0.0)),))
    assert not may_search_any(alike, (1, 2, 3, 4), 8)
