"""Tables of kernels: what a row says, what lies between rows, and what is no table."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pplan.cost_models.errors import FileError
from pplan.cost_models.transformer.kernel_table import (
    AttentionKernel,
    GroupedMatmul,
    KernelTable,
    Matmul,
    Product,
)
from pplan.cost_models.transformer.kernel_table_file import load_kernel_table, write_kernel_table

ROWS = """operation,shape,peak_tflops,efficiency,achieved_tflops,note
matmul,"b=1, m=64, k=128, n=256, layout=TN, accumulate=False",100,0.5,,first
matmul,"m=64, k=128, n=1024, layout=TN",100,,25,
matmul,"m=64, k=128, n=256, layout=NT",100,0.2,,
group_matmul,"ng=4, M=64, N=256, K=128, stage=bwd_grad_w",100,0.1,,
sdp_bwd,"seq_len=64, head_num=4, kv_head_num=2, qk_head_dim=16, v_head_dim=16",100,0.8,,
"""


@pytest.fixture
def table(tmp_path: Path) -> KernelTable:
    file = tmp_path / "kernels.csv"
    file.write_text(ROWS)
    return load_kernel_table(file)


def test_rows(table: KernelTable) -> None:
    peak = 100e12
    assert table.seconds(Matmul(64, 128, 256, "TN")) == pytest.approx(2 * 64 * 128 * 256 / (0.5 * peak))
    assert table.seconds(Matmul(64, 128, 1024, "TN")) == pytest.approx(2 * 64 * 128 * 1024 / (0.25 * peak))
    assert table.seconds(Matmul(64, 128, 256, "NT")) == pytest.approx(2 * 64 * 128 * 256 / (0.2 * peak))
    grouped = GroupedMatmul(4, 64, 256, 128, "weight_gradient")
    assert table.seconds(grouped) == pytest.approx(2 * 4 * 64 * 128 * 256 / (0.1 * peak))
    attention = AttentionKernel(64, 4, 2, 16, 16, backward=True)
    assert table.seconds(attention) == pytest.approx(5 * 64**2 * 4 * 32 / (0.8 * peak))


def test_attention_counts_the_whole_square(tmp_path: Path) -> None:
    """Published tables divide the FLOPs of the whole square by the seconds of causal attention: on B200 27.5
    TFLOP in 10.2 ms, 1.1654 of its peak of 2,250 TFLOP/s."""
    file = tmp_path / "kernels.csv"
    shape = '"batch=1, seq_len=32768, head_num=16, kv_head_num=2, qk_head_dim=128, v_head_dim=128"'
    kernel = AttentionKernel(32768, 16, 2, 128, 128, backward=False)
    seconds = 2 * 32768**2 * 16 * 256 / 2622.1e12
    for column, value in (("efficiency", 1.16538), ("achieved_tflops", 2622.1), ("seconds", seconds)):
        file.write_text(f"operation,shape,peak_tflops,{column}\nsdp_fwd,{shape},2250,{value}\n")
        table = load_kernel_table(file)
        assert table.seconds(kernel) == pytest.approx(seconds, rel=1e-4)
        # What it computes is half of that.
        assert kernel.flops / table.seconds(kernel) < 2250e12 / 1.5
        both_ways = AttentionKernel(32768, 16, 2, 128, 128, backward=False, causal=False)
        assert table.seconds(both_ways) == pytest.approx(2 * seconds, rel=1e-4)


def test_what_has_rows(table: KernelTable) -> None:
    assert table.has(Matmul(64, 128, 256, "TN"))
    assert not table.has(Matmul(64, 128, 512, "TN"))
    assert table.knows(Matmul(64, 128, 512, "TN"))
    assert not table.knows(Matmul(64, 128, 512, "NN"))


def test_between_two_rows_as_near_to_both(table: KernelTable) -> None:
    """Halfway on the scale of logarithms: both weigh the same."""
    seconds = table.seconds(Matmul(64, 128, 512, "TN"))
    assert seconds == pytest.approx(2 * 64 * 128 * 512 / (100e12 * (0.5 + 0.25) / 2))


def limits_of(kernel: Product) -> float:
    """Seconds of its FLOPs at 100 TFLOP/s and of its bytes at 1 TB/s, one after the other."""
    match kernel:
        case Matmul(m, k, n, layout):
            bytes = 2 * m * k + 2 * k * n + (8 if layout == "NT" else 2) * m * n
        case GroupedMatmul(groups, m, n, k, part):
            bytes = groups * (2 * m * k + 2 * m * n + (8 if part == "weight_gradient" else 2) * n * k)
        case AttentionKernel():
            return 2 * kernel.flops / 100e12
    return kernel.flops / 100e12 + bytes / 1e12


@pytest.mark.parametrize(
    "kernels",
    [
        [Matmul(2**a, 2**b, 2**c, "NT") for a in (5, 8, 12) for b in (5, 12) for c in (6, 13)],
        [Matmul(2**a, 2**b, 2**c, "TN") for a in (5, 8, 12) for b in (5, 12) for c in (6, 13)],
        [GroupedMatmul(2**a, 2**b, 512, 2048, "weight_gradient") for a in (2, 5, 8) for b in (3, 7, 12)],
        [GroupedMatmul(2**a, 2**b, 512, 2048, "forward") for a in (2, 5, 8) for b in (3, 7, 12)],
        [AttentionKernel(2**a, 2**b, 4, 64, 64, backward=True) for a in (8, 12) for b in (2, 5)],
    ],
    ids=["NT", "TN", "weight gradient", "forward", "attention"],
)
def test_a_row_that_is_left_out(kernels: list[Product], tmp_path: Path) -> None:
    """Where all kernels reach half of what FLOPs and bytes allow, each is predicted of the others, however
    unlike their shares of the peak are."""
    for left_out in kernels:
        file = tmp_path / "kernels.csv"
        rows: dict[Product, float] = {own: 2 * limits_of(own) for own in kernels if own != left_out}
        file.write_text(write_kernel_table(rows, 100e12))
        table = load_kernel_table(file)
        assert table.seconds(left_out, 1e12) == pytest.approx(2 * limits_of(left_out), rel=1e-4)


def test_sizes_beyond_those_of_the_rows(table: KernelTable) -> None:
    assert table.surrounds(Matmul(64, 128, 512, "TN"))
    assert not table.surrounds(Matmul(64, 128, 2048, "TN"))
    assert not table.surrounds(Matmul(32, 128, 512, "TN"))
    assert not table.surrounds(Matmul(64, 128, 512, "NN"))


@given(st.integers(1, 2**20), st.integers(1, 2**20), st.integers(1, 2**20))
def test_a_share_between_those_of_the_rows(m: int, k: int, n: int) -> None:
    shares: dict[tuple[float, ...], float] = {
        (64.0, 128.0, 256.0): 0.5,
        (64.0, 128.0, 1024.0): 0.25,
        (512.0, 512.0, 512.0): 0.75,
    }
    kernel = Matmul(m, k, n, "TN")
    seconds = KernelTable(100e12, {"matmul TN": shares}).seconds(kernel)
    assert kernel.flops / 100e12 / seconds <= 0.75 * (1 + 1e-12)
    assert kernel.flops / 100e12 / seconds >= 0.25 * (1 - 1e-12)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no kernels"),
        ("operation,shape,peak_tflops,efficiency\n", "no kernels"),
        (ROWS.replace("layout=NT", "layout=XX"), "line 4: layout='XX'"),
        (ROWS.replace("stage=bwd_grad_w", "stage=sideways"), "line 5: stage='sideways'"),
        (ROWS.replace("m=64, k=128, n=256, layout=NT", "m=64, n=256, layout=NT"), "line 4: k"),
        (ROWS.replace("0.2", "nan"), "line 4: efficiency"),
        (ROWS.replace("0.2", "0"), "line 4: efficiency"),
        (ROWS.replace("0.2", "1e400"), "line 4: efficiency"),
        (ROWS.replace("0.2", "1e-300"), "line 4: efficiency"),
        (ROWS.replace(",25,", ",1e-10,"), "line 3: achieved_tflops"),
        (ROWS.replace("M=64", "M=1e300"), "line 5: M"),
        (ROWS.replace("sdp_bwd", "sdp"), "line 6: operation"),
        (ROWS.replace('layout=NT",100', 'layout=NT",200'), "several peaks"),
        (ROWS.replace("first", "x" * 200_000), "not CSV"),
    ],
)
def test_what_is_no_table(text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "kernels.csv"
    file.write_text(text)
    with pytest.raises(FileError) as error:
        load_kernel_table(file)
    assert says in error.value.what
    assert len(str(error.value)) < 400


def test_a_table_of_one_row_answers_for_all() -> None:
    own = KernelTable(1e12, {"matmul TN": {(8.0, 8.0, 8.0): 0.5}})
    assert math.isfinite(own.seconds(Matmul(2**20, 1, 2**20, "TN")))


def test_a_table_that_was_written_is_read_back(tmp_path: Path) -> None:
    seconds: dict[Product, float] = {
        Matmul(64, 128, 256, "NT"): 1e-6,
        GroupedMatmul(4, 64, 256, 128, "input_gradient"): 2e-5,
        AttentionKernel(64, 4, 2, 16, 8, backward=False): 3e-6,
        AttentionKernel(64, 4, 2, 16, 8, backward=True): 5e-6,
        AttentionKernel(2**20 + 2, 4, 2, 16, 8, backward=True, samples=3): 2.0,
    }
    file = tmp_path / "kernels.csv"
    for peak in (None, 1e15):
        file.write_text(write_kernel_table(seconds, peak))
        table = load_kernel_table(file)
        fastest = max(kernel.flops / own for kernel, own in seconds.items())
        assert table.peak == pytest.approx(peak or fastest, rel=1e-5)
        for kernel, own in seconds.items():
            assert table.has(kernel)
            assert table.seconds(kernel) == pytest.approx(own, rel=1e-5)


def test_a_table_that_was_used_is_the_same() -> None:
    """What it keeps of shapes between its own is no part of it."""
    own: dict[str, dict[tuple[float, ...], float]]
    own = {"matmul TN": {(64.0, 64.0, 64.0): 0.5, (512.0, 512.0, 512.0): 0.9}}
    used, new = KernelTable(1e12, own), KernelTable(1e12, own)
    before = repr(used)
    assert used.seconds(Matmul(128, 128, 128, "TN")) > 0
    assert used == new
    assert repr(used) == before
