"""Explanation of problems without a plan: the failed check, the tightest stage, and changes that help.

`smallest_plan` answers questions about memory. No search runs, and every named change was tried.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice, pairwise
from math import ceil, inf
from typing import Any

import numpy as np

from ..cost_models.errors import InfeasibleError, UsageError
from ..cost_models.optimizers import OPTIMIZERS
from ..cost_models.quantities import either, format_batch, format_bytes, format_count
from ..cost_models.runtime import OFFLOAD
from ..cost_models.schedules import find_schedule
from .batch_sizes import unmeasured_size
from .candidate import SEARCHED
from .joint_search import BEST, plan_with
from .plan_options import PlanOptions
from .planners import find_planner
from .problem import Problem
from .scoring import UNFIT, possible
from .smallest_plan import (
    SmallestPlan,
    fewest_devices,
    find_smallest_plan,
    fullest_bytes,
    leaves_plans_out,
    nothing_fits,
)

TOO_SMALL = " Memory is too small for that, too."
NO_HELP = "Omitting options does not help: check `mini_batch` and the machine."
MORE_GPUS = 4
"""Largest multiple of the problem's devices that is suggested."""
_FREE = PlanOptions()
_NARROWING = (
    *("pins", "cut_after", "keep_together", "max_stages", "use_all", "runtime", "micro_batches"),
    *("min_micro_batch",),
    *("schedule", "recompute", "planner"),
)
"""Options that exclude plans."""
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))


def no_plan_fits(problem: Problem) -> InfeasibleError:
    """Return the error for a problem without a plan.

    Args:
        problem: A problem that `nothing_fits` excludes, or whose search found no plan.

    Returns:
        The error with the failed check, or the tightest stage of the plan that needs the least memory.
        `details` holds the stage, its ledger, the limit and `would_fit`, the changes.
    """
    limits = sorted({problem.space.kinds_limit([kind]) for kind in problem.topology.kinds})
    error = next((error for check in _CHECKS for error in check(problem)), None)
    if error is not None:
        is_small = limits[0] < inf and not _fits(problem, _without(problem, _narrowing(problem.options)))
        return InfeasibleError(error.what, f"{error.hint}{TOO_SMALL if is_small else ''}")
    if problem.options.planner != BEST and (error := _no_plan_of_planner(problem)) is not None:
        return error
    smallest, blocks = find_smallest_plan(problem), problem.space.chain.max_stages
    has_parts = any(1 < find_schedule(name).default_virtual_stages <= blocks for name in problem.schedules)
    if limits[0] == inf or (smallest is None and not has_parts):
        return InfeasibleError("the options allow no plan, whatever the memory", _leave_out(problem))
    proven = nothing_fits(problem)
    sizes = [format_bytes(limit) for limit in limits if limit < inf]
    schedule = problem.options.schedule
    under = f" under {schedule}" if schedule == problem.schedules[0] else ""
    room = " to ".join(dict.fromkeys((sizes[0], sizes[-1])))
    what = f"no plan{under} {'fits' if proven else 'was found that fits'} into {room} a device"
    details, enough = dict[str, Any](), _enough_bytes(problem, smallest)
    if smallest is not None and smallest.memory_bytes > limits[0]:
        details = _tightest_stage(problem, smallest, int(limits[0]))
        one = "with one stage a device, " if has_parts else ""
        is_least = proven and not leaves_plans_out(problem)
        end = " on the smallest" if len(limits) > 1 else ""
        what = f"{what}: {one}{_tightest_words(smallest, details, is_least=is_least)}{end}"
    elif limits[0] < enough < inf:
        what = f"{what}: the smallest known plan needs {format_bytes(enough)}"
    changes = list(_changes(problem, enough))
    hint = f"What would fit: {'; or '.join(changes)}." if changes else _leave_out(problem)
    return InfeasibleError(what, hint, details | {"would_fit": changes})


def _tightest_stage(problem: Problem, smallest: SmallestPlan, limit: int) -> dict[str, Any]:
    """Return the tightest stage of the plan that needs the least memory, as JSON."""
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


def _tightest_words(smallest: SmallestPlan, details: dict[str, Any], *, is_least: bool) -> str:
    """Return that stage in words."""
    config, stage = smallest.proposal.config, details["stage"]
    recompute = smallest.stages[smallest.number].recompute.replace("_", " ")
    terms = (
        f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in details["ledger"].items() if size
    )
    replicas = f", {stage['replicas']} replicas" if stage["replicas"] > 1 else ""
    return (
        f"stage {stage['number']} of {stage['stages']} ({stage['first_layer']} to {stage['last_layer']}"
        f"{replicas}; {format_batch(config.micro_batches, config.micro_batch_size)}, {config.schedule}, "
        f"recompute {recompute}) "
        f"{'needs at least' if is_least else 'needs'} {format_bytes(stage['memory_bytes'])} "
        f"({', '.join(terms)}); {format_bytes(details['missing_bytes'])} are missing"
    )


def _no_plan_of_planner(problem: Problem) -> InfeasibleError | None:
    """Return the error of a named planner; None if memory is too small for any plan of any planner."""
    name = problem.options.planner
    why = str(plan_with(find_planner(name), problem))
    other_plans_fit = _fits(problem, replace(problem.options, planner=BEST))
    if not other_plans_fit and why.startswith(UNFIT):
        return None
    hint = "Omit `planner`: other plans fit." if other_plans_fit else f"Omit `planner`.{TOO_SMALL}"
    return InfeasibleError(f"planner={name!r}: {why}", hint)


def _changes(problem: Problem, enough: float) -> Iterator[str]:
    """Yield single changes with which a plan fits, cheapest for the user first.

    Args:
        problem: A problem without a plan.
        enough: Bytes per device with which a plan of the problem fits.
    """
    options = problem.options
    free: dict[str, Any] = {"mini_batch": problem.mini_batch, "micro_batches": None}
    runs: dict[str, dict[str, Any]] = {
        "recompute='auto'": {"recompute": "auto"},
        "micro_batches='auto'": free,
        "schedule='auto'": {"schedule": "auto"},
        f"recompute={OFFLOAD!r}": {"recompute": OFFLOAD},
    }
    together = "micro_batches='auto' schedule='auto' recompute='auto'"
    all_together = {together: {**free, "schedule": "auto", "recompute": "auto"}}
    sizes = {
        name: optimizer.bytes_per_parameter(problem.precision.bytes) for name, optimizer in OPTIMIZERS.items()
    }
    smaller = [
        name
        for name in sorted(sizes, key=lambda name: -sizes[name])
        if sizes[name] < sizes[options.optimizer]
    ]
    shards: dict[str, dict[str, Any]] = {
        f"zero={stage}": {"zero": stage} for stage in range(options.zero + 1, 4)
    }
    fitting = _fitting(problem, runs)
    yield from fitting or _fitting(problem, all_together)
    yield from _fitting(problem, {f"optimizer={name!r}": {"optimizer": name} for name in smaller})
    yield from islice(_fitting(problem, shards), 1)
    # The default global batch grows with the GPUs, and with it the memory of a stage, so it is fixed.
    if (gpus := _more_gpus(problem)) is not None:
        yield f"gpus={gpus * problem.sharers} mini_batch={problem.mini_batch}"
    if enough < inf:
        yield f"memory={_memory_text(enough)!r} a device"


def _fitting(problem: Problem, changes: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield the changes of options with which a plan fits."""
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
    """Return the fewest additional devices on which a plan fits, up to `MORE_GPUS` times as many."""
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
    """Return bytes per device with which a plan fits; inf if none is known.

    Plans of schedules that `find_smallest_plan` does not count, and plans with parts of equal bytes, are
    counted action by action.
    """
    if smallest is not None and smallest.is_counted:
        return smallest.memory_bytes
    from .other_schedules import propose_small_plans  # where the plan is not counted

    plans = (plan for plan in propose_small_plans(problem) if possible(problem.space, plan))
    return min((fullest_bytes(problem.space, plan) for plan in plans), default=inf)


def _memory_text(size: float) -> str:
    """Return bytes with three digits, rounded up, in the largest unit that is not larger."""
    unit, factor = next((unit, factor) for unit, factor in _UNITS if size >= factor or factor == 1)
    value = size / factor
    decimals = 2 if value < 10 else 1 if value < 100 else 0
    return f"{ceil(value * 10**decimals) / 10**decimals:.{decimals}f}{unit}"


def _narrowing(options: PlanOptions) -> list[str]:
    """Return the given options that exclude plans."""
    return [field for field in _NARROWING if getattr(options, field) != getattr(_FREE, field)]


def _without(problem: Problem, fields: Iterable[str]) -> PlanOptions:
    """Return the options without these fields and with the same global batch."""
    free: dict[str, Any] = {field: getattr(_FREE, field) for field in fields}
    return replace(problem.options, mini_batch=problem.mini_batch, **free)


def _leave_out(problem: Problem) -> str:
    """Return which of the given options to omit: each that is enough alone, else all of them."""
    fields = _narrowing(problem.options)
    enough = [f"`{field}`" for field in fields if _fits(problem, _without(problem, [field]))]
    if enough:
        return f"Omit {either(enough)}."
    if fields and _fits(problem, _without(problem, fields)):
        return f"Omit all of {', '.join(f'`{field}`' for field in fields)}: none alone is enough."
    return NO_HELP


def _check_sizes(problem: Problem) -> Iterator[InfeasibleError]:
    """Check that the profile has costs for some replica's share of a micro-batch."""
    configs = problem.configs
    if any(problem.replica_choices(config.micro_batch_size) for config in configs):
        return
    yield InfeasibleError(*unmeasured_size(problem.sized_chain, problem.mini_batch, configs[0].micro_batches))


def _check_schedules(problem: Problem) -> Iterator[InfeasibleError]:
    """Check that a schedule gets the devices, parts of the layers and micro-batches that it needs."""
    if any(name in SEARCHED for name in problem.schedules):
        return
    names, blocks = " or ".join(problem.schedules), problem.space.chain.max_stages
    parts = min(find_schedule(name).default_virtual_stages for name in problem.schedules)
    if parts > 1 and problem.stage_counts[-1] == 1:
        yield InfeasibleError(
            f"{names} needs two devices or more, and {_most_stages(problem)}", "Use schedule='auto'."
        )
    if parts > 1 and 2 * parts > blocks:
        yield InfeasibleError(
            f"{names} has {parts} parts of the layers per device, so two devices need {2 * parts} blocks "
            f"between cuts; the model has {blocks}",
            "Use schedule='auto', or profile with granularity='fine' for more layers.",
        )
    from .other_schedules import find_refusal  # most problems have no other schedules

    if (why := find_refusal(problem)) is not None:
        yield InfeasibleError(f"{names}: {why}", _working_numbers(problem))


def _working_numbers(problem: Problem) -> str:
    """Return the closest number of micro-batches with which the schedule runs on the most devices."""
    config, schedule = problem.configs[0], find_schedule(problem.schedules[0])
    number, size = config.micro_batches, config.micro_batch_size
    stages = min(problem.stage_counts[-1], problem.space.chain.max_stages // schedule.default_virtual_stages)
    for count in sorted(range(1, 2 * (number + stages) + 1), key=lambda count: abs(count - number)):
        with suppress(UsageError):
            schedule.program(stages, count)
            return f"Use micro_batches={count} mini_batch={count * size}, or schedule='auto'."
    return "Use schedule='auto'."


def _check_pins(problem: Problem) -> Iterator[InfeasibleError]:
    """Check that there are enough cuts before each pinned layer and between two, and enough stages."""
    cuts, names = problem.space.table(problem.chain.sizes[0]).cut_points, problem.chain.names
    last_layer, last_stage, most = 0, 0, problem.stage_counts[-1]
    previous = "the beginning"
    for layer, stage in sorted(problem.space.limits.pins):
        pin = f"pins={(names[layer], stage)!r}"
        if stage >= most:
            yield InfeasibleError(
                f"{pin}: it needs {stage + 1} stages, and {_most_stages(problem)}",
                f"Pin it to stage{most - 1} or an earlier one.",
            )
        number = sum(last_layer < cut <= layer for cut in cuts)
        if number < stage - last_stage:
            yield InfeasibleError(
                f"{pin}: stage {stage} needs {format_count(stage - last_stage, 'cut')} between {previous} "
                f"on stage {last_stage} and {names[layer]}, and {number or 'none'} can be made",
                f"Pin it to stage{last_stage + number}, or omit the pin.",
            )
        last_layer, last_stage, previous = layer, stage, names[layer]


def _check_cuts(problem: Problem) -> Iterator[InfeasibleError]:
    """Check that there are enough stages for the required cuts."""
    number, most = len(problem.space.limits.must_cut), problem.stage_counts[-1]
    if number + 1 > most:
        yield InfeasibleError(
            f"`cut_after` names {format_count(number, 'layer')}, which makes {number + 1} stages, and "
            f"{_most_stages(problem)}",
            f"Name at most {format_count(most - 1, 'layer')}." if most > 1 else "Omit `cut_after`.",
        )


def _check_trained(problem: Problem) -> Iterator[InfeasibleError]:
    """Check that every stage has weights to train, if the runtime requires that."""
    runtime, chain = problem.runtime, problem.chain
    if runtime is None or not runtime.trains_every_stage:
        return
    limits = problem.space.limits
    edges = sorted({0, len(chain), *(layer + 1 for layer in limits.must_cut)})
    runs = list(pairwise(edges)) + [(0, layer) for layer, stage in limits.pins if stage > 0]
    for first, end in runs:
        if not np.any(chain.trainable_bytes[first:end] > 0):
            yield InfeasibleError(
                f"runtime={runtime.name!r}: it trains every stage, and {chain.name_range(first, end)} "
                f"{'has' if end - first == 1 else 'have'} no trainable weights (0 trainable bytes)",
                "Cut after a layer with trainable weights, or use runtime='torch'.",
            )


def _check_all_used(problem: Problem) -> Iterator[InfeasibleError]:
    """Check that stages and replicas can add up to all devices, if all must be used."""
    if not problem.options.use_all:
        return
    gpus, stages = problem.usable_gpus, problem.stage_counts[-1]
    choices = {
        counts for config in problem.configs for counts in problem.replica_choices(config.micro_batch_size)
    }
    totals = set[int]().union(*(_device_totals(counts, stages, gpus) for counts in choices))
    if gpus in totals:
        return
    most, enough = max(map(max, choices), default=1), max(totals, default=1)
    uses = f"at most {format_count(stages, 'stage')} of {format_count(most, 'replica')} each use {enough}"
    if stages * most >= gpus:
        uses = f"no stages and replicas that the micro-batches allow use more than {enough}"
    yield InfeasibleError(
        f"`use_all`: {uses} of the {gpus} devices", f"Omit `use_all`, or use gpus={enough}."
    )


def _device_totals(counts: Sequence[int], stages: int, most: int) -> set[int]:
    """Return the numbers of devices, up to `most`, that at most `stages` stages can take in all."""
    totals = latest = {0}
    for _ in range(stages):
        latest = {total + count for total in latest for count in counts if total + count <= most} - totals
        totals = totals | latest
        if not latest:
            break
    return totals - {0}


_CHECKS = (_check_sizes, _check_schedules, _check_pins, _check_cuts, _check_trained, _check_all_used)


def _most_stages(problem: Problem) -> str:
    """Return the limit on the number of stages in words, with its value."""
    most = problem.stage_counts[-1]
    if most == problem.options.max_stages:
        return f"max_stages={most} allows no more"
    if most == problem.space.chain.max_stages:
        stages = format_count(most, "stage")
        return f"the allowed cuts make at most {stages} (a profile with granularity='fine' may have more)"
    makes = "makes" if problem.usable_gpus == 1 else "make"
    return f"{format_count(problem.usable_gpus, 'device')} {makes} at most {format_count(most, 'stage')}"
