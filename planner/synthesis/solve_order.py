"""The fastest order by a constraint solver (OR-tools CP-SAT, an extra): proven, or with a bound.

Each action is an interval on its device, which runs one at a time; those of one kind and part follow one
another (see `order_problem`). What a device holds is a cumulative demand: of a micro-batch from the start of
its F to the end of its B, of what B adds meanwhile, of what is left from then to the end of its W, and of
each action's workspace. Where a micro-batch holds the same until its release, and a device has one part, that
says no more than that the F of micro-batch i begins after the release of i - K. Seconds and bytes are rounded
down to units, and links are taken to carry any number of transfers at a time: so what the solver proves holds
for the problem as it is, and an order of its may need some thousandths more than there is room for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from math import inf
from typing import Any

from .order_problem import B, F, Lists, OrderProblem, Step, W
from .run_order import run_order

UNITS = 2_000_000
"""Of the step that is known, in the solver's whole numbers."""
WORK_A_SECOND = 0.3
"""Of the solver's deterministic time, about."""
STRATEGIES = 8
"""Of the solver, side by side."""
BYTE_UNITS = 1_000
"""Of a device's room; a million takes the solver a hundred times as long."""
MOST_ACTIONS = 4_000
"""Of all devices, for which a model is made."""


@dataclass(frozen=True)
class SolvedOrder:
    """The best order that the solver found, if any is better than the start; seconds that no order is
    below."""

    lists: Lists | None
    bound: float


def has_solver() -> bool:
    """Whether OR-tools is installed."""
    return find_spec("ortools") is not None


def solve_order(
    problem: OrderProblem, start: Lists, bound: float, seconds: float, most_seconds: float = inf
) -> SolvedOrder:
    """Searches for about so many seconds, by the solver's own count of its work, and no longer than
    `most_seconds`; `start` is given as a hint, and `bound` is known to hold."""
    from ortools.sat.python import cp_model

    run = run_order(problem, start)
    assert run is not None, "the start can be run"
    unit = run.step / UNITS
    model = cp_model.CpModel()
    variables = _Variables(problem, model, unit, round(1.01 * UNITS))
    variables.hint(start, run.start)
    model.add(variables.step >= int(bound / unit * (1 - 1e-9)))
    model.minimize(variables.step)
    solver = cp_model.CpSolver()
    # Strategies take turns in one thread: the answer depends on neither the clock nor the processors.
    solver.parameters.max_deterministic_time = max(WORK_A_SECOND * seconds, 0.01)
    if most_seconds < inf:
        solver.parameters.max_time_in_seconds = max(most_seconds, 0.01)
    solver.parameters.interleave_search = True
    solver.parameters.num_workers = STRATEGIES
    solver.parameters.random_seed = 0
    status = solver.solve(model)
    proven = max(bound, solver.best_objective_bound * unit * (1 - 1e-9))
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return SolvedOrder(None, bound)
    return SolvedOrder(variables.read(solver), min(proven, run.step))


class _Variables:
    """The variables: of every part the starts of its actions by kind and micro-batch."""

    def __init__(self, problem: OrderProblem, model: Any, unit: float, horizon: int) -> None:
        self.problem, self.model, self.unit, self.horizon = problem, model, unit, horizon
        self.kinds = (F, B, W) if problem.split else (F, B)
        self.start: dict[tuple[int, int, int], Any] = {}
        self.step = model.new_int_var(0, horizon, "step")
        for part in range(problem.parts):
            self._actions(part)
        for part in range(problem.parts):
            self._arrivals(part)
        for device, parts in enumerate(problem.own_parts):
            self._device(device, parts)

    def _long(self, kind: int, part: int, number: int) -> int:
        return int(self.problem.duration(kind, part, number == 0) / self.unit)

    def _end(self, kind: int, part: int, number: int) -> Any:
        return self.start[kind, part, number] + self._long(kind, part, number)

    def _actions(self, part: int) -> None:
        for kind in self.kinds:
            for number in range(self.problem.micro_batches):
                name = f"{kind}.{part}.{number}"
                self.start[kind, part, number] = self.model.new_int_var(0, self.horizon, name)
                if number:
                    self.model.add(self.start[kind, part, number] >= self._end(kind, part, number - 1))

    def _arrivals(self, part: int) -> None:
        problem = self.problem
        for number in range(problem.micro_batches):
            if part + 1 < problem.parts:
                self._after((F, part + 1, number), (F, part, number), problem.forward_wait[part])
                self._after((B, part, number), (B, part + 1, number), problem.backward_wait[part + 1])
            self._after((B, part, number), (F, part, number))
            if problem.split:
                self._after((W, part, number), (B, part, number))

    def _after(self, later: tuple[int, int, int], before: tuple[int, int, int], wait: float = 0.0) -> None:
        """`wait` in seconds."""
        self.model.add(self.start[later] >= self._end(*before) + int(wait / self.unit))

    def _device(self, device: int, parts: tuple[int, ...]) -> None:
        problem, model = self.problem, self.model
        count = problem.micro_batches
        intervals = [
            model.new_fixed_size_interval_var(
                self.start[kind, part, number], self._long(kind, part, number), f"on {kind}.{part}.{number}"
            )
            for part in parts
            for kind in self.kinds
            for number in range(count)
        ]
        model.add_no_overlap(intervals)
        after = int(problem.end[device] / self.unit)
        for part in parts:
            model.add(self.step >= self._end(problem.release, part, count - 1) + after)
        changes = (problem.split and any(map(any, problem.parts_held))) or problem.workspace
        if problem.is_line:
            self._windows(parts[0])
        if problem.room[device] != inf and (changes or not problem.is_line):
            self._room(device, parts)

    def _windows(self, part: int) -> None:
        """The F of a micro-batch waits until there may be room for it, and so does its B."""
        problem = self.problem
        waits = ((F, problem.most_in_flight[part]), (B, problem.most_behind_backward[part]))
        for kind, most in waits if problem.split else waits[:1]:
            for number in range(most, problem.micro_batches):
                self._after((kind, part, number), (problem.release, part, number - most))

    def _room(self, device: int, parts: tuple[int, ...]) -> None:
        """Bytes in parts of the room, rounded down: what is proven holds."""
        demands, intervals = [], []
        for part, number, kind in product(parts, range(self.problem.micro_batches), self.kinds):
            for begin, end, needed in self._stays(part, number, kind):
                demand = int(needed / self.problem.room[device] * BYTE_UNITS)
                if demand > 0:
                    size = self.model.new_int_var(0, self.horizon, f"for {kind}.{part}.{number}")
                    name = f"stays {kind}.{part}.{number}"
                    intervals.append(self.model.new_interval_var(begin, size, end, name))
                    demands.append(demand)
        self.model.add_cumulative(intervals, demands, BYTE_UNITS)

    def _stays(self, part: int, number: int, kind: int) -> Iterator[tuple[Any, Any, float]]:
        """From when to when what an action brings stays, and how much; its workspace."""
        problem, (begins, ends) = self.problem, self.problem.parts_held[part]
        own, start, end = problem.micro_batch_bytes[part], self.start, self._end(kind, part, number)
        yield start[kind, part, number], end, problem.workspace_bytes(kind, part)
        if kind == F:
            yield start[kind, part, number], self._end(B, part, number), own
        elif kind == B and problem.split:
            yield start[kind, part, number], end, begins
            yield end, self._end(W, part, number), own + begins + ends

    def hint(self, lists: Lists, starts: list[float]) -> None:
        """The start's own times."""
        done: dict[Step, int] = {}
        index = 0
        for own in lists:
            for kind, part in own:
                number = done.get((kind, part), 0)
                done[kind, part] = number + 1
                self.model.add_hint(self.start[kind, part, number], int(starts[index] / self.unit))
                index += 1

    def read(self, solver: Any) -> Lists:
        """The order by the starts."""
        lists = []
        for parts in self.problem.own_parts:
            own = [
                (solver.value(variable), kind, part, number)
                for (kind, part, number), variable in self.start.items()
                if part in parts
            ]
            lists.append(tuple((kind, part) for _, kind, part, _ in sorted(own, key=_by_time)))
        return tuple(lists)


def _by_time(action: tuple[int, int, int, int]) -> tuple[int, int, int]:
    start, kind, _, number = action
    return start, number, kind
