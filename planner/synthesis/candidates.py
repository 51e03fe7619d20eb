"""Shapes of plans as problems of orders: costs and memory, recomputation choices, and all cuts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import comb, inf
from typing import TYPE_CHECKING

import numpy as np

from ...cost_models.memory import FRAGMENTATION_RESERVE, Recompute, micro_batch_bytes
from ...cost_models.program import Program, StageSlot
from ...cost_models.step_costs import Costs
from ..assembly import Assembly
from ..candidate import Proposal, linear_pipeline
from ..scoring import assemble, possible
from .orders import Lists, OrderProblem

if TYPE_CHECKING:
    from ..problem import Problem

TRANSIENT = (
    "activations",
    "stage_inputs",
    "pending_gradients",
    "workspace",
    "optimizer_step",
    "reserve",
    "context",
)
"""Terms of the ledger that an order changes, or that are not bytes of a device's allocator."""
MOST_CUTS = 100
"""Cuts into a number of stages up to which all are tried."""
Memory = tuple[list[float], list[float], list[tuple[float, float]], list[tuple[float, float]]]
"""`room`, `micro_batch_bytes`, `first_part` and `workspace` of an `OrderProblem`."""


@dataclass(frozen=True, eq=False)
class OrderCandidate:
    """A plan's shape with the problem of its orders, a lower bound on them, and the best order so far."""

    proposal: Proposal
    program: Program
    recompute: tuple[Recompute, ...]
    problem: OrderProblem
    bound: float
    lists: Lists | None = None
    step: float = inf


def recompute_choices(problem: Problem, proposal: Proposal) -> Iterator[OrderCandidate]:
    """The shape where nothing recomputes, where devices do that lack room for the micro-batches of 1F1B, and
    where all do."""
    never: list[Recompute] = ["never" for _ in proposal.ends]
    always: list[Recompute] = ["always" for _ in proposal.ends]
    if proposal.config.recompute != "by_stage":
        yield make_candidate(problem, proposal, always if proposal.config.recompute == "always" else never)
        return
    candidate = make_candidate(problem, proposal, never)
    yield candidate
    orders = candidate.problem
    lacking = set()
    for device, parts in enumerate(orders.parts_of_device):
        needed = min(orders.micro_batches, orders.devices - device)
        if sum(orders.micro_batch_bytes[part] for part in parts) * needed > orders.room[device]:
            lacking.add(device)
    if not lacking:
        return
    if len(lacking) < orders.devices:
        mixed: list[Recompute] = ["always" if device in lacking else "never" for device in orders.device]
        yield make_candidate(problem, proposal, mixed)
    yield make_candidate(problem, proposal, always)


def make_candidate(problem: Problem, proposal: Proposal, modes: Sequence[Recompute]) -> OrderCandidate:
    """The shape with a recomputation mode for each of its parts."""
    assembly = assemble(problem.space, proposal, modes)
    orders = order_problem(assembly, assembly.costs(), _memory(problem, assembly))
    return OrderCandidate(proposal, assembly.program, tuple(modes), orders, orders.bound())


def order_problem(assembly: Assembly, costs: Costs, memory: Memory) -> OrderProblem:
    """The order problem of an assembled plan."""
    program = assembly.program
    pipe, split = program.pipes[0], costs.weight is not None
    devices = [place.device for place in pipe]

    def by_part(values: np.ndarray | None) -> np.ndarray:
        if values is None:
            return np.zeros(len(pipe))
        wide = np.broadcast_to(values, (program.devices, program.chunks, values.shape[2]))
        return np.array([wide[place.device, place.chunk].max() for place in pipe])

    def spread(values: np.ndarray | None, count: int) -> np.ndarray:
        return np.broadcast_to(0.0 if values is None else np.ravel(values), count)

    cuts = len(pipe) - 1
    forward, overhead = by_part(costs.forward), spread(costs.overhead, program.devices)[devices]
    backward = by_part(costs.backward) + by_part(costs.recompute) * forward + overhead
    end = spread(costs.optimizer, program.devices)
    if costs.all_reduce is not None and program.chunks == 1:
        end = end + spread(costs.all_reduce[:, 0], program.devices)
    onward, back = spread(costs.forward_occupancy, cuts), spread(costs.backward_occupancy, cuts)
    room, part_bytes, first_part, workspace = memory
    return OrderProblem(
        micro_batches=program.micro_batches,
        device=tuple(devices),
        forward=_floats(forward + overhead),
        backward=_floats(backward),
        weight=_floats(by_part(costs.weight) + overhead) if split else (0.0,) * len(pipe),
        credit=_floats(by_part(costs.accumulation)),
        forward_wait=(*_floats(onward + spread(costs.forward_latency, cuts)), 0.0),
        forward_busy=(*_floats(onward), 0.0),
        backward_wait=(0.0, *_floats(back + spread(costs.backward_latency, cuts))),
        backward_busy=(0.0, *_floats(back)),
        end=_floats(end),
        micro_batch_bytes=tuple(part_bytes),
        room=tuple(room),
        split=split,
        first_part=tuple(first_part),
        workspace=tuple(workspace),
        forward_link=(*(_port(costs, *pair) for pair in pairwise(devices)), -1),
        backward_link=(-1, *(_port(costs, there, here) for here, there in pairwise(devices))),
    )


def _floats(values: np.ndarray) -> tuple[float, ...]:
    return tuple(values.tolist())


def _port(costs: Costs, sender: int, receiver: int) -> int:
    """The port by which a transfer leaves if no other device sends by it, else -1."""
    if costs.links is None:
        return -1
    senders, _ = np.nonzero(costs.links == costs.links[sender, receiver])
    return int(costs.links[sender, receiver]) if set(senders.tolist()) == {sender} else -1


def _memory(problem: Problem, assembly: Assembly) -> Memory:
    """Room of devices, and bytes of parts; the optimizer step is left out."""
    program = assembly.program
    room, part_bytes = list[float](), [0.0] * program.slots
    first_part, workspace = ([(0.0, 0.0)] * program.slots for _ in range(2))
    for device in range(program.devices):
        terms = assembly.ledger(device)
        lasting = sum(amount for name, amount in terms.items() if name not in TRANSIENT)
        limit = problem.space.limit(assembly.ranks[device]) - terms.get("context", 0.0)
        room.append(limit / (1 + FRAGMENTATION_RESERVE) - lasting)
        saves = assembly.recompute[device] == "never"
        for chunk, stage in enumerate(assembly.chunk_bytes(device)):
            part = program.parts_by_slot[StageSlot(device, chunk)]
            amounts = micro_batch_bytes(stage, program)[saves]
            part_bytes[part] = sum(amounts.forward)
            recomputed, split = sum(amounts.backward), program.splits_backward
            if split:
                first_part[part] = recomputed + sum(amounts.first_part), sum(amounts.behind_first_part)
            backward = float(stage.layer_workspace) if split else float(stage.workspace) + recomputed
            workspace[part] = float(stage.workspace), backward
    return room, part_bytes, first_part, workspace


def every_proposal(problem: Problem, bases: Sequence[str], size: int | None = None) -> Iterator[Proposal]:
    """All cuts into two or more stages on one device each, for numbers of stages with few cuts.

    Args:
        problem: What is asked.
        bases: Schedules, with one stage a device.
        size: The only micro-batch size. Defaults to all.
    """
    cut_points = problem.space.table(problem.space.chain.sizes[0]).cut_points
    for config in problem.configs:
        is_asked = config.schedule in bases and size in (None, config.micro_batch_size)
        for stages in problem.stage_counts if is_asked else ():
            if stages == 1 or comb(len(cut_points) - 2, stages - 1) > MOST_CUTS:
                continue
            for cuts in combinations(cut_points[1:-1], stages - 1):
                proposal = linear_pipeline(config, (*cuts, cut_points[-1]))
                if possible(problem.space, proposal) and problem.allows(proposal):
                    yield proposal
