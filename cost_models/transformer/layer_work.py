"""The kernels of a layer on one device; those that every layer has: linear products, and the collectives of
tensor parallelism."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .kernel_table import Collective, Kernel, Matmul, MemoryPass
from .parallel_degrees import ParallelDegrees

NUMBER = 2
"""Bytes of a bfloat16."""

LEAST_OFFLOADED = 2**20
"""Numbers of a tensor: megatron-core keeps smaller ones on the device (`min_offloaded_tensor_size`)."""


class Offload(NamedTuple):
    """Bytes of what a layer saves that leave the device where activations are offloaded, and bytes that are
    copied to the host, and later back: a tensor that two modules save is copied for each."""

    saved: float
    copied: float

    def plus(self, other: Offload) -> Offload:
        return Offload(self.saved + other.saved, self.copied + other.copied)


def offload_tensors(once: Iterable[float], twice: Iterable[float] = ()) -> Offload:
    """Of bfloat16 tensors of so many numbers that modules save once or twice: those that are large enough."""
    one, two = (sum(NUMBER * own for own in each if own >= LEAST_OFFLOADED) for each in (once, twice))
    return Offload(one + two, one + 2 * two)


@dataclass(frozen=True, eq=False)
class LayerWork:
    """Of one layer on one device, for one micro-batch: kernels of forward and backward, bytes that it saves
    for backward, and bytes besides at its peak, while backward runs.

    `selective`: of the forward those kernels that selective recomputation runs again;
    `selective_saved`: what need not be kept then. `offload`: of what it saves
    that which the trainer's modules can keep in the host's memory."""

    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    saved: float
    workspace: float
    exchanges_tokens: bool = False
    """Whether the host waits for how many tokens each expert takes."""
    selective: tuple[Kernel, ...] = ()
    selective_saved: float = 0.0
    offload: Offload = Offload(0.0, 0.0)

    def __add__(self, other: LayerWork) -> LayerWork:
        return LayerWork(
            self.forward + other.forward,
            other.backward + self.backward,
            self.saved + other.saved,
            max(self.workspace, other.workspace),
            self.exchanges_tokens or other.exchanges_tokens,
            self.selective + other.selective,
            self.selective_saved + other.selective_saved,
            self.offload.plus(other.offload),
        )


@dataclass(frozen=True)
class Tokens:
    """Of one micro-batch: `sequence` tokens of each of `samples`."""

    sequence: int
    samples: int = 1

    def on(self, degrees: ParallelDegrees) -> int:
        """Those for which a device computes products: its share of the context."""
        return self.sequence * self.samples // degrees.context


def linear(tokens: int, inputs: int, outputs: int) -> tuple[Matmul, Matmul, Matmul]:
    """The product of forward, and those of the gradients of its input and of its weight."""
    return (
        Matmul(tokens, inputs, outputs, "TN"),
        Matmul(tokens, outputs, inputs, "NN"),
        Matmul(outputs, tokens, inputs, "NT"),
    )


def linears(
    tokens: int, inputs: int, outputs: Sequence[int], join: float
) -> tuple[list[Kernel], list[Kernel]]:
    """Forward and backward of products of the same input. `join`: passes over the input's gradient for each
    but the first, to add it up."""
    products = [linear(tokens, inputs, size) for size in outputs]
    joins = [MemoryPass(join * NUMBER * tokens * inputs)] * (len(products) - 1)
    return [own[0] for own in products], [*(part for own in products for part in own[1:]), *joins]


def gather_and_scatter(bytes: float, degrees: ParallelDegrees) -> tuple[list[Kernel], list[Kernel]]:
    """Of a whole tensor: the all-gather before a column-parallel product, and the reduce-scatter behind a
    row-parallel one."""
    if degrees.tensor == 1:
        return [], []
    return [Collective("all_gather", bytes, "tensor")], [Collective("reduce_scatter", bytes, "tensor")]
