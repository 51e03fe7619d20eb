"""Combinations of degrees of parallelism, micro-batch size, recomputation and virtual stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import get_args

from ...cost_models.transformer.implementations import IMPLEMENTATIONS
from ...cost_models.transformer.layer_work import Tokens
from ...cost_models.transformer.parallel_degrees import (
    UNSHARDED_STAGES,
    ContextExchange,
    ParallelDegrees,
)
from ...cost_models.transformer.training_setting import Recomputation, TrainingSetting
from ...cost_models.transformer.transformer_shape import TransformerShape
from .degree_options import DegreeOptions


@dataclass(frozen=True)
class Combination:
    """Degrees with micro-batches and recomputation."""

    degrees: ParallelDegrees
    setting: TrainingSetting

    @property
    def micro_batch_size(self) -> int:
        """Sequences of a micro-batch of one replica."""
        return self.setting.tokens.samples

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one replica in a step."""
        return self.setting.micro_batches

    @property
    def recompute(self) -> Recomputation:
        """Recomputation of every block."""
        return self.setting.recompute

    @property
    def recompute_blocks(self) -> int | None:
        """Number of first blocks of each (virtual) stage that are recomputed. None for all."""
        return self.setting.recompute_blocks

    @property
    def virtual_stages(self) -> int:
        """Virtual stages per device."""
        return self.setting.virtual_stages


def most_recompute_blocks(shape: TransformerShape, combination: Combination) -> int:
    """Return the largest useful number of recomputed first blocks.

    With one more, all blocks of the longest possible (virtual) stage would be recomputed.
    """
    slots = combination.degrees.pipeline * combination.virtual_stages
    return shape.blocks - 1 - sum(combination.setting.fewest_blocks(shape.blocks, slots)[1:])


def most_stages(shape: TransformerShape) -> int:
    """Return the most (virtual) stages to search by default: one per block, the embedding and the head."""
    return shape.blocks + 2


def virtual_stage_numbers(shape: TransformerShape, pipeline: int, options: DegreeOptions) -> Sequence[int]:
    """Return the numbers of virtual stages per device to search."""
    return options.virtual_stages or range(1, max(min(8, most_stages(shape) // pipeline), 1) + 1)


def list_combinations(shape: TransformerShape, devices: int, options: DegreeOptions) -> Iterator[Combination]:
    """Yield all combinations that the options allow and that divide the model, the devices and the batch.

    A combination that recomputes first blocks has `recompute_blocks` 1 and stands for all numbers up to
    `most_recompute_blocks`.

    Args:
        shape: The transformer.
        devices: Number of devices.
        options: Allowed degrees, and the training setting.
    """
    modes = [(kind, number) for word, kind, number in _MODES if options.recompute in ("auto", word)]
    modes += [("offload", None)] * options.offload
    implementation = IMPLEMENTATIONS[options.implementation]
    for tensor, context, stages in list_degrees(shape, devices, options):
        if devices % (tensor * context * stages):
            continue
        data = devices // (tensor * context * stages)
        if options.mini_batch % data:
            continue
        experts = expert_degrees(shape, tensor * context * data, options)
        exchanges, offsets = context_exchanges(context, options), _predictor_offsets(stages, options)
        virtuals = virtual_stage_numbers(shape, stages, options)
        choices = (
            ParallelDegrees(tensor, context, expert, stages, data, zero, exchange, most)
            for expert, exchange in product(experts, exchanges)
            for zero in zero_stages(shape, ParallelDegrees(tensor, context, expert, stages, data), options)
            for most in unsharded_stages(zero, stages, options)
        )
        for degrees in choices:
            if degrees.problem_with(shape, options.sequence):
                continue
            for size in micro_batch_sizes(options, options.mini_batch // data):
                tokens = Tokens(options.sequence, size)
                count = options.mini_batch // data // size
                for (recompute, number), virtual, offset in product(modes, virtuals, offsets):
                    setting = TrainingSetting(
                        count, tokens, recompute, virtual, number, options.predictors, offset
                    )
                    combination = Combination(degrees, setting)
                    unfit = _offloads_under_fsdp(degrees, setting)
                    if unfit or implementation.problem_with(degrees, setting):
                        continue
                    if number is None or most_recompute_blocks(shape, combination) > 0:
                        yield combination


def zero_stages(shape: TransformerShape, degrees: ParallelDegrees, options: DegreeOptions) -> Sequence[int]:
    """Return the allowed ZeRO stages; by default all of the implementation that may pay."""
    if options.zero is not None:
        return options.zero
    shares = max(degrees.gradient_group, degrees.expert_gradient_group if any(shape.routed) else 1)
    implementation = IMPLEMENTATIONS[options.implementation]
    return implementation.zero_stages(degrees.pipeline, has_replicas=shares > 1)


def unsharded_stages(zero: int, stages: int, options: DegreeOptions) -> Sequence[int]:
    """Return the numbers of virtual stages that may be gathered at a time.

    The largest if none is resharded.
    """
    allowed = options.max_param_unsharded_stages or (UNSHARDED_STAGES,)
    if stages == 1:
        return (UNSHARDED_STAGES,)
    return allowed if zero == 3 else (max(allowed),)


def list_degrees(
    shape: TransformerShape, devices: int, options: DegreeOptions
) -> Iterator[tuple[int, int, int]]:
    """Return the tensor, context and pipeline degrees that the options allow, whatever they divide."""
    divisors = [number for number in range(1, devices + 1) if devices % number == 0]
    contexts = options.cp or [one for one in divisors if one == 1 or options.sequence >= one * LEAST_TOKENS]
    stages = options.pp or [number for number in divisors if number <= most_stages(shape)]
    return product(options.tp or divisors, contexts, stages)


LEAST_TOKENS = 4096
"""Least tokens of a device that shares a sequence, unless the options name context degrees."""

_MODES: tuple[tuple[str, Recomputation, int | None], ...] = (
    ("none", "none", None),
    ("selective", "selective", None),
    ("partial", "full", 1),
    ("full", "full", None),
)
"""By option value, the recomputation and the number of recomputed blocks of a stage."""


def _offloads_under_fsdp(degrees: ParallelDegrees, setting: TrainingSetting) -> bool:
    """Return whether blocks offload under FSDP.

    That is not modelled: weights are gathered next to the copies.
    """
    return setting.recompute == "offload" and degrees.zero > 1


def context_exchanges(context: int, options: DegreeOptions) -> tuple[ContextExchange, ...]:
    """Return the exchanges for attention between the devices that share a sequence."""
    exchanges = get_args(ContextExchange)
    if context == 1:
        return exchanges[:1]
    return tuple(exchange for exchange in exchanges if options.context_exchange in ("auto", exchange))


def _predictor_offsets(stages: int, options: DegreeOptions) -> tuple[int, ...]:
    """Return the possible stages of the predictors, counted from the last one.

    They are with the head or one stage before it, but not on the first device: megatron-core would not reduce
    the gradients of their embedding there.
    """
    return (0, 1) if options.predictors and stages > 2 else (0,)


def expert_degrees(shape: TransformerShape, group: int, options: DegreeOptions) -> list[int]:
    """Return the allowed expert-parallel degrees that divide the devices and the experts."""
    allowed = options.ep or range(1, group + 1)
    if shape.experts is None:
        return [1] if 1 in allowed else []
    return [degree for degree in allowed if group % degree == 0 and shape.experts.number % degree == 0]


def micro_batch_sizes(options: DegreeOptions, per_replica: int) -> list[int]:
    """Return the allowed sequences per micro-batch that divide the sequences of a replica."""
    powers = [2**exponent for exponent in range(per_replica.bit_length())]
    return [
        size for size in options.micro_batch_size or powers if size <= per_replica and per_replica % size == 0
    ]


def options_to_allow(shape: TransformerShape, one: Combination, options: DegreeOptions) -> dict[str, object]:
    """Return the options that must change, by field, so that the search covers a combination without offload.

    The result is empty if it is covered. For a combination with ZeRO 3 of an implementation that only tries
    1, `zero` becomes (1, 3).

    Args:
        shape: The transformer.
        one: The combination.
        options: The options.
    """
    degrees = one.degrees
    values = {
        "tp": degrees.tensor,
        "pp": degrees.pipeline,
        "cp": degrees.context,
        "ep": degrees.expert,
        "zero": degrees.zero,
        "micro_batch_size": one.micro_batch_size,
        "virtual_stages": one.virtual_stages,
    }
    allowed = {name: getattr(options, name) for name in values}
    allowed["zero"] = zero_stages(shape, degrees, options)
    changes: dict[str, object] = {
        name: tuple(sorted({*allowed[name], value}))
        for name, value in values.items()
        if allowed[name] is not None and value not in allowed[name]
    }
    word = one.recompute if one.recompute_blocks is None else "partial"
    return changes if options.recompute in ("auto", word) else {**changes, "recompute": "auto"}


def stage_degrees(
    shape: TransformerShape, devices: int, samples: int, options: DegreeOptions
) -> Iterator[ParallelDegrees]:
    """Yield the degrees that the devices of one pipeline stage may have.

    Args:
        shape: The transformer.
        devices: Number of devices of the stage.
        samples: Samples of a micro-batch, which the replicas of the stage share.
        options: Allowed degrees.
    """
    divisors = [number for number in range(1, devices + 1) if devices % number == 0]
    contexts = options.cp or [one for one in divisors if one == 1 or options.sequence >= one * LEAST_TOKENS]
    for tensor, context in product(options.tp or divisors, contexts):
        data, rest = divmod(devices, tensor * context)
        if rest or samples % data or not _is_micro_batch_size(samples // data, options):
            continue
        experts = expert_degrees(shape, devices, options)
        zeros = [zero for zero in options.zero or (1,) if zero <= 1]
        for expert, zero, exchange in product(experts, zeros, context_exchanges(context, options)):
            degrees = ParallelDegrees(tensor, context, expert, 1, data, zero, exchange)
            if not degrees.problem_with(shape, options.sequence):
                yield degrees


def _is_micro_batch_size(size: int, options: DegreeOptions) -> bool:
    return size in options.micro_batch_size if options.micro_batch_size else size & (size - 1) == 0
