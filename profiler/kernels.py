"""Seconds of a transformer's kernels on the device at hand, for a table of kernels."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..cost_models.errors import MachineError, UsageError
from ..cost_models.machines import ROOFLINES, device_preset
from ..cost_models.transformer.block_kernels import block_work, embedding_work, head_work
from ..cost_models.transformer.implementations import MEGATRON, Implementation
from ..cost_models.transformer.kernel_table import AttentionKernel, GroupedMatmul, Matmul, Product
from ..cost_models.transformer.kernel_table_file import write_kernel_table
from ..cost_models.transformer.layer_work import Tokens
from ..cost_models.transformer.parallel_degrees import ParallelDegrees
from ..cost_models.transformer.rank_costs import products
from ..cost_models.transformer.transformer_shape import TransformerShape
from .local_machine import device_name, parse_device, parse_dtype
from .profile_options import KernelOptions

WARM_UPS = 2
"""Runs before those that count."""

T = TypeVar("T")


@dataclass(frozen=True)
class MeasuredKernels:
    """Seconds by kernel. `peak`: FLOP/s that the device's maker states; None where they are not known."""

    device: str
    dtype: str
    seconds: dict[Product, float]
    peak: float | None

    def to_csv(self) -> str:
        """The table; without a stated peak its shares are of the fastest kernel's FLOP/s."""
        return write_kernel_table(self.seconds, self.peak)


def list_kernels(
    shape: TransformerShape, options: KernelOptions, codes: Sequence[Implementation] = (MEGATRON,)
) -> list[Product]:
    """The different products of the model's layers with all those degrees that divide it.

    Args:
        shape: Sizes of the model.
        options: Degrees, tokens and micro-batch sizes.
        codes: Training codes whose products are listed.

    Raises:
        UsageError: None of the degrees divides the model.
    """
    kernels: dict[Product, None] = {}
    problem = ""
    kinds = sorted(set(shape.routed))
    for tensor, context, expert, code in product(options.tp, options.cp, options.ep, codes):
        for exchange in code.exchanges if context > 1 and len(codes) > 1 else ("all-to-all",):
            degrees = ParallelDegrees(tensor, context, expert, data=expert, exchange=exchange)
            if why := degrees.problem_with(shape, options.sequence):
                problem = why
                continue
            for samples in options.micro_batch_size:
                tokens = Tokens(options.sequence, samples)
                works = [block_work(shape, routed, degrees, tokens, code) for routed in kinds]
                ends = (embedding_work(shape, degrees, tokens), head_work(shape, degrees, tokens, code))
                kernels |= dict.fromkeys(products((*works, *ends)))
    if not kernels:
        raise UsageError(problem, "Choose degrees that divide heads, widths, experts and tokens.")
    return list(kernels)


def measure_kernels(
    shape: TransformerShape, options: KernelOptions, progress: Callable[[int, int], None] | None = None
) -> MeasuredKernels:
    """Each kernel by itself, its median. `progress` gets how many are done, of how many.

    Raises UsageError, and MachineError for a device that is not here or whose memory a kernel exceeds.
    """
    kernels = list_kernels(shape, options)
    device, dtype = parse_device(options.device), parse_dtype(options.dtype)
    if device.type == "meta":
        raise UsageError("device='meta': computes nothing", "Give a device that does, as cpu.")
    seconds: dict[Product, float] = {}
    for number, kernel in enumerate(kernels):
        seconds[kernel] = kernel_seconds(kernel, device, dtype, options.repeats)
        if progress is not None:
            progress(number + 1, len(kernels))
    preset = device_preset(device_name(device))
    roofline = None if preset is None else ROOFLINES.get(preset.name)
    peak = None if roofline is None else roofline.peak(options.dtype)
    return MeasuredKernels(device_name(device), options.dtype, seconds, peak)


def kernel_seconds(kernel: Product, device: torch.device, dtype: torch.dtype, repeats: int) -> float:
    """Measure the median seconds of a kernel. Raises MachineError where the device's memory is too small."""
    try:
        return median_seconds(_prepare(kernel, device, dtype), device, repeats)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        text = str(error).splitlines()[0]
        raise MachineError(f"{kernel}: {text}", "Give fewer tokens, or higher degrees.") from error


def median_seconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the median seconds of a run on a device, after some that do not count."""
    for _ in range(WARM_UPS):
        run()
    return statistics.median(_times(run, device, repeats))


def _times(run: Callable[[], object], device: torch.device, repeats: int) -> Iterator[float]:
    for _ in range(repeats):
        yield time_once(run, device)[0]


def time_once(run: Callable[[], T], device: torch.device) -> tuple[float, T]:
    """Run something once on a device; return its seconds there and its result."""
    if device.type != "cuda":
        before = time.perf_counter()
        result = run()
        return time.perf_counter() - before, result
    event: Any = torch.cuda.Event  # has no annotations
    with torch.cuda.device(device):
        start, end = event(enable_timing=True), event(enable_timing=True)
        start.record()
        result = run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e-3, result


def _prepare(kernel: Product, device: torch.device, dtype: torch.dtype) -> Callable[[], object]:
    """Its inputs, made beforehand, and what runs it."""

    def random(*sizes: int) -> Tensor:
        return torch.randn(sizes, device=device, dtype=dtype)

    match kernel:
        case Matmul(m, k, n, "TN"):
            inputs, weight = random(m, k), random(n, k)
            return lambda: inputs @ weight.t()
        case Matmul(m, k, n, "NN"):
            gradient, weight = random(m, k), random(k, n)
            return lambda: gradient @ weight
        case Matmul(m, k, n):
            gradient, inputs = random(k, m), random(k, n)
            sums = torch.zeros(m, n, device=device)
            return lambda: sums.add_(gradient.t() @ inputs)
        case GroupedMatmul(groups, m, n, k, "forward"):
            inputs, weight = random(groups, m, k), random(groups, n, k)
            return lambda: inputs @ weight.transpose(1, 2)
        case GroupedMatmul(groups, m, n, k, "input_gradient"):
            gradient, weight = random(groups, m, n), random(groups, n, k)
            return lambda: gradient @ weight
        case GroupedMatmul(groups, m, n, k):
            gradient, inputs = random(groups, m, n), random(groups, m, k)
            sums = torch.zeros(groups, n, k, device=device)
            return lambda: sums.add_(gradient.transpose(1, 2) @ inputs)
        case AttentionKernel():
            return _prepare_attention(kernel, random)


def _prepare_attention(kernel: AttentionKernel, random: Callable[..., Tensor]) -> Callable[[], object]:
    samples, length = kernel.samples, kernel.sequence
    query = random(samples, kernel.heads, length, kernel.head_width)
    key = random(samples, kernel.key_value_heads, length, kernel.head_width)
    value = random(samples, kernel.key_value_heads, length, kernel.value_width)
    grouped = kernel.heads != kernel.key_value_heads

    def forward() -> Tensor:
        return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)

    if not kernel.backward:
        return forward
    inputs = [each.requires_grad_() for each in (query, key, value)]
    result = forward()
    gradient = torch.ones_like(result)
    return lambda: torch.autograd.grad(result, inputs, gradient, retain_graph=True)
