"""Interleaved: several parts of the layers on each device, for the schedules that run them in turn.

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021,
section 2.2. The parts are cut with the least work in the largest, and, where the names of the layers tell
transformer blocks, also with as many of them each, as Megatron does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING

from ...cost_models.schedules import schedule_named
from ..balance import balance
from ..candidate import Proposal
from ..pipeline_config import PipelineConfig
from .base import Ends, add_counts, shared_configs, stage_counts, work_seconds
from .megatron import block_ends, repeated_blocks

if TYPE_CHECKING:
    from ..problem import Problem

SCHEDULE = "interleaved"
VIRTUAL_STAGES = (2, 3, 4)


class Interleaved:
    """Interleaved 1F1B on balanced parts."""

    name = "interleaved"

    def propose(self, problem: Problem) -> Iterator[Proposal]:
        """Two devices or more that divide the micro-batches, each with 2, 3 or 4 parts."""
        cuts = cache(partial(_cuts, problem))
        for config in interleaved_configs(problem):
            chunks, size = config.virtual_stages, config.micro_batch_size
            for stages in stage_counts(problem, chunks):
                if stages > 1 and config.micro_batches % stages == 0:
                    for ends in cuts(stages * chunks, size):
                        yield Proposal(config, ends, place_chunks(stages, chunks))


def interleaved_configs(problem: Problem) -> list[PipelineConfig]:
    """Those of the problem; where schedule and runtime were left open, those of 1F1B. Each with several parts
    a device."""
    runtime = problem.runtime
    if runtime is not None and not runtime.virtual_stages:
        return []
    free = runtime is None and problem.options.schedule == "auto"
    base = [s for s in problem.configs if s.schedule == SCHEDULE or (free and s.schedule == "1f1b")]
    configs_by_count = {
        replace(config, schedule=SCHEDULE, virtual_stages=chunks): None
        for config in shared_configs(problem, base, 1)
        for chunks in VIRTUAL_STAGES
    }
    return list(configs_by_count)


@cache
def place_chunks(stages: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    """By part, the device that has it: as the schedule's program says."""
    pipe = schedule_named(SCHEDULE).program(stages, stages, chunks).pipes[0]
    return tuple((place.device,) for place in pipe)


def _cuts(problem: Problem, parts: int, size: int) -> list[Ends]:
    """Ends of the parts, by each way to cut."""
    chain = problem.space.chain
    cuts = [add_counts(balance(work_seconds(problem, size), parts, cut_after=chain.cut_after))]
    blocks = repeated_blocks(chain)
    even = None if blocks is None else block_ends(chain, blocks, parts)
    return cuts if even is None or even in cuts else [*cuts, even]


PLANNER = Interleaved()
