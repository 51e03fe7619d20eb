"""The all-reduces of a step: on the network of each device one after another, during the rest of the
drain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ..port_sharing import Loads, end_on_ports
from .action_costs import ActionCosts, recompute_seconds, update_actions
from .engine import Run


class Reduction(NamedTuple):
    """An all-reduce of the gradients of a part of the layers (or of a bucket of them), seconds."""

    part: int
    stages: tuple[int, ...]
    start: float
    end: float


class _Request(NamedTuple):
    ready: float
    part: int
    nth: int
    stages: tuple[int, ...]
    seconds: float
    loads: Loads


def reductions(values: ActionCosts, run: Run) -> tuple[Reduction, ...]:
    """All of one candidate: whoever is ready first begins first, once its devices have ended others; on ports
    that several go through, each takes its turn."""
    table, shared = values.costs.all_reduce, values.costs.reduce_loads
    if (table is None or not table.any()) and not shared:
        return tuple(_tied_reductions(values, run, ()))
    free, ports = [0.0] * values.order.program.devices, Loads()
    done = []
    for request in sorted(_requests(values, run), key=lambda own: own[:3]):
        start = max(request.ready, *(free[stage] for stage in request.stages))
        end = end_on_ports(start + request.seconds, request.loads, ports)
        for stage in request.stages:
            free[stage] = end
        done.append(Reduction(request.part, request.stages, start, end))
    return (*done, *_tied_reductions(values, run, done))


def _tied_reductions(values: ActionCosts, run: Run, earlier: Sequence[Reduction]) -> Iterator[Reduction]:
    """The sums of weights that several parts use; each counts for the first of these parts."""
    ends: list[float] = run.free.tolist()
    for reduction in earlier:
        for stage in reduction.stages:
            ends[stage] = max(ends[stage], reduction.end)
    for own in values.costs.tied:
        start = max(ends[stage] for stage in own.stages)
        for stage in own.stages:
            ends[stage] = start + own.seconds
        yield Reduction(own.parts[0], own.stages, start, start + own.seconds)


def _requests(values: ActionCosts, run: Run) -> list[_Request]:
    program, buckets = values.order.program, values.costs.buckets
    table = values.costs.all_reduce
    seconds = np.broadcast_to(0.0 if table is None else table, (program.devices, program.chunks))
    last = _last_actions(values)
    lead = _lead(values)
    requests = []
    for part in range(program.slots):
        members = sorted({pipe[part] for pipe in program.pipes})
        longest = float(max(seconds[member] for member in members))
        loads = {port: own / buckets for port, own in values.costs.reduce_loads.get(part, {}).items()}
        if not longest and not loads:
            continue
        rounds = [last.get((device, chunk), []) for device, chunk in members]
        for nth in range(max(map(len, rounds))):
            taking_part = [(m, own[nth]) for m, own in zip(members, rounds, strict=True) if nth < len(own)]
            stages = tuple(sorted({place.device for place, _ in taking_part}))
            for bucket in range(1, buckets + 1):
                ready = max(
                    float(run.end[i] - (run.end[i] - run.start[i] - lead[i]) * (1 - bucket / buckets))
                    for _, i in taking_part
                )
                requests.append(_Request(ready, part, nth, stages, longest / buckets, loads))
    return requests


def _last_actions(values: ActionCosts) -> dict[tuple[int, int], list[int]]:
    """By (device, chunk), the actions that complete gradients to be reduced."""
    order = values.order
    every = order.program.update_every
    actions = np.flatnonzero(order.finishing) if every is None else update_actions(order)
    by_chunk: dict[tuple[int, int], list[int]] = {}
    for i in actions.tolist():
        key = (int(order.device[i]), int(order.chunk[i]))
        if every is None:
            by_chunk[key] = [i]
        else:
            by_chunk.setdefault(key, []).append(i)
    return by_chunk


def _lead(values: ActionCosts) -> list[float]:
    """Seconds of each action before its gradients begin to appear: the forward that is run again."""
    order, costs = values.order, values.costs
    lead = np.zeros(len(order))
    _, backwards, _ = order.of_kind
    if costs.recompute is not None:
        lead[backwards] = recompute_seconds(order, costs, backwards)
    seconds: list[float] = lead.tolist()
    return seconds
