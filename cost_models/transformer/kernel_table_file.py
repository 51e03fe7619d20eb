"""A table of kernels as a file: reading, checking and writing it.

It is a CSV file with the columns
`operation`, `shape`, `peak_tflops`, and `seconds`, `efficiency` (a share of the peak) or `achieved_tflops`:

    operation,shape,peak_tflops,efficiency
    matmul,"m=4096, k=8192, n=10240, layout=TN",2250,0.6452
    group_matmul,"ng=40, M=616, N=3072, K=5120, stage=fwd",2250,0.4618
    sdp_fwd,"seq_len=4096, head_num=64, kv_head_num=8, qk_head_dim=128, v_head_dim=128",2250,0.8351

Further words of a shape, further columns, and lines that begin with # are allowed. `layout`: TN forward, NN
gradient of the input, NT gradient of the weight; `stage`: fwd, bwd_grad_act, bwd_grad_w; sdp_fwd and sdp_bwd:
causal attention of `batch` (1) sequences, whose FLOPs are counted as those of the whole square, though half
of it is computed: a share of the peak can be above 1.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeAlias

from ..errors import FileError
from ..text_files import read_text
from .kernel_table import (
    TERA,
    AttentionKernel,
    GroupedMatmul,
    KernelTable,
    Matmul,
    Product,
    kernel_key,
    row_flops,
    table_flops,
)

LEAST_NUMBER = 1e-9
"""Of a table: what is slower takes seconds that no sum holds."""

_STAGES = {"fwd": "forward", "bwd_grad_act": "input_gradient", "bwd_grad_w": "weight_gradient"}


def load_kernel_table(path: Path) -> KernelTable:
    """Reads and checks the file. Raises FileError with the line."""
    lines = read_text(path, "table of kernels").splitlines(keepends=True)
    rows = csv.DictReader("\n" if line.startswith("#") else line for line in lines)
    try:
        table = read_kernel_rows(((f"{path}: line {rows.line_num}", row) for row in rows), str(path))
    except csv.Error as error:
        raise FileError(f"{path}: line {rows.line_num}: not CSV: {error}", _HINT) from error
    return table


def read_kernel_rows(rows: Iterable[tuple[str, KernelRow]], source: str) -> KernelTable:
    """Read the rows of a table of kernels.

    Args:
        rows: Where each row stands, for errors, and its columns.
        source: The file.

    Raises:
        FileError: A row is wrong, or the rows are of several devices, or there are none.
    """
    table: dict[str, dict[tuple[float, ...], float]] = {}
    peaks: set[float] = set()
    for where, row in rows:
        kind, shape = _row_key(row, where)
        peak = _number(row.get("peak_tflops"), f"{where}: peak_tflops", 1e5)
        peaks.add(peak)
        table.setdefault(kind, {}).setdefault(shape, _share(row, kind, shape, peak, where))
    if len(peaks) != 1:
        what = (
            "no kernels"
            if not peaks
            else f"several peaks: {', '.join(f'{p:g}' for p in sorted(peaks)[:5])} TFLOP/s"
        )
        raise FileError(f"{source}: {what}", "Give the rows of one device in one dtype.")
    return KernelTable(peaks.pop() * TERA, table, source)


KernelRow: TypeAlias = Mapping[str | None, str | None]
"""Columns of a row by their names."""

_HINT = "See the columns in docs/transformers.md."


def _share(row: KernelRow, kind: str, shape: tuple[float, ...], peak: float, where: str) -> float:
    """Of the peak that a row's kernel reaches."""
    if row.get("seconds"):
        seconds = _number(row["seconds"], f"{where}: seconds", 1e5)
        batch = _shape_words(row).get("batch", "1") if kind.startswith("attention") else "1"
        samples = _number(batch, f"{where}: batch", 2**31)
        return samples * row_flops(kind, shape) / (seconds * peak * TERA)
    if row.get("efficiency"):
        return _number(row["efficiency"], f"{where}: efficiency", 10)
    return _number(row.get("achieved_tflops"), f"{where}: achieved_tflops", 1e5) / peak


def _shape_words(row: KernelRow) -> dict[str, str]:
    parts = (row.get("shape") or "").replace(" ", "").split(",")
    return dict(part.split("=", 1) for part in parts if "=" in part)


def _row_key(row: KernelRow, where: str) -> tuple[str, tuple[float, ...]]:
    words = _shape_words(row)
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


def row_rate(row: KernelRow, where: str) -> float:
    """Return the FLOP/s that the kernel of a row with seconds reached. Raises FileError."""
    return _share({**row, "peak_tflops": "1"}, *_row_key(row, where), 1.0, where) * TERA


def write_kernel_table(seconds: Mapping[Product, float], peak: float | None = None) -> str:
    """The text of the file, of measured seconds. `peak` in FLOP/s; None: what the fastest kernel reached."""
    achieved = {kernel: table_flops(kernel) / own for kernel, own in seconds.items()}
    highest = max(kernel.flops / own for kernel, own in seconds.items()) if peak is None else peak
    out = io.StringIO()
    rows = csv.writer(out, lineterminator="\n")
    rows.writerow(("operation", "shape", "peak_tflops", "achieved_tflops", "seconds"))
    for kernel, own in achieved.items():
        operation, shape = kernel_words(kernel)
        tera = (f"{value / TERA:.6g}" for value in (highest, own))
        rows.writerow((operation, shape, *tera, f"{seconds[kernel]:.6g}"))
    return out.getvalue()


def kernel_words(kernel: Product) -> tuple[str, str]:
    """Words of a kernel's operation and shape, as they are read."""
    match kernel:
        case Matmul(m, k, n, layout):
            return "matmul", f"m={m}, k={k}, n={n}, layout={layout}"
        case GroupedMatmul(groups, m, n, k, part):
            stage = next(word for word, own in _STAGES.items() if own == part)
            return "group_matmul", f"ng={groups}, M={m}, N={n}, K={k}, stage={stage}"
        case AttentionKernel():
            sizes = {"batch": kernel.samples, **dict(zip(_ATTENTION, kernel_key(kernel)[1], strict=True))}
            words = ", ".join(f"{name}={own:.0f}" for name, own in sizes.items())
            return f"sdp_{'bwd' if kernel.backward else 'fwd'}", words
