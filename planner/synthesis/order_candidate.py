"""A plan's shape as a problem of orders: what its parts recompute, the room of devices, cuts near its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import comb, inf
from typing import TYPE_CHECKING

from ...cost_models.device_memory import micro_batch_bytes
from ...cost_models.memory import FRAGMENTATION_RESERVE, Recompute
from ...cost_models.schedules import Program, StageSlot
from ..assembly import Assembly
from ..candidate import Proposal, linear_pipeline
from ..scoring import assemble, possible
from .order_costs import order_problem
from .order_problem import B, F, Lists, OrderProblem, Step, W

if TYPE_CHECKING:
    from ..problem import Problem

COMING = (
    "activations",
    "stage_inputs",
    "pending_gradients",
    "workspace",
    "optimizer_step",
    "reserve",
    "context",
)
"""Terms of the ledger that an order changes, or that are not bytes of a device's allocator."""
Pairs = list[tuple[float, float]]
MOST_CUTS = 100
"""Into so many stages, that are all tried."""


@dataclass(frozen=True, eq=False)
class OrderCandidate:
    """A plan's shape with the numbers of its orders, and the best of them so far."""

    proposal: Proposal
    program: Program
    recompute: tuple[Recompute, ...]
    problem: OrderProblem
    bound: float
    lists: Lists | None = None
    step: float = inf


def recompute_choices(problem: Problem, proposal: Proposal) -> Iterator[OrderCandidate]:
    """A shape where nothing recomputes; all; and what has no room for as many micro-batches as 1F1B holds."""
    never: list[Recompute] = ["never" for _ in proposal.ends]
    always: list[Recompute] = ["always" for _ in proposal.ends]
    if proposal.config.recompute != "by_stage":
        yield make_candidate(problem, proposal, always if proposal.config.recompute == "always" else never)
        return
    without = make_candidate(problem, proposal, never)
    yield without
    whole = without.problem
    lacking = set()
    for device, parts in enumerate(whole.own_parts):
        needed = min(whole.micro_batches, whole.devices - device)
        if sum(whole.micro_batch_bytes[part] for part in parts) * needed > whole.room[device]:
            lacking.add(device)
    if not lacking:
        return
    if len(lacking) < whole.devices:
        mixed: list[Recompute] = ["always" if device in lacking else "never" for device in whole.device]
        yield make_candidate(problem, proposal, mixed)
    yield make_candidate(problem, proposal, always)


def make_candidate(problem: Problem, proposal: Proposal, modes: Sequence[Recompute]) -> OrderCandidate:
    """The numbers of a shape's orders, with what its parts recompute."""
    assembly = assemble(problem.space, proposal, modes)
    costs = assembly.costs()
    numbers = order_problem(assembly, costs, *_memory(problem, assembly))
    return OrderCandidate(proposal, assembly.program, tuple(modes), numbers, numbers.bound())


def _memory(problem: Problem, assembly: Assembly) -> tuple[list[float], list[float], Pairs, Pairs]:
    """By device, the room for micro-batches in flight and workspace, the optimizer's step left out; by part,
    the bytes of one, what the first part of a backward adds, and workspaces."""
    program = assembly.program
    room: list[float] = []
    sizes = [0.0] * program.slots
    first_part, workspace = ([(0.0, 0.0)] * program.slots for _ in range(2))
    for device in range(program.devices):
        terms = assembly.ledger(device)
        lasting = sum(amount for name, amount in terms.items() if name not in COMING)
        limit = problem.space.limit(assembly.ranks[device]) - terms.get("context", 0.0)
        room.append(limit / (1 + FRAGMENTATION_RESERVE) - lasting)
        saves = assembly.recompute[device] == "never"
        for chunk, own in enumerate(assembly.chunk_bytes(device)):
            part = program.parts_by_slot[StageSlot(device, chunk)]
            amounts = micro_batch_bytes(own, program)[saves]
            sizes[part] = sum(amounts.forward)
            again, split = sum(amounts.backward), program.splits_backward
            if split:
                first_part[part] = again + sum(amounts.first_part), sum(amounts.behind_first_part)
            behind = float(own.layer_workspace) if split else float(own.workspace) + again
            workspace[part] = float(own.workspace), behind
    return room, sizes, first_part, workspace


def near_proposals(problem: Problem, proposal: Proposal) -> Iterator[Proposal]:
    """With one cut at the next place."""
    cut_points = problem.space.table(problem.space.chain.sizes[0]).cut_points
    for part, end in enumerate(proposal.ends[:-1]):
        for move in (-1, 1):
            place = cut_points.index(end) + move
            ends = (*proposal.ends[:part], cut_points[place], *proposal.ends[part + 1 :])
            changed = replace(proposal, ends=ends)
            rising = all(first < last for first, last in changed.bounds)
            if rising and possible(problem.space, changed) and problem.allows(changed):
                yield changed


def every_proposal(problem: Problem, bases: Sequence[str], size: int | None = None) -> Iterator[Proposal]:
    """Every cut of the layers into two stages or more, on one device each, of schedules with one stage a
    device; none of numbers of stages with too many cuts. `size`: of micro-batches alone."""
    cut_points = problem.space.table(problem.space.chain.sizes[0]).cut_points
    places = cut_points[1:-1]
    for config in problem.configs:
        is_asked = config.schedule in bases and size in (None, config.micro_batch_size)
        for stages in problem.stage_counts if is_asked else ():
            if stages == 1 or comb(len(places), stages - 1) > MOST_CUTS:
                continue
            for cuts in combinations(places, stages - 1):
                proposal = linear_pipeline(config, (*cuts, cut_points[-1]))
                if possible(problem.space, proposal) and problem.allows(proposal):
                    yield proposal


def has_order(problem: OrderProblem) -> bool:
    """Whether there is an order that fits: where one micro-batch at a time does not, none does."""
    return problem.fits(one_at_a_time(problem, 1))


def one_at_a_time(problem: OrderProblem, micro_batches: int) -> Lists:
    """The order that holds least: no micro-batch begins before the one before has ended."""
    kinds = (B, W) if problem.split else (B,)
    lists = list[tuple[Step, ...]]()
    for parts in problem.own_parts:
        backward = [(kind, part) for part in sorted(parts, reverse=True) for kind in kinds]
        lists.append((*((F, part) for part in sorted(parts)), *backward) * micro_batches)
    return tuple(lists)
