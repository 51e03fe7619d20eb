"""Replicas that take micro-batches in turn: a device of its own for each replica.

Where the replicas of a stage share every micro-batch instead, nothing of the program changes: each computes
its part, and the costs of the stage are those of that part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import lcm
from typing import Any

import numpy as np

from ..errors import UsageError
from ..schedules.action import Action, Program, StageSlot
from .costs import Costs
from .validation import check_count


def replica_stages(replicas: Sequence[int]) -> tuple[int, ...]:
    """The stage of each device: the replicas of stage 0, then those of stage 1, and so on."""
    return tuple(stage for stage, count in enumerate(replicas) for _ in range(count))


def round_robin(program: Program, replicas: Sequence[int]) -> Program:
    """The program with so many replicas of each of its devices: replica k of r takes, in the order of the
    device's list, the micro-batches k, k + r, k + 2 r and so on.

    How far a replica runs ahead follows from the list: as far as its share of it. Raises UsageError for
    replica counts that cannot be.
    """
    _check_replicas(replicas, program.devices)
    actions = tuple(
        tuple(action for action in program.actions[stage] if action.micro_batch % count == k)
        for stage, count in enumerate(replicas)
        for k in range(count)
    )
    pipes, pipe_of = _dealt(program.pipes, program.pipe_of, replicas)
    return replace(program, actions=actions, pipes=pipes, pipe_of=pipe_of)


def _dealt(
    pipes: tuple[tuple[StageSlot, ...], ...], pipe_of: tuple[int, ...], replicas: Sequence[int]
) -> tuple[tuple[tuple[StageSlot, ...], ...], tuple[int, ...]]:
    """The pipes through the replicas, and the pipe of each micro-batch: they repeat after a while."""
    rounds = _rounds(replicas, len(pipe_of))
    first = np.cumsum([0, *replicas]).tolist()
    dealt = tuple(
        tuple(StageSlot(first[device] + turn % replicas[device], chunk) for device, chunk in pipe)
        for pipe in pipes
        for turn in range(rounds)
    )
    return dealt, tuple(pipe * rounds + m % rounds for m, pipe in enumerate(pipe_of))


def _rounds(replicas: Sequence[int], micro_batches: int) -> int:
    return min(lcm(*replicas), micro_batches)


def round_robin_1f1b(replicas: Sequence[int], micro_batches: int, *, update_every: int | None = 1) -> Program:
    """PipeDream's 1F1B over replicas that take micro-batches in turn.

    A replica of stage s runs ahead until it holds ceil(devices from stage s on / replicas of s), then
    alternates: Narayanan et al., "PipeDream", SOSP 2019, section 3.2 (NOAM, there for the first stage).
    """
    _check_replicas(replicas, len(replicas))
    check_count("micro-batches", micro_batches)
    lists: list[list[Action]] = []
    for stage, count in enumerate(replicas):
        ahead = -(-sum(replicas[stage:]) // count)
        lists += [_alternating(range(k, micro_batches, count), ahead) for k in range(count)]
    linear_program = (tuple(StageSlot(stage) for stage in range(len(replicas))),)
    pipes, pipe_of = _dealt(linear_program, (0,) * micro_batches, replicas)
    return Program(tuple(tuple(own) for own in lists), pipes, pipe_of, update_every=update_every)


def _alternating(own: Sequence[int], ahead: int) -> list[Action]:
    order = [Action("F", m) for m in own[:ahead]]
    for done, m in zip(own, own[ahead:], strict=False):
        order += [Action("B", done), Action("F", m)]
    return order + [Action("B", m) for m in own[max(len(own) - ahead, 0) :]]


def round_robin_costs(costs: Costs, replicas: Sequence[int], program: Program) -> Costs:
    """The costs of `program` for `round_robin(program, replicas)`: every replica has those of its stage, and,
    where `links` are given, shares its stage's."""
    _check_replicas(replicas, program.devices)
    costs.check(program)
    rows = list(replica_stages(replicas))
    rounds = _rounds(replicas, program.micro_batches)
    changed: dict[str, Any] = {}
    for name, values in costs.arrays().items():
        if name.endswith(("_occupancy", "_latency")):
            changed[name] = np.repeat(values, rounds, axis=0) if len(values) > 1 else values
        else:
            changed[name] = values[rows] if len(values) > 1 else values
    if costs.links is not None:
        changed["links"] = costs.links[np.ix_(rows, rows)]
    return replace(costs, **changed)


def _check_replicas(replicas: Sequence[int], stages: int) -> None:
    if len(replicas) != stages:
        raise UsageError(
            f"replicas: {len(replicas)} counts for {stages} stages", "Give one count for each stage."
        )
    for stage, count in enumerate(replicas):
        check_count(f"replicas of stage {stage}:", count)
