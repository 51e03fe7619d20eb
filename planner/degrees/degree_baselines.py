"""Baselines of the answer by degrees: rules of thumb, and a grid of trials.

Each has equally many blocks on every stage, and 1F1B. `megatron`: tensor parallelism inside a node, then as
many stages as the memory needs, data parallelism with the rest, and micro-batches of one sequence (Narayanan
et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021, section 3,
takeaways 1 and 2); recomputation only if it does not fit otherwise. `grid`: the fastest of powers of two,
tensor parallelism inside a node, micro-batches of 1 to 4 sequences, with and without recomputation.
`data-parallel` (ZeRO 1, or FSDP that does not reshard) and `fsdp` (ZeRO 3): every device is a replica.
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
    """Return all baselines of the same training. They ignore the options' degrees.

    Args:
        shape: The transformer.
        topology: Devices and links.
        costs: Costs of kernels and communication.
        options: Training setting.
        memory_bytes: Bytes that a device may use.
    """
    devices = topology.gpus
    combinations = list(_list_even(shape, devices, options, topology.gpus_per_node))
    plans = {
        "megatron": _first_that_fits(
            sorted(_megatron(combinations), key=_by_rule), shape, costs, memory_bytes
        ),
        "grid": _fastest(
            (combination for combination in combinations if combination.degrees.zero != 3),
            shape,
            costs,
            memory_bytes,
        ),
    }
    for name, is_fsdp in (("data-parallel", False), ("fsdp", True)):
        replicas = (
            combination
            for combination in combinations
            if combination.degrees.data == devices and (combination.degrees.zero == 3) == is_fsdp
        )
        plans[name] = _fastest(replicas, shape, costs, memory_bytes)
    reason = "does not fit, or does not divide the devices, the batch and the model"
    return tuple(DegreeBaseline(name, plan, "" if plan else reason) for name, plan in plans.items())


def _list_even(
    shape: TransformerShape, devices: int, options: DegreeOptions, gpus_per_node: int
) -> Iterator[Combination]:
    """Yield the combinations that baselines choose from, with the head on the last stage."""
    powers = [2**exponent for exponent in range(devices.bit_length())]
    free = replace(
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
    for combination in list_combinations(shape, devices, free):
        with_head = combination.setting.predictor_offset == 0
        if with_head and combination.recompute != "selective" and combination.recompute_blocks is None:
            yield combination


def _megatron(combinations: Sequence[Combination]) -> Iterator[Combination]:
    """Yield the combinations of Megatron's rule.

    It uses stages only if a whole node shares matrices, and experts on as many devices as possible.
    """
    most: dict[ParallelDegrees, int] = {}
    for combination in combinations:
        key = replace(combination.degrees, expert=1)
        most[key] = max(most.get(key, 1), combination.degrees.expert)
    widest = max((combination.degrees.tensor for combination in combinations), default=1)
    for combination in combinations:
        degrees = combination.degrees
        inside = degrees.tensor == widest or degrees.pipeline == 1
        spread = degrees.expert == most[replace(degrees, expert=1)]
        if degrees.zero != 3 and inside and spread and combination.micro_batch_size == 1:
            yield combination


def _by_rule(combination: Combination) -> tuple[bool, int, int]:
    return (
        combination.recompute == "full",
        combination.degrees.tensor * combination.degrees.pipeline,
        combination.degrees.pipeline,
    )


def _first_that_fits(
    ordered: Sequence[Combination], shape: TransformerShape, costs: RankCosts, memory_bytes: float
) -> DegreePlan | None:
    plans = (
        _estimate(combination, LayerTable(shape, combination.degrees, combination.setting, costs))
        for combination in ordered
    )
    return next((plan for plan in plans if plan.estimate.peak_bytes <= memory_bytes), None)


def _fastest(
    combinations: Iterable[Combination], shape: TransformerShape, costs: RankCosts, memory_bytes: float
) -> DegreePlan | None:
    tables = [
        (LayerTable(shape, combination.degrees, combination.setting, costs), combination)
        for combination in combinations
    ]
    bounds = [lower_bound(layers) for layers, _ in tables]
    best: DegreePlan | None = None
    for number in sorted(range(len(tables)), key=bounds.__getitem__):
        if best is not None and bounds[number] >= best.estimate.step_seconds:
            break
        layers, combination = tables[number]
        if layers.peak_bytes(_even(combination, shape)) > memory_bytes:
            continue
        plan = _estimate(combination, layers)
        if best is None or plan.estimate.step_seconds < best.estimate.step_seconds:
            best = plan
    return best


def _even(combination: Combination, shape: TransformerShape) -> tuple[int, ...]:
    return tuple(even_blocks(shape.blocks, combination.degrees.pipeline))


def _estimate(combination: Combination, layers: LayerTable) -> DegreePlan:
    counts = _even(combination, layers.shape)
    return DegreePlan(
        combination.degrees, combination.setting, counts, estimate_stages(layers, counts), layers
    )
