"""Plans with an order of actions of their own, on the cuts and devices of good plans, and cuts near them.

The orders start from the best known ones, each with the cuts that were searched for it, and from those that
rules make (`deep_orders`, `insert_orders`, `ahead_orders`, `fill_orders`), weight gradients put anew where
devices wait (`fill_weights`). With the best of them in hand cuts are moved as long as the order runs faster;
then other numbers of such rules are tried (`search_ahead`), the order is improved (`local_search`) and, where
OR-tools is installed, handed to its solver (`solve_order`), and cuts are moved again. None is slower than the
best plan of the known schedules that was found before. Each is a schedule like any other, named by the hash
of its actions, and scored by the simulator and the ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
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
from .action_bound import action_bound
from .ahead_orders import ahead_orders, search_ahead, steepest_slope
from .compiled_loops import can_compile
from .deep_orders import deep_orders
from .fill_orders import fill_orders
from .fill_weights import fill_weights, list_turns
from .insert_orders import insert_orders
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
from .solve_order import MOST_ACTIONS as MOST_SOLVED
from .solve_order import has_solver, solve_order

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
RATES = {False: (4e5, 6e5), True: (1e7, 4e7)}
"""In a second, in Python and by numba: actions of orders that are made by rule, and that exchanges time."""
LEAST_SECONDS, COMPILING_SECONDS = 2.0, 10.0
"""Of exchanges for which numba is taken, where so many are left at least: it takes about as long once."""
CUTS_A_SECOND = 10
"""Of the time limit, of which orders are bounded where all cuts are tried: a twentieth of it."""
MOST_FILLED = 20_000
"""Actions of an order that is made by rule, event by event."""
REFILL_SHARES = (0.9, 0.3)
"""Of `fill_weights`, that the best order by rule is tried with."""
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
    rules = (deep_orders, insert_orders, ahead_orders, fill_orders) if _actions(own) <= MOST_FILLED else ()
    made_by_rule = (rule(numbers) for rule in rules)
    last = one_at_a_time(numbers, numbers.micro_batches)
    for order in chain(_published_orders(own), *made_by_rule, [last]):
        run = run_order(numbers, order) if numbers.fits(order) else None
        if run is not None and run.step < best:
            best, lists = run.step, order
        if best <= own.bound * (1 + 1e-9) or (budget.over and (lists is not None or not required)):
            break
    return own if lists is None else _fill_again(replace(own, lists=lists, step=best))


def _fill_again(own: OrderCandidate) -> OrderCandidate:
    """With the weight gradients put anew where devices wait, if that is faster."""
    numbers = own.problem
    if own.lists is None or not numbers.is_line or not numbers.split:
        return own
    turns = list_turns(own.lists)
    for share in REFILL_SHARES:
        lists = fill_weights(numbers, turns, share, numbers.micro_batches)
        run = run_order(numbers, lists) if lists is not None and numbers.fits(lists) else None
        if run is not None and run.step < own.step * (1 - 1e-12):
            own = replace(own, lists=lists, step=run.step)
    return own


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
    """Improved for about so many seconds: by other rules, by exchanges, by the solver where there is one."""
    own = replace(
        own, bound=max(own.bound, 0.0 if budget.over else action_bound(own.problem, own.step, seconds / 3))
    )
    assert own.lists is not None, "an order was made"
    lists, solves = own.lists, has_solver() and _actions(own) <= MOST_SOLVED
    tries = 0.0 if steepest_slope(own.problem) is None else seconds / 6
    share = seconds / 3 if solves else seconds - tries
    fast = can_compile() and share >= LEAST_SECONDS and budget.seconds_left > COMPILING_SECONDS
    rules, work = RATES[fast]
    if tries:
        is_over = _turn_limit(max(1, int(tries * rules / _actions(own))), budget)
        ahead, step = search_ahead(own.problem, own.bound, is_over, fast=fast)
        lists = ahead if ahead is not None and step < own.step else lists
    lists, step = improve_order(own.problem, lists, own.bound, share * work, lambda: budget.over, fast=fast)
    own = replace(own, lists=lists, step=step)
    if not solves or budget.over or step <= own.bound * (1 + 1e-9):
        return own
    solution = solve_order(own.problem, lists, own.bound, seconds - share - tries, budget.seconds_left)
    run = None if solution.lists is None else run_order(own.problem, solution.lists)
    own = replace(own, bound=max(own.bound, min(solution.bound, step)))
    if run is None or solution.lists is None or run.step >= step or not own.problem.fits(solution.lists):
        return own
    return replace(own, lists=solution.lists, step=run.step)


def _turn_limit(turns: int, budget: SearchBudget) -> Callable[[], bool]:
    """Whether it was asked as often, or the time is over."""
    left = iter(range(turns))
    return lambda: next(left, None) is None or budget.over


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
