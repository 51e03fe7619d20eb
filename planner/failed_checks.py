"""The check that leaves a problem without any plan, whatever the memory: its values, and what helps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise

import numpy as np

from ..cost_models.errors import InfeasibleError, UsageError
from ..cost_models.quantities import format_count
from ..cost_models.schedules import find_schedule
from .batch_sizes import unmeasured_size
from .candidate import SEARCHED
from .other_schedules import find_refusal
from .problem import Problem


def find_failed_check(problem: Problem) -> InfeasibleError | None:
    """The error of the first check that no plan of the problem passes; None where each is passed by some."""
    errors = (error for check in _CHECKS for error in check(problem))
    return next(errors, None)


def _check_sizes(problem: Problem) -> Iterator[InfeasibleError]:
    """The profile holds some replica's share of a micro-batch."""
    configs = problem.configs
    if any(problem.replica_choices(config.micro_batch_size) for config in configs):
        return
    yield InfeasibleError(*unmeasured_size(problem.chain, problem.mini_batch, configs[0].micro_batches))


def _check_schedules(problem: Problem) -> Iterator[InfeasibleError]:
    """A schedule has as many devices, parts of the layers and micro-batches as it needs."""
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
            f"{names} has {parts} parts of the layers on each device: two devices need {2 * parts} blocks "
            f"between cuts, and there are {blocks}",
            "Use schedule='auto', or profile the model in smaller layers.",
        )
    if (why := find_refusal(problem)) is not None:
        yield InfeasibleError(f"{names}: {why}", _working_numbers(problem))


def _working_numbers(problem: Problem) -> str:
    """The number of micro-batches next to the requested one that the schedule runs with on most devices."""
    config, schedule = problem.configs[0], find_schedule(problem.schedules[0])
    number, size = config.micro_batches, config.micro_batch_size
    stages = min(problem.stage_counts[-1], problem.space.chain.max_stages // schedule.default_virtual_stages)
    for count in sorted(range(1, 2 * (number + stages) + 1), key=lambda count: abs(count - number)):
        with suppress(UsageError):
            schedule.program(stages, count)
            return f"Use micro_batches={count} mini_batch={count * size}, or schedule='auto'."
    return "Use schedule='auto'."


def _check_pins(problem: Problem) -> Iterator[InfeasibleError]:
    """Enough cuts lie before each pinned layer, and between two of them, and there are stages enough."""
    cuts, names = problem.space.table(problem.chain.sizes[0]).cut_points, problem.chain.names
    before, stage_before, most = 0, 0, problem.stage_counts[-1]
    previous = "the beginning"
    for layer, stage in sorted(problem.space.limits.pins):
        pin = f"pins={(names[layer], stage)!r}"
        if stage >= most:
            yield InfeasibleError(
                f"{pin}: it needs {stage + 1} stages, and {_most_stages(problem)}",
                f"Pin it to stage{most - 1} or an earlier one.",
            )
        number = sum(before < cut <= layer for cut in cuts)
        if number < stage - stage_before:
            yield InfeasibleError(
                f"{pin}: stage {stage} needs {format_count(stage - stage_before, 'cut')} between {previous} "
                f"on stage {stage_before} and {names[layer]}, and {number or 'none'} can be made",
                f"Pin it to stage{stage_before + number}, or omit the pin.",
            )
        before, stage_before, previous = layer, stage, names[layer]


def _check_cuts(problem: Problem) -> Iterator[InfeasibleError]:
    """There are stages enough for the cuts that are asked for."""
    number, most = len(problem.space.limits.must_cut), problem.stage_counts[-1]
    if number + 1 > most:
        yield InfeasibleError(
            f"`cut_after` names {format_count(number, 'layer')}, which makes {number + 1} stages, and "
            f"{_most_stages(problem)}",
            f"Name at most {format_count(most - 1, 'layer')}." if most > 1 else "Omit `cut_after`.",
        )


def _check_trained(problem: Problem) -> Iterator[InfeasibleError]:
    """Every stage has something to train, where the runtime asks that."""
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
                f"{'has' if end - first == 1 else 'have'} no weights that are trained (0 trainable bytes)",
                "Cut behind a layer that is trained, or use another runtime: runtime='torch'.",
            )


def _check_all_used(problem: Problem) -> Iterator[InfeasibleError]:
    """Stages and their replicas can be as many as the devices, where all are to be used."""
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
    """Numbers of devices, up to `most`, of up to so many stages with these numbers of replicas."""
    totals = latest = {0}
    for _ in range(stages):
        latest = {total + count for total in latest for count in counts if total + count <= most} - totals
        totals = totals | latest
        if not latest:
            break
    return totals - {0}


_CHECKS: tuple[Callable[[Problem], Iterator[InfeasibleError]], ...] = (
    *(_check_sizes, _check_schedules, _check_pins, _check_cuts, _check_trained, _check_all_used),
)


def _most_stages(problem: Problem) -> str:
    """Name the limit on the number of stages, with its value."""
    most = problem.stage_counts[-1]
    if most == problem.options.max_stages:
        return f"max_stages={most} allows no more"
    if most == problem.space.chain.max_stages:
        return f"the allowed cuts make at most {format_count(most, 'stage')}"
    makes = "makes" if problem.usable_gpus == 1 else "make"
    return f"{format_count(problem.usable_gpus, 'device')} {makes} at most {format_count(most, 'stage')}"
