"""The searched space of a problem, in words: what the answer and its proof say that they are about."""

from __future__ import annotations

from .pipeline_config import MODES, SEARCHED, Mode, some
from .problem import Problem, divisors


def describe_search(problem: Problem) -> str:
    """The searched space in words, and what is proposed besides."""
    names = ", ".join(problem.unsearched)
    return describe_exact_search(problem) + (f"; {names}: heuristic only" if names else "")


def describe_exact_search(problem: Problem, *, relaxed: bool = False) -> str:
    """The searched space in words; `relaxed`: with what a large problem's proof has besides, every number
    of stages and of replicas and any order of the devices."""
    most = problem.stage_counts[-1]
    exactly = [name for name in problem.schedules if name in SEARCHED]
    modes = {config.recompute for config in problem.configs if config.schedule in exactly or not exactly}
    stages = "1 stage" if most == 1 else f"1 to {most} stages"
    parts = [
        "any number of stages" if relaxed and problem.may_be_deeper else stages,
        _describe_replicas(problem, any_count=relaxed and problem.any_count),
        " or ".join(exactly),
        f"recompute {' or '.join(_describe_mode(mode) for mode in MODES if mode in modes)}",
        describe_micro_batches(problem),
        describe_order(problem, any_order=relaxed) if exactly else "",
    ]
    if problem.options.use_all:
        parts.append("on all devices")
    if cuts := _describe_cuts(problem):
        parts.append(f"under {cuts}")
    if problem.untied_reason:
        names = " and ".join(own.name for own in problem.chain.tied[:2])
        more = f" and {len(problem.chain.tied) - 2} more" if len(problem.chain.tied) > 2 else ""
        parts.append(f"the layers that share {names}{more} on one stage ({problem.untied_reason})")
    return ", ".join(part for part in parts if part)


def describe_micro_batches(problem: Problem) -> str:
    """How many there may be."""
    counts = sorted({config.micro_batches for config in problem.configs})
    between = [count for count in divisors(problem.mini_batch) if counts[0] <= count <= counts[-1]]
    if len(counts) > 2 and counts == between:
        return f"{counts[0]} to {counts[-1]} equal micro-batches"
    return "1 micro-batch" if counts == [1] else f"{some(counts)} micro-batches"


def describe_order(problem: Problem, *, any_order: bool = False) -> str:
    """Which devices the stages take; nothing where there is no choice."""
    if problem.gpus == 1:
        return ""
    if any_order:
        return "any order of the devices"
    orders = " or ".join(dict.fromkeys(placement.in_words for placement in problem.placements))
    return f"consecutive devices {orders}"


def _describe_cuts(problem: Problem) -> str:
    """The fields given that say where stages end."""
    options = problem.options
    given = {
        "cut_after": options.cut_after,
        "keep_together": options.keep_together,
        "pins": options.pins,
    }
    return " and ".join(f"`{field}`" for field, value in given.items() if value)


def _describe_replicas(problem: Problem, *, any_count: bool) -> str:
    runtime = problem.runtime
    if problem.gpus == 1 or (runtime is not None and runtime.replicas == "none"):
        return ""
    if any_count:
        return "any number of replicas"
    if runtime is not None:
        return "equal replicas"
    counts = problem.replica_sets[0]
    most = counts[-1]
    return f"1 to {most} replicas each" if len(counts) == most else f"{some(counts)} replicas each"


def _describe_mode(mode: Mode) -> str:
    return "if out of memory" if mode == "by_stage" else mode.replace("_", " ")
