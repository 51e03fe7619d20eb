"""Which plans a bound speaks of: those that are searched, or all that there can be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from .candidate import Proposal
from .pipeline_config import SEARCHED
from .search.branch_and_bound import SearchResult
from .search.coarse import is_large
from .search.subproblem import Family
from .symmetry import Shape, Symmetry

if TYPE_CHECKING:
    from .problem import Problem
from .space_description import describe_exact_search, describe_micro_batches

MOST_SHAPES = 64
"""Choices of devices in an order that a plan's are compared with."""


def is_searched(problem: Problem, proposal: Proposal) -> bool:
    """Whether a plan is one of those that the search looks at: its schedule, micro-batches, number of stages
    and of replicas, and its stages on consecutive devices of one of the orders."""
    return any(proposal.devices in shapes for shapes in _shapes(problem, proposal))


def as_searched(problem: Problem, proposal: Proposal) -> Proposal:
    """The same plan on devices that are alike, of those that the search looks at; else as it is."""
    if problem.gpus == 1 or is_searched(problem, proposal):
        return proposal
    symmetry = Symmetry(problem.topology)
    own = symmetry.key(proposal.devices)
    for shapes in _shapes(problem, proposal):
        for shape in shapes:
            if symmetry.key(shape) == own:
                return replace(proposal, devices=shape)
    return proposal


def _shapes(problem: Problem, proposal: Proposal) -> Iterator[list[Shape]]:
    """By order of the devices, those that are searched for stages of as many replicas."""
    config, counts = proposal.config, proposal.replicas
    if config.schedule not in SEARCHED or len(proposal.ends) not in problem.stage_counts:
        return
    for family in problem.families:
        if family.config == config and set(counts) <= set(family.replicas):
            yield list(islice(_runs(family, counts), MOST_SHAPES))


def _runs(family: Family, counts: Sequence[int], position: int = 0) -> Iterator[Shape]:
    """The stages' devices from a position in the order on."""
    ranks = family.placement.ranks
    if not counts:
        if not family.on_all or position == len(ranks):
            yield ()
        return
    begins = (position,) if family.on_all else family.placement.starts[position]
    for begin in begins:
        end = begin + counts[0]
        if end <= len(ranks):
            for later in _runs(family, counts[1:], end):
                yield (ranks[begin:end], *later)


def covered(problem: Problem, found: SearchResult) -> str:
    """The plans that the bound of an answer holds for, in words."""
    if found.universal:
        return _any_plan(problem, problem.proposable)
    words = describe_exact_search(problem, relaxed=is_large(problem.space, problem.families))
    if others := problem.unsearched:
        return f"{words}; and {_any_plan(problem, others)}"
    return words


def _any_plan(problem: Problem, schedules: tuple[str, ...]) -> str:
    names = ", ".join(schedules[:-1]) + " and " + schedules[-1] if len(schedules) > 1 else schedules[0]
    what = "any cuts and recomputation" if problem.gpus == 1 else "any cuts, replicas and recomputation"
    order = "" if problem.gpus == 1 else ", any order of the devices"
    return f"all plans of {names} with {describe_micro_batches(problem)}: {what}{order}"
