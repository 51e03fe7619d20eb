"""Problems without a plan: the check that failed, the tightest stage, and the changes that make a plan fit.

Memory answers first, by `smallest_plan`. No search runs for a problem that it rules out, nor for a change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from math import ceil, inf
from typing import Any

from ..cost_models.errors import InfeasibleError, UsageError
from ..cost_models.number_format import either
from ..cost_models.optimizers import OPTIMIZERS
from ..cost_models.quantities import format_bytes
from ..cost_models.runtime import OFFLOAD
from .joint_search import BEST, JointSearchResult, find_best_plan, plan_with, with_bound
from .plan_options import PlanOptions
from .planners import find_planner
from .problem import Problem
from .scoring import fastest
from .search.branch_and_bound import SearchResult
from .smallest_plan import (
    SmallestPlan,
    enough_bytes,
    fewest_devices,
    find_smallest_plan,
    fits,
    least_in_parts,
    list_limits,
    nothing_fits,
    room,
)
from .unfit import UNFIT

TOO_SMALL = " Memory is too small for that, too."
NO_HELP = "Omitting options does not help: check `mini_batch` and the machine."
MORE_GPUS = 4
"""Times the devices of the problem, up to which more devices are suggested."""
_FREE = PlanOptions()
_NARROWING = (
    *("pins", "cut_after", "keep_together", "max_stages", "use_all", "runtime", "micro_batches"),
    *("schedule", "recompute", "planner"),
)
"""Options that leave plans out."""
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))


def find_plan(problem: Problem) -> JointSearchResult:
    """Search the best plan, unless memory rules every plan out.

    Args:
        problem: The problem, whose time limit is running.

    Returns:
        The answer of the search. If the search finds no plan, the plan that needs the least memory.
    """
    if nothing_fits(problem):
        return JointSearchResult(SearchResult(None, inf, inf, exact=True), {})
    answer = find_best_plan(problem)
    if answer.best is not None or problem.options.planner != BEST:
        return answer
    smallest = find_smallest_plan(problem)
    plan = None if smallest is None else fastest(problem.space, [smallest.proposal])
    return replace(answer, result=with_bound(problem, plan, answer.result)) if plan else answer


def no_plan_fits(problem: Problem) -> InfeasibleError:
    """Make the error for a problem without a plan.

    Args:
        problem: A problem that `nothing_fits` rules out, or whose search found no plan.

    Returns:
        The error with the failed check, or the tightest stage of the plan that needs the least memory.
        `details` holds the stage, its ledger, the limit and `would_fit`, the changes.
    """
    from .failed_checks import find_failed_check  # most problems have a plan

    limit = list_limits(problem)[0]
    if (error := find_failed_check(problem)) is not None:
        free = _without(problem, _narrowing(problem.options))
        also = TOO_SMALL if limit < inf and not _fits_with(problem, free) else ""
        return InfeasibleError(error.what, f"{error.hint}{also}")
    if problem.options.planner != BEST and (error := _no_plan_of_planner(problem)) is not None:
        return error
    smallest = find_smallest_plan(problem)
    if limit == inf or (smallest is None and least_in_parts(problem) == inf):
        return InfeasibleError("the options allow no plan, whatever the memory", _leave_out(problem))
    proven = nothing_fits(problem)
    what = (
        f"no plan{_of_schedules(problem)} {'fits' if proven else 'was found that fits'} into {room(problem)}"
    )
    details: dict[str, Any] = {}
    if smallest is not None and smallest.memory_bytes > limit:
        tightest, details = _describe_tightest(problem, smallest, "needs at least" if proven else "needs")
        what = f"{what}: {tightest}"
    elif proven:
        what = f"{what}: some device needs at least {format_bytes(least_in_parts(problem))}"
    changes = list(_changes(problem, smallest))
    hint = f"What would fit: {'; or '.join(changes)}." if changes else _leave_out(problem)
    return InfeasibleError(what, hint, details | {"would_fit": changes})


def _of_schedules(problem: Problem) -> str:
    """Name the schedules, if the user did."""
    is_named = problem.options.schedule == problem.schedules[0]
    return f" under {problem.options.schedule}" if is_named else ""


def _describe_tightest(problem: Problem, smallest: SmallestPlan, needs: str) -> tuple[str, dict[str, Any]]:
    """Describe the tightest stage of the plan that needs the least memory, in words and as JSON holds it."""
    stage, config, limits = smallest.tightest, smallest.config, list_limits(problem)
    first, end = smallest.proposal.bounds[smallest.number]
    names, limit = problem.chain.names[first:end], int(limits[0])
    details = {
        "stage": {
            "number": smallest.number,
            "stages": len(smallest.stages),
            "first_layer": names[0],
            "last_layer": names[-1],
            "replicas": stage.replicas,
            "memory_bytes": stage.memory_bytes,
        },
        "ledger": dict(stage.ledger),
        "limit_bytes": limit,
        "missing_bytes": stage.memory_bytes - limit,
    }
    terms = ", ".join(
        f"{name.replace('_', ' ')} {format_bytes(amount)}" for name, amount in stage.ledger.items() if amount
    )
    what = (
        f"{'with one stage a device, ' if least_in_parts(problem) < inf else ''}"
        f"stage {smallest.number} of {len(smallest.stages)} ({names[0]} to {names[-1]}"
        f"{f', {stage.replicas} replicas' if stage.replicas > 1 else ''}; "
        f"{config.micro_batches} x {config.micro_batch_size}, {config.schedule}, "
        f"recompute {stage.recompute.replace('_', ' ')}) {needs} {format_bytes(stage.memory_bytes)} "
        f"({terms}); {format_bytes(stage.memory_bytes - limit)} are missing"
        f"{' on the smallest' if len(limits) > 1 else ''}"
    )
    return what, details


def _no_plan_of_planner(problem: Problem) -> InfeasibleError | None:
    """Make the error of a named planner; None if memory is too small for any plan of any planner."""
    name = problem.options.planner
    why = str(plan_with(find_planner(name), problem))
    others = _fits_with(problem, replace(problem.options, planner=BEST))
    if not others and why.startswith(UNFIT):
        return None
    hint = "Omit `planner`: other plans fit." if others else f"Omit `planner`.{TOO_SMALL}"
    return InfeasibleError(f"planner={name!r}: {why}", hint)


def _changes(problem: Problem, smallest: SmallestPlan | None) -> Iterator[str]:
    """List single changes with which a plan fits, the cheapest for the user first."""
    options = problem.options
    free = replace(options, mini_batch=problem.mini_batch, micro_batches=None)
    runs: dict[str, dict[str, Any]] = {
        "recompute='auto'": {"recompute": "auto"},
        "micro_batches='auto'": {"micro_batches": None, "mini_batch": problem.mini_batch},
        "schedule='auto'": {"schedule": "auto"},
        f"recompute={OFFLOAD!r}": {"recompute": OFFLOAD},
    }
    fitting = [words for words, changed in runs.items() if _changed_fits(problem, **changed)]
    yield from fitting
    if not fitting and _fits_with(problem, replace(free, schedule="auto", recompute="auto")):
        yield "micro_batches='auto' schedule='auto' recompute='auto'"
    size = {name: own.bytes_per_parameter(problem.precision.bytes) for name, own in OPTIMIZERS.items()}
    for name in sorted(size, key=lambda name: -size[name]):
        if size[name] < size[options.optimizer] and _changed_fits(problem, optimizer=name):
            yield f"optimizer={name!r}"
    zero = next((own for own in range(options.zero + 1, 4) if _changed_fits(problem, zero=own)), None)
    if zero is not None:
        yield f"zero={zero}"
    if (gpus := _more_gpus(problem)) is not None:
        # Without a requested global batch it would grow with the GPUs, and with it what a stage holds.
        yield f"gpus={gpus * problem.sharers} mini_batch={problem.mini_batch}"
    if (enough := enough_bytes(problem, smallest)) < inf:
        yield f"memory={_memory_text(enough)!r} a device"


def _more_gpus(problem: Problem) -> int | None:
    """Return the fewest devices above those offered on which a plan fits, up to `MORE_GPUS` times as many."""
    topology = problem.topology
    most = min(MORE_GPUS * problem.gpus, topology.capacity or MORE_GPUS * problem.gpus)
    if problem.runtime is not None and problem.runtime.replicas == "none":
        most = min(most, len(problem.chain))  # more have no stage, and are refused
    if len(topology.kinds) > 1 or most <= problem.gpus:
        return None

    def with_gpus(number: int) -> Problem:
        options = replace(problem.options, mini_batch=problem.mini_batch)
        return replace(problem, topology=topology.with_gpus(number), options=options)

    with suppress(UsageError):
        fewest = fewest_devices(with_gpus(most))
        if problem.gpus < fewest <= most and fits(with_gpus(int(fewest))):
            return int(fewest)
    return None


def _memory_text(size: float) -> str:
    """Format bytes with three digits, rounded up, in the largest unit that is not larger."""
    unit, factor = next((unit, factor) for unit, factor in _UNITS if size >= factor or factor == 1)
    value = size / factor
    decimals = 2 if value < 10 else 1 if value < 100 else 0
    return f"{ceil(value * 10**decimals) / 10**decimals:.{decimals}f}{unit}"


def _narrowing(options: PlanOptions) -> list[str]:
    """Return the fields that leave plans out, of those that are given."""
    return [field for field in _NARROWING if getattr(options, field) != getattr(_FREE, field)]


def _without(problem: Problem, fields: Iterable[str]) -> PlanOptions:
    """Return the options without these fields, with the same global batch."""
    free: dict[str, Any] = {field: getattr(_FREE, field) for field in fields}
    return replace(problem.options, mini_batch=problem.mini_batch, **free)


def _leave_out(problem: Problem) -> str:
    """Say which of the given options to omit: each that is enough alone, else all of them."""
    fields = _narrowing(problem.options)
    enough = [f"`{field}`" for field in fields if _fits_with(problem, _without(problem, [field]))]
    if enough:
        return f"Omit {either(enough)}."
    if fields and _fits_with(problem, _without(problem, fields)):
        return f"Omit all of {', '.join(f'`{field}`' for field in fields)}: none alone is enough."
    return NO_HELP


def _changed_fits(problem: Problem, **changed: Any) -> bool:
    """Return whether a plan fits with other values of some options."""
    try:
        return _fits_with(problem, replace(problem.options, **changed))
    except UsageError:
        return False


def _fits_with(problem: Problem, options: PlanOptions) -> bool:
    """Return whether a plan fits under other options."""
    if options == problem.options:
        return False
    try:
        return fits(replace(problem, options=options))
    except UsageError:
        return False
