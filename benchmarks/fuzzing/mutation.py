"""Edits of a file: of a JSON document by its structure, of any text by its words, lines and characters.

An edit is a list that JSON can hold, so that a finding is a file name and its edits:

    ["set", PATH, VALUE]   ["drop", PATH]   ["repeat", PATH, TIMES]   ["wrap", PATH, DEPTH]
    ["twice", KEY, VALUE]      the key again, at the end of the document
    ["word", INDEX, TEXT]      the INDEX-th word of the text becomes TEXT
    ["line", INDEX, TIMES]     the INDEX-th line stands so many times
    ["cut", LENGTH]   ["insert", POSITION, TEXT]   ["encode", NAME]   ["bytes", POSITION, NUMBER]

Positions and indices are counted modulo what there is.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from typing import Any

Edit = list[Any]
Path = list[str | int]

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
ENCODINGS = ("utf-16", "utf-32", "utf-8-sig", "latin-1", "cp1252", "utf-16-be")
LARGEST = 10**7
"""Characters that a line repeated may have."""
_WORD = re.compile(r"[\w.+]+|[^\w\s]")


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


def random_edits(text: str, rng: random.Random) -> list[Edit]:
    """One to four, of the structure where the text has one."""
    content, by_name = _paths_by_name(text)
    structured = content is not None and rng.random() < 0.9
    return [
        _of_document(content, by_name, rng) if structured else _of_text(text, rng)
        for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4)))
    ]


@lru_cache(64)
def _paths_by_name(text: str) -> tuple[Any, dict[str | int, list[Path]]]:
    """The document, if it is one, and the paths in it by the last name in each: so a field of a list of equal
    objects is not more often changed than one at the top."""
    content, by_name = _document(text), dict[str | int, list[Path]]()
    for path in paths(content):
        by_name.setdefault(next((key for key in reversed(path) if isinstance(key, str)), 0), []).append(path)
    return content, by_name


def _of_document(content: Any, by_name: Mapping[str | int, Sequence[Path]], rng: random.Random) -> Edit:
    path = rng.choice(by_name[rng.choice(list(by_name))])
    old = value_at(content, path)
    kind = rng.random()
    if kind < 0.80:
        return ["set", path, _value(old, content, rng)]
    if kind < 0.88:
        return ["drop", path]
    if kind < 0.94:
        return ["repeat", path, rng.choice((2, 2, 3, 10, 1000))]
    if kind < 0.97:
        return ["wrap", path, rng.choice((1, 2, 50, 500, 20_000))]
    return ["twice", path[0], _value(old, content, rng)]


def _value(old: Any, content: Any, rng: random.Random) -> Any:
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
        return rng.choice((rng.choice(TEXTS), _other_text(content, rng), _typed(old, rng)))
    if isinstance(old, list) and old:
        return rng.choice((old[:1], old[1:], old[::-1], old + old, [*old, rng.choice(old)], []))
    return rng.choice(OTHERS)


def _other_text(content: Any, rng: random.Random) -> str:
    found = [text for path in paths(content) if isinstance(text := value_at(content, path), str)]
    return rng.choice([*found, "gpipe", "1f1b", "interleaved", "zb-v", "dualpipe-v", "pipedream", "chimera"])


def _typed(text: str, rng: random.Random) -> str:
    """With one word, or character, changed."""
    return _text_edited(text, _of_text(text, rng))


def _of_text(text: str, rng: random.Random) -> Edit:
    position = rng.randrange(len(text) + 1)
    kind = rng.random()
    if kind < 0.6:
        return ["word", rng.randrange(10**6), rng.choice(WORDS)]
    if kind < 0.75:
        return ["line", rng.randrange(10**6), rng.choice((0, 0, 2, 2, 1000))]
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
    content = _document(text)
    structural = [edit for edit in edits if edit[0] in ("set", "drop", "repeat", "wrap")]
    if structural and content is not None:
        for edit in structural:
            _change(content, edit)
        text = _json(content)
    encoding, changes = "utf-8", []
    for edit in edits:
        if edit[0] == "encode":
            encoding = edit[1]
        elif edit[0] == "bytes":
            changes.append(edit)
        elif edit[0] == "twice":
            head, end, tail = text.rpartition("}")
            text = f"{head}, {json.dumps(edit[1])}: {_json(edit[2])}{end}{tail}"
        elif edit not in structural:
            text = _text_edited(text, edit)
    made = bytearray(text.encode(encoding, errors="surrogatepass" if "utf" in encoding else "replace"))
    for _, position, number in changes:
        if made:
            made[position % len(made)] = number
    return bytes(made)


def _document(text: str) -> Any:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict | list) else None


def _json(content: Any) -> str:
    """Deeper than Python's own writer goes, where an edit asks for it."""
    text = json.dumps(content)
    return re.sub(r'"<deep (\d+)>"', lambda found: "[" * int(found[1]) + "]" * int(found[1]), text)


def _change(content: Any, edit: Edit) -> None:
    name, path, *more = edit
    try:
        inside = value_at(content, path[:-1])
        if name == "set":
            inside[path[-1]] = deepcopy(more[0])  # which later edits may change
        elif name == "drop":
            del inside[path[-1]]
        elif name == "wrap":
            inside[path[-1]] = f"<deep {more[0]}>" if more[0] > 2 else [inside[path[-1]]]
        elif isinstance(inside, list):
            inside[path[-1] : path[-1]] = [inside[path[-1]]] * (more[0] - 1)
        elif isinstance(inside[path[-1]], list):
            inside[path[-1]] = inside[path[-1]] * more[0]
    except (LookupError, TypeError):
        return


def _text_edited(text: str, edit: Edit) -> str:
    name, where, *more = edit
    other = str(more[0]) if more else ""
    if name == "cut":
        return text[: where % (len(text) + 1)]
    if name == "insert":
        position = where % (len(text) + 1)
        return text[:position] + other + text[position:]
    if name == "line":
        lines = text.splitlines(keepends=True)
        if lines and len(line := lines[where % len(lines)]) * more[0] <= LARGEST:
            lines[where % len(lines)] = line * more[0]
        return "".join(lines)
    found = list(_WORD.finditer(text)) if name == "word" else []
    if not found:
        return text
    word = found[where % len(found)]
    return text[: word.start()] + other + text[word.end() :]
