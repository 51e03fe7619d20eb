"""Seconds and memory of a training step of a transformer with given degrees of parallelism.

A step: the pipeline, the reduction of the gradients in float32, the optimizer's update, and the gathering of
the updated weights. The pipeline is 1F1B, whose sends and receives block (as in Megatron-LM without overlap),
or, with several virtual stages on a device, interleaved 1F1B, whose transfers run beside the computing (as
Megatron-LM has it by default).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..errors import UsageError
from ..program import Program
from ..schedules import find_schedule
from ..step_costs import Costs
from ..timeline import simulate
from .layer_table import LayerTable, StageEstimate
from .parallel_degrees import ParallelDegrees
from .pipeline_layout import layout_problems, stage_letters
from .rank_costs import PassSeconds, RankCosts
from .training_setting import TrainingSetting, block_ranges
from .transformer_shape import TransformerShape


@dataclass(frozen=True)
class StepEstimate:
    """Of a training step. `update_seconds`: after the pipeline; of the stage that takes longest."""

    step_seconds: float
    pipeline_seconds: float
    update_seconds: float
    stages: tuple[StageEstimate, ...]

    @property
    def peak_bytes(self) -> float:
        """Of the device that needs most."""
        return max(stage.bytes for stage in self.stages)


def estimate_step(
    shape: TransformerShape,
    degrees: ParallelDegrees,
    setting: TrainingSetting,
    costs: RankCosts,
    blocks: Sequence[int] | None = None,
) -> StepEstimate:
    """Of the stages with so many `blocks` each (None: even ones); of virtual stages, of each of these, in the
    order in which a micro-batch goes through them. Raises UsageError for what cannot be."""
    degrees.check(shape, setting.tokens.sequence)
    if problem := costs.implementation.problem_with(degrees, setting):
        raise UsageError(problem, "Choose other virtual stages, micro-batches, ZeRO or recomputation.")
    stages = degrees.pipeline * setting.virtual_stages
    counts = setting.even_blocks(shape.blocks, stages) if blocks is None else list(blocks)
    problems = ["one number from 0 on is needed for each"] * (len(counts) != stages or min(counts) < 0)
    if not problems:
        letters = stage_letters(counts, setting.predictors, setting.predictor_offset)
        problems = layout_problems(letters, degrees.pipeline, shape.blocks, setting.predictors)
    if problems:
        raise UsageError(
            f"blocks={counts}: not {stages} stages of {shape.blocks} blocks: {'; '.join(problems)}",
            "Give the blocks of each stage, which add up.",
        )
    return estimate_stages(LayerTable(shape, degrees, setting, costs), counts)


def estimate_stages(layers: LayerTable, counts: Sequence[int]) -> StepEstimate:
    """Of the (virtual) stages with so many blocks each, which add up."""
    ranges = block_ranges(counts)
    devices = range(layers.degrees.pipeline)
    stages = tuple(layers.stage(layers.own_blocks(ranges, device), device) for device in devices)
    pipeline = _pipeline_seconds(layers, ranges)
    update = max(stage.update_seconds for stage in stages)
    return StepEstimate(pipeline + update, pipeline, update, stages)


@lru_cache(maxsize=16)
def pipeline_program(stages: int, micro_batches: int, virtual_stages: int) -> Program:
    """The order in which the devices of a pipeline work: 1F1B, interleaved where there are virtual stages."""
    name = "1f1b" if virtual_stages == 1 else "interleaved"
    return find_schedule(name).program(stages, micro_batches, virtual_stages)


_SIMULATED = 64

"""Micro-batches that are simulated, at least 16 a stage (4 interleaved): more follow as the last of these."""


def _pipeline_seconds(layers: LayerTable, ranges: Sequence[range]) -> float:
    """Of all micro-batches; of the blocks of each (virtual) stage."""
    own = [layers.seconds(blocks, slot) for slot, blocks in enumerate(ranges)]
    transfers = [layers.transfer_seconds(slot) for slot in range(len(own) - 1)]
    gathers = layers.gather_seconds(ranges) if layers.reshards else ()
    most = layers.degrees.max_param_unsharded_stages
    count, virtual = layers.setting.micro_batches, layers.setting.virtual_stages
    return pipeline_seconds(own, transfers, count, virtual, gathers, most)


def pipeline_costs(
    own: Sequence[PassSeconds],
    transfers: Sequence[float],
    virtual: int,
    gathers: Sequence[float] = (),
    unsharded_stages: int = 1,
) -> Costs:
    """Costs for the simulator, from the pass seconds of each (virtual) stage.

    `gathers`: seconds to gather the weights of each, with `unsharded_stages` of a device gathered at a time;
    empty: weights are whole.
    """
    stages = len(own) // virtual
    forward, backward = (
        np.array(each, dtype=np.float64).reshape(virtual, stages).T[:, :, None]
        for each in zip(*own, strict=True)
    )
    cuts = np.array([transfers], dtype=np.float64)
    return Costs(
        forward=forward,
        backward=backward,
        forward_occupancy=cuts,
        backward_occupancy=cuts,
        unshard=np.array(gathers).reshape(virtual, stages).T if gathers else None,
        unsharded_chunks=unsharded_stages,
        transfers="rendezvous" if virtual == 1 else "overlapped",
    )


def pipeline_seconds(
    own: Sequence[PassSeconds],
    transfers: Sequence[float],
    micro_batches: int,
    virtual: int = 1,
    gathers: Sequence[float] = (),
    unsharded_stages: int = 1,
) -> float:
    """Of all micro-batches, on (virtual) stages that take so long for one; `transfers`: over the cut behind
    each stage but the last, in either direction. `gathers`: as `pipeline_costs` has them."""
    stages = len(own) // virtual
    if len(own) == 1:
        return micro_batches * own[0].both
    costs = pipeline_costs(own, transfers, virtual, gathers, unsharded_stages)

    def seconds(count: int) -> float:
        return float(simulate(pipeline_program(stages, count, virtual), costs).step_seconds)

    many = max(-(-_SIMULATED // stages), 16 if virtual == 1 else 4) * stages
    if micro_batches <= 2 * many:
        return seconds(micro_batches)
    first = seconds(many)
    return first + (seconds(2 * many) - first) * (micro_batches - many) / many
