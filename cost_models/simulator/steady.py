"""The steady state of an asynchronous program: seconds of each further micro-batch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..errors import UsageError
from ..schedules.action import Program
from .action_costs import lower_costs
from .costs import Array, Costs
from .dependencies import Order, resolve_order
from .engine import run

SAME = 1e-9
"""Times count as equal within this share of the last one: sums of many floats differ by more than one bit."""
PERIODS = 3
"""Periods that must repeat before one is believed."""


class SteadyState(NamedTuple):
    """`seconds_per_micro_batch`, from the `period` after which everything repeats, in micro-batches. Where
    none was found among those simulated (`exact` is False), the mean over the later half of them."""

    seconds_per_micro_batch: float
    period: int
    exact: bool


def steady_state(program: Program, costs: Costs) -> SteadyState:
    """The steady state of an asynchronous program with these costs (one candidate).

    All-reduces go on beside the computing, so that the slower of the two sets the pace (PipeDream, SOSP 2019,
    section 3.1); so do launches, and a host that is slower by little falls behind after many micro-batches
    only. Raises UsageError for a program that flushes, or of too few micro-batches.
    """
    if program.update_every is None:
        raise UsageError(
            "the program updates once, at its end: it has no steady state", "Take an asynchronous schedule."
        )
    order = resolve_order(program)
    values = lower_costs(order, costs)
    completed = _completion_times(order, run(values, "auto").end)
    late = completed[len(completed) // 2 :]
    if len(late) < 2:
        raise UsageError(
            f"{program.micro_batches} micro-batches: too few for a steady state on {program.devices} stages",
            f"Use {8 * program.devices} or more.",
        )
    period = _period(late)
    count = period or len(late) - 1
    seconds = float(late[-1] - late[-1 - count]) / count
    launches = 0.0 if values.launches is None else float(values.launches.end.max())
    least = max(_reduction_seconds(order, costs), max(costs.port_seconds, launches) / program.micro_batches)
    return SteadyState(max(seconds, least), count, period is not None)


def _completion_times(order: Order, end: Array) -> Array:
    """When micro-batches were done on all places, in that order, but for those of the drain: from the first
    on whose last action any device runs after its last forward."""
    program = order.program
    done = np.zeros(program.micro_batches)
    np.maximum.at(done, order.micro_batch, end)
    drains = np.zeros(program.micro_batches, dtype=np.bool_)
    for own in program.actions:
        forwards = [index for index, action in enumerate(own) if action.kind == "F"]
        drains[[action.micro_batch for action in own[forwards[-1] + 1 if forwards else 0 :]]] = True
    limit = float(done[drains].min(initial=np.inf))
    return np.sort(done[~drains & (done <= limit)])


def _period(times: Array) -> int | None:
    """After how many entries they advance by the same amount again and again, if they do."""
    tolerance = SAME * float(times[-1])
    for period in range(1, (len(times) - 1) // PERIODS + 1):
        advance = times[period:] - times[:-period]
        if np.ptp(advance) <= tolerance:
            return period
    return None


def _reduction_seconds(order: Order, costs: Costs) -> float:
    """Seconds of all-reduce for a micro-batch on the device that has most."""
    program = order.program
    if costs.all_reduce is None or program.update_every is None:
        return 0.0
    seconds = np.broadcast_to(costs.all_reduce, (program.devices, program.chunks))
    done = np.zeros_like(seconds)
    np.add.at(done, (order.device[order.finishing], order.chunk[order.finishing]), 1.0)
    return float((seconds * done).sum(axis=1).max()) / program.update_every / program.micro_batches
