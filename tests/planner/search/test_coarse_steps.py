"""The steps of the search of many layers or devices: which cuts and devices are left, by hand, and what each
step is asked, with searches whose plans are written down here."""

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
from pplan.cost_models.topology import Topology
from pplan.planner.candidate import Proposal, ScoredPlan
from pplan.planner.cut_limits import CutLimits
from pplan.planner.pipeline_config import PipelineConfig
from pplan.planner.plan_records import TIE
from pplan.planner.search import coarse
from pplan.planner.search.branch_and_bound import SearchResult
from pplan.planner.search.budget import OutOfTime, SearchBudget
from pplan.planner.search.coarse import (
    FOR_BOUND,
    FOR_DEEP,
    MOST_LINEAR,
    MOST_POSITIONS,
    MOST_STAGES,
    NEAR,
    REFINEMENTS,
    _better,
    _between_pins,
    _in_units,
    _near,
    _Scored,
    _search_coarsely,
    _spread,
    is_large,
    search_large,
)
from pplan.planner.search.placements import MOST_DEVICES
from pplan.planner.search.space import Space
from pplan.planner.search.subproblem import Family

MakeChain = Callable[..., Chain]
MakeTopology = Callable[..., Topology]
Patch = pytest.MonkeyPatch
CONFIG = PipelineConfig("1f1b", "never", 8, 4)


def family(devices: int, *replicas: int, config: PipelineConfig = CONFIG) -> Family:
    placement: Any = SimpleNamespace(ranks=tuple(range(devices)))
    return Family(config, placement, replicas)


def plan(seconds: float, ends: tuple[int, ...] = (6,), config: PipelineConfig = CONFIG) -> ScoredPlan:
    devices = tuple((stage,) for stage in range(len(ends)))
    return ScoredPlan(Proposal(config, ends, devices), ("never",) * len(ends), seconds)


@pytest.fixture
def long_space(make_chain: MakeChain, make_topology: MakeTopology) -> Space:
    """Twenty layers of a second each, both ways; no cut behind the first, the fifth and the last."""
    chain = make_chain(1, 20, cuts=1.1)
    seconds = np.full_like(chain.forward_seconds, 0.5)
    cuts = np.ones(20, dtype=np.bool_)
    cuts[[0, 4, 19]] = False
    return Space(
        replace(chain, forward_seconds=seconds, backward_seconds=seconds, cut_after=cuts),
        make_topology(2),
        "sgd",
    )


@pytest.mark.parametrize(
    ("families", "is_long", "large"),
    [
        ([], False, False),
        ([], True, True),
        ([family(MOST_DEVICES, 1, 2)], False, False),
        ([family(MOST_DEVICES + 1, 1, 2)], False, True),
        ([family(MOST_LINEAR, 1)], False, False),
        ([family(MOST_LINEAR + 1, 1)], False, True),
        ([family(MOST_DEVICES + 1, 2)], False, True),
        ([family(MOST_LINEAR, 1), family(2, 2), family(3, 1)], False, False),
    ],
)
def test_what_is_too_large(families: list[Family], is_long: bool, large: bool) -> None:
    space: Any = SimpleNamespace(is_long=is_long)
    assert is_large(space, families) == large


@pytest.mark.parametrize(
    ("devices", "replicas", "unit", "left"),
    [
        (MOST_DEVICES, (1, 2, 3), 1, (1, 2, 3)),
        (MOST_DEVICES + 1, (1, 2, 3, 4), 2, (2, 4)),
        (2 * MOST_DEVICES, (1, 2, 3, 4), 2, (2, 4)),
        (2 * MOST_DEVICES + 1, (1, 2, 4, 6, 8), 4, (4, 8)),
        (7, (3,), 3, (3,)),
        (2 * MOST_DEVICES, (1,), 1, (1,)),
    ],
)
def test_devices_are_taken_several_at_a_time(
    devices: int, replicas: tuple[int, ...], unit: int, left: tuple[int, ...]
) -> None:
    own = _in_units(family(devices, *replicas))
    assert (own.unit, own.replicas) == (unit, left)


def test_cuts_between_which_layers_cost_alike(long_space: Space) -> None:
    """Of four blocks of five seconds: behind layers 5, 10 and 15, or the first place after them."""
    assert np.flatnonzero(_spread(long_space, 4)).tolist() == [5, 9, 14]
    assert np.flatnonzero(_spread(long_space, 2)).tolist() == [9]
    assert np.flatnonzero(_spread(long_space, 40)).tolist() == [1, 2, 3, *range(5, 19)]
    cut = replace(long_space, limits=CutLimits((11,), ()))
    assert np.flatnonzero(_spread(cut, 2)).tolist() == [9, 11]
    none = replace(long_space, chain=replace(long_space.chain, cut_after=np.zeros(20, dtype=np.bool_)))
    assert not _spread(none, 4).any()


def test_cuts_near_those_of_a_plan(long_space: Space) -> None:
    """Up to three places on either side, of those that are allowed."""
    assert NEAR == 3
    assert np.flatnonzero(_near(long_space, plan(1.0, (10, 20)))).tolist() == [6, 7, 8, 9, 10, 11, 12]
    assert np.flatnonzero(_near(long_space, plan(1.0, (3, 20)))).tolist() == [1, 2, 3, 5, 6]
    assert np.flatnonzero(_near(long_space, plan(1.0, (18, 20)))).tolist() == [14, 15, 16, 17, 18]
    assert np.flatnonzero(_near(long_space, plan(1.0, (3, 4, 20)))).tolist() == [1, 2, 3, 5, 6, 7]
    assert not _near(long_space, plan(1.0, (20,))).any()
    cut = replace(long_space, limits=CutLimits((11,), ()))
    assert np.flatnonzero(_near(cut, plan(1.0, (3, 20)))).tolist() == [1, 2, 3, 5, 6, 11]


@pytest.mark.parametrize(
    ("pins", "cuts"),
    [
        ((), []),
        (((0, 0),), []),
        (((6, 1),), [1]),
        (((6, 2),), [1, 5]),
        (((6, 3),), [1, 3, 5]),
        (((3, 9),), [1, 2]),
        (((12, 3), (6, 1)), [1, 6, 11]),
        (((6, 1), (12, 1)), [1]),
    ],
)
def test_cuts_between_pinned_layers(
    pins: tuple[tuple[int, int], ...], cuts: list[int], long_space: Space
) -> None:
    """As many as lie between their stages, evenly among the places there, the first and the last of them."""
    own = replace(long_space, limits=CutLimits((), pins))
    assert _between_pins(own) == cuts
    assert set(cuts) <= set(np.flatnonzero(_spread(own, 2)).tolist())
    assert set(cuts) <= set(np.flatnonzero(_near(own, plan(1.0))).tolist())


def test_the_better_of_a_smaller_space(monkeypatch: Patch) -> None:
    asked = list[Any]()

    def search(*own: Any, work: float, limit: float) -> Any:
        asked.append((own, work, limit))
        return SimpleNamespace(best=plan(1.0) if limit > 1.0 else None)

    monkeypatch.setattr(coarse, "search", search)
    space: Any = "space"
    assert _better(None, space, [], [2], 5.0) == plan(1.0)
    assert _better(plan(2.0), space, [], [2], 5.0) == plan(1.0)
    assert _better(plan(0.5), space, [], [2], 5.0) == plan(0.5)
    assert asked == [((space, [], [2]), 5.0, limit) for limit in (inf, 2.0, 0.5)]


@pytest.mark.parametrize("first", [None, 9.0])
def test_a_search_with_few_cuts_and_then_near_the_best(
    first: float | None, long_space: Space, monkeypatch: Patch
) -> None:
    """Near it: of its configuration and number of stages, with half of what work is left, twice."""
    asked = list[Any]()
    other = PipelineConfig("gpipe", "never", 8, 4)
    families = [family(2, 1, 2), family(2, 1, 2, config=other)]
    results = [plan(5.0, (10, 20), other), plan(4.0, (11, 20), other), plan(4.0, (11, 20), other)]

    def better(best: Any, space: Space, own: Any, counts: Any, work: float) -> ScoredPlan:
        asked.append(
            (best, np.flatnonzero(space.chain.cut_after).tolist(), [f.config for f in own], counts, work)
        )
        return results[len(asked) - 1]

    monkeypatch.setattr(coarse, "_better", better)
    budget = SearchBudget(100.0)
    scored = _Scored(long_space, budget, None if first is None else plan(first))
    _search_coarsely(scored, families, [1, 2], budget)
    assert scored.best == results[-1]
    places = [1, 2, 3, *range(5, 19)]
    assert asked == [
        (None if first is None else plan(first), places, [CONFIG, other], [1, 2], 50.0),
        (results[0], [6, 7, 8, 9, 10, 11, 12], [other], [2], 50.0),
        (results[1], [7, 8, 9, 10, 11, 12, 13], [other], [2], 50.0),
    ]
    assert len(asked) == 1 + REFINEMENTS
    asked.clear()
    many = [family(MOST_POSITIONS + 1, 1, 2)]
    _search_coarsely(scored, many, [1, 2], budget)
    assert asked == []
    monkeypatch.setattr(coarse, "_better", lambda *_: (_ for _ in ()).throw(OutOfTime))
    _search_coarsely(scored, [family(MOST_POSITIONS, 1, 2)], [1, 2], budget)
    assert scored.best == results[-1]


@pytest.mark.parametrize(
    ("least", "steps", "bound", "exact"),
    [
        (3.0, 4.0, 3.0, False),
        (4.0, 4.0, 4.0, True),
        (4.0 * (1 - TIE / 2), 4.0, 4.0 * (1 - TIE / 2), True),
        (5.0, 4.0, 4.0, True),  # what is found later is a bound, too
        (inf, inf, inf, True),
    ],
)
def test_a_large_search(
    least: float,
    steps: float,
    bound: float,
    exact: bool,
    make_chain: MakeChain,
    make_topology: MakeTopology,
    monkeypatch: Patch,
) -> None:
    """Deep pipelines, the bound, plans near relaxed ones, few cuts: one by one, each with its share."""
    log = list[Any]()

    class Relaxed:
        def __init__(self, *own: Any) -> None:
            _, families, counts, deeper, budget, self.scored = own
            log.append(("bound", families, counts, deeper, budget.remaining))

        def least(self, step: float) -> float:
            log.append(("least", step))
            return least

        def propose_rest(self, budget: SearchBudget) -> None:
            log.append(("rest", budget.remaining))

    def deep(scored: Any, _: Any, counts: Any, deeper: bool, budget: SearchBudget) -> None:
        log.append(("deep", scored.step, counts, deeper, budget.remaining))
        budget.spend(20.0)

    def coarsely(scored: Any, _: Any, counts: Any, __: Any) -> None:
        log.append(("coarse", counts))
        scored.best = None if steps == inf else plan(steps)

    monkeypatch.setattr(coarse, "RelaxedBound", Relaxed)
    monkeypatch.setattr(coarse, "_score_deep", deep)
    monkeypatch.setattr(coarse, "_search_coarsely", coarsely)
    monkeypatch.setattr(coarse, "quick_bound", lambda *_: 2.5)
    space = Space(make_chain(1, 6), make_topology(2), "sgd")
    seeds = [] if steps == inf else [plan(9.0), plan(8.0)]
    counts = (3, 1, MOST_STAGES, MOST_STAGES + 1, 3)
    own = search_large(space, [family(2, 1)], counts, seeds, 100.0, deeper=True)
    assert own == SearchResult(None if steps == inf else plan(steps), bound, 2.5, exact)
    start = inf if steps == inf else 8.0
    every = [1, 3, MOST_STAGES, MOST_STAGES + 1]
    assert log == [
        ("deep", start, every, True, FOR_DEEP * 100.0),
        ("bound", [family(2, 1)], every, True, FOR_BOUND * 80.0),
        ("least", start),
        ("rest", FOR_BOUND * 80.0),
        ("coarse", every[:-1]),
    ]


def test_first_layers_are_not_searched_of_so_many(make_chain: MakeChain, make_topology: MakeTopology) -> None:
    space = Space(make_chain(1, 6), make_topology(2), "sgd")
    config = PipelineConfig("1f1b", "first_layers", 4, 2)
    with pytest.raises(UsageError, match="recompute='first_layers' of so many devices or layers"):
        search_large(space, [family(2, 1), family(2, 1, config=config)], [1], [])


def test_each_plan_is_scored_once(
    make_chain: MakeChain, make_topology: MakeTopology, monkeypatch: Patch
) -> None:
    """Those that the limits allow and that fit; with shared ports only where it is faster without."""
    space = replace(Space(make_chain(1, 6, cuts=1.1), make_topology(2), "sgd"), limits=CutLimits((2,), ()))
    seconds: dict[tuple[int, ...], tuple[float, float]] = {
        (3, 6): (5.0, 6.0),
        (2, 3, 6): (4.0, 7.0),
        (3, 4, 6): (6.5, 6.5),
        (3, 5, 6): (3.0, 3.5),
    }
    asked = list[Any]()

    class Simulated:
        def __init__(self, ends: tuple[int, ...], shares: bool = True) -> None:
            self.ends, self.shares = ends, shares

        def without_sharing(self) -> Simulated:
            return Simulated(self.ends, False)

        def step_seconds(self) -> list[float]:
            asked.append((self.ends, self.shares))
            return [seconds[self.ends][self.shares]]

    monkeypatch.setattr(coarse, "choose_modes", lambda _, own: None if own.ends == (1, 3, 6) else ("never",))
    monkeypatch.setattr(coarse, "build_pipelines", lambda _, own, __: Simulated(own[0].ends))
    budget = SearchBudget(1e9)
    scored = _Scored(space, budget, None)
    assert scored.step == inf
    proposals = [plan(0.0, ends).proposal for ends in ((3, 6), (4, 6), (1, 3, 6), (3, 6), (2, 3, 6))]
    assert scored(proposals) == 6.0
    assert asked == [((3, 6), False), ((3, 6), True), ((2, 3, 6), False), ((2, 3, 6), True)]
    assert scored([plan(0.0, (3, 4, 6)).proposal]) == 6.0
    assert asked[4:] == [((3, 4, 6), False)]
    assert scored([plan(0.0, (3, 5, 6)).proposal, proposals[0]]) == 3.5
    assert scored.best == ScoredPlan(plan(0.0, (3, 5, 6)).proposal, ("never",), 3.5)
    assert len(asked) == 7
    simulated = SearchBudget(1e9)
    for ends in ((3, 6), (2, 3, 6), (3, 4, 6), (3, 5, 6)):
        simulated.simulate(1, 2 * len(ends) * 8)
    assert budget.remaining == simulated.remaining
