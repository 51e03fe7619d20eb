"""A profile without the GPU: seconds from FLOPs and bytes, against its limits (its roofline)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..cost_models.errors import UsageError
from ..cost_models.machines import ROOFLINES, Roofline, find_roofline, match_device
from ..cost_models.roofline_file import load_roofline
from .build_profile import build_profile
from .layer import Layer
from .measurement_target import MeasurementTarget
from .meta_device import Kernels
from .operations import LayerOperations, Operation
from .passes import LayerTimes, PassTimes
from .profile_file import Profile, Unmeasured
from .size_run import SizeResult
from .structure import EqualLayers, as_on_a_gpu, count_operations
from .timed_passes import TimedPasses

# How much of a GPU's limits operations of a size reach: curves, and their fit to measured seconds.
#
#       efficiency(x) = highest * x / (x + half)
#
# of x FLOPs, or x bytes, where `half` is what the GPU does in `half_seconds` at its limit: small operations
# fill it badly, and a faster GPU needs larger ones. An operation that takes `ideal` seconds at the limit thus
# takes (ideal + half_seconds) / highest.

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
others (docs/lab/benchmarks.md). Tensor cores as fast as these are harder to fill, and a cache as large as
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


# A profile without the GPU: seconds from FLOPs and bytes, against its limits (its roofline).
#
# An operation takes the longer of its FLOPs at the peak and its bytes at the memory's bandwidth, each by its
# efficiency (see `Efficiency`), and a launch; a layer takes the sum of its operations (Williams, Waterman and
# Patterson, "Roofline", CACM 2009).

DEVICE = "analytic"
_BACKWARD = 0.75
"""What the host takes for an operation of backward, which no Python runs, against forward's: 0.66 to
0.79 with an H100 for four models, 1.3 for a fifth (benchmarks/estimates.py --measure)."""


@dataclass(frozen=True)
class AnalyticTarget:
    """The GPU to estimate for, and a measured profile of the same model to take the efficiencies from."""

    roofline: Roofline
    measured: Profile | None = None

    @property
    def kernels(self) -> Kernels:
        """Those that this GPU runs, on the meta device."""
        return partial(as_on_a_gpu, flash=self.roofline.has_flash_attention)


def parse_analytic_device(
    device: str | None, calibrate: str | Path | Profile | None = None
) -> AnalyticTarget | None:
    """The GPU that `analytic:NAME` or `analytic:FILE.toml` names; None for another device.

    Raises UsageError, FileError.
    """
    if device is None or device.partition(":")[0] != DEVICE:
        if calibrate is not None:
            raise UsageError(
                f"`calibrate` with device={device!r}: what is measured needs no calibration",
                "Omit it, or estimate: device='analytic:h100'",
            )
        return None
    name = device.partition(":")[2]
    roofline = load_roofline(Path(name)) if name.lower().endswith(".toml") else find_roofline(name)
    measured = Profile.load(calibrate) if isinstance(calibrate, str | Path) else calibrate
    if measured is not None and (measured.estimated or measured.structure_only or measured.compiled):
        kind = "compiled" if measured.compiled else "not a measurement"
        raise UsageError(
            f"`calibrate`: the profile of {measured.model} is {kind}",
            "Give one that was measured on a GPU, without `compile`.",
        )
    return AnalyticTarget(roofline, measured)


def estimate(
    blocks: EqualLayers,
    results: Sequence[SizeResult],
    refused: Sequence[Unmeasured],
    notes: Sequence[str],
    target: AnalyticTarget,
) -> Profile:
    """The profile of a model whose bytes are counted already on the meta device, with estimated seconds.

    `refused`: sizes that the model does not take.

    Raises UsageError: a dtype without a figure, a measured profile of another model.
    """
    subject = blocks.subject
    curves, efficiency_note = Curves(), "the efficiencies are assumptions"
    name = target.roofline.name
    if target.measured is not None:
        curves, measured_on = _calibrated(blocks, target.measured, target.roofline)
        efficiency_note = f"the efficiencies are calibrated from a profile measured on {measured_on}"
    elif name in MEASURED_CURVES and target.roofline is ROOFLINES[name]:
        curves, efficiency_note = MEASURED_CURVES[name], "the efficiencies are those of other models on it"
    timed = [
        dataclasses.replace(
            result, rounds=TimedPasses(layers=[_times(subject, result.operations or (), target, curves)])
        )
        for result in results
    ]
    note = (
        f"an estimate from FLOPs and bytes for {target.roofline.device_name}, not a measurement; "
        f"{efficiency_note} (FLOPs {_describe_curve(curves.compute)}, bytes {_describe_curve(curves.memory)})"
    )
    adding = [_adding(layer, target.roofline, curves) for layer in subject.chain.layers]
    profile = build_profile(subject, timed, refused, [note, *notes], adding)
    return profile.model_copy(
        update={
            "device": DEVICE,
            "device_name": target.roofline.device_name,
            "device_memory_bytes": target.roofline.memory_bytes,
            "estimated": True,
        }
    )


def _describe_curve(curve: Efficiency) -> str:
    return f"at most {curve.highest:.0%}, half of that in {curve.half_seconds * 1e6:.3g} µs"


def _times(
    subject: MeasurementTarget, operations: Sequence[LayerOperations], target: AnalyticTarget, curves: Curves
) -> LayerTimes:
    launch, host_launch = target.roofline.launch.value, target.roofline.host_launch.value
    rows = [
        [_work(part, target.roofline, tf32=subject.modes.tf32) for part in (layer.forward, layer.backward)]
        for layer in operations
    ]
    seconds = np.array([[work.seconds(curves, launch) for work in row] for row in rows])
    hosts = host_launch * np.array([[len(row[0].compute), _BACKWARD * len(row[1].compute)] for row in rows])
    count = len(subject.chain)
    loss = None if subject.loss is None else PassTimes(*map(float, (*seconds[count], *hosts[count])))
    (forward, backward), (forward_host, backward_host) = seconds[:count].T, hosts[:count].T
    return LayerTimes(forward, backward, forward_host, backward_host, loss)


def _adding(layer: Layer, roofline: Roofline, curves: Curves) -> float:
    """Seconds to add gradients to those that are there: two are read and one is written, as counted among the
    operations of the backward."""
    each = [3 * own.nbytes for own in layer.parameters if own.requires_grad]
    work = OperationWork(np.zeros(len(each)), np.array(each, np.float64) / roofline.bandwidth.value)
    return work.seconds(curves, roofline.launch.value)


def _work(operations: Sequence[Operation], roofline: Roofline, *, tf32: bool) -> OperationWork:
    """Convolutions in float32 are in TF32 by torch's default, where the GPU has it."""
    compute, moved = [], []
    for operation in operations:
        dtype = operation.dtype
        if dtype == "float32" and (tf32 or (operation.is_convolution and "tf32" in roofline.peaks)):
            dtype = "tf32"
        compute.append(operation.flops / roofline.peak(dtype) if operation.flops else 0.0)
        moved.append(operation.bytes)
        if operation.conversion_bytes and dtype in _OF_TENSOR_CORES:
            compute.append(0.0)
            moved.append(operation.conversion_bytes)
    return OperationWork(
        np.array(compute, np.float64), np.array(moved, np.float64) / roofline.bandwidth.value
    )


_OF_TENSOR_CORES = ("float16", "bfloat16", "tf32")


def _calibrated(blocks: EqualLayers, measured: Profile, roofline: Roofline) -> tuple[Curves, str]:
    """The curves by which the measured layers take their seconds, and on what they were measured."""
    subject = blocks.subject
    _check_same(subject, measured)
    own = _roofline_of(measured, roofline)
    works, seconds = measured_works(blocks, measured, own)
    return fit_efficiency(works, seconds, own.launch.value), measured.device_name


def measured_works(
    blocks: EqualLayers, measured: Profile, roofline: Roofline
) -> tuple[list[OperationWork], Vector]:
    """The work of each layer's forward and backward at each size, and the seconds that were measured."""
    works: list[OperationWork] = []
    seconds: list[float] = []
    for position, size in enumerate(measured.micro_batch_sizes):
        layers = count_operations(blocks, size, AnalyticTarget(roofline).kernels)[: len(blocks.subject.chain)]
        costs = [layer.costs[position] for layer in measured.layers]
        for layer, cost in zip(layers, costs, strict=True):
            works += _works(layer, roofline, tf32=measured.tf32)
            seconds += [cost.forward_seconds, cost.backward_seconds]
    return works, np.array(seconds, dtype=np.float64)


def _works(layer: LayerOperations, roofline: Roofline, *, tf32: bool) -> list[OperationWork]:
    return [_work(part, roofline, tf32=tf32) for part in (layer.forward, layer.backward)]


def _check_same(subject: MeasurementTarget, measured: Profile) -> None:
    """Raises UsageError where the profile is of another model, input or dtype."""
    dtype, shape = str(subject.dtype).removeprefix("torch."), list(subject.loaded.input_shape)
    names = [layer.name for layer in subject.chain.layers]
    theirs = [layer.name for layer in measured.layers]
    if names != theirs:
        differ = next((pair for pair in zip(names, theirs, strict=False) if pair[0] != pair[1]), None)
        difference = (
            f"{differ[0]} is {differ[1]} there" if differ else f"{len(theirs)} layers, not {len(names)}"
        )
        what = f"other layers ({difference})"
    elif measured.input_shape not in (None, shape):
        what = f"an input of {measured.input_shape}, not {shape}"
    elif (measured.dtype, measured.amp) != (dtype, subject.modes.amp):
        what = f"{measured.dtype}{f' with amp={measured.amp!r}' if measured.amp else ''}, not {dtype}"
    else:
        return
    raise UsageError(
        f"`calibrate`: the profile of {measured.model} is of {what}",
        "Calibrate with a profile of the same model, `input_shape`, `dtype` and `granularity`.",
    )


def _roofline_of(measured: Profile, roofline: Roofline) -> Roofline:
    """The roofline of the GPU that was measured. Raises UsageError where there are no figures of it."""
    if measured.device_name == roofline.device_name:
        return roofline
    preset = match_device(measured.device_name)
    if preset is None or preset.name not in ROOFLINES:
        raise UsageError(
            f"`calibrate`: the profile was measured on {measured.device_name or measured.device}, "
            "of which there are no figures",
            "Estimate for a file of its figures, whose name is this one: device='analytic:my.toml'",
        )
    return ROOFLINES[preset.name]
