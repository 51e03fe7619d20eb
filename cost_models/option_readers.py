"""Values of options, read from the texts that a user types on the command line.

A reader takes the text (all texts, of an option that repeats) and the option's name, which its errors say.
Sizes, rates and durations are in `quantities`. All raise UsageError.
"""

from __future__ import annotations

import ast
import difflib
import json
import re
from collections.abc import Callable, Iterable, Sequence

from .errors import UsageError

MOST_DIGITS = 18
"""Of a whole number: it and its products are what machines count with."""
_WORDS: dict[str, object] = {"true": True, "false": False, "none": None, "null": None}


def read_choice(allowed: Iterable[str]) -> Callable[[str, str], str]:
    """A reader of one of the `allowed` words."""
    words = tuple(allowed)

    def read(text: str, name: str) -> str:
        if text in words:
            return text
        near = difflib.get_close_matches(text, words, n=1, cutoff=0.5)
        raise UsageError(
            f"{name} {text}: is not one of {', '.join(words)}",
            f"Did you mean {near[0]}?" if near else f"Give one of these, as in {name} {words[0]}.",
        )

    return read


def read_whole_number(least: int) -> Callable[[str, str], int]:
    """A reader of a whole number of at least `least`."""

    def read(text: str, name: str) -> int:
        return _whole(text, name, least)

    return read


def read_number_or_auto(text: str, name: str) -> int | str:
    """A whole number of at least 1, or `auto`."""
    if text == "auto":
        return text
    if not re.fullmatch(r"\d+", text):
        raise UsageError(f"{name} {text}: is neither a whole number nor auto", f"For example: {name} 8")
    return _whole(text, name, 1)


def read_counts(text: str, name: str) -> tuple[int, ...]:
    """`12,34` as whole numbers of at least 1, in their order."""
    return tuple(_whole(part.strip(), name, 1) for part in text.split(","))


def read_sizes(text: str, name: str) -> tuple[int, ...]:
    """`1,2,4,8` as whole numbers of at least 1, ascending and without repeats."""
    return tuple(sorted({_whole(part.strip(), name, 1, context=text) for part in text.split(",")}))


def read_slow_devices(text: str, name: str) -> tuple[float, float]:
    """`5%:1.5` or `0.05:1.5`: a share of the devices, and how many times as long they take."""
    number = r"(\d{1,18}(?:\.\d{0,18})?|\.\d{1,18})"
    match = re.fullmatch(rf"{number}(%?):{number}", text.replace(" ", ""))
    if not match:
        raise UsageError(
            f"{name} {text}: is not a share of the devices and how many times as long they take",
            f"For example: {name} 5%:1.5",
        )
    return float(match[1]) / (100 if match[2] else 1), float(match[3])


def read_by_level(read: Callable[[str, str], float]) -> Callable[[str, str], tuple[float, ...]]:
    """A reader of `300GB/s,25GB/s`: inside a node and, where given, between nodes."""

    def read_levels(text: str, name: str) -> tuple[float, ...]:
        parts = [part.strip() for part in text.split(",")]
        if len(parts) > 2:
            raise UsageError(
                f"{name} {text}: has {len(parts)} values",
                "Give one value inside a node and, after a comma, one between nodes.",
            )
        return tuple(read(part, name) for part in parts)

    return read_levels


def read_settings(pairs: Sequence[str], name: str) -> dict[str, object]:
    """`("depth=24", "flag=true", "sizes=[1, 2]", "name=abc")` as keywords with values of their types.

    A value is read as JSON or as a Python literal where it is one (true, false and none by any case), and is
    text otherwise; quotes make text of what would be a number.
    """
    return _read_pairs(pairs, name, r"[^\W\d]\w*", "keyword", "depth=24")


def read_module_styles(pairs: Sequence[str], name: str) -> dict[str, object]:
    """`("layers.*.up=colwise",)` as words by the names of modules, with * for any part."""
    return _read_pairs(pairs, name, r"[\w.*?\[\]!-]+", "name of modules", "layers.*.up=colwise")


def _read_pairs(pairs: Sequence[str], name: str, key_form: str, what: str, example: str) -> dict[str, object]:
    values: dict[str, object] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        key = key.strip()
        if not equals:
            raise UsageError(
                f"{name} {pair!r}: there is no =", f"Write {name} KEY=VALUE, as in {name} {example}."
            )
        if not re.fullmatch(key_form, key):
            raise UsageError(
                f"{name} {pair!r}: {key!r} is no {what}", f"Before the = stands a name, as in {example}."
            )
        if key in values:
            raise UsageError(
                f"{name} {key} is given twice, as {values[key]!r} and as {_literal(value)!r}", "Give it once."
            )
        values[key] = _literal(value)
    return values


def _literal(text: str) -> object:
    text = text.strip()
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for parse in (json.loads, ast.literal_eval):
        try:
            value: object = parse(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
        return value
    return text


def _whole(text: str, name: str, least: int, context: str = "") -> int:
    what = f"{name} {context or text}"
    if not re.fullmatch(r"[+-]?\d+", text):
        part = f"{text!r} is" if context else "is"
        raise UsageError(f"{what}: {part} not a whole number", f"For example: {name} {max(least, 8)}")
    if len(text.lstrip("+-")) > MOST_DIGITS:
        raise UsageError(
            f"{what}: must have at most {MOST_DIGITS} digits", f"For example: {name} {max(least, 8)}"
        )
    if int(text) < least:
        raise UsageError(f"{what}: must be at least {least}", f"For example: {name} {max(least, 8)}")
    return int(text)
