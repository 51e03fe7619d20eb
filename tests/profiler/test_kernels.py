"""Kernels of a transformer on the CPU: what is measured computes the kernel, and the table is read again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pplan.cost_models.errors import MachineError, UsageError
from pplan.cost_models.transformer.configuration import transformer_shape
from pplan.cost_models.transformer.kernel_table import (
    AttentionKernel,
    GroupedMatmul,
    Matmul,
    Product,
)
from pplan.cost_models.transformer.kernel_table_file import load_kernel_table
from pplan.profiler.kernels import _prepare, list_kernels, measure_kernels
from pplan.profiler.profile_options import KernelOptions

SHAPE = transformer_shape(
    {
        "model_type": "mixtral",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_hidden_layers": 2,
        "vocab_size": 200,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
)
CPU = KernelOptions(device="cpu", dtype="float32", sequence=32, repeats=1)


def test_a_measured_table_has_every_kernel(tmp_path: Path) -> None:
    calls = []
    measured = measure_kernels(SHAPE, CPU, lambda done, total: calls.append((done, total)))
    assert list(measured.seconds) == list_kernels(SHAPE, CPU)
    assert calls == [(n + 1, len(measured.seconds)) for n in range(len(measured.seconds))]
    file = tmp_path / "kernels.csv"
    file.write_text(measured.to_csv())
    table = load_kernel_table(file)
    for kernel, seconds in measured.seconds.items():
        assert table.has(kernel)
        assert table.seconds(kernel) == pytest.approx(seconds, rel=1e-3)


def test_shapes_of_the_degrees() -> None:
    """Two tensor-parallel devices have half of the heads, two expert-parallel ones half of the experts."""
    options = KernelOptions(device="cpu", sequence=32, tp=(1, 2, 3), ep=(1, 2), micro_batch_size=(1, 2))
    kernels = list_kernels(SHAPE, options)
    assert len(kernels) == len(set(kernels))
    heads = {kernel.heads for kernel in kernels if isinstance(kernel, AttentionKernel)}
    groups = {kernel.groups for kernel in kernels if isinstance(kernel, GroupedMatmul)}
    rows = {kernel.m for kernel in kernels if isinstance(kernel, Matmul) and kernel.layout == "TN"}
    assert (heads, groups) == ({8, 4}, {4, 2})
    assert {32, 64} <= rows


@pytest.mark.parametrize(
    ("kernel", "shape"),
    [
        (Matmul(4, 5, 6, "TN"), (4, 6)),
        (Matmul(4, 5, 6, "NN"), (4, 6)),
        (Matmul(4, 5, 6, "NT"), (4, 6)),
        (GroupedMatmul(2, 3, 4, 5, "forward"), (2, 3, 4)),
        (GroupedMatmul(2, 3, 4, 5, "input_gradient"), (2, 3, 5)),
        (GroupedMatmul(2, 3, 4, 5, "weight_gradient"), (2, 4, 5)),
        (AttentionKernel(6, 4, 2, 8, 8, False), (1, 4, 6, 8)),
    ],
)
def test_what_runs_has_the_kernels_result(kernel: Product, shape: tuple[int, ...]) -> None:
    result = _prepare(kernel, torch.device("cpu"), torch.float32)()
    assert isinstance(result, torch.Tensor)
    assert tuple(result.shape) == shape


def test_the_flops_of_what_runs_are_the_kernels() -> None:
    """By torch's own counter; attention counts the half below the diagonal of what the counter counts."""
    from torch.utils.flop_counter import FlopCounterMode

    for kernel in list_kernels(SHAPE, CPU):
        if isinstance(kernel, AttentionKernel):
            continue
        with FlopCounterMode(display=False) as counter:
            _prepare(kernel, torch.device("cpu"), torch.float32)()
        assert counter.get_total_flops() == kernel.flops


def test_gradients_of_attention_are_those_of_its_inputs() -> None:
    result = _prepare(AttentionKernel(6, 4, 2, 8, 8, True), torch.device("cpu"), torch.float32)()
    assert isinstance(result, tuple)
    assert [tuple(each.shape) for each in result] == [(1, 4, 6, 8), (1, 2, 6, 8), (1, 2, 6, 8)]


def test_refusals() -> None:
    with pytest.raises(UsageError, match="3 devices"):
        measure_kernels(SHAPE, KernelOptions(device="cpu", sequence=32, tp=(3,)))
    with pytest.raises(UsageError, match="meta"):
        measure_kernels(SHAPE, KernelOptions(device="meta", sequence=32))
    with pytest.raises(MachineError, match="cuda:77"):
        measure_kernels(SHAPE, KernelOptions(device="cuda:77", sequence=32))
    with pytest.raises(UsageError, match="dtype"):
        measure_kernels(SHAPE, KernelOptions(device="cpu", dtype="int7", sequence=32))
