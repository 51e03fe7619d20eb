"""Rules of a line or two: one GPU, data parallelism, as many layers on every stage, GPipe's balance.

"even" is done by hand and by DeepSpeed's `uniform`.

GPipe (Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", NeurIPS
2019, section 2): a stage keeps its input and computes forward again in backward. It evens out the stages'
estimated costs; ours is the exact form of that, the cheapest most expensive stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ...cost_models.layer import Chain
from ..balance import balance
from ..candidate import Proposal, linear_pipeline
from ..pipeline_config import PipelineConfig
from .base import (
    Ends,
    add_counts,
    all_pipelines,
    allows,
    equal_pipelines,
    linear_configs,
    linear_pipelines,
    pipeline_refusal,
    shared_configs,
)

if TYPE_CHECKING:
    from ..problem import Problem


class OneGpu:
    """No pipeline and no replicas."""

    name = "one-gpu"

    def propose(self, problem: Problem) -> Iterator[Proposal]:
        """The first device of each kind."""
        topology = problem.topology
        first = {topology.device(rank): rank for rank in reversed(range(topology.gpus))}
        for rank in sorted(first.values()):
            for config in shared_configs(problem, linear_configs(problem), 1):
                yield linear_pipeline(config, [len(problem.space.chain)], rank)


ONE_GPU = OneGpu()


class DataParallel:
    """One stage with all devices as its replicas."""

    name = "data-parallel"

    def propose(self, problem: Problem) -> Iterator[Proposal]:
        """Each micro-batch size; none where the runtime has no replicas."""
        devices, runtime = problem.topology.gpus, problem.runtime
        if runtime is None or runtime.runs_replicas([devices]):
            whole = (len(problem.space.chain),)
            configs = linear_configs(problem)
            yield from equal_pipelines(problem, configs, lambda *_: whole, 1, devices)

    def refusal(self, problem: Problem) -> str:
        """Whether it is the runtime or the batch."""
        devices, runtime = problem.topology.gpus, problem.runtime
        if runtime is not None and not runtime.runs_replicas([devices]):
            return f"{runtime.name} has no replicas"
        if problem.mini_batch % devices:
            return f"a global batch of {problem.mini_batch} does not divide by {devices} devices"
        which = "asked for" if problem.options.micro_batches is not None else "that the profile reaches"
        return f"none of the micro-batches {which} divides by the devices"


DATA_PARALLEL = DataParallel()


class Even:
    """Layer counts that differ by one at most."""

    name = "even"

    def propose(self, problem: Problem) -> Iterator[Proposal]:
        """Each number of stages from two on, also with the same number of replicas of every stage on all
        devices; one stage where there can be no more."""
        configs = linear_configs(problem)
        yield from all_pipelines(problem, configs, lambda stages, _: even_ends(problem.space.chain, stages))


def even_ends(chain: Chain, stages: int) -> Ends:
    """Ends of stages with as equal numbers of layers as can be, the first ones having one more.

    Where that needs a forbidden cut: with the fewest layers in the largest stage. Raises InfeasibleError.
    """
    ends = spread_evenly(len(chain), stages)
    if allows(chain, ends):
        return ends
    return add_counts(balance(np.ones(len(chain)), stages, cut_after=chain.cut_after))


def spread_evenly(items: int, stages: int) -> Ends:
    """Ends of stages of items // stages each, the first ones of one more."""
    each, rest = divmod(items, stages)
    return tuple(each * stage + min(stage, rest) for stage in range(1, stages + 1))


EVEN = Even()


class GPipe:
    """GPipe's schedule on the balanced cuts."""

    name = "gpipe"

    def propose(self, problem: Problem) -> Iterator[Proposal]:
        """Each number of stages, a device a stage: the paper has no replicas."""
        chain = problem.space.chain
        configs = with_recompute(s for s in linear_configs(problem) if s.schedule == "gpipe")
        recompute = 0 if all(config.recompute == "never" for config in configs) else 1

        def ends(stages: int, size: int) -> Ends:
            costs = chain.at(size, past_largest=True)
            work = costs.forward_seconds * (1 + recompute) + costs.backward_seconds
            return add_counts(balance(work, stages, cut_after=chain.cut_after))

        yield from linear_pipelines(problem, configs, ends)

    def refusal(self, problem: Problem) -> str:
        """Why it proposes nothing."""
        if "gpipe" in problem.schedules:
            return pipeline_refusal(problem)
        return f"it plans gpipe, and the options allow {', '.join(problem.schedules)}"


def with_recompute(configs: Iterator[PipelineConfig]) -> list[PipelineConfig]:
    """Those that recompute, wholly where it was left open; as they are where none may."""
    all_configs = list(configs)
    whole = [replace(s, recompute="always") if s.recompute == "by_stage" else s for s in all_configs]
    return [s for s in dict.fromkeys(whole) if s.recompute != "never"] or all_configs


GPIPE = GPipe()
