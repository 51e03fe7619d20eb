"""The stages that a pipeline may have, each by itself; and layers divided evenly, against every division."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pplan.cost_models.layer import Chain
from pplan.cost_models.memory import Recompute
from pplan.cost_models.topology import Topology
from pplan.planner.candidate import Mode, PipelineConfig
from pplan.planner.plan_options import PlanOptions
from pplan.planner.problem import Problem
from pplan.planner.search.device_sets import make_ranges
from pplan.planner.search.stage_choices import StageChoices, list_stage_choices

MakeChain = Callable[..., Chain]
MakeTopology = Callable[..., Topology]


@pytest.fixture
def make_choices(make_chain: MakeChain, make_topology: MakeTopology) -> Callable[..., StageChoices]:
    """All choices of a small problem of four devices in two nodes whose stages have 1, 2 or 4 replicas."""

    def make(
        seed: int, mode: Mode, *, memory: int | None = None, limit: float = np.inf, layers: int = 6
    ) -> StageChoices:
        topology = make_topology(4, per_node=2, latency=0.1, memory=memory)
        options = PlanOptions(mini_batch=8, recompute=mode if mode == "first_layers" else "auto")
        problem = Problem(make_chain(seed, layers, adding=0.5), topology, options)
        ranges = make_ranges(problem.space, problem.placements[0], (1, 2, 4))
        return list_stage_choices(problem.space, PipelineConfig("1f1b", mode, 2, 4), ranges, limit)

    return make


MakeChoices = Callable[..., StageChoices]


@pytest.mark.parametrize(("mode", "memory"), [("by_stage", 900), ("never", 900), ("always", 600)])
def test_what_runs_again_is_the_least_that_fits(
    mode: Mode, memory: int | None, make_choices: MakeChoices
) -> None:
    """Of every stage, each by itself; with whole stages that run again, which cost another forward."""
    again, tried = 0, 0
    allowed: tuple[Recompute, ...] = ("never", "always") if mode == "by_stage" else (mode,)
    for group in make_choices(2, mode, memory=memory).groups:
        for in_flight in (1.0, 2.0, 3.0):
            seconds, place = group.backward(in_flight)
            for pair, (start, end) in enumerate(zip(group.start, group.end, strict=True)):
                at = np.array([start]), np.array([end])
                fitting = [own for own in allowed if in_flight <= group.costs.room(own, *at)[0]]
                tried += 1
                if not fitting:
                    assert seconds[pair] == np.inf
                    continue
                plain = fitting[0] == "never"
                assert seconds[pair] == group.plain[pair] + (0.0 if plain else group.forward[pair])
                assert place[pair] == (start if plain else end)
                again += not plain
    assert tried > 100
    assert (again > 0) == (mode != "never")


def test_the_fewest_first_layers_run_again(make_choices: MakeChoices) -> None:
    parts = 0
    for group in make_choices(2, "first_layers", memory=900).groups:
        for in_flight in (1.0, 2.0):
            seconds, place = group.backward(in_flight)
            for pair, (start, end) in enumerate(zip(group.start, group.end, strict=True)):
                at = np.array([start]), np.array([end])
                rooms = [group.costs.room("never", *at)[0]]
                rooms += [
                    group.costs.room("always", *at, np.array([own]))[0] for own in range(start + 1, end)
                ]
                rooms.append(group.costs.room("always", *at)[0])
                least = next((start + own for own, room in enumerate(rooms) if in_flight <= room), None)
                if least is None:
                    assert seconds[pair] == np.inf
                    continue
                assert place[pair] == least
                forward = group.costs.forward[start, least] if least > start else 0.0
                assert seconds[pair] == pytest.approx(group.plain[pair] + forward, rel=1e-12)
                parts += start < least < end
    assert parts > 5


def test_entries_are_the_stages_that_others_may_follow(make_choices: MakeChoices) -> None:
    random = np.random.default_rng(0)
    for group in make_choices(1, "never").groups:
        reachable = random.random((5, group.costs.table.blocks + 1)) < 0.4
        stages = [
            (position, after, key, pair)
            for position, after, key in zip(group.positions, group.afters, group.keys, strict=True)
            for pair in range(len(group.start))
            if reachable[after, group.end[pair]]
        ]
        own = group.before(reachable)
        assert own is not None
        assert list(zip(own.position, own.after, own.key, own.pair, strict=True)) == stages
        assert own.start.tolist() == group.start[own.pair].tolist()
        assert own.end.tolist() == group.end[own.pair].tolist()
        runs = [(key, group.start[pair]) for _, _, key, pair in stages]
        assert own.first.tolist() == [i for i, run in enumerate(runs) if i == 0 or run != runs[i - 1]]
        values, table = random.random(len(stages)), random.random((5, group.costs.table.blocks + 1))
        expected = table.copy()
        for (position, _, _, pair), value in zip(stages, values, strict=True):
            place = position, group.start[pair]
            expected[place] = min(expected[place], value)
        own.least_into(table, values)
        assert table.tolist() == expected.tolist()
        assert group.before(np.zeros_like(reachable)) is None
        asked = np.array([3, 0, 0, 2, 1])
        rows, found = group.runs_from(asked)
        pairs = [(row, run) for row, at in enumerate(asked) for run in np.flatnonzero(group.positions == at)]
        assert list(zip(rows, found, strict=True)) == pairs
