"""The kernels of a training step: products, attention, passes over memory, collectives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Layout = Literal["TN", "NN", "NT"]
"""Of a linear layer: forward, gradient of its input, gradient of its weight (which is added up in
float32)."""
Pass = Literal["forward", "input_gradient", "weight_gradient"]
Group = Literal["tensor", "context", "expert"]
CollectiveName = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]


@dataclass(frozen=True)
class Matmul:
    """[m, k] x [k, n]."""

    m: int
    k: int
    n: int
    layout: Layout

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
    """Causal attention (flash attention) of `samples` sequences."""

    sequence: int
    heads: int
    key_value_heads: int
    head_width: int
    value_width: int
    backward: bool
    samples: int = 1

    @property
    def flops(self) -> float:
        """Of the half below the diagonal: two products forward, five backward (Dao, "FlashAttention-2",
        ICLR 2024, section 3.1)."""
        half = self.samples * float(self.sequence) ** 2 * self.heads * (self.head_width + self.value_width)
        return 2.5 * half if self.backward else half


@dataclass(frozen=True)
class MemoryPass:
    """An operation that takes what its bytes take: norms, activations, sums, copies."""

    bytes: float
    kind: str = "default"


@dataclass(frozen=True)
class Collective:
    """`bytes`: of the whole tensor for all-gather, reduce-scatter and all-reduce, of what one device sends
    (to itself included) for all-to-all."""

    name: CollectiveName
    bytes: float
    group: Group


Kernel: TypeAlias = Matmul | GroupedMatmul | AttentionKernel | MemoryPass | Collective
Product: TypeAlias = Matmul | GroupedMatmul | AttentionKernel
