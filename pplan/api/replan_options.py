"""Options of a plan without the devices that are lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..cost_models import arguments
from ..cost_models.arguments import Converted, Options, option, options_class, read_whole_number
from ..cost_models.errors import UsageError


def _ranks(name: str, values: Any) -> tuple[int, ...]:
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise UsageError(f"{name}={values!r}: must be a list of ranks", f"Give {name}=[3, 7], say.")
    return tuple(arguments.whole(name, value, at_least=0) for value in values)


def _read_ranks(text: str, name: str) -> tuple[int, ...]:
    return tuple(read_whole_number(0)(part, name) for part in text.split(","))


def _read_share(text: str, name: str) -> float:
    number = text.strip().removesuffix("%").strip()
    try:
        return float(number) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        raise UsageError(f"{name} {text}: is not a share of the step", f"Write {name} 5%, say.") from None


_PANEL = "After a loss"


@options_class
class ReplanOptions(Options):
    """`lost`: ranks of the devices that are gone. `within`: of plans whose step is longer than the fastest
    one's by at most this share, the one that moves the fewest bytes."""

    lost: Converted[Sequence[int], tuple[int, ...]] = option(
        (),
        _ranks,
        "Ranks of the devices of a plan that are gone: plans again without them.",
        "N,N,...",
        read=_read_ranks,
        panel=_PANEL,
    )
    within: float = option(
        0.05,
        arguments.number,
        "With `lost`: of plans at most so much slower than the fastest, the one that moves the fewest bytes "
        "of weights.",
        "5%",
        read=_read_share,
        default_text="5%",
        panel=_PANEL,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.within <= 10:
            raise UsageError(f"within={self.within:g}: must be from 0 to 10", "Give within=0.05, say.")
