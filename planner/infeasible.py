"""Problems without a plan: the check that failed, the tightest stage, and the changes that make a plan fit.

Memory answers, by `smallest_plan`. No search runs, and every change that is named was tried.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from math import ceil, inf
from typing import Any

from ..cost_models.errors import InfeasibleError, UsageError
from ..cost_models.optimizers import OPTIMIZERS
from ..cost_models.quantities import either, format_bytes
from ..cost_models.runtime import OFFLOAD
from .joint_search import BEST, plan_with
from .plan_options import PlanOptions
from .planners import find_planner
from .problem import Problem
from .scoring import possible
from .smallest_plan import (
    SmallestPlan,
    fewest_devices,
    find_smallest_plan,
    fullest_bytes,
    least_in_parts,
    nothing_fits,
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


def no_plan_fits(problem: Problem) -> InfeasibleError:
    """Make the error for a problem without a plan.

    Args:
        problem: A problem that `nothing_fits` rules out, or whose search found no plan.

    Returns:
        The error with the failed check, or the tightest stage of the plan that needs the least memory.
        `details` holds the stage, its ledger, the limit and `would_fit`, the changes.
    """
    from .failed_checks import find_failed_check  # most problems have a plan

    limits = sorted({problem.space.kinds_limit([kind]) for kind in problem.topology.kinds})
    if (error := find_failed_check(problem)) is not None:
        is_small = limits[0] < inf and not _fits(problem, _without(problem, _narrowing(problem.options)))
        return InfeasibleError(error.what, f"{error.hint}{TOO_SMALL if is_small else ''}")
    if problem.options.planner != BEST and (error := _no_plan_of_planner(problem)) is not None:
        return error
    smallest, in_parts = find_smallest_plan(problem), least_in_parts(problem)
    if limits[0] == inf or (smallest is None and in_parts == inf):
        return InfeasibleError("the options allow no plan, whatever the memory", _leave_out(problem))
    proven = nothing_fits(problem)
    sizes = [format_bytes(limit) for limit in limits if limit < inf]
    schedule = problem.options.schedule
    under = f" under {schedule}" if schedule == problem.schedules[0] else ""
    room = " to ".join(dict.fromkeys((sizes[0], sizes[-1])))
    what = f"no plan{under} {'fits' if proven else 'was found that fits'} into {room} a device"
    details: dict[str, Any] = {}
    if smallest is not None and smallest.memory_bytes > limits[0]:
        details = _tightest_stage(problem, smallest, int(limits[0]))
        one = "with one stage a device, " if in_parts < inf else ""
        end = " on the smallest" if len(limits) > 1 else ""
        what = f"{what}: {one}{_tightest_words(smallest, details, proven=proven)}{end}"
    elif proven:
        what = f"{what}: some device needs at least {format_bytes(in_parts)}"
    changes = list(_changes(problem, smallest))
    hint = f"What would fit: {'; or '.join(changes)}." if changes else _leave_out(problem)
    return InfeasibleError(what, hint, details | {"would_fit": changes})


def _tightest_stage(problem: Problem, smallest: SmallestPlan, limit: int) -> dict[str, Any]:
    """Describe the tightest stage of the plan that needs the least memory, as JSON holds it."""
    stage = smallest.stages[smallest.number]
    first, end = smallest.proposal.bounds[smallest.number]
    return {
        "stage": {
            "number": smallest.number,
            "stages": len(smallest.stages),
            "first_layer": problem.chain.names[first],
            "last_layer": problem.chain.names[end - 1],
            "replicas": stage.replicas,
            "memory_bytes": stage.memory_bytes,
        },
        "ledger": dict(stage.ledger),
        "limit_bytes": limit,
        "missing_bytes": stage.memory_bytes - limit,
    }


def _tightest_words(smallest: SmallestPlan, details: dict[str, Any], *, proven: bool) -> str:
    """Describe that stage in words."""
    config, stage = smallest.proposal.config, details["stage"]
    recompute = smallest.stages[smallest.number].recompute.replace("_", " ")
    terms = (
        f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in details["ledger"].items() if size
    )
    replicas = f", {stage['replicas']} replicas" if stage["replicas"] > 1 else ""
    return (
        f"stage {stage['number']} of {stage['stages']} ({stage['first_layer']} to {stage['last_layer']}"
        f"{replicas}; {config.micro_batches} x {config.micro_batch_size}, {config.schedule}, "
        f"recompute {recompute}) "
        f"{'needs at least' if proven else 'needs'} {format_bytes(stage['memory_bytes'])} "
        f"({', '.join(terms)}); {format_bytes(details['missing_bytes'])} are missing"
    )


def _no_plan_of_planner(problem: Problem) -> InfeasibleError | None:
    """Make the error of a named planner; None if memory is too small for any plan of any planner."""
    name = problem.options.planner
    why = str(plan_with(find_planner(name), problem))
    others = _fits(problem, replace(problem.options, planner=BEST))
    if not others and why.startswith(UNFIT):
        return None
    hint = "Omit `planner`: other plans fit." if others else f"Omit `planner`.{TOO_SMALL}"
    return InfeasibleError(f"planner={name!r}: {why}", hint)


def _changes(problem: Problem, smallest: SmallestPlan | None) -> Iterator[str]:
    """List single changes with which a plan fits, the cheapest for the user first."""
    options = problem.options
    free: dict[str, Any] = {"mini_batch": problem.mini_batch, "micro_batches": None}
    runs: dict[str, dict[str, Any]] = {
        "recompute='auto'": {"recompute": "auto"},
        "micro_batches='auto'": free,
        "schedule='auto'": {"schedule": "auto"},
        f"recompute={OFFLOAD!r}": {"recompute": OFFLOAD},
    }
    together = "micro_batches='auto' schedule='auto' recompute='auto'"
    every = {together: {**free, "schedule": "auto", "recompute": "auto"}}
    sizes = {name: own.bytes_per_parameter(problem.precision.bytes) for name, own in OPTIMIZERS.items()}
    smaller = [
        name
        for name in sorted(sizes, key=lambda name: -sizes[name])
        if sizes[name] < sizes[options.optimizer]
    ]
    shards: dict[str, dict[str, Any]] = {
        f"zero={stage}": {"zero": stage} for stage in range(options.zero + 1, 4)
    }
    fitting = _fitting(problem, runs)
    yield from fitting or _fitting(problem, every)
    yield from _fitting(problem, {f"optimizer={name!r}": {"optimizer": name} for name in smaller})
    yield from islice(_fitting(problem, shards), 1)
    # Without a requested global batch it would grow with the GPUs, and with it what a stage holds.
    if (gpus := _more_gpus(problem)) is not None:
        yield f"gpus={gpus * problem.sharers} mini_batch={problem.mini_batch}"
    if (enough := _enough_bytes(problem, smallest)) < inf:
        yield f"memory={_memory_text(enough)!r} a device"


def _fitting(problem: Problem, changes: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """List the changes of options with which a plan fits."""
    for words, changed in changes.items():
        with suppress(UsageError):
            if _fits(problem, replace(problem.options, **changed)):
                yield words


def _fits(problem: Problem, options: PlanOptions) -> bool:
    """Return whether a plan is known that fits into the smallest device under other options."""
    with suppress(UsageError):
        changed = replace(problem, options=options)
        return options != problem.options and fewest_devices(changed) <= changed.usable_gpus
    return False


def _more_gpus(problem: Problem) -> int | None:
    """Return the fewest devices above those offered on which a plan fits, up to `MORE_GPUS` times as many."""
    topology = problem.topology
    most = min(MORE_GPUS * problem.gpus, topology.capacity or MORE_GPUS * problem.gpus)
    if problem.runtime is not None and problem.runtime.replicas == "none":
        most = min(most, len(problem.chain))  # more have no stage, and are refused
    if len(topology.kinds) > 1 or most <= problem.gpus:
        return None
    options = replace(problem.options, mini_batch=problem.mini_batch)
    with suppress(UsageError):
        fewest, number = float(most), 0
        while number != fewest < inf:  # with fewer devices other micro-batches may be possible
            number = int(fewest)
            fewest = fewest_devices(replace(problem, topology=topology.with_gpus(number), options=options))
        return number if problem.gpus < number == fewest else None
    return None


def _enough_bytes(problem: Problem, smallest: SmallestPlan | None) -> float:
    """Return bytes a device with which a plan fits; inf if none is known.

    Plans of schedules that `find_smallest_plan` does not count, and plans with parts of equal bytes, are
    counted by action.
    """
    if smallest is not None and smallest.is_counted:
        return smallest.memory_bytes
    from .other_schedules import propose_small_plans  # where the plan is not counted

    plans = (plan for plan in propose_small_plans(problem) if possible(problem.space, plan))
    return min((fullest_bytes(problem.space, plan) for plan in plans), default=inf)


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
    enough = [f"`{field}`" for field in fields if _fits(problem, _without(problem, [field]))]
    if enough:
        return f"Omit {either(enough)}."
    if fields and _fits(problem, _without(problem, fields)):
        return f"Omit all of {', '.join(f'`{field}`' for field in fields)}: none alone is enough."
    return NO_HELP
