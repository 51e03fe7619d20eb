"""What the constraint solver is told, by a stand-in that only checks: the times of every order that fits keep
to it, and of no other; no action may begin earlier."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pplan.planner.synthesis import solve_order as module
from pplan.planner.synthesis.order_problem import B, F, Lists, OrderProblem, Step, W
from pplan.planner.synthesis.run_order import OrderRun, run_order
from pplan.planner.synthesis.solve_order import BYTE_UNITS, UNITS, SolvedOrder, solve_order

from .test_rule_orders import random_problem

Values = dict[str, int]


@dataclass(frozen=True, eq=False)
class Sum:
    """A variable's value, and more."""

    name: str
    more: int = 0

    def __add__(self, more: int) -> Sum:
        return Sum(self.name, self.more + more)

    def __ge__(self, other: Sum | int) -> Callable[[Values], bool]:
        return lambda values: self.of(values) >= (other if isinstance(other, int) else other.of(values))

    def of(self, values: Values) -> int:
        """By the values of the variables."""
        return values[self.name] + self.more


@dataclass(frozen=True)
class Interval:
    begin: Sum
    end: Sum
    size: Sum | int


@dataclass
class Model:
    """Notes what is added, and says whether values keep to it."""

    most: dict[str, tuple[int, int]] = field(default_factory=dict)
    rules: list[Callable[[Values], bool]] = field(default_factory=list)
    hints: Values = field(default_factory=dict)
    least: str = ""

    def new_int_var(self, low: int, high: int, name: str) -> Sum:
        self.most[name] = low, high
        return Sum(name)

    def new_fixed_size_interval_var(self, begin: Sum, size: int, name: str) -> Interval:
        assert name
        return Interval(begin, begin + size, size)

    def new_interval_var(self, begin: Sum, size: Sum, end: Sum, name: str) -> Interval:
        assert name
        return Interval(begin, end, size)

    def add(self, rule: Callable[[Values], bool]) -> None:
        self.rules.append(rule)

    def add_no_overlap(self, intervals: Sequence[Interval]) -> None:
        def apart(values: Values) -> bool:
            times = sorted((own.begin.of(values), own.end.of(values)) for own in intervals)
            return all(end <= begin for (_, end), (begin, _) in pairwise(times))

        self.rules.append(apart)

    def add_cumulative(self, intervals: Sequence[Interval], demands: Sequence[int], room: int) -> None:
        assert all(isinstance(own.size, int) or own.size.name in self.most for own in intervals)

        def fits(values: Values) -> bool:
            times = [(own.begin.of(values), own.end.of(values)) for own in intervals]
            held = [
                sum(d for d, (begin, end) in zip(demands, times, strict=True) if begin <= now < end)
                for now, _ in times
            ]
            return max(held, default=0) <= room and all(begin <= end for begin, end in times)

        self.rules.append(fits)

    def add_hint(self, variable: Sum, value: int) -> None:
        self.hints[variable.name] = value

    def minimize(self, variable: Sum) -> None:
        self.least = variable.name

    def allows(self, values: Values) -> bool:
        """Whether the values keep to all rules."""
        within = all(self.most[name][0] <= value <= self.most[name][1] for name, value in values.items())
        return within and all(rule(values) for rule in self.rules)


@dataclass
class Solver:
    """Answers with a status, and the values of variables."""

    status: int = 0
    values: Values = field(default_factory=dict)
    best_objective_bound: float = 0.0
    parameters: Any = field(default_factory=SimpleNamespace)
    model: Model = field(default_factory=Model)

    def solve(self, model: Model) -> int:
        self.model = model
        return self.status

    def value(self, variable: Sum) -> int:
        return self.values[variable.name]


OPTIMAL, FEASIBLE, UNKNOWN = 4, 2, 0


@pytest.fixture
def solver(monkeypatch: pytest.MonkeyPatch) -> Solver:
    own = Solver()
    names = "ortools", "ortools.sat", "ortools.sat.python", "ortools.sat.python.cp_model"
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    stand_in: Any = sys.modules[names[-1]]
    stand_in.CpModel, stand_in.CpSolver = Model, lambda: own
    stand_in.OPTIMAL, stand_in.FEASIBLE = OPTIMAL, FEASIBLE
    monkeypatch.setattr(sys.modules["ortools.sat.python"], "cp_model", stand_in, raising=False)
    return own


def random_orders(problem: OrderProblem, seed: int) -> Iterator[tuple[Lists, OrderRun]]:
    """Orders that can be run, whether they fit or not: of what may be done next, one after another."""
    random = np.random.default_rng(seed)
    steps = [
        (kind, part) for kind in ((F, B, W) if problem.split else (F, B)) for part in range(problem.parts)
    ]
    for _ in range(12):
        rows: list[list[Step]] = [[] for _ in range(problem.devices)]
        done = dict.fromkeys(steps, 0)
        while able := [step for step in steps if done[step] < most(problem, done, *step)]:
            kind, part = able[random.integers(len(able))]
            done[kind, part] += 1
            rows[problem.device[part]].append((kind, part))
        lists = tuple(map(tuple, rows))
        run = run_order(problem, lists)
        assert run is not None
        yield lists, run


def most(problem: OrderProblem, done: dict[Step, int], kind: int, part: int) -> int:
    """How many of an action may have been done."""
    if kind == F:
        return done[F, part - 1] if part else problem.micro_batches
    if kind == W:
        return done[B, part]
    return done[B, part + 1] if part + 1 < problem.parts else done[F, part]


def times(lists: Lists, run: OrderRun, unit: float) -> Values:
    """Of each action and of the step, in the solver's units, rounded down."""
    values, every, done = {"step": int(run.step / unit + 1e-6)}, iter(run.start), dict[Step, int]()
    for kind, part in (step for row in lists for step in row):
        number = done.get((kind, part), 0)
        done[kind, part] = number + 1
        values[f"{kind}.{part}.{number}"] = int(next(every) / unit + 1e-6)
    return values


def problems() -> Iterator[tuple[int, OrderProblem]]:
    """Lines and a V, with bytes that change on the way and without, in little room and in any."""
    for seed in range(16):
        chunks, count = (2, 2) if seed % 4 == 3 else (1, 3)
        room = (1.5, 1.875)[seed % 3 > 0] if chunks == 2 else (2.25, 2.75, 3.25)[seed % 3]
        own = random_problem(seed, 2, count, room=room, chunks=chunks)
        random = np.random.default_rng(seed)
        held = tuple((a / 8, -b / 8) for a, b in random.integers(0, 9, (own.parts, 2)).tolist())
        own = replace(own, end=(0.5, 3.0), first_part=((0.0, 0.0), *held[1:]))
        if seed % 8 > 4:
            own = replace(own, first_part=(), workspace=(), credit=(0.0,) * own.parts)
        elif seed % 8 == 1:
            own = replace(own, workspace=())
        elif seed % 8 == 2:
            own = replace(own, first_part=())
        yield seed, replace(own, room=(inf, inf)) if seed == 8 else own


def in_flight(problem: OrderProblem, lists: Lists) -> bool:
    """Whether a line never has more micro-batches in flight than it may have room for."""
    most = [0] * problem.parts
    for row in lists:
        held = 0
        for kind, part in row:
            held += (kind == F) - (kind == problem.release)
            most[part] = max(most[part], held)
    return all(own <= may for own, may in zip(most, problem.most_in_flight, strict=True))


def test_orders_that_fit_keep_to_the_model_and_no_others_do(solver: Solver) -> None:
    """Of random orders, and of each with one action or the step a little earlier, or two exchanged. Some do
    not fit though they have no more micro-batches in flight than may be."""
    fitting = unfit = by_bytes = 0
    for seed, problem in problems():
        orders = list(random_orders(problem, seed))
        start, slowest = max(orders, key=lambda own: own[1].step)
        solve_order(problem, start, 0.0, 1.0)
        model, unit = solver.model, slowest.step / UNITS
        assert model.least == "step"
        assert model.hints | {"step": UNITS} == pytest.approx(times(start, slowest, unit), abs=1)
        for lists, run in orders:
            assert model.allows(times(lists, run, unit)) == problem.fits(lists), (seed, lists)
            fitting += problem.fits(lists)
            unfit += not problem.fits(lists)
            by_bytes += problem.is_line and in_flight(problem, lists) and not problem.fits(lists)
        for lists, run in [own for own in orders if problem.fits(own[0])][:3]:
            values = times(lists, run, unit)
            for name, value in values.items():
                assert not model.allows(values | {name: value - 5}), (seed, name)
            for name in {f"{kind}.{part}" for row in lists for kind, part in row}:
                swapped = {f"{name}.0": values[f"{name}.1"], f"{name}.1": values[f"{name}.0"]}
                assert not model.allows(values | swapped), (seed, name)
            late = {name: value + UNITS // 50 for name, value in values.items()}
            assert model.allows(late) == (max(late.values()) <= round(1.01 * UNITS))
    assert min(fitting, unfit) > 40, (fitting, unfit)
    assert by_bytes > 3, by_bytes


def test_what_the_solver_is_asked_and_answers(solver: Solver) -> None:
    """Its work, and seconds where they are limited; the order by its starts, and the bound: the larger of
    what was known and what it proved, but no more than the order that it started from takes."""
    problem = replace(random_problem(1, 2, 3, room=9.0), end=(0.5, 3.0))
    orders = sorted(random_orders(problem, 0), key=lambda own: own[1].step)
    (lists, run), (start, slowest) = orders[0], orders[-1]
    unit = slowest.step / UNITS
    assert solve_order(problem, start, 2.0, 10.0) == SolvedOrder(None, 2.0)
    parameters = solver.parameters
    assert (parameters.interleave_search, parameters.num_workers, parameters.random_seed) == (True, 8, 0)
    assert parameters.max_deterministic_time == pytest.approx(3.0)
    assert not hasattr(parameters, "max_time_in_seconds")
    solve_order(problem, start, 2.0, 0.001, 4.0)
    assert (parameters.max_deterministic_time, parameters.max_time_in_seconds) == (0.01, 4.0)
    solve_order(problem, start, 2.0, 1.0, 0.0)
    assert parameters.max_time_in_seconds == 0.01
    # The bound that is known holds for the step.
    solve_order(problem, start, run.step, 1.0)
    values = times(lists, run, unit)
    assert solver.model.allows(values)
    solve_order(problem, start, run.step * 1.001, 1.0)
    assert not solver.model.allows(values)
    solver.values, solver.best_objective_bound = values, 3.0 / unit
    for status in (OPTIMAL, FEASIBLE):
        solver.status = status
        found = solve_order(problem, start, 2.0, 1.0)
        assert found.lists == lists
        assert found.bound == pytest.approx(3.0)
        assert found.bound < 3.0
        assert solve_order(problem, start, 4.0, 1.0).bound == 4.0
    solver.best_objective_bound = 2.0 * UNITS
    assert solve_order(problem, start, 2.0, 1.0).bound == slowest.step


def test_starts_at_one_instant(solver: Solver) -> None:
    """Of actions that take no time the earlier micro-batch goes first, and of one F before B before W."""
    problem = replace(
        random_problem(1, 2, 2, room=9.0),
        forward=(0.0, 1.0),
        backward=(0.0, 1.0),
        weight=(0.0, 1.0),
        credit=(0.0, 0.0),
    )
    start, _ = next(random_orders(problem, 0))
    solver.status = OPTIMAL
    solver.values = {f"{kind}.0.{number}": 7 for kind in range(3) for number in range(2)}
    solver.values |= {f"{kind}.1.{number}": 10 * number + kind for kind in range(3) for number in range(2)}
    found = solve_order(problem, start, 0.0, 1.0).lists
    assert found == tuple(tuple((kind, part) for _ in range(2) for kind in (F, B, W)) for part in range(2))


def test_bytes_are_rounded_down() -> None:
    """To thousandths of the room: two micro-batches that need a little more than it are let through."""
    own = random_problem(1, 2, 2, room=2.0)
    own = replace(own, first_part=(), workspace=((0.0, 0.0),) * 2, micro_batch_bytes=(1.0, 1.0))
    for bytes, allowed in ((1.0, True), (1.0 + 1.9 / BYTE_UNITS, True), (1.0 + 2.1 / BYTE_UNITS, False)):
        problem = replace(own, micro_batch_bytes=(bytes, 1.0), room=(2.0, 9.0))
        both: Lists = tuple(((F, part), (F, part), *((B, part), (W, part)) * 2) for part in range(2))
        model, unit = Model(), 10.0 / UNITS
        variables = module._Variables(replace(problem, split=True), model, unit, UNITS)
        variables._room(0, (0,))
        run = run_order(problem, both)
        assert run is not None
        assert model.rules[-1](times(both, run, unit)) == allowed
