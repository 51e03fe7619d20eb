"""What the user asks of a profile, checked before anything is measured."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

import torch

from ..cost_models.errors import ModelError, UsageError
from .loaded_model import LoadedModel
from .machine import DTYPES, dtype_named
from .models import is_positive, own_dtype, refuse_lazy


def checked_sizes(sizes: Sequence[int] | None) -> tuple[int, ...] | None:
    """Micro-batch sizes, ascending and each once; None where the user names none. Raises UsageError."""
    if sizes is None:
        return None
    if isinstance(sizes, str) or not isinstance(sizes, Collection):
        seen, right = repr(sizes), False
    else:
        seen = ", ".join(map(str, sizes)) or "(none)"
        right = len(sizes) > 0 and all(map(is_positive, sizes))
    if not right:
        raise UsageError(
            f"micro_batch_sizes {seen}: whole numbers of at least 1 are needed",
            "As in micro_batch_sizes=(1, 2, 4, 8).",
        )
    return tuple(sorted(set(map(int, sizes))))


def check_effort(budget_seconds: float, rounds: int | None, memory_bytes: int | None) -> None:
    """Raises UsageError."""
    if not budget_seconds > 0 or budget_seconds == float("inf"):
        raise UsageError(f"budget_seconds={budget_seconds:g}: must be above 0", "As in budget_seconds=60.")
    if rounds is not None and rounds < 1:
        raise UsageError(f"rounds={rounds}: must be at least 1", "Measure once at least.")
    if memory_bytes is not None and memory_bytes < 1:
        raise UsageError(
            f"memory_bytes={memory_bytes}: must be at least 1", "Give the device's memory in bytes."
        )


def dtype_for(loaded: LoadedModel, name: str | None) -> tuple[torch.dtype, tuple[str, ...]]:
    """What the model is converted to, and what is to be said of it. Raises UsageError, ModelError."""
    asked = None if name is None else dtype_named(name)
    module = loaded.module
    refuse_lazy(loaded.name, module)
    tensors = list(itertools.chain(module.named_parameters(), module.named_buffers()))
    for path, tensor in tensors:
        if tensor.is_complex():
            raise ModelError(
                f"{loaded.name}: {path} is {_name(tensor.dtype)}; only real numbers can be measured",
                "Keep real and imaginary parts in tensors of their own (torch.view_as_real).",
            )
    if asked is not None:
        return asked, ()
    own = own_dtype(module)
    if own is not None and own in DTYPES.values():
        return own, ()
    kinds = sorted({_name(tensor.dtype) for _, tensor in tensors if tensor.dtype.is_floating_point})
    note = f"the model is in {' and '.join(kinds)} and was measured in float32; choose another with `dtype`"
    return torch.float32, (note,) if kinds else ()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
