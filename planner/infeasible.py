"""Why no plan fits: the plan that needs the least memory, its tightest stage, and what would make it fit.

Every change that is named was solved again and fits.
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
from ..cost_models.quantities import format_bytes, parse_bytes
from ..cost_models.runtime import OFFLOAD
from .candidate import ScoredPlan
from .failed_checks import find_failed_check
from .joint_search import BEST, find_best_plan, is_small_problem, plan_with
from .pipeline_config import SEARCHED
from .plan_options import PlanOptions
from .plan_stages import plan_stages, run_in_words
from .planners import find_planner
from .problem import Problem
from .smallest_plan import (
    TightestStage,
    find_smallest_of_others,
    find_smallest_plan,
    list_limits,
    room,
    smallest_limit,
)

TOO_SMALL = " Memory is too small for that, too."
NO_HELP = "Leaving out options was not seen to help: check `mini_batch` and the machine."
SECONDS = 1.0
"""Of the search for each change, as of `PlanOptions.time_limit`."""
FEW_GPUS = 16
"""GPUs up to which every larger number is tried."""
HALVINGS = 4
"""Of the range between the memory that there is and one with which a plan was found."""


def no_plan_fits(problem: Problem) -> InfeasibleError:
    """The error for a problem without a plan that fits."""
    if (error := find_failed_check(problem)) is not None:
        also = TOO_SMALL if _is_too_small(problem) else ""
        return InfeasibleError(error.what, f"{error.hint}{also}")
    limited = problem.space.limit(range(problem.gpus)) < inf
    tightest = find_smallest_plan(problem, in_flight=1.0 if _in_any_order(problem) else None)
    others = _solve_with(problem, replace(problem.options, planner=BEST))
    if problem.options.planner != BEST and (
        others is not None or not limited or _solve_quickly(_with_memory(problem, None)) is None
    ):
        return _no_plan_of_planner(problem, others)
    if limited and not any(config.schedule in SEARCHED for config in problem.configs):
        return _no_plan_of_schedule(problem)
    if tightest is None or not limited:
        return InfeasibleError(_none_left(problem), _leave_out(problem))
    space = problem.space
    names, cut_points = space.chain.names, space.table(space.chain.sizes[0]).cut_points
    first, last = names[cut_points[tightest.start]], names[cut_points[tightest.end] - 1]
    limit = smallest_limit(problem)
    missing, searched, own_room = tightest.memory_bytes - limit, _of_searched(problem), room(problem)
    if missing <= 0 and _narrowing(problem.options):
        unlimited = is_small_problem(problem) and not _solve_quickly(_with_memory(problem, None))
        nor = ", nor was one found with more memory" if unlimited else ""
        what = f"no plan{searched} that the options allow fits into {own_room}{nor}; without them one does"
        return InfeasibleError(what, _leave_out(problem))
    if missing <= 0:
        return InfeasibleError(
            f"no plan{searched} was found that fits into {own_room}; there is one", "Give `time_limit` more."
        )
    terms = ", ".join(
        f"{name.replace('_', ' ')} {format_bytes(amount)}"
        for name, amount in tightest.ledger.items()
        if amount
    )
    shared = f", {tightest.replicas} replicas" if tightest.replicas > 1 else ""
    of_smallest = " on the smallest" if len(list_limits(problem)) > 1 else ""
    what = (
        f"no plan{searched} fits into {own_room}: {_least_of(tightest)}, stage {tightest.stage} "
        f"of {tightest.stages} ({first} to {last}{shared}; {_in_words(problem, tightest)}) needs "
        f"{format_bytes(tightest.memory_bytes)} ({terms}); {format_bytes(missing)} are missing{of_smallest}"
        f"{_with_balanced_stages(problem)}"
    )
    changes = _changes(problem, tightest)
    details = _details(tightest, limit, first, last) | {"would_fit": changes}
    return InfeasibleError(what, _hint(problem, changes), details)


def _is_too_small(problem: Problem) -> bool:
    """Return whether no plan fits into the memory without the options that leave plans out."""
    with suppress(UsageError):
        free = replace(problem, options=_without(problem, _narrowing(problem.options)))
        least = find_smallest_plan(free)
        return least is not None and least.memory_bytes > min(list_limits(free))
    return False


def _hint(problem: Problem, changes: list[str]) -> str:
    """What would fit; where nothing was found that would, what forbids it."""
    if changes:
        return "What would fit: " + "; or ".join(changes) + "."
    if not is_small_problem(problem):
        return "No single change that would fit was found; of so many devices not all were tried."
    if _narrowing(problem.options):
        return f"With more memory none was found either. {_leave_out(_with_memory(problem, None))}"
    return "No single change was found with which one would: profile the model in smaller layers."


def _least_of(tightest: TightestStage) -> str:
    """Of which plans the one that is named needs least."""
    return "at the least" if tightest.is_least else "at the least with as many replicas of every stage"


def _details(tightest: TightestStage, limit: int, first: str, last: str) -> dict[str, Any]:
    """Of the stage that is too large, as JSON says it."""
    return {
        "stage": {
            "number": tightest.stage,
            "stages": tightest.stages,
            "first_layer": first,
            "last_layer": last,
            "replicas": tightest.replicas,
            "memory_bytes": tightest.memory_bytes,
        },
        "ledger": dict(tightest.ledger),
        "limit_bytes": limit,
        "missing_bytes": tightest.memory_bytes - limit,
    }


def _of_searched(problem: Problem) -> str:
    """Says of which plans it is proven, where only some of others were tried."""
    if _in_any_order(problem):
        return " of one stage a device, in any order,"
    searched = [name for name in problem.schedules if name in SEARCHED]
    return f" of {' or '.join(searched)}" if problem.heuristic_schedules else ""


def _in_any_order(problem: Problem) -> bool:
    """Whether an order may hold one micro-batch at a time, which needs no less with the backward in two
    parts: where that may not recompute."""
    return problem.makes_orders and problem.options.recompute in ("auto", "never")


def _with_balanced_stages(problem: Problem) -> str:
    """What balanced plans of schedules that are not searched need at the least."""
    least = find_smallest_of_others(problem) if problem.heuristic_schedules else None
    return "" if least is None else f"; {least[1]} with balanced stages needs {format_bytes(least[0])}"


def _none_left(problem: Problem) -> str:
    if any(config.schedule in SEARCHED for config in problem.configs):
        return f"no plan{_of_searched(problem)} is allowed by these options, whatever the memory"
    names = ", ".join(problem.schedules)
    return f"no plan under {names} was found for these options, whatever the memory; not all were tried"


_FREE = PlanOptions()
_NARROWING = (
    *("pins", "cut_after", "keep_together", "max_stages", "use_all", "runtime", "micro_batches"),
    *("schedule", "recompute", "planner"),
)
"""Options that leave plans out."""


def _narrowing(options: PlanOptions) -> list[str]:
    """Those of the fields that leave plans out that are given."""
    return [field for field in _NARROWING if getattr(options, field) != getattr(_FREE, field)]


def _leave_out(problem: Problem) -> str:
    """Which of the fields that leave plans out to omit: any one that is enough, else all of them."""
    fields = _narrowing(problem.options)
    if fields and not is_small_problem(problem):
        return f"Leave out some of {', '.join(f'`{field}`' for field in fields)}."
    enough = [f"`{field}`" for field in fields if _solve_with(problem, _without(problem, [field]))]
    if enough:
        return f"Leave out {either(enough)}."
    if fields and _solve_with(problem, _without(problem, fields)):
        return f"Leave out all of {', '.join(f'`{field}`' for field in fields)}: none alone is enough."
    return NO_HELP


def _without(problem: Problem, fields: Iterable[str]) -> PlanOptions:
    """The options without these fields, with the same global batch."""
    free: dict[str, Any] = {field: getattr(_FREE, field) for field in fields}
    return replace(problem.options, mini_batch=problem.mini_batch, **free)


def _no_plan_of_planner(problem: Problem, others: ScoredPlan | None) -> InfeasibleError:
    """Of a named planner, which may know why; others may have a plan."""
    planner = problem.options.planner
    why = plan_with(find_planner(planner), problem)
    hint = "Nor is there any other plan: check the options."
    if _is_too_small(problem):
        hint = f"Omit `planner`.{TOO_SMALL}"
    if others is not None:
        hint = f"Without `planner` there is one: {run_in_words(others)}."
    return InfeasibleError(f"planner={planner!r}: {why}", hint)


def _no_plan_of_schedule(problem: Problem) -> InfeasibleError:
    """Of a schedule that is not searched. Memory is blamed only where there is a plan with more of it, or
    where it was not looked for."""
    unlimited = _with_memory(problem, None)
    if is_small_problem(problem) and _solve_quickly(unlimited) is None:
        hint = _leave_out(problem)
        if hint == NO_HELP:  # what is left needs more memory
            hint = f"{_leave_out(unlimited)}{TOO_SMALL}"
        return InfeasibleError(_none_left(unlimited), hint)
    changes = _other_runs(problem)
    if not changes and (enough := _enough_memory(problem)) is not None:
        changes = [enough]
    return InfeasibleError(
        f"no plan under {', '.join(problem.schedules)} was found that fits into {room(problem)}"
        f"{_with_balanced_stages(problem)}",
        _hint(problem, changes),
        {"would_fit": changes},
    )


def _in_words(problem: Problem, tightest: TightestStage) -> str:
    config = tightest.config
    mode = tightest.recompute.replace("_", " ")
    if _in_any_order(problem):
        sizes = f"{config.micro_batches} x {config.micro_batch_size}"
        return f"{sizes}, one micro-batch at a time, recompute {mode}"
    return f"{config.micro_batches} x {config.micro_batch_size}, {config.schedule}, recompute {mode}"


def _changes(problem: Problem, tightest: TightestStage) -> list[str]:
    """Single changes with which a plan was found, the cheapest for the user first."""
    changes = _other_runs(problem)
    changes += [f"optimizer={name!r}" for name in _lighter_optimizers(problem)]
    more = _more_gpus(problem, smallest_limit(problem))
    if more is not None:
        # Where no global batch is requested the global batch grows with the GPUs, and so may what a stage
        # holds.
        changes.append(f"gpus={more * problem.sharers} mini_batch={problem.mini_batch}")
    enough = _memory_text(tightest.memory_bytes)
    if _fits(problem, enough):
        changes.append(_memory_change(enough))
    elif not changes and (larger := _enough_memory(problem)) is not None:
        changes.append(larger)
    return changes


def _memory_text(size: float) -> str:
    """Format bytes with three digits, rounded up, in the largest unit that is not larger."""
    unit, factor = next((unit, factor) for unit, factor in _UNITS if size >= factor or factor == 1)
    value = size / factor
    decimals = 2 if value < 10 else 1 if value < 100 else 0
    return f"{ceil(value * 10**decimals) / 10**decimals:.{decimals}f}{unit}"


_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))


def _memory_change(memory: str) -> str:
    return f"memory={memory!r} a device"


def _fits(problem: Problem, memory: str) -> bool:
    """Whether a plan is found that fits into devices of so much memory."""
    return _solve_quickly(_with_memory(problem, parse_bytes(memory))) is not None


def _enough_memory(problem: Problem) -> str | None:
    """A memory with which a plan is found under all the options: what the plan without a limit needs, or
    less; None where none is found at all."""
    free = _solve_quickly(_with_memory(problem, None)) if is_small_problem(problem) else None
    if free is None:
        return None
    enough = _memory_text(max(stage.memory_bytes for stage in plan_stages(problem.space, free)))
    if not _fits(problem, enough):
        return None
    low = float(smallest_limit(problem))
    for _ in range(HALVINGS):
        middle = _memory_text((low + parse_bytes(enough)) / 2)
        if _fits(problem, middle):
            enough = middle
        else:
            low = float(parse_bytes(middle))
    return _memory_change(enough)


def _other_runs(problem: Problem) -> list[str]:
    """Fields that cost no more than time, the fastest first: one of them; where none is enough, all."""
    options, ways = problem.options, list[tuple[float, str]]()
    single: list[tuple[str, PlanOptions]] = [
        ("recompute='auto'", replace(options, recompute="auto")),
        ("micro_batches='auto'", replace(options, mini_batch=problem.mini_batch, micro_batches=None)),
        ("schedule='auto'", replace(options, schedule="auto")),
    ]
    with suppress(UsageError):  # the schedule, or ZeRO's stage, does not
        single.append((f"recompute={OFFLOAD!r}", replace(options, recompute=OFFLOAD)))
    for words, freed in single:
        if (plan := _solve_with(problem, freed)) is not None:
            ways.append((plan.step_seconds, f"{words} ({run_in_words(plan)})"))
    if ways:
        return [words for _, words in sorted(ways)]
    with suppress(UsageError):
        if (plan := _solve_with(problem, problem.freest.options)) is not None:
            return [f"{run_in_words(plan)} (leave `micro_batches`, `schedule` and `recompute` at auto)"]
    return []


def _lighter_optimizers(problem: Problem) -> Iterator[str]:
    """That keep less than the requested one, the heaviest first."""
    numbers, options = problem.precision.bytes, problem.options
    size = {name: optimizer.bytes_per_parameter(numbers) for name, optimizer in OPTIMIZERS.items()}
    for name in sorted(size, key=lambda name: -size[name]):
        if size[name] < size[options.optimizer] and _solve_with(problem, replace(options, optimizer=name)):
            yield name


def _solve_with(problem: Problem, options: PlanOptions) -> ScoredPlan | None:
    """The plan under other options, where there is one."""
    if options == problem.options:
        return None
    try:
        return _solve_quickly(replace(problem, options=options))
    except UsageError:
        return None  # there is nothing to search


def _solve_quickly(problem: Problem) -> ScoredPlan | None:
    """The plan that solving finds, in a short time."""
    short = replace(problem.options, time_limit=SECONDS)
    return find_best_plan(replace(problem, options=short), planners=()).best


def _with_memory(problem: Problem, size: float | None) -> Problem:
    """The same with devices of at least that memory; None: of any."""

    def more(own: float | None) -> int | None:
        return None if own is None or size is None else ceil(max(own, size))

    groups = tuple(
        group._replace(device=replace(group.device, memory_bytes=more(group.device.memory_bytes)))
        for group in problem.topology.groups
    )
    options = replace(problem.options, memory_limit=more(problem.options.memory_limit))
    return replace(problem, topology=replace(problem.topology, groups=groups), options=options)


def _more_gpus(problem: Problem, limit: int) -> int | None:
    """The fewest GPUs above those offered, at most four times as many, with which a plan fits: of more than
    `FEW_GPUS` by eighths of those offered."""
    fixed = replace(problem.options, mini_batch=problem.mini_batch)
    if len(problem.topology.kinds) > 1:
        return None
    most = min(4 * problem.gpus, problem.topology.capacity or 4 * problem.gpus)
    if problem.runtime is not None and problem.runtime.replicas == "none":
        most = min(most, len(problem.chain))  # more have no stage, and are refused
    step = 1 if problem.gpus <= FEW_GPUS else problem.gpus // 8
    for gpus in range(problem.gpus + step, most + 1, step):
        wider = replace(problem, topology=problem.topology.with_gpus(gpus), options=fixed)
        least = find_smallest_plan(wider, equal=True)
        if least is not None and least.memory_bytes <= limit and _solve_quickly(wider) is not None:
            return gpus
    return None
