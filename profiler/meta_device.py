"""The meta device, made to save for backward what a CPU or a GPU saves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .torch_private import (
    EMBEDDING_BAGS,
    OpOverload,
    TorchDispatchMode,
    choose_attention,
    efficient_attention_on_gpu,
    flash_attention_on_cpu,
    flash_attention_on_gpu,
    missing_for_attention,
    remove_library,
    schema_arguments,
    storage_key,
    suggest_memory_format,
    writes_arguments,
)

# What an operation returns for meta tensors, without the operation where it ran before on the like.
#
# For meta tensors PyTorch works shapes, strides and dtypes out in Python, about 90 µs for an addition, and
# the
# blocks of a model run the same operations in every pass. So what was returned is remembered by the
# operation,
# the layouts of its tensors and its other arguments, as PyTorch's own tracing does with stand-ins
# (torch/_subclasses/fake_tensor.py). Operations that return a view, write into what they are given, or return
# memory of other sizes than their tensors need are run each time.

_MOST = 20_000
"""Results that are kept; then it begins anew."""
_PLAIN = frozenset(
    (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)
_Recipe = tuple[type | None, tuple[Any, ...]]
"""Whether a tuple or a list is returned, or one value (None); of each tensor its shape, strides and dtype."""

_recipes: dict[tuple[Any, ...], _Recipe | None] = {}
"""None: it cannot be made from a recipe."""


class MetaResults(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, below autograd, what runs on meta tensors returns what it returned before."""

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return run_on_meta(func, args, kwargs or {})


def run_on_meta(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What `func(*args, **kwargs)` returns, from the recipe of an earlier call, where one was alike."""
    key = _key(func, args, kwargs)
    if key is None:
        return func(*args, **kwargs)
    recipe = _recipes.get(key)
    if recipe is not None:
        return _build(recipe)
    result = func(*args, **kwargs)
    if key not in _recipes:
        if len(_recipes) >= _MOST:
            _recipes.clear()
        _recipes[key] = _recipe(result, [*args, *kwargs.values()])
    return result


def _key(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """What tells the call from others; None where it is run in any case."""
    if not isinstance(func, OpOverload) or func.is_view or writes_arguments(func):
        return None
    # A quotient of whole numbers has the default dtype.
    parts: list[Any] = [func, torch.get_default_dtype()]
    if not all(_append(value, parts) for value in args):
        return None
    for name, value in kwargs.items():
        parts.append(name)
        if not _append(value, parts):
            return None
    return tuple(parts)


def _append(value: Any, parts: list[Any]) -> bool:
    """Whether the argument can be told from others, whose description is appended."""
    kind = type(value)
    if kind is Tensor or kind is nn.Parameter:
        if not value.is_meta or value.layout is not torch.strided or value.is_conj() or value.is_neg():
            return False
        parts.append((value.dtype, value.shape, value.stride(), value.storage_offset()))
        return True
    if kind is list or kind is tuple:
        parts.append((kind, len(value)))
        return all(_append(own, parts) for own in value)
    # 1, 1.0 and True are equal.
    parts.append((kind, value))
    return kind in _PLAIN


def _recipe(result: Any, arguments: Sequence[Any]) -> _Recipe | None:
    kind = type(result) if type(result) in (tuple, list) else None
    values = (result,) if kind is None else tuple(result)
    tensors = [value for value in values if isinstance(value, Tensor)]
    if not tensors or not all(type(value) is Tensor or type(value) in _PLAIN for value in values):
        return None
    storages = {storage_key(tensor) for tensor in tensors}
    inputs = {storage_key(own) for own in _tensors(arguments)}
    if len(storages) < len(tensors) or storages & inputs or not all(map(_is_plain, tensors)):
        return None
    parts = [(own.shape, own.stride(), own.dtype) if isinstance(own, Tensor) else own for own in values]
    return kind, tuple(parts)


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    own = [value for value in values if isinstance(value, Tensor)]
    inner = [_tensors(value) for value in values if isinstance(value, list | tuple)]
    return [*own, *(tensor for each in inner for tensor in each)]


def _is_plain(tensor: Tensor) -> bool:
    """Whether it is one that `torch.empty_strided` makes."""
    if not tensor.is_meta or tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        return False
    same = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    sizes = {own.untyped_storage().nbytes() for own in (same, tensor)}
    return not tensor.storage_offset() and len(sizes) == 1


def _build(recipe: _Recipe) -> Any:
    kind, parts = recipe
    values = [
        torch.empty_strided(own[0], own[1], dtype=own[2], device="meta") if type(own) is tuple else own
        for own in parts
    ]
    return values[0] if kind is None else kind(values)


# What operations return on the meta device, made what the CPU's return where the two differ in bytes.

_CHANNELS_LAST = (torch.channels_last, torch.channels_last_3d)
_SUM = 0
"""The mode of an embedding bag."""
_ADDED_UP = (torch.float32, torch.float16, torch.bfloat16)

_Arguments = Mapping[str, Any]
"""What an operation was given, by the names of its schema."""


class MetaOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Below autograd, so that what it returns is what is saved for backward.

    torch's own functions for meta tensors follow CUDA, or no device: norms return their statistics in
    float32, in evaluation too, convolutions forget channels_last, so that a view there is a copy here,
    what is folded takes no more than it needs, and bags of embeddings are indexed otherwise.
    """

    supports_higher_order_operators = True

    def __init__(self, corrections: Mapping[Any, Callable[[Any, _Arguments], Any]] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._corrections = _CORRECTIONS if corrections is None else corrections

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = run_on_meta(func, args, kwargs or {})
        corrected = self._corrections.get(func)
        if corrected is None or not args[0].is_meta:
            return result
        return corrected(result, _bind_arguments(func, args, kwargs or {}))


def _bind_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Arguments:
    """Arguments that are the default are left out of a call."""
    arguments = schema_arguments(func)
    by_name = {argument.name: value for argument, value in zip(arguments, args, strict=False)}
    defaults = {argument.name: argument.default_value for argument in arguments}
    return {**defaults, **by_name, **kwargs}


def _statistics(result: Sequence[Tensor], arguments: _Arguments) -> tuple[Tensor, Tensor, Tensor]:
    """In the input's dtype, or in that of the weights where they are float32 and the input is not
    (aten/native/cpu/mixed_data_type.h: param_scalar_type)."""
    output, mean, scale = result
    dtype = arguments["input"].dtype
    kinds = {value.dtype for value in arguments.values() if isinstance(value, Tensor)}
    if dtype.itemsize == 2 and torch.float32 in kinds:
        dtype = torch.float32
    return output, mean.to(dtype), scale.to(dtype)


def _batch_statistics(result: Sequence[Tensor], arguments: _Arguments) -> tuple[Tensor, Tensor, Tensor]:
    """None in evaluation."""
    output, mean, scale = _statistics(result, arguments)
    if arguments["training"]:
        return output, mean, scale
    return output, mean.new_empty(0), scale.new_empty(0)


def _laid_out(result: Tensor, arguments: _Arguments) -> Tensor:
    """Channels last where the input or the weight is."""
    layouts = [suggest_memory_format(arguments[name]) for name in ("input", "weight")]
    layout = next((layout for layout in layouts if layout in _CHANNELS_LAST), None)
    return result if layout is None else result.to(memory_format=layout)


def _folded(result: Tensor, arguments: _Arguments) -> Tensor:
    """In memory as large as that of what was unfolded: the CPU makes it so, then changes its shape."""
    unfolded: Tensor = arguments["self"]
    if unfolded.numel() <= result.numel():
        return result
    return unfolded.new_empty(unfolded.numel())[: result.numel()].view(result.shape)


def _bags(result: Sequence[Tensor], arguments: _Arguments) -> tuple[Tensor, ...]:
    """The bag of each index is not kept where rows are just added up; else it has one entry to spare, as the
    bags' sizes have where `offsets` ends with the last one's (aten/native/EmbeddingBag.cpp)."""
    output, _, _, largest = result
    offsets, count, bags = arguments["offsets"], arguments["indices"].numel(), output.shape[0]
    is_added_up = arguments["mode"] == _SUM and arguments["padding_idx"] < 0 and output.dtype in _ADDED_UP
    return (
        output,
        offsets.new_empty(0) if is_added_up else offsets.new_empty(count + 1)[:-1],
        offsets.new_empty(offsets.shape)[:bags],
        largest if largest.numel() else offsets.new_empty(bags),
    )


_aten: Any = torch.ops.aten
_CORRECTIONS: dict[Any, Callable[[Any, _Arguments], Any]] = {
    _aten.native_layer_norm.default: _statistics,
    _aten.native_group_norm.default: _statistics,
    _aten.native_batch_norm.default: _batch_statistics,
    _aten.convolution.default: _laid_out,
    _aten.col2im.default: _folded,
    **dict.fromkeys(EMBEDDING_BAGS, _bags),
}
ON_A_GPU: dict[Any, Callable[[Any, _Arguments], Any]] = {_aten.convolution.default: _laid_out}
"""All else that torch returns for meta tensors is what CUDA returns."""


# Attention and dropout on the meta device as a CPU or a GPU computes them, so that they save for backward
# what is saved there.

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
