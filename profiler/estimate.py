"""A profile without running the model: bytes counted on the meta device, seconds from FLOPs and bytes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ..cost_models.errors import ModelError, UsageError
from ..cost_models.machines import ROOFLINES, Roofline, find_roofline, match_device
from ..cost_models.roofline_file import load_roofline
from .build_profile import build_profile
from .layer import Layer, LayerChain
from .meta_device import ON_A_GPU, Kernels, MetaOperations, attention_as_on_the_cpu, kernels_as_on_a_gpu
from .modes import MeasurementTarget
from .operations import LayerOperations, Operation, operation_counter
from .passes import IdleWatcher, LayerTimes, OutputGradients, PassTimes, forward_layers, run_layers
from .profile_file import Profile, Unmeasured
from .size_run import SizeRun
from .size_sweep import Progress, is_left_out, refused_size
from .timed_passes import SizeResult, TimedPasses
from .torch_private import TorchDispatchMode, storage_key, tree_leaves
from .user_model import ModelInput

# What parts of a model run, described so that parts which are equal have equal descriptions.

Description = tuple[object, ...]
"""Two parts have the same one where they run the same operations on tensors of the same shapes, dtypes and
storages, in modules of the same classes with parameters of the same shapes."""


class OperationRecord(TorchDispatchMode, IdleWatcher):  # type: ignore[no-untyped-call]
    """Describes each of `layers`, as the watcher of a forward that runs while this is entered."""

    supports_higher_order_operators = True

    def __init__(self, layers: Sequence[Layer]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.descriptions: list[Description] = []
        """By layer, in the order in which they run."""
        self._layers = layers
        self._lines: list[Description] = []
        self._storages: dict[int, tuple[int, torch.UntypedStorage]] = {}
        self._is_inside = False

    def before(self, index: int, layer_input: Any) -> None:
        module = self._layers[index].module
        self._storages.clear()
        self._is_inside = True
        self._lines = [
            _class_names(module),
            *((own.requires_grad, self._describe(own)) for own in (*module.parameters(), *module.buffers())),
            tuple(
                (leaf.requires_grad, self._describe(leaf)) if isinstance(leaf, Tensor) else ()
                for leaf in tree_leaves(layer_input)
            ),
        ]

    def after(self, index: int, output: Any) -> None:  # noqa: ARG002
        self._is_inside = False
        self._lines.append(tuple(map(self._describe, tree_leaves(output))))
        self.descriptions.append(tuple(self._lines))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._is_inside:
            described = map(self._describe, tree_leaves((args, kwargs or {}, result)))
            self._lines.append((func, torch.is_grad_enabled(), *described))
        return result

    def _describe(self, leaf: Any) -> object:
        """A tensor's layout, and which storage of the layer's it lies in, by order of appearance; what else
        it is."""
        if not isinstance(leaf, Tensor):
            # 1, 1.0 and True are equal, and nan is not.
            return (type(leaf), leaf) if type(leaf) in _COMPARED else repr(leaf)
        storage = leaf.untyped_storage()
        # Kept, so that no other storage takes its identity.
        number, _ = self._storages.setdefault(storage_key(storage), (len(self._storages), storage))
        strides = leaf.stride() if leaf.layout is torch.strided else ()
        return number, storage.nbytes(), leaf.dtype, leaf.shape, strides, leaf.storage_offset()


_COMPARED = (int, bool, str, type(None), torch.dtype)


def _class_names(module: nn.Module) -> Description:
    return tuple(f"{type(own).__module__}.{type(own).__qualname__}" for own in module.modules())


# Rows of layers whose kinds repeat: one kind, or several in turn (local and global attention).
#
# What a layer saves and needs depends on the layers around it, too: on its neighbours, and on which of the
# tensors that are handed on it is the first or the last to use. So a period and one more at each end of a row
# stand for themselves, and of the others one period for all.

_LONGEST = 100
"""Kinds that take turns."""


class RepeatingRow(NamedTuple):
    """From `start` to before `stop` each kind is that of `period` places before."""

    start: int
    stop: int
    period: int

    @property
    def end(self) -> int:
        """So many at each end stand for themselves."""
        return self.period + 1

    def repeated(self) -> range:
        """Whole periods that the one before them stands for."""
        start = self.start + self.end + self.period
        room = max(0, self.stop - self.end - start)
        return range(start, start + room // self.period * self.period)

    def between(self, start: int, stop: int) -> RepeatingRow:
        """Its part there."""
        return RepeatingRow(max(self.start, start), min(self.stop, stop), self.period)


def find_rows(kinds: Sequence[Hashable]) -> list[RepeatingRow]:
    """All that are as long as they can be and have places that others stand for, of short periods first."""
    numbers: dict[Hashable, int] = {}
    places = [numbers.setdefault(kind, len(numbers)) for kind in kinds]
    rows = [
        row
        for period in range(1, min(_LONGEST, len(places) // 4) + 1)
        for row in _rows_of_period(places, period)
    ]
    return [row for row in rows if row.repeated()]


def disjoint_rows(kinds: Sequence[Hashable]) -> list[RepeatingRow]:
    """Rows that do not overlap, first that in which most is repeated, in their order."""
    rows = find_rows(kinds)
    apart: list[RepeatingRow] = []
    free = [(0, len(kinds))]
    while free and rows:
        start, stop = free.pop()
        parts = [row.between(start, stop) for row in rows]
        best = max(parts, key=lambda row: len(row.repeated()))
        if best.repeated():
            apart.append(best)
            free += [(start, best.start), (best.stop, stop)]
    return sorted(apart)


def _rows_of_period(places: Sequence[int], period: int) -> Iterator[RepeatingRow]:
    start = None
    for place in range(len(places) - period + 1):
        is_same = place + period < len(places) and places[place] == places[place + period]
        if is_same and start is None:
            start = place
        elif not is_same and start is not None:
            yield RepeatingRow(start, place + period, period)
            start = None


# Equal layers in a row, as the blocks of a transformer, or kinds in turn: on the meta device one of each is
# counted for all.
#
# Two layers are equal where they run the same operations on tensors of the same shapes, dtypes and storages,
# in modules of the same classes with parameters of the same shapes; a run of all layers forward tells. What a
# layer saves and needs besides depends on its neighbours too, so the first and the last of a row are counted
# by
# themselves (see `RepeatingRow`).

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class EqualLayers:
    """A model, and for each of its layers the one that is counted for it."""

    subject: MeasurementTarget
    counted: tuple[int, ...]
    """By layer: itself, or an equal one in the same row."""

    @property
    def shortened(self) -> MeasurementTarget:
        """The model with the layers that are counted alone. As each row stays, they fit each other."""
        chain = self.subject.chain
        layers = tuple(chain.layers[index] for index in self._remaining)
        return dataclasses.replace(self.subject, chain=dataclasses.replace(chain, layers=layers))

    def by_layer(self, counts: Sequence[_Value]) -> list[_Value]:
        """Of all layers, from those of the shortened model; what follows these (a loss') is kept."""
        places = {index: place for place, index in enumerate(self._remaining)}
        return [*(counts[places[index]] for index in self.counted), *counts[len(self._remaining) :]]

    @property
    def _remaining(self) -> list[int]:
        return sorted(set(self.counted))


def find_equal_layers(subject: MeasurementTarget, size: int) -> EqualLayers:
    """Runs the layers forward once, at a micro-batch of `size`, on the meta device.

    Raises ModelError as a pass through the layers does.
    """
    layers = subject.chain.layers
    example = ModelInput.of(subject.loaded.example_input_for(size))
    example = example.to(subject.device, subject.dtype, subject.modes.memory_format).clone()
    recorder = OperationRecord(layers)
    with subject.modes.forward_context(subject.device), recorder:
        forward_layers(layers, example.layer_input, recorder, lambda _index, _tensors: None)
    counted = list(range(len(layers)))
    for row in disjoint_rows(recorder.descriptions):
        for place in row.repeated():
            counted[place] = counted[place - row.period]
    return EqualLayers(subject, tuple(counted))


# The layers and their bytes on the meta device: exact, at no cost, and without seconds.

SIZES = (1, 2, 4, 8)
_FACTOR, _LARGEST, _STATES = 4, 128, 4
"""From size to size of an estimate beyond those, the largest, copies of the weights that training holds."""


def count_structure(
    blocks: EqualLayers,
    sizes: Sequence[int] | None,
    kernels: Kernels | None = None,
    progress: Callable[[Progress], None] | None = None,
    memory_bytes: int | None = None,
    *,
    operations: bool = False,
) -> tuple[list[SizeResult], list[Unmeasured], list[str]]:
    """The bytes at `sizes` (None: a few), as `kernels` save them (None: the CPU's), the sizes that the model
    does not take, and notes.

    `memory_bytes` of a device: without `sizes`, 32 and 128 too where it can hold the training of the whole
    model with them. `operations`: are counted too. Raises ModelError as a pass through the layers does.
    """
    subject = blocks.shortened
    results: list[SizeResult] = []
    refused: list[Unmeasured] = []
    notes = _recurrent(blocks.subject.chain)
    with (kernels or as_on_the_cpu)() as missing:
        if missing is not None:
            notes.append(f"attention is counted with its whole matrix, which is more: {missing}")
        for number, size in enumerate(sizes or _sizes(blocks, results, memory_bytes)):

            def tell(layer: Layer, size: int = size, number: int = number) -> None:
                if progress is not None:
                    share = number / len(sizes or SIZES)
                    progress(Progress("counting bytes", size, layer.name, min(share, 1.0)))

            counter = operation_counter(subject) if operations else None
            run = SizeRun(subject, size, operations=counter)
            try:
                run.count(tell)
            except ModelError as error:
                if not is_left_out(size, sizes, error) or (sizes and size == sizes[-1] and not results):
                    raise
                refused.append(refused_size(size, error))
                continue
            results.append(_for_all_layers(run.result, blocks))
    return results, refused, notes


def _for_all_layers(result: SizeResult, blocks: EqualLayers) -> SizeResult:
    """The result of all layers, from those that were counted for others too."""
    counted, memory = result.counted, result.counted.memory
    lists = ("saved_bytes", "saved_input_bytes", "output_bytes")
    by_layer: dict[str, Any] = {name: blocks.by_layer(getattr(counted, name)) for name in lists}
    if memory is not None:
        rows = (memory.saved, memory.forward, memory.backward)
        saved, forward, backward = (tuple(blocks.by_layer(row)) for row in rows)
        by_layer["memory"] = replace(memory, saved=saved, forward=forward, backward=backward)
    pending, operations = result.pending_gradient_bytes, result.operations
    return replace(
        result,
        counted=replace(counted, **by_layer),
        pending_gradient_bytes=blocks.by_layer(pending) if pending else None,
        operations=blocks.by_layer(operations) if operations else None,
    )


def count_operations(blocks: EqualLayers, size: int, kernels: Kernels) -> list[LayerOperations]:
    """The operations of every layer at a micro-batch of `size`, and last those of the loss, if there is one.

    The model lies on the meta device, and its gradients exist. `kernels`: of which device.
    """
    subject = blocks.shortened
    layers, context = subject.chain.layers, partial(subject.modes.forward_context, subject.device)
    example = ModelInput.of(subject.loaded.example_input_for(size))
    example = example.to(subject.device, subject.dtype, subject.modes.memory_format).clone()
    with kernels(), operation_counter(subject) as counter:
        gradients = OutputGradients(subject.seed)
        run_layers(layers, example.layer_input, gradients, counter, loss=subject.loss, context=context)
    return blocks.by_layer(counter.layers)


def _sizes(blocks: EqualLayers, results: list[SizeResult], memory_bytes: int | None) -> Iterator[int]:
    """The sizes to count where none is named; those past `SIZES` as the `results` so far let them fit."""
    yield from SIZES
    if memory_bytes is None:
        return
    states = _STATES * sum(layer.parameter_bytes for layer in blocks.subject.chain.layers)
    while results and results[-1].size < _LARGEST:
        if states + _FACTOR * sum(results[-1].counted.saved_bytes) > memory_bytes:
            return
        yield _FACTOR * results[-1].size


def _recurrent(chain: LayerChain) -> list[str]:
    """A note on what cannot be counted: how much the CPU's own kernels keep, they tell when they run."""
    names = [
        layer.name
        for layer in chain.layers
        if any(isinstance(module, nn.RNNBase) for module in layer.module.modules())
    ]
    if not names:
        return []
    return [f"{', '.join(names)}: on a real device recurrent layers save other bytes than are counted here"]


@contextmanager
def as_on_the_cpu() -> Iterator[str | None]:
    """While entered, passes on the meta device save for backward what they save on the CPU.

    Yields None, or why attention is left out of that.
    """
    with attention_as_on_the_cpu() as missing, MetaOperations():
        yield missing


@contextmanager
def as_on_a_gpu(*, flash: bool) -> Iterator[str | None]:
    """As `as_on_the_cpu`, for a GPU; `flash` as in `kernels_as_on_a_gpu`."""
    with kernels_as_on_a_gpu(flash=flash) as missing, MetaOperations(ON_A_GPU):
        yield missing


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
