"""Plans for which a bound holds, and their description in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from ..cost_models.quantities import format_count
from ..cost_models.runtime import OFFLOAD
from .batch_sizes import divisors
from .candidate import (
    FIRST_LAYERS,
    MODES,
    SEARCHED,
    SEVERAL_PARTS,
    VIRTUAL_STAGES,
    Proposal,
    abbreviate,
)
from .problem import Problem
from .search.branch_and_bound import SearchResult, is_large
from .search.device_classes import Shape, Symmetry
from .search.family import Family
from .search.placements import ANY

if TYPE_CHECKING:
    from .problem import Problem


MOST_SHAPES = 64
"""Most choices of devices that are listed for an order, to find those of a plan."""


def is_searched(problem: Problem, proposal: Proposal) -> bool:
    """Return whether the search covers a plan, so that its bound holds for it.

    The search covers a schedule, micro-batches, numbers of stages and replicas, and stages on consecutive
    devices of one of the orders, or on any devices. The bound of a large problem covers any devices.
    """
    if is_large(problem.space, problem.families):
        return _is_bounded(problem, proposal)
    return any(
        family.placement.name == ANY or proposal.devices in _list_runs(family, proposal.replicas)
        for family in _families(problem, proposal)
    )


def _is_bounded(problem: Problem, proposal: Proposal) -> bool:
    """Return whether the bound of a large problem covers a plan."""
    deep = problem.may_be_deeper and len(proposal.ends) > problem.stage_counts[-1]
    return (deep or len(proposal.ends) in problem.stage_counts) and any(
        family.config == proposal.config
        and (family.any_count or set(proposal.replicas) <= set(family.replicas))
        for family in problem.families
    )


def to_searched_devices(problem: Problem, proposal: Proposal) -> Proposal:
    """Return the same plan on equivalent devices that the search covers, if there are some."""
    if problem.gpus == 1 or is_searched(problem, proposal):
        return proposal
    symmetry = Symmetry(problem.topology)
    target = symmetry.key(proposal.devices)
    for family in _families(problem, proposal):
        for shape in _list_runs(family, proposal.replicas):
            if symmetry.key(shape) == target:
                return replace(proposal, devices=shape)
    return proposal


def _families(problem: Problem, proposal: Proposal) -> list[Family]:
    """Return the families with the plan's configuration, number of stages and numbers of replicas."""
    config, counts = proposal.config, set(proposal.replicas)
    if config.schedule not in SEARCHED or len(proposal.ends) not in problem.stage_counts:
        return []
    return [
        family for family in problem.families if family.config == config and counts <= set(family.replicas)
    ]


def _list_runs(family: Family, counts: Sequence[int]) -> list[Shape]:
    """Return the searched devices for stages with these replicas, in one order."""
    return list(islice(_runs(family, counts), MOST_SHAPES))


def _runs(family: Family, counts: Sequence[int], position: int = 0) -> Iterator[Shape]:
    """Yield the stages' devices from a position in the order on."""
    ranks = family.placement.ranks
    if not counts:
        if not family.on_all or position == len(ranks):
            yield ()
        return
    begins = (position,) if family.on_all else family.placement.starts_after(position)
    for begin in begins:
        end = begin + counts[0]
        if end <= len(ranks):
            for later in _runs(family, counts[1:], end):
                yield (ranks[begin:end], *later)


def describe_coverage(problem: Problem, result: SearchResult) -> str:
    """Describe the plans for which the bound of an answer holds."""
    if result.universal:
        return _any_plan(problem, problem.allowed_schedules)
    words = describe_exact_search(problem, relaxed=is_large(problem.space, problem.families))
    if others := problem.heuristic_schedules:
        return f"{words}; and {_any_plan(problem, others)}"
    return words


def _any_plan(problem: Problem, schedules: tuple[str, ...]) -> str:
    """Describe all plans of some schedules."""
    if problem.makes_orders:
        schedules = ("any synchronous order of actions, each layer on one stage,",)
    what = f"any {_and(_left_free(problem))}"
    if not problem.makes_orders and set(SEVERAL_PARTS).intersection(schedules):
        several = f"{VIRTUAL_STAGES[0]} to {VIRTUAL_STAGES[-1]} virtual stages where there are several"
        what += f", {several}, on two devices or more"
    order = "" if problem.gpus == 1 else ", any order of the devices"
    limits = "".join(f", {limit}" for limit in _list_limits(problem))
    return f"all plans of {_and(schedules)} with {describe_micro_batches(problem)}: {what}{order}{limits}"


def _and(words: Sequence[str]) -> str:
    """Join words: `cuts, replicas and recomputation`."""
    return ", ".join(words[:-1]) + " and " + words[-1] if len(words) > 1 else words[0]


def _left_free(problem: Problem) -> list[str]:
    """Return what the options leave to the search, for a plan of any schedule."""
    replicas = problem.gpus > 1 and problem.runtime is None
    recompute = problem.options.recompute == "auto"
    return ["cuts", *(["replicas"] if replicas else []), *(["recomputation"] if recompute else [])]


def _list_limits(problem: Problem) -> Iterator[str]:
    """Yield the requirements of options and runtime on a plan of any schedule."""
    options, runtime = problem.options, problem.runtime
    if options.recompute != "auto":
        yield f"recompute {_describe_mode(options.recompute)}"
    if runtime is not None and problem.gpus > 1:
        yield "a device a stage" if runtime.replicas == "none" else "equal replicas"
    if options.max_stages is not None:
        yield "1 stage" if options.max_stages == 1 else f"at most {options.max_stages} stages"
    if options.min_micro_batch is not None:
        yield f"at least {format_count(options.min_micro_batch, 'sample')} of a micro-batch on each replica"
    yield from _list_other_limits(problem)


def _list_other_limits(problem: Problem) -> Iterator[str]:
    """Yield the requirements on devices, cuts and layers that stay together."""
    if problem.options.use_all:
        yield "on all devices"
    if cuts := _describe_cuts(problem):
        yield f"under {cuts}"
    if problem.untied_reason:
        names = " and ".join(weight.name for weight in problem.chain.tied[:2])
        more = f" and {len(problem.chain.tied) - 2} more" if len(problem.chain.tied) > 2 else ""
        yield f"the layers that share {names}{more} on one stage ({problem.untied_reason})"


def describe_search(problem: Problem) -> str:
    """Describe the searched space, and the plans that are proposed without a search."""
    if problem.makes_orders:
        names = ", ".join(problem.heuristic_schedules)
        return f"{describe_exact_search(problem)}; {names} and orders of their own: heuristic only"
    names = ", ".join(problem.heuristic_schedules)
    return describe_exact_search(problem) + (f"; {names}: cuts of their own" if names else "")


def describe_exact_search(problem: Problem, *, relaxed: bool = False) -> str:
    """Describe the searched space.

    Args:
        problem: What is asked.
        relaxed: Whether the proof of a large problem also covers every number of stages and replicas and any
            order of the devices.
    """
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
        _describe_devices(problem, any_order=relaxed) if exactly else "",
        *_list_other_limits(problem),
    ]
    return ", ".join(part for part in parts if part)


def describe_micro_batches(problem: Problem) -> str:
    """Describe the numbers of micro-batches."""
    counts = sorted({config.micro_batches for config in problem.configs})
    between = [count for count in divisors(problem.mini_batch) if counts[0] <= count <= counts[-1]]
    if len(counts) > 2 and counts == between:
        return f"{counts[0]} to {counts[-1]} equal micro-batches"
    return "1 micro-batch" if counts == [1] else f"{abbreviate(counts)} micro-batches"


def _describe_devices(problem: Problem, *, any_order: bool) -> str:
    """Describe the devices that the stages take; empty without a choice."""
    if any_order and problem.gpus > 1:
        return "any order of the devices"
    return "any devices for each stage" if problem.any_devices else describe_order(problem)


def describe_order(problem: Problem) -> str:
    """Describe the searched orders of the devices; empty without a choice."""
    if problem.gpus == 1:
        return ""
    orders = " or ".join(dict.fromkeys(placement.in_words for placement in problem.placements))
    return f"consecutive devices {orders}"


def _describe_cuts(problem: Problem) -> str:
    """Return the fields of the options that restrict the cuts."""
    options = problem.options
    fields = {
        "cut_after": options.cut_after,
        "keep_together": options.keep_together,
        "pins": options.pins,
    }
    return " and ".join(f"`{field}`" for field, value in fields.items() if value)


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
    return f"1 to {most} replicas each" if len(counts) == most else f"{abbreviate(counts)} replicas each"


def _describe_mode(mode: str) -> str:
    words: dict[str, str] = {
        "by_stage": "if out of memory",
        FIRST_LAYERS: "as few first layers as a stage must",
        OFFLOAD: "or offload to the host if out of memory",
    }
    return words.get(mode) or mode.replace("_", " ")
