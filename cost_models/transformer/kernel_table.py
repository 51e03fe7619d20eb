"""The kernels of a training step, and a table of measured ones: the efficiency that a device reaches.

Kernels are products, attention, passes over memory and collectives."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, TypeAlias

import numpy as np

MatmulLayout = Literal["TN", "NN", "NT"]
"""Of a linear layer: forward, gradient of its input, gradient of its weight (which is added up in
float32)."""
Pass = Literal["forward", "input_gradient", "weight_gradient"]
Group = Literal["tensor", "context", "expert"]
CollectiveName = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "ring"]


@dataclass(frozen=True)
class Matmul:
    """[m, k] x [k, n]."""

    m: int
    k: int
    n: int
    layout: MatmulLayout

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.k * self.n


@dataclass(frozen=True)
class GroupedMatmul:
    """`groups` products of [m, k] x [k, n] in one kernel: one for each expert on the device."""

    groups: int
    m: int
    n: int
    k: int
    part: Pass

    @property
    def flops(self) -> float:
        return 2.0 * self.groups * self.m * self.n * self.k


@dataclass(frozen=True)
class AttentionKernel:
    """Attention (flash attention) of `samples` sequences; `causal`: to the tokens before only.

    `attended`: the share of its FLOPs, and so of its seconds, that is computed where attention has a window.
    """

    sequence: int
    heads: int
    key_value_heads: int
    head_width: int
    value_width: int
    backward: bool
    samples: int = 1
    causal: bool = True
    attended: float = 1.0

    @property
    def flops(self) -> float:
        """Of the half below the diagonal, or of the square, without a window: two products forward, five
        backward (Dao, "FlashAttention-2", ICLR 2024, section 3.1)."""
        half = self.samples * float(self.sequence) ** 2 * self.heads * (self.head_width + self.value_width)
        return half * (2.5 if self.backward else 1) * (1 if self.causal else 2)


@dataclass(frozen=True)
class MemoryPass:
    """An operation that takes what its bytes take: norms, activations, sums, copies."""

    bytes: float
    kind: str = "default"


@dataclass(frozen=True)
class Collective:
    """`bytes`: of the whole tensor for all-gather, reduce-scatter and all-reduce, of what one device sends
    for all-to-all (to itself included) and for ring (to the next device, as the one before sends to it)."""

    name: CollectiveName
    bytes: float
    group: Group


@dataclass(frozen=True)
class RingAttention:
    """`steps` of attention, during each of which a device of the context sends `bytes` to the next one."""

    step: AttentionKernel
    steps: int
    bytes: float


Kernel: TypeAlias = Matmul | GroupedMatmul | AttentionKernel | RingAttention | MemoryPass | Collective
Product: TypeAlias = Matmul | GroupedMatmul | AttentionKernel


_Key = tuple[str, tuple[float, ...]]
NEIGHBOURS = 3
"""Shapes of the table between which one that is not in it lies."""
TERA = 1e12


@dataclass(frozen=True)
class KernelTable:
    """`efficiency` by kind of kernel and shape; `peak` in FLOP/s."""

    peak: float
    efficiency: Mapping[str, Mapping[tuple[float, ...], float]]
    source: str = ""
    _between: dict[tuple[_Key, float], float] = field(default_factory=dict, compare=False, repr=False)

    def seconds(self, kernel: Product, bandwidth: float = math.inf) -> float:
        """At the efficiency of its shape; `bandwidth` of the device's memory in bytes per second.

        Of a shape that is not in the table: its FLOPs at the peak and its bytes at the bandwidth, one after
        the other, at the share of these that the nearest shapes of its kind reach. They are the nearest by
        the logarithms of their sizes, each weighed by one over the square of its distance. Raises KeyError
        for a kind without rows."""
        kind, shape = kernel_key(kernel)
        return self.row_seconds(kind, shape, bandwidth) * table_flops(kernel) / row_flops(kind, shape)

    def row_seconds(self, kind: str, shape: tuple[float, ...], bandwidth: float) -> float:
        """The same of a row of that shape: of one sample's causal attention."""
        share = self.efficiency[kind].get(shape)
        if share is not None:
            return row_flops(kind, shape) / (self.peak * share)
        key = (kind, shape), bandwidth
        if key not in self._between:
            self._between[key] = self._interpolate(kind, shape, bandwidth)
        return self._between[key]

    def has(self, kernel: Product) -> bool:
        """Whether it has a row of its own."""
        kind, shape = kernel_key(kernel)
        return shape in self.efficiency.get(kind, {})

    def knows(self, kernel: Product) -> bool:
        """Whether there are rows of its kind."""
        return bool(self.efficiency.get(kernel_key(kernel)[0]))

    def surrounds(self, kernel: Product) -> bool:
        """Whether each of its sizes lies among those of the rows of its kind."""
        kind, shape = kernel_key(kernel)
        rows = list(self.efficiency.get(kind, {}))
        return bool(rows) and all(
            min(own) <= size <= max(own) for size, own in zip(shape, zip(*rows, strict=True), strict=True)
        )

    def _interpolate(self, kind: str, shape: tuple[float, ...], bandwidth: float) -> float:
        """Seconds of a row of that shape."""
        shapes, rows = self._logarithms[kind]
        squares = ((shapes - np.log(shape)) ** 2).sum(axis=1)
        nearest = np.argsort(squares, kind="stable")[:NEIGHBOURS]
        weights = 1 / np.maximum(squares[nearest], 1e-12)
        shares = [self._share_of_limits(kind, rows[place], bandwidth) for place in nearest]
        return self._limit_seconds(kind, shape, bandwidth) / float(shares @ weights / weights.sum())

    def _share_of_limits(self, kind: str, shape: tuple[float, ...], bandwidth: float) -> float:
        seconds = row_flops(kind, shape) / (self.peak * self.efficiency[kind][shape])
        return self._limit_seconds(kind, shape, bandwidth) / seconds

    def _limit_seconds(self, kind: str, shape: tuple[float, ...], bandwidth: float) -> float:
        return row_flops(kind, shape) / self.peak + row_bytes(kind, shape) / bandwidth

    @cached_property
    def _logarithms(self) -> dict[str, tuple[np.ndarray, list[tuple[float, ...]]]]:
        return {kind: (np.log(np.array(list(rows))), list(rows)) for kind, rows in self.efficiency.items()}


def kernel_key(kernel: Product) -> _Key:
    """The kind and the sizes of the row that it would have."""
    match kernel:
        case Matmul():
            return f"matmul {kernel.layout}", (kernel.m, kernel.k, kernel.n)
        case GroupedMatmul():
            return f"group_matmul {kernel.part}", (kernel.groups, kernel.m, kernel.n, kernel.k)
        case AttentionKernel():
            sizes = (
                kernel.sequence,
                kernel.heads,
                kernel.key_value_heads,
                kernel.head_width,
                kernel.value_width,
            )
            return f"attention {'backward' if kernel.backward else 'forward'}", sizes


def table_flops(kernel: Product) -> float:
    """As a table counts them: of causal attention those of the whole square."""
    return kernel.flops * (2 if isinstance(kernel, AttentionKernel) else 1)


def row_flops(kind: str, shape: tuple[float, ...]) -> float:
    """The same of a row."""
    if not kind.startswith("attention"):
        return 2 * math.prod(shape)
    sequence, heads, _, width, value_width = shape
    return (5 if kind.endswith("backward") else 2) * sequence**2 * heads * (width + value_width)


def row_bytes(kind: str, shape: tuple[float, ...]) -> float:
    """That a product reads and writes at least; a gradient of a weight is read and written in float32. None
    of attention, which computes far more."""
    if kind.startswith("matmul"):
        m, k, n = shape
        return 2.0 * (m * k + k * n) + (8.0 if kind.endswith("NT") else 2.0) * m * n
    if kind.startswith("group_matmul"):
        groups, m, n, k = shape
        return groups * (2.0 * m * (n + k) + (8.0 if kind.endswith("weight_gradient") else 2.0) * n * k)
    return 0.0


def product_bytes(kernel: Product) -> float:
    """The same of a kernel."""
    return row_bytes(*kernel_key(kernel))
