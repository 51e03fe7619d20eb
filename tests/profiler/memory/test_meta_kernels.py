"""Attention on the meta device against the CPU: what it returns, and what it saves for backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from pplan.profiler import meta_device
from pplan.profiler.meta_device import attention_as_on_the_cpu, kernels_as_on_a_gpu

ATEN: Any = torch.ops.aten.scaled_dot_product_attention.default
CAUSAL = 2 * 4 * 64 * 4 * (4 * 32 + 1)
"""Bytes of queries, keys, values, output and one number a row."""
Attend = Callable[..., Tensor]


def tensors(device: str, *shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]


def saved(attend: Attend, given: list[Tensor], **settings: Any) -> tuple[int, tuple[int, ...], torch.dtype]:
    """Bytes saved for backward, each storage once; shape and dtype of the output. Backward runs too."""
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = attend(*given, **settings)
    total = sum(storage.nbytes() for storage in kept.values())
    kept.clear()
    torch.autograd.backward(output.sum())
    assert [None if one.grad is None else one.grad.shape for one in given] == [one.shape for one in given]
    return total, tuple(output.shape), output.dtype


def test_the_bytes_are_those_of_the_fused_path() -> None:
    shape = (2, 4, 64, 32)
    assert saved(F.scaled_dot_product_attention, tensors("cpu", *shape), is_causal=True)[0] == CAUSAL
    plain = saved(F.scaled_dot_product_attention, tensors("meta", *shape), is_causal=True)[0]
    with attention_as_on_the_cpu() as missing:
        assert missing is None
        assert saved(F.scaled_dot_product_attention, tensors("meta", *shape), is_causal=True)[0] == CAUSAL
        assert saved(ATEN, tensors("meta", *shape), is_causal=True)[0] == CAUSAL
    assert saved(F.scaled_dot_product_attention, tensors("meta", *shape), is_causal=True)[0] == plain > CAUSAL


def masks(device: str, dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    """Settings by name."""
    allowed = torch.ones(10, 10, dtype=torch.bool, device=device).tril()
    yield "none", {}
    yield "causal", {"is_causal": True}
    yield "scale", {"scale": 0.3}
    yield "boolean", {"attn_mask": allowed}
    yield "boolean by sample", {"attn_mask": allowed.expand(2, 1, 10, 10)}
    yield "additive", {"attn_mask": torch.zeros(10, 10, dtype=dtype, device=device)}
    bias = torch.zeros(1, 4, 10, 10, dtype=dtype, device=device, requires_grad=True)
    yield "trained bias", {"attn_mask": bias}
    yield "dropout", {"dropout_p": 0.5}


@pytest.mark.parametrize("name", [name for name, _ in masks("cpu", torch.float32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_settings(name: str, dtype: torch.dtype) -> None:
    found = []
    for device in ("cpu", "meta"):
        given, settings = tensors(device, 2, 4, 10, 8, dtype=dtype), dict(masks(device, dtype))[name]
        with attention_as_on_the_cpu():
            found.append(saved(F.scaled_dot_product_attention, given, **settings))
    assert found[0][1:] == found[1][1:]
    fused = name not in ("trained bias", "dropout")
    assert found[0][0] - found[1][0] == (bytes_not_told(dtype) * 2 * 4 * 10 if fused else 0)


def bytes_not_told(dtype: torch.dtype) -> int:
    """A row: on the meta device torch 2.11 makes a float32 of the one number, also where rows are float64."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    on_cpu, on_meta = (flash(*tensors(device, 1, 1, 2, 8, dtype=dtype))[1] for device in ("cpu", "meta"))
    assert on_cpu.dtype == on_meta.dtype or torch.__version__ < "2.15"
    return int(on_cpu.itemsize - on_meta.itemsize)


def heads_last(given: Tensor) -> Tensor:
    return given.transpose(1, 2)


def far_apart(given: Tensor) -> Tensor:
    return given.transpose(2, 3)


@pytest.mark.parametrize(
    ("shape", "view"),
    [
        *((shape, None) for shape in [(10, 8), (3, 10, 8), (2, 4, 10, 8), (2, 2, 4, 10, 8), (2, 1, 10, 8)]),
        *((shape, view) for shape in [(2, 4, 10, 8), (2, 1, 10, 8)] for view in (heads_last, far_apart)),
    ],
)
def test_shapes_and_strides(shape: tuple[int, ...], view: Callable[[Tensor], Tensor] | None) -> None:
    def attend(*given: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*(given if view is None else map(view, given)))

    with attention_as_on_the_cpu():
        assert saved(attend, tensors("meta", *shape)) == saved(attend, tensors("cpu", *shape))


@pytest.mark.parametrize("masked", [False, True])
def test_a_sequence_without_batch(masked: bool) -> None:
    found = []
    for device in ("cpu", "meta"):
        mask = torch.ones(3, 10, 10, dtype=torch.bool, device=device) if masked else None
        with attention_as_on_the_cpu():
            found.append(saved(F.scaled_dot_product_attention, tensors(device, 3, 10, 8), attn_mask=mask))
    assert found[0] == found[1]


def test_queries_that_share_keys() -> None:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key[:, :2], value[:, :2], enable_gqa=True)

    with attention_as_on_the_cpu():
        assert saved(attend, tensors("meta", 2, 4, 10, 8)) == saved(attend, tensors("cpu", 2, 4, 10, 8))


def test_the_plain_path_stays_where_it_is_asked_for() -> None:
    found = []
    for device in ("cpu", "meta"):
        with attention_as_on_the_cpu(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            found.append(saved(F.scaled_dot_product_attention, tensors(device, 2, 4, 64, 32)))
    assert found[0] == found[1]
    assert found[0][0] > CAUSAL


class Attending(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def test_nodes_of_graphs() -> None:
    traced = fx.symbolic_trace(Attending())
    exported = torch.export.export(Attending(), tuple(tensors("cpu", 2, 4, 64, 32))).module()
    with attention_as_on_the_cpu():
        for module in (traced, exported):
            assert saved(module, tensors("meta", 2, 4, 64, 32))[0] == CAUSAL


def test_it_may_be_entered_again_and_ends_with_an_error() -> None:
    def now() -> int:
        return saved(F.scaled_dot_product_attention, tensors("meta", 2, 4, 64, 32), is_causal=True)[0]

    def fails() -> None:
        with attention_as_on_the_cpu():
            with attention_as_on_the_cpu():
                assert now() == CAUSAL
            assert now() == CAUSAL
            raise KeyError

    plain = now()
    with pytest.raises(KeyError):
        fails()
    assert now() == plain > CAUSAL


def test_wrong_shapes_are_refused_as_torch_refuses_them() -> None:
    query, key, value = tensors("meta", 2, 4, 10, 8)
    with attention_as_on_the_cpu(), pytest.raises(RuntimeError):
        F.scaled_dot_product_attention(query, key[..., :7], value)


def test_without_a_name_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "_fused_sdp_choice")
    with attention_as_on_the_cpu() as missing:
        assert missing == f"torch {torch.__version__} has no torch._fused_sdp_choice"
        plain = saved(F.scaled_dot_product_attention, tensors("meta", 2, 4, 64, 32), is_causal=True)[0]
    assert plain > CAUSAL
    assert not meta_device._libraries


ROWS, WIDTH = 2 * 4 * 64, 32
"""Of queries, keys and values of 2 samples, 4 heads and 64 tokens."""
A_FEW = 64
"""Bytes of a generator's seed and offset."""


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize(
    ("dtype", "flash"),
    [(torch.bfloat16, True), (torch.float16, True), (torch.float16, False), (torch.float32, True)],
)
def test_a_gpu_saves_inputs_output_and_a_number_a_row(
    dtype: torch.dtype, flash: bool, dropout_p: float
) -> None:
    """Dao et al., FlashAttention (2022), algorithm 2, and Rabe and Staats (2021); dropout is drawn again."""
    given = tensors("meta", 2, 4, 64, 32, dtype=dtype)
    with kernels_as_on_a_gpu(flash=flash) as missing:
        assert missing is None
        found, shape, kind = saved(F.scaled_dot_product_attention, given, is_causal=True, dropout_p=dropout_p)
    assert (shape, kind) == ((2, 4, 64, 32), dtype)
    assert 0 <= found - ROWS * (4 * WIDTH * dtype.itemsize + 4) <= A_FEW


def test_a_mask_goes_to_the_memory_efficient_kernel_and_is_saved() -> None:
    given, mask = tensors("meta", 2, 4, 64, 32, dtype=torch.bfloat16), torch.ones(64, 64, device="meta") > 0
    with kernels_as_on_a_gpu(flash=True):
        found = saved(F.scaled_dot_product_attention, given, attn_mask=mask)[0]
    assert 0 <= found - ROWS * (4 * WIDTH * 2 + 4) - 64 * 64 * 2 <= A_FEW


def test_heads_that_share_keys_take_the_plain_path_in_float32_alone() -> None:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key[:, :2], value[:, :2], enable_gqa=True)

    with kernels_as_on_a_gpu(flash=True):
        whole = saved(attend, tensors("meta", 2, 4, 64, 32))[0]
        half = saved(attend, tensors("meta", 2, 4, 64, 32, dtype=torch.bfloat16))[0]
    assert whole - ROWS * (4 * WIDTH * 4 + 4) > A_FEW
    assert 0 <= half - ROWS * (4 * WIDTH * 2 + 4) <= A_FEW


@pytest.mark.parametrize("shape", [(10, 8), (3, 10, 8), (2, 4, 10, 300), (2, 4, 10, 12), (2, 2, 4, 10, 8)])
def test_every_shape_has_its_output_on_a_gpu(shape: tuple[int, ...]) -> None:
    with kernels_as_on_a_gpu(flash=True):
        for dtype in (torch.float32, torch.bfloat16):
            found = saved(F.scaled_dot_product_attention, tensors("meta", *shape, dtype=dtype))
            assert found[1:] == (shape, dtype)


def test_dropout_saves_one_byte_an_element_on_a_gpu() -> None:
    given = tensors("meta", 5, 100)
    with kernels_as_on_a_gpu(flash=True):
        module = saved(lambda a, b, c: nn.Dropout(0.1)(a + b + c), given)[0]
        with attention_as_on_the_cpu():
            inner = saved(lambda a, b, c: F.dropout(a + b + c, 0.1), given)[0]
        for none in (0.0, 1.0):
            assert saved(lambda a, b, c, p=none: F.dropout(a + b + c, p), given)[1] == (5, 100)
    assert module == 500
    assert inner == saved(lambda a, b, c: F.dropout(a + b + c, 0.1), tensors("cpu", 5, 100))[0] == 2000
    assert saved(lambda a, b, c: F.dropout(a + b + c, 0.1), given)[0] == 2000
