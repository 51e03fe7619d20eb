"""Plans with a synthesized order of actions, on the cuts and devices of good plans.

Candidates are the searched cuts of known schedules, other good shapes, and all cuts if these are few. Each
gets the best of the orders that rules make (`fill_orders`), and the fastest are improved by `improve_order`.
The result is a schedule like any other, named by the hash of its actions, scored by the simulator and the
ledger, and faster than the best known plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import chain, combinations, islice
from math import comb, inf
from typing import TYPE_CHECKING

import numpy as np

from ...cost_models.errors import UsageError
from ...cost_models.memory import FRAGMENTATION_RESERVE, Recompute, micro_batch_bytes
from ...cost_models.program import StageSlot
from ...cost_models.quantities import MOST_ACTIONS
from ...cost_models.schedule_text import read_schedule, register_order, write_program
from ..assembly import Assembly
from ..candidate import SYNTHESIZED, Proposal, ScoredPlan, linear_pipeline
from ..other_schedules import propose_other_schedules
from ..scoring import assemble, fastest, possible
from ..search.budget import SearchBudget
from ..smallest_plan import find_smallest_plan
from .exchanges import improve_order
from .orders import B, F, Lists, OrderProblem, W, fill_orders

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
"""Most cuts into a number of stages for which all are tried."""


@dataclass(frozen=True, eq=False)
class OrderCandidate:
    """A plan's shape with its order problem, a lower bound on its orders, and the best order so far."""

    proposal: Proposal
    recompute: tuple[Recompute, ...]
    problem: OrderProblem
    bound: float
    lists: Lists | None = None
    step: float = inf


def recompute_choices(problem: Problem, proposal: Proposal) -> Iterator[OrderCandidate]:
    """Yield the shape with different recomputation.

    Nothing recomputes; devices that lack room for the micro-batches of 1F1B recompute; all recompute.
    """
    never: list[Recompute] = ["never" for _ in proposal.ends]
    always: list[Recompute] = ["always" for _ in proposal.ends]
    if proposal.config.recompute != "by_stage":
        yield make_candidate(problem, proposal, always if proposal.config.recompute == "always" else never)
        return
    candidate = make_candidate(problem, proposal, never)
    yield candidate
    orders, lacking = candidate.problem, set[int]()
    for device, parts in enumerate(orders.parts_of_device):
        needed = min(orders.micro_batches, orders.devices - device)
        if sum(orders.bytes[F][part][0] for part in parts) * needed > orders.room[device]:
            lacking.add(device)
    if 0 < len(lacking) < orders.devices:
        mixed: list[Recompute] = ["always" if device in lacking else "never" for device in orders.device]
        yield make_candidate(problem, proposal, mixed)
    if lacking:
        yield make_candidate(problem, proposal, always)


def make_candidate(problem: Problem, proposal: Proposal, modes: Sequence[Recompute]) -> OrderCandidate:
    """Return the shape with a recomputation mode for each of its parts."""
    assembly = assemble(problem.space, proposal, modes)
    bytes, room = (
        _bytes_of_actions(assembly),
        [_room(problem, assembly, device) for device in range(len(assembly.ranks))],
    )
    orders = OrderProblem(assembly.program, assembly.costs(), bytes, room)
    return OrderCandidate(proposal, tuple(modes), orders, orders.bound())


def _room(problem: Problem, assembly: Assembly, device: int) -> float:
    """Return the bytes of a device for what an order changes. The optimizer step is left out."""
    terms = assembly.ledger(device)
    lasting = sum(amount for name, amount in terms.items() if name not in TRANSIENT)
    limit = problem.space.limit(assembly.ranks[device]) - terms.get("context", 0.0)
    return limit / (1 + FRAGMENTATION_RESERVE) - lasting


def _bytes_of_actions(assembly: Assembly) -> list[list[list[float]]]:
    """Return the bytes of an `OrderProblem`."""
    program, table = assembly.program, np.zeros((3, assembly.program.slots, 3))
    for device, mode in enumerate(assembly.recompute):
        for chunk, stage in enumerate(assembly.chunk_bytes(device)):
            part = program.parts_by_slot[StageSlot(device, chunk)]
            forward, backward, *parts = map(sum, micro_batch_bytes(stage, program)[mode == "never"])
            workspace = float(stage.workspace)
            if program.splits_backward:
                begins, ends = backward + parts[0], parts[1]
                table[B, part] = begins, ends, stage.layer_workspace
                table[W, part] = 0.0, -forward - begins - ends, stage.layer_workspace
            else:
                table[B, part] = 0.0, -forward, workspace + backward
            table[F, part] = forward, 0.0, workspace
    return list(table.tolist())


def every_proposal(problem: Problem, bases: Sequence[str], size: int | None = None) -> Iterator[Proposal]:
    """Yield all cuts into two or more stages on one device each, for numbers of stages with few cuts.

    Args:
        problem: What is asked.
        bases: Schedules with one stage per device.
        size: The only micro-batch size. None for all.
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


BASES = ("zb-h1", "1f1b", "zb-v", "interleaved")
"""Schedules whose placements of parts are used: a line (backward in two parts or whole), a V, a loop."""
LINES = ("zb-h1", "1f1b")
"""Bases with one part per device."""
SAME_PLACES = {
    "zb-h1": LINES,
    "zb-h2": LINES,
    "zb-v": ("zb-v",),
    "dualpipe-v": ("zb-v",),
    "interleaved": ("interleaved",),
}
"""By schedule, the bases with the same placement."""
MOST_OF_BASE = 6
"""Most plans with searched cuts, by base."""
MOST_SHAPES = 64
"""Most candidates for which orders are made: those of plans, and those with the lowest bounds."""
MOST_IMPROVED = 2
"""Number of fastest candidates that are improved."""
CUTS_A_SECOND = 10
"""Most cuts whose bounds are computed if all cuts are tried, per second of the time limit."""
MOST_FILLED = 20_000
"""Most actions of an order that a rule makes."""
IMPROVE_SHARE = 0.5
"""Share of the time limit for exchanges."""
RATE = 1e6
"""Actions that exchanges time in a second."""
FILL_SHARE = 1 / 3
"""Share of the remaining time that the rules may take for one candidate."""


def synthesize(
    problem: Problem, best: ScoredPlan | None, plans: Sequence[ScoredPlan] = ()
) -> list[ScoredPlan]:
    """Search for plans with synthesized orders that are faster than the best known plan.

    Args:
        problem: What is asked.
        best: The fastest known plan. If None, the search continues until an order fits, even after the time
            limit.
        plans: Plans of known schedules with searched cuts, fastest first.

    Returns:
        Plans that fit, each faster than `best` and than the previous one.
    """
    limit = inf if best is None else best.step_seconds
    faster, improved_count = list[ScoredPlan](), 0
    filled = sorted(_fill_all(problem, best, plans, limit), key=lambda candidate: candidate.step)
    work = RATE * IMPROVE_SHARE * problem.options.time_limit / max(1, min(len(filled), MOST_IMPROVED))
    for candidate in filled:
        if candidate.bound >= limit or (improved_count >= MOST_IMPROVED and limit < inf):
            continue
        improved_count += 1
        improved = _improve(candidate, work, problem.budget)
        if improved.step < limit and (plan := _score(problem, improved)) is not None:
            faster.append(plan)
            limit = min(limit, plan.step_seconds)
    return faster


def _fill_all(
    problem: Problem, best: ScoredPlan | None, plans: Sequence[ScoredPlan], limit: float
) -> list[OrderCandidate]:
    """Return candidates with orders that fit.

    Without a known plan, all candidates are tried until one fits.
    """
    size = None if best is None else best.config.micro_batch_size
    searched = list(_with_base(problem, plans))
    cuts = islice(every_proposal(problem, LINES, size), int(CUTS_A_SECOND * problem.options.time_limit))
    least = _smallest_shape(problem) if best is None else ()
    candidates = _candidates(problem, chain(searched, _shapes(problem, best), cuts, least), limit)
    early = _in_time(problem, candidates)
    early.sort(key=lambda candidate: (candidate.proposal not in searched, candidate.bound))
    filled = list[OrderCandidate]()
    for number, candidate in enumerate(chain(early, candidates)):
        is_enough = best is not None or bool(filled)
        if is_enough and (problem.budget.over or number >= MOST_SHAPES):
            break
        changed = _fill(candidate, problem.budget.part(share=FILL_SHARE), required=best is None)
        filled += [] if changed.lists is None else [changed]
    return filled


def _in_time(problem: Problem, candidates: Iterator[OrderCandidate]) -> list[OrderCandidate]:
    """Return the next candidates, at least one, until the time is over."""
    early = list[OrderCandidate]()
    while not (early and problem.budget.over) and (candidate := next(candidates, None)) is not None:
        early.append(candidate)
    return early


def _with_base(problem: Problem, plans: Sequence[ScoredPlan]) -> Iterator[Proposal]:
    """Yield the shapes of the fastest plans of each base, as plans of that base."""
    counts = dict.fromkeys(BASES, 0)
    for plan in plans:
        for base in SAME_PLACES.get(plan.config.schedule, ()):
            if base in problem.schedules and counts[base] < MOST_OF_BASE:
                counts[base] += 1
                yield replace(plan.proposal, config=replace(plan.config, schedule=base))


def _shapes(problem: Problem, best: ScoredPlan | None) -> Iterator[Proposal]:
    """Return good shapes of each base: that of the best plan, and balanced ones."""
    names = [name for name in BASES if name in problem.schedules]
    straight = None if best is None or best.config.virtual_stages > 1 else best
    return propose_other_schedules(problem, names, straight)


def _smallest_shape(problem: Problem) -> Iterator[Proposal]:
    """Yield the shape that needs the least memory with one micro-batch at a time.

    If it does not fit, no pipeline with one stage per device does.
    """
    smallest = find_smallest_plan(problem, in_flight=1)
    if smallest is not None and problem.allows(smallest.proposal):
        yield smallest.proposal


def _candidates(problem: Problem, proposals: Iterable[Proposal], limit: float) -> Iterator[OrderCandidate]:
    """Yield candidates that have an order that fits and a bound below the limit, until the time is over.

    Without a limit, all are yielded.
    """
    for proposal in dict.fromkeys(proposals):
        if problem.budget.over and limit < inf:
            return
        config = proposal.config
        devices = len(proposal.ends) // config.virtual_stages
        if 3 * len(proposal.ends) * config.micro_batches > MOST_ACTIONS or devices == 1:
            continue
        if config.recompute == "except_last" or not possible(problem.space, proposal):
            continue
        with suppress(UsageError):  # the schedule does not run with these numbers
            for candidate in recompute_choices(problem, proposal):
                if candidate.bound < limit and candidate.problem.has_order():
                    yield candidate


def _fill(candidate: OrderCandidate, budget: SearchBudget, *, required: bool) -> OrderCandidate:
    """Return the candidate with the fastest order that rules make in time.

    If `required`, at least one that fits.
    """
    problem, best, lists = candidate.problem, inf, None
    actions = sum(map(len, problem.program.actions))
    by_rule = fill_orders(problem) if actions <= MOST_FILLED else ()
    for order in chain(by_rule, [problem.one_at_a_time(problem.micro_batches)]):
        step = problem.step(order) if problem.fits(order) else inf
        if step < best:
            best, lists = step, order
        if best <= candidate.bound * (1 + 1e-9) or (budget.over and (lists is not None or not required)):
            break
    return replace(candidate, lists=lists, step=best)


def _improve(candidate: OrderCandidate, work: float, budget: SearchBudget) -> OrderCandidate:
    """Return the candidate with its order improved by exchanges that time `work` actions."""
    assert candidate.lists is not None, "an order was made"
    lists, step = improve_order(
        candidate.problem, candidate.lists, candidate.bound, work, lambda: budget.over
    )
    return replace(candidate, lists=lists, step=step)


def _score(problem: Problem, candidate: OrderCandidate) -> ScoredPlan | None:
    """Return the plan with the order as its schedule; None if it does not fit."""
    assert candidate.lists is not None, "an order was made"
    program, proposal = candidate.problem.arrange(candidate.lists), candidate.proposal
    name = f"{SYNTHESIZED}-{sha256(write_program(SYNTHESIZED, program).encode()).hexdigest()[:8]}"
    register_order(
        read_schedule(write_program(name, program, "pplan: the fastest order found for a plan")),
        program.devices,
        program.micro_batches,
        proposal.config.virtual_stages,
    )
    return fastest(problem.space, [replace(proposal, config=replace(proposal.config, schedule=name))])
