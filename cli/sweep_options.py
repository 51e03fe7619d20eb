"""`--sweep gpus=2,4 --sweep mini-batch=64..1024`: from the texts that were typed to a grid."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..cost_models.errors import UsageError
from ..cost_models.quantities import parse_bytes, parse_rate


class Key(NamedTuple):
    """What `solve` calls it, and how a value is read; `counts`: whether there are ranges of it."""

    argument: str
    parse: Callable[[str], Any]
    counts: bool = False


def _count(text: str) -> int:
    if not re.fullmatch(r"\d+", text) or int(text) < 1:
        raise UsageError(f"--sweep: {text!r} is not a whole number of at least 1", "For example: gpus=2,4,8.")
    return int(text)


def _count_or_auto(text: str) -> int | str:
    return text if text == "auto" else _count(text)


def _stage_of_zero(text: str) -> int:
    if not re.fullmatch(r"[0-3]", text):
        raise UsageError(f"--sweep: {text!r} is no stage of ZeRO", "For example: zero=0,1.")
    return int(text)


def _word(text: str) -> str:
    return text


KEYS = {
    "gpus": Key("gpus", _count, counts=True),
    "mini-batch": Key("mini_batch", _count, counts=True),
    "micro-batches": Key("micro_batches", _count_or_auto, counts=True),
    "memory": Key("memory_bytes", lambda text: parse_bytes(text, name="--sweep memory")),
    "bandwidth": Key("bandwidth", lambda text: (parse_rate(text, name="--sweep bandwidth"),)),
    "runtime": Key("runtime", _word),
    "schedule": Key("schedule", _word),
    "planner": Key("planner", _word),
    "recompute": Key("recompute", lambda text: text.replace("-", "_")),
    "optimizer": Key("optimizer", _word),
    "precision": Key("precision", _word),
    "gradient-dtype": Key("gradient_dtype", _word),
    "zero": Key("zero", _stage_of_zero),
}


def grid_of(texts: Sequence[str]) -> dict[str, list[Any]]:
    """The values by the arguments of `solve`, in the order of the options. Raises UsageError."""
    grid: dict[str, list[Any]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        key = _key(text, name.strip())
        if not equals or not values.strip():
            raise UsageError(f"--sweep {text}: has no values", f"Write --sweep {name}=2,4,8, say.")
        if key.argument in grid:
            raise UsageError(f"--sweep {text}: {name} is swept twice", "Give all its values in one --sweep.")
        parts = [part.strip() for part in values.split(",")]
        grid[key.argument] = [value for part in parts for value in _values(text, key, part)]
    return grid


def _key(text: str, name: str) -> Key:
    if name not in KEYS:
        near = difflib.get_close_matches(name, KEYS, n=1)
        guess = f"Did you mean {near[0]}? " if near else ""
        raise UsageError(f"--sweep {text}: {name!r} cannot be swept", f"{guess}Keys: {', '.join(KEYS)}.")
    return KEYS[name]


def _values(text: str, key: Key, part: str) -> list[Any]:
    first, dots, last = part.partition("..")
    if not dots:
        if not part:
            raise UsageError(f"--sweep {text}: a value is missing", "Write values between the commas.")
        return [key.parse(part)]
    if not key.counts:
        raise UsageError(f"--sweep {text}: has no ranges", "List its values, with commas between them.")
    low, high = _count(first.strip()), _count(last.strip())
    found = [2**power for power in range(high.bit_length()) if low <= 2**power <= high]
    if not found:
        raise UsageError(
            f"--sweep {text}: no power of two lies from {low} to {high}",
            "Write the smaller number first, as in 64..1024, or list the values.",
        )
    return found
