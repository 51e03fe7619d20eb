"""Plans with an order of actions made for them, on the cuts and devices of good plans.

Candidates are the searched cuts of known schedules, other good shapes, and all cuts where these are few. Each
gets the best of the orders that rules make (`fill_orders`); the fastest are improved by `improve_order`. The
result is a schedule like any other, named by the hash of its actions and scored by the simulator and the
ledger, and is faster than the best known plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from itertools import chain, islice
from math import inf
from typing import TYPE_CHECKING

from ...cost_models.errors import UsageError
from ...cost_models.quantities import MOST_ACTIONS
from ...cost_models.schedule_text import read_schedule, register_order, write_program
from ..candidate import SYNTHESIZED, Proposal, ScoredPlan
from ..other_schedules import propose_other_schedules
from ..scoring import fastest, possible
from ..search.budget import SearchBudget
from ..smallest_plan import find_smallest_plan
from .candidates import OrderCandidate, every_proposal, recompute_choices
from .exchanges import improve_order
from .fill_orders import fill_orders
from .orders import run_order

if TYPE_CHECKING:
    from ..problem import Problem

BASES = ("zb-h1", "1f1b", "zb-v", "interleaved")
"""Schedules whose placements of parts are used: a line (backward in two parts or whole), a V, a loop."""
LINES = ("zb-h1", "1f1b")
"""Bases with one part a device."""
SAME_PLACES = {
    "zb-h1": LINES,
    "zb-h2": LINES,
    "zb-v": ("zb-v",),
    "dualpipe-v": ("zb-v",),
    "interleaved": ("interleaved",),
}
"""By schedule, the bases with the same placement."""
MOST_OF_BASE = 6
"""Plans with searched cuts, by base."""
MOST_SHAPES = 24
"""Shapes with the lowest bounds for which orders are made."""
MOST_IMPROVED = 2
"""Fastest candidates that are improved."""
CUTS_A_SECOND = 10
"""Cuts whose bounds are computed where all cuts are tried, by second of the time limit."""
MOST_FILLED = 20_000
"""Actions of the longest order that a rule makes."""
IMPROVE_SHARE = 0.5
"""Share of the time limit for exchanges."""
RATE = 1e6
"""Actions that exchanges time in a second."""
FILL_SHARE = 1 / 3
"""Share of the time left that the rules may take for one candidate."""


def synthesize(
    problem: Problem, best: ScoredPlan | None, plans: Sequence[ScoredPlan] = ()
) -> list[ScoredPlan]:
    """Search for plans with orders of their own that are faster than the best known plan.

    Args:
        problem: What is asked.
        best: The fastest known plan. If None, an order is sought until one fits, even after the time limit.
        plans: Plans of known schedules with searched cuts, the fastest first.

    Returns:
        Plans that fit, each faster than `best` and than the one before it.
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
    """Candidates with orders that fit; where no plan is known, the rest of the candidates until one fits."""
    size = None if best is None else best.config.micro_batch_size
    cuts = islice(every_proposal(problem, LINES, size), int(CUTS_A_SECOND * problem.options.time_limit))
    searched = _candidates(problem, _with_base(problem, plans), limit)
    shapes = _candidates(problem, _shapes(problem, best), limit)
    first = _in_time(problem, searched)
    rest = list[OrderCandidate]()
    for group in (_in_time(problem, shapes), _in_time(problem, _candidates(problem, cuts, limit))):
        earlier = {(candidate.proposal, candidate.recompute) for candidate in (*first, *rest)}
        new = [candidate for candidate in group if (candidate.proposal, candidate.recompute) not in earlier]
        new.sort(key=lambda candidate: candidate.bound)
        first += new[:MOST_SHAPES]
        rest += new[MOST_SHAPES:]
    least = _candidates(problem, _smallest_shape(problem) if best is None else (), limit)
    filled = list[OrderCandidate]()
    for number, candidate in enumerate(chain(first, rest, searched, shapes, least)):
        is_enough = best is not None or bool(filled)
        if is_enough and (problem.budget.over or number >= len(first)):
            break
        changed = _fill(candidate, problem.budget.part(share=FILL_SHARE), required=best is None)
        filled += [] if changed.lists is None else [changed]
    return filled


def _in_time(problem: Problem, candidates: Iterator[OrderCandidate]) -> list[OrderCandidate]:
    """The next candidates, at least one, until the time is over."""
    early = list[OrderCandidate]()
    while not (early and problem.budget.over) and (candidate := next(candidates, None)) is not None:
        early.append(candidate)
    return early


def _with_base(problem: Problem, plans: Sequence[ScoredPlan]) -> Iterator[Proposal]:
    """The shapes of the fastest plans of each base, as plans of that base."""
    counts = dict.fromkeys(BASES, 0)
    for plan in plans:
        for base in SAME_PLACES.get(plan.config.schedule, ()):
            if base in problem.schedules and counts[base] < MOST_OF_BASE:
                counts[base] += 1
                yield replace(plan.proposal, config=replace(plan.config, schedule=base))


def _shapes(problem: Problem, best: ScoredPlan | None) -> Iterator[Proposal]:
    """Good shapes of each base: of the best plan, and balanced ones."""
    names = [name for name in BASES if name in problem.schedules]
    straight = None if best is None or best.config.virtual_stages > 1 else best
    return propose_other_schedules(problem, names, straight)


def _smallest_shape(problem: Problem) -> Iterator[Proposal]:
    """The shape that needs least memory with one micro-batch at a time: if it does not fit, no pipeline with
    one stage a device does."""
    smallest = find_smallest_plan(problem, in_flight=1)
    if smallest is not None and problem.allows(smallest.proposal):
        yield smallest.proposal


def _candidates(problem: Problem, proposals: Iterable[Proposal], limit: float) -> Iterator[OrderCandidate]:
    """The candidates of shapes that have an order that fits and whose bound is below the limit, until the
    time is over; without a limit, all."""
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
    """The candidate with the fastest order that rules make in time; `required`: at least one that fits."""
    problem, best, lists = candidate.problem, inf, None
    actions = sum(len(row) for row in candidate.program.actions)
    by_rule = fill_orders(problem) if actions <= MOST_FILLED else ()
    for order in chain(by_rule, [problem.one_at_a_time(problem.micro_batches)]):
        run = run_order(problem, order, best) if problem.fits(order) else None
        if run is not None and run.step < best:
            best, lists = run.step, order
        if best <= candidate.bound * (1 + 1e-9) or (budget.over and (lists is not None or not required)):
            break
    return replace(candidate, lists=lists, step=best)


def _improve(candidate: OrderCandidate, work: float, budget: SearchBudget) -> OrderCandidate:
    """The candidate with its order improved by exchanges that time so many actions."""
    assert candidate.lists is not None, "an order was made"
    lists, step = improve_order(
        candidate.problem, candidate.lists, candidate.bound, work, lambda: budget.over
    )
    return replace(candidate, lists=lists, step=step)


def _score(problem: Problem, candidate: OrderCandidate) -> ScoredPlan | None:
    """The plan with the order as its schedule, by the simulator and the ledger; None if it does not fit."""
    assert candidate.lists is not None, "an order was made"
    program = candidate.problem.program(candidate.lists, candidate.program)
    text = write_program("synthesized", program)
    name = f"{SYNTHESIZED}-{sha256(text.encode()).hexdigest()[:8]}"
    proposal, config = candidate.proposal, candidate.proposal.config
    register_order(
        read_schedule(write_program(name, program, "pplan: the fastest order found for a plan")),
        program.devices,
        program.micro_batches,
        config.virtual_stages,
    )
    return fastest(problem.space, [replace(proposal, config=replace(config, schedule=name))])
