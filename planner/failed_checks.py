"""The check that leaves a problem without any plan, whatever the memory: its values, and what helps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np

from ..cost_models.errors import InfeasibleError
from ..cost_models.quantities import format_count
from .pipeline_config import abbreviate
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
    config, measured = configs[0], problem.chain.sizes
    size = config.micro_batch_size
    fitting = [problem.mini_batch // own for own in measured if problem.mini_batch % own == 0]
    instead = f" or use micro_batches={fitting[0]}" if fitting else ""
    yield InfeasibleError(
        f"{format_count(config.micro_batches, 'micro-batch')} of {format_count(size, 'sample')} need size "
        f"{size}, but the profile measured only size{'s' if len(measured) > 1 else ''} "
        f"{abbreviate(measured)}",
        f"Profile with micro_batch_sizes={tuple(sorted({*measured, size}))!r}{instead}.",
    )


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
    choices = [
        max(counts)
        for config in problem.configs
        for counts in problem.replica_choices(config.micro_batch_size)
    ]
    if stages * max(choices, default=1) < gpus:
        most = max(choices, default=1)
        yield InfeasibleError(
            f"`use_all`: at most {format_count(stages, 'stage')} of {format_count(most, 'replica')} each use "
            f"{stages * most} of the {gpus} devices",
            f"Omit `use_all`, or use gpus={stages * most}.",
        )


_CHECKS: tuple[Callable[[Problem], Iterator[InfeasibleError]], ...] = (
    *(_check_sizes, _check_pins, _check_cuts, _check_trained, _check_all_used),
)


def _most_stages(problem: Problem) -> str:
    """What allows no more stages, with the number."""
    most = problem.stage_counts[-1]
    if most == problem.options.max_stages:
        return f"max_stages={most} allows no more"
    if most == problem.space.chain.max_stages:
        return f"the allowed cuts make at most {format_count(most, 'stage')}"
    return f"{format_count(problem.usable_gpus, 'device')} make at most {format_count(most, 'stage')}"
