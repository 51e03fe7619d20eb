"""Milliseconds of the simulator: python benchmarks/simulate.py

Timed is what is done anew for each plan: from its costs, as numpy arrays, to its step seconds, with all
checks. What is done once for a schedule, its stages and micro-batches (lists of actions, dependencies)
stands in a column of its own; so does the memory of a simulation with all its spans and transfers.
"""

from __future__ import annotations

import platform
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np

from pplan.cost_models.program_order import resolve_order
from pplan.cost_models.schedules import find_schedule
from pplan.cost_models.step_costs import Costs
from pplan.cost_models.timeline import simulate, step_seconds

REPEATS = 9


@dataclass(frozen=True)
class Case:
    """A problem and its target."""

    schedule: str
    stages: int
    micro_batches: int
    candidates: int
    target_milliseconds: float


CASES = (
    Case("1f1b", 8, 32, 1, 0.5),
    Case("1f1b", 64, 512, 1, 20.0),
    Case("zb-h1", 32, 256, 1, 20.0),
    Case("1f1b", 8, 32, 1000, 100.0),
)


def costs(case: Case) -> Costs:
    """Random costs, with transfers that occupy links."""
    rng = np.random.default_rng(0)
    by_action = (case.stages, 1, case.micro_batches, case.candidates)
    by_cut = (1, case.stages - 1, case.candidates)
    return Costs(
        forward=rng.random(by_action),
        backward=rng.random(by_action),
        weight=rng.random(by_action) if case.schedule.startswith("zb") else None,
        forward_occupancy=rng.random(by_cut),
        forward_latency=rng.random(by_cut),
        backward_occupancy=rng.random(by_cut),
        backward_latency=rng.random(by_cut),
    )


def milliseconds(work: Callable[[], object]) -> float:
    """The median of some runs, after one that is not counted."""
    work()
    taken = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return 1e3 * median(taken)


def row(case: Case) -> str:
    """One line of the table."""
    schedule, given = find_schedule(case.schedule), costs(case)

    def prepared() -> object:
        return resolve_order(schedule.program(case.stages, case.micro_batches))

    program = schedule.program(case.stages, case.micro_batches)
    figure = milliseconds(lambda: step_seconds(program, given))
    size = f"{case.stages} x {case.micro_batches}"
    return (
        f"{case.schedule:>8} {size:>9} {case.candidates:>11,} {len(resolve_order(program)):>8,} "
        f"{case.target_milliseconds:>7g} {figure:>10.3f} {milliseconds(prepared):>8.1f} "
        f"{bytes_an_action(case):>13.0f}"
    )


def bytes_an_action(case: Case) -> float:
    """Peak memory of the order and of a simulation with all its spans, an action."""
    one = costs(case).candidate(0)
    program = find_schedule(case.schedule).program(case.stages, case.micro_batches)
    tracemalloc.start()
    timeline = simulate(program, one)
    held = len(timeline.spans) + len(timeline.transfers)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert held >= len(timeline.order)
    return peak / len(timeline.order)


def main() -> None:
    """Prints the table."""
    print(f"Python {platform.python_version()}, numpy {np.__version__}, one core, median of {REPEATS}; ms\n")
    print(
        f"{'schedule':>8} {'size':>9} {'candidates':>11} {'actions':>8} {'target':>7} {'taken':>10} "
        f"{'once':>8} {'bytes/action':>13}"
    )
    for case in CASES:
        print(row(case))


if __name__ == "__main__":
    main()
