"""The simulator: lists of actions and their costs -> start and end of every action.

A device runs its actions in the order of its list, one at a time. A forward needs the activation of the
place before, a backward the gradient of the place after, each sent when it is made. What a transfer takes,
which link it occupies, and what its devices do meanwhile: see `Costs`.

Where every link has one sender, every start is the latest of some ends: the step is the longest path through
the dependencies. Where several share one, it serves whoever is ready first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .errors import UsageError
from .schedules import Action, cached_program
from .schedules.action import Program, linear_program
from .simulator.action_costs import ActionCosts, has_static_link_order, lower_costs
from .simulator.costs import Array, Costs
from .simulator.dependencies import resolve_order
from .simulator.engine import Engine, Run, run, run_many
from .simulator.pipeline_costs import PipelineCosts, uniform_costs
from .simulator.reductions import Reduction, reductions
from .simulator.result import PeakMemory, Span, StageTime, Timeline, Transfer
from .tied_weights import ends_after_sums


def simulate(
    actions: Program | Sequence[Sequence[Action]], costs: PipelineCosts | Costs, engine: Engine = "auto"
) -> Timeline:
    """Runs a program, or the lists of a straight pipeline, with these costs (one candidate).

    Raises UsageError for lists that are incomplete, repeat an action, or wait for each other for ever, and
    for costs that cannot be.
    """
    order = resolve_order(
        actions if isinstance(actions, Program) else linear_program([list(own) for own in actions])
    )
    values = lower_costs(order, _single(_general(order.program, costs)))
    ran = run(values, engine)
    reduced = reductions(values, ran)
    return Timeline(order, values.costs, ran, reduced, _stage_ends(values, ran, reduced))


def step_seconds(schedule: str | Program, costs: PipelineCosts | Costs, engine: Engine = "auto") -> Array:
    """Step seconds of many candidates side by side, shape (candidates,): the costs' last axis.

    A program's dependencies are worked out once and kept as long as it is; of a schedule by name, for
    `PipelineCosts`, the programs used last are kept.
    """
    program = schedule if isinstance(schedule, Program) else _cached_program(schedule, costs)
    order, general = resolve_order(program), _general(program, costs)
    if general.candidates in (None, 1):
        single = general if general.candidates is None else general.candidate(0)
        return np.array([_step(lower_costs(order, single), engine)])
    values = lower_costs(order, general)
    if not (has_static_link_order(values) and _ends_alone(values)):
        singles = (general.candidate(index) for index in range(values.duration.shape[1]))
        return np.array([_step(lower_costs(order, single), engine) for single in singles])
    ends = run_many(values, engine)
    if general.all_reduce is not None:
        ends = ends + general.all_reduce[:, 0]
    ends = ends_after_sums(ends, general.tied)
    if general.optimizer is not None and not program.update_every:
        ends = ends + general.optimizer
    latest: Array = np.maximum(np.max(ends, axis=0), general.port_seconds)
    return latest


def device_ends(program: Program, costs: Costs) -> Array | None:
    """(devices, candidates): when each device has run its last action, of many candidates; None where a link
    serves several devices, so that it is not known beforehand in which order."""
    order = resolve_order(program)
    if costs.candidates == 1:
        single = lower_costs(order, costs.candidate(0))
        return np.array(run(single).free)[:, None] if has_static_link_order(single) else None
    values = lower_costs(order, costs)
    return run_many(values, "auto") if has_static_link_order(values) else None


def runs_side_by_side(program: Program, costs: Costs) -> bool:
    """Whether `step_seconds` takes many such candidates in one pass, and not one after another."""
    values = lower_costs(resolve_order(program), costs if costs.candidates is None else costs.candidate(0))
    return has_static_link_order(values) and _ends_alone(values)


def _cached_program(schedule: str, costs: PipelineCosts | Costs) -> Program:
    if isinstance(costs, Costs):
        raise UsageError(
            f"schedule {schedule} by name, with costs by device and chunk",
            "Give the program: find_schedule(name).program(stages, micro_batches, virtual_stages).",
        )
    return cached_program(schedule, *costs.forward.shape[:2])


def _single(costs: Costs) -> Costs:
    if costs.candidates is not None:
        raise UsageError(
            f"costs of {costs.candidates} candidates: a timeline is of one",
            "Take one, costs.candidate(index), or ask for step_seconds.",
        )
    return costs


def _general(program: Program, costs: PipelineCosts | Costs) -> Costs:
    if isinstance(costs, Costs):
        return costs
    costs.check(program.devices, program.micro_batches)
    return costs.general()


def _step(values: ActionCosts, engine: Engine) -> float:
    ran = run(values, engine)
    return max(*_stage_ends(values, ran, reductions(values, ran)), values.costs.port_seconds)


def _stage_ends(values: ActionCosts, ran: Run, reduced: Sequence[Reduction]) -> tuple[float, ...]:
    """When each device is done, all-reduce and optimizer included."""
    ends: list[float] = ran.free.tolist()
    for reduction in reduced:
        for stage in reduction.stages:
            ends[stage] = max(ends[stage], reduction.end)
    program, optimizer = values.order.program, values.costs.optimizer
    if optimizer is not None and program.update_every is None:
        seconds = np.broadcast_to(optimizer, program.devices).tolist()
        ends = [end + more for end, more in zip(ends, seconds, strict=True)]
    return tuple(ends)


def _ends_alone(values: ActionCosts) -> bool:
    """Whether each device's all-reduce simply follows its last action, and nothing goes on beside it."""
    program, costs = values.order.program, values.costs
    is_linear = len(program.pipes) == 1 and program.parts == 1
    if costs.tied and (costs.transfers != "overlapped" or not is_linear):
        return False
    alone = is_linear and costs.buckets == 1 and program.update_every is None
    if costs.reduce_loads:
        return False
    # A device that blocks sends its last result while it reduces.
    return costs.all_reduce is None or (alone and costs.transfers == "overlapped")


__all__ = [
    "PeakMemory",
    "PipelineCosts",
    "Span",
    "StageTime",
    "Timeline",
    "Transfer",
    "device_ends",
    "runs_side_by_side",
    "simulate",
    "step_seconds",
    "uniform_costs",
]
