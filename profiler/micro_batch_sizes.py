"""Which micro-batch sizes are tried, and how a profile says what became of the others.

`named`: the sizes that the user asked for, ascending, or None.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from ..cost_models.errors import UsageError
from .models import is_positive
from .profile_file import Unmeasured

if TYPE_CHECKING:
    import torch

    from ..cost_models.errors import ModelError

_LARGEST = {"cpu": 64, "cuda": 1024}


def sizes_to_try(named: Sequence[int] | None, device: torch.device) -> Iterator[int]:
    """The sizes that the user named, else 1, 2, 4, ... as far as is usual on the device."""
    if named is not None:
        return iter(named)
    return (2**power for power in range(_LARGEST[device.type].bit_length()))


def left_out_note(size: int, named: Sequence[int] | None, error: ModelError) -> str | None:
    """A note that `size` is left out for `error`; None where that must be raised.

    Batch norm refuses a single value a channel: where nobody asked for size 1, the others do.
    """
    return f"micro-batch size 1 is left out: {error.what}" if named is None and size == 1 else None


def beyond_budget(predicted: float, left: float, budget: float) -> str:
    """That a size would take `predicted` seconds, and `left` of `budget` seconds remain."""
    return f"it would take about {in_words(predicted)}, {in_words(max(left, 0.0))} of {budget:g} s are left"


def left_unmeasured(size: int, named: Sequence[int] | None, reason: str, detail: str) -> list[Unmeasured]:
    """The size that was not measured, and after it the larger ones that the user named."""
    others = (size,) if named is None else [other for other in named if other >= size]
    return [
        Unmeasured.model_validate(
            {
                "micro_batch_size": other,
                "reason": reason,
                "detail": detail if other == size else f"after micro-batch size {size}: {detail}",
            }
        )
        for other in others
    ]


def in_words(seconds: float, whole: Callable[[float], int] = round) -> str:
    """Whole seconds from 10 on, two digits below."""
    return f"{whole(seconds)} s" if seconds >= 10 else f"{seconds:.2g} s"


def check_micro_batch_sizes(sizes: Sequence[int] | None) -> tuple[int, ...] | None:
    """Micro-batch sizes, ascending and each once; None where the user names none. Raises UsageError."""
    if sizes is None:
        return None
    several = not isinstance(sizes, str) and isinstance(sizes, Collection) and len(sizes) > 0
    if not several or not all(map(is_positive, sizes)):
        raise UsageError(
            f"micro_batch_sizes={sizes!r}: whole numbers of at least 1 are needed",
            "As in micro_batch_sizes=(1, 2, 4, 8).",
        )
    return tuple(sorted(set(map(int, sizes))))
