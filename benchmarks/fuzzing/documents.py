"""A file of the seeds as a document, worked out once, and copies of it with edits.

A copy shares with the document all that the edits leave as it was, and its text what was written of that: an
edit costs what stands beside its place, however long the file is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import isfinite
from typing import Any

Path = list[str | int]
Edit = list[Any]
STRUCTURAL = ("set", "drop", "repeat", "wrap")
LARGEST = 10**7
"""Characters that a document, or a line, may have where an edit repeats a part of it."""
_WORD = re.compile(r"[\w.+]+|[^\w\s]")
_DEEP = re.compile(r"<deep (\d+)>")
_quoted = lru_cache(10_000)(json.encoder.encode_basestring_ascii)
"""A text as JSON writes it; most are keys and names that stand in every copy."""


@dataclass(frozen=True)
class Source:
    """A text, and the document in it; `content` is None where it is none. Neither is ever changed."""

    text: str
    content: Any
    texts: dict[int, str]
    """The JSON of every object and list in the document, by its `id`."""

    @cached_property
    def paths_by_name(self) -> dict[str | int, list[Path]]:
        """By the last name in each: so a field of a list of equal objects is not more often changed than one
        at the top."""
        by_name = dict[str | int, list[Path]]()
        for path in paths(self.content):
            by_name.setdefault(next((key for key in reversed(path) if isinstance(key, str)), 0), []).append(
                path
            )
        return by_name

    @cached_property
    def names(self) -> list[str | int]:
        return list(self.paths_by_name)

    @cached_property
    def strings(self) -> list[str]:
        """All that are values."""
        values = (value_at(self.content, path) for path in paths(self.content))
        return [value for value in values if isinstance(value, str)]


@lru_cache(64)
def source_of(text: str) -> Source:
    try:
        content = json.loads(text)
    except ValueError:
        content = None
    if not isinstance(content, dict | list):
        return Source(text, None, {})
    texts = dict[int, str]()
    _note_texts(content, texts)
    return Source(text, content, texts)


def _note_texts(content: Any, texts: dict[int, str]) -> None:
    for each in content.values() if isinstance(content, dict) else content:
        if isinstance(each, dict | list):
            _note_texts(each, texts)
    texts[id(content)] = json_text(content, texts)


def next_word(text: str, position: int) -> tuple[int, int]:
    """Where the first word from a position on begins and ends; the end of the text where there is none."""
    word = _WORD.search(text, position)
    return (len(text), len(text)) if word is None else word.span()


def word_spans(text: str) -> list[tuple[int, int]]:
    return [word.span() for word in _WORD.finditer(text)]


def paths(content: Any, at: Sequence[str | int] = ()) -> Iterator[Path]:
    """To everything inside a document."""
    inside: Iterator[tuple[str | int, Any]] = iter(())
    if isinstance(content, dict):
        inside = iter(content.items())
    elif isinstance(content, list):
        inside = iter(enumerate(content))
    for key, value in inside:
        yield [*at, key]
        yield from paths(value, [*at, key])


def value_at(content: Any, path: Path) -> Any:
    """What stands there. Raises LookupError, TypeError."""
    for key in path:
        content = content[key]
    return content


def changed(source: Source, edits: Sequence[Edit]) -> Any:
    """A copy of the document with its structural edits; one of what is not there does nothing."""
    content = source.content
    for edit in edits:
        if edit[0] in STRUCTURAL:
            try:
                copy = _changed(content, *edit)
            except (LookupError, TypeError, AttributeError):  # a text or a number has no copy
                continue
            if edit[0] != "repeat" or _length(copy, source.texts, {}) <= LARGEST:
                content = copy
    return content


def _length(content: Any, texts: dict[int, str], known: dict[int, int]) -> int:
    """Characters of its JSON, about; `known` holds those of what stands in several places."""
    if not isinstance(content, dict | list):
        return len(str(content))
    if id(content) in texts:
        return len(texts[id(content)])
    if id(content) not in known:
        inside = content.values() if isinstance(content, dict) else content
        known[id(content)] = sum(_length(each, texts, known) + 2 for each in inside)
    return known[id(content)]


def _changed(content: Any, name: str, path: Path, value: Any = None) -> Any:
    key: Any = path[0]
    copy = content.copy()
    if len(path) > 1:
        old, new = content[key], _changed(content[key], name, path[1:], value)
        if isinstance(content, list):  # what an edit repeated changes everywhere
            return [new if each is old else each for each in content]
        copy[key] = new
    elif name == "set":
        copy[key] = value
    elif name == "drop":
        del copy[key]
    elif name == "wrap":
        copy[key] = f"<deep {value}>" if value > 2 else [content[key]]
    elif isinstance(content, list):
        copy[key:key] = [content[key]] * (value - 1)
    elif isinstance(content[key], list):
        copy[key] = content[key] * value
    return copy


def json_text(content: Any, texts: dict[int, str]) -> str:
    """Deeper than Python's own writer goes, where an edit asks for it; `texts` as in `Source`."""
    text = texts.get(id(content))
    if text is not None:
        return text
    if isinstance(content, dict):
        pairs = [f"{_quoted(str(key))}: {json_text(each, texts)}" for key, each in content.items()]
        return "{" + ", ".join(pairs) + "}"
    if isinstance(content, list):
        return "[" + ", ".join([json_text(each, texts) for each in content]) + "]"
    if type(content) is int or (type(content) is float and isfinite(content)):
        return repr(content)
    if not isinstance(content, str):
        return json.dumps(content)
    deep = _DEEP.fullmatch(content) if content[:1] == "<" else None
    return _quoted(content) if deep is None else "[" * int(deep[1]) + "]" * int(deep[1])
