"""Plans with an order of actions of their own, on the cuts and devices of good plans, and cuts near them.

The orders start from the best known ones, each with the cuts that were searched for it, and from those that
rules make (`fill_orders`). With the best of them in hand cuts are moved as long as the order runs faster;
then the order is improved (`local_search`), and cuts are moved again. None is slower than the best plan of
the known schedules that was found before. Each is a schedule like any other, named by the hash of its
actions, and scored by the simulator and the ledger.
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
from ...cost_models.schedules import find_schedule
from ...cost_models.schedules.registration import register_order
from ...cost_models.schedules.schedule_text import read_schedule, write_program
from ..candidate import Proposal, ScoredPlan
from ..other_schedules import propose_other_schedules
from ..pipeline_config import SYNTHESIZED
from ..scoring import fastest, possible
from ..search.budget import SearchBudget
from ..smallest_plan import find_smallest_plan
from .compiled_loops import can_compile
from .fill_orders import fill_orders
from .local_search import improve_order
from .order_candidate import (
    OrderCandidate,
    every_proposal,
    has_order,
    make_candidate,
    near_proposals,
    one_at_a_time,
    recompute_choices,
)
from .order_problem import Lists
from .run_order import list_steps, run_order

if TYPE_CHECKING:
    from ..problem import Problem

BASES = ("zb-h1", "1f1b", "zb-v", "interleaved")
"""Whose places the parts of the layers have: a line with the backward in two parts or whole, a V, a loop."""
LINES = ("zb-h1", "1f1b")
"""Those of one part a device."""
SAME_PLACES = {
    "zb-h1": ("zb-h1", "1f1b"),
    "zb-h2": ("zb-h1", "1f1b"),
    "zb-v": ("zb-v",),
    "dualpipe-v": ("zb-v",),
    "interleaved": ("interleaved",),
}
"""By schedule, the bases whose parts lie on the same places."""
MOST_OF_BASE = 6
"""Plans with searched cuts, by base."""
STARTS = {
    "zb-h1": ("zb-h1", "zb-h2"),
    "1f1b": ("1f1b",),
    "zb-v": ("zb-v",),
    "interleaved": ("interleaved",),
}
"""By base, the known orders of the same places."""
MOST_SHAPES, MOST_IMPROVED = 24, 2
"""Shapes with the lowest bounds, of which orders are made by rule; how many of the fastest are improved."""
RATES = {False: 6e5, True: 4e7}
"""Actions that exchanges time in a second, in Python and by numba."""
LEAST_SECONDS, COMPILING_SECONDS = 2.0, 10.0
"""Of exchanges for which numba is taken, where so many are left at least: it takes about as long once."""
CUTS_A_SECOND = 10
"""Of the time limit, of which orders are bounded where all cuts are tried: a twentieth of it."""
MOST_FILLED = 20_000
"""Actions of an order that is made by rule, event by event."""
SHARE = 0.5
"""Of the time limit, for improving orders."""
FILL_SHARE = 1 / 3
"""Of the time that is left, for the rules' orders of a shape."""


def synthesize(
    problem: Problem, best: ScoredPlan | None, plans: Sequence[ScoredPlan] = ()
) -> list[ScoredPlan]:
    """The fastest plans found with orders of their own, that fit and are faster than the `best` plan; `plans`
    of known schedules with searched cuts, the fastest first, to start from. Where no plan is known that fits,
    an order is sought until there is one, also when the time is over."""
    limit = inf if best is None else best.step_seconds
    filled = _fill_all(problem, best, plans, limit)
    seconds, faster = SHARE * problem.options.time_limit, list[ScoredPlan]()
    for number, own in enumerate(sorted(filled, key=lambda own: own.step)):
        if own.bound >= limit or (number >= MOST_IMPROVED and limit < inf):
            continue
        improved = _improve(_move_cuts(problem, own), seconds / MOST_IMPROVED, problem.budget)
        improved = _move_cuts(problem, improved)
        if improved.step < limit and (plan := _score(problem, improved)) is not None:
            faster.append(plan)
            limit = min(limit, plan.step_seconds)
    return faster


def _fill_all(
    problem: Problem, best: ScoredPlan | None, plans: Sequence[ScoredPlan], limit: float
) -> list[OrderCandidate]:
    """Candidates with orders that fit: on searched cuts, then on the shapes with the lowest bounds, and on
    those of all cuts where these are few; where no plan is known, on any that were left, until there is
    one."""
    searched = _candidates(problem, _with_base(problem, plans), limit)
    others = _candidates(problem, _shapes(problem, best), limit)
    own_cuts, shapes = _make_in_time(problem, searched), _make_in_time(problem, others)
    shapes.sort(key=lambda own: own.bound)
    earlier = {(own.proposal, own.recompute) for own in (*own_cuts, *shapes)}
    size = None if best is None else best.config.micro_batch_size
    every = islice(every_proposal(problem, LINES, size), int(CUTS_A_SECOND * problem.options.time_limit))
    more = _make_in_time(problem, _candidates(problem, every, limit))
    few = [own for own in more if (own.proposal, own.recompute) not in earlier]
    few.sort(key=lambda own: own.bound)
    first = [*own_cuts, *shapes[:MOST_SHAPES], *few[:MOST_SHAPES]]
    filled: list[OrderCandidate] = []
    least = _candidates(problem, _smallest_shape(problem) if best is None else (), limit)
    for number, own in enumerate(chain(first, shapes[MOST_SHAPES:], searched, others, least)):
        is_last = problem.budget.over or number >= len(first)
        if is_last and (best is not None or filled):
            break
        changed = _fill(own, problem.budget.part(share=FILL_SHARE), required=best is None)
        filled += [] if changed.lists is None else [changed]
    return filled


def _smallest_shape(problem: Problem) -> Iterator[Proposal]:
    """The shape that needs least with one micro-batch at a time: if it does not fit, none does of stages on
    devices of their own."""
    smallest = find_smallest_plan(problem, in_flight=1)
    if smallest is not None and problem.allows(smallest.proposal):
        yield smallest.proposal


def _make_in_time(problem: Problem, candidates: Iterator[OrderCandidate]) -> list[OrderCandidate]:
    """The next ones, until the time is over."""
    early = list[OrderCandidate]()
    while not (early and problem.budget.over) and (own := next(candidates, None)) is not None:
        early.append(own)
    return early


def _with_base(problem: Problem, plans: Sequence[ScoredPlan]) -> Iterator[Proposal]:
    """The plans as those of a base with the same places, by base the fastest few."""
    counts = dict.fromkeys(BASES, 0)
    for plan in plans:
        for base in SAME_PLACES.get(plan.config.schedule, ()):
            if base in problem.schedules and counts[base] < MOST_OF_BASE:
                counts[base] += 1
                yield replace(plan.proposal, config=replace(plan.config, schedule=base))


def _shapes(problem: Problem, best: ScoredPlan | None) -> Iterator[Proposal]:
    """Shapes of good plans, by base."""
    names = [name for name in BASES if name in problem.schedules]
    straight = None if best is None or best.config.virtual_stages > 1 else best
    return propose_other_schedules(problem, names, straight)


def _candidates(problem: Problem, proposals: Iterable[Proposal], limit: float) -> Iterator[OrderCandidate]:
    """Of these, those whose bound on all orders is below the limit; none later than in time where there is
    one."""
    for proposal in dict.fromkeys(proposals):
        if problem.budget.over and limit < inf:
            return
        config = proposal.config
        devices = len(proposal.ends) // config.virtual_stages
        if 3 * len(proposal.ends) * config.micro_batches > MOST_ACTIONS or devices == 1:
            continue
        if proposal.config.recompute == "except_last" or not possible(problem.space, proposal):
            continue
        with suppress(UsageError):  # the schedule does not run with these numbers
            for own in recompute_choices(problem, proposal):
                if own.bound < limit and has_order(own.problem):
                    yield own


def _move_cuts(problem: Problem, own: OrderCandidate) -> OrderCandidate:
    """With the cuts moved, one place at a time, as long as its order runs faster and fits."""
    if own.lists is None:
        return own
    goes_on = True
    while goes_on and not problem.budget.over:
        goes_on = False
        for proposal in near_proposals(problem, own.proposal):
            changed = make_candidate(problem, proposal, own.recompute)
            if not changed.problem.fits(own.lists) or problem.budget.over:
                continue
            run = run_order(changed.problem, own.lists, own.step)
            if run is not None and run.step < own.step * (1 - 1e-9):
                own, goes_on = replace(changed, lists=own.lists, step=run.step), True
    return own


def _fill(own: OrderCandidate, budget: SearchBudget, *, required: bool) -> OrderCandidate:
    """With the best of the known orders and of those made by rule; where the time is over, of those tried by
    then, one that fits at least where it is `required`."""
    numbers = own.problem
    best, lists = inf, None
    by_rule = fill_orders(numbers) if _actions(own) <= MOST_FILLED else ()
    last = one_at_a_time(numbers, numbers.micro_batches)
    for order in chain(_published_orders(own), by_rule, [last]):
        run = run_order(numbers, order) if numbers.fits(order) else None
        if run is not None and run.step < best:
            best, lists = run.step, order
        if best <= own.bound * (1 + 1e-9) or (budget.over and (lists is not None or not required)):
            break
    return own if lists is None else replace(own, lists=lists, step=best)


def _published_orders(own: OrderCandidate) -> Iterator[Lists]:
    config = own.proposal.config
    for name in STARTS[config.schedule]:
        with suppress(UsageError):
            program = find_schedule(name).program(own.program.devices, config.micro_batches)
            lists = list_steps(program)
            if lists is not None:
                yield lists


def _actions(own: OrderCandidate) -> int:
    return sum(len(row) for row in own.program.actions)


def _improve(own: OrderCandidate, seconds: float, budget: SearchBudget) -> OrderCandidate:
    """Improved by exchanges for about so many seconds."""
    assert own.lists is not None, "an order was made"
    fast = can_compile() and seconds >= LEAST_SECONDS and budget.seconds_left > COMPILING_SECONDS
    work = seconds * RATES[fast]
    lists, step = improve_order(own.problem, own.lists, own.bound, work, lambda: budget.over, fast=fast)
    return replace(own, lists=lists, step=step)


def _score(problem: Problem, own: OrderCandidate) -> ScoredPlan | None:
    """The order as a schedule of a plan, by the simulator and the ledger; None where it does not fit."""
    assert own.lists is not None, "an order was made"
    program = own.problem.program(own.lists, own.program)
    text = write_program("synthesized", program)
    name = f"{SYNTHESIZED}-{sha256(text.encode()).hexdigest()[:8]}"
    config = own.proposal.config
    register_order(
        read_schedule(write_program(name, program, "pplan: the fastest order found for a plan")),
        program.devices,
        program.micro_batches,
        config.virtual_stages,
    )
    return fastest(problem.space, [replace(own.proposal, config=replace(config, schedule=name))])
