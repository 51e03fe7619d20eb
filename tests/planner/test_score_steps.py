"""The steps of scoring, by hand: which proposals are scored, in what order, and when it ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pplan.cost_models.errors import UsageError
from pplan.cost_models.layer import Chain
from pplan.planner import scoring as module
from pplan.planner.candidate import PipelineConfig, Proposal, ScoredPlan
from pplan.planner.plan_options import PlanOptions
from pplan.planner.problem import Problem
from pplan.planner.scoring import (
    _score_long,
    _trials,
    busiest_seconds,
    device_modes,
    least_in_parts,
    make_program,
    possible,
)
from pplan.planner.search import linear_groups
from pplan.planner.search.linear_groups import linear_group

Patch = pytest.MonkeyPatch
MakeChain = Callable[..., Chain]
MakeTopology = Callable[..., Any]
CONFIG = PipelineConfig("1f1b", "never", 4, 2)


def proposal(*ends: int, config: PipelineConfig = CONFIG, replicas: int = 1) -> Proposal:
    devices = tuple(tuple(range(replicas * n, replicas * (n + 1))) for n in range(len(ends)))
    return Proposal(config, ends, devices)


def plan(seconds: float) -> ScoredPlan:
    return ScoredPlan(proposal(3, 6), ("never", "never"), seconds)


class Clock:
    """A budget whose time is over once so many scores were made."""

    def __init__(self, most: float = inf) -> None:
        self.most, self.scored = most, list[Any]()

    @property
    def over(self) -> bool:
        return len(self.scored) >= self.most


def test_pipelines_that_fit_as_far_as_the_time_goes(monkeypatch: Patch) -> None:
    clock = Clock()

    def choose(_: Any, own: Proposal) -> Any:
        clock.scored.append(own)
        return None if own.ends[0] in {1, 4} else (f"mode{own.ends[0]}",)

    built = SimpleNamespace(config=CONFIG)
    asked = list[Any]()
    monkeypatch.setattr(linear_groups, "choose_modes", choose)

    def build(_: Any, own: Any, modes: Any) -> Any:
        asked.append((own, modes))
        return built

    monkeypatch.setattr(linear_groups, "build_pipelines", build)
    monkeypatch.setattr(
        linear_groups, "WHOLE_BOUNDS", {"1f1b": lambda own: np.array([1.0, 2.0]) if own is built else 0}
    )
    space: Any = SimpleNamespace(budget=clock)
    rows = [proposal(n, 6) for n in (1, 2, 3, 4, 5)]
    group = linear_group(space, rows)
    assert group is not None
    fitting = [(rows[n - 1], (f"mode{n}",)) for n in (2, 3, 5)]
    assert group.rows == fitting
    assert group.bounds == [1.0, 2.0]
    assert asked == [([own for own, _ in fitting], [modes for _, modes in fitting])]
    clock.scored, clock.most = [], 0
    late = linear_group(space, rows)
    assert late is not None
    assert late.rows == fitting[:1]
    assert linear_group(space, [rows[0]]) is None
    trials = list(_trials(space, [rows[1], rows[2]], optional=False))
    assert [(trial.bound, trial.tight) for trial in trials] == [(1.0, True), (2.0, True)]


class TestLong:
    """Of long chains the proposals with the least work, each by itself."""

    def run(
        self, works: list[float], monkeypatch: Patch, *, limit: float = inf, most: float = inf, **more: Any
    ) -> Any:
        """The answer's step, and the ends of those that were scored, with their limits; each takes a second
        longer than its work."""
        clock = Clock(most)
        rows = [proposal(number + 1, 400) for number in range(len(works))]
        config = replace(CONFIG, schedule=more.get("schedule", "1f1b"))
        rows = [replace(own, config=config) for own in rows]
        cut_after = np.ones(400, dtype=bool)
        cut_after[more.get("forbidden", 399) - 1] = False
        chain: Any = type("Layers", (), {"__len__": lambda _: 400, "cut_after": cut_after})()
        space: Any = SimpleNamespace(chain=chain, budget=clock)
        monkeypatch.setattr(module, "busiest_seconds", lambda _, own: works[own.ends[0] - 1])
        monkeypatch.setattr(module, "is_measured", lambda _, own: own.ends[0] != more.get("missing"))
        monkeypatch.setattr(module, "narrow_space", lambda _, ends: ends)
        fits = more.get("fits", lambda _: True)
        monkeypatch.setattr(module, "choose_modes", lambda narrow, _: ("x",) if fits(narrow[0]) else None)
        monkeypatch.setattr(module, "_trials", lambda narrow, own, optional: (narrow, own[0], optional))

        def score(_: Any, trials: Any, limit: float, *, optional: bool) -> Any:
            narrow, own, same = trials
            assert (narrow, same) == (own.ends, optional)
            clock.scored.append((own.ends[0], limit))
            step = works[own.ends[0] - 1] + 1
            return plan(step) if fits(own.ends[0]) and step < limit else None

        monkeypatch.setattr(module, "_score_trials", score)
        best = _score_long(space, rows, limit, optional=more.get("optional", False))
        return None if best is None else best.step_seconds, clock.scored

    def test_the_least_work_first(self, monkeypatch: Patch) -> None:
        works = [5.0, 3.0, 3.5, 4.0]
        assert self.run(works, monkeypatch) == (4.0, [(2, inf), (3, 4.0)])
        assert self.run(works, monkeypatch, limit=3.2) == (None, [(2, 3.2)])
        assert self.run(works, monkeypatch, forbidden=2) == (4.5, [(3, inf), (4, 4.5)])
        assert self.run(works, monkeypatch, missing=2) == (4.5, [(3, inf), (4, 4.5)])
        assert self.run(works, monkeypatch, most=1) == (4.0, [(2, inf)])
        assert self.run(works, monkeypatch, most=0) == (4.0, [(2, inf)])
        assert self.run(works, monkeypatch, most=0, optional=True) == (None, [])
        assert self.run(works, monkeypatch, most=0, fits=lambda n: n == 4) == (
            5.0,
            [(2, inf), (3, inf), (4, inf)],
        )


@pytest.mark.parametrize("optional", [True, False])
def test_each_device_takes_the_cheapest_mode_that_fits(optional: bool, monkeypatch: Patch) -> None:
    """Of its ledger's sum up to its limit; without a limit the first."""
    needs = {(0, "never"): 7, (0, "always"): 4, (1, "never"): 7, (1, "always"): 4}
    limits = {(0,): 5.0, (1,): 7.0}
    asked = list[Any]()

    def ledger(device: int, mode: str) -> dict[str, float]:
        asked.append((device, mode))
        return {"weights": needs[device, mode] - 1.0, "reserve": 1.0}

    assembly: Any = SimpleNamespace(program=SimpleNamespace(devices=2), ranks=[(0,), (1,)], ledger=ledger)
    clock = Clock()
    space: Any = SimpleNamespace(limit=limits.__getitem__, budget=clock)
    monkeypatch.setattr(module, "stage_modes", lambda _: ("never", "always"))
    assert device_modes(space, assembly, proposal(3, 6), optional=optional) == ("always", "never")
    assert asked == [(0, "never"), (0, "always"), (1, "never")]
    limits[0,] = inf
    asked.clear()
    assert device_modes(space, assembly, proposal(3, 6), optional=optional) == ("never", "never")
    assert asked == [(1, "never")]
    limits[1,] = 3.9
    assert device_modes(space, assembly, proposal(3, 6), optional=optional) is None
    limits[1,], clock.most = 7.0, 0
    late = device_modes(space, assembly, proposal(3, 6), optional=optional)
    assert late == (None if optional else ("never", "never"))


def make_problem(make_chain: MakeChain, make_topology: MakeTopology) -> Problem:
    chain = make_chain(3, 6, cuts=1.1, adding=0.8, traffic=0.0)
    return Problem(chain, make_topology(4), PlanOptions(mini_batch=8))


def test_the_busiest_device(make_chain: MakeChain, make_topology: MakeTopology) -> None:
    """All micro-batches of its layers, of which the first adds to no gradients; of a V both of its parts; of
    two directions an even share of all."""
    problem = make_problem(make_chain, make_topology)
    chain, space, once = problem.chain, problem.space, problem.chain.accumulation_seconds
    assert once is not None

    def work(a: int, b: int, size: int, first_share: float) -> float:
        at = chain.sizes.index(size)
        backward = chain.backward_seconds[a:b, at] - first_share * once[a:b]
        return float((chain.forward_seconds[a:b, at] + backward).sum())

    own = proposal(4, 6)
    expected = 4 * max(work(0, 4, 2, 0.25), work(4, 6, 2, 0.25))
    assert busiest_seconds(space, own) == pytest.approx(expected)
    shared = proposal(4, 6, replicas=2)
    assert busiest_seconds(space, shared) == pytest.approx(4 * max(work(0, 4, 1, 0.25), work(4, 6, 1, 0.25)))
    v = Proposal(replace(CONFIG, schedule="zb-v", virtual_stages=2), (1, 3, 4, 6), ((0,), (1,), (1,), (0,)))
    both = [work(0, 1, 2, 0.25) + work(4, 6, 2, 0.25), work(1, 3, 2, 0.25) + work(3, 4, 2, 0.25)]
    assert busiest_seconds(space, v) == pytest.approx(4 * max(both))
    chimera = Proposal(replace(CONFIG, schedule="chimera"), (4, 6), ((0,), (1,)))
    assert busiest_seconds(space, chimera) == pytest.approx(4 * (work(0, 4, 2, 0.5) + work(4, 6, 2, 0.5)) / 2)
    one = Proposal(replace(CONFIG, schedule="chimera", micro_batches=1), (4, 6), ((0,), (1,)))
    assert busiest_seconds(space, one) == pytest.approx((work(0, 4, 2, 1.0) + work(4, 6, 2, 1.0)) / 2)


def test_parts_of_a_backward_that_take_less(make_chain: MakeChain) -> None:
    """The least share over all layers and sizes, of all profiles, but no more than the whole."""
    chain = make_chain(0, 3)
    zero = np.zeros(3)
    for shares, expected in (((0.3, 0.6), 0.9), ((0.5, 0.5), 1.0), ((0.9, 0.9), 1.0)):
        split = replace(
            chain,
            accumulation_seconds=zero,
            backward_input_seconds=shares[0] * chain.backward_seconds,
            backward_weight_seconds=shares[1] * chain.backward_seconds,
        )
        space: Any = SimpleNamespace(chain=split, profiles={})
        assert least_in_parts(space) == pytest.approx(expected)
        profiled: Any = SimpleNamespace(chain=chain, profiles={"own": split})
        assert least_in_parts(profiled) == pytest.approx(expected)
        without: Any = SimpleNamespace(chain=replace(split, backward_weight_seconds=None), profiles={})
        assert least_in_parts(without) == 1.0
    ones = np.ones((3, 3))
    adding = replace(
        chain,
        backward_seconds=4 * ones,
        accumulation_seconds=np.array([1.0, 0.0, 2.0]),
        backward_input_seconds=1.5 * ones,
        backward_weight_seconds=1.5 * ones,
    )
    # (1.5 + 0.5) / 3, 3 / 4, and (1.5 + 0) / 2 of the first micro-batch
    own: Any = SimpleNamespace(chain=adding, profiles={})
    assert least_in_parts(own) == pytest.approx(2 / 3)


def test_what_may_be_run(make_chain: MakeChain, make_topology: MakeTopology) -> None:
    """Parts that are alike on every device, cuts that are allowed, shares that were measured."""
    problem = make_problem(make_chain, make_topology)
    cut_after = problem.chain.cut_after.copy()
    cut_after[1] = False
    problem = replace(problem, chain=replace(problem.chain, cut_after=cut_after))
    assert possible(problem.space, proposal(3, 6))
    assert not possible(problem.space, proposal(2, 6))
    assert not possible(problem.space, proposal(3, 6, replicas=3))
    several = replace(CONFIG, schedule="interleaved", virtual_stages=2)
    assert make_program(proposal(1, 2, 3, 6, config=several)).devices == 2
    with pytest.raises(UsageError, match="3 parts of the layers do not divide by 2 virtual stages"):
        make_program(proposal(1, 2, 6, config=several))
    assert make_program(proposal(3, 6)).devices == 2
