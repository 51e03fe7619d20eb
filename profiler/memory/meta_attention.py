"""Attention on the meta device as the CPU computes it, so that it saves for backward what it saves there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..torch_internals import choose_attention, flash_attention_on_cpu, missing_for_attention, remove_library

_NAME = "scaled_dot_product_attention"
_KEY = "AutogradMeta"
_FLASH = 1
"""torch.nn.attention.SDPBackend.FLASH_ATTENTION, as `choose_attention` tells it."""

_lock = threading.Lock()
_entered = 0
_library: Any = None


@contextmanager
def attention_as_on_the_cpu() -> Iterator[str | None]:
    """While entered, torch.nn.functional.scaled_dot_product_attention of meta tensors is that of the CPU.

    torch itself takes the plain path there, which saves the attention matrix. Here the CPU is asked which
    path it would take for such tensors, and where that is the fused one, it is taken: it saves its inputs,
    its output and one number a row. The operator itself is given another kernel for meta tensors, so it
    holds for whoever calls it: a model's code, modules of torch.nn, nodes of a graph. It holds for the whole
    process, and may be entered again inside.

    Yields None, or where this torch cannot do it, why; attention is then what torch makes of it.
    """
    missing = missing_for_attention()
    if missing is not None:
        yield f"torch {torch.__version__} has no {missing.name}"
        return
    _enter()
    try:
        yield None
    finally:
        _leave()


def _enter() -> None:
    global _entered, _library
    with _lock:
        _entered += 1
        if _entered == 1:
            _library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
            _library.impl(_NAME, _attention, _KEY)


def _leave() -> None:
    global _entered, _library
    with _lock:
        _entered -= 1
        if _entered == 0:
            remove_library(_library)
            _library = None


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
    aten: Any = torch.ops.aten
    settings = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    if _choice_of_the_cpu(query, key, value, attn_mask, dropout_p, settings) != _FLASH:
        whole: Callable[..., Tensor] = aten.scaled_dot_product_attention.default.decompose
        return whole(query, key, value, attn_mask, dropout_p, **settings)
    mask = None if attn_mask is None else _additive(attn_mask, query.dtype)
    if query.dim() == 3:
        tensors = [tensor.unsqueeze(0) for tensor in (query, key, value)]
        mask = mask.unsqueeze(0) if mask is not None and mask.dim() == 3 else mask
        return _flash(tensors, mask, dropout_p, is_causal, scale).squeeze(0)
    return _flash([query, key, value], mask, dropout_p, is_causal, scale)


def _flash(
    tensors: list[Tensor], mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float | None
) -> Tensor:
    return flash_attention_on_cpu(*tensors, dropout_p, is_causal, attn_mask=mask, scale=scale)


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
