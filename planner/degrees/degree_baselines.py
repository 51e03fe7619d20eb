"""What the answer by degrees is compared with: degrees as rules of thumb, and a grid of trials, give them.

Each has as many blocks on every stage as on the others, and 1F1B. `megatron`: tensor parallelism inside a
node, then as many stages as the memory needs, data parallelism with the rest, and micro-batches of one
sequence (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
SC 2021, section 3, takeaways 1 and 2); recomputation where it does not fit without. `grid`: the fastest
of powers of two, tensor parallelism inside a node, micro-batches of 1 to 4 sequences, with and without
recomputation. `data-parallel` (ZeRO 1, or FSDP that does not reshard) and `fsdp` (ZeRO 3): every device a
replica.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from ...cost_models.topology import Topology
from ...cost_models.transformer.implementations import IMPLEMENTATIONS
from ...cost_models.transformer.layer_table import LayerTable
from ...cost_models.transformer.parallel_degrees import ParallelDegrees
from ...cost_models.transformer.rank_costs import RankCosts
from ...cost_models.transformer.training_setting import even_blocks
from ...cost_models.transformer.training_step import estimate_stages
from ...cost_models.transformer.transformer_shape import TransformerShape
from .degree_combinations import Combination, list_combinations
from .degree_options import DegreeOptions
from .degree_search import DegreeBaseline, DegreePlan
from .stage_divisions import lower_bound


def degree_baselines(
    shape: TransformerShape,
    topology: Topology,
    costs: RankCosts,
    options: DegreeOptions,
    memory_bytes: float,
) -> tuple[DegreeBaseline, ...]:
    """All of them, of the same training; of the options' degrees they know nothing."""
    devices = topology.gpus
    every = list(_list_even(shape, devices, options, topology.gpus_per_node))
    plans = {
        "megatron": _first_that_fits(sorted(_megatron(every), key=_by_rule), shape, costs, memory_bytes),
        "grid": _fastest((one for one in every if one.degrees.zero != 3), shape, costs, memory_bytes),
    }
    for name, is_fsdp in (("data-parallel", False), ("fsdp", True)):
        replicas = (
            one for one in every if one.degrees.data == devices and (one.degrees.zero == 3) == is_fsdp
        )
        plans[name] = _fastest(replicas, shape, costs, memory_bytes)
    none = "does not fit, or does not divide the devices, the batch and the model"
    return tuple(DegreeBaseline(name, plan, "" if plan else none) for name, plan in plans.items())


def _list_even(
    shape: TransformerShape, devices: int, options: DegreeOptions, gpus_per_node: int
) -> Iterator[Combination]:
    powers = [2**exponent for exponent in range(devices.bit_length())]
    own = replace(
        options,
        tp=tuple(power for power in powers if power <= gpus_per_node),
        pp=tuple(power for power in powers if shape.blocks % power == 0),
        cp=None,
        ep=tuple(powers),
        zero=(1, 2, 3) if IMPLEMENTATIONS[options.implementation].uses_fsdp else (1, 3),
        micro_batch_size=(1, 2, 4),
        virtual_stages=(1,),
        recompute="auto",
        offload=False,
    )
    for one in list_combinations(shape, devices, own):
        with_head = one.setting.predictor_offset == 0
        if with_head and one.recompute != "selective" and one.recompute_blocks is None:
            yield one


def _megatron(every: Sequence[Combination]) -> Iterator[Combination]:
    """Those of its rule: stages only where all of a node shares matrices, experts on as many devices as can
    have them."""
    most: dict[ParallelDegrees, int] = {}
    for one in every:
        key = replace(one.degrees, expert=1)
        most[key] = max(most.get(key, 1), one.degrees.expert)
    widest = max((one.degrees.tensor for one in every), default=1)
    for one in every:
        degrees = one.degrees
        inside = degrees.tensor == widest or degrees.pipeline == 1
        spread = degrees.expert == most[replace(degrees, expert=1)]
        if degrees.zero != 3 and inside and spread and one.micro_batch_size == 1:
            yield one


def _by_rule(one: Combination) -> tuple[bool, int, int]:
    return one.recompute == "full", one.degrees.tensor * one.degrees.pipeline, one.degrees.pipeline


def _first_that_fits(
    ordered: Sequence[Combination], shape: TransformerShape, costs: RankCosts, memory_bytes: float
) -> DegreePlan | None:
    plans = (_estimate(one, LayerTable(shape, one.degrees, one.setting, costs)) for one in ordered)
    return next((plan for plan in plans if plan.estimate.peak_bytes <= memory_bytes), None)


def _fastest(
    combinations: Iterable[Combination], shape: TransformerShape, costs: RankCosts, memory_bytes: float
) -> DegreePlan | None:
    tables = [(LayerTable(shape, one.degrees, one.setting, costs), one) for one in combinations]
    bounds = [lower_bound(layers) for layers, _ in tables]
    best: DegreePlan | None = None
    for number in sorted(range(len(tables)), key=bounds.__getitem__):
        if best is not None and bounds[number] >= best.estimate.step_seconds:
            break
        layers, one = tables[number]
        if layers.peak_bytes(_even(one, shape)) > memory_bytes:
            continue
        plan = _estimate(one, layers)
        if best is None or plan.estimate.step_seconds < best.estimate.step_seconds:
            best = plan
    return best


def _even(one: Combination, shape: TransformerShape) -> tuple[int, ...]:
    return tuple(even_blocks(shape.blocks, one.degrees.pipeline))


def _estimate(one: Combination, layers: LayerTable) -> DegreePlan:
    counts = _even(one, layers.shape)
    return DegreePlan(one.degrees, one.setting, counts, estimate_stages(layers, counts), layers)
