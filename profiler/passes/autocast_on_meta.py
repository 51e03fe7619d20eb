"""Autocast of CUDA on the meta device, where torch has none: the same conversions, one call at a time.

Which operations run in 16 bits, which in float32, and which in the widest of their inputs' dtypes is as
torch's documentation lists it for CUDA (https://docs.pytorch.org/docs/stable/amp.html). As there, the copy of
a weight is made once and kept until the context ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ..torch_internals import tree_leaves, tree_map

_functional: Any = functional
_IN_16_BITS = frozenset(
    (
        *("linear", "matmul", "mm", "mv", "bmm", "addmm", "addmv", "addr", "addbmm", "baddbmm", "einsum"),
        *("__matmul__", "__rmatmul__", "chain_matmul", "multi_dot", "prelu", "scaled_dot_product_attention"),
        *(f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3)),
        *("conv_tbc", "lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell"),
    )
)
_IN_FLOAT32 = frozenset(
    (
        *("__pow__", "__rpow__", "__rdiv__", "__rtruediv__", "acos", "asin", "binary_cross_entropy"),
        *("binary_cross_entropy_with_logits", "cosh", "cosine_embedding_loss", "cdist", "cosine_similarity"),
        *("cross_entropy", "cumprod", "cumsum", "dist", "erfinv", "exp", "expm1", "group_norm"),
        *("hinge_embedding_loss", "huber_loss", "kl_div", "l1_loss", "layer_norm", "log", "log10"),
        *("log_softmax", "log1p", "log2", "logsumexp", "margin_ranking_loss", "mse_loss"),
        *("multi_margin_loss", "multilabel_margin_loss", "nll_loss", "norm", "pdist", "poisson_nll_loss"),
        *("pow", "prod", "reciprocal", "renorm", "rsqrt", "sinh", "smooth_l1_loss", "soft_margin_loss"),
        *("softmax", "softmin", "softplus", "sum", "tan", "triplet_margin_loss"),
    )
)
_IN_THE_WIDEST = frozenset(
    (
        *("addcdiv", "addcmul", "atan2", "bilinear", "cat", "concat", "concatenate", "cross", "dot", "vdot"),
        *("grid_sample", "index_put", "scatter_add", "stack", "tensordot"),
    )
)


class AutocastOnMeta(TorchFunctionMode):
    """What `torch.autocast("cuda", dtype)` does, while entered."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}

    def __exit__(self, *error: Any) -> None:
        self._copies.clear()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # An exported graph calls `scaled_dot_product_attention.default`.
        name = getattr(func, "__name__", "").partition(".")[0]
        if func is _functional.multi_head_attention_forward:
            # Its own calls are converted one by one.
            with _run_itself(), _Again(self):
                return func(*args, **kwargs)
        dtype = self._dtype_of(name, (args, kwargs))
        if dtype is not None:
            args, kwargs = tree_map(lambda value: self._in(dtype, value), (args, kwargs))
        return func(*args, **kwargs)

    def _dtype_of(self, name: str, arguments: Any) -> torch.dtype | None:
        """In which an operation runs; None: as it is called."""
        if name in _IN_16_BITS:
            return self._dtype
        if name in _IN_FLOAT32:
            return torch.float32
        if name not in _IN_THE_WIDEST:
            return None
        kinds = {leaf.dtype for leaf in tree_leaves(arguments) if _is_converted(leaf)}
        return torch.float32 if torch.float32 in kinds and len(kinds) > 1 else None

    def _in(self, dtype: torch.dtype, value: Any) -> Any:
        if not _is_converted(value) or value.dtype == dtype:
            return value
        if dtype is torch.float32 or not (value.is_leaf and value.requires_grad):
            return value.to(dtype)
        if id(value) not in self._copies:
            self._copies[id(value)] = value, value.to(dtype)
        return self._copies[id(value)][1]


class _Again(TorchFunctionMode):
    """The same conversions for what a function calls."""

    def __init__(self, own: AutocastOnMeta) -> None:
        super().__init__()
        self._own = own

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._own.__torch_function__(func, types, args, kwargs)


def _is_converted(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.float32, torch.float16, torch.bfloat16)


@contextmanager
def _run_itself() -> Iterator[None]:
    """The next function of torch.nn.functional that asks whether a mode takes it over is told no."""
    has_override: Callable[..., bool] = _functional.has_torch_function

    def once(arguments: Any) -> bool:  # noqa: ARG001
        _functional.has_torch_function = has_override
        return False

    _functional.has_torch_function = once
    try:
        yield
    finally:
        _functional.has_torch_function = has_override
