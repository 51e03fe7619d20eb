"""GPipe: stages balanced by their estimated computation, all recomputed.

Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", NeurIPS 2019,
section 2: a stage keeps its input and computes forward again in backward. It evens out the stages' estimated
costs; ours is the exact form of that, the cheapest most expensive stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ..balance import balance
from ..candidate import Proposal
from ..pipeline_config import PipelineConfig
from .equal_pipelines import Ends, ends_of, linear_configs, linear_pipelines

if TYPE_CHECKING:
    from ..problem import Problem


class GPipe:
    """GPipe's schedule on the balanced cuts."""

    name = "gpipe"

    def propose(self, problem: Problem) -> Iterator[Proposal]:
        """Each number of stages, a device a stage: the paper has no replicas."""
        chain = problem.space.chain
        configs = recomputing(s for s in linear_configs(problem) if s.schedule == "gpipe")
        recompute = 0 if all(config.recompute == "never" for config in configs) else 1

        def ends(stages: int, size: int) -> Ends:
            costs = chain.at(size, past_largest=True)
            work = costs.forward_seconds * (1 + recompute) + costs.backward_seconds
            return ends_of(balance(work, stages, cut_after=chain.cut_after))

        yield from linear_pipelines(problem, configs, ends)


def recomputing(configs: Iterator[PipelineConfig]) -> list[PipelineConfig]:
    """Those that recompute, wholly where it was left open; as they are where none may."""
    given = list(configs)
    whole = [replace(s, recompute="always") if s.recompute == "by_stage" else s for s in given]
    return [s for s in dict.fromkeys(whole) if s.recompute != "never"] or given


PLANNER = GPipe()
