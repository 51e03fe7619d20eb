"""Estimate of a given division of a transformer's layers, at the degrees of parallelism that suit it best."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ...cost_models.errors import UsageError
from ...cost_models.transformer.layer_table import LayerTable
from ...cost_models.transformer.rank_costs import RankCosts
from ...cost_models.transformer.training_step import estimate_stages
from ...cost_models.transformer.transformer_shape import TransformerShape
from .degree_combinations import Combination, list_combinations
from .degree_options import DegreeOptions
from .degree_refusals import nothing_possible
from .degree_search import DegreePlan
from .interleaved_bound import interleaved_bound


def estimate_layout(
    shape: TransformerShape,
    counts: Sequence[int],
    pipeline: int,
    devices: int,
    costs: RankCosts,
    options: DegreeOptions,
    memory_bytes: float,
    predictor_offset: int = 0,
) -> DegreePlan:
    """Return the plan of a given division with the shortest step over all other degrees that fit.

    If nothing fits, it is the plan that needs the least memory. Partial recomputation is tried with one block
    per stage, and only if the options ask for it.

    Args:
        shape: The transformer.
        counts: Blocks of each (virtual) stage.
        pipeline: Number of pipeline stages.
        devices: Number of devices.
        costs: Costs of kernels and communication.
        options: Allowed degrees, and the training setting.
        memory_bytes: Bytes that a device may use.
        predictor_offset: Stages from that of the predictors to the last.

    Raises:
        UsageError: Nothing is possible.
    """
    best: DegreePlan | None = None
    for combination in _combinations(shape, len(counts) // pipeline, pipeline, devices, options):
        setting = replace(combination.setting, predictor_offset=predictor_offset)
        layers = LayerTable(shape, combination.degrees, setting, costs)
        peak = layers.peak_bytes(counts)
        if best is not None and not _may_be_better(layers, counts, peak, best, memory_bytes):
            continue
        plan = DegreePlan(
            combination.degrees, setting, tuple(counts), estimate_stages(layers, counts), layers
        )
        if best is None or _rank(plan, memory_bytes) < _rank(best, memory_bytes):
            best = plan
    if best is None:
        flat = next(_combinations(shape, 1, pipeline, devices, options), None)
        if flat is not None and pipeline == 1:
            setting = replace(flat.setting, virtual_stages=len(counts))
            raise UsageError(
                costs.implementation.problem_with(flat.degrees, setting), "Give the pipeline's size, as `pp`."
            )
        if flat is not None:
            raise UsageError(
                f"mini_batch={options.mini_batch}: makes no multiple of {pipeline} micro-batches",
                "Use another global batch: interleaved stages need such a multiple.",
            )
        raise nothing_possible(shape, devices, replace(options, pp=(pipeline,)))
    return best


def _combinations(
    shape: TransformerShape, virtual: int, pipeline: int, devices: int, options: DegreeOptions
) -> Iterator[Combination]:
    is_partial = options.recompute == "partial"
    recompute = "full" if is_partial else options.recompute
    restricted = replace(options, pp=(pipeline,), virtual_stages=(virtual,), recompute=recompute)
    for combination in list_combinations(shape, devices, restricted):
        if combination.recompute_blocks is None and not combination.setting.predictor_offset:
            setting = replace(combination.setting, recompute_blocks=1) if is_partial else combination.setting
            yield Combination(combination.degrees, setting)


def _may_be_better(
    layers: LayerTable, counts: Sequence[int], peak: float, best: DegreePlan, memory_bytes: float
) -> bool:
    if best.estimate.peak_bytes > memory_bytes:
        return peak < best.estimate.peak_bytes
    return peak <= memory_bytes and interleaved_bound(layers, counts) < best.estimate.step_seconds


def _rank(plan: DegreePlan, memory_bytes: float) -> tuple[bool, float]:
    fits = plan.estimate.peak_bytes <= memory_bytes
    return not fits, plan.estimate.step_seconds if fits else plan.estimate.peak_bytes
