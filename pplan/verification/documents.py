"""JSON files as tables whose every value is checked when it is read, with its place in the error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from ..cost_models.errors import FileError

MIB = 2**20
LARGEST_PLAN, LARGEST_PROFILE = 32 * MIB, 256 * MIB
"""Bytes of a file. A plan of 10,000 layers on 10,000 devices has some 3 MiB, their profile some 40."""
LARGEST = 2**80
"""Any whole number of a file is at most so large."""
MOST_SECONDS = 1e9
LONGEST = 1_000_000
"""Entries of a list."""
MOST_CHARACTERS = 60


@dataclass(frozen=True)
class Table:
    """An object of a file; `where` is its place, for errors. Its methods raise FileError for what is missing
    or of another kind; None (or a default) stands for what a file may leave out."""

    content: dict[str, Any]
    where: str

    def has(self, key: str) -> bool:
        """Whether it is there, and not null."""
        return self.content.get(key) is not None

    def count(self, key: str, default: int | None = None, *, least: int = 0, most: int = LARGEST) -> int:
        """A whole number."""
        value = self._value(key, default)
        if type(value) is not int or not least <= value <= most:
            raise self.refusal(key, value, f"a whole number from {least} to {most}")
        return value

    def optional_count(self, key: str, *, least: int = 0) -> int | None:
        """A whole number, or None."""
        return self.count(key, least=least) if self.has(key) else None

    def number(
        self, key: str, default: float | None = None, *, least: float = 0.0, most: float = 1e30
    ) -> float:
        """A finite number."""
        value = self._value(key, default)
        fine = type(value) in (int, float) and abs(value) <= 1e308 and isfinite(value)
        if not fine or not least <= value <= most:
            raise self.refusal(key, value, f"a number from {least:g} to {most:g}")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """A finite number, or None."""
        return self.number(key) if self.has(key) else None

    def text(self, key: str, default: str | None = None) -> str:
        """A text."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.refusal(key, value, "a text")
        return value

    def optional_text(self, key: str) -> str | None:
        """A text, or None."""
        return self.text(key) if self.has(key) else None

    def flag(self, key: str, default: bool | None = None) -> bool:
        """true or false."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.refusal(key, value, "true or false")
        return value

    def table(self, key: str, *, optional: bool = False) -> Table:
        """An object; an empty one where it may be left out."""
        value = self._value(key, {} if optional else None)
        if not isinstance(value, dict):
            raise self.refusal(key, value, "an object")
        return Table(value, f"{self.where}: {key}")

    def tables(self, key: str, *, least: int = 0) -> list[Table]:
        """A list of objects, empty where it is left out and may be."""
        return [
            Table(value, f"{self.where}: {key}.{index}") for index, value in self._items(key, dict, least)
        ]

    def counts(self, key: str, *, least: int = 0, most: int = LARGEST) -> list[int]:
        """A list of whole numbers."""
        values = []
        for index, value in self._items(key, int, 0):
            if isinstance(value, bool) or not least <= value <= most:
                raise self.refusal(f"{key}.{index}", value, f"a whole number from {least} to {most}")
            values.append(value)
        return values

    def texts(self, key: str) -> list[str]:
        """A list of texts."""
        return [value for _, value in self._items(key, str, 0)]

    def lists(self, key: str) -> list[list[Any]]:
        """A list of lists."""
        return [value for _, value in self._items(key, list, 0)]

    def _items(self, key: str, kind: type, least: int) -> Iterator[tuple[int, Any]]:
        values = self._value(key, None if least else [])
        if not isinstance(values, list) or not least <= len(values) <= LONGEST:
            raise self.refusal(key, values, f"a list of {least} to {LONGEST} entries")
        for index, value in enumerate(values):
            if not isinstance(value, kind):
                raise self.refusal(f"{key}.{index}", value, f"of the kind {_KINDS[kind]}")
            yield index, value

    def _value(self, key: str, default: Any) -> Any:
        value = self.content.get(key)
        if value is None:
            if default is None:
                raise FileError(f"{self.where}: {key} is missing", _MEND)
            return default
        return value

    def refusal(self, key: str, value: Any, expected: str) -> FileError:
        """The error for a value that cannot be."""
        return FileError(f"{self.where}: {key} must be {expected}, the value is {_short_text(value)}", _MEND)


_MEND = "Mend the file, or make it again with pplan."
_KINDS = {dict: "object", int: "whole number", str: "text", list: "list"}


def read_content(path: Path, kind: str, most: int) -> bytes:
    """The content of a file of at most so many bytes. Raises FileError."""
    try:
        with path.open("rb") as file:
            content = file.read(most + 1)
    except FileNotFoundError:
        raise FileError(f"{path}: no such {kind} file", f"Name an existing {kind} file.") from None
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise FileError(f"{path}: cannot be read: {why}", "Check the path and its rights.") from error
    if len(content) > most:
        raise FileError(
            f"{path}: has more than {most // MIB} MiB, which no {kind} has", f"Name a {kind} file of pplan."
        )
    return content


def parse(content: bytes, where: str, kind: str, key: str) -> Table:
    """The object in a file's content, which has `key` as every file of its kind. Raises FileError."""
    try:
        document = json.loads(content.decode("utf-8-sig"), parse_constant=_no_number)
    except UnicodeDecodeError:
        raise FileError(f"{where}: not a text file, so not a {kind} file", f"Name a {kind} file.") from None
    except RecursionError:
        raise FileError(f"{where}: not a {kind} of pplan: nested too deep", f"Name a {kind} file.") from None
    except ValueError as error:
        raise FileError(f"{where}: not a whole JSON file: {error}", f"Name a {kind} file.") from None
    if not isinstance(document, dict) or key not in document:
        raise FileError(f"{where}: not a {kind} of pplan (it has no key {key!r})", f"Name a {kind} file.")
    table = Table(document, where)
    if table.count("schema", least=1) > 1:
        raise FileError(
            f"{where}: schema is {document['schema']}, this pplan reads {kind}s up to 1",
            "Install the pplan that wrote it, or newer: pip install --upgrade pplan",
        )
    return table


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number")


def _short_text(value: Any) -> str:
    if isinstance(value, list | dict):
        return f"a {_KINDS[type(value)]} of {len(value)} entries"
    if isinstance(value, int) and abs(value) > 10**40:
        return "a far larger number"
    text = repr(value)
    return f"{text[:MOST_CHARACTERS]}…" if len(text) > MOST_CHARACTERS else text
