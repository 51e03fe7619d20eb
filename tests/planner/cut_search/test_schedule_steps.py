"""The steps of the search of other schedules, by hand: which shapes are listed, in what order they are looked
at, and what is proven when the work is done, with searches of shapes whose plans are written down here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product
from math import inf
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pplan.cost_models.layer import Chain
from pplan.cost_models.topology import Topology
from pplan.planner.candidate import Proposal, ScoredPlan
from pplan.planner.cut_search import schedule_search, shape_search
from pplan.planner.cut_search.schedule_search import (
    MOST_ACTIONS,
    MOST_SHAPES,
    SHARE,
    _compositions,
    _faster,
    _ScheduleSearch,
    _virtual_stages,
    search_schedules,
)
from pplan.planner.cut_search.shape_search import (
    MOST_SCORED,
    SearchStage,
    ShapeSearch,
    _are_usable,
    _neighbours,
    _spread,
)
from pplan.planner.pipeline_config import PipelineConfig
from pplan.planner.plan_options import PlanOptions
from pplan.planner.plan_records import TIE
from pplan.planner.problem import Problem
from pplan.planner.search.budget import WORK_A_SECOND, SearchBudget

MakeChain = Callable[..., Chain]
MakeTopology = Callable[..., Topology]
MakeProblem = Callable[..., Problem]
Patch = pytest.MonkeyPatch


@pytest.fixture
def make_problem(make_chain: MakeChain, make_topology: MakeTopology) -> MakeProblem:
    """A function of (gpus, layers, **options): zb-h1, where nothing else is said."""

    def make(gpus: int = 3, layers: int = 6, **options: Any) -> Problem:
        own = PlanOptions(**{"mini_batch": 4, "schedule": "zb-h1", **options})
        return Problem(make_chain(1, layers, cuts=1.1), make_topology(gpus), own)

    return make


def noted(log: list[Any], entry: Any, answer: Any) -> Any:
    """The answer of a function that notes what it was asked."""
    log.append(entry)
    return answer


def make_search(
    problem: Problem, *names: str, limit: float = inf, low: float = 0.5, work: float = inf
) -> Any:
    return _ScheduleSearch(problem, names or ("zb-h1",), limit, low, work)


def plan(seconds: float) -> ScoredPlan:
    proposal = Proposal(PipelineConfig("zb-h1", "never", 4, 1), (3, 6), ((0,), (1,)))
    return ScoredPlan(proposal, ("never", "never"), seconds)


def test_the_faster_of_two() -> None:
    assert _faster(None, None) is None
    assert _faster(plan(1.0), None) == plan(1.0)
    assert _faster(None, plan(1.0)) == plan(1.0)
    assert _faster(plan(2.0), plan(1.0)) == plan(1.0)
    first = plan(1.0)
    assert _faster(first, plan(1.0)) is first


@pytest.mark.parametrize(
    ("counts", "stages", "most"), [((1, 2, 3), 2, 4), ((1, 2), 3, 3), ((2,), 2, 3), ((1, 4), 3, 7)]
)
def test_replicas_of_every_stage(counts: tuple[int, ...], stages: int, most: int) -> None:
    expected = [own for own in product(counts, repeat=stages) if sum(own) <= most]
    assert list(_compositions(counts, stages, most)) == expected


def test_parts_on_a_device() -> None:
    config = PipelineConfig("interleaved", "never", 4, 1)
    several = _virtual_stages(config)
    assert several[0] == 2
    assert several == tuple(range(2, several[-1] + 1))
    assert _virtual_stages(replace(config, virtual_stages=5)) == (5,)
    assert _virtual_stages(replace(config, schedule="zb-v")) == (2,)
    assert _virtual_stages(replace(config, schedule="zb-h1")) == (1,)


@pytest.mark.parametrize("use_all", [False, True])
def test_all_shapes_of_few_devices(use_all: bool, make_problem: MakeProblem) -> None:
    """Every number of micro-batches, stages and replicas, on consecutive devices in rank order."""
    problem = make_problem(use_all=use_all)
    search = make_search(problem)
    shapes = [(shape.config, shape.ranks) for shape in search._all_shapes()]
    expected = set()
    for config, stages in product(problem.configs, (1, 2, 3)):
        for counts in product((1, 2, 3), repeat=stages):
            if sum(counts) > 3 or max(counts) > config.micro_batch_size or (use_all and sum(counts) < 3):
                continue
            ranks = iter(range(3))
            expected.add((config, tuple(tuple(next(ranks) for _ in range(count)) for count in counts)))
    assert len(shapes) == len(set(shapes))
    assert {ranks for _, ranks in shapes} <= {ranks for _, ranks in expected}
    runs = {(config, len(ranks)) for config, ranks in shapes}
    assert set(shapes) == {(config, ranks) for config, ranks in expected if (config, len(ranks)) in runs}
    assert all(len(shape.program.actions) == len(shape.ranks) for shape in search._all_shapes())
    assert search.is_complete


def test_what_is_left_out_of_all_shapes(make_problem: MakeProblem, monkeypatch: Patch) -> None:
    """Programs of too many actions; more stages than are listed; more devices than have every replicas."""
    problem = make_problem(micro_batches=4)
    (config,) = problem.configs
    search = make_search(problem)
    assert search._program(config, 7) is None
    assert search._program(config, 6) is not None
    assert search.is_complete
    monkeypatch.setattr(schedule_search, "MOST_ACTIONS", 3 * 3 * 4)
    assert search._program(config, 3) is not None
    assert search.is_complete
    assert search._program(config, 4) is None
    assert not search.is_complete
    assert MOST_ACTIONS > 1000
    two = replace(config, schedule="interleaved", virtual_stages=2)
    monkeypatch.undo()
    search = make_search(make_problem(schedule="interleaved", micro_batches=4), "interleaved")
    assert search._program(two, 1) is None
    assert search._program(two, 2) is not None
    assert search._program(two, 3) is None  # four micro-batches are no rounds of three
    assert search._program(two, 4) is None  # eight parts of six layers
    assert not make_search(make_problem(max_stages=None, gpus=70, layers=80)).is_complete
    assert make_search(make_problem(max_stages=2)).is_complete


def test_equal_replicas_of_many_stages(make_problem: MakeProblem, monkeypatch: Patch) -> None:
    problem = make_problem(9, mini_batch=8, micro_batches=2)
    (config,) = problem.configs
    search = make_search(problem)
    counts = problem.replica_choices(config.micro_batch_size)[0]
    assert search._replicas(config, 2) == list(_compositions(counts, 2, 9))
    monkeypatch.setattr(schedule_search, "MOST_SHAPES", (len(counts) ** 2 - 1) / 10)
    assert search._replicas(config, 2) == [(count, count) for count in counts if 2 * count <= 9]
    assert not search.is_complete
    monkeypatch.setattr(schedule_search, "MOST_COMPOSED", 9)
    assert search._replicas(config, 2) == list(_compositions(counts, 2, 9))


def test_shapes_near_plans(make_problem: MakeProblem) -> None:
    """Of the schedules that are searched, by device."""
    search = make_search(make_problem(schedule="any"), "zb-h1", "zb-v")
    config = PipelineConfig("zb-v", "never", 4, 1, 2)
    ranks = ((2,), (0, 1))
    folded = Proposal(config, (1, 2, 4, 6), (*ranks, *reversed(ranks)))
    one = ScoredPlan(folded, ("never",) * 4, 1.0)
    other = replace(
        one, proposal=Proposal(replace(config, schedule="gpipe", virtual_stages=1), (6,), ((0,),))
    )
    (shape,) = search._shapes_near([other, one])
    assert (shape.config, shape.ranks, shape.program.chunks) == (config, ranks, 2)


class Shape:
    """A shape whose stages have these bounds and plans: quick, improved, done."""

    def __init__(
        self, name: str, bound: float, *stages: tuple[float, float | None], cost: float = 1.0
    ) -> None:
        self.name, self.bound, self.stages, self.cost = name, bound, stages, cost
        self.stage = SearchStage.NEW
        self.best: ScoredPlan | None = None
        self.log: list[str] = []
        self.budget: Any = None

    @property
    def step(self) -> float:
        return inf if self.best is None else self.best.step_seconds

    def advance(self, limit: float) -> float:
        self.stage = SearchStage(self.stage + 1)
        self.log.append(f"{self.name}{int(self.stage)}")
        self.budget.spend(self.cost)
        bound, seconds = self.stages[self.stage - 1]
        self.bound = max(self.bound, bound)
        if seconds is not None and seconds < self.step:
            self.best = plan(seconds)
        return min(limit, self.step)


def run(
    problem: Problem,
    shapes: Iterable[Shape],
    near: Iterable[Shape] = (),
    *,
    complete: bool = True,
    **more: Any,
) -> tuple[Any, list[str]]:
    search = make_search(problem, **more)
    log: list[str] = []
    for shape in (*shapes, *near):
        shape.log, shape.budget = log, search.budget
    search._shapes = lambda: iter(shapes)
    search._shapes_near = lambda _: iter(near)
    search._simple_bound = lambda _: 0.0
    search._search = lambda shape, _: shape
    search.is_complete = complete
    return search.run(), log


def test_shapes_are_looked_at_in_stages(make_problem: MakeProblem) -> None:
    """All quickly, by their bounds; then the best ones more closely; then the one with the lowest bound as
    far as it goes, until all that is left is no faster than the best."""
    a = Shape("a", 2.0, (2.0, 5.0), (2.5, 4.0), (inf, None))
    b = Shape("b", 1.0, (1.5, 4.5), (3.0, 4.5), (3.5, 3.75))
    c = Shape("c", 3.0, (4.75, None), (9.0, None), (9.0, None))
    own, log = run(make_problem(), [a, b, c])
    assert log == ["b1", "a1", "c1", "b2", "a2", "a3", "b3"]
    assert (own.best, own.bound_seconds) == (plan(3.75), 3.75 if b.bound >= 3.75 else 3.5)
    assert own.plans == (plan(3.75), plan(4.0))


def test_shapes_of_good_plans_come_first(make_problem: MakeProblem) -> None:
    near = Shape("n", 0.0, (1.0, 3.0), (2.0, 2.5), (2.5, None))
    far = Shape("f", 2.6, (2.7, 2.6), (2.8, None), (2.9, None))
    own, log = run(make_problem(), [far], [near])
    assert log == ["n1", "n2", "n3"]
    assert (own.best, own.bound_seconds) == (plan(2.5), 2.5)


@pytest.mark.parametrize(
    ("work", "done", "bound"),
    [
        (1.0, ["a1"], 1.0),
        (2.0, ["a1", "b1"], 2.0),
        (3.0, ["a1", "b1", "b2"], 2.0),
        (4.0, ["a1", "b1", "b2", "a2"], 3.0),
    ],
)
def test_what_is_left_when_the_work_is_done_bounds_it(
    work: float, done: list[str], bound: float, make_problem: MakeProblem
) -> None:
    a = Shape("a", 0.75, (2.0, 6.0), (3.0, None), (4.0, None))
    b = Shape("b", 1.0, (2.5, 5.0), (3.5, None), (4.5, None))
    own, log = run(make_problem(), [b, a], work=work)
    assert log == done
    assert own.bound_seconds == bound


def test_what_was_not_listed_is_bounded_otherwise(make_problem: MakeProblem) -> None:
    def shape() -> Shape:
        return Shape("a", 1.0, (2.0, 5.0), (3.0, 4.0), (inf, None))

    own, _ = run(make_problem(), [shape()])
    assert (own.best, own.bound_seconds) == (plan(4.0), 4.0)
    own, _ = run(make_problem(), [shape()], complete=False)
    assert own.bound_seconds == 0.5
    own, _ = run(make_problem(), [shape()], limit=3.0)
    assert (own.best, own.bound_seconds) == (plan(4.0) if own.best else None, 3.0)
    own, _ = run(make_problem(), [])
    assert (own.best, own.bound_seconds, own.plans) == (None, inf, ())
    assert run(make_problem(), [], limit=3.0)[0].bound_seconds == 3.0
    own, _ = run(make_problem(), [Shape("a", 1.0, (2.0, 5.0), (3.0, 4.0), (3.5, None))], low=3.75)
    assert own.bound_seconds == 3.75


def test_which_shapes_are_bounded_each_by_itself(make_problem: MakeProblem, monkeypatch: Patch) -> None:
    """Those whose simple bound leaves them a chance, and that may fit, up to so many."""
    bounds = {"a": 1.0, "b": 3.0, "c": 3.0 * (1 - 2 * TIE), "d": 2.0, "e": 1.0}
    for most, listed, complete in (
        (9, ["a", "c", "e"], True),
        (3, ["a", "c", "e"], True),
        (2, ["a", "c"], False),
    ):
        monkeypatch.setattr(schedule_search, "MOST_SHAPES", most)
        search = make_search(make_problem(), limit=3.0)
        search._all_shapes = lambda: iter("abcde")
        search._simple_bound = bounds.__getitem__
        search._may_fit = lambda shape: shape != "d"
        search._is_needed = lambda _: True
        search._search = lambda shape, bound: (shape, bound)
        assert list(search._shapes()) == [(name, bounds[name]) for name in listed]
        assert search.is_complete == complete
    assert MOST_SHAPES >= 1000
    search = make_search(make_problem(), work=0.0)
    search._all_shapes = lambda: iter("a")
    search._simple_bound = bounds.__getitem__
    search._is_needed = lambda _: True
    assert (list(search._shapes()), search.is_complete) == ([], False)


def test_when_nothing_is_searched(make_problem: MakeProblem, monkeypatch: Patch) -> None:
    asked = list[Any]()

    class Search:
        def __init__(self, *own: Any) -> None:
            asked.append(own)

        def run(self, near: Any) -> Any:
            return ("ran", near)

    monkeypatch.setattr(schedule_search, "_ScheduleSearch", Search)
    monkeypatch.setattr(
        schedule_search, "universal_bound", lambda _, names, limit: 2.0 if names == ("a", "b") else limit
    )
    problem = make_problem(time_limit=3.0)
    assert search_schedules(problem, []) == schedule_search.ScheduleResult(None, inf)
    assert search_schedules(problem, "aba", 2.0) == schedule_search.ScheduleResult(None, 2.0)
    ran: Any = search_schedules(problem, "aba", 2.1, near=[plan(9.0)])
    assert ran == ("ran", [plan(9.0)])
    assert asked.pop() == (problem, ("a", "b"), 2.1, 2.0, SHARE * 3.0 * WORK_A_SECOND)
    search_schedules(problem, "ab", 2.1, 7.0)
    assert asked.pop()[-1] == 7.0
    long: Any = SimpleNamespace(space=SimpleNamespace(is_long=True))
    assert search_schedules(long, "ab", 2.1) == schedule_search.ScheduleResult(None, 2.0)
    assert asked == []


@pytest.mark.parametrize(
    ("cuts", "expected"),
    [
        ([0, 2, 4, 6], [0, 2, 4, 6]),
        ([0, 0, 0, 6], [0, 1, 2, 6]),
        ([0, 6, 6, 6], [0, 4, 5, 6]),
        ([0, 3, 3, 6], [0, 3, 4, 6]),
    ],
)
def test_cuts_that_leave_a_place_to_each(cuts: list[int], expected: list[int]) -> None:
    assert _spread(cuts) == expected


def test_cuts_a_step_away(monkeypatch: Patch) -> None:
    """One moved, or two; those of parts that are near each other first; where the parts may be."""
    usable = np.ones((3, 7, 7), dtype=np.bool_)
    tables: Any = SimpleNamespace(parts=3, places=7, usable=usable)
    rows = {tuple(row) for row in _neighbours(np.array([0, 2, 4, 6]), tables).tolist()}
    one = {(0, 1, 4, 6), (0, 3, 4, 6), (0, 2, 3, 6), (0, 2, 5, 6)}
    assert rows == one | {(0, 1, 3, 6), (0, 1, 5, 6), (0, 3, 5, 6)}
    usable[1, 2, 5] = False
    assert (0, 2, 5, 6) not in {tuple(row) for row in _neighbours(np.array([0, 2, 4, 6]), tables).tolist()}
    monkeypatch.setattr(shape_search, "MOST_PAIRS", 0)
    assert len(_neighbours(np.array([0, 2, 4, 6]), tables)) == 3
    every = np.array([[0, 2, 4, 6], [0, 2, 2, 6], [0, 3, 2, 6], [0, 2, 5, 6], [-1, 2, 4, 6]])
    assert _are_usable(every, tables).tolist() == [True, False, False, False, True]


def shape_of(steps: dict[tuple[int, ...], float | None], monkeypatch: Patch, *, alike: bool = True) -> Any:
    """A search whose cuts take these seconds, None: do not fit."""
    table = SimpleNamespace(cut_points=(0, 1, 2, 3))
    space: Any = SimpleNamespace(table=lambda _: table, chain=SimpleNamespace(sizes=(1,)))
    program = SimpleNamespace(actions=[[1, 2], [3]])
    shape: Any = SimpleNamespace(program=program, proposal=lambda _, cuts: tuple(cuts))
    monkeypatch.setattr(
        shape_search, "fastest", lambda _, own: None if steps[own[0]] is None else plan(steps[own[0]] or 0.0)
    )
    allows: Any = lambda cuts: cuts != (9,)  # noqa: E731
    return ShapeSearch(space, shape, 0.0, alike, allows, SearchBudget(1e12), None)  # type: ignore[arg-type]


def test_cuts_are_scored_once(monkeypatch: Patch) -> None:
    """The first few, those that are allowed; the limit falls with the best."""
    steps: dict[tuple[int, ...], float | None] = {(n,): 10.0 - n for n in range(9)}
    steps.update({(10,): None, (9,): 0.0})
    own = shape_of(steps, monkeypatch)
    assert own.step == inf
    assert own._score([[1], [10], [9], [2]], 8.5) == 8.0
    assert own.best == plan(8.0)
    assert own._best_cuts() == [[2], [1], [9], [10]]
    remaining = own.budget.remaining
    assert own._score([[1], [2]], 7.5) == 7.5
    assert own.budget.remaining == remaining
    assert own._score([[n] for n in (3, 4, 5, 6, 7, 8, 0)], 7.5) == 2.0
    assert (0,) not in own._scored
    assert len(own._scored) == 4 + MOST_SCORED


@pytest.mark.parametrize(
    ("limit", "expected", "scored"),
    [(4.0, (2.5, inf), 2), (inf, (2.5, inf), 2), (2.0 * (1 + TIE / 2), (2.0 * (1 + TIE / 2), inf), 0)],
)
def test_all_cuts_below_the_limit_are_scored(
    limit: float, expected: tuple[float, float], scored: int, monkeypatch: Patch
) -> None:
    """From the lowest bound on, until the best is below it."""
    own = shape_of({(0,): 4.5, (1,): 2.5, (2,): 3.5}, monkeypatch)
    rows = np.array([[0], [1], [2]])
    assert own.score_cuts(rows, np.array([3.0, 2.2, 2.0]), limit) == expected
    assert len(own._scored) == scored
    own = shape_of({(0,): 4.5, (1,): 2.5, (2,): 3.5}, monkeypatch)
    own.budget = SearchBudget(0.0)
    assert own.score_cuts(rows, np.array([3.0, 2.2, 2.0]), 4.0) == (4.0, 2.0)


def test_on_unlike_devices_the_least_bounds_them(monkeypatch: Patch) -> None:
    """Scored in the order of their own seconds, those below the limit; others may be faster elsewhere."""
    own = shape_of({(0,): 4.5, (1,): 2.5, (2,): 3.5}, monkeypatch, alike=False)
    own._made_tables = (None, SimpleNamespace(costs=lambda rows: rows))
    monkeypatch.setattr(shape_search, "step_seconds", lambda *_: np.array([4.4, 2.4, 5.0]))
    assert own.score_cuts(np.array([[0], [1], [2]]), np.array([3.0, 2.2, 2.0]), 4.5) == (2.5, 2.0)
    assert set(own._scored) == {(0,), (1,)}


class Game:
    """A bound that comes closer in these steps."""

    def __init__(self, *bounds: float) -> None:
        self.bounds, self.turn, self.added = bounds, -1, list[list[int]]()

    def improve(self) -> bool:
        self.turn += 1
        return self.turn + 1 < len(self.bounds)

    @property
    def bound(self) -> float:
        return self.bounds[self.turn]

    def add(self, cuts: list[int]) -> None:
        self.added.append(cuts)


@pytest.mark.parametrize(("limit", "bound", "turns"), [(9.0, 2.0, 2), (1.0, 1.0, 1), (2.0, 2.0, 2)])
def test_stages_of_a_shape(limit: float, bound: float, turns: int, monkeypatch: Patch) -> None:
    """First cuts and two turns of the bound; then a local search, of what is not far from the best, and as
    many turns as gain, until the bound reaches the limit."""
    own = shape_of({(1,): 5.0}, monkeypatch)
    own._made_game, own._spend_turn = Game(1.0, 2.0, 3.0, 4.0), lambda: None
    own._starts = lambda: [[1]]
    assert own.advance(limit) == min(limit, 5.0)
    assert (own.stage, own.bound, own._made_game.turn + 1) == (SearchStage.QUICK, bound, turns)
    searched = list[Any]()
    own._search_locally = lambda now: noted(searched, now, now - 1)
    own._made_game = Game(1.0, 2.0, 3.0, 3.5)
    assert own.advance(4.5) == 3.5
    assert own.stage == SearchStage.IMPROVED
    assert searched == [4.5]
    assert own._made_game.added == [[1]]
    assert own.bound == 3.5
    own.stage, own._made_game = SearchStage.QUICK, Game(1.0, 2.0)
    assert own.advance(5.0 / 1.2) == 5.0 / 1.2  # is far from it
    assert searched == [4.5]
    own._exhaust = lambda now: now / 2
    assert own.advance(4.0) == 2.0
    assert own.stage == SearchStage.DONE
