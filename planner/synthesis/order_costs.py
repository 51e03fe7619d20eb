"""The numbers of a problem of orders: those of a plan's costs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from ...cost_models.simulator.costs import Costs
from ..assembly import Assembly
from .order_problem import OrderProblem


def order_problem(
    assembly: Assembly,
    costs: Costs,
    room: Sequence[float],
    micro_batch_bytes: Sequence[float],
    first_part: Sequence[tuple[float, float]] = (),
    workspace: Sequence[tuple[float, float]] = (),
) -> OrderProblem:
    """The numbers of a program's costs, those of the assembly; what is held as above."""
    pipe = assembly.program.pipes[0]
    devices = [place.device for place in pipe]
    split = costs.weight is not None

    def by_part(values: np.ndarray | None) -> tuple[float, ...]:
        if values is None:
            return (0.0,) * len(pipe)
        wide = np.broadcast_to(values, (assembly.program.devices, assembly.program.chunks, values.shape[2]))
        return tuple(float(wide[place.device, place.chunk].max()) for place in pipe)

    def by_cut(values: np.ndarray | None) -> list[float]:
        if values is None:
            return [0.0] * (len(pipe) - 1)
        return [float(value) for value in np.broadcast_to(values, (1, len(pipe) - 1))[0]]

    forward = by_part(costs.forward)
    again = by_part(costs.recompute)
    extra = np.zeros(assembly.program.devices) if costs.overhead is None else np.ravel(costs.overhead)
    overhead = [float(np.broadcast_to(extra, assembly.program.devices)[place.device]) for place in pipe]
    onward = (by_cut(costs.forward_occupancy), by_cut(costs.forward_latency))
    back = (by_cut(costs.backward_occupancy), by_cut(costs.backward_latency))
    after = _after(assembly, costs.all_reduce, costs.optimizer)
    return OrderProblem(
        micro_batches=assembly.program.micro_batches,
        device=tuple(devices),
        forward=tuple(own + more for own, more in zip(forward, overhead, strict=True)),
        backward=tuple(
            own + share * run + more
            for own, share, run, more in zip(by_part(costs.backward), again, forward, overhead, strict=True)
        ),
        weight=tuple(
            own + more if split else 0.0 for own, more in zip(by_part(costs.weight), overhead, strict=True)
        ),
        credit=by_part(costs.accumulation),
        forward_wait=(*(busy + late for busy, late in zip(*onward, strict=True)), 0.0),
        forward_busy=(*onward[0], 0.0),
        backward_wait=(0.0, *(busy + late for busy, late in zip(*back, strict=True))),
        backward_busy=(0.0, *back[0]),
        end=after,
        micro_batch_bytes=tuple(micro_batch_bytes),
        room=tuple(room),
        split=split,
        first_part=tuple(first_part),
        workspace=tuple(workspace),
        forward_link=(*(_own_port(costs, *pair) for pair in pairwise(devices)), -1),
        backward_link=(-1, *(_own_port(costs, there, here) for here, there in pairwise(devices))),
    )


def _own_port(costs: Costs, sender: int, receiver: int) -> int:
    """The number of the port that a transfer leaves by, where no other device sends by it, else -1."""
    if costs.links is None:
        return -1
    senders, _ = np.nonzero(costs.links == costs.links[sender, receiver])
    return int(costs.links[sender, receiver]) if set(senders.tolist()) == {sender} else -1


def _after(
    assembly: Assembly, all_reduce: np.ndarray | None, optimizer: np.ndarray | None
) -> tuple[float, ...]:
    """By device, what follows its last action at the least."""
    devices = assembly.program.devices
    after = np.zeros(devices)
    if all_reduce is not None and assembly.program.chunks == 1:
        after = after + np.broadcast_to(all_reduce[:, 0], devices)
    if optimizer is not None:
        after = after + np.broadcast_to(np.ravel(optimizer), devices)
    return tuple(float(value) for value in after)
