"""Rules of a line or two: one GPU, data parallelism, even layers or blocks, GPipe's balance.

"even" is what people do by hand and what DeepSpeed's `uniform` does.

GPipe (Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", NeurIPS
2019, section 2): a stage keeps its input and recomputes its forward in backward. GPipe evens out the stages'
estimated costs. Here this is exact: the most expensive stage is as cheap as possible.

Megatron (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
SC 2021, section 2.2): transformer blocks are recognised by the names of the layers. Every stage has the same
number of them, with the embedding first and the head last. Ranks are ordered with the pipeline outermost
(tp-cp-ep-dp-pp), so that the replicas of a stage are neighbours. A forbidden cut is moved to the nearest
allowed one. Interleaved pipelines have several parts of the layers on each device, which it runs in turn. The
parts are cut so that the largest has the least work and, if blocks are recognised, also with the same number
of blocks in each.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from ...cost_models.layer import Chain
from ...cost_models.quantities import format_count
from ...cost_models.schedules import find_schedule
from ..balance import balanced_ends
from ..candidate import (
    VIRTUAL_STAGES,
    PipelineConfig,
    Proposal,
    abbreviate,
    linear_pipeline,
    replicated_pipeline,
)
from .base import (
    Ends,
    Planner,
    all_pipelines,
    allows,
    equal_pipelines,
    full_shapes,
    linear_configs,
    linear_pipelines,
    nearest_cuts,
    pipeline_refusal,
    shared_configs,
    stage_counts,
    work_seconds,
)

if TYPE_CHECKING:
    from ..problem import Problem


def _one_gpu(problem: Problem) -> Iterator[Proposal]:
    """Yield plans without pipeline and replicas, on the first device of each kind."""
    topology = problem.topology
    first = {topology.device(rank): rank for rank in reversed(range(topology.gpus))}
    for rank in sorted(first.values()):
        for config in shared_configs(problem, linear_configs(problem), 1):
            yield linear_pipeline(config, [len(problem.space.chain)], rank)


def _data_parallel(problem: Problem) -> Iterator[Proposal]:
    """Yield one stage with all devices as replicas, for each micro-batch that they can share.

    Without a runtime they may share unevenly. Nothing is yielded if the runtime has no replicas.
    """
    devices, runtime = problem.topology.gpus, problem.runtime
    if runtime is None or runtime.runs_replicas([devices]):
        for config in linear_configs(problem):
            size = config.micro_batch_size
            shared = size >= devices and problem.may_share(size, [devices])
            if shared and problem.space.fits_someone(size, devices):
                yield replicated_pipeline(config, [len(problem.space.chain)], [devices])


def _data_parallel_refusal(problem: Problem) -> str:
    devices, runtime = problem.topology.gpus, problem.runtime
    if runtime is not None and not runtime.runs_replicas([devices]):
        return f"{runtime.name} has no replicas"
    which = "requested" if problem.options.micro_batches is not None else "that were measured"
    return f"{devices} devices cannot share any of the micro-batches {which}"


def _even(problem: Problem) -> Iterator[Proposal]:
    """Return pipelines whose layer counts differ by at most one."""
    return all_pipelines(problem, lambda stages, _: even_ends(problem.space.chain, stages))


def even_ends(chain: Chain, stages: int) -> Ends:
    """Return ends of stages with numbers of layers as equal as possible, larger ones first.

    If that needs a forbidden cut, the largest stage has the fewest layers.

    Raises:
        InfeasibleError: The allowed cuts do not make this many stages.
    """
    each, rest = divmod(len(chain), stages)
    ends = tuple(each * stage + min(stage, rest) for stage in range(1, stages + 1))
    return ends if allows(chain, ends) else balanced_ends(np.ones(len(chain)), stages, chain.cut_after)


def _gpipe(problem: Problem) -> Iterator[Proposal]:
    """Return GPipe's schedule on the balanced cuts, one device per stage: the paper has no replicas.

    All layers are recomputed if the options leave it open. If nothing may recompute, nothing does.
    """
    chain = problem.space.chain
    configs = [config for config in linear_configs(problem) if config.schedule == "gpipe"]
    whole = [
        replace(config, recompute="always") if config.recompute == "by_stage" else config
        for config in configs
    ]
    recomputing = [config for config in dict.fromkeys(whole) if config.recompute != "never"]

    def ends(stages: int, size: int) -> Ends:
        costs = chain.at(size, past_largest=True)
        work = costs.forward_seconds * (2 if recomputing else 1) + costs.backward_seconds
        return balanced_ends(work, stages, chain.cut_after)

    return linear_pipelines(problem, recomputing or configs, ends)


def _gpipe_refusal(problem: Problem) -> str:
    if "gpipe" in problem.schedules:
        return pipeline_refusal(problem)
    return f"it plans gpipe, and the options allow {', '.join(problem.schedules)}"


_NUMBERED = re.compile(r"(?:^|[._])(?:layers?|h|(?:res|transformer_)?blocks?)[._]?(\d{1,18})(?=[._]|$)")


@dataclass(frozen=True)
class Blocks:
    """Consecutive blocks of a chain.

    Attributes:
        stem: Beginning of their names, before the number.
        starts: First layer of each, and the layer after the last one.
    """

    stem: str
    starts: tuple[int, ...]

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self.starts) - 1


def repeated_blocks(chain: Chain) -> Blocks | None:
    """Return the longest run of consecutively numbered blocks, most of which have equally many parameters.

    Of equally long runs, the first counts. None if the names show no two blocks. Layers between two blocks
    belong to the earlier one.
    """
    runs = [run for stem, layers in _block_numbers(chain).items() for run in _runs(stem, layers)]
    alike = [run for run in runs if _are_alike(chain, run)]
    return max(alike, key=len, default=None)


def _block_numbers(chain: Chain) -> dict[str, list[tuple[int, int]]]:
    """Return, by stem, the block number and index of every layer that has it, in the order of the chain."""
    numbers = dict[str, list[tuple[int, int]]]()
    for index, name in enumerate(chain.names):
        for match in _NUMBERED.finditer(name):
            numbers.setdefault(name[: match.start(1)], []).append((int(match[1]), index))
    return numbers


def _runs(stem: str, layers: list[tuple[int, int]]) -> list[Blocks]:
    """Return the runs of two blocks or more whose numbers rise by one."""
    runs = [[layers[0][1]]]
    for (number, index), (following, at) in pairwise([*layers, (-1, 0)]):
        if following == number + 1:
            runs[-1].append(at)
        elif following != number:
            runs[-1].append(index + 1)
            runs.append([at])
    return [Blocks(stem, tuple(starts)) for starts in runs if len(starts) > 2]


def _are_alike(chain: Chain, blocks: Blocks) -> bool:
    """Return whether more than half of the blocks have the same bytes of parameters, and not zero."""
    sums = [float(chain.parameter_bytes[first:end].sum()) for first, end in pairwise(blocks.starts)]
    (most_common, number), *_ = Counter(sums).most_common(1)
    return most_common > 0 and 2 * number > len(blocks)


def _megatron(problem: Problem) -> Iterator[Proposal]:
    """Yield even blocks, with the replicas that use all devices."""
    chain, blocks = problem.space.chain, repeated_blocks(problem.space.chain)
    for stages, replicas in full_shapes(problem) if blocks is not None else ():
        ends = block_ends(chain, blocks, stages)
        yield from equal_pipelines(
            problem, linear_configs(problem), lambda *_, ends=ends: ends, stages, replicas
        )


def _megatron_refusal(problem: Problem) -> str:
    blocks = repeated_blocks(problem.space.chain)
    if blocks is None:
        return "no transformer blocks recognised"
    devices = format_count(problem.usable_gpus, "device")
    return f"{len(blocks)} blocks, {blocks.stem}*, do not divide into stages of {devices} in use"


def block_ends(chain: Chain, blocks: Blocks | None, stages: int) -> Ends | None:
    """Return ends of stages with equal numbers of blocks.

    None if there are no blocks or they do not divide.
    """
    if blocks is None or len(blocks) % stages or stages > chain.max_stages:
        return None
    per_stage = len(blocks) // stages
    return nearest_cuts(chain, (*blocks.starts[per_stage : per_stage * stages : per_stage], len(chain)))


def _interleaved(problem: Problem) -> Iterator[Proposal]:
    """Yield interleaved 1F1B on balanced parts.

    There are two or more devices, whose number divides the micro-batches, each with 2, 3 or 4 parts.
    """
    chain = problem.space.chain

    @cache
    def cuts(parts: int, size: int) -> list[Ends]:
        even = block_ends(chain, repeated_blocks(chain), parts)
        balanced = balanced_ends(work_seconds(problem, size), parts, chain.cut_after)
        return [balanced, *([] if even in (None, balanced) else [even])]

    for config in interleaved_configs(problem):
        chunks, size = config.virtual_stages, config.micro_batch_size
        for stages in stage_counts(problem, chunks):
            if stages > 1 and config.micro_batches % stages == 0:
                for ends in cuts(stages * chunks, size):
                    yield Proposal(config, ends, place_chunks(stages, chunks))


def _interleaved_refusal(problem: Problem) -> str:
    runtime, parts = problem.runtime, 2 * VIRTUAL_STAGES[0]
    if runtime is not None and not runtime.virtual_stages:
        return f"{runtime.name} does not run several stages on a device"
    if not interleaved_configs(problem):
        free = problem.options.schedule == "auto" or "interleaved" in problem.schedules
        allowed = ", ".join(problem.schedules)
        return pipeline_refusal(problem) if free else f"the options allow only {allowed}"
    most, counts = problem.space.chain.max_stages, problem.stage_counts
    if counts[-1] < 2 or most < parts:
        return f"it needs 2 devices and {parts} parts of the layers, but there are {counts[-1]} and {most}"
    micro_batches = abbreviate(sorted({config.micro_batches for config in problem.configs}))
    return f"no number of stages from 2 to {counts[-1]} divides {micro_batches} micro-batches"


def interleaved_configs(problem: Problem) -> list[PipelineConfig]:
    """Return the interleaved configurations.

    Those of 1F1B with several parts per device if all is left open.
    """
    runtime = problem.runtime
    if runtime is not None and not runtime.virtual_stages:
        return []
    free = runtime is None and problem.options.schedule == "auto"
    base = [s for s in problem.configs if s.schedule == "interleaved" or (free and s.schedule == "1f1b")]
    configs_by_count = {
        replace(config, schedule="interleaved", virtual_stages=chunks): None
        for config in shared_configs(problem, base, 1)
        for chunks in VIRTUAL_STAGES
    }
    return list(configs_by_count)


@cache
def place_chunks(stages: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    """Return the device of each part, as in the schedule's program."""
    pipe = find_schedule("interleaved").program(stages, stages, chunks).pipes[0]
    return tuple((place.device,) for place in pipe)


PLANNERS = (
    Planner("one-gpu", _one_gpu),
    Planner("data-parallel", _data_parallel, _data_parallel_refusal),
    Planner("even", _even),
    Planner("gpipe", _gpipe, _gpipe_refusal),
    Planner("megatron", _megatron, _megatron_refusal),
    Planner("interleaved", _interleaved, _interleaved_refusal),
)
