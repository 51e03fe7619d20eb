"""Edits of a file: of a JSON document by its structure, of any text by its words, lines and characters.

An edit is a list that JSON can hold, so that a finding is a file name and its edits:

    ["set", PATH, VALUE]   ["drop", PATH]   ["repeat", PATH, TIMES]   ["wrap", PATH, DEPTH]
    ["twice", KEY, VALUE]      the key again, at the end of the document
    ["word", INDEX, TEXT]      the INDEX-th word of the text becomes TEXT
    ["at", POSITION, TEXT]     the first word from there on
    ["line", INDEX, TIMES]     the INDEX-th line stands so many times
    ["cut", LENGTH]   ["insert", POSITION, TEXT]   ["encode", NAME]   ["bytes", POSITION, NUMBER]

Positions and indices are counted modulo what there is.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

from .documents import (
    LARGEST,
    STRUCTURAL,
    Edit,
    Source,
    changed,
    json_text,
    next_word,
    source_of,
    value_at,
    word_spans,
)

COUNTS = (
    -(2**63),
    -1,
    0,
    1,
    2,
    3,
    5,
    7,
    8,
    100,
    1000,
    2**20,
    2**24,
    2**31,
    2**40,
    2**53 + 1,
    2**62,
    2**63 - 1,
)
LONG = (2**63, 2**64, 10**25, 10**100, 10**308, 10**309, 10**400, -(10**400))
NUMBERS = (-0.0, 0.0, 5e-324, 1e-300, 1e-30, 1e-12, 1e-9, 0.5, 1.0, 1.5, 1e3, 1e6, 1e9, 1e12, 1e18, 1e30)
EXTREMES = (1e150, 1e300, 1.7e308, -1e-9, -1.0, float("nan"), float("inf"), float("-inf"))
TEXTS = (
    *("", " ", "nan", "1e5", "inf", "null", "a" * 5000, "\ud800", "a\x00b", "\x1b[31m\x1b]0;x\x07", "\u202e"),
    *("../../x", "/dev/null", "=1+1", "<b>&\"'", "a\nb", "$(touch x)", "{}", "%s", "\ufeff", "é" * 80),
)
OTHERS: tuple[Any, ...] = (None, True, False, [], {}, [[]], [None], {"": ""}, [0], [1, 2], ["a"])
WORDS = (
    *(
        "-1",
        "0",
        "1",
        "2",
        "3",
        "7",
        "100",
        "1000000",
        "1e308",
        "1e-300",
        "1e400",
        "nan",
        "inf",
        "-inf",
        "-0.0",
    ),
    *(
        "5e-324",
        "9" * 25,
        "9" * 400,
        "9" * 5000,
        "0.5",
        "1_000",
        "0x10",
        "1,5",
        "true",
        "null",
        '""',
        "[]",
        "{}",
    ),
    *(
        "''",
        "a",
        "é",
        "\x00",
        "\ufeff",
        "\x1b[31m",
        "\u202e",
        "t*99999",
        "(t|)*9",
        "--",
        "--x=",
        "=",
        "#",
        "[[",
    ),
)
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-v", "dualpipe-v", "pipedream", "chimera")
ENCODINGS = ("utf-16", "utf-32", "utf-8-sig", "latin-1", "cp1252", "utf-16-be")


def random_edits(text: str, rng: random.Random) -> list[Edit]:
    """One to four, of the structure where the text has one."""
    source = source_of(text)
    structured = source.content is not None and rng.random() < 0.9
    return [
        _of_document(source, rng) if structured else _of_text(text, rng)
        for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4)))
    ]


def _of_document(source: Source, rng: random.Random) -> Edit:
    path = rng.choice(source.paths_by_name[rng.choice(source.names)])
    old = value_at(source.content, path)
    kind = rng.random()
    if kind < 0.80:
        return ["set", path, _value(old, source, rng)]
    if kind < 0.88:
        return ["drop", path]
    if kind < 0.94:
        return ["repeat", path, rng.choice((2, 2, 2, 2, 3, 3, 3, 10, 10, 1000))]
    if kind < 0.97:
        return ["wrap", path, rng.choice((1, 2, 50, 500, 20_000))]
    return ["twice", path[0], _value(old, source, rng)]


def _value(old: Any, source: Source, rng: random.Random) -> Any:
    """Mostly of the kind that was there."""
    if rng.random() < 0.12:
        return rng.choice((*OTHERS, *TEXTS[:4], *LONG[:2]))
    if isinstance(old, bool):
        return not old
    if isinstance(old, int):
        near = (old + 1, old - 1, old * 2, old // 2, -old, old * 10**6, float(old), str(old))
        return rng.choice((rng.choice(COUNTS), rng.choice(COUNTS), rng.choice(near), rng.choice(LONG)))
    if isinstance(old, float):
        near_by = (old * 2, old / 2, old * 1e6, old * 1e-6, -old, str(old))
        return rng.choice((rng.choice(NUMBERS), rng.choice(near_by), rng.choice(EXTREMES), rng.choice(LONG)))
    if isinstance(old, str):
        return rng.choice((rng.choice(TEXTS), _other_text(source, rng), _typed(old, rng)))
    if isinstance(old, list) and old:
        return rng.choice((old[:1], old[1:], old[::-1], old + old, [*old, rng.choice(old)], []))
    return rng.choice(OTHERS)


def _other_text(source: Source, rng: random.Random) -> str:
    return rng.choice([*source.strings, *SCHEDULES])


def _typed(text: str, rng: random.Random) -> str:
    """With one word, or character, changed."""
    return _text_edited(text, _of_text(text, rng))


def _of_text(text: str, rng: random.Random) -> Edit:
    position = rng.randrange(len(text) + 1)
    kind = rng.random()
    if kind < 0.6:
        return ["at", position, rng.choice(WORDS)]
    if kind < 0.75:
        return ["line", rng.randrange(10**6), rng.choice((0, 0, 0, 0, 2, 2, 2, 2, 3, 1000))]
    if kind < 0.82:
        return ["cut", position]
    if kind < 0.92:
        return [
            "insert",
            position,
            rng.choice((*WORDS, *TEXTS, "[" * 10_000, "(" * 50, "\r\n", "\t", '"', "'")),
        ]
    if kind < 0.97:
        return ["encode", rng.choice(ENCODINGS)]
    return ["bytes", position, rng.randrange(256)]


def edited(text: str, edits: Sequence[Edit]) -> bytes:
    """The file with all edits, those of the structure first. An edit of what is not there does nothing."""
    source = source_of(text)
    text = source.text
    if source.content is not None and any(edit[0] in STRUCTURAL for edit in edits):
        text = json_text(changed(source, edits), source.texts)
    encoding, changes = "utf-8", []
    for edit in edits:
        if edit[0] == "encode":
            encoding = edit[1]
        elif edit[0] == "bytes":
            changes.append(edit)
        elif edit[0] == "twice":
            head, end, tail = text.rpartition("}")
            text = f"{head}, {json.dumps(edit[1])}: {json_text(edit[2], {})}{end}{tail}"
        elif edit[0] not in STRUCTURAL:
            text = _text_edited(text, edit)
    made = bytearray(text.encode(encoding, errors="surrogatepass" if "utf" in encoding else "replace"))
    for _, position, number in changes:
        if made:
            made[position % len(made)] = number
    return bytes(made)


def _text_edited(text: str, edit: Edit) -> str:
    name, where, *more = edit
    other = str(more[0]) if more else ""
    if name == "cut":
        return text[: where % (len(text) + 1)]
    if name == "insert":
        position = where % (len(text) + 1)
        return text[:position] + other + text[position:]
    if name == "at":
        start, end = next_word(text, where % (len(text) + 1))
        return text[:start] + other + text[end:]
    if name == "line":
        lines = text.splitlines(keepends=True)
        if lines and len(line := lines[where % len(lines)]) * more[0] <= LARGEST:
            lines[where % len(lines)] = line * more[0]
        return "".join(lines)
    if name != "word" or not (words := word_spans(text)):
        return text
    start, end = words[where % len(words)]
    return text[:start] + other + text[end:]
