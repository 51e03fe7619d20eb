"""The kernels of a training step, and a table of measured ones: the efficiency that a device reaches.

Kernels are products, attention, passes over memory and collectives. The table is a CSV file with the columns
`operation`, `shape`, `peak_tflops`, and `efficiency` (a share of the peak) or `achieved_tflops`:

    operation,shape,peak_tflops,efficiency
    matmul,"m=4096, k=8192, n=10240, layout=TN",2250,0.6452
    group_matmul,"ng=40, M=616, N=3072, K=5120, stage=fwd",2250,0.4618
    sdp_fwd,"seq_len=4096, head_num=64, kv_head_num=8, qk_head_dim=128, v_head_dim=128",2250,0.8351

Further words of a shape and further columns are allowed. `layout`: TN forward, NN gradient of the input, NT
gradient of the weight; `stage`: fwd, bwd_grad_act, bwd_grad_w; sdp_fwd and sdp_bwd: causal attention, whose
FLOPs are those of half of the square.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from ..errors import FileError
from ..text_files import read_text

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
LEAST_NUMBER = 1e-9
"""Of a table: what is slower takes seconds that no sum holds."""

_STAGES = {"fwd": "forward", "bwd_grad_act": "input_gradient", "bwd_grad_w": "weight_gradient"}


@dataclass(frozen=True)
class KernelTable:
    """`efficiency` by kind of kernel and shape; `peak` in FLOP/s."""

    peak: float
    efficiency: Mapping[str, Mapping[tuple[float, ...], float]]
    source: str = ""
    _between: dict[_Key, float] = field(default_factory=dict, compare=False, repr=False)

    def seconds(self, kernel: Product) -> float:
        """At the efficiency of its shape.

        Of a shape that is not in the table: that of the nearest shapes of its kind, by the logarithms of
        their sizes, each weighed by one over the square of its distance. Raises KeyError for a kind without
        rows."""
        kind, shape = _key(kernel)
        return kernel.flops / (self.peak * self._efficiency(kind, shape))

    def has(self, kernel: Product) -> bool:
        """Whether it has a row of its own."""
        kind, shape = _key(kernel)
        return shape in self.efficiency.get(kind, {})

    def knows(self, kernel: Product) -> bool:
        """Whether there are rows of its kind."""
        return bool(self.efficiency.get(_key(kernel)[0]))

    def _efficiency(self, kind: str, shape: tuple[float, ...]) -> float:
        own = self.efficiency[kind].get(shape)
        if own is None:
            own = self._between.get((kind, shape))
        if own is None:
            own = self._between[kind, shape] = self._interpolate(kind, shape)
        return own

    def _interpolate(self, kind: str, shape: tuple[float, ...]) -> float:
        shapes, shares = self._logarithms[kind]
        squares = ((shapes - np.log(shape)) ** 2).sum(axis=1)
        nearest = np.argsort(squares, kind="stable")[:NEIGHBOURS]
        weights = 1 / np.maximum(squares[nearest], 1e-12)
        return float(shares[nearest] @ weights / weights.sum())

    @cached_property
    def _logarithms(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        return {
            kind: (np.log(np.array(list(rows))), np.array(list(rows.values())))
            for kind, rows in self.efficiency.items()
        }


def _key(kernel: Product) -> _Key:
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


def load_kernel_table(path: Path) -> KernelTable:
    """Reads and checks the file. Raises FileError with the line."""
    rows = csv.DictReader(io.StringIO(read_text(path, "table of kernels")))
    table: dict[str, dict[tuple[float, ...], float]] = {}
    peaks: set[float] = set()
    try:
        for row in rows:
            kind, shape = _row_key(row, f"{path}: line {rows.line_num}")
            peak = _number(row.get("peak_tflops"), f"{path}: line {rows.line_num}: peak_tflops", 1e5)
            share = row.get("efficiency") or None
            if share is None:
                achieved = _number(
                    row.get("achieved_tflops"), f"{path}: line {rows.line_num}: achieved_tflops", 1e5
                )
                value = achieved / peak
            else:
                value = _number(share, f"{path}: line {rows.line_num}: efficiency", 10)
            peaks.add(peak)
            table.setdefault(kind, {}).setdefault(shape, value)
    except csv.Error as error:
        raise FileError(f"{path}: line {rows.line_num}: not CSV: {error}", _HINT) from error
    if len(peaks) != 1:
        what = (
            "no kernels"
            if not peaks
            else f"several peaks: {', '.join(f'{p:g}' for p in sorted(peaks)[:5])} TFLOP/s"
        )
        raise FileError(f"{path}: {what}", "Give the rows of one device in one dtype.")
    return KernelTable(peaks.pop() * TERA, table, str(path))


_HINT = "See the columns in docs/degrees.md."


def _row_key(row: Mapping[str | None, str | None], where: str) -> _Key:
    words = dict(
        part.split("=", 1) for part in (row.get("shape") or "").replace(" ", "").split(",") if "=" in part
    )
    operation = (row.get("operation") or "").strip()

    def sizes(*names: str) -> tuple[float, ...]:
        return tuple(_number(words.get(name), f"{where}: {name}", 2**31) for name in names)

    match operation:
        case "matmul":
            return f"matmul {_word(words, 'layout', ('TN', 'NN', 'NT'), where)}", sizes("m", "k", "n")
        case "group_matmul":
            part = _STAGES[_word(words, "stage", tuple(_STAGES), where)]
            return f"group_matmul {part}", sizes("ng", "M", "N", "K")
        case "sdp_fwd" | "sdp_bwd":
            return f"attention {'forward' if operation == 'sdp_fwd' else 'backward'}", sizes(*_ATTENTION)
    raise FileError(
        f"{where}: operation {operation[:40]!r} is not known",
        f"Use one of: matmul, group_matmul, sdp_fwd, sdp_bwd. {_HINT}",
    )


_ATTENTION = ("seq_len", "head_num", "kv_head_num", "qk_head_dim", "v_head_dim")


def _word(words: Mapping[str, str], name: str, allowed: tuple[str, ...], where: str) -> str:
    value = words.get(name, "")
    if value not in allowed:
        raise FileError(f"{where}: {name}={value[:40]!r}", f"Use one of: {', '.join(allowed)}.")
    return value


def _number(text: str | None, where: str, largest: float) -> float:
    try:
        value = float(text or "")
    except ValueError:
        value = math.nan
    if not LEAST_NUMBER <= value <= largest:
        raise FileError(
            f"{where}: {(text or '')[:40]!r}", f"Give a number from {LEAST_NUMBER:g} to {largest:g}. {_HINT}"
        )
    return value


def write_kernel_table(seconds: Mapping[Product, float], peak: float | None = None) -> str:
    """The text of the file, of measured seconds. `peak` in FLOP/s; None: what the fastest kernel reached."""
    achieved = {kernel: kernel.flops / own for kernel, own in seconds.items()}
    highest = max(achieved.values()) if peak is None else peak
    out = io.StringIO()
    rows = csv.writer(out, lineterminator="\n")
    rows.writerow(("operation", "shape", "peak_tflops", "achieved_tflops", "seconds"))
    for kernel, own in achieved.items():
        operation, shape = _row_words(kernel)
        tera = (f"{value / TERA:.6g}" for value in (highest, own))
        rows.writerow((operation, shape, *tera, f"{seconds[kernel]:.6g}"))
    return out.getvalue()


def _row_words(kernel: Product) -> tuple[str, str]:
    """Operation and shape as they are read."""
    match kernel:
        case Matmul(m, k, n, layout):
            return "matmul", f"m={m}, k={k}, n={n}, layout={layout}"
        case GroupedMatmul(groups, m, n, k, part):
            stage = next(word for word, own in _STAGES.items() if own == part)
            return "group_matmul", f"ng={groups}, M={m}, N={n}, K={k}, stage={stage}"
        case AttentionKernel():
            sizes = zip(_ATTENTION, _key(kernel)[1], strict=True)
            return f"sdp_{'bwd' if kernel.backward else 'fwd'}", ", ".join(f"{a}={b:g}" for a, b in sizes)
