"""Options that several verbs have, and option values: from the text a user typed to what functions take.

Values are refused in our own two lines, not in typer's words.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

import typer

from ..cost_models.errors import UsageError

Output = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        metavar="FILE",
        help="Where to write; default: named after the model, as MODEL.plan.json.",
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing file, whatever it is.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the file's JSON instead of tables.")]


def whole_number(name: str, *, at_least: int) -> Callable[[str], int]:
    """A parser of one whole number for the option `name`."""

    def parse(text: str) -> int:
        return _whole(str(text), name, at_least)

    return parse


def word(name: str, allowed: Iterable[str]) -> Callable[[str], str]:
    """A parser of one of the `allowed` words for the option or argument `name`."""
    words = tuple(allowed)

    def parse(text: str) -> str:
        if text in words:
            return text
        near = difflib.get_close_matches(text, words, n=1, cutoff=0.5)
        raise UsageError(
            f"{name} {text}: is not one of {', '.join(words)}",
            f"Did you mean {near[0]}?" if near else f"Give one of these, as in {name} {words[0]}.",
        )

    return parse


def number_or_auto(text: str, name: str) -> int | None:
    """A whole number of at least 1, or None for `auto`. Raises UsageError."""
    if text == "auto":
        return None
    if not re.fullmatch(r"\d+", text):
        raise UsageError(f"{name} {text}: is neither a whole number nor auto", f"For example: {name} 8")
    return _whole(text, name, 1)


def sizes(text: str, name: str) -> tuple[int, ...]:
    """`1,2,4,8` as numbers, ascending and without repeats. Raises UsageError."""
    return tuple(sorted({_whole(part.strip(), name, 1, seen=text) for part in text.split(",")}))


def shape(text: str, name: str) -> tuple[int, ...]:
    """`3x224x224` as numbers. Raises UsageError."""
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", text):
        raise UsageError(
            f"{name} {text}: is not the shape of one sample",
            f"Give its sizes without the batch, with an x between: {name} 3x224x224",
        )
    return tuple(int(part) for part in text.split("x"))


def by_level(text: str | None, name: str, parse: Callable[[str], float]) -> tuple[float, ...] | None:
    """`300GB/s,25GB/s`: inside a node and, where given, between nodes. Raises UsageError."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if len(parts) > 2:
        raise UsageError(
            f"{name} {text}: has {len(parts)} values",
            "Give one value inside a node and, after a comma, one between nodes.",
        )
    return tuple(parse(part) for part in parts)


def _whole(text: str, name: str, at_least: int, seen: str = "") -> int:
    shown = f"{name} {seen or text}"
    if not re.fullmatch(r"[+-]?\d+", text):
        part = f"{text!r} is" if seen else "is"
        raise UsageError(f"{shown}: {part} not a whole number", f"For example: {name} {max(at_least, 8)}")
    if int(text) < at_least:
        raise UsageError(f"{shown}: must be at least {at_least}", f"For example: {name} {max(at_least, 8)}")
    return int(text)
