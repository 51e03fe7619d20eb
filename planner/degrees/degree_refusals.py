"""Errors if the options allow no combination of degrees, or if none fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ...cost_models.errors import InfeasibleError, UsageError
from ...cost_models.quantities import format_bytes, format_count
from ...cost_models.transformer.implementations import IMPLEMENTATIONS
from ...cost_models.transformer.layer_table import LayerTable
from ...cost_models.transformer.layer_work import Tokens
from ...cost_models.transformer.parallel_degrees import ParallelDegrees
from ...cost_models.transformer.training_setting import TrainingSetting
from ...cost_models.transformer.transformer_shape import TransformerShape
from .degree_combinations import (
    LEAST_TOKENS,
    Combination,
    context_exchanges,
    expert_degrees,
    list_combinations,
    list_degrees,
    micro_batch_sizes,
    most_recompute_blocks,
    zero_stages,
)
from .degree_options import DegreeOptions

FREE_VALUES: dict[str, Any] = {
    "tp": None,
    "pp": None,
    "cp": None,
    "ep": None,
    "zero": None,
    "micro_batch_size": None,
    "virtual_stages": None,
    "recompute": "auto",
    "context_exchange": "auto",
}
"""Options that restrict the search, with the value that does not."""


def nothing_possible(shape: TransformerShape, devices: int, options: DegreeOptions) -> UsageError:
    """Return an error with the restricting options, the nearest miss, and which option to change."""
    allowed = {
        name: getattr(options, name) for name, free in FREE_VALUES.items() if getattr(options, name) != free
    }
    if _is_any(shape, devices, replace(options, **FREE_VALUES)):
        words = ", ".join(f"{name}={_text(value)}" for name, value in allowed.items())
        enough = [
            name for name in allowed if _is_any(shape, devices, replace(options, **{name: FREE_VALUES[name]}))
        ]
        one_of = ", or ".join(f"`{name}`" for name in enough)
        return UsageError(
            f"{words}: not possible: {_nearest_miss(shape, devices, options)}",
            f"Allow other values of {one_of}." if enough else "Allow more of them.",
        )
    divide = f"no degrees divide {format_count(devices, 'device')}, {format_count(shape.blocks, 'layer')} and"
    divide += f" a batch of {options.mini_batch}"
    for context in range(1, devices + 1):
        shared = replace(options, **{**FREE_VALUES, "cp": (context,)})
        if devices % context == 0 and _is_any(shape, devices, shared):
            return UsageError(
                f"{divide} that leave a device {LEAST_TOKENS} tokens of a sequence of {options.sequence}",
                f"Allow that {context} devices share a sequence: `cp={context}`.",
            )
    why = ParallelDegrees(pipeline=1, data=devices).problem_with(shape, options.sequence)
    return UsageError(
        f"{divide}: {why or f'the batch of {options.mini_batch} does not divide'}",
        "Give another number of devices, or another batch.",
    )


def _is_any(shape: TransformerShape, devices: int, options: DegreeOptions) -> bool:
    return next(list_combinations(shape, devices, options), None) is not None


def _text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _nearest_miss(shape: TransformerShape, devices: int, options: DegreeOptions) -> str:
    """Return why the combination that passes most conditions is not allowed."""
    misses = (
        miss
        for degrees in list_degrees(shape, devices, options)
        for miss in _misses(shape, devices, options, *degrees)
    )
    return max(misses, key=lambda miss: miss[0])[1]


def _misses(
    shape: TransformerShape, devices: int, options: DegreeOptions, tensor: int, context: int, stages: int
) -> Iterator[tuple[int, str]]:
    """Yield how many conditions combinations with these degrees pass, and why the next one fails."""
    data, rest = divmod(devices, tensor * context * stages)
    if rest or not data:
        product = f"tp {tensor} x cp {context} x pp {stages} = {tensor * context * stages}"
        yield 0, f"{product} does not divide {format_count(devices, 'device')}"
        return
    if options.mini_batch % data:
        sequences = format_count(options.mini_batch, "sequence")
        yield 1, f"the batch of {sequences} does not divide over {data} replicas"
        return
    group = tensor * context * data
    experts = expert_degrees(shape, group, options)
    if not experts:
        number = 0 if shape.experts is None else shape.experts.number
        where = f"{number} experts and the {group} devices of a stage"
        yield 2, f"ep {_text(options.ep)} does not divide {where}" if number else "the model has no experts"
    for expert in experts:
        plain = ParallelDegrees(tensor, context, expert, stages, data)
        for zero in zero_stages(shape, plain, options):
            for exchange in context_exchanges(context, options):
                degrees = replace(plain, zero=zero, exchange=exchange)
                problem = degrees.problem_with(shape, options.sequence)
                yield (3, problem) if problem else _miss_of_stages(degrees, options)


def _miss_of_stages(degrees: ParallelDegrees, options: DegreeOptions) -> tuple[int, str]:
    per_replica = options.mini_batch // degrees.data
    sizes = micro_batch_sizes(options, per_replica)
    if not sizes:
        size = f"micro-batches of {_text(options.micro_batch_size)}"
        return 4, f"the {format_count(per_replica, 'sequence')} of a replica are no whole number of {size}"
    for virtual in options.virtual_stages or (1,):
        partial = options.recompute == "partial"
        setting = TrainingSetting(
            per_replica // sizes[0],
            Tokens(options.sequence, sizes[0]),
            "selective" if options.recompute == "selective" else "full" if partial else "none",
            virtual,
            1 if partial else None,
            options.predictors,
        )
        if problem := IMPLEMENTATIONS[options.implementation].problem_with(degrees, setting):
            return 5 + (degrees.pipeline > 1), problem
    return 7, f"no stage has a block that may stay as it is, recompute {options.recompute}"


def nothing_fits(
    shape: TransformerShape,
    devices: int,
    combinations: int,
    attempts: Sequence[tuple[LayerTable, Combination]],
    memory_bytes: float,
) -> InfeasibleError:
    """Return an error that names the combination with even stages that needs the least memory.

    Args:
        shape: The transformer.
        devices: Number of devices.
        combinations: Number of combinations that were tried.
        attempts: Their costs.
        memory_bytes: Bytes that a device may use.
    """
    least, name = float("inf"), ""
    for layers, combination in sorted(attempts, key=lambda each: each[0].least_bytes()):
        if layers.least_bytes() >= least:
            break
        even = layers.setting.even_blocks(shape.blocks, layers.slots)
        for candidate, variant in _every_number(shape, layers, combination, even):
            peak = candidate.peak_bytes(even)
            if peak < least:
                least = peak
                size, degrees = combination.micro_batch_size, combination.degrees.describe()
                name = f"{degrees}, micro-batches of {size}, {_again(variant)}"
    return InfeasibleError(
        f"{shape.name}: none of {format_count(combinations, 'combination')} was found to fit: of those with "
        f"even stages {name} needs least, {format_bytes(least)} on a device, of which "
        f"{format_bytes(max(memory_bytes, 0.0))} may be used",
        f"Use more than {format_count(devices, 'device')}, a shorter sequence, or allow more degrees.",
        {"needed_bytes": least},
    )


def _every_number(
    shape: TransformerShape, layers: LayerTable, combination: Combination, even: Sequence[int]
) -> Iterator[tuple[LayerTable, Combination]]:
    """Yield a combination; if it recomputes first blocks, with every number that changes its stages."""
    yield layers, combination
    if combination.recompute_blocks == 1:
        for number in range(2, min(max(even), most_recompute_blocks(shape, combination)) + 1):
            setting = replace(combination.setting, recompute_blocks=number)
            yield layers.with_setting(setting), replace(combination, setting=setting)


def _again(combination: Combination) -> str:
    """Return the recomputation in words."""
    number = combination.recompute_blocks
    return f"recompute {combination.recompute if number is None else f'first {number}'}"
