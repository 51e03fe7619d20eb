"""How much of a GPU's limits operations of a size reach: curves, and their fit to measured seconds.

    efficiency(x) = highest * x / (x + half)

of x FLOPs, or x bytes, where `half` is what the GPU does in `half_seconds` at its limit: small operations
fill it badly, and a faster GPU needs larger ones. An operation that takes `ideal` seconds at the limit thus
takes (ideal + half_seconds) / highest.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ..cost_models.errors import UsageError

Vector = npt.NDArray[np.float64]
_STEPS = 50


@dataclass(frozen=True)
class Efficiency:
    """A curve: the share of the limit that the largest operations reach, and seconds for half of it."""

    highest: float
    half_seconds: float

    def seconds(self, ideal: Vector) -> Vector:
        """From those at the limit."""
        return np.asarray((ideal + self.half_seconds) / self.highest, dtype=np.float64)


@dataclass(frozen=True)
class Curves:
    """Of FLOPs and of bytes. The defaults are those of single operators, for large ones: published rates of
    whole trainings are met with them (benchmarks/estimates.py). They lie above the shares of
    `cost_models.machines`, which are of a transformer's kernels in a step, with what lies between.
    """

    compute: Efficiency = Efficiency(0.75, 2e-6)
    memory: Efficiency = Efficiency(0.85, 1e-6)


MEASURED_CURVES = {"h100": Curves(Efficiency(0.575, 7.8e-6), Efficiency(0.98, 1.24e-6))}
"""By the name of a GPU: fitted to the layers of four models that were measured on it, and tested on five
others (benchmarks/gpu_curves.py). Tensor cores as fast as these are harder to fill, and a cache as large as
this holds much of what a layer reads."""


@dataclass(frozen=True)
class OperationWork:
    """Operations: seconds of their FLOPs and of their bytes at the GPU's limits, each of shape (n,)."""

    compute: Vector
    memory: Vector

    def seconds(self, curves: Curves, launch: float) -> float:
        """Of all of them, one after another, with `launch` seconds for each."""
        each = np.where(self.is_bound_by_compute(curves), *_both(self, curves))
        return float(each.sum()) + launch * len(each)

    def is_bound_by_compute(self, curves: Curves) -> npt.NDArray[np.bool_]:
        """Of shape (n,); the others are bound by memory, as all without FLOPs are."""
        compute, memory = _both(self, curves)
        return np.asarray((self.compute > 0) & (compute >= memory), dtype=np.bool_)


def _both(work: OperationWork, curves: Curves) -> tuple[Vector, Vector]:
    return curves.compute.seconds(work.compute), curves.memory.seconds(work.memory)


def fit_efficiency(works: list[OperationWork], seconds: Vector, launch: float) -> Curves:
    """The curves by which each of `works` takes about its measured `seconds`, shape (works,).

    Least squares of the relative errors. Given which operations are bound by what, the seconds are linear in
    1 / highest and half_seconds / highest; that is solved, and what is bound by what looked at again, from
    several starts. A curve that no operation is bound by stays the default. Raises UsageError.
    """
    usable = [index for index, work in enumerate(works) if seconds[index] > 0 and len(work.compute)]
    works, seconds = [works[index] for index in usable], seconds[usable]
    best: tuple[float, Curves] | None = None
    for curves in itertools.chain.from_iterable(_steps(works, seconds, launch, at) for at in _starts()):
        own = np.array([work.seconds(curves, launch) for work in works])
        error = float((((own - seconds) / seconds) ** 2).sum())
        best = min(best or (error, curves), (error, curves), key=lambda pair: pair[0])
    if best is None:
        raise UsageError(
            "`calibrate`: no efficiency makes the estimate like the measured seconds",
            "Calibrate with a profile of larger layers or micro-batch sizes, measured on an idle GPU.",
        )
    return best[1]


def _starts() -> Iterator[Curves]:
    begun = Curves()
    for compute, memory in itertools.product((0.25, 1.0), repeat=2):
        yield Curves(
            replace(begun.compute, highest=begun.compute.highest * compute),
            replace(begun.memory, highest=begun.memory.highest * memory),
        )


def _steps(works: list[OperationWork], seconds: Vector, launch: float, curves: Curves) -> Iterator[Curves]:
    sets: set[bytes] = set()
    for _ in range(_STEPS):
        bound = [work.is_bound_by_compute(curves) for work in works]
        key = np.concatenate(bound).tobytes() if bound else b""
        solved = None if key in sets else _solved(works, bound, seconds, launch)
        if solved is None:
            return
        sets.add(key)
        curves = solved
        yield curves


def _solved(
    works: list[OperationWork], bound: list[npt.NDArray[np.bool_]], seconds: Vector, launch: float
) -> Curves | None:
    """The best of non-negative coefficients, by trying which of the half_seconds are 0; None: there is none.

    Columns: seconds of the FLOPs of those bound by them, how many those are, and the same of the bytes.
    """
    if not works:
        return None
    pairs = list(zip(works, bound, strict=True))
    columns = np.array(
        [[w.compute[b].sum(), b.sum(), w.memory[~b].sum(), (~b).sum()] for w, b in pairs], dtype=np.float64
    )
    launches = launch * np.array([len(work.compute) for work in works])
    matrix, target = columns / seconds[:, None], (seconds - launches) / seconds
    slopes = [column for column in (0, 2) if columns[:, column].any()]
    best: tuple[float, Vector] | None = None
    for halves in itertools.chain.from_iterable(itertools.combinations(slopes, n) for n in range(3)):
        columns_used = sorted([*slopes, *(slope + 1 for slope in halves)])
        part = np.linalg.lstsq(matrix[:, columns_used], target, rcond=None)[0]
        solution = np.zeros(4)
        solution[columns_used] = part
        if (part < 0).any() or (solution[slopes] <= 0).any():
            continue
        error = float(((matrix @ solution - target) ** 2).sum())
        best = min(best or (error, solution), (error, solution), key=lambda pair: pair[0])
    if best is None:
        return None
    default = Curves()
    return Curves(_curve(best[1][:2], default.compute), _curve(best[1][2:], default.memory))


def _curve(coefficients: Vector, default: Efficiency) -> Efficiency:
    slope, start = map(float, coefficients)
    return Efficiency(1 / slope, start / slope) if slope > 0 else default
