"""The steps of planning anew, by hand: which plans are looked at, in what order, and which one is taken."""

from __future__ import annotations

from itertools import combinations, product
from math import inf
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pplan.planner import device_loss as module
from pplan.planner.candidate import PipelineConfig, Proposal, ScoredPlan, near_shapes
from pplan.planner.device_loss import LEADING, _shape, _Shapes

Patch = pytest.MonkeyPatch
POINTS = (0, 2, 3, 5, 8)
CONFIG, OTHER = PipelineConfig("1f1b", "never", 4, 2), PipelineConfig("1f1b", "always", 8, 1)
GPIPE = PipelineConfig("gpipe", "never", 4, 2)


def plan(seconds: float, ends: tuple[int, ...], devices: Any, config: PipelineConfig = CONFIG) -> ScoredPlan:
    return ScoredPlan(Proposal(config, ends, devices), ("never",) * len(ends), seconds)


def make(
    ranks: tuple[int, ...] = (0, 2, 3), counts: tuple[int, ...] = (1, 2, 3), within: float = 0.1, **more: Any
) -> Any:
    """Four devices, the last one the fastest; stages end at four places."""
    speeds = [1.0, 1.0, 1.0, 2.0]
    topology = SimpleNamespace(device=lambda rank: SimpleNamespace(speed=speeds[rank]))
    problem: Any = SimpleNamespace(
        **{
            "configs": (CONFIG, GPIPE, OTHER),
            "stage_counts": counts,
            "chain": SimpleNamespace(sizes=(1,)),
            "space": SimpleNamespace(table=lambda _: SimpleNamespace(cut_points=POINTS)),
            "topology": topology,
            "runtime": None,
            "options": SimpleNamespace(use_all=False),
            **more,
        }
    )
    own = _Shapes(problem, plan(1.0, (3, 8), ((0, 1), (2, 3))), ranks, within)
    vars(own)["_without_all"] = SimpleNamespace(allows=lambda _: True)
    return own


def seconds_of(own: Proposal) -> float:
    """Any number that is the same again, of no other plan."""
    return 10.0 + hash((own.ends, own.devices, own.config.micro_batches)) % 100_003 / 1e4


def every(counts: tuple[int, ...] = (1, 2, 3), devices: int = 3) -> list[Any]:
    return [
        ((*cuts, 8), replicas)
        for stages in counts
        for cuts in combinations(POINTS[1:-1], stages - 1)
        for replicas in product(range(1, devices + 1), repeat=stages)
        if sum(replicas) <= devices
    ]


def scored(monkeypatch: Patch, seconds: Any = seconds_of) -> list[tuple[PipelineConfig, int, int]]:
    """What is scored side by side: configuration, number of stages, and of plans."""
    batches = []

    def score(_: Any, proposals: Any) -> Any:
        batches.append((proposals[0].config, len(proposals[0].ends), len(proposals)))
        assert len({(own.config, len(own.ends)) for own in proposals}) == 1
        for own in proposals:
            if seconds(own) < inf:
                yield ScoredPlan(own, ("never",) * len(own.ends), seconds(own))

    monkeypatch.setattr(_Shapes, "_score_alike", score)
    return batches


@pytest.mark.parametrize(
    ("ranks", "counts"), [((0, 2, 3), (1, 2, 3)), ((0, 2, 3), (2, 4)), ((1, 2), (1, 2, 3, 4))]
)
def test_all_shapes(ranks: tuple[int, ...], counts: tuple[int, ...]) -> None:
    own = make(ranks, counts)
    shapes = list(own._every())
    assert sorted(shapes) == sorted(every(counts, len(ranks)))
    assert own._count() == len(shapes)


@pytest.mark.parametrize("most", [0, 1])
def test_where_there_are_few_all_are_looked_at(most: int, monkeypatch: Patch) -> None:
    """Of the plan's schedule, on the devices by rank and on the faster ones first; of each shape the fastest
    is kept."""
    own = make()
    shapes = every()
    monkeypatch.setattr(module, "MOST_SHAPES", 2 * len(shapes) - most)
    batches = scored(monkeypatch)
    own.look()
    assert own.complete == (not most)
    if most:
        return
    assert own._orders == ((0, 2, 3), (3, 0, 2))
    assert set(own.steps) == set(shapes)
    for (ends, replicas), best in own.steps.items():
        ways = []
        for config, order in product((CONFIG, OTHER), ((0, 2, 3), (3, 0, 2))):
            left = iter(order)
            devices = tuple(tuple(next(left) for _ in range(count)) for count in replicas)
            ways.append(seconds_of(Proposal(config, ends, devices)))
        assert best.step_seconds == min(ways)
    assert {(config, stages): count for config, stages, count in batches} == {
        (config, stages): 2 * len(every((stages,))) for config in (CONFIG, OTHER) for stages in (1, 2, 3)
    }
    assert own.longest == min(best.step_seconds for best in own.steps.values()) * 1.1
    assert make().longest == inf
    assert own._orders[0] == make((1, 2))._orders[0] + (3,) or make((1, 2))._orders == ((1, 2),)


@pytest.mark.parametrize("most", [1, 12, 60, 400])
def test_near_the_fastest_again_and_again(most: int, monkeypatch: Patch) -> None:
    """From where the search starts; of four at a time all that is near them, the fastest under every
    configuration; until so many were scored, or nothing that is new is fast. Once more, step by step."""
    monkeypatch.setattr(module, "MOST_SHAPES", most)
    scored(monkeypatch)
    points, ranks, configs = tuple(range(13)), tuple(range(8)), (CONFIG, OTHER)
    own = make(ranks, (1, 2, 3, 4, 5, 6))
    own.problem.space.table = lambda _: SimpleNamespace(cut_points=points)
    own.problem.topology.device = lambda _: SimpleNamespace(speed=1.0)
    own.present = plan(1.0, (6, 12), (tuple(range(5)), tuple(range(5, 12))))
    own.look()
    assert not own.complete
    steps, seen = dict[Any, tuple[float, PipelineConfig]](), set[Any]()

    def score(rows: Any) -> None:
        for (ends, replicas), config in list(rows):
            if ((ends, replicas), config) in seen or sum(replicas) > 8 or min(replicas) < 1:
                continue
            seen.add(((ends, replicas), config))
            left = iter(ranks)
            devices = tuple(tuple(next(left) for _ in range(count)) for count in replicas)
            took = seconds_of(Proposal(config, ends, devices))
            if len(ends) <= 6 and took < steps.get((ends, replicas), (inf, config))[0]:
                steps[ends, replicas] = took, config

    score(
        ((ends, replicas), CONFIG) for ends, replicas in [((6, 12), (5, 3)), ((6, 12), (4, 4)), ((12,), (8,))]
    )
    varied = set[Any]()
    while len(seen) < most:
        ranked = sorted(steps, key=lambda shape: steps[shape][0])
        leading = [shape for shape in ranked if shape not in varied][:LEADING]
        if not leading or (varied and ranked[0] in varied and len(varied) > 8 * LEADING):
            break
        varied |= set(leading)
        score(
            (near, steps[shape][1])
            for shape in leading
            for near in near_shapes(points, shape[0], shape[1], 8)
        )
        first = min(steps, key=lambda shape: steps[shape][0])
        score((first, config) for config in configs)
    assert {shape: best.step_seconds for shape, best in own.steps.items()} == {
        shape: took for shape, (took, _) in steps.items()
    }
    assert own._scored == seen


def test_smaller_micro_batches_where_the_first_do_not_fit(monkeypatch: Patch) -> None:
    """Where the present configuration has no plan, the others are tried at the start."""
    monkeypatch.setattr(module, "MOST_SHAPES", 3)
    scored(monkeypatch, lambda own: inf if own.config == CONFIG else seconds_of(own))
    own = make()
    own.look()
    assert {best.config for best in own.steps.values()} == {OTHER}
    scored(monkeypatch, lambda _: inf)
    none = make()
    none.look()
    assert none.steps == {}


def test_what_is_not_scored(monkeypatch: Patch) -> None:
    """A stage without a device, more devices than are left, what the options exclude, and what was scored."""
    batches = scored(monkeypatch)
    own = make()
    own._score([(((3, 8), (0, 2)), CONFIG), (((3, 8), (2, 2)), CONFIG)])
    assert batches == []
    own._score([(((3, 8), (1, 2)), CONFIG), (((3, 8), (1, 1)), CONFIG), (((8,), (1,)), CONFIG)])
    assert batches == [(CONFIG, 2, 4), (CONFIG, 1, 2)]
    own._score([(((3, 8), (1, 2)), CONFIG), (((3, 8), (1, 2)), OTHER)])
    assert batches[2:] == [(OTHER, 2, 2)]
    allowed = Proposal(CONFIG, (3, 8), ((0,), (2, 3)))
    assert own._allows(allowed)
    own.problem.stage_counts = (1,)
    assert not own._allows(allowed)
    own.problem.stage_counts = (1, 2)
    own.problem.options.use_all = True
    assert own._allows(allowed)
    assert not own._allows(Proposal(CONFIG, (3, 8), ((0,), (2,))))
    vars(own)["_without_all"] = SimpleNamespace(allows=lambda _: False)
    assert not own._allows(allowed)


class TestMoveLeast:
    """Of plans near the fastest the one that moves the fewest bytes."""

    @pytest.mark.parametrize(
        ("within", "expected"), [(0.0, "slow"), (0.1, "middle"), (0.11, "middle"), (0.2, "few")]
    )
    def test_the_fewest_of_those_that_are_near(
        self, within: float, expected: str, monkeypatch: Patch
    ) -> None:
        moved = {"slow": 9.0, "middle": 5.0, "same": 5.0, "few": 1.0}
        names = iter(moved)
        plans = {
            name: plan(step, (number + 1, 8), ((0,), (2,)))
            for number, (name, step) in enumerate(zip(names, (10.0, 11.0, 11.5, 12.0), strict=True))
        }
        by_ends = {plans[name].proposal.ends: bytes for name, bytes in moved.items()}
        monkeypatch.setattr(module, "count_moved_bytes", lambda _, own, __: by_ends[own.ends])
        own = make(within=within, runtime="deepspeed")
        best, least = own.move_least(list(plans.values()), {}, np.zeros(8))
        assert (best, least) == (plans[expected], 10.0)

    @pytest.mark.parametrize("alike", [True, False])
    def test_on_the_devices_that_have_most(self, alike: bool, monkeypatch: Patch) -> None:
        """Without a runtime; of devices that differ they are scored anew, and may be faster or not fit."""
        first, second = plan(10.0, (3, 8), ((0,), (2,))), plan(10.5, (5, 8), ((0,), (2,)))
        monkeypatch.setattr(module, "is_uniform", lambda _: alike)
        monkeypatch.setattr(
            module, "assign_devices", lambda _, ranks, bounds, *__: ((ranks[-1],), (bounds[0][1],))
        )
        monkeypatch.setattr(
            module, "count_moved_bytes", lambda _, own, __: 1.0 if own.devices == ((3,), (5,)) else 2.0
        )
        again = {3: plan(8.0, (3, 8), ((3,), (3,))), 5: None}
        monkeypatch.setattr(module, "fastest", lambda _, proposals: again[proposals[0].ends[0]])
        own = make(within=0.1)
        best, least = own.move_least([first, second], {}, np.zeros(8))
        if alike:
            assert best == plan(10.5, (5, 8), ((3,), (5,)))
            assert least == 10.0
        else:
            assert (best, least) == (again[3], 8.0)
        monkeypatch.setattr(module, "MOST_NEAR", 1)
        best, least = own.move_least([first, second], {}, np.zeros(8))
        assert best == (first if alike else again[3])


def test_ports_are_waited_for_only_near_the_fastest(monkeypatch: Patch) -> None:
    """Other plans keep their steps without; those that do not fit have none."""
    alone, shared = np.array([10.0, 10.9, 11.1, 30.0]), np.array([12.0, 13.0, 14.0, 99.0])

    class Lines:
        def __init__(self, rows: Any, steps: Any) -> None:
            self.rows, self.steps = rows, steps

        def without_sharing(self) -> Lines:
            return Lines(self.rows, alone)

        def select(self, rows: Any) -> Lines:
            return Lines(self.rows[rows], shared)

        def step_seconds(self) -> Any:
            return self.steps[self.rows].copy()

    monkeypatch.setattr(
        module, "choose_modes", lambda _, own: None if own.ends[0] == 7 else (str(own.ends[0]),)
    )
    monkeypatch.setattr(module, "build_pipelines", lambda _, own, __: Lines(np.arange(len(own)), shared))
    own = make()
    proposals = [Proposal(CONFIG, (end, 8), ((0,), (2,))) for end in (1, 2, 7, 3, 4)]
    own.steps = {"known": plan(10.0, (8,), ((0,),))}
    plans = list(own._score_alike(proposals))
    assert [each.step_seconds for each in plans] == [12.0, 13.0, 11.1, 30.0]
    assert [each.recompute for each in plans] == [("1",), ("2",), ("3",), ("4",)]
    assert [_shape(each)[0] for each in plans] == [(1, 8), (2, 8), (3, 8), (4, 8)]
    own.steps = {"known": plan(1.0, (8,), ((0,),))}
    assert [each.step_seconds for each in own._score_alike(proposals)] == alone.tolist()
    assert list(own._score_alike([proposals[2]])) == []
