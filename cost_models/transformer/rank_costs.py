"""Seconds of a device's kernels: from a table of measured kernels, or from the device's limits.

Products that no table has take the longer of their FLOPs and their bytes at the limits, at an assumed share
of them. A pass over memory takes its bytes at a share of the bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np

from ..collectives import (
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    is_concave,
    reduce_scatter_seconds,
    ring_step_seconds,
)
from ..machines import ATTENTION_SHARE, MEMORY_SHARE, PRODUCT_SHARE
from ..topology import Topology
from .corrections import Corrections
from .implementations import MEGATRON, Implementation
from .kernel_table import (
    AttentionKernel,
    Collective,
    CollectiveName,
    Kernel,
    KernelTable,
    MemoryPass,
    Product,
    RingAttention,
    product_bytes,
)
from .layer_work import LayerWork
from .parallel_degrees import ParallelDegrees


class GroupLinks(Protocol):
    """Seconds of what devices exchange. A group: `size` devices, each `stride` ranks after the one before."""

    @property
    def is_concave(self) -> bool:
        """Return whether the seconds of reductions and gathers are concave in their bytes, above none.

        If not, seconds divided by bytes still never rise with the bytes.
        """

    def collective(self, name: CollectiveName, bytes: float, size: int, stride: int) -> float:
        """Bytes as of `kernels.Collective`."""

    def transfer(self, bytes: float, stride: int) -> float:
        """From one device to the one `stride` ranks after it."""


_SECONDS: Mapping[CollectiveName, Callable[[Topology, Iterable[int], float], float]] = {
    "all_reduce": all_reduce_seconds,
    "all_gather": all_gather_seconds,
    "reduce_scatter": reduce_scatter_seconds,
    "all_to_all": all_to_all_seconds,
    "ring": ring_step_seconds,
}


@dataclass(frozen=True)
class TopologyLinks:
    """Seconds by the links of a topology, each collective by its fastest algorithm."""

    topology: Topology
    _collectives: dict[Hashable, float] = field(init=False, default_factory=dict, compare=False, repr=False)

    @cached_property
    def is_concave(self) -> bool:
        return is_concave(self.topology)

    def collective(self, name: CollectiveName, bytes: float, size: int, stride: int) -> float:
        key = name, bytes, size, stride
        if key not in self._collectives:
            ranks = range(0, size * stride, stride)
            self._collectives[key] = float(_SECONDS[name](self.topology, ranks, bytes))
        return self._collectives[key]

    def transfer(self, bytes: float, stride: int) -> float:
        return float(self.topology.link(0, stride).seconds(bytes))


@dataclass(frozen=True)
class CollectiveCurve:
    """Measured seconds of a collective by bytes.

    Between sizes seconds are interpolated. Below the smallest size they are its own, above the largest one
    the bytes per second are its own. Noise is removed, so that neither seconds nor bytes per second ever
    fall as bytes grow.
    """

    bytes: tuple[float, ...]
    seconds: tuple[float, ...]

    @cached_property
    def _smooth(self) -> np.ndarray:
        sizes = np.array(self.bytes)
        rising = np.maximum.accumulate(np.array(self.seconds))
        return sizes * np.minimum.accumulate(rising / sizes)

    def at(self, bytes: float) -> float:
        """Return the seconds of so many bytes."""
        if bytes > self.bytes[-1]:
            return float(self._smooth[-1] * bytes / self.bytes[-1])
        return float(np.interp(bytes, self.bytes, self._smooth))


GroupKey: TypeAlias = tuple[CollectiveName, int, int]
"""A collective, the devices of its group and the ranks from one to the next."""


@dataclass(frozen=True)
class MeasuredGroupLinks(TopologyLinks):
    """Seconds of collectives as measured in groups of the same size and stride, others by the topology."""

    curves: Mapping[GroupKey, CollectiveCurve] = field(default_factory=dict)

    @cached_property
    def is_concave(self) -> bool:
        return False

    def collective(self, name: CollectiveName, bytes: float, size: int, stride: int) -> float:
        curve = self.curves.get((name, size, stride))
        return super().collective(name, bytes, size, stride) if curve is None else curve.at(bytes)


@dataclass(frozen=True)
class DeviceLimits:
    """Of one device: FLOP/s of dense products in bfloat16, bytes per second of its memory, and the share of
    each that kernels reach (ours are assumptions; a table of kernels replaces those of products).

    `shares`: of the bandwidth, by the kind of a pass over memory where it is not the `memory_share`.
    `stated_flops`: of the device's maker; `flops` are others where a table of kernels names its peak.
    """

    flops: float
    bandwidth: float
    product_share: float = PRODUCT_SHARE.value
    attention_share: float = ATTENTION_SHARE
    memory_share: float = MEMORY_SHARE
    shares: Mapping[str, float] = field(default_factory=dict)
    stated_flops: float | None = None
    measures_memory: bool = False
    """True if the memory bandwidth was measured by passes over memory."""

    def product_seconds(self, kernel: Product) -> float:
        share = self.attention_share if isinstance(kernel, AttentionKernel) else self.product_share
        return max(
            kernel.flops / (self.flops * share), product_bytes(kernel) / (self.bandwidth * self.memory_share)
        )

    def pass_seconds(self, kernel: MemoryPass) -> float:
        return kernel.bytes / (self.bandwidth * self.shares.get(kernel.kind, self.memory_share))


@dataclass(frozen=True)
class Overheads:
    """What a training loop adds to kernels that were measured one by one.

    Attributes:
        gap: Seconds from the end of a pass over memory to the next kernel. The default is the latency of such
            an operation in the published table of B200 links. In a layer with experts the host waits to know
            how many tokens each takes, is no longer ahead of the device, and every kernel has this gap.
        slowdown: Seconds of a product or of attention in a training loop over those of a table, where it ran
            alone (perhaps a device that computes without a break lowers its clock). The default was fitted
            to 18 measured steps of Megatron-LM on B200 (docs/lab/transformers.md); elsewhere it is an
            assumption.
    """

    gap: float = 30e-6
    slowdown: float = 1.06


class PassSeconds(NamedTuple):
    """Of a layer for one micro-batch."""

    forward: float
    backward: float

    @property
    def both(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class RankCosts:
    """What kernels take on a device among others."""

    limits: DeviceLimits
    links: GroupLinks
    table: KernelTable | None = None
    overheads: Overheads = Overheads()
    host_bandwidth: float | None = None
    """Bytes per second of a device's copies to the host's memory, and of those back; None: not known."""
    implementation: Implementation = MEGATRON
    """Training code that is costed."""
    corrections: Corrections = Corrections()
    """Measured whole layers and optimizer step."""
    updates: dict[Hashable, float] = field(init=False, default_factory=dict, compare=False, repr=False)
    """Seconds of updates that were asked for."""
    works: dict[Hashable, LayerWork] = field(init=False, default_factory=dict, compare=False, repr=False)
    """Layers whose seconds were asked for, by what they depend on (`layer_seconds.py`)."""
    _passes: dict[Hashable, PassSeconds] = field(init=False, default_factory=dict, compare=False, repr=False)

    def seconds(self, work: LayerWork, degrees: ParallelDegrees) -> PassSeconds:
        """Of the forward and the backward of a layer, one kernel after another."""
        key = work, degrees.tensor, degrees.context, degrees.expert
        if key not in self._passes:
            waits = work.exchanges_tokens
            self._passes[key] = PassSeconds(
                *(
                    self._sum(kernels, degrees) + waits * self._launch_seconds(kernels)
                    for kernels in (work.forward, work.backward)
                )
            )
        return self._passes[key]

    def memory_seconds(self, bytes: float) -> float:
        """Of a pass over memory of so many bytes."""
        return self.limits.pass_seconds(MemoryPass(bytes)) + self.overheads.gap

    def is_measured(self, kernel: Kernel, degrees: ParallelDegrees) -> bool:
        """Return whether a kernel of that shape, or a collective in such a group, was measured."""
        match kernel:
            case MemoryPass():
                return self.limits.measures_memory
            case Collective(name, _, group):
                curves = self.links.curves if isinstance(self.links, MeasuredGroupLinks) else {}
                return (name, *rank_group(group, degrees)) in curves
            case RingAttention(step, _, bytes):
                return self.is_measured(step, degrees) and self.is_measured(
                    Collective("ring", bytes, "context"), degrees
                )
            case _:
                return self.table is not None and self.table.has(kernel)

    def _sum(self, kernels: Iterable[Kernel], degrees: ParallelDegrees) -> float:
        return sum(self.kernel_seconds(kernel, degrees) for kernel in kernels)

    def _launch_seconds(self, kernels: Iterable[Kernel]) -> float:
        """Gaps after kernels other than passes over memory, whose seconds include theirs."""
        return self.overheads.gap * sum(not isinstance(kernel, MemoryPass) for kernel in kernels)

    def kernel_seconds(self, kernel: Kernel, degrees: ParallelDegrees) -> float:
        """Of one kernel, on a device of these degrees."""
        match kernel:
            case MemoryPass():
                return self.limits.pass_seconds(kernel) + self.overheads.gap
            case Collective(name, bytes, group):
                size, stride = rank_group(group, degrees)
                return self.links.collective(name, bytes, size, stride)
            case RingAttention(step, steps, bytes):
                size, stride = rank_group("context", degrees)
                own, sent = (
                    self.kernel_seconds(step, degrees),
                    self.links.collective("ring", bytes, size, stride),
                )
                return own + (steps - 1) * max(own, sent)
            case _:
                share = kernel.attended if isinstance(kernel, AttentionKernel) else 1.0
                if self.table is not None and self.table.knows(kernel):
                    own = self.table.seconds(kernel, self.limits.bandwidth)
                    return share * self.overheads.slowdown * own
                return share * self.limits.product_seconds(kernel)


def products(works: Iterable[LayerWork]) -> list[Product]:
    """The different products of some layers."""
    kernels = (
        kernel.step if isinstance(kernel, RingAttention) else kernel
        for work in works
        for kernel in (*work.forward, *work.backward)
    )
    return list(dict.fromkeys(kernel for kernel in kernels if isinstance(kernel, Product)))


def rank_group(group: str, degrees: ParallelDegrees) -> tuple[int, int]:
    """Size and stride of a group of ranks: tensor ranks are neighbours, then context, then data, then
    pipeline (Megatron-LM's order tp-cp-ep-dp-pp); expert ranks are neighbours among all of a stage."""
    match group:
        case "tensor":
            return degrees.tensor, 1
        case "context":
            return degrees.context, degrees.tensor
        case "expert":
            return degrees.expert, 1
        case "gradients":
            return degrees.gradient_group, degrees.tensor
        case "expert_gradients":
            return degrees.expert_gradient_group, degrees.expert
        case _:
            raise KeyError(group)
