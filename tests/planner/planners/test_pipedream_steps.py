"""The steps of PipeDream's planner, with programmes whose plans are written down here: how deep memory is
counted, over how many cut points, and what stops it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pplan.planner.candidate import PipelineConfig
from pplan.planner.planners import pipedream_planner as module
from pplan.planner.planners.pipedream_planner import (
    COARSE,
    QUICK,
    Instance,
    NestedStage,
    Solution,
    _counts,
    _deep_enough,
    _one_schedule,
    _renumber,
    _select_points,
    _too_large,
    _within_reach,
    place_parts,
    shortest_bottleneck,
)
from pplan.planner.planners.replica_groups import Tier

Patch = pytest.MonkeyPatch


def instance(blocks: int, fits: Callable[[int, int], Any] | None = None, **more: Any) -> Instance:
    """Of blocks of a second each."""
    places = np.arange(blocks + 1)
    seconds = np.where(places[None] > places[:, None], 1.0 * (places[None] - places[:, None]), inf)
    known: dict[str, Any] = {"crossing": np.zeros(blocks + 1), "tiers": (Tier(2, 1.0),)}
    return Instance(seconds, np.zeros(seconds.shape), fits=fits, **(known | more))


def solution(seconds: float, *ends: int) -> Solution:
    """On one device each."""
    parts = tuple(NestedStage(a, b, 1) for a, b in zip((0, *ends), ends, strict=False))
    return Solution(seconds, parts, ends[-1] + 1)


class Programmes:
    """Answers by depth and limit; what is asked, and a second of work each."""

    def __init__(self, monkeypatch: Patch, answers: Callable[[int, float, bool], Solution | None]) -> None:
        self.asked = list[tuple[int, float, bool]]()

        def make(at: Instance, depth: int, limit: float) -> Any:
            key = depth, limit, at.fits is not None
            self.asked.append(key)
            return SimpleNamespace(solution=lambda: answers(*key), work=10.0)

        monkeypatch.setattr(module, "Programme", make)


def fits_up_to(most: int) -> Callable[[int, int], Any]:
    """Stages with so many behind them, at most."""
    return lambda _, behind: np.full((5, 5), behind <= most)


def test_stages_that_do_not_fit() -> None:
    """By how many are behind them, the first stage first."""
    own = solution(1.0, 1, 2, 4)
    assert _too_large(own, instance(4)) == []
    assert _too_large(own, instance(4, fits_up_to(1))) == [2]
    assert _too_large(own, instance(4, fits_up_to(-1))) == [2, 1, 0]
    table = np.ones((5, 5), dtype=bool)
    table[1, 2] = False
    assert _too_large(own, instance(4, lambda *_: table)) == [1]


def test_memory_is_counted_as_deep_as_it_must(monkeypatch: Patch) -> None:
    """First without, then deeper, until the plan fits, under the limit that is known."""
    plans = {-1: solution(10.0, 1, 2, 3, 4), 0: solution(12.0, 2, 3, 4), 2: solution(13.0, 2, 4)}

    def answer(depth: int, limit: float, limited: bool) -> Solution | None:
        own = plans[depth if limited else -1]
        return own if own.seconds <= limit else None

    own = Programmes(monkeypatch, answer)
    cases: Any = (
        (fits_up_to(1), inf, (plans[2], 2, 30.0), [(0, inf, False), (0, inf, True), (2, inf, True)]),
        (None, 7.0, (None, -1, 10.0), [(0, 7.0, False)]),
        (fits_up_to(9), inf, (plans[-1], -1, 10.0), [(0, inf, False)]),
        (fits_up_to(2), 12.5, (plans[0], 0, 20.0), [(0, 12.5, False), (0, 12.5, True)]),
    )
    for fits, limit, expected, asked in cases:
        own.asked.clear()
        assert _deep_enough(instance(4, fits), -1, limit) == expected
        assert own.asked == asked


def test_over_more_and_more_cut_points(monkeypatch: Patch) -> None:
    """Each plan is the limit of the next; no more where that would take too long, as the last took so many
    times what the one before took."""
    asked = list[Any]()
    spent = {8: 10.0, 16: 30.0, 32: 90.0}
    steps = {8: 5.0, 16: 4.0, 32: None}

    def deep(at: Instance, depth: int, limit: float) -> Any:
        asked.append((at.last, depth, limit))
        seconds = steps[at.last]
        return (None if seconds is None else solution(seconds, 1, at.last)), depth + 2, spent[at.last]

    monkeypatch.setattr(module, "_deep_enough", deep)
    monkeypatch.setattr(module, "_counts", lambda _: [8, 16, 32])
    monkeypatch.setattr(module, "_select_points", lambda at, count: np.arange(count + 1) * (at.last // count))
    whole = instance(32)
    best = shortest_bottleneck(whole, 1e9)
    assert asked == [(8, -1, inf), (16, 1, 5.0), (32, 3, 4.0)]
    assert best is not None
    assert (best.seconds, [(part.start, part.end) for part in best.parts]) == (4.0, [(0, 2), (2, 32)])
    # 10 + 30 and three times 30 more.
    for work, count in ((131.0, 3), (130.0, 3), (129.0, 2), (20.0, 2), (19.0, 1)):
        asked.clear()
        shortest_bottleneck(whole, work)
        assert len(asked) == count, work
    steps[8] = steps[16] = None
    assert shortest_bottleneck(whole, 1e9) is None
    # Where one took less than the one before, the next is taken to take as long.
    spent.update({8: 30.0, 16: 25.0, 32: 1.0})
    for work, count in ((80.0, 3), (79.0, 2), (60.0, 2), (59.0, 1)):
        asked.clear()
        shortest_bottleneck(whole, work)
        assert len(asked) == count, work


def test_how_many_cut_points() -> None:
    """Halves of halves, where memory is limited or it takes long; all at last."""
    few, many = instance(2 * COARSE - 1, fits_up_to(1)), instance(4 * COARSE + 1, fits_up_to(1))
    assert _counts(few) == [2 * COARSE - 1]
    assert _counts(many) == [COARSE, 2 * COARSE, 4 * COARSE + 1]
    assert _counts(replace(many, fits=None)) == [4 * COARSE + 1]
    places = 4 * COARSE
    cases: Any = (
        (lambda n: (Tier(n, 1.0),), lambda n: n**2 / 2 * places**2),
        (lambda n: (Tier(n, 1.0), Tier(3, 1.0)), lambda n: 9 / 2 * places**2 + n**2 / 2 * places**3 / 3),
    )
    for tiers, comparisons in cases:
        wide = next(n for n in range(1, 100_000) if comparisons(n) > QUICK)
        assert len(_counts(instance(places, tiers=tiers(wide)))) > 1
        assert len(_counts(instance(places, tiers=tiers(wide - 1)))) == 1


def test_cut_points_of_equal_shares() -> None:
    """Of each share of the seconds, by the end of the layer before it, the cut that least crosses."""
    for seed in range(20):
        random = np.random.default_rng(seed)
        blocks, count = 12, 2 + seed % 6
        layers = random.integers(1, 9, blocks) * 1.0
        done = np.append(0.0, layers.cumsum())
        crossing: Any = random.permutation(blocks + 1) * 1.0
        seconds = np.where(done[None] > done[:, None], done[None] - done[:, None], inf)
        own = replace(instance(blocks), seconds=seconds, crossing=crossing)
        shares: dict[int, list[int]] = {}
        for place in range(1, blocks):
            shares.setdefault(int(done[place] / done[-1] * (count - 1)), []).append(place)
        expected = [
            0,
            *(min(places, key=lambda place: crossing[place]) for places in shares.values()),
            blocks,
        ]
        assert _select_points(own, count).tolist() == expected
        assert _select_points(own, blocks).tolist() == list(range(blocks + 1))
    part = NestedStage(0, 2, 3, (NestedStage(0, 1, 1), NestedStage(1, 2, 2)))
    points = np.array([0, 4, 9])
    assert _renumber(part, points) == NestedStage(0, 9, 3, (NestedStage(0, 4, 1), NestedStage(4, 9, 2)))


def test_devices_of_three_levels() -> None:
    """Of two in a pair, two pairs in a node and two nodes: components are taken in turn, by every copy."""
    two = tuple(NestedStage(0, 1, 1) for _ in "ab")
    pair, single = (NestedStage(0, 1, 2),), NestedStage
    tiers = [Tier(2, 1.0)] * 3
    parts = [
        single(0, 4, 1, (single(0, 2, 1, two), single(2, 4, 1, pair))),
        single(4, 6, 1, (single(4, 6, 2, two),)),
    ]
    assert place_parts(parts, tiers) == [(0,), (1,), (2, 3), (4, 6), (5, 7)]
    parts = [single(0, 4, 2, (single(0, 2, 1, pair), single(2, 4, 1, two)))]
    assert place_parts(parts, tiers) == [(0, 1, 4, 5), (2, 6), (3, 7)]


def test_which_configurations_are_planned() -> None:
    """Of the first schedule that there is; where stages may recompute or not, only so."""
    every = [PipelineConfig(name, mode, 4, 2) for name in ("gpipe", "1f1b") for mode in ("never", "always")]
    name = next(own for own in module.SCHEDULES if own in ("gpipe", "1f1b"))
    assert _one_schedule(every) == [own for own in every if own.schedule == name]
    mixed = [*every, PipelineConfig(name, "by_stage", 4, 2)]
    assert _one_schedule(mixed) == [mixed[-1]]
    assert _one_schedule([PipelineConfig("zb-v", "never", 4, 2)]) == []
    for one_process, gpus, expected in ((True, 8, 4), (True, 4, None), (False, 8, None)):
        topology = SimpleNamespace(gpus=gpus, gpus_per_node=4, with_gpus=lambda n: n)
        space: Any = Space(one_process, topology)
        found: Any = _within_reach(space)
        assert found is space if expected is None else found.topology == expected


class Space:
    """With what `replace` needs."""

    def __init__(self, one_process: bool, topology: Any) -> None:
        self.one_process, self.topology = one_process, topology


@pytest.fixture(autouse=True)
def replaced(monkeypatch: Patch) -> None:
    monkeypatch.setattr(
        module,
        "replace",
        lambda own, **more: (
            Space(own.one_process, more["topology"]) if isinstance(own, Space) else replace(own, **more)
        ),
    )
