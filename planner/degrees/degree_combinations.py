"""All combinations of degrees of parallelism, micro-batch size, recomputation and virtual stages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from ...cost_models.errors import UsageError
from ...cost_models.transformer.block_kernels import Tokens
from ...cost_models.transformer.parallel_degrees import ParallelDegrees
from ...cost_models.transformer.training_setting import (
    Recomputation,
    TrainingSetting,
    virtual_stages_problem,
)
from ...cost_models.transformer.transformer_shape import TransformerShape
from .degree_options import DegreeOptions


@dataclass(frozen=True)
class Combination:
    """Degrees with the micro-batches and recomputation."""

    degrees: ParallelDegrees
    setting: TrainingSetting

    @property
    def micro_batch_size(self) -> int:
        """Sequences."""
        return self.setting.tokens.samples

    @property
    def micro_batches(self) -> int:
        """Of one replica."""
        return self.setting.micro_batches

    @property
    def recompute(self) -> Recomputation:
        """Of every block."""
        return self.setting.recompute

    @property
    def virtual_stages(self) -> int:
        """Of a device."""
        return self.setting.virtual_stages


def list_combinations(shape: TransformerShape, devices: int, options: DegreeOptions) -> Iterator[Combination]:
    """All that the options allow and that divide the model, the devices and the batch."""
    divisors = [number for number in range(1, devices + 1) if devices % number == 0]
    tensors, contexts = options.tp or divisors, options.cp or (1,)
    recomputes: tuple[Recomputation, ...] = ("none", "selective", "full")
    modes = [each for each in recomputes if options.recompute in ("auto", each)]
    for tensor, context, stages in product(tensors, contexts, options.pp or divisors):
        if devices % (tensor * context * stages):
            continue
        data = devices // (tensor * context * stages)
        if options.mini_batch % data:
            continue
        experts = _expert_degrees(shape, tensor * context * data, options)
        for expert, zero in product(experts, options.zero):
            degrees = ParallelDegrees(tensor, context, expert, stages, data, zero)
            if degrees.problem_with(shape, options.sequence):
                continue
            for size in _micro_batch_sizes(options, options.mini_batch // data):
                tokens = Tokens(options.sequence, size)
                count = options.mini_batch // data // size
                for recompute, virtual in product(modes, options.virtual_stages or range(1, 9)):
                    setting = TrainingSetting(count, tokens, recompute, virtual)
                    if not virtual_stages_problem(shape, degrees, setting):
                        yield Combination(degrees, setting)


def _expert_degrees(shape: TransformerShape, group: int, options: DegreeOptions) -> list[int]:
    allowed = options.ep or range(1, group + 1)
    if shape.experts is None:
        return [1] if 1 in allowed else []
    return [degree for degree in allowed if group % degree == 0 and shape.experts.number % degree == 0]


def _micro_batch_sizes(options: DegreeOptions, per_replica: int) -> list[int]:
    powers = [2**exponent for exponent in range(per_replica.bit_length())]
    return [
        size for size in options.micro_batch_size or powers if size <= per_replica and per_replica % size == 0
    ]


def nothing_possible(shape: TransformerShape, devices: int, options: DegreeOptions) -> UsageError:
    free = replace(options, tp=None, pp=None, cp=None, ep=None, micro_batch_size=None, virtual_stages=None)
    if next(list_combinations(shape, devices, free), None) is not None:
        allowed = ", ".join(
            f"{name}={','.join(map(str, value))}"
            for name in ("tp", "pp", "cp", "ep", "micro_batch_size", "virtual_stages")
            if (value := getattr(options, name))
        )
        return UsageError(
            f"{allowed}: no such degrees divide {devices} devices, the batch of {options.mini_batch} "
            "and the model",
            "Allow more of them.",
        )
    degrees = ParallelDegrees(pipeline=1, data=devices)
    why = (
        degrees.problem_with(shape, options.sequence) or f"the batch of {options.mini_batch} does not divide"
    )
    return UsageError(
        f"no degrees divide {devices} devices, {shape.blocks} layers and a batch of "
        f"{options.mini_batch}: {why}",
        "Give another number of devices, or another batch.",
    )
