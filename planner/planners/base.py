"""Common parts of planners: their type, pipelines of stages with equal replicas, and allowed cuts."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ...cost_models.layer import Chain, list_cut_points
from ...cost_models.quantities import format_count
from ...cost_models.schedules import find_schedule
from ..candidate import SEARCHED, PipelineConfig, Proposal, abbreviate, replicated_pipeline

if TYPE_CHECKING:
    from ..problem import Problem


def pipeline_refusal(problem: Problem) -> str:
    """Return why no pipeline exists of equal replicas: the failed check with its values."""
    if problem.space.is_long:
        return "too many layers"
    sizes = sorted({config.micro_batch_size for config in problem.configs})
    if not any(problem.space.fits_someone(size, 1) for size in sizes):
        measured = abbreviate(problem.chain.sizes)
        return f"one replica needs size {abbreviate(sizes)}, but the profile measured {measured}"
    devices = format_count(problem.usable_gpus, "device")
    if problem.stage_counts[-1] < 2:
        return f"it needs two stages or more, but {devices}, the cuts and the options allow one"
    counts = abbreviate(sorted({config.micro_batches for config in problem.configs}))
    blocks = format_count(problem.space.chain.max_stages, "block")
    return f"its rule makes no plan of {blocks} between cuts on {devices} with {counts} micro-batches"


@dataclass(frozen=True)
class Planner:
    """Known planning method.

    Attributes:
        name: Name for the option `planner`.
        propose: Function that returns the plans that it may mean for a problem, in any order. All are scored,
            and the fastest that fits counts.
        refusal: Function that returns why it proposed nothing for a problem.
    """

    name: str
    propose: Callable[[Problem], Iterable[Proposal]]
    refusal: Callable[[Problem], str] = pipeline_refusal


def refusal_reason(planner: Planner, problem: Problem) -> str:
    """Return why a planner proposed nothing for the problem."""
    if planner.name not in CHUNKED and not linear_configs(problem):
        return "the schedule has several parts of the layers on a device"
    return planner.refusal(problem)


CHUNKED = ("interleaved", "torch-partition")
"""Planners of several parts of the layers per device."""


EVERY_COUNT = 64
"""Most stages for which every number is tried."""
GROWTH = 1.1
"""Ratio of the larger numbers of stages that are tried."""

Ends = tuple[int, ...]
"""By stage, the number of layers up to its end."""
Rule = Callable[[int, int], Ends | None]
"""Function from stages and samples per device to the ends of the stages; None if it makes none."""


def stage_counts(problem: Problem, parts: int = 1) -> list[int]:
    """Return the numbers of stages to try, of `parts` parts of the layers each.

    Of very large numbers, only some are tried, and the divisors of the devices.
    """
    most = min(problem.stage_counts[-1], problem.space.chain.max_stages // parts)
    counts, last = [], 0
    for count in range(1, most + 1):
        divides = problem.usable_gpus % count == 0
        if count <= EVERY_COUNT or count >= last * GROWTH or count == most or divides:
            counts.append(count)
            last = count
    return counts


def linear_configs(problem: Problem) -> list[PipelineConfig]:
    """Return the configurations with one part of the layers per device, of 1F1B and GPipe if allowed.

    Plans of other schedules take long to score, and start from the results of the search for 1F1B and GPipe.
    """
    configs = [
        config
        for config in problem.configs
        if config.virtual_stages == 1 and find_schedule(config.schedule).default_virtual_stages == 1
    ]
    return [config for config in configs if config.schedule in SEARCHED] or configs


def full_shapes(problem: Problem) -> Iterator[tuple[int, int]]:
    """Yield the numbers of stages and of replicas per stage that together use all devices."""
    devices, runtime = problem.usable_gpus, problem.runtime
    for stages in stage_counts(problem):
        replicas = devices // stages
        if devices == stages * replicas and (runtime is None or runtime.runs_replicas([replicas] * stages)):
            yield stages, replicas


def can_share(problem: Problem, size: int, replicas: int) -> bool:
    """Return whether `replicas` replicas share micro-batches equally, at a size with known costs."""
    return size % replicas == 0 and problem.space.fits_someone(size, replicas)


def shared_configs(
    problem: Problem, configs: Iterable[PipelineConfig], replicas: int
) -> list[PipelineConfig]:
    """Return the configurations whose micro-batches `replicas` replicas can share."""
    return [config for config in configs if can_share(problem, config.micro_batch_size, replicas)]


def linear_pipelines(
    problem: Problem, configs: Sequence[PipelineConfig], rule: Rule, *, of_a_node: bool = False
) -> Iterator[Proposal]:
    """Yield pipelines of one device per stage, for each number of stages for which the rule has ends.

    Args:
        problem: What is asked.
        configs: Configurations.
        rule: Rule that cuts the layers.
        of_a_node: Whether stages are limited to the devices of a node, which one process drives.
    """
    most = problem.topology.gpus_per_node if of_a_node else problem.topology.gpus
    for stages in stage_counts(problem):
        if stages <= most:
            yield from equal_pipelines(problem, configs, rule, stages, 1)


def all_pipelines(problem: Problem, rule: Rule) -> Iterator[Proposal]:
    """Yield pipelines of one device per stage, and those with equal replicas on all devices.

    They have two stages or more if possible, because one stage is one GPU or data parallelism.
    """
    linear, configs = [(stages, 1) for stages in stage_counts(problem)], linear_configs(problem)
    fewest = min(2, linear[-1][0])
    for stages, replicas in dict.fromkeys([*linear, *full_shapes(problem)]):
        if stages >= fewest:
            yield from equal_pipelines(problem, configs, rule, stages, replicas)


def equal_pipelines(
    problem: Problem, configs: Iterable[PipelineConfig], rule: Rule, stages: int, replicas: int
) -> Iterator[Proposal]:
    """Yield the rule's pipelines, each stage on `replicas` devices of consecutive ranks."""
    by_batch = dict[int, Ends | None]()
    for config in shared_configs(problem, configs, replicas):
        per_replica_batch = config.micro_batch_size // replicas
        if per_replica_batch not in by_batch:
            by_batch[per_replica_batch] = rule(stages, per_replica_batch)
        ends = by_batch[per_replica_batch]
        if ends is not None:
            yield replicated_pipeline(config, ends, [replicas] * stages)


def work_seconds(problem: Problem, size: int) -> npt.NDArray[np.float64]:
    """Return the (layers,) forward and backward seconds of `size` samples on a device."""
    costs = problem.space.chain.at(size, past_largest=True)
    return costs.forward_seconds + costs.backward_seconds


def nearest_cuts(chain: Chain, ends: Sequence[int]) -> tuple[int, ...]:
    """Return the ends of stages, each moved to the nearest allowed cut (the earlier of equally near ones).

    From the first on, each stays after the previous one and leaves an allowed end for every later one. So
    ends that do not ascend become stages of one layer or more, too.

    Args:
        chain: Costs of the layers.
        ends: Numbers of layers up to the end of each stage, the last len(chain), of at most
            `chain.max_stages` stages.
    """
    cut_points, stages = list_cut_points(chain), len(ends)
    moved, least = list[int](), 1
    for later, end in zip(range(stages - 2, -1, -1), ends, strict=False):
        most = len(cut_points) - 2 - later
        right = min(max(bisect_left(cut_points, end), least), most)
        left = max(right - 1, least)
        nearest = left if end - cut_points[left] <= cut_points[right] - end else right
        moved.append(cut_points[nearest])
        least = nearest + 1
    return (*moved, len(chain))


def allows(chain: Chain, ends: Sequence[int]) -> bool:
    """Return whether these ends ascend to the last layer and none is a forbidden cut."""
    rising = all(a < b for a, b in pairwise((0, *ends)))
    return rising and ends[-1] == len(chain) and all(chain.cut_after[end - 1] for end in ends[:-1])
