"""Megatron's plans: the same number of transformer blocks on every stage, and interleaved pipelines.

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021,
section 2.2. Transformer blocks are recognised by the names of the layers. Every stage has the same number of
them, the embedding first, the head last. Ranks are ordered with the pipeline outermost (tp-cp-ep-dp-pp), so
that the replicas of a stage are neighbours. A forbidden cut is moved to the nearest allowed one.

Interleaved pipelines have several parts of the layers on each device, which it runs in turn. The parts are
cut so that the largest has the least work and, where blocks are recognised, also with the same number of
blocks in each.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING

from ...cost_models.layer import Chain
from ...cost_models.quantities import format_count
from ...cost_models.schedules import find_schedule
from ..balance import balance
from ..candidate import Proposal
from ..pipeline_config import VIRTUAL_STAGES, PipelineConfig, abbreviate
from .base import (
    Ends,
    add_counts,
    equal_pipelines,
    linear_configs,
    nearest_cuts,
    pipeline_refusal,
    replicated_shapes,
    shared_configs,
    stage_counts,
    work_seconds,
)

if TYPE_CHECKING:
    from ..problem import Problem


_NUMBERED = re.compile(r"(?:^|[._])(?:layers?|h|(?:res|transformer_)?blocks?)[._]?(\d{1,18})(?=[._]|$)")


@dataclass(frozen=True)
class Blocks:
    """Consecutive blocks of a chain: `starts`, the first layer of each, and the layer after the last one.

    `stem`: what their names begin with, before the number.
    """

    stem: str
    starts: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.starts) - 1


def repeated_blocks(chain: Chain) -> Blocks | None:
    """The longest run of blocks numbered one after another, most of which have as many parameters.

    Of runs as long the first; None where the names tell no two. What stands between two blocks belongs to
    the earlier.
    """
    runs = [run for stem, layers in _block_numbers(chain).items() for run in _runs(stem, layers)]
    alike = [run for run in runs if _are_alike(chain, run)]
    return max(alike, key=len, default=None)


def _block_numbers(chain: Chain) -> dict[str, list[tuple[int, int]]]:
    """By stem, the block number and the index of every layer that has it, in the order of the chain."""
    numbers = dict[str, list[tuple[int, int]]]()
    for index, name in enumerate(chain.names):
        for match in _NUMBERED.finditer(name):
            numbers.setdefault(name[: match.start(1)], []).append((int(match[1]), index))
    return numbers


def _runs(stem: str, layers: list[tuple[int, int]]) -> list[Blocks]:
    """The runs of two blocks or more whose numbers rise by one."""
    runs, starts = list[Blocks](), [layers[0][1]]
    for (number, index), (following, at) in pairwise(layers):
        if following == number + 1:
            starts.append(at)
        elif following != number:
            runs.append(Blocks(stem, (*starts, index + 1)))
            starts = [at]
    runs.append(Blocks(stem, (*starts, layers[-1][1] + 1)))
    return [run for run in runs if len(run) > 1]


def _are_alike(chain: Chain, blocks: Blocks) -> bool:
    """Whether more than half of them have the same bytes of parameters, and some."""
    sums = [float(chain.parameter_bytes[first:end].sum()) for first, end in pairwise(blocks.starts)]
    (most_common, number), *_ = Counter(sums).most_common(1)
    return most_common > 0 and 2 * number > len(blocks)


class Megatron:
    """Even blocks on all devices."""

    name = "megatron"

    def propose(self, problem: Problem) -> Iterator[Proposal]:
        """Each number of stages that divides blocks and devices, with the replicas that use all devices; none
        where the names of the layers tell no blocks."""
        chain, blocks = problem.space.chain, repeated_blocks(problem.space.chain)
        if blocks is None:
            return
        devices = problem.usable_gpus
        shapes = [(devices, 1)] if devices in stage_counts(problem) else []
        for stages, replicas in (*shapes, *replicated_shapes(problem)):
            yield from equal_pipelines(
                problem,
                linear_configs(problem),
                lambda count, _: block_ends(chain, blocks, count),
                stages,
                replicas,
            )

    def refusal(self, problem: Problem) -> str:
        """Why it proposes nothing."""
        blocks = repeated_blocks(problem.space.chain)
        if blocks is None:
            return "no transformer blocks recognised"
        devices = format_count(problem.usable_gpus, "device")
        return f"{len(blocks)} blocks, {blocks.stem}*, do not divide into stages of {devices} in use"


def block_ends(chain: Chain, blocks: Blocks, stages: int) -> Ends | None:
    """Ends of stages of as many blocks each; None where they do not divide."""
    each, rest = divmod(len(blocks), stages)
    if rest or stages > chain.max_stages:
        return None
    inner = blocks.starts[each : each * stages : each]
    return nearest_cuts(chain, (*inner, len(chain)))


MEGATRON = Megatron()


INTERLEAVED_SCHEDULE = "interleaved"


class Interleaved:
    """Interleaved 1F1B on balanced parts."""

    name = "interleaved"

    def propose(self, problem: Problem) -> Iterator[Proposal]:
        """Two or more devices whose number divides the micro-batches, each with 2, 3 or 4 parts."""
        cuts = cache(partial(_cuts, problem))
        for config in interleaved_configs(problem):
            chunks, size = config.virtual_stages, config.micro_batch_size
            for stages in stage_counts(problem, chunks):
                if stages > 1 and config.micro_batches % stages == 0:
                    for ends in cuts(stages * chunks, size):
                        yield Proposal(config, ends, place_chunks(stages, chunks))

    def refusal(self, problem: Problem) -> str:
        """Why it proposes nothing."""
        runtime, parts = problem.runtime, 2 * VIRTUAL_STAGES[0]
        if runtime is not None and not runtime.virtual_stages:
            return f"{runtime.name} does not run several stages on a device"
        if not interleaved_configs(problem):
            free = problem.options.schedule == "auto" or INTERLEAVED_SCHEDULE in problem.schedules
            allowed = ", ".join(problem.schedules)
            return pipeline_refusal(problem) if free else f"the options allow only {allowed}"
        most, counts = problem.space.chain.max_stages, problem.stage_counts
        if counts[-1] < 2 or most < parts:
            return (
                f"it needs 2 devices and {parts} parts of the layers, and there are {counts[-1]} and {most}"
            )
        micro_batches = abbreviate(sorted({config.micro_batches for config in problem.configs}))
        return f"no number of stages from 2 to {counts[-1]} divides {micro_batches} micro-batches"


def interleaved_configs(problem: Problem) -> list[PipelineConfig]:
    """Those of the problem; where schedule and runtime were left open, those of 1F1B. Each with several parts
    a device."""
    runtime = problem.runtime
    if runtime is not None and not runtime.virtual_stages:
        return []
    free = runtime is None and problem.options.schedule == "auto"
    base = [
        s for s in problem.configs if s.schedule == INTERLEAVED_SCHEDULE or (free and s.schedule == "1f1b")
    ]
    configs_by_count = {
        replace(config, schedule=INTERLEAVED_SCHEDULE, virtual_stages=chunks): None
        for config in shared_configs(problem, base, 1)
        for chunks in VIRTUAL_STAGES
    }
    return list(configs_by_count)


@cache
def place_chunks(stages: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    """By part, the device that has it: as the schedule's program says."""
    pipe = find_schedule(INTERLEAVED_SCHEDULE).program(stages, stages, chunks).pipes[0]
    return tuple((place.device,) for place in pipe)


def _cuts(problem: Problem, parts: int, size: int) -> list[Ends]:
    """Ends of the parts, by each way to cut."""
    chain = problem.space.chain
    cuts = [add_counts(balance(work_seconds(problem, size), parts, cut_after=chain.cut_after))]
    blocks = repeated_blocks(chain)
    even = None if blocks is None else block_ends(chain, blocks, parts)
    return cuts if even is None or even in cuts else [*cuts, even]


INTERLEAVED = Interleaved()
