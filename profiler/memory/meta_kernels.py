"""Attention and dropout on the meta device as a CPU or a GPU computes them, so that they save for backward
what is saved there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..operator_internals import (
    choose_attention,
    efficient_attention_on_gpu,
    flash_attention_on_cpu,
    flash_attention_on_gpu,
    missing_for_attention,
    remove_library,
)

_KEY = "AutogradMeta"
_FLASH = 1
"""torch.nn.attention.SDPBackend.FLASH_ATTENTION, as `choose_attention` tells it."""
_HALF = (torch.float16, torch.bfloat16)

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, float, dict[str, Any]], Tensor]
"""Of query, key, value, mask, probability of dropout, and `is_causal`, `scale` and `enable_gqa`."""

Kernels = Callable[[], AbstractContextManager[str | None]]
"""Entered, passes on the meta device run as on some device. Yields None, or what is left out of that."""

_lock = threading.Lock()
_entered: list[tuple[Attend, bool]] = []
"""How attention is computed, and whether dropout is fused; the last holds."""
_libraries: dict[str, Any] = {}
"""That hold the kernels, by the operator's name."""


def attention_as_on_the_cpu() -> AbstractContextManager[str | None]:
    """While entered, torch.nn.functional.scaled_dot_product_attention of meta tensors is that of the CPU.

    torch itself takes the plain path there, which saves the attention matrix. Here the CPU is asked which
    path it would take for such tensors, and where that is the fused one, it is taken: it saves its inputs,
    its output and one number a row. The operator itself is given another kernel for meta tensors, so it
    holds for whoever calls it: a model's code, modules of torch.nn, nodes of a graph. It holds for the whole
    process, and may be entered again inside; the innermost counts.

    Yields None, or where this torch cannot do it, why; attention is then what torch makes of it.
    """
    return _kernels(_on_cpu, fused_dropout=False)


def kernels_as_on_a_gpu(*, flash: bool) -> AbstractContextManager[str | None]:
    """The same for attention and dropout of a CUDA device; `flash`: whether it has compute capability 8.0,
    which flash attention needs.

    Both fused kernels of attention draw the mask of their dropout again in backward, and save none; dropout
    elsewhere saves a mask of one byte an element, where the CPU saves one number of its dtype.
    """
    return _kernels(_with_flash if flash else _without_flash, fused_dropout=True)


def kernels_on(device: torch.device) -> Callable[[], AbstractContextManager[str | None]]:
    """Enters attention, and on a GPU dropout, as that device computes them."""
    if device.type != "cuda":
        return attention_as_on_the_cpu
    return partial(kernels_as_on_a_gpu, flash=torch.cuda.get_device_capability(device) >= (8, 0))


@contextmanager
def _kernels(attend: Attend, *, fused_dropout: bool) -> Iterator[str | None]:
    missing = missing_for_attention()
    if missing is not None:
        yield f"torch {torch.__version__} has no {missing.name}"
        return
    entry = (attend, fused_dropout)
    _enter(entry)
    try:
        yield None
    finally:
        _leave(entry)


def _enter(entry: tuple[Attend, bool]) -> None:
    with _lock:
        _entered.append(entry)
        _put_kernels()


def _leave(entry: tuple[Attend, bool]) -> None:
    with _lock:
        _entered.remove(entry)
        _put_kernels()


def _put_kernels() -> None:
    """Each operator has its kernel while an entry needs it; dropout as it is on the CPU needs none."""
    needed = {
        "scaled_dot_product_attention": (_attention, bool(_entered)),
        "dropout": (_dropout, any(fused for _, fused in _entered)),
    }
    for name, (kernel, is_needed) in needed.items():
        if is_needed and name not in _libraries:
            _libraries[name] = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
            _libraries[name].impl(name, kernel, _KEY)
        elif not is_needed and name in _libraries:
            remove_library(_libraries.pop(name))


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The kernel for meta tensors, above autograd as the operator's own is."""
    settings = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    return _entered[-1][0](query, key, value, attn_mask, dropout_p, settings)


def _dropout(values: Tensor, p: float, train: bool) -> Tensor:
    """Whole on a GPU; else as a product with the mask, which is saved (aten/native/Dropout.cpp)."""
    if not train or p == 0 or not values.numel():
        return values
    if _entered[-1][1] and p < 1:
        dropped: Tensor = torch.native_dropout(values, p, train)[0]
        return dropped
    return values * torch.empty_like(values).bernoulli_(1 - p).div_(
        max(1 - p, torch.finfo(values.dtype).tiny)
    )


def _plain(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, settings: dict[str, Any]
) -> Tensor:
    whole: Callable[..., Tensor] = torch.ops.aten.scaled_dot_product_attention.default.decompose
    return whole(query, key, value, mask, dropout_p, **settings)


def _on_cpu(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, settings: dict[str, Any]
) -> Tensor:
    if _choice_of_the_cpu(query, key, value, mask, dropout_p, settings) != _FLASH:
        return _plain(query, key, value, mask, dropout_p, settings)
    is_causal, scale = settings["is_causal"], settings["scale"]
    mask = None if mask is None else _additive(mask, query.dtype)
    if query.dim() == 3:
        tensors = [tensor.unsqueeze(0) for tensor in (query, key, value)]
        mask = mask.unsqueeze(0) if mask is not None and mask.dim() == 3 else mask
        return flash_attention_on_cpu(*tensors, dropout_p, is_causal, attn_mask=mask, scale=scale).squeeze(0)
    return flash_attention_on_cpu(query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale)


def _with_flash(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, settings: dict[str, Any]
) -> Tensor:
    """In torch's order: flash, memory-efficient, plain (aten/native/transformers/cuda/sdp_utils.cpp)."""
    width = query.shape[-1]
    fits = query.dim() == 4 and query.dtype in _HALF and mask is None and width <= _WIDEST
    if not fits or not width == key.shape[-1] == value.shape[-1] or not _is_batched(query, key, value):
        return _without_flash(query, key, value, mask, dropout_p, settings)
    scale = width**-0.5 if settings["scale"] is None else settings["scale"]
    padded = [F.pad(tensor, (0, -width % 8)) if width % 8 else tensor for tensor in (query, key, value)]
    attended = flash_attention_on_gpu(*padded, dropout_p, settings["is_causal"], False, scale=scale)
    return attended[..., :width]


def _without_flash(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, settings: dict[str, Any]
) -> Tensor:
    grouped = query.dim() == 4 and query.shape[1] != key.shape[1]
    is_supported = query.dim() == 4 and query.dtype in (*_HALF, torch.float32)
    if not is_supported or grouped or not _is_batched(query, key, value):
        return _plain(query, key, value, mask, dropout_p, settings)
    bias = None
    if mask is not None:
        bias = _additive(mask, query.dtype).expand(*query.shape[:3], key.shape[2])
    trained = any(tensor.requires_grad for tensor in (query, key, value, *([] if bias is None else [bias])))
    keeps = torch.is_grad_enabled() and trained
    causal, scale = settings["is_causal"], settings["scale"]
    return efficient_attention_on_gpu(query, key, value, bias, keeps, dropout_p, causal, scale=scale)


_WIDEST = 256
"""The largest head of flash attention."""


def _is_batched(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Fused kernels broadcast neither samples nor empty sequences."""
    return query.shape[0] == key.shape[0] == value.shape[0] and 0 not in (*query.shape, *key.shape)


def _choice_of_the_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    settings: dict[str, Any],
) -> int:
    """The number of the path. What cannot be computed raises in the plain path, with torch's own words."""
    twins = [_on_the_cpu(tensor) for tensor in (query, key, value)]
    return choose_attention(*twins, None if mask is None else _on_the_cpu(mask), dropout_p, **settings)


def _on_the_cpu(tensor: Tensor) -> Tensor:
    """Of the same shape, taking no memory: the CPU looks at shapes, dtypes and the last stride."""
    row = tensor.shape[-1:] if tensor.stride()[-1:] == (1,) else ()
    twin = torch.empty(row, dtype=tensor.dtype, device="cpu").expand(tensor.shape)
    return twin.requires_grad_(tensor.requires_grad)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """As the operator does it: minus infinity where a boolean mask is False."""
    if mask.dtype is not torch.bool:
        return mask
    zero, minus_infinity = (
        torch.scalar_tensor(value, dtype=dtype, device=mask.device) for value in (0.0, float("-inf"))
    )
    return torch.where(mask, zero, minus_infinity)
