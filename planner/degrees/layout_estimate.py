"""A division of a transformer's layers that is given, at the degrees of parallelism that suit it best."""

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
    """The plan with so many blocks on each (virtual) stage and the shortest step of all other degrees, micro-
    batch sizes and recomputation that the options allow and that fit; where nothing fits, that which needs
    least memory. Partial recomputation is tried with one block of each stage, and only if the options ask for
    it. The options' predictors are so many stages before the last.
    Raises UsageError where nothing is possible."""
    best: DegreePlan | None = None
    for one in _combinations(shape, len(counts) // pipeline, pipeline, devices, options):
        setting = replace(one.setting, predictor_offset=predictor_offset)
        layers = LayerTable(shape, one.degrees, setting, costs)
        peak = layers.peak_bytes(counts)
        if best is not None and not _may_be_better(layers, counts, peak, best, memory_bytes):
            continue
        plan = DegreePlan(one.degrees, setting, tuple(counts), estimate_stages(layers, counts), layers)
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
                "Interleaved stages need one.",
            )
        raise nothing_possible(shape, devices, replace(options, pp=(pipeline,)))
    return best


def _combinations(
    shape: TransformerShape, virtual: int, pipeline: int, devices: int, options: DegreeOptions
) -> Iterator[Combination]:
    is_partial = options.recompute == "partial"
    recompute = "full" if is_partial else options.recompute
    own = replace(options, pp=(pipeline,), virtual_stages=(virtual,), recompute=recompute)
    for one in list_combinations(shape, devices, own):
        if one.recompute_blocks is None and not one.setting.predictor_offset:
            setting = replace(one.setting, recompute_blocks=1) if is_partial else one.setting
            yield Combination(one.degrees, setting)


def _may_be_better(
    layers: LayerTable, counts: Sequence[int], peak: float, best: DegreePlan, memory_bytes: float
) -> bool:
    if best.estimate.peak_bytes > memory_bytes:
        return peak < best.estimate.peak_bytes
    return peak <= memory_bytes and interleaved_bound(layers, counts) < best.estimate.step_seconds


def _rank(plan: DegreePlan, memory_bytes: float) -> tuple[bool, float]:
    fits = plan.estimate.peak_bytes <= memory_bytes
    return not fits, plan.estimate.step_seconds if fits else plan.estimate.peak_bytes
