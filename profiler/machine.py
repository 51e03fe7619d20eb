"""Measures a machine for the layers of a transformer: `pplan machine measure`.

Links and collectives between the processes of torchrun, passes over memory, products and attention, whole
layers, and an optimizer step. Every part is in the file as soon as it is measured, and is not measured again.
All processes measure at the same time, as they train; the slowest one counts.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..cost_models.errors import FileError, MachineError
from ..cost_models.transformer.corrections import LayerKind, shared_by
from ..cost_models.transformer.implementations import IMPLEMENTATIONS
from ..cost_models.transformer.kernel_table import CollectiveName, Product
from ..cost_models.transformer.kernel_table_file import kernel_words
from ..cost_models.transformer.layer_work import Tokens
from ..cost_models.transformer.parallel_degrees import ParallelDegrees
from ..cost_models.transformer.transformer_shape import TransformerShape
from .kernels import WARM_UPS, kernel_seconds, list_kernels, median_seconds, time_once
from .links import SIZES, LinkBench, World, gather_from_all, measure_pairs, meeting
from .local_machine import device_memory_bytes, device_name, parse_device, versions
from .machine_file import (
    LINKS,
    CollectiveTimes,
    KernelTime,
    LayerTime,
    MachineFile,
    Measured,
    PassTime,
    UpdateTime,
)
from .measured_links import MeasuredLinks
from .plain_layers import LayerGroups, PlainBlock, PlainHead
from .profile_options import MachineMeasureOptions
from .torchrun_env import TorchrunEnv

MIB = 2**20
LARGE = {"nccl": (64 * MIB, 256 * MIB), "gloo": ()}
"""Bytes of collectives beyond those of transfers: of gradients and weights."""
PASSES = {"cuda": (1, 4, 16, 64, 256, 1024), "cpu": (1, 4, 16, 64)}
"""MiB that a pass over memory reads and writes."""
BLOCKS = 2
"""Blocks in a row, so that the host launches one while another runs."""
SAVE_SECONDS = 1.0
"""Between two writings of the file."""
DTYPE = torch.bfloat16

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Part:
    """Something to measure.

    Attributes:
        record: What the file says of it, with seconds that are not measured; None for the links.
        measure: Measures it in this process; returns what replaces the record's fields, or the links.
    """

    record: Measured | None
    measure: Callable[[], dict[str, Any] | MeasuredLinks]

    @property
    def key(self) -> str:
        """Key as `MachineFile.keys` has it."""
        return LINKS if self.record is None else self.record.key()


def measure_machine(
    shape: TransformerShape,
    options: MachineMeasureOptions,
    path: Path,
    *,
    process: TorchrunEnv | None = None,
    anew: bool = False,
    progress: Progress | None = None,
) -> MachineFile:
    """Measure the machine, or go on with a file of the same machine and sizes.

    Args:
        shape: Sizes of the model.
        options: What is measured, and how.
        path: The file, which is written after every part.
        process: This process among those of torchrun; None without torchrun.
        anew: Whether to forget what the file has.
        progress: Called with how many parts are measured, of how many.

    Returns:
        All that was measured; every process returns it.

    Raises:
        UsageError: None of the degrees divides the model.
        FileError: The file is of another machine or model, or cannot be written.
        MachineError: A device or process is missing, or memory is too small.
    """
    if process is None:
        return _Measuring(shape, options, path, None).run(anew, progress)
    with meeting(process, options.timeout_seconds) as world:
        return _Measuring(shape, options, path, world).run(anew, progress)


class _Measuring:
    """One run of `measure_machine` in one process."""

    def __init__(
        self, shape: TransformerShape, options: MachineMeasureOptions, path: Path, world: World | None
    ) -> None:
        # Whole attention is measured; windows change how much of it is computed.
        self.shape = replace(shape, windows=(), note="")
        self.options, self.path, self.world = options, path, world
        self.device = parse_device(options.device) if world is None else world.device
        self.rank = 0 if world is None else world.process.rank
        self.devices = 1 if world is None else world.process.world_size
        self.tokens = Tokens(options.sequence, options.micro_batch_size)
        self.file = MachineFile(
            device="cuda" if self.device.type == "cuda" else "cpu",
            device_name=device_name(self.device),
            memory_bytes=device_memory_bytes(self.device),
            devices=self.devices,
            model_sizes=self.shape,
            sequence=options.sequence,
            micro_batch_size=options.micro_batch_size,
            made_by=versions(),
        )
        self._groups: dict[tuple[int, int], dist.ProcessGroup | None] = {}
        self._saved = time.monotonic()

    def run(self, anew: bool, progress: Progress | None) -> MachineFile:
        """Measure what the file does not have yet."""
        refusal = None
        if self.rank == 0 and not anew and self.path.exists():
            try:
                self.file = self._continued()
            except FileError as error:
                refusal = error
        self.file, refusal = self._everywhere((self.file, refusal))[0]
        if refusal is not None:
            raise refusal
        parts, measured = list(self._parts()), self.file.keys()
        ahead = [part for part in parts if part.key not in measured]
        try:
            for number, part in enumerate(ahead, len(parts) - len(ahead)):
                if progress is not None:
                    progress(number, len(parts))
                self._add(part)
        finally:
            self._save()
        if progress is not None:
            progress(len(parts), len(parts))
        return self.file

    def _add(self, part: Part) -> None:
        """Measure a part. Raises MachineError where the memory is too small for it."""
        try:
            own = part.measure()
        except torch.OutOfMemoryError as error:
            raise MachineError(
                f"{part.key}: does not fit in the memory of {self.file.device_name}",
                "Give a shorter `sequence`, or only higher degrees; what was measured stays.",
            ) from error
        if isinstance(own, MeasuredLinks):
            self.file = self.file.with_links(own)
        elif part.record is not None:
            everywhere = self._everywhere(own)
            slowest = {name: _largest([each[name] for each in everywhere]) for name in own}
            self.file = self.file.with_part(part.record.model_copy(update=slowest))
        if time.monotonic() - self._saved >= SAVE_SECONDS:
            self._save()

    def _save(self) -> None:
        """Write the file, if something was measured. Raises FileError."""
        if self.rank == 0 and self.file.keys():
            self.file.save(self.path, force=True)
        self._saved = time.monotonic()

    def _continued(self) -> MachineFile:
        """What the file has of the same machine and sizes. Raises FileError."""
        old = MachineFile.load(self.path)
        if old.same_measurement(self.file):
            return old
        raise FileError(
            f"{self.path}: is of {old.devices} x {old.device_name} and {old.model_sizes.name}, sequence "
            f"{old.sequence} x {old.micro_batch_size}; this is {self.devices} x {self.file.device_name} and "
            f"{self.shape.name}, {self.tokens.sequence} x {self.tokens.samples}",
            "Name another file, or delete that one to measure anew.",
        )

    def _everywhere(self, own: Any) -> list[Any]:
        """What every process has, by rank."""
        return [own] if self.world is None else gather_from_all(own)

    def _parts(self) -> Iterator[Part]:
        """Everything to measure, in order; the same in every process."""
        if self.world is not None:
            yield from self._link_parts(self.world)
        for size in PASSES[self.device.type]:
            bytes = size * MIB
            yield Part(PassTime(bytes=bytes, seconds=1.0), partial(self._measure_pass, bytes))
        for kernel in list_kernels(self.shape, self.options.kernels, [*IMPLEMENTATIONS.values()]):
            operation, words = kernel_words(kernel)
            record = KernelTime(operation=operation, shape=words, seconds=1.0)
            yield Part(record, partial(self._measure_kernel, kernel))
        for degrees in self._shared_degrees():
            tensor, context, expert = shared_by(degrees)
            for kind in self._layer_kinds(degrees):
                layer = LayerTime(
                    layer=kind,
                    tensor=tensor,
                    context=context,
                    expert=expert,
                    forward_seconds=1.0,
                    backward_seconds=1.0,
                )
                yield Part(layer, partial(self._measure_layer, kind, degrees))
        with torch.device("meta"):
            block = PlainBlock(self.shape, self.shape.routed[-1], LayerGroups(), self.tokens)
        count = sum(parameter.numel() for parameter in block.parameters())
        yield Part(UpdateTime(parameters=count, seconds=1.0), partial(self._measure_update, count))

    def _link_parts(self, world: World) -> Iterator[Part]:
        """Links between pairs, and collectives in groups of neighbours and of ranks that lie far apart."""
        options, devices = self.options, self.devices
        yield Part(None, partial(measure_pairs, world, options.sizes, options.repeats))
        sizes = sorted(options.sizes or (*SIZES[world.backend], *LARGE[world.backend]))
        for size in (2**power for power in range(1, devices.bit_length())):
            if devices % size:
                continue
            for stride in sorted({1, devices // size}):
                for name in get_args(CollectiveName):
                    record = CollectiveTimes(
                        name=name, devices=size, stride=stride, bytes=sizes, seconds=[1.0] * len(sizes)
                    )
                    yield Part(record, partial(self._measure_collective, world, record))

    def _shared_degrees(self) -> Iterator[ParallelDegrees]:
        """Degrees that this machine can run, one above 1 at a time."""
        options = self.options
        several = [(degree, 1, 1) for degree in options.tp]
        several += [(1, degree, 1) for degree in options.cp if degree > 1]
        several += [(1, 1, degree) for degree in options.ep if degree > 1 and any(self.shape.routed)]
        for one in several:
            record = LayerTime(
                layer="head",
                tensor=one[0],
                context=one[1],
                expert=one[2],
                forward_seconds=1.0,
                backward_seconds=1.0,
            )
            degrees = record.degrees
            runs = self.devices % math.prod(one) == 0
            if runs and not degrees.problem_with(self.shape, self.tokens.sequence):
                yield degrees

    def _layer_kinds(self, degrees: ParallelDegrees) -> list[LayerKind]:
        kinds: list[LayerKind] = ["experts"] if any(self.shape.routed) else []
        if not all(self.shape.routed) and degrees.expert == 1:
            kinds.append("dense")
        return [*kinds, "head"] if degrees.context == degrees.expert == 1 else kinds

    def _group(self, size: int, stride: int) -> dist.ProcessGroup | None:
        """This process's group of `size` ranks that lie `stride` apart; None alone. All processes ask."""
        if size == 1 or self.world is None:
            return None
        if (size, stride) not in self._groups:
            block = size * stride
            groups = [
                [*range(start + offset, start + offset + block, stride)]
                for start in range(0, self.devices, block)
                for offset in range(stride)
            ]
            own, _ = dist.new_subgroups_by_enumeration(
                groups, timeout=self.world.timeout, backend=self.world.backend
            )
            self._groups[size, stride] = own if isinstance(own, dist.ProcessGroup) else None
        return self._groups[size, stride]

    def _measure_collective(self, world: World, record: CollectiveTimes) -> dict[str, Any]:
        group = self._group(record.devices, record.stride)
        assert group is not None
        timeout = world.timeout.total_seconds()
        bench = LinkBench(self.rank, self.device, group, self.options.repeats, timeout)
        return {"seconds": [bench.collective(record.name, size, group) for size in record.bytes]}

    def _measure_pass(self, bytes: int) -> dict[str, Any]:
        """Seconds of a sum of two tensors in a third."""
        numbers = bytes // (3 * DTYPE.itemsize)
        one, other, result = (torch.ones(numbers, device=self.device, dtype=DTYPE) for _ in range(3))
        run = partial(torch.add, one, other, out=result)
        return {"seconds": median_seconds(run, self.device, self.options.repeats)}

    def _measure_kernel(self, kernel: Product) -> dict[str, Any]:
        return {"seconds": kernel_seconds(kernel, self.device, DTYPE, self.options.repeats)}

    def _measure_layer(self, kind: LayerKind, degrees: ParallelDegrees) -> dict[str, Any]:
        groups = LayerGroups(
            degrees,
            tensor=self._group(degrees.tensor, 1),
            context=self._group(degrees.context, 1),
            expert=self._group(degrees.expert, 1),
        )
        layers = self._build(kind, groups)
        length = self.tokens.sequence // (degrees.tensor * degrees.context)
        sizes = (length, self.tokens.samples, self.shape.hidden)
        hidden = torch.randn(sizes, device=self.device, dtype=DTYPE, requires_grad=True)
        forward, backward = time_layers(layers, hidden, self.options.repeats, self._barrier)
        both = [sum(own) for own in zip(forward, backward, strict=True)]
        middle = statistics.median(both)
        quartiles = statistics.quantiles(both, n=4, method="inclusive") if len(both) > 1 else [middle] * 3
        return {
            "forward_seconds": statistics.median(forward),
            "backward_seconds": statistics.median(backward),
            "spread": (quartiles[2] - quartiles[0]) / middle,
        }

    def _build(self, kind: LayerKind, groups: LayerGroups) -> list[nn.Module]:
        if kind == "head":
            return [PlainHead(self.shape, groups).to(self.device, DTYPE)]
        routed = kind == "experts"
        return [
            PlainBlock(self.shape, routed, groups, self.tokens).to(self.device, DTYPE) for _ in range(BLOCKS)
        ]

    def _barrier(self) -> None:
        if self.world is not None:
            dist.barrier()

    def _measure_update(self, count: int) -> dict[str, Any]:
        """Seconds of what Megatron-LM does with float32 gradients in one buffer, and of Adam."""
        master = torch.ones(count, device=self.device)
        weights = master.to(DTYPE)
        gradients = master.grad = torch.zeros_like(master)
        adam = torch.optim.AdamW([master], fused=True)

        def step() -> None:
            gradients.sum()
            gradients.norm()
            gradients.mul_(0.5)
            adam.step()
            weights.copy_(master)
            gradients.zero_()

        return {"seconds": median_seconds(step, self.device, self.options.repeats)}


def time_layers(
    layers: Sequence[nn.Module], hidden: Tensor, repeats: int, barrier: Callable[[], None] = lambda: None
) -> tuple[list[float], list[float]]:
    """Time the forward and the backward of layers in a row.

    Args:
        layers: Equal layers; the input of each is the output of the one before.
        hidden: Input of the first, of which a gradient is computed.
        repeats: Runs that count.
        barrier: Lets all processes begin together.

    Returns:
        Seconds of one layer's forward and of its backward, by run.
    """
    inputs = [hidden, *(parameter for layer in layers for parameter in layer.parameters())]
    device, count = hidden.device, len(layers)
    times: tuple[list[float], list[float]] = ([], [])

    def forward() -> Tensor:
        result = hidden
        for layer in layers:
            result = layer(result)
        return result

    for _ in range(WARM_UPS + repeats):
        barrier()
        seconds, result = time_once(forward, device)
        times[0].append(seconds / count)
        gradient = torch.ones_like(result)
        seconds, _ = time_once(partial(torch.autograd.grad, result, inputs, gradient), device)
        times[1].append(seconds / count)
    return times[0][WARM_UPS:], times[1][WARM_UPS:]


def _largest(values: Sequence[Any]) -> Any:
    """Return the largest of some numbers, or of some lists of numbers by place."""
    if isinstance(values[0], list):
        return [max(each) for each in zip(*values, strict=True)]
    return max(values)
